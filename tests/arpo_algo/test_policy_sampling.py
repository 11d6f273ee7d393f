"""Sampling: numbers worked by hand, the ends of the range of draws, the random numbers themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from arpo_algo.policies.sampling import sample, seed_key, uniforms

LN2 = math.log(2)
QUARTERS = torch.tensor([0.5, 0.25, 0.25]).log()  # (V,)


def draw(logits: torch.Tensor, u: float = 0.0, temperature: float = 1.0, top_p: float = 1.0) -> tuple[int, float, float]:
    ids, logprobs, entropies = sample(logits[None], np.array([u]), np.array([temperature]), np.array([top_p]))
    return int(ids[0]), float(logprobs[0]), float(entropies[0])


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7499, 1), (0.7501, 2), (1 - 2**-53, 2)])
def test_inverse_cdf_in_id_order(u: float, token: int) -> None:
    got, logprob, entropy = draw(QUARTERS, u)
    assert got == token
    assert logprob == pytest.approx(-LN2 if token == 0 else -2 * LN2, abs=1e-7)
    assert entropy == pytest.approx(0.5 * LN2 + 2 * 0.25 * 2 * LN2, abs=1e-7)  # 1.5 ln 2


def test_an_id_of_probability_zero_is_never_drawn_and_adds_no_entropy() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for u, token in ((0.0, 1), (0.4999, 1), (0.5001, 3), (1 - 2**-53, 3)):
        assert draw(logits, u)[0] == token
    assert draw(logits)[1:] == pytest.approx((-LN2, LN2))


def test_temperature_changes_the_logprob_and_not_the_entropy() -> None:
    # p^(1/2) = .70711, .5, .5: sum 1.70711
    token, logprob, entropy = draw(QUARTERS, 0.42, temperature=2.0)
    assert token == 1 and logprob == pytest.approx(math.log(0.5 / (math.sqrt(0.5) + 1)), abs=1e-7)  # 0.41421 of the mass lies before id 1
    assert entropy == pytest.approx(1.5 * LN2, abs=1e-7)


def test_top_p_renormalises_and_keeps_lower_ids_among_equals() -> None:
    # 0.6 needs the 0.5 and one of the two quarters: the lower id. Mass kept: 0.75
    assert draw(QUARTERS, 0.9999, top_p=0.6)[:2] == (1, pytest.approx(math.log(0.25 / 0.75), abs=1e-7))
    assert draw(QUARTERS, 0.0, top_p=0.6)[1] == pytest.approx(math.log(0.5 / 0.75), abs=1e-7)
    assert draw(QUARTERS, 0.9999, top_p=0.5)[:2] == (0, pytest.approx(0.0, abs=1e-7))  # the mass of id 0 reaches 0.5 alone
    assert draw(QUARTERS, 0.9999, top_p=1e-9)[0] == 0
    assert draw(QUARTERS, 0.9999, top_p=0.6)[2] == pytest.approx(1.5 * LN2, abs=1e-7)  # the entropy stays that of all ids


def test_greedy_takes_the_lowest_of_equal_ids_and_reports_the_untempered_logprob() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, -1.0])
    want = 1 - math.log(1 + 2 * math.e + math.exp(-1))
    for top_p in (1.0, 0.1):
        assert draw(logits, 0.99, temperature=0.0, top_p=top_p)[:2] == (1, pytest.approx(want, abs=1e-6))


def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(9, 50)) * 3).float()
    u, temperature, top_p = rng.random(9), np.tile([1.0, 0.0, 0.5], 3), np.repeat([1.0, 0.9, 0.3], 3)
    together = sample(logits, u, temperature, top_p)
    for row in range(9):
        alone = sample(logits[row : row + 1], u[row : row + 1], temperature[row : row + 1], top_p[row : row + 1])
        assert [x[row] for x in together] == [x[0] for x in alone]


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_without_a_distribution_raise(bad: list[float]) -> None:
    with pytest.raises(FloatingPointError, match=r"rows \[1\] of 2"):
        sample(torch.tensor([[0.0, 0.0], bad]), np.zeros(2), np.ones(2), np.ones(2))


def test_narrow_logits_are_read_as_float32() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = logits[0].double().softmax(0)
    assert draw(logits[0])[2] == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


def test_uniforms_are_the_published_splitmix64_stream() -> None:
    # First outputs of SplitMix64 from state 0.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    got = uniforms(np.zeros(3, np.uint64), np.arange(3, dtype=np.uint64))
    assert got.tolist() == [(word >> 11) * 2.0**-53 for word in words]


def test_uniforms_look_uniform_over_neighbouring_seeds_and_positions() -> None:
    keys = np.array([seed_key(seed) for seed in range(300)], np.uint64)
    u = uniforms(np.repeat(keys, 300), np.tile(np.arange(300, dtype=np.uint64), 300)).reshape(300, 300)
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 160  # chi-square, 99 degrees of freedom: mean 99, sd 14
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):  # next seed, next position
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015  # sd 0.0033


def test_every_word_of_a_seed_counts() -> None:
    seeds = [0, 1, -1, 2**63, 2**64, 2**64 + 1, 2**128, -(2**100), 5, -5]
    assert len({seed_key(seed) for seed in seeds}) == len(seeds)
    assert all(0 <= seed_key(seed) < 2**64 for seed in seeds)
