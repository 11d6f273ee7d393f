"""The update step with packed token trees beside padded rows, at five sharing ratios and three sizes of model.

    python benchmarks/performance/update.py [--short] [--out part.json]
    python benchmarks/performance/update.py --device cuda --sizes 135M 500M --peak-tflops 989

Timed is all of ``Learner.update`` on one group: choice of the layout, packing, forward, backward, clipping and AdamW (at a learning rate that changes
nothing), in CPU seconds of one thread; on a GPU in seconds of the clock, in bfloat16, where the update also takes the old log-probabilities by one more
forward. Groups are those of ``shapes.py``: 16 trajectories (135M: 8, with gradient checkpointing) of a prompt of 200 tokens and four turns of 150.

The packed tree is computed with the learner's default settings, cut at its trunk where it is larger than a micro-batch. It stands beside the best of several
micro-batch sizes of padded rows, which a first trial on some of the rows finds, and beside all rows as one padded batch. ``auto`` is the learner with its
default settings, beside the fastest of these (and not run again where it does the same as one of them). The repetitions of a ratio run in one process of
their own, taking turns. Peak memory is what the process grows by during an update, less the gradients; it is measured in a process of its own, which gives
back every large block of memory as soon as it is free.

Where the rest goes: body and head are timed apart, on rows too short to have any attention to speak of; what a step takes beyond them for its tokens and
targets is attention, packing, the optimiser, and what large tensors lose by not fitting into the caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from comparison import Comparison, Part, compared, show, write
from measure import RETURNING, Cost, alone, apart, cost
from shapes import SIZES, Shape, group, model

from arpo_algo.packing import Rows

RATIOS = (1.0, 1.5, 2.0, 3.0, 5.0)
BARS = {("20M", 2.0): 1.3, ("20M", 3.0): 1.8, ("20M", 5.0): 2.8, ("135M", 2.0): 1.7, ("135M", 3.0): 2.2, ("135M", 5.0): 4.0}
AUTO_BAR, MEMORY_BAR, MEMORY_RATIO = 0.95, 1 / 0.65, 3.0
WHOLE = 10**9
"""Tokens of a micro-batch that holds everything."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all steps of one size."""

    size: str
    rows: int
    repeats: int
    ratios: Sequence[float]
    device: str = "cpu"
    checkpointing: bool = False


Kind = Literal["tree", "tree, one piece", "padded", "padded, one batch", "packed", "auto"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All repetitions at one ratio, and what the trajectories share."""

    ratio: float
    costs: Mapping[Kind, Sequence[Cost]]
    tokens: float
    """Tokens of all trajectories / unique ones."""
    predicted: float
    """Gain of the tree by :class:`arpo_algo.layouts.Costs`."""
    totals: Mapping[str, tuple[int, int]]
    """Tokens and targets of ``tree`` and of ``padded``."""
    flops: float
    """Of the tree's update."""
    auto_layout: str
    returning: Mapping[Kind, Cost] = field(default_factory=dict)
    """Of one update in a process that gives memory back; empty where that was not measured."""

    def seconds(self, kind: Kind) -> list[float]:
        return [each.cpu_s for each in self.costs[kind]]


# -- one process -----------------------------------------------------------------------------------------------------------------------------------------


def step_cost(lm: Any, rows: Rows, setting: Setting, **config: Any) -> Cost:
    """Cost of one update by a new learner. Its optimiser has taken a step before, so that its moments are there."""
    from arpo_algo.learner import Learner, LearnerConfig

    gpu = {} if setting.device == "cpu" else {"dtype": "bfloat16", "recompute_old_logprobs": True}
    learner = Learner(lm, LearnerConfig(lr=1e-9, gradient_checkpointing=setting.checkpointing, **gpu, **config))
    learner.update(group(Shape(rows=2, prompt=4, turns=1, answer=9), vocabulary=SIZES[setting.size].vocabulary))
    spent = (cost if setting.device == "cpu" else _gpu_cost)(lambda: learner.update(rows))
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in lm.parameters()) / 1e6
    return replace(spent, peak_mb=spent.peak_mb - gradients)


def _gpu_cost(function: Callable[[], object]) -> Cost:
    """Seconds of the clock and the growth of the GPU's memory."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    function()
    torch.cuda.synchronize()
    return Cost(time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 1e6)


def best_padded(setting: Setting) -> tuple[int, dict[str, float]]:
    """Tokens of the fastest micro-batch of padded rows, and the seconds of all that were tried, on a quarter of the rows (on a GPU on all)."""
    lm = model(SIZES[setting.size]).to(setting.device)
    rows = _group(setting, MEMORY_RATIO)
    if setting.device == "cpu":
        rows = rows.select(np.arange(max(4, setting.rows // 4)))
    longest = int(rows.lengths.max())
    tried = {longest * count: 0.0 for count in ((1, 2, 4) if setting.device == "cpu" else (2, 4, 8, 16))}
    for tokens in tried:
        tried[tokens] = min(step_cost(lm, rows, setting, layout="padded", micro_batch_tokens=tokens).cpu_s for _ in range(2))
    return min(tried, key=lambda tokens: tried[tokens]), {f"{tokens:,} tokens": seconds for tokens, seconds in tried.items()}


def at_ratio(setting: Setting, ratio: float, padded_tokens: int) -> Measured:
    """All kinds of step at one ratio, in turns."""
    from arpo_algo.layouts import Costs
    from arpo_algo.learner import Learner, LearnerConfig

    lm = model(SIZES[setting.size]).to(setting.device)
    rows = _group(setting, ratio)
    default = Learner(lm, LearnerConfig())
    auto_layout, shared = default.layouts.choose(rows)
    settings: dict[Kind, dict[str, Any]] = {
        "tree": {"layout": "tree"},
        "padded": {"layout": "padded", "micro_batch_tokens": padded_tokens},
    }
    longest = int(rows.lengths.max())
    padded_alike = default.config.micro_batch_tokens // longest == padded_tokens // longest  # as many rows in a micro-batch
    same: Kind | None = "tree" if auto_layout == "tree" else "padded" if padded_alike else None
    if same is None:
        settings["auto"] = {"layout": "auto"}
    if ratio < 2:  # where rows share little, it may be better to pack them as they are
        settings["packed"] = {"layout": "packed"}
    costs: dict[Kind, list[Cost]] = {kind: [] for kind in settings}
    if setting.device != "cpu":
        step_cost(lm, rows, setting, **settings["tree"])  # kernels are compiled and loaded at their first use
    for repeat in range(setting.repeats):
        for kind in list(settings)[:: -1 if repeat % 2 else 1]:
            costs[kind].append(step_cost(lm, rows, setting, **settings[kind]))
    counted = Costs.of(lm)
    forward = 0.0 if setting.device == "cpu" else 1.0  # the old log-probabilities of bfloat16: one more forward
    flops = counted.token * shared.unique_tokens * (1 + forward / 3) + counted.pair * shared.unique_pairs * (1 + forward * 2 / 7)
    return Measured(
        ratio=ratio,
        costs=costs if same is None else costs | {"auto": costs[same]},
        tokens=shared.tokens,
        predicted=counted.gain(shared),
        totals={"tree": (shared.unique_tokens, shared.unique_targets), "padded": (int(rows.lengths.sum()), int(rows.mask.sum()))},
        flops=flops + counted.target * shared.unique_targets * (1 + forward / 4),
        auto_layout=auto_layout if same is None else f"{auto_layout}, the same",
    )


def at_peak(setting: Setting, ratio: float, padded_tokens: int) -> dict[Kind, Cost]:
    """Cost of one update of each kind whose memory is of interest."""
    lm = model(SIZES[setting.size]).to(setting.device)
    rows = _group(setting, ratio)
    settings: dict[Kind, dict[str, Any]] = {
        "tree": {"layout": "tree"},
        "tree, one piece": {"layout": "tree", "micro_batch_tokens": WHOLE},
        "padded": {"layout": "padded", "micro_batch_tokens": padded_tokens},
        "padded, one batch": {"layout": "padded", "micro_batch_tokens": WHOLE},
    }
    return {kind: step_cost(lm, rows, setting, **config) for kind, config in settings.items()}


def rates(setting: Setting) -> tuple[float, float]:
    """Seconds of the body for a token and of the head for a target, from rows of about 32 tokens with many and with few targets."""
    lm = model(SIZES[setting.size]).to(setting.device)
    rows = group(Shape(rows=64, prompt=8, turns=1, answer=24), vocabulary=SIZES[setting.size].vocabulary)
    first = rows.mask & (rows.mask.cumsum(1) == 1)
    few = replace(rows, mask=first, weights=np.where(first, rows.weights, 0).astype(np.float32))
    tokens, many = int(rows.lengths.sum()), int(rows.mask.sum())
    seconds = [
        min(step_cost(lm, batch, setting, layout="padded", micro_batch_tokens=WHOLE).cpu_s for _ in range(4 if setting.size == "1M" else 1))
        for batch in (rows, few)
    ]
    head = (seconds[0] - seconds[1]) / (many - len(rows))
    return (seconds[1] - head * len(rows)) / tokens, head


def _group(setting: Setting, ratio: float) -> Rows:
    return group(Shape(rows=setting.rows, ratio=ratio), vocabulary=SIZES[setting.size].vocabulary)


# -- what it says ----------------------------------------------------------------------------------------------------------------------------------------


def comparisons(setting: Setting, measured: Measured, padded_tokens: int) -> list[Comparison]:
    """The lines of one ratio."""
    name = f"{setting.size}, sharing {measured.ratio:g}"
    unit = "CPU s" if setting.device == "cpu" else "s"
    tree, padded, auto = (measured.seconds(kind) for kind in ("tree", "padded", "auto"))
    bar = BARS.get((setting.size, measured.ratio)) if setting.device == "cpu" else None
    lines = [compared(name, tree, padded, peer=f"padded rows, best micro-batch ({padded_tokens:,})", unit=unit, limit=measured.tokens, bar=bar)]
    if once := measured.returning:
        whole = [[once[kind].cpu_s] for kind in ("tree", "padded, one batch")]
        lines.append(compared(name, *whole, peer="one padded batch", unit=unit, note="no limit: large tensors are slower"))
        tree_mb, piece_mb, batches_mb, batch_mb = ([each.peak_mb] for each in once.values())
        lines.append(
            compared(f"{name}, peak memory", tree_mb, batch_mb, peer="one padded batch", unit="MB", bar=MEMORY_BAR, note="above weights and gradients")
        )
        lines.append(compared(f"{name}, in one piece, peak memory", piece_mb, batch_mb, peer="one padded batch", unit="MB"))
        lines.append(compared(f"{name}, peak memory", tree_mb, batches_mb, peer=f"padded rows, best micro-batch ({padded_tokens:,})", unit="MB"))
    alternatives = [tree, padded, *([measured.seconds("packed")] if "packed" in measured.costs else [])]
    best = min(alternatives, key=statistics.median)
    lines.append(compared(f"{name}, auto", auto, best, peer="the fastest of these", unit=unit, bar=AUTO_BAR, note=f"took {measured.auto_layout}"))
    return lines


def gain_line(setting: Setting, measured: Measured, body: float, head: float) -> dict[str, Any]:
    """Predicted beside measured gain, and where both sides' seconds go."""
    line: dict[str, Any] = {"model": setting.size, "sharing": measured.tokens, "predicted gain": measured.predicted, "measured gain": _gain(measured)}
    kinds: tuple[Kind, ...] = ("tree", "padded")
    for kind in kinds:
        seconds = statistics.median(measured.seconds(kind))
        tokens, targets = measured.totals[kind]
        parts = {"body": body * tokens, "head": head * targets}
        line |= {f"{kind} s": seconds} | {f"{kind} {name}": value for name, value in (parts | {"rest": seconds - sum(parts.values())}).items()}
    return line


def _gain(measured: Measured) -> float:
    return statistics.median(p / t for p, t in zip(measured.seconds("padded"), measured.seconds("tree"), strict=True))


def break_even(points: Sequence[tuple[float, float]]) -> float | None:
    """The predicted gain at which the measured one is 1, between two of the ``(predicted, measured)`` points; None where they do not cross 1."""
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in pairwise(ordered):
        if y0 < 1 <= y1:
            return x0 + (x1 - x0) * (1 - y0) / (y1 - y0)
    return None


def run(settings: Sequence[Setting], peak_tflops: float | None, command: str) -> Part:
    """All sizes; prints each line as soon as it is there."""
    lines: list[Comparison] = []
    gains: list[dict[str, Any]] = []
    evens: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    chip: list[dict[str, Any]] = []
    trials = {}
    for setting in settings:
        padded_tokens, trials[setting.size] = alone(best_padded, setting)
        body, head = alone(rates, setting)
        all_measured: list[Measured] = []
        for ratio in setting.ratios:
            measured: Measured = alone(at_ratio, setting, ratio, padded_tokens)
            if ratio == MEMORY_RATIO:
                measured = replace(measured, returning=apart(at_peak, setting, ratio, padded_tokens, environment=RETURNING))
                memory.append({"model": setting.size, "sharing": measured.tokens} | {f"{kind} MB": each.peak_mb for kind, each in measured.returning.items()})
            all_measured.append(measured)
            lines += comparisons(setting, measured, padded_tokens)
            gains.append(gain_line(setting, measured, body, head))
            if peak_tflops is not None:
                achieved = measured.flops / statistics.median(measured.seconds("tree")) / 1e12
                chip.append({"model": setting.size, "sharing": measured.tokens, "TFLOP/s": achieved, "fraction of the peak": achieved / peak_tflops})
            print(f"{setting.size}, ratio {ratio:g}: gain {_gain(measured):.2f}, predicted {measured.predicted:.2f}, limit {measured.tokens:.2f}", flush=True)
        points = [(each.predicted, _gain(each)) for each in all_measured]
        even = break_even(points)
        evens.append({"model": setting.size, "predicted gain": f"not between {min(points)[0]:.2f} and {max(points)[0]:.2f}" if even is None else even})
    figures: dict[str, list[dict[str, Any]]] = {
        "Where the seconds go (body and head by rate, the rest by difference), packed tree and then padded rows in their best micro-batch": gains,
        "Predicted gain at which the tree is as fast as padded rows": evens,
        "Peak memory above weights and gradients": memory,
    }
    if chip:
        figures[f"Floating-point operations of the tree's update, of a peak of {peak_tflops:g} TFLOP/s"] = chip
    about = {"settings": [asdict(setting) for setting in settings], "micro-batches of padded rows, seconds for some of the rows": trials}
    return Part(title="1. Update step: packed trees beside padded rows", command=command, about=about, rows=lines, figures=figures)


def planned(arguments: argparse.Namespace) -> list[Setting]:
    """The sizes and ratios of this run."""
    return [_planned(arguments, size) for size in arguments.sizes or (("1M", "20M") if arguments.short else ("1M", "20M", "135M"))]


def _planned(arguments: argparse.Namespace, size: str) -> Setting:
    short: bool = arguments.short
    setting = Setting(size=size, rows=16, repeats=2 if short else 3, ratios=RATIOS, device=arguments.device)
    if arguments.device != "cpu":
        setting = replace(setting, repeats=2 if short else 5)
    elif size in ("135M", "500M"):
        setting = replace(setting, rows=8, repeats=1, checkpointing=True)
    elif short and size == "20M":
        setting = replace(setting, repeats=1, ratios=RATIOS[1:])
    return replace(setting, ratios=tuple(arguments.ratios)) if arguments.ratios else setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="1M and 20M, few repetitions: about four minutes")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="models to measure, instead of the usual ones")
    parser.add_argument("--ratios", nargs="+", type=float, help="sharing ratios to measure, instead of the usual ones")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--peak-tflops", type=float, help="of the chip in the dtype of the update, to say which fraction of it the update reaches")
    parser.add_argument("--out", type=Path, help="write the part to this JSON file")
    arguments = parser.parse_args()
    chosen = [word for word in sys.argv[1:] if word != "--out" and word != str(arguments.out)]
    command = " ".join(["python benchmarks/performance/update.py", *chosen])
    part = run(planned(arguments), arguments.peak_tflops, command)
    show(part)
    write(arguments.out, part)


if __name__ == "__main__":
    main()
