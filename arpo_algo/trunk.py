"""A tree too large for one forward, cut at branch points, what its pieces share computed once as far as it fits a micro-batch.

The *trunk*, what several bins of leaves share, is computed once and its graph kept. Each bin then computes only its own tokens: they see the trunk's keys and
values, the first of them are predicted from the trunk's hidden states, and the rows read the trunk's log-probabilities. All of these are given to the bins as
leaves of the graph, so the backward pass of a bin ends there and adds its gradients up; one backward pass through the trunk, after the last bin, takes them
on. The gradient is exactly that of the whole tree, at the memory of the trunk and one bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arpo_algo.tree_attention import TrunkKeys


@dataclass(frozen=True, slots=True)
class Trunk:
    """What the bins take from a computed trunk of U tokens of which E are trained."""

    attention: TrunkKeys
    """Keys and values of every layer."""
    hidden: Tensor
    """(U, H) what the head is given, or (U, V) logits."""
    logprobs: Tensor
    """(E,)"""
    entropies: Tensor
    """(E,)"""
    sources: Sequence[Tensor]
    """The tensors of the trunk's graph behind all of the above."""

    @classmethod
    def of(cls, computed: TrunkKeys, hidden: Tensor, logprobs: Tensor, entropies: Tensor) -> Trunk:
        """The leaves for the tensors that the trunk's forward computed."""
        leaves = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (hidden, logprobs, entropies))
        return cls(computed.leaves(), next(leaves), next(leaves), next(leaves), [*computed.tensors(), hidden, logprobs, entropies])

    def backward(self) -> None:
        """Take the gradients that the bins have left into the trunk, whose graph is freed."""
        leaves = [*self.attention.tensors(), self.hidden, self.logprobs, self.entropies]
        if not any(source.requires_grad for source in self.sources):
            return
        pairs = [(source, leaf.grad) for source, leaf in zip(self.sources, leaves, strict=True) if leaf.grad is not None]  # what no bin used has none
        torch.autograd.backward([source for source, _ in pairs], [grad for _, grad in pairs])
