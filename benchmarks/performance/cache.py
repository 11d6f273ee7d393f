"""What sharing keys and values saves in sampling: one group that decodes, gets tool results and branches, four ways.

    python benchmarks/performance/cache.py [--short] [--out cache.json]

- *shared*: the group's prompt is held once and read once a step; branches copy the turns between the prompt and the branch point. Here however short the
  prompt is; the policy shares it from ``decoding.MIN_BASE`` tokens on, and the shortest prompt shows why.
- *private*: every trajectory holds all of its tokens in a row of its own, copied from the row that has them; nothing is computed twice.
- *repeated*: as private, through the model's own attention, which repeats keys and values for the query heads that share them.
- *recomputed*: as private, and a trajectory computes its whole context anew at each of its turns.

The script of a group: half of its trajectories start from the prompt and the other half branches from their first tool results; two turns a trajectory, a tool
result between them. Every way decodes the same number of tokens; CPU time is that of joins and steps (the model's forwards included, sampling not).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison import Comparison, Part, compared, show, write
from shapes import SIZES, Size, model

from arpo_algo.policies.decoding import CachedDecoder, DecodingStats

MIN_BASE = {"shared": 1, "private": 1 << 40, "recomputed": 1 << 40, "repeated": None}
PEERS = {
    "shared": "",
    "private": "private copies",
    "repeated": "private copies, the model's own attention",
    "recomputed": "everything recomputed",
}
MEMORY = 16 << 30
"""Bytes for keys and values: enough that nothing is evicted."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One group."""

    prompt: int
    rows: int = 16
    turn: int = 8
    """Sampled tokens a turn."""
    result: int = 16
    """Tokens of a tool result."""


@dataclass(frozen=True)
class Outcome:
    """What one group took."""

    seconds: float
    """CPU seconds."""
    bytes: int
    """Of keys and values, at the end."""
    stats: DecodingStats
    decoded: int
    unique: int
    """Tokens of the tree."""


class Sampling:
    """One group under way."""

    def __init__(self, network: Any, script: Script, way: str, vocabulary: int) -> None:
        self.script, self.way, self.rng = script, way, np.random.default_rng(0)
        self.vocabulary = vocabulary
        self.stats = DecodingStats()
        self.decoder = CachedDecoder(network, self.stats, max_bytes=MEMORY, min_base=MIN_BASE[way])
        self.bytes = self.decoded = 0

    def ids(self, n: int) -> np.ndarray:
        return self.rng.integers(0, self.vocabulary, n)

    def turn(self, contexts: list[np.ndarray]) -> list[np.ndarray]:
        """The contexts with a sampled turn behind each."""
        if self.way == "recomputed":
            self.decoder.clear()
            contexts = [np.concatenate(([i], context[1:])) for i, context in enumerate(contexts)]  # no two begin alike, so that nobody finds anything
        order = self.decoder.join(contexts, [0] * len(contexts))
        slots = [[contexts[i]] for i in order]
        for _ in range(self.script.turn):
            logits = self.decoder.step()
            assert torch.isfinite(logits[:, 0]).all()
            sampled = self.ids(len(contexts))
            self.decoder.append(sampled)
            for slot, token in zip(slots, sampled, strict=True):
                slot.append(np.array([token]))
        self.decoded += self.script.turn * len(contexts)
        self.bytes = max(self.bytes, self.decoder.cache.bytes)
        for slot in reversed(range(len(contexts))):
            self.decoder.leave(slot)
        done = {i: np.concatenate(slot) for i, slot in zip(order, slots, strict=True)}
        return [done[i] for i in range(len(contexts))]


def sampled(network: Any, script: Script, way: str, vocabulary: int) -> Outcome:
    """One group sampled in one of the four ways."""
    group = Sampling(network, script, way, vocabulary)
    initial = script.rows // 2
    gc.collect()
    with torch.inference_mode():
        start = time.process_time()
        prompt = group.ids(script.prompt)
        first = group.turn([prompt] * initial)
        points = [np.concatenate((context, group.ids(script.result))) for context in first]
        group.turn(points + points)  # each goes on, and a branch beside it
        seconds = time.process_time() - start
    unique = script.prompt + initial * (script.turn + script.result) + script.rows * script.turn
    return Outcome(seconds, group.bytes, group.stats, group.decoded, unique)


def measured(network: Any, size: Size, script: Script, pairs: int, peers: Sequence[str]) -> tuple[list[Comparison], list[dict[str, Any]]]:
    seen: dict[str, list[Outcome]] = {way: [] for way in peers}
    for number in range(pairs):
        for way in reversed(peers) if number % 2 else peers:
            if way != "recomputed" or number == 0:
                seen[way].append(sampled(network, script, way, size.vocabulary))
    name = f"prompt {script.prompt}, {script.rows} rows"
    ours = seen["shared"]
    rows = [
        compared(
            f"{name}: a token",
            [_ms(outcome) for outcome in ours[: len(seen[way])]],
            [_ms(outcome) for outcome in seen[way]],
            peer=PEERS[way],
            unit="CPU ms",
            note=f"computed {ours[0].stats.computed_tokens} / {seen[way][0].stats.computed_tokens} tokens",
        )
        for way in peers[1:]
    ]
    mib = [[outcome.bytes / 2**20 for outcome in seen[way]] for way in ("shared", "private")]
    rows.append(compared(f"{name}: keys and values", *mib, peer="private copies", unit="MiB"))
    computed, unique = ours[0].stats.computed_tokens, ours[0].unique
    note = f"of the unique ones {script.rows} are the last of their path, which nothing needs: {computed / (unique - script.rows):.3f} times the others"
    rows.append(compared(f"{name}: tokens computed", [computed], [unique], peer="unique tokens of the tree", unit="tokens", bar=1 / 1.02, note=note))
    figures = [
        {
            "prompt": script.prompt,
            "way": way,
            "computed": outcome.stats.computed_tokens,
            "unique": outcome.unique,
            "computed/unique": outcome.stats.computed_tokens / outcome.unique,
            "padding": outcome.stats.padding_tokens,
            "MiB": outcome.bytes / 2**20,
        }
        for way, (outcome, *_) in seen.items()
    ]
    return rows, figures


def _ms(outcome: Outcome) -> float:
    return 1000 * outcome.seconds / outcome.decoded


def step_times(network: Any, size: Size, script: Script) -> list[dict[str, Any]]:
    """CPU milliseconds of what a group does again and again."""
    lines = []
    for way in ("shared", "private", "repeated"):
        group = Sampling(network, script, way, size.vocabulary)
        with torch.inference_mode():
            prompt = group.ids(script.prompt)
            join = _cpu_ms(lambda group=group, prompt=prompt: group.decoder.join([prompt], [0]))
            copy = _cpu_ms(lambda group=group, prompt=prompt: group.decoder.join([prompt] * (script.rows - 1), [0] * (script.rows - 1))) / (script.rows - 1)
            steps = []
            for _ in range(4):
                steps.append(_cpu_ms(group.decoder.step))
                group.decoder.append(group.ids(script.rows))
        line = {"prompt": script.prompt, "way": way, "prefill ms": join, "ms for another row": copy, "step ms": float(np.median(steps[1:]))}
        lines.append(line)
    return lines


def _cpu_ms(function: Any) -> float:
    start = time.process_time()
    function()
    return 1000 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the 20M model and two pairs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, pairs = ("20M", 2) if arguments.short else ("135M", 3)
    size = SIZES[name]
    network = model(size).eval()
    rows: list[Comparison] = []
    tokens: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for prompt in (64, 512, 1500):
        script = Script(prompt=prompt)
        peers = [way for way in PEERS if way != "recomputed" or prompt < 1000 or not arguments.short]
        made, lines = measured(network, size, script, pairs, peers)
        rows += [replace(row, name=f"{name}, {row.name}") for row in made]
        tokens += lines
        steps += step_times(network, size, script)
    part = Part(
        title="Sampling: shared keys and values beside private and recomputed ones",
        command="python benchmarks/performance/cache.py" + (" --short" if arguments.short else ""),
        about={"model": name, "threads": 1, "seed": 0, "turn": Script(prompt=1).turn, "result": Script(prompt=1).result, "dtype": "float32"},
        rows=rows,
        figures={"tokens through the model, first repetition": tokens, "one row, another row, one decode step of 16 rows": steps},
        missing=["everything recomputed with a prompt of 1500: left to the full form"] if arguments.short else [],
    )
    show(part)
    write(arguments.out, part)


if __name__ == "__main__":
    main()
