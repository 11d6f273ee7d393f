"""Exact attention over a packed token tree from dense blocks: no gathered key, no mask larger than a block.

In depth-first order the queries that see a token are contiguous, so the pairs of a tree fall into two kinds of block, each a view of the packed tensors:

- *squares*: ``TILE`` consecutive tokens against themselves, under a mask, all squares in one call whatever the nodes in them;
- *rectangles*: the part of a node that lies before a square, against later queries that all see all of it, without a mask.

Each query lies in one square and as many rectangles as its path has nodes elsewhere. The parts are merged by their log-sum-exp (arXiv:2205.14135, section 3.1).
A sliding window counts depths: rectangles are cut to the runs of queries that the window lets see a key, and masked only where it hides another.

Keys may also come from a trunk, tokens of an earlier pass, by rectangles alone.

On a CPU a block is one call of PyTorch's flash attention, everywhere else plain matrix products, against which the former is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TILE = 128
"""Tokens of a square. From 64 to 128 the time changes by no more than its noise; shorter ones are more calls, longer ones more hidden pairs."""


class Rectangle(NamedTuple):
    """Queries ``first`` .. ``last - 1`` against keys ``start`` .. ``stop - 1``."""

    first: int
    last: int
    start: int
    stop: int
    trunk: bool = False
    """Whether the keys are the trunk's."""
    masked: bool = False
    """Whether the window hides some of the pairs; every query sees at least one key all the same."""


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """Which blocks a tree of U tokens consists of; numpy int64, see :class:`~arpo_algo.token_tree.TokenTree`."""

    depths: np.ndarray
    """(U,)"""
    ends: np.ndarray
    """(U,)"""
    nodes: np.ndarray
    """(N, 3)"""
    trunk_depths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(V,) of the trunk's tokens."""
    trunk_rectangles: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    """(B, 4) start, stop of trunk keys, one path each; first, last of the queries below them."""
    tile: int = TILE
    _cache: dict[Any, Any] = field(default_factory=dict)

    def squares(self) -> list[tuple[int, int, int]]:
        """(first, last, size): tokens first .. last - 1 as squares of one size; what is left over is a square of its own."""
        whole = len(self.ends) // self.tile * self.tile
        return [run for run in ((0, whole, self.tile), (whole, len(self.ends), len(self.ends) - whole)) if run[0] < run[1]]

    def square_masks(self, window: int | None, like: Tensor) -> list[Tensor]:
        """For each of :meth:`squares` (n, 1, size, size) to add to the scores: 0 or -inf. Kept for the other layers."""
        key = (window, like.dtype, like.device)
        if key not in self._cache:
            self._cache[key] = [self._square_mask(run, window).to(like.device, like.dtype) for run in self.squares()]
        masks: list[Tensor] = self._cache[key]
        return masks

    def _square_mask(self, run: tuple[int, int, int], window: int | None) -> Tensor:
        first, last, size = run
        index = np.arange(first, last).reshape(-1, size)
        key, query = index[:, None, :], index[:, :, None]
        hidden = (key > query) | (query >= self.ends[key])
        if window is not None:
            hidden |= self.depths[query] - self.depths[key] >= window
        return torch.zeros(len(index), 1, size, size).masked_fill_(torch.from_numpy(hidden)[:, None], -math.inf)

    def rectangles(self, window: int | None) -> list[Rectangle]:
        """All pairs of a query and a key in no square. Kept for the other layers."""
        if window not in self._cache:
            whole = [*self._rectangles(), *(Rectangle(first, last, start, stop, True) for start, stop, first, last in self.trunk_rectangles.tolist())]
            self._cache[window] = whole if window is None else [part for rectangle in whole for part in self._within(rectangle, window)]
        found: list[Rectangle] = self._cache[window]
        return found

    def _rectangles(self) -> Iterator[Rectangle]:
        total, tile = len(self.ends), self.tile
        for start, stop, end in self.nodes.tolist():
            for edge in range((start // tile + 1) * tile, stop, tile):  # a node longer than a square: its own later queries, square by square
                yield Rectangle(edge, min(edge + tile, end), start, edge)
            after = min(-(-stop // tile) * tile, total)  # where the square of its last token ends
            if after < end:
                yield Rectangle(after, end, start, stop)

    def _within(self, rectangle: Rectangle, window: int) -> Iterator[Rectangle]:
        """The parts of a rectangle that a window leaves. The depths of its keys are consecutive."""
        first, last, start, stop, trunk, _ = rectangle
        lowest = int((self.trunk_depths if trunk else self.depths)[start])
        depths = self.depths[first:last]
        sees = np.where(depths < lowest + window, 2, np.where(depths < lowest + stop - start - 1 + window, 1, 0))  # every key, some, none
        for left, right in pairwise((0, *(np.flatnonzero(np.diff(sees)) + 1).tolist(), len(sees))):
            if sees[left] == 2:
                yield rectangle._replace(first=first + left, last=first + right)
            elif sees[left] == 1:
                for low in range(left, right, 4 * self.tile):  # so that no mask grows with the tree
                    high = min(low + 4 * self.tile, right)
                    unseen = max(int(depths[low:high].min()) - window + 1 - lowest, 0)
                    yield Rectangle(first + low, first + high, start + unseen, stop, trunk, True)

    def mask(self, rectangle: Rectangle, window: int | None, like: Tensor) -> Tensor | None:
        """(1, 1, queries, keys) to add to the scores of a rectangle, made anew for each layer: windows may be long."""
        if window is None or not rectangle.masked:
            return None
        first, last, start, stop, trunk, _ = rectangle
        hidden = self.depths[first:last, None] - (self.trunk_depths if trunk else self.depths)[None, start:stop] >= window
        return like.new_zeros(1, 1, *hidden.shape).masked_fill_(torch.from_numpy(hidden).to(like.device), -math.inf)


class Kernels(NamedTuple):
    """One block of attention, forward and backward; (n, H, queries, d) queries, (n, H_kv, keys, d) keys and values, a mask to add or None, a scale or None."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]]
    """Output and log-sum-exp (n, H, queries) of the scores."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor, Tensor]]
    """Gradients of query, key and value from that of the output, then query, key, value, and output and log-sum-exp over *all* keys of the query."""


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    parts: tuple[Tensor, Tensor] = op(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return parts


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    parts: tuple[Tensor, Tensor, Tensor] = op(grad, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    return parts


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(n, H_kv, H / H_kv, queries, keys) from grouped queries and float keys (n, H_kv, 1, keys, d)."""
    scores = query @ key.mT * scale
    return scores if mask is None else scores + mask[:, :, None]


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """(n, H, queries, ...) as (n, groups, H / groups, queries, ...) in the dtype of sums."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).reshape(tensor.shape[0], groups, -1, *tensor.shape[2:])


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    heads = key.shape[1]
    query, key, value = (_grouped(tensor, heads) for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        scores = _scores(query, key, mask, scale or query.shape[-1] ** -0.5)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ value).flatten(1, 2), lse.flatten(1, 2)


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    heads, scale = key.shape[1], scale or query.shape[-1] ** -0.5
    grad, query, key, value, out, lse = (_grouped(tensor, heads) for tensor in (grad, query, key, value, out, lse))
    with torch.autocast(query.device.type, enabled=False):
        shares = (_scores(query, key, mask, scale) - lse[..., None]).exp()
        grad_scores = shares * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return (grad_scores @ key).flatten(1, 2), (grad_scores.mT @ query).sum(2), (shares.mT @ grad).sum(2)


FLASH = Kernels(_flash_forward, _flash_backward)
PLAIN = Kernels(_plain_forward, _plain_backward)


def path_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TreePlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    trunk: tuple[Tensor, Tensor] | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Attention of queries (1, H, U, d) over keys and values (1, H_kv, U, d) of their paths, as (1, U, H, d); ``scale`` None means 1 / sqrt(d).

    ``window`` hides keys that lie that many or more tokens before the query in its row. ``trunk``: keys and values (1, H_kv, V, d) for the plan's trunk
    rectangles. Sums run in float32 at least.
    """
    if kernels is None:
        kernels = FLASH if query.device.type == "cpu" and query.shape[-1] == value.shape[-1] else PLAIN
    if window is not None and window > max(plan.depths.max(initial=0), plan.trunk_depths.max(initial=0)):
        window = None
    trunk_key, trunk_value = trunk or (key.detach()[:, :, :0], value.detach()[:, :, :0])
    if trunk_key.shape[2] != len(plan.trunk_depths):
        raise ValueError(f"expected {len(plan.trunk_depths)} keys of the trunk, got {trunk_key.shape[2]}")
    tensors = (_dense_rows(tensor) for tensor in (query, key, value, trunk_key, trunk_value))
    out: Tensor = _PathAttention.apply(*tensors, _Call(plan, scale, window, kernels))  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


def _dense_rows(tensor: Tensor) -> Tensor:
    """The kernels take any strides but that of the last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Call(NamedTuple):
    plan: TreePlan
    scale: float | None
    window: int | None
    kernels: Kernels


def _tiles(tensor: Tensor, run: tuple[int, int, int]) -> Tensor:
    """View of (1, H, U, ...) as the run's squares (n, H, size, ...)."""
    first, last, size = run
    return tensor[0, :, first:last].view(tensor.shape[1], -1, size, *tensor.shape[3:]).transpose(0, 1)


def _sums(like: Tensor, heads: int, tokens: int, *width: int) -> Tensor:
    """Room for (1, heads, tokens, ...), a token's heads side by side as in the model's own tensors, in the dtype of sums."""
    return like.new_empty(1, tokens, heads, *width, dtype=torch.promote_types(like.dtype, torch.float32)).transpose(1, 2)


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trunk_key: Tensor, trunk_value: Tensor, call: _Call) -> Tensor:
        plan, scale, window, kernels = call
        heads, tokens = query.shape[1:3]
        out, lse = _sums(query, heads, tokens, value.shape[-1]), _sums(query, heads, tokens)
        for run, mask in zip(plan.squares(), plan.square_masks(window, lse), strict=True):
            part, part_lse = kernels.forward(_tiles(query, run), _tiles(key, run), _tiles(value, run), mask, scale)
            _tiles(out, run).copy_(part)
            _tiles(lse, run).copy_(part_lse)
        for rectangle in plan.rectangles(window):
            keys, values = ((key, value), (trunk_key, trunk_value))[rectangle.trunk]
            queries, seen = slice(rectangle.first, rectangle.last), slice(rectangle.start, rectangle.stop)
            hidden = plan.mask(rectangle, window, lse)
            part, part_lse = kernels.forward(query[:, :, queries], keys[:, :, seen], values[:, :, seen], hidden, scale)
            so_far, so_far_lse = out[:, :, queries], lse[:, :, queries]
            torch.lerp(so_far, part.to(out.dtype), (part_lse - so_far_lse).sigmoid_()[..., None], out=so_far)
            so_far_lse.copy_(torch.logaddexp(so_far_lse, part_lse))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, trunk_key, trunk_value, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, trunk_key, trunk_value, out, lse = ctx.saved_tensors
        plan, scale, window, kernels = ctx.call
        grad = _dense_rows(grads[0])
        own = [_sums(tensor, *tensor.shape[1:]) for tensor in (query, key, value)]
        trunk = [_sums(tensor, *tensor.shape[1:]).zero_() for tensor in (trunk_key, trunk_value)]
        for run, mask in zip(plan.squares(), plan.square_masks(window, lse), strict=True):
            parts = kernels.backward(*(_tiles(tensor, run) for tensor in (grad, query, key, value, out, lse)), mask, scale)
            for total, part in zip(own, parts, strict=True):
                _tiles(total, run).copy_(part)
        for rectangle in plan.rectangles(window):
            keys, values = ((key, value), (trunk_key, trunk_value))[rectangle.trunk]
            totals = (own, [own[0], *trunk])[rectangle.trunk]
            queries, seen = slice(rectangle.first, rectangle.last), slice(rectangle.start, rectangle.stop)
            over = [tensor[:, :, queries] for tensor in (grad, query, out, lse)]
            parts = kernels.backward(*over[:2], keys[:, :, seen], values[:, :, seen], *over[2:], plan.mask(rectangle, window, lse), scale)
            for total, where, part in zip(totals, (queries, seen, seen), parts, strict=True):
                total[:, :, where].add_(part)
        return *(total.to(query.dtype) for total in (*own, *trunk)), None
