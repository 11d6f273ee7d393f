"""Objectives and estimators against numbers worked by hand: ratios past both clips with both signs of the advantage, unequal lengths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from arpo_algo.losses import cispo, clipped_surrogate, gspo, kl_k1, kl_k2, kl_k3, truncated_importance_weights

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def row(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def from_ratios(*ratios: float) -> tuple[Tensor, Tensor]:
    """Current and old log-probabilities with these ratios; old is not 0, so that a swap of the two shows."""
    old = row(*(-1.0 - 0.1 * i for i in range(len(ratios))))
    logprobs = (old + row(*ratios).log()).detach().requires_grad_()
    return logprobs, old


def test_clipped_surrogate_past_both_clips_with_both_signs():
    #            r    A    min(r A, clip(r, .8, 1.3) A)                 gradient d/dlogp = r A where not clipped
    cases = [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 2.6, 0.0),  # above, A > 0: clipped high
        (0.5, 2.0, 1.0, 1.0),  # below, A > 0: the minimum is the unclipped one
        (1.5, -2.0, -3.0, -3.0),  # above, A < 0: unclipped
        (0.5, -2.0, -1.6, 0.0),  # below, A < 0: clipped low
        (1.0, 0.0, 0.0, 0.0),
    ]
    ratios, advantages, values, gradients = zip(*cases, strict=True)
    logprobs, old = from_ratios(*ratios)
    objective = clipped_surrogate(logprobs, old, row(*advantages), **CLIP)
    assert objective.per_token[0].tolist() == pytest.approx(values)
    assert objective.clipped_low[0].tolist() == [False, False, False, False, True, False]
    assert objective.clipped_high[0].tolist() == [False, True, False, False, False, False]
    objective.per_token.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx(gradients)


def test_dual_clip_bounds_negative_advantages_only():
    logprobs, old = from_ratios(10.0, 10.0, 2.0)
    objective = clipped_surrogate(logprobs, old, row(-1.0, 1.0, -1.0), **CLIP, dual_clip=3.0)
    assert objective.per_token[0].tolist() == pytest.approx([-3.0, 1.3, -2.0])
    assert objective.clipped_high[0].tolist() == [True, True, False]
    objective.per_token.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -2.0])
    with pytest.raises(ValueError, match="greater than 1, got 1"):
        clipped_surrogate(logprobs, old, row(-1.0, 1.0, -1.0), **CLIP, dual_clip=1.0)


def test_gspo_has_one_ratio_a_row_and_ignores_what_is_masked():
    # Row 0: log-ratios .1 and .3 on two tokens: s = exp(.2). Row 1: one token, log-ratio -.4: s = exp(-.4). Masked entries would change both means.
    logprobs = torch.tensor([[5.0, -0.9, -0.7], [5.0, -1.4, 7.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    advantages = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    objective = gspo(logprobs, old, advantages, mask, clip_low=0.9, clip_high=0.9)
    assert objective.per_token[mask].tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(-0.4)])
    weights = torch.tensor([[0.0, 0.25, 0.25], [0.0, 0.5, 0.0]], dtype=torch.float64)  # mean over rows of the mean over tokens
    (weights * objective.per_token).sum().backward()
    # The sequence form: d/dlogp_t of (1/2) s_i A = (1/2) s_i / |y_i|.
    assert logprobs.grad[mask].tolist() == pytest.approx([math.exp(0.2) / 4, math.exp(0.2) / 4, math.exp(-0.4) / 2])
    assert logprobs.grad[~mask].tolist() == [0, 0, 0]


def test_gspo_clips_whole_rows():
    logprobs, old = from_ratios(3.0, 1.0)  # s = sqrt 3, past 1.3 although the second token's own ratio is 1
    objective = gspo(logprobs, old, row(1.0, 1.0), torch.ones(1, 2, dtype=torch.bool), **CLIP)
    assert objective.per_token[0].tolist() == pytest.approx([1.3, 1.3])
    assert objective.clipped_high.all()


def test_cispo_clips_the_coefficient_and_silences_no_token():
    logprobs, old = from_ratios(1.5, 0.5, 1.0, 1.5)
    objective = cispo(logprobs, old, row(2.0, 2.0, 2.0, -2.0), **CLIP)
    objective.per_token.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([2.6, 1.6, 2.0, -2.6])
    assert objective.clipped_high[0].tolist() == [True, False, False, True]
    assert objective.clipped_low[0].tolist() == [False, True, False, False]


def test_kl_estimators_by_hand():
    # p = 1/2, q = 1/4: log p/q = ln 2; k3 = q/p - 1 + ln 2 = -1/2 + ln 2
    logprobs, ref = row(math.log(0.5)), row(math.log(0.25))
    assert kl_k1(logprobs, ref).item() == pytest.approx(math.log(2))
    assert kl_k2(logprobs, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(logprobs, ref).item() == pytest.approx(math.log(2) - 0.5)
    assert kl_k1(ref, logprobs).item() < 0 < kl_k3(ref, logprobs).item()


def test_kl_estimators_have_the_right_mean_and_gradient():
    """Summed exactly over a vocabulary of four: the value of k1 and k3, the gradient of k2, and the vanishing gradient of k1."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    p = log_p.exp().detach()
    exact = (log_p.exp() * (log_p - ref)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kl in (kl_k1, kl_k3):
        assert (p * kl(log_p, ref)).sum().item() == pytest.approx(exact.item())
    gradients = {kl: torch.autograd.grad((p * kl(log_p, ref)).sum(), logits, retain_graph=True)[0] for kl in (kl_k1, kl_k2)}
    torch.testing.assert_close(gradients[kl_k2], exact_gradient)
    torch.testing.assert_close(gradients[kl_k1], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("kl", [kl_k1, kl_k2, kl_k3])
def test_kl_of_equal_policies_is_exactly_zero(kl):
    logprobs = torch.randn(3, 5)
    assert (kl(logprobs, logprobs.clone()) == 0).all()


def test_truncated_importance_weights():
    old, engine = row(-1.0, -1.0, -1.0, grad=True), row(-1.0 - math.log(1.5), -1.0 + math.log(2), -9.0)
    weights = truncated_importance_weights(old, engine, cap=2.0)
    assert weights[0].tolist() == pytest.approx([1.5, 0.5, 2.0])
    assert not weights.requires_grad
    with pytest.raises(ValueError, match="cap must be greater than 0, got 0"):
        truncated_importance_weights(old, engine, cap=0)


def test_past_the_clip_soft_and_hard_differ_by_one_and_a_half_sixteenths() -> None:
    """A token shared by trajectories with A = 1, 1, -1; four tokens each, G = 4: weight 1/16. Ratio 1.5, clip 0.2.

    soft: both A = 1 are clipped (no gradient); A = -1 takes min(-1.5, -1.2) = -1.5, whose gradient in log p is r A = -1.5: in all -1.5/16.
    hard: each owner gets the mean A = 1/3, which is clipped: 0.
    """
    coefficients = []
    for advantages in ([1.0, 1.0, -1.0], [1 / 3, 1 / 3, 1 / 3]):
        logprob = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
        rows = logprob.expand(3, 1)
        old = torch.full((3, 1), -math.log(1.5), dtype=torch.float64)
        a = torch.tensor(advantages, dtype=torch.float64)[:, None]
        objective = clipped_surrogate(rows, old, a, torch.ones(3, 1, dtype=torch.bool), clip_low=0.2, clip_high=0.2)
        (objective.per_token / 16).sum().backward()
        assert logprob.grad is not None
        coefficients.append(logprob.grad.item())
    assert coefficients == pytest.approx([-1.5 / 16, 0.0])
