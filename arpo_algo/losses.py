"""Policy objectives and KL estimators. torch, pure: tensors and scalars in, tensors out.

Every tensor has shape (R, T): R rows, T token positions. ``logprobs`` are those of the policy being trained, ``old_logprobs`` those of the weights that sampled
the tokens, ``ref_logprobs`` those of the frozen reference. The *ratio* is always current over **old**: ``r = exp(logprobs - old_logprobs)``. The reference
appears in the KL term and nowhere else. Entries outside ``mask`` hold 0 in all three and get weight 0 in the sum.

A policy objective is maximised: ``loss = -(weights * objective).sum() + kl_coef * (weights * kl).sum()``, with weights as in :mod:`arpo_algo.packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Objective(NamedTuple):
    """What a policy objective returns, each (R, T)."""

    per_token: Tensor
    """To be maximised; carries the gradient."""
    clipped_low: Tensor
    """bool: the lower clip binds, the token has no gradient (or, for CISPO, a clipped coefficient)."""
    clipped_high: Tensor
    """bool: the upper clip binds."""


class PolicyLoss(Protocol):
    """A policy objective: :func:`clipped_surrogate`, :func:`gspo`, :func:`cispo` or one of your own, passed to the learner.

    It has no gradient in rows whose advantages are all 0: the learner does not compute them.
    """

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Objective: ...


KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""``(logprobs, ref_logprobs) -> KL(policy || ref)`` estimated at each token, (R, T)."""


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Objective:
    """``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` at each token. GRPO, arXiv:2402.03300 eq. 3; ARPO, arXiv:2507.19849 eq. 6.

    ``clip_high > clip_low`` is the "clip-higher" of DAPO, arXiv:2503.14476. ``dual_clip=c`` (c > 1) bounds the objective of tokens with A < 0 from
    below by ``c A``, so that a huge ratio cannot explode (Dual-clip PPO, arXiv:1912.09729); such tokens count as clipped high. ``mask`` is not needed here.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    per_token = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_low = (advantages < 0) & (ratio < low)
    clipped_high = (advantages > 0) & (ratio > high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}")
        beyond = (advantages < 0) & (ratio > dual_clip)
        per_token = torch.where(beyond, dual_clip * advantages, per_token)
        clipped_high = clipped_high | beyond
    return Objective(per_token, clipped_low, clipped_high)


def gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Objective:
    """The clipped surrogate with one length-normalised ratio for each trajectory. GSPO, arXiv:2507.18071 eq. 5 to 7, in the token form of eq. 13 and 14.

    ``s_i = exp(mean_t(logprobs - old_logprobs))`` over the masked-in tokens of row i; at each token ``s_it = sg(s_i) exp(logprobs - sg(logprobs))`` (sg: no
    gradient), which has the value and gradient of the sequence form when a row has one advantage and stays defined when it has several. The paper clips at
    ``clip_low=3e-4, clip_high=4e-4``.
    """
    tokens_R1 = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask, logprobs.detach() - old_logprobs, 0.0)
    log_s_R1 = log_ratio.sum(1, keepdim=True) / tokens_R1
    return clipped_surrogate(log_s_R1 + (logprobs - logprobs.detach()), torch.zeros_like(logprobs), advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None, *, clip_low: float, clip_high: float) -> Objective:
    """``sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs`` at each token. CISPO of MiniMax-M1, arXiv:2506.13585 eq. 4 and 5.

    The clip bounds the coefficient and silences no token. The paper sets no lower bound: ``clip_low=1``. ``mask`` is not needed here.
    """
    ratio = torch.exp(logprobs.detach() - old_logprobs)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    return Objective(ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log q`` at each token: unbiased in value, may be negative. Its gradient has mean 0: a metric, or a term of the reward, not of the loss.

    p is the policy, q the reference. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2`` at each token: biased, never negative; its gradient is in expectation that of KL(p || q). Schulman 2020, as above."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)`` at each token: unbiased, never negative. The estimator of GRPO, arXiv:2402.03300 eq. 4; Schulman 2020, as above."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def truncated_importance_weights(old_logprobs: Tensor, engine_logprobs: Tensor, *, cap: float) -> Tensor:
    """``min(exp(old_logprobs - engine_logprobs), cap)`` at each token, without gradient: corrects for an engine that samples with other numerics.

    ``old_logprobs`` are the learner's own, of the weights that sampled; ``engine_logprobs`` are what the engine reported. Truncation bounds the variance
    (Ionides 2008, "Truncated importance sampling"; IMPALA, arXiv:1802.01561).
    """
    if cap <= 0:
        raise ValueError(f"cap must be greater than 0, got {cap}")
    return torch.exp(old_logprobs - engine_logprobs).clamp(max=cap).detach()
