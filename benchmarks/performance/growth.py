"""How time and memory of the packed update grow with the number of trajectories, of turns, of tokens in a tool's result, and of words in the vocabulary.

    python benchmarks/performance/growth.py [--short] [--out part.json]

One group of ``shapes.py`` with half of its tokens shared, a model of 2 layers of width 64, the tree in one piece; one quantity is varied at a time. Timed is
all of ``Learner.update`` in CPU seconds of one thread, the least of some repetitions; peak memory is what the process grows by during an update, less the
gradients. The fitted exponent is the slope over logarithms against unique tokens, or against the vocabulary where that is what grows. Beside it stands that
of the floating-point operations (:class:`arpo_algo.layouts.Costs`): attention is quadratic in the length of a path, so exponents of longer paths lie above 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import Part, show, write
from measure import alone, cost, exponent
from shapes import Shape, Size, group, model

BASE = Shape(rows=8, prompt=100, turns=4, sampled=50, result=100, answer=60, ratio=2.0)
SIZE = Size(vocabulary=1_000, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)
AXES: dict[str, tuple[int, ...]] = {
    "trajectories M": (8, 16, 32, 64),
    "turns": (2, 4, 8, 16),
    "result length": (100, 400, 1_600, 4_000),
    "vocabulary": (1_000, 8_000, 32_000, 151_936),
}
FIELDS = {"trajectories M": "rows", "turns": "turns", "result length": "result"}


def case(axis: str, value: int) -> tuple[Shape, Size]:
    """The group and the model where one quantity has another value."""
    return (BASE, replace(SIZE, vocabulary=value)) if axis == "vocabulary" else (replace(BASE, **{FIELDS[axis]: value}), SIZE)


def measured(axis: str, repeats: int) -> list[dict[str, Any]]:
    """A line for each value of the quantity, smallest first."""
    from arpo_algo.layouts import Costs
    from arpo_algo.learner import Learner, LearnerConfig
    from arpo_algo.token_tree import sharing

    lines = []
    for value in AXES[axis]:
        shape, size = case(axis, value)
        lm, rows = model(size), group(shape, vocabulary=size.vocabulary)
        learner = Learner(lm, LearnerConfig(lr=1e-9, layout="tree", micro_batch_tokens=10**9))
        learner.update(group(BASE, vocabulary=size.vocabulary))  # the optimiser's moments are there afterwards
        spent = [cost(lambda learner=learner, rows=rows: learner.update(rows)) for _ in range(repeats)]
        shared, costs = sharing(rows.token_ids, rows.lengths, rows.mask), Costs.of(lm)
        lines.append(
            {
                axis: value,
                "unique tokens": shared.unique_tokens,
                "sharing": shared.tokens,
                "CPU s": min(each.cpu_s for each in spent),
                "peak MB": max(each.peak_mb for each in spent) - sum(4e-6 * parameter.numel() for parameter in lm.parameters()),
                "GFLOP": 1e-9 * (costs.token * shared.unique_tokens + costs.pair * shared.unique_pairs + costs.target * shared.unique_targets),
            }
        )
    return lines


def fitted(axis: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The exponents of one quantity."""
    against = "vocabulary" if axis == "vocabulary" else "unique tokens"
    sizes = [line[against] for line in lines]
    exponents = {
        name: exponent(sizes, [line[column] for line in lines]) for name, column in (("time", "CPU s"), ("operations", "GFLOP"), ("memory", "peak MB"))
    }
    return {"grows": axis, "from": lines[0][axis], "to": lines[-1][axis], "against": against, **exponents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two repetitions instead of five: about two minutes")
    parser.add_argument("--out", type=Path, help="write the part to this JSON file")
    arguments = parser.parse_args()
    repeats = 2 if arguments.short else 5
    figures = {axis: alone(measured, axis, repeats) for axis in AXES}
    part = Part(
        title="5. Cost of the packed update as it grows",
        command="python benchmarks/performance/growth.py" + (" --short" if arguments.short else ""),
        about={"base": str(BASE), "model": str(SIZE), "repeats": repeats},
        rows=(),
        figures={
            "Fitted exponents": [fitted(axis, lines) for axis, lines in figures.items()],
            **{f"Growth with {axis}": lines for axis, lines in figures.items()},
        },
    )
    show(part)
    write(arguments.out, part)


if __name__ == "__main__":
    main()
