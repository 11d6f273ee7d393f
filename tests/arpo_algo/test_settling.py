"""Decisions that estimated entropies settle, and those that they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import Turn, Writer, check_tree, sample_one, wanderer
from hypothesis import given
from hypothesis import strategies as st

from arpo_algo.branching import (
    Allocation,
    AuthorsBranching,
    BranchingStrategy,
    BranchPoint,
    EntropyBranching,
    LowEntropyBranching,
    NoBranching,
    RandomBranching,
    TopEntropyBranching,
    UniformBranching,
    UnsettledBranching,
)
from arpo_algo.entropy import EntropyBounds, Window
from arpo_algo.metrics import rollout_metrics
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.settling import settled

EXACT = Window(values=(0.5,))


def about(value: float, low: float, high: float) -> Window:
    """One token whose entropy is estimated."""
    return Window(values=(value,), bounds=EntropyBounds(lower=(low,), upper=(high,), covered=(0.9,)))


def point(after: Window, initial: Window = EXACT, before: Window = EXACT, trajectory: int = 0) -> BranchPoint:
    return BranchPoint(
        node=2,
        trajectory=trajectory,
        depth=1,
        initial=initial.values,
        after=after.values,
        before=before.values,
        initial_bounds=initial.bounds,
        after_bounds=after.bounds,
        before_bounds=before.bounds,
        vocab_size=100,
    )


def sure(strategy: BranchingStrategy, points: Sequence[BranchPoint], budget: int = 100) -> list[bool]:
    def allocate(points: Sequence[BranchPoint]) -> list[Allocation]:
        return strategy.allocate(points, budget, np.random.default_rng(0))

    return settled(points, allocate(points), allocate)


# -- thresholds -----------------------------------------------------------------------------------------------------------------------------------------


def test_a_threshold_is_settled_when_both_ends_are_on_one_side_of_it() -> None:
    """With alpha = tau the paper's rule is that the entropy rises above the initial 0.5."""
    points = [point(about(0.8, 0.6, 1.0)), point(about(0.8, 0.4, 1.0)), point(about(0.2, 0.1, 0.4)), point(about(0.2, 0.1, 0.6)), point(Window(values=(0.8,)))]
    assert sure(EntropyBranching(), points) == [True, False, True, False, True]
    assert sure(LowEntropyBranching(), points) == [True, False, True, False, True]


def test_the_threshold_is_strict_at_the_end_of_the_bounds_too() -> None:
    assert sure(EntropyBranching(), [point(about(0.8, 0.5, 1.0))]) == [False]  # at 0.5 nothing rises: no branch there
    assert sure(EntropyBranching(), [point(about(0.2, 0.1, 0.5))]) == [True]


def test_both_windows_have_their_say() -> None:
    assert sure(EntropyBranching(), [point(Window(values=(0.8,)), initial=about(0.5, 0.3, 0.9))]) == [False]
    assert sure(EntropyBranching(), [point(Window(values=(1.0,)), initial=about(0.5, 0.3, 0.9))]) == [True]
    assert sure(EntropyBranching(), [point(about(1.0, 0.8, 1.2), initial=about(0.5, 0.3, 0.9))]) == [False]  # 0.8 against 0.9


def test_means_of_windows_have_means_as_ends() -> None:
    """After: mean of (0.2..0.6, exactly 0.9) is 0.55 to 0.75, above 0.5 at both ends though one token alone is not."""
    window = Window(values=(0.4, 0.9), bounds=EntropyBounds(lower=(0.2, 0.9), upper=(0.6, 0.9), covered=(0.8, 1.0)))
    assert sure(EntropyBranching(), [point(window)]) == [True]


def test_a_tight_budget_makes_a_ranking_of_a_threshold() -> None:
    points = [point(about(0.8, 0.6, 1.0)), point(about(0.9, 0.7, 1.1)), point(about(3.0, 2.0, 4.0))]
    assert sure(EntropyBranching(), points, budget=100) == [True, True, True]
    assert sure(EntropyBranching(), points, budget=2) == [False, False, True]  # the first two could change places
    assert sure(EntropyBranching(), points, budget=0) == [True, True, True]


# -- rankings -------------------------------------------------------------------------------------------------------------------------------------------


def test_a_ranking_is_settled_where_the_order_against_the_first_not_served_cannot_flip() -> None:
    points = [point(about(1.0, 0.9, 1.1)), point(about(0.8, 0.7, 0.85)), point(about(0.7, 0.5, 0.8)), point(about(0.2, 0.1, 0.3))]
    assert sure(TopEntropyBranching(), points, budget=2) == [True, False, False, True]
    assert sure(TopEntropyBranching(), points, budget=1) == [True, True, True, True]
    assert sure(TopEntropyBranching(), points, budget=3) == [True, True, True, True]  # the last is far below
    assert sure(TopEntropyBranching(), points, budget=4) == [True, True, True, True]


def test_an_initial_window_that_points_share_cancels_out_of_their_ranking() -> None:
    shared, other = about(0.5, 0.0, 2.0), about(0.4, 0.0, 2.0)
    points = [point(about(1.0, 0.9, 1.1), shared), point(about(0.7, 0.6, 0.8), shared, trajectory=1)]
    assert sure(TopEntropyBranching(), points, budget=1) == [True, True]
    points[1] = point(about(0.7, 0.6, 0.8), other, trajectory=1)
    assert sure(TopEntropyBranching(), points, budget=1) == [False, False]


@given(
    intervals=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)).map(sorted), min_size=1, max_size=5),
    budget=st.integers(0, 5),
    z=st.integers(1, 2),
    tau=st.integers(0, 10),
    data=st.data(),
)
def test_settled_decisions_hold_and_open_ones_can_change(intervals: list[list[int]], budget: int, z: int, tau: int, data: st.DataObject) -> None:
    """Against true entropies at all combinations of the ends of their bounds."""
    unlike = [1e-6 * i for i in range(len(intervals))]  # equal windows would be one state
    points = [
        point(about(mid / 10 + e, low / 10 + e, high / 10 + e), trajectory=i) for i, ((low, mid, high), e) in enumerate(zip(intervals, unlike, strict=True))
    ]
    strategy = data.draw(st.sampled_from([EntropyBranching(alpha=tau / 10, beta=1.0, tau=0.5, children=z), TopEntropyBranching(children=z)]))
    got = strategy.allocate(points, budget, np.random.default_rng(0))
    seen: list[set[int]] = [{allocation.children} for allocation in got]
    for corner in range(2 ** len(points)):
        moved = [replace(p, after=p.windows[1].greatest if corner >> i & 1 else p.windows[1].least) for i, p in enumerate(points)]
        for i, allocation in enumerate(strategy.allocate(moved, budget, np.random.default_rng(0))):
            seen[i].add(allocation.children)
    assert sure(strategy, points, budget) == [len(children) == 1 for children in seen]


# -- rules blind to entropy, and a user's own ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [UniformBranching(), RandomBranching(rate=0.5), NoBranching()])
def test_rules_blind_to_entropy_are_always_settled(strategy: BranchingStrategy) -> None:
    assert sure(strategy, [point(about(0.5, 0.0, 9.0), trajectory=i) for i in range(20)], budget=5) == [True] * 20


def test_the_authors_rule_looks_at_the_window_before() -> None:
    """u = 0.637 without a change; a draw is left to it at the first call, where the window before *is* the initial one."""
    wide = about(1.0, 0.0, 9.0)
    assert sure(AuthorsBranching(), [point(wide, initial=wide, before=wide)]) == [True]
    assert sure(AuthorsBranching(), [point(wide, before=EXACT)]) == [True]
    assert sure(AuthorsBranching(), [point(EXACT, before=about(1.0, 0.0, 9.0))]) == [False]
    assert sure(AuthorsBranching(), [point(EXACT, before=about(1.0, 0.9, 1.1))]) == [True]


@dataclass
class Own:
    """A user's rule with the one method, and a count of its calls."""

    timing: ClassVar[Any] = "each_round"
    calls: int = 0

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        self.calls += 1
        return [Allocation(int(max(p.after) > 0.9), max(p.after), "own") for p in points]


def test_a_users_own_rule_needs_nothing_more() -> None:
    strategy = Own()
    assert sure(strategy, [point(about(0.8, 0.6, 1.0)), point(about(0.8, 0.6, 0.85))]) == [False, True]
    strategy.calls = 0
    assert sure(strategy, [point(Window(values=(0.8,))), point(EXACT)]) == [True, True]
    assert strategy.calls == 1  # exact entropies: nothing is asked twice


# -- in a rollout ----------------------------------------------------------------------------------------------------------------------------------------


class Estimator(Writer):
    """Reports each entropy H as an estimate in [H - wide, H + wide], and two versions of the weights a turn."""

    wide = 0.3

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        made = await super().generate(prompt_ids, params)
        lower, upper = (tuple(h + sign * self.wide for h in made.entropies) for sign in (-1, 1))
        bounds = EntropyBounds(lower=lower, upper=upper, covered=(0.75,) * len(lower))
        return replace(made, bounds=bounds, versions=[made.version] * (len(lower) - 1) + [made.version + 1])


def rising(context: str, seed: int) -> Turn:
    """0.5 nats, then 0.6 after the first result and 2.0 after the second: the first rise is within the bounds, the second is not."""
    depth = context.count("<")
    return Turn("e1" if depth == 2 else f"t{depth}", (0.5, 0.6, 2.0)[depth])


def test_a_rollout_counts_what_estimates_leave_open() -> None:
    policy = Estimator(rising)
    tree = sample_one(policy, group_size=8, initial=2)
    check_tree(tree, size=8, initial=2, calls=policy.calls)
    by_depth = {depth: [d.settled for d in tree.decisions if d.depth == depth] for depth in (1, 2)}
    assert by_depth == {1: [False] * 2, 2: [True] * 4}
    metrics = rollout_metrics([tree])
    assert metrics["branch/unsettled"] == tree.metadata["unsettled"] == 2
    assert metrics["entropy/mass_covered"] == 0.75
    for node in tree.nodes:
        assert (node.bounds is not None) == node.sampled
        assert node.versions == ([0] * (len(node.token_ids) - 1) + [1] if node.sampled else [])
        assert node.bounds is None or node.bounds.upper == tuple(h + 0.3 for h in node.entropies)


def test_an_open_decision_is_an_error_where_that_is_asked() -> None:
    with pytest.raises(UnsettledBranching, match=r"2 of 2 decisions of EntropyBranching\(.*in \[0.300, 0.900\] nats, the initial one in \[0.200, 0.800\]"):
        sample_one(Estimator(rising), group_size=8, initial=2, unsettled="error")
    narrow = Estimator(rising)
    narrow.wide = 0.04
    assert sample_one(narrow, group_size=8, initial=2, unsettled="error").metadata["unsettled"] == 0
    assert sample_one(Writer(rising), group_size=8, initial=2, unsettled="error").metadata["unsettled"] == 0
    with pytest.raises(ValueError, match="unsettled must be one of count, error, got 'ignore'"):
        sample_one(Writer(rising), unsettled="ignore")


@pytest.mark.parametrize("strategy", [EntropyBranching(), TopEntropyBranching(), RandomBranching(rate=0.6), AuthorsBranching()])
def test_bounds_change_no_decision(strategy: BranchingStrategy) -> None:
    exact, estimated = (sample_one(kind(wanderer()), strategy=strategy, group_size=12, initial=4) for kind in (Writer, Estimator))
    assert exact.metadata["unsettled"] == 0
    assert [replace(d, settled=True) for d in estimated.canonical().decisions] == exact.canonical().decisions
    assert [t.token_ids for t in estimated.trajectories] == [t.token_ids for t in exact.trajectories]
