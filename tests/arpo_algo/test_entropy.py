"""Entropies from the top of a distribution: bounds that hold, an estimate between them, and what they settle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_algo.entropy import EntropyBounds, Floats, estimate_entropies, truncated_entropy


def entropy(p: Floats) -> Floats:
    """-sum p ln p over the last axis."""
    return np.asarray(-(p * np.log(np.where(p > 0, p, 1.0))).sum(-1))


def top(p: Floats, k: int) -> Floats:
    """Log-probabilities of the k most probable ids, in the last axis."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(-np.sort(-p, axis=-1)[..., :k]))


def one(logprobs: Sequence[float], vocab_size: int) -> tuple[float, float, float, float]:
    """Lower bound, estimate, upper bound and mass of one token."""
    (estimate,), bounds = estimate_entropies([logprobs], vocab_size)
    return bounds.lower[0], estimate, bounds.upper[0], bounds.covered[0]


@st.composite
def distributions(draw: st.DrawFn) -> Floats:
    """Weights over thirty powers of ten, some 0, some equal."""
    exponents = draw(st.lists(st.one_of(st.none(), st.floats(-30, 0), st.integers(-3, 0)), min_size=1, max_size=40))
    weights = np.array([0.0 if x is None else 10.0**x for x in exponents])
    return weights / weights.sum() if weights.sum() > 0 else np.ones(len(weights)) / len(weights)


# -- by hand -----------------------------------------------------------------------------------------------------------------------------------------------


def test_numbers_worked_by_hand() -> None:
    """p = (0.5, 0.2) known of 7 ids: S = 0.5 ln 2 + 0.2 ln 5 = 0.346574 + 0.321888 = 0.668461, r = 0.3 over 5 ids, p_K = 0.2."""
    lower, estimate, upper, covered = one([math.log(0.5), math.log(0.2)], 7)
    # L: floor(0.3 / 0.2) = 1 id at 0.2 and one at 0.1: 0.321888 + 0.1 ln 10 = 0.321888 + 0.230259
    assert lower == pytest.approx(0.668461 + 0.552146, abs=2e-6)
    # U: 0.3 ln(5 / 0.3) = 0.3 * 2.813411
    assert upper == pytest.approx(0.668461 + 0.844023, abs=2e-6)
    # G: rho = 0.3 / 0.5 = 0.6; -0.3 ln 0.2 = 0.482831, -ln 0.6 * 0.3 / 0.4 = 0.383119: 0.865950 is above U, which is what 5 ids can hold at most
    assert estimate == upper
    # Of 1,000 ids it lies between: U = S + 0.3 ln(998 / 0.3)
    lower_1000, estimate, upper, _ = one([math.log(0.5), math.log(0.2)], 1000)
    assert (lower_1000, estimate) == pytest.approx((lower, 0.668461 + 0.865950), abs=2e-6)
    assert upper == pytest.approx(0.668461 + 0.3 * math.log(998 / 0.3), abs=2e-6)
    assert covered == pytest.approx(0.7)
    assert truncated_entropy([[math.log(0.5), math.log(0.2)]]) == pytest.approx([0.668461], abs=2e-6)


def test_a_geometric_distribution_is_estimated_exactly() -> None:
    """p_k = (1 - rho) rho^(k-1) has entropy (-ln(1 - rho) - rho ln rho / (1 - rho)), whatever K is."""
    rho = 0.9
    p = (1 - rho) * rho ** np.arange(2000)
    for k in (1, 2, 20):
        assert one(top(p, k), 2000)[1] == pytest.approx(-math.log(1 - rho) - rho / (1 - rho) * math.log(rho), abs=1e-9)


# -- properties --------------------------------------------------------------------------------------------------------------------------------------------


@given(p=distributions(), data=st.data())
def test_the_entropy_lies_in_the_bounds(p: Floats, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(p)))
    lower, estimate, upper, covered = one(top(p, k), len(p))
    assert lower - 1e-9 <= entropy(p) <= upper + 1e-9
    assert lower <= estimate <= upper
    assert -1e-12 <= truncated_entropy([top(p, k)])[0] <= lower + 1e-9
    assert covered == pytest.approx(-np.sort(-p)[:k].sum(), abs=1e-12)


@given(p=distributions())
def test_all_log_probabilities_give_the_exact_entropy(p: Floats) -> None:
    lower, estimate, upper, covered = one(top(p, len(p)), len(p))
    assert lower == estimate == upper == pytest.approx(entropy(p), abs=1e-12)
    assert covered == 1.0


@given(p=distributions())
def test_more_log_probabilities_never_widen_the_bounds(p: Floats) -> None:
    ends = [one(top(p, k), len(p)) for k in range(1, len(p) + 1)]
    for less, more in pairwise(ends):
        assert less[0] <= more[0] + 1e-9
        assert more[2] <= less[2] + 1e-9
        assert less[3] <= more[3] + 1e-12


@given(p=distributions(), data=st.data())
def test_the_bounds_are_reached_by_distributions_with_the_same_top(p: Floats, data: st.DataObject) -> None:
    """Nothing narrower would hold: the tail packed into as few ids as p_K allows, and the tail spread evenly."""
    k = data.draw(st.integers(1, len(p)))
    known = -np.sort(-p)[:k]
    lower, _, upper, covered = one(top(p, k), len(p))
    tail, rest = 1.0 - covered, len(p) - k
    packed = []
    while tail > sum(packed) + 1e-15 and len(packed) < rest:
        packed.append(min(known[-1], tail - sum(packed)))
    assert entropy(np.append(known, packed)) == pytest.approx(lower, abs=1e-9)
    assert entropy(np.append(known, [tail / rest] * rest if rest else [])) == pytest.approx(upper, abs=1e-9)


@given(p=distributions(), data=st.data())
def test_single_precision_moves_the_bounds_by_little(p: Floats, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(p)))
    rounded = top(p, k).astype(np.float32)
    lower, _, upper, _ = one([float(x) for x in rounded], len(p))
    assert lower - 3e-5 <= entropy(p) <= upper + 3e-5  # e ln(V / e) with e = 1e-6


@given(rows=st.lists(distributions(), min_size=1, max_size=5), data=st.data())
def test_tokens_do_not_touch_each_other_and_may_have_unequal_numbers_of_entries_in_any_order(rows: list[Floats], data: st.DataObject) -> None:
    vocab_size = max(map(len, rows))
    padded = [np.append(p, np.zeros(vocab_size - len(p))) for p in rows]
    counts = [data.draw(st.integers(1, vocab_size)) for _ in rows]
    width = max(counts)
    matrix = np.full((len(rows), width), np.nan)
    for row, (p, k) in enumerate(zip(padded, counts, strict=True)):
        matrix[row, data.draw(st.permutations(range(width)))[:k]] = top(p, k)
    estimates, bounds = estimate_entropies(matrix, vocab_size)
    for row, (p, k) in enumerate(zip(padded, counts, strict=True)):
        assert (bounds.lower[row], estimates[row], bounds.upper[row], bounds.covered[row]) == pytest.approx(one(top(p, k), vocab_size), abs=1e-12)
    assert truncated_entropy(matrix) == pytest.approx([truncated_entropy([top(p, k)])[0] for p, k in zip(padded, counts, strict=True)])


# -- rounding and bad input --------------------------------------------------------------------------------------------------------------------------------


def test_mass_that_rounding_makes_more_than_all_of_it() -> None:
    p = np.array([0.7, 0.2, 0.1]) * (1 + 1e-6)
    assert one(top(p, 3), 50_000) == pytest.approx((float(entropy(p / p.sum())),) * 3 + (1.0,), abs=1e-12)


def test_a_last_probability_of_zero_leaves_no_tail() -> None:
    p = np.array([0.5, 0.5 - 1e-6, 0.0])  # a nucleus, or an engine's -9999
    lower, estimate, upper, covered = one(top(p, 3), 50_000)
    assert lower == estimate == upper == pytest.approx(math.log(2), abs=1e-6)
    assert covered == 1.0
    assert one([0.0, -9999.0], 50_000) == (0.0, 0.0, 0.0, 1.0)


def test_one_certain_token_and_a_vocabulary_of_one() -> None:
    assert one([0.0], 50_000) == (0.0, 0.0, 0.0, 1.0)
    assert one([0.0], 1) == (0.0, 0.0, 0.0, 1.0)


def test_no_tokens_have_no_entropies() -> None:
    assert estimate_entropies(np.empty((0, 20)), 100) == ([], EntropyBounds(lower=(), upper=(), covered=()))


@pytest.mark.parametrize(
    ("logprobs", "vocab_size", "message"),
    [
        ([[0.0, 0.0]], 10, "a mass of 2 "),
        ([[math.log(0.5), math.log(0.1)]], 3, r"a mass of 0.6 and leave at most 0.1 to the other ids"),  # V - K ids at p_K cannot hold 0.4
        ([[math.log(0.5), -math.inf]], 100, "a mass of 0.5 and leave at most 0 "),
        ([[-1.0, -2.0, -3.0]], 2, "expected 1 to vocab_size=2 log-probabilities a token, got 3 to 3"),
        ([[-1.0], [math.nan]], 2, "got 0 to 1"),
        ([-1.0, -2.0], 2, r"shape \(tokens, K\), got \(2,\)"),
        ([[math.inf]], 2, "a mass of inf"),
    ],
)
def test_what_is_no_top_of_a_distribution_is_refused(logprobs: Any, vocab_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_entropies(logprobs, vocab_size)


def test_bounds_have_one_entry_a_token() -> None:
    with pytest.raises(ValueError, match="got 1, 2 and 1"):
        EntropyBounds(lower=(0.0,), upper=(0.0, 1.0), covered=(1.0,))
    assert EntropyBounds(lower=(0.0, 1.0), upper=(2.0, 3.0), covered=(0.5, 0.6)).head(1) == EntropyBounds(lower=(0.0,), upper=(2.0,), covered=(0.5,))


# -- what it is for ----------------------------------------------------------------------------------------------------------------------------------------


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, of numbers without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    return float(np.corrcoef(ranks)[0, 1])


def test_the_estimate_orders_states_where_the_truncated_sum_does_not() -> None:
    """States of a language model are peaked, flat, and in between: p_k ~ k^-a for a from 0.6 to 3, some with a few likely ids before such a tail."""
    rng = np.random.default_rng(0)
    vocab_size, k, states = 20_000, 20, []
    for _ in range(300):
        p = np.arange(1, vocab_size + 1, dtype=np.float64) ** -rng.uniform(0.6, 3.0)
        p *= rng.uniform(0.05, 1.0) / p.sum()
        p[rng.integers(0, 5)] += 1.0 - p.sum()
        states.append(p)
    p_T_V = np.array(states)
    true = entropy(p_T_V)
    estimates, bounds = estimate_entropies(top(p_T_V, k), vocab_size)
    truncated = truncated_entropy(top(p_T_V, 10))
    assert (np.array(bounds.lower) <= true + 1e-9).all() and (true <= np.array(bounds.upper) + 1e-9).all()
    by_estimate, by_sum = rank_correlation(estimates, true), rank_correlation(truncated, true)
    assert by_estimate > 0.99  # 0.998
    assert by_sum < 0.5  # 0.37
    # What is nearly certain is known nearly exactly.
    width = np.array(bounds.upper) - np.array(bounds.lower)
    assert width[true < 0.5].max() < 0.2 < width[true > 4].min()
