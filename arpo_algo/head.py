"""Log-probabilities and entropies from hidden states, without ``[tokens, vocabulary]`` in memory.

A plain linear head goes through :class:`_LinearHead`: the logits are computed in tiles of some tokens by some of the vocabulary, of which only running sums
are kept (maximum m, s = sum exp(z - m) and so on; a new maximum rescales them), and the backward pass computes the tiles again. With weights p, P of the
softmax at temperature 1 and t, entropy H and gradients a of log P(target), b of H, the gradient of logit j is

    a / t (1[j = target] - P_j) - b p_j (log p_j + H).

It is multiplied into one buffer for the weight and one for the hidden states, so memory beside them does not grow with the number of tokens. Where all logits
fit the bound they are kept instead, which saves one of the four matrix products. Any other head (adapters, hooks, quantised) is called chunk by chunk, and
again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CPU_TILE = 2**20
"""Logits of a tile on a CPU, 4 MiB in float32. A quarter of it is about as fast, four times as much slower, at vocabularies from 2,048 to 49,152."""
LEAST = -1e30
"""Logits below are as good as this one: the exponential of both is 0, and sums over a vocabulary stay finite."""


def head_logprobs(
    head: nn.Module | None, hidden: Tensor, targets: Tensor, *, temperature: float, chunk_elements: int, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at the temperature, and entropy (nats, full vocabulary, temperature 1) before it, both (N,).

    ``hidden`` (N, H) is what the head is applied to, or the logits (N, V) where ``head`` is None; ``targets`` (N,) int64. At most ``chunk_elements`` logits
    exist at once. float32, or float64 for a float64 model. Entropies carry a gradient only with ``entropy_grad``.
    """
    if head is not None and _is_plain(head):
        keep = torch.is_grad_enabled() and len(targets) * _vocabulary(head) <= chunk_elements
        tile = min(chunk_elements, CPU_TILE) if hidden.device.type == "cpu" else chunk_elements
        values: tuple[Tensor, Tensor] = _LinearHead.apply(hidden, head.weight, head.bias, targets, temperature, tile, keep, entropy_grad)  # type: ignore[no-untyped-call]
        return values
    score = partial(_score, head, temperature=temperature, entropy_grad=entropy_grad)
    size = max(1, chunk_elements // (hidden.shape[-1] if head is None else _vocabulary(head)))
    if len(targets) <= size:
        return score(hidden, targets)
    if torch.is_grad_enabled():
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    parts = [score(h, t) for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


class _LinearHead(torch.autograd.Function):
    """``(hidden (N, H), weight (V, H), bias (V,) or None, targets (N,), ...) -> (logprobs, entropies)``, both (N,), in tiles of at most ``tile`` logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, tile: int, keep: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.compute, ctx.temperature, ctx.tile, ctx.entropy_grad = _compute_dtype(hidden), temperature, tile, entropy_grad
        sums = _Sums(targets, temperature, torch.float64 if ctx.compute == torch.float64 else torch.float32)
        tiles = []
        for rows, columns in _tiles(len(hidden), len(weight), tile):
            logits = _logits(hidden[rows], weight, bias, columns, ctx.compute)  # (rows, columns)
            sums.add(logits, rows, columns)
            if keep:
                tiles.append(logits)
        logprobs, entropies = sums.values()
        ctx.save_for_backward(hidden, weight, bias, targets, sums.peak, sums.total, sums.tempered, entropies, *tiles)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, peak, total, tempered, entropies, *tiles = ctx.saved_tensors
        pull = of_logprobs / ctx.temperature
        inputs = (hidden, weight, bias)
        to_hidden, to_weight, to_bias = grads = [
            torch.zeros_like(tensor, dtype=peak.dtype) if needed else None for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        for number, (rows, columns) in enumerate(_tiles(len(hidden), len(weight), ctx.tile)):
            logits = tiles[number] if tiles else _logits(hidden[rows], weight, bias, columns, ctx.compute)
            z = logits.to(peak.dtype) - peak[rows, None]
            del logits
            grad = (z / ctx.temperature if ctx.temperature != 1 else z).exp().mul_((-pull / tempered)[rows, None])
            place, inside = _places(targets[rows], columns)
            grad.scatter_add_(1, place, torch.where(inside, pull[rows], 0.0)[:, None])
            if ctx.entropy_grad:
                grad -= z.exp().mul_(z.add_((entropies - total.log())[rows, None])).mul_((of_entropies / total)[rows, None])
            if to_bias is not None:
                to_bias[columns] += grad.sum(0)
            grad = grad.to(ctx.compute)
            if to_hidden is not None:
                _add_product(to_hidden[rows], grad, weight[columns].to(ctx.compute))
            if to_weight is not None:
                _add_product(to_weight[columns], grad.T, hidden[rows].to(ctx.compute))
        return (*(None if grad is None else grad.to(tensor.dtype) for tensor, grad in zip(inputs, grads, strict=True)), None, None, None, None, None)


class _Sums:
    """Running sums over the vocabulary, one of each for every token."""

    def __init__(self, targets: Tensor, temperature: float, dtype: torch.dtype) -> None:
        self.targets, self.temperature = targets, temperature
        self.peak = torch.full(targets.shape, torch.finfo(dtype).min, dtype=dtype, device=targets.device)
        """The greatest logit m; below, z stands for a logit minus m."""
        self.total, self.weighted = torch.zeros_like(self.peak), torch.zeros_like(self.peak)
        """Sums of exp(z) and of z exp(z)."""
        self.tempered = self.total if temperature == 1 else torch.zeros_like(self.peak)
        """Sum of exp(z / temperature)."""
        self.chosen = torch.full_like(self.peak, math.nan)
        """The target's logit; stays NaN for a target outside the vocabulary."""

    def add(self, logits: Tensor, rows: slice, columns: slice) -> None:
        """Take in a tile of logits."""
        z = logits.to(self.peak.dtype)
        place, inside = _places(self.targets[rows], columns)
        self.chosen[rows] = torch.where(inside, z.gather(1, place).squeeze(1), self.chosen[rows])
        peak = torch.maximum(self.peak[rows], z.amax(1))
        down = self.peak[rows] - peak  # what the sums so far are rescaled by
        self.peak[rows] = peak
        z = z - peak[:, None]
        e = z.exp()
        self.weighted[rows] = down.exp() * (self.weighted[rows] + down * self.total[rows])
        self.total[rows] = down.exp() * self.total[rows] + e.sum(1)
        self.weighted[rows] += e.mul_(z).sum(1)
        if self.temperature != 1:
            self.tempered[rows] = (down / self.temperature).exp() * self.tempered[rows] + z.div_(self.temperature).exp_().sum(1)

    def values(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets at the temperature, and entropies."""
        return (self.chosen - self.peak) / self.temperature - self.tempered.log(), self.total.log() - self.weighted / self.total


def _tiles(tokens: int, vocabulary: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of tiles of at most ``elements`` logits, close to squares, which read the weight and the hidden states least often."""
    height = max(1, min(tokens, math.isqrt(elements)))
    width = max(1, min(vocabulary, elements // height))
    height = max(height, min(tokens, elements // width))  # a narrow vocabulary leaves room
    for top in range(0, tokens, height):
        for left in range(0, vocabulary, width):
            yield slice(top, min(top + height, tokens)), slice(left, min(left + width, vocabulary))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, dtype: torch.dtype) -> Tensor:
    """All finite: a bias of -inf rules a token out, but 0 * -inf is nan."""
    if bias is None:
        return F.linear(hidden.to(dtype), weight[columns].to(dtype))
    return F.linear(hidden.to(dtype), weight[columns].to(dtype), bias[columns].to(dtype)).clamp_min_(max(LEAST, torch.finfo(dtype).min))


def _places(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Where in a tile the targets (R,) are, (R, 1), and which of them are in it at all, (R,): without waiting for the device."""
    inside = (targets >= columns.start) & (targets < columns.stop)
    return (targets - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], inside


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; products of 16-bit numbers add up in the type of ``total``."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The type of matrix products: that of autocast, which leaves float64 alone, or else of the hidden states."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64 else hidden.dtype


def _is_plain(head: nn.Module) -> bool:
    """Whether calling the head is one matrix product with its whole weight and nothing more: no subclass, replaced forward or hook, no sharded weight."""
    bare = type(head) is nn.Linear and "forward" not in vars(head) and not head._forward_hooks and not head._forward_pre_hooks
    return bare and type(head.weight) in (nn.Parameter, Tensor)


def _score(head: nn.Module | None, hidden: Tensor, targets: Tensor, *, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) of ``targets`` (N,) from ``hidden`` (N, H), or from logits (N, V) without a head."""
    logits = hidden if head is None else head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = (logits / temperature).log_softmax(-1) if temperature != 1 else logits.log_softmax(-1)  # (N, V)
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        log_p1 = logits.log_softmax(-1) if temperature != 1 else log_p
        entropies = -(log_p1.exp() * log_p1.clamp_min(LEAST)).sum(-1)  # 0 * -inf is nan
    return logprobs, entropies


def _vocabulary(head: nn.Module) -> int:
    weight: Any = head.weight
    return int(weight.shape[0])
