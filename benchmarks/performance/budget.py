"""What ARPO saves beside GRPO at an equal number of trajectories: tool calls, generated tokens and trained tokens, for every branching strategy.

    python benchmarks/performance/budget.py [--short] [--out part.json]

A scripted policy plays groups of M = 16 through ``sample_groups``, N = 8 of them from the question; the peer is ``NoBranching``, the same script with all 16
from the question. A branch repeats nothing of the path before it: where every path has T calls, one that starts after d of them makes T - d. With B branches
at a mean depth d the calls are therefore 1 - (B / M) (d / T) of GRPO's, and between N / M = 1/2 (all branches after the last call) and 1 (a branch after 0
calls is a fresh trajectory; after the first call it is 1 - 1 / 2T). That equation is checked exactly. Two scripts:

* *fixed*: T = 4 calls a path and 100 tokens a turn, so that the bounds are exact;
* *drawn*: a turn is an answer with probability 1/4 (at most six calls) and has 80 tokens (log-normal, sigma 0.6). What remains of a path then has the same
  distribution wherever it starts, but for the cap, so a branch makes as many further calls as a fresh trajectory does: its path is longer, not cheaper, and
  the bounds do not apply. The saving shows against the tokens that rows would repeat.

Entropies are drawn, independent of everything, so strategies differ by where their rules let branches start and not by what the policy knows. Tokens of
results count for neither side. *Trained* are the unique tokens of the loss, which the packed tree computes once; padded rows repeat them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from comparison import Comparison, Part, compared, show, write
from schedules import Letters

from arpo_algo.branching import (
    AuthorsBranching,
    BranchingStrategy,
    EntropyBranching,
    LowEntropyBranching,
    NoBranching,
    RandomBranching,
    TopEntropyBranching,
    UniformBranching,
)
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.rollout import RolloutConfig, sample_groups
from arpo_algo.token_tree import sharing
from arpo_algo.tree import RolloutTree
from arpo_env.core import ForkableEnv

GROUP, INITIAL = 16, 8
STRATEGIES: tuple[BranchingStrategy, ...] = (
    EntropyBranching(),
    LowEntropyBranching(),
    TopEntropyBranching(),
    UniformBranching(),
    RandomBranching(),
    AuthorsBranching(),
)
RESULT, CALL, ANSWER = "<", "c", "a"
FIRST_ID, IDS = 0x4E00, 20_000
"""Ids of a turn's tokens: so many that two turns never begin alike."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Draws turns."""

    calls: int
    """T: calls of a path at most."""
    answers: float
    """Chance that a turn before that is an answer."""
    tokens: int
    sigma: float
    """Of a log-normal whose median is ``tokens``."""

    def turn(self, seed: int, depth: int) -> tuple[str, float]:
        """Text, one token a letter, and entropy of the turn after ``depth`` results."""
        rng = random.Random(seed)
        length = max(2, round(self.tokens * np.exp(self.sigma * rng.gauss(0.0, 1.0))))
        letters = "".join(chr(FIRST_ID + rng.randrange(IDS)) for _ in range(length - 1))
        return letters + (ANSWER if depth >= self.calls or rng.random() < self.answers else CALL), rng.random()


SCRIPTS = {
    "fixed, 4 calls": Script(calls=4, answers=0.0, tokens=100, sigma=0.0),
    "drawn, 6 calls at most": Script(calls=6, answers=0.25, tokens=80, sigma=0.6),
}


class Policy:
    """Plays a script and counts what it generates."""

    version, context_length, vocab_size = 0, 100_000, FIRST_ID + IDS

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generated = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        text, entropy = self.script.turn(params.seed, prompt_ids.count(ord(RESULT)))
        ids = [ord(letter) for letter in text]
        self.generated += len(ids)
        return Generation(token_ids=ids, logprobs=[-entropy] * len(ids), entropies=[entropy] * len(ids), stop_reason="stop")


class CountedTools(ForkableEnv):
    """A tool whose calls are counted over all copies of the environment."""

    shared: ClassVar[frozenset[str]] = ForkableEnv.shared | {"counts", "action_space", "observation_space"}

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "?", {"messages": [{"role": "user", "content": "?"}]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action.endswith(ANSWER):
            return "", 1.0, True, False, {"stop_reason": "answer"}
        self.counts["calls"] += 1
        return RESULT, 0.0, False, False, {"observation_role": "inline"}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What one batch took."""

    calls: int
    generated: int
    trained: int
    """Unique tokens of the loss."""
    rows: int
    """Tokens of the loss where every trajectory has a row of its own."""
    depths: tuple[int, ...]
    """Results before each branch."""


def spent(script: Script, strategy: BranchingStrategy, seed: int, trees: int) -> Spent:
    """Sample ``trees`` groups and count."""
    tools, policy = CountedTools(), Policy(script)
    config = RolloutConfig(group_size=GROUP, initial=INITIAL, env_workers=0)
    sampled = asyncio.run(sample_groups(tools, policy, Letters(), strategy, config, [None] * trees, seed=seed))
    targets = [_targets(tree) for tree in sampled]
    return Spent(
        calls=tools.counts["calls"],
        generated=policy.generated,
        trained=sum(unique for unique, _ in targets),
        rows=sum(repeated for _, repeated in targets),
        depths=tuple(decision.depth for tree in sampled for decision in tree.decisions for _ in range(decision.children)),
    )


def _targets(tree: RolloutTree) -> tuple[int, int]:
    """Trained tokens of a group, each once, and as its rows repeat them."""
    lengths = np.array([len(trajectory.token_ids) for trajectory in tree.trajectories])
    token_ids, mask = (np.zeros((len(lengths), lengths.max()), dtype=dtype) for dtype in (np.int64, bool))
    for row, trajectory in enumerate(tree.trajectories):
        token_ids[row, : lengths[row]], mask[row, : lengths[row]] = trajectory.token_ids, trajectory.mask
    return sharing(token_ids, lengths, mask).unique_targets, int(mask.sum())


def calls_in_theory(script: Script, depths: Sequence[int], trees: int) -> float:
    """Calls beside GRPO's where every path has T of them: 1 - (B / M) (mean depth / T)."""
    return 1 - sum(depths) / (trees * GROUP * script.calls)


def lines_of(name: str, script: Script, seeds: int, trees: int) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """Comparisons and figures of all strategies under one script."""
    plain = [spent(script, NoBranching(), seed, trees) for seed in range(seeds)]
    rows, figures = [], []
    for strategy in STRATEGIES:
        found = [spent(script, strategy, seed, trees) for seed in range(seeds)]
        title = type(strategy).__name__
        for what in ("calls", "generated", "trained"):
            least = 0 if what == "calls" else 1  # turns of a branch after the last call: its answer
            turns = script.calls + least
            limit = None if script.answers else GROUP * turns / (INITIAL * turns + (GROUP - INITIAL) * least)
            ours, theirs = ([getattr(each, what) for each in side] for side in (found, plain))
            unit = "tool calls" if what == "calls" else f"{what} tokens"
            rows.append(compared(f"{name}: {title}, {unit}", ours, theirs, peer="GRPO", unit=unit, limit=limit))
        depths = [depth for each in found for depth in each.depths]
        figures.append(_figure(title, script, found, plain, depths, seeds * trees))
    return rows, figures


def _figure(title: str, script: Script, found: Sequence[Spent], plain: Sequence[Spent], depths: Sequence[int], trees: int) -> dict[str, Any]:
    """Shares of GRPO over all seeds. Raises ``ValueError`` where the calls are not those of the equation, or leave its bounds."""

    def share(what: str) -> float:
        return sum(getattr(each, what) for each in found) / sum(getattr(each, what) for each in plain)

    line = {"strategy": title, "calls": share("calls"), "generated": share("generated"), "trained": share("trained"), "loss tokens in rows": share("rows")}
    if not script.answers:
        theory = calls_in_theory(script, depths, trees)
        if abs(line["calls"] - theory) > 1e-12 or not INITIAL / GROUP <= line["calls"] <= 1:
            raise ValueError(f"{title}: expected {theory:.4f} of GRPO's calls, between {INITIAL / GROUP} and 1, got {line['calls']:.4f}")
        line["calls in theory"] = theory
    return line | {"branches of 8": len(depths) / trees, "mean depth": float(np.mean(depths)) if depths else float("nan")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="2 seeds of 8 groups in place of 7 of 32")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    seeds, trees = (2, 8) if options.short else (7, 32)
    rows: list[Comparison] = []
    figures: dict[str, Sequence[dict[str, Any]]] = {}
    for name, script in SCRIPTS.items():
        new, lines = lines_of(name, script, seeds, trees)
        rows += new
        figures[f"Shares of GRPO, {name}"] = lines
    found = Part(
        title="Tool calls and tokens of ARPO beside GRPO at equal M",
        command=f"python benchmarks/performance/budget.py{' --short' if options.short else ''}",
        about={"group_size": GROUP, "initial": INITIAL, "seeds": seeds, "groups": trees, "policy": "scripted"},
        rows=rows,
        figures=figures,
    )
    show(found)
    write(options.out, found)


if __name__ == "__main__":
    main()
