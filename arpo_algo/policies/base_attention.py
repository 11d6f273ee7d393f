"""Attention of rows whose first tokens are shared: keys that many rows have in common are read once a step, not once a row.

A *base* is a run of tokens at the start of several sequences, held once. The queries of all its rows see all of its keys, so they are one rectangle without a
causal mask: (heads, queries of all rows) x (heads, keys of the base). What a row holds beyond its base is attended as usual, and the two parts are merged by
their log-sum-exp (arXiv:2205.14135, section 3.1)::

              base 0           base 1        own tokens
    row 0   [###########]                  [##    ]
    row 1   [###########]                  [####  ]
    row 2                   [########]     [###   ]
    row 3                                  [######]      no base

Queries of the heads that share a key head stand side by side, so keys and values are never repeated for them either.

The numbers of a row depend, to the last bit, on what the row holds and not on who shares it: the kernel takes queries in multiples of four (CPU matrix kernels
treat a remainder apart), keys in multiples of 16, and where a sequence is cut into base and own tokens is for the caller to decide from the sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "arpo_bases"
_KEYS = 256
"""Most own keys of one kernel call. From 384 on the CPU matrix product adds in another order, and a row would feel the length of its neighbours."""
_VECTOR = 64
"""Elementwise CPU kernels compute full vectors with another exp than the remainder; padded to a multiple of this there is no remainder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRows:
    """A base and the rows of one forward that stand on it."""

    keys: list[Tensor]
    """A layer: (1, key heads, length, head_dim). The length is a multiple of 16."""
    values: list[Tensor]
    hidden: Tensor | None
    """(1, 1, 1, length), additive: the lowest number for the padding of the length, None where there is none."""
    rows: Tensor
    """(n,) int64, padded by repeating rows so that rows times queries is a multiple of four."""


@dataclass(slots=True)
class BasePlan:
    """What the attention of every layer needs beside the mask of the own tokens."""

    bases: list[BaseRows]
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, own: Tensor, groups: int) -> Tensor:
        """(rows, 1, queries, keys) repeated for the ``groups`` query heads of a key head; once for all layers."""
        if groups == 1 or own.shape[2] == 1:
            return own
        if groups not in self._masks:
            self._masks[groups] = own.repeat(1, 1, groups, 1)
        return self._masks[groups]


@contextmanager
def base_attention(model: nn.Module) -> Iterator[None]:
    """Inside, the model's attention expects a ``base_plan`` among its arguments.

    Raises ``RuntimeError`` where a forward in another thread has switched the attention of the same config object meanwhile: the numbers would be wrong.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
        if before == _NAME or config._attn_implementation != _NAME:
            raise RuntimeError("two threads ran models of one config object at once; give each a config of its own (copy.deepcopy)")
    finally:
        config._attn_implementation = before


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    base_plan: BasePlan | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """query (rows, H, queries, d); key and value (rows, H_kv, own tokens, d); returns (rows, queries, H, d)."""
    beyond = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if base_plan is None or beyond:
        raise ValueError(f"expected a plan of the bases and plain softmax attention, got plan {base_plan} and {beyond}")
    rows, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(rows, key.shape[1], groups * queries, width)
    out, lse = _own(query, key, value, base_plan.mask(attention_mask, groups), scaling)
    layer: Any = module.layer_idx
    for base in base_plan.bases:
        n = len(base.rows)
        side_by_side = query[base.rows].transpose(0, 1).reshape(1, key.shape[1], -1, width)
        part, part_lse = _flash(side_by_side, base.keys[layer], base.values[layer], base.hidden, scaling)
        part = part.reshape(key.shape[1], n, -1, width).transpose(0, 1)
        part_lse = part_lse.reshape(key.shape[1], n, -1).transpose(0, 1)
        out[base.rows] = _merged(out[base.rows], lse[base.rows], part, part_lse)[0]
    return out.reshape(rows, heads, queries, width).transpose(1, 2), None


def _own(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention over the rows' own tokens and its log-sum-exp, a run of keys at a time: where a row has none of them, the merge changes no bit."""
    total: tuple[Tensor, Tensor] | None = None
    for start in range(0, key.shape[2], _KEYS):
        run = slice(start, start + _KEYS)
        part = _flash(query, key[:, :, run], value[:, :, run], mask[..., run], scale)
        total = part if total is None else _merged(*total, *part)
    assert total is not None, "a forward feeds at least one token"
    return total


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Softmax attention (..., queries, d) and the log-sum-exp of its scores (..., queries)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return out, lse


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both, and its log-sum-exp."""
    ours, theirs = (nn.functional.pad(x.reshape(-1), (0, -x.numel() % _VECTOR)) for x in (lse, part_lse))
    weight = (theirs - ours).sigmoid()[: lse.numel()].view(lse.shape)[..., None]
    both = torch.logaddexp(ours, theirs)[: lse.numel()].view(lse.shape)
    return (out * (1 - weight) + part * weight).to(out.dtype), both
