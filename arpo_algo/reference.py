"""The reference of the KL term: the policy as the learner was given it.

A copy of the *trainable* weights, put in place for the forward of the reference. With LoRA that is a copy of the adapter alone, and the KL is 0 at step 0 also
when training starts from a trained adapter, where switching the adapter off would measure the distance to the base model instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from arpo_algo.sharding import is_sharded, part, reshard


@contextmanager
def in_place(weights: Sequence[Tensor], parameters: Sequence[nn.Parameter], root: nn.Module) -> Iterator[None]:
    """Inside, ``parameters`` have the values of ``weights``, and the other way round; afterwards both are as they were, to the bit.

    Leave it before any backward pass: autograd keeps the parameters themselves.
    """
    _exchange(weights, parameters, root)
    try:
        yield
    finally:
        _exchange(weights, parameters, root)


@torch.no_grad()
def _exchange(weights: Sequence[Tensor], parameters: Sequence[nn.Parameter], root: nn.Module) -> None:
    for weight, parameter in zip(weights, parameters, strict=True):
        if is_sharded(parameter):  # the layers gather from this memory, so its contents are exchanged, a tensor at a time
            mine, other = part(parameter), part(weight)
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)
        else:
            parameter.data, weight.data = weight.data, parameter.data
    reshard(root)
