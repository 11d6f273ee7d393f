"""Branching strategies on branch points made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
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
)
from arpo_algo.config import ARPOConfig

EVERY: list[Callable[[int], BranchingStrategy]] = [
    lambda z: EntropyBranching(children=z),
    lambda z: EntropyBranching(children=z, scale="log_vocab"),
    lambda z: LowEntropyBranching(children=z),
    lambda z: TopEntropyBranching(children=z),
    lambda z: UniformBranching(children=z),
    lambda z: RandomBranching(rate=0.6, children=z),
    lambda z: AuthorsBranching(children=z),
    lambda z: NoBranching(),
]


def point(
    initial: float | Sequence[float], after: float | Sequence[float], *, before: Sequence[float] = (), vocab_size: int = 100, trajectory: int = 0
) -> BranchPoint:
    def window(values: float | Sequence[float]) -> tuple[float, ...]:
        return (float(values),) if isinstance(values, (int, float)) else tuple(values)

    return BranchPoint(node=2, trajectory=trajectory, depth=1, initial=window(initial), after=window(after), before=tuple(before), vocab_size=vocab_size)


def allocate(strategy: BranchingStrategy, points: Sequence[BranchPoint], budget: int = 100, seed: int = 0) -> list[Allocation]:
    return strategy.allocate(points, budget, np.random.default_rng(seed))


def children(strategy: BranchingStrategy, points: Sequence[BranchPoint], budget: int = 100, seed: int = 0) -> list[int]:
    return [allocation.children for allocation in allocate(strategy, points, budget, seed)]


# -- the paper's rule ------------------------------------------------------------------------------------------------------------------------------------


def test_the_papers_example_branches() -> None:
    # P = 0.1 + 1 * (0.6 - 0.2) = 0.5 > 0.3
    (allocation,) = allocate(EntropyBranching(alpha=0.1, beta=1.0, tau=0.3), [point(0.2, 0.6)])
    assert allocation.score == pytest.approx(0.5)
    assert (allocation.children, allocation.reason) == (1, "P=0.500 > 0.3")


def test_the_threshold_is_strict() -> None:
    # P = 0.25 + 1 * 0.5 = 0.75 exactly in binary
    assert children(EntropyBranching(alpha=0.25, beta=1.0, tau=0.75), [point(0.5, 1.0)]) == [0]
    assert children(EntropyBranching(alpha=0.25, beta=1.0, tau=0.7499), [point(0.5, 1.0)]) == [1]


@pytest.mark.parametrize("scale", ["mean_nats", "vocab", "log_vocab"])
@given(initial=st.integers(0, 50), after=st.integers(0, 50))
def test_with_alpha_equal_to_tau_the_rule_is_that_entropy_rises(scale: Any, initial: int, after: int) -> None:
    (n,) = children(EntropyBranching(alpha=0.5, beta=0.2, tau=0.5, scale=scale), [point(initial / 10, after / 10)])
    assert n == (1 if after > initial else 0)


def test_scales() -> None:
    seen = point(0.2, 0.6, vocab_size=100)
    assert seen.delta() == seen.delta("mean_nats") == pytest.approx(0.4)
    assert seen.delta("vocab") == pytest.approx(0.004)
    assert seen.delta("log_vocab") == pytest.approx(0.4 / math.log(100))
    # alpha + beta * dH / 100 = 0.104 is not above 0.3
    assert children(EntropyBranching(alpha=0.1, beta=1.0, tau=0.3, scale="vocab"), [seen]) == [0]
    # 0.1 + 0.4 / 4.605 = 0.1869
    (allocation,) = allocate(EntropyBranching(alpha=0.1, beta=1.0, tau=0.18, scale="log_vocab"), [seen])
    assert (allocation.children, round(allocation.score, 4)) == (1, 0.1869)


def test_windows_of_unequal_length_compare_means_not_sums() -> None:
    assert point([0.5] * 20, [0.5] * 5).delta() == 0.0
    # mean(0, 1, 2) - mean(0.25, 0.75) = 1.0 - 0.5
    assert point([0.25, 0.75], [0.0, 1.0, 2.0]).delta() == 0.5


def test_a_turn_without_tokens_has_entropy_zero() -> None:
    assert point([], [0.5]).delta() == 0.5


def test_low_entropy_branching_is_the_mirror_image() -> None:
    points = [point(0.5, 0.9), point(0.5, 0.1), point(0.5, 0.5)]
    assert children(EntropyBranching(), points) == [1, 0, 0]
    assert children(LowEntropyBranching(), points) == [0, 1, 0]
    # 0.5 - 0.2 * (0.1 - 0.5) = 0.58
    assert allocate(LowEntropyBranching(), points)[1].score == pytest.approx(0.58)


def test_a_tight_budget_goes_to_the_highest_scores_not_to_the_first_rows() -> None:
    points = [point(0.0, h, trajectory=i) for i, h in enumerate([0.3, 0.9, 0.1, 0.9, 0.5])]
    given_out = allocate(EntropyBranching(), points, budget=3)
    assert [a.children for a in given_out] == [0, 1, 0, 1, 1]
    assert given_out[0].reason == "P=0.560 > 0.5, budget spent"
    assert children(EntropyBranching(), points, budget=1) == [0, 1, 0, 0, 0]  # equal scores: the earlier trajectory
    assert children(EntropyBranching(), points, budget=0) == [0] * 5


def test_several_children_and_a_budget_that_does_not_divide() -> None:
    points = [point(0.0, 0.3), point(0.0, 0.9), point(0.9, 0.0)]
    assert children(EntropyBranching(children=3), points, budget=5) == [2, 3, 0]
    assert children(EntropyBranching(children=7), points, budget=5) == [0, 5, 0]


# -- the others ------------------------------------------------------------------------------------------------------------------------------------------


def test_top_entropy_ranks_by_the_rise_whatever_the_order_and_the_sign() -> None:
    points = [point(0.5, 0.4), point(0.5, 1.5), point(0.0, 0.9), point(0.5, 0.1)]
    assert TopEntropyBranching.timing == "at_end"
    assert children(TopEntropyBranching(), points, budget=2) == [0, 1, 1, 0]
    assert children(TopEntropyBranching(), points, budget=3) == [1, 1, 1, 0]
    assert [a.reason for a in allocate(TopEntropyBranching(), points, budget=2)] == ["rank 3 of 4", "rank 1 of 4", "rank 2 of 4", "rank 4 of 4"]
    assert children(TopEntropyBranching(children=2), points, budget=3) == [0, 2, 1, 0]


def test_uniform_branching_serves_in_the_order_of_trajectories() -> None:
    points = [point(0.0, h) for h in (0.1, 0.9, 0.5)]
    assert children(UniformBranching(), points) == [1, 1, 1]
    assert children(UniformBranching(), points, budget=2) == [1, 1, 0]
    assert children(UniformBranching(children=2), points, budget=3) == [2, 1, 0]


def test_random_branching_is_reproducible_blind_and_keeps_its_rate() -> None:
    low, high = [point(2.0, 0.0)] * 4000, [point(0.0, 2.0)] * 4000
    strategy = RandomBranching(rate=0.25)
    assert children(strategy, low, 10_000, seed=1) == children(strategy, high, 10_000, seed=1)
    assert children(strategy, low, 10_000, seed=1) != children(strategy, low, 10_000, seed=2)
    # binomial(4000, 0.25): mean 1000, standard deviation 27
    assert 880 < sum(children(strategy, low, 10_000, seed=1)) < 1120
    assert sum(children(RandomBranching(rate=0.0), low)) == 0
    assert children(RandomBranching(rate=1.0), low[:5]) == [1] * 5


def test_the_authors_rule_looks_at_the_turn_before_and_sums() -> None:
    u = float(np.random.default_rng(0).random(1)[0])  # 0.637
    # d = (sum(before) - sum(initial)) / ln 100 = (4 * 2.0 - 2 * 0.5) / 4.605 = 1.520; u - 0.2 d = 0.333 <= 0.5
    seen = point([0.5, 0.5], [0.0], before=[2.0] * 4)
    (allocation,) = allocate(AuthorsBranching(), [seen])
    assert allocation.score == pytest.approx(u - 0.2 * 7.0 / math.log(100))
    assert allocation.children == 1
    # what comes after the observation changes nothing; an equal turn before leaves the bare draw, which is above 0.5
    assert allocate(AuthorsBranching(), [point([0.5, 0.5], [9.0], before=[2.0] * 4)]) == [allocation]
    (first_call,) = allocate(AuthorsBranching(), [point([0.5, 0.5], [9.0], before=[0.5, 0.5])])
    assert (first_call.score, first_call.children) == (pytest.approx(u), 0)


def test_the_authors_rule_clips_and_serves_in_row_order() -> None:
    (allocation,) = allocate(AuthorsBranching(), [point([0.0], [0.0], before=[100.0])])
    assert (allocation.score, allocation.children) == (0.0, 1)
    (allocation,) = allocate(AuthorsBranching(), [point([100.0], [0.0], before=[0.0])])
    assert (allocation.score, allocation.children) == (1.0, 0)
    certain = [point([0.0], [0.0], before=[h]) for h in (50.0, 100.0, 70.0)]
    assert children(AuthorsBranching(), certain, budget=2) == [1, 1, 0]


def test_no_branching_gives_nothing() -> None:
    assert NoBranching.timing == "never"
    assert children(NoBranching(), [point(0.0, 9.0)] * 3) == [0, 0, 0]


@given(
    strategy=st.integers(0, len(EVERY) - 1),
    z=st.integers(1, 5),
    budget=st.integers(0, 20),
    deltas=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5)), max_size=12),
    seed=st.integers(0, 100),
)
def test_nobody_spends_more_than_the_budget(strategy: int, z: int, budget: int, deltas: list[tuple[float, float, float]], seed: int) -> None:
    points = [point(i, a, before=[b], trajectory=n) for n, (i, a, b) in enumerate(deltas)]
    made = EVERY[strategy](z)
    allocations = allocate(made, points, budget, seed)
    assert len(allocations) == len(points)
    assert all(0 <= a.children <= z for a in allocations)
    assert sum(a.children for a in allocations) <= budget
    assert allocations == allocate(made, points, budget, seed)
    # nobody is passed over while the budget lasts
    if any("budget spent" in a.reason for a in allocations):
        assert sum(a.children for a in allocations) == budget


def test_bad_settings_are_refused() -> None:
    for make in (EntropyBranching, LowEntropyBranching, TopEntropyBranching, UniformBranching, RandomBranching, AuthorsBranching):
        with pytest.raises(ValueError, match="children must be at least 1, got 0"):
            make(children=0)
    with pytest.raises(ValueError, match="rate must be in"):
        RandomBranching(rate=1.5)
    scale: Any = "bits"
    for scaled in (EntropyBranching, LowEntropyBranching, TopEntropyBranching):
        with pytest.raises(ValueError, match=r"scale must be one of .*'log_vocab'.* got 'bits'"):
            scaled(scale=scale)


def test_what_is_no_strategy_is_refused_before_anything_is_sampled() -> None:
    class Misspelt(UniformBranching):
        timing: Any = "each round"

    strategy: Any
    for strategy, error, message in (
        (UniformBranching, TypeError, r"must be an object, got the class UniformBranching: write UniformBranching\(\)"),
        ("UniformBranching", TypeError, r"with a method allocate\(points, budget, rng\), got 'UniformBranching'"),
        (Misspelt(), ValueError, r"Misspelt.timing must be one of 'each_round', 'at_end', 'never', got 'each round'"),
    ):
        with pytest.raises(error, match=message):
            ARPOConfig(branching=strategy)
