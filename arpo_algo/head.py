"""Log-probabilities and entropies from hidden states, a chunk of tokens at a time: ``[tokens, vocabulary]`` exists for one chunk only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def head_logprobs(
    head: nn.Module | None, hidden: Tensor, targets: Tensor, *, temperature: float, chunk_elements: int, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at the temperature, and entropy (nats, full vocabulary, temperature 1) before it, both (N,).

    ``hidden`` (N, H) is what the head is applied to, or the logits (N, V) where ``head`` is None; ``targets`` (N,) int64. At most ``chunk_elements`` logits
    exist at once. float32, or float64 for a float64 model. Entropies carry a gradient only with ``entropy_grad``.
    """
    score = partial(_score, head, temperature=temperature, entropy_grad=entropy_grad)
    vocabulary = hidden.shape[-1] if head is None else _vocabulary(head)
    size = max(1, chunk_elements // vocabulary)
    if len(targets) <= size:
        return score(hidden, targets)
    if torch.is_grad_enabled():
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    parts = [score(h, t) for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _score(head: nn.Module | None, hidden: Tensor, targets: Tensor, *, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) of ``targets`` (N,) from ``hidden`` (N, H), or from logits (N, V) without a head."""
    logits = hidden if head is None else head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = (logits / temperature).log_softmax(-1) if temperature != 1 else logits.log_softmax(-1)  # (N, V)
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        log_p1 = logits.log_softmax(-1) if temperature != 1 else log_p
        entropies = -(log_p1.exp() * log_p1).sum(-1)
    return logprobs, entropies


def _vocabulary(head: nn.Module) -> int:
    weight: Any = head.weight
    return int(weight.shape[0])
