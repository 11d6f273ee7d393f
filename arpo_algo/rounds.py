"""Rounds: which branch points are due for a decision, and what the strategy makes of them.

Round d holds the windows after the d-th observation of every trajectory. It is complete when no live trajectory can add to it, so it does not matter
which tool answered first; its points are put before the strategy in the order of their trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arpo_algo.branching import Allocation, BranchingStrategy, BranchPoint, UnsettledBranching, mean
from arpo_algo.entropy import Window
from arpo_algo.env_worker import Env
from arpo_algo.rollout_config import Unsettled
from arpo_algo.settling import settled
from arpo_algo.tree import Decision


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The state right after an observation, with everything that a child starts from."""

    env: Env | None = None
    """None where no child could start: the budget was spent already, or the environment could not be forked."""
    refused: bool = False
    """The environment could not be forked."""
    node: int
    depth: int
    tools: tuple[str, ...] = ()
    before: Window
    initial_window: Window
    seed_path: tuple[int, ...]
    info: Mapping[str, Any]
    reward: float

    def point(self, trajectory: int, after: Window, vocab_size: int) -> BranchPoint:
        """What the strategy sees of it, once the first tokens ``after`` the observation are there."""
        return BranchPoint(
            node=self.node,
            trajectory=trajectory,
            depth=self.depth,
            tools=self.tools,
            initial=self.initial_window.values,
            after=after.values,
            before=self.before.values,
            initial_bounds=self.initial_window.bounds,
            after_bounds=after.bounds,
            before_bounds=self.before.bounds,
            vocab_size=vocab_size,
        )


class Rounds:
    """The branch points of one group that wait for a decision.

    ``seed``: of the generators that the strategy draws from, a new one for each decision. ``unsettled``: what becomes of a decision that estimated entropies
    leave open: ``count`` takes what the estimates say and notes it, ``error`` raises :class:`UnsettledBranching`.
    """

    def __init__(self, strategy: BranchingStrategy, seed: int, unsettled: Unsettled = "count"):
        self.strategy, self.unsettled = strategy, unsettled
        self.refused = 0
        """Points that the strategy could not be asked about, because their environment could not be forked."""
        self._seeds = np.random.SeedSequence(seed)
        self._waiting: dict[int, list[tuple[Snapshot, BranchPoint]]] = {}

    def add(self, snapshot: Snapshot, point: BranchPoint) -> None:
        self._waiting.setdefault(point.depth, []).append((snapshot, point))

    def due(self, reached: float) -> list[tuple[Snapshot, BranchPoint]]:
        """The points to decide together now, [] for none. ``reached``: the round that every live trajectory has reported; infinity when all ended."""
        if not self._waiting or reached < min(self._waiting):
            return []
        if self.strategy.timing != "at_end":
            return _in_order(self._waiting.pop(min(self._waiting)))
        if reached < math.inf:
            return []
        rounds, self._waiting = sorted(self._waiting.items()), {}
        return [pair for _, points in rounds for pair in _in_order(points)]

    def decide(self, due: Sequence[tuple[Snapshot, BranchPoint]], budget: int) -> list[tuple[Snapshot, Decision]]:
        """What the strategy makes of points that are due. Raises ``ValueError`` when it gives more than the budget, ``UnsettledBranching`` where that is asked.

        A point whose environment could not be forked is left out. With the budget spent nobody can branch and whether a fork was still tried depends on
        the clock, so that then every point counts.
        """
        (seed,) = self._seeds.spawn(1)
        if budget:
            forked = [pair for pair in due if not pair[0].refused]
            self.refused += len(due) - len(forked)
            due = forked
        points = [point for _, point in due]

        def allocate(points: Sequence[BranchPoint]) -> list[Allocation]:
            return self.strategy.allocate(points, budget, np.random.default_rng(seed)) if points else []

        allocations = allocate(points)
        _check(self.strategy, allocations, len(points), budget)
        sure = settled(points, allocations, allocate)
        if self.unsettled == "error" and not all(sure):
            raise UnsettledBranching(_unsettled(self.strategy, points, sure))
        return [(snapshot, decision) for (snapshot, _), decision in zip(due, map(_decision, points, allocations, sure), strict=True)]


def _in_order(points: Sequence[tuple[Snapshot, BranchPoint]]) -> list[tuple[Snapshot, BranchPoint]]:
    return sorted(points, key=lambda pair: pair[1].trajectory)


def _check(strategy: BranchingStrategy, allocations: Sequence[Allocation], points: int, budget: int) -> None:
    if not isinstance(allocations, Sequence) or not all(isinstance(allocation, Allocation) for allocation in allocations):
        raise TypeError(f"{strategy} must return a list of Allocation, got {allocations!r}")
    children = [allocation.children for allocation in allocations]
    if len(children) != points or min(children, default=0) < 0 or sum(children) > budget:
        raise ValueError(f"{strategy} must give one allocation for each of {points} points, at most {budget} children in all; got {children}")


def _unsettled(strategy: BranchingStrategy, points: Sequence[BranchPoint], sure: Sequence[bool]) -> str:
    point = points[sure.index(False)]
    initial, after, _ = (f"[{mean(window.least):.3f}, {mean(window.greatest):.3f}]" for window in point.windows)
    return (
        f"{sure.count(False)} of {len(points)} decisions of {strategy} depend on entropies that are known only within bounds, the first at node {point.node}:"
        f" the mean entropy after the observation lies in {after} nats, the initial one in {initial}. Ask the server for more log-probabilities a token, use a"
        ' policy with exact entropies, or set unsettled="count" to go by the estimates'
    )


def _decision(point: BranchPoint, allocation: Allocation, settled: bool) -> Decision:
    return Decision(
        node=point.node,
        trajectory=point.trajectory,
        depth=point.depth,
        initial_entropy=mean(point.initial),
        entropy=mean(point.after),
        score=allocation.score,
        children=allocation.children,
        reason=allocation.reason,
        settled=settled,
    )
