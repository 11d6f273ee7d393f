"""Attention over a packed token tree: every query against the keys of its own path, and nothing else.

Back ends:

``path``
    Exact block by block, without a mask and without copying a key. In depth-first order the queries that see a node of the tree are contiguous: the node itself
    (causally) and all of its descendants (every key). So a tree of N nodes is N causal squares and one full rectangle for each node that has descendants,
    each a view; the parts of a query are merged by their log-sum-exp (arXiv:2205.14135, section 3.1).
``dense``
    The model's own attention under a 4D additive mask, U x U: for small trees, and for models whose attention cannot be exchanged.

A model reaches ``path`` through transformers' ``AttentionInterface``; nothing is patched. Tree positions without a plan are an error: transformers would take
each branch for a separate packed sequence and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arpo_algo.token_tree import TokenTree

Backend = Literal["path", "dense", "flex", "varlen"]

_NAME = "arpo_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """What the attention of every layer needs to know of a tree."""

    nodes: list[tuple[int, int, int]]
    """First token, after the last token, end of the subtree; see :class:`~arpo_algo.token_tree.TokenTree`."""
    depths: Tensor
    """(U,) int64."""


def model_inputs(tree: TokenTree, backend: Backend, *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a forward over the tree, inside :func:`tree_attention`; ``dtype`` is that of the model's activations."""
    depths = torch.as_tensor(tree.depths, device=device)
    inputs: dict[str, Any] = {"input_ids": torch.as_tensor(tree.token_ids, device=device)[None], "position_ids": depths[None]}
    if backend == "path":
        return inputs | {"attention_mask": None, "tree_plan": TreePlan(nodes=[tuple(node) for node in tree.nodes.tolist()], depths=depths)}
    if backend == "dense":
        index, ends = torch.arange(len(tree), device=device), torch.as_tensor(tree.ends, device=device)
        sees = (index[None] <= index[:, None]) & (index[:, None] < ends[None])  # (U, U): query, key
        mask = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill_(~sees, torch.finfo(dtype).min)
        return inputs | {"attention_mask": mask[None, None]}
    raise ValueError(f"expected a back end that exists here, got {backend!r}")


@contextmanager
def tree_attention(model: nn.Module, backend: Backend) -> Iterator[None]:
    """Inside, the model's attention understands :func:`model_inputs`, in the forward and where the backward pass recomputes it.

    Padded rows must not go through the model meanwhile.
    """
    if backend == "dense":
        yield
        return
    _register()
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _path_forward)


def _path_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_plan: TreePlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query (1, H, U, d); key and value (1, H_kv, U, d); returns (1, U, H, d)."""
    if tree_plan is None:
        raise ValueError("expected a plan of the tree beside its positions, got none: this model does not pass it on to its attention")
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast only the value, straight from its matrix product, is in the narrow type
    output: Tensor = PathAttention.apply(query, key, value, tree_plan, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class PathAttention(torch.autograd.Function):
    """Attention of (1, H, U, d) queries over the keys of their paths."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float | None) -> Tensor:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        sums = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(query, dtype=sums), query.new_empty(query.shape[:3], dtype=sums)
        for start, stop, _ in plan.nodes:
            own = slice(start, stop)
            out[:, :, own], lse[:, :, own] = forward(query[:, :, own], key[:, :, own], value[:, :, own], 0.0, True, scale=scale)
        for start, stop, end in plan.nodes:
            if end > stop:
                part, part_lse = forward(query[:, :, stop:end], key[:, :, start:stop], value[:, :, start:stop], 0.0, False, scale=scale)
                so_far = lse[:, :, stop:end]
                merged = torch.logaddexp(so_far, part_lse)
                out[:, :, stop:end].mul_((so_far - merged).exp_()[..., None]).addcmul_(part.to(sums), (part_lse - merged).exp_()[..., None])
                so_far.copy_(merged)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.groups = plan, scale, groups
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        query, key, value, out, lse = ctx.saved_tensors
        (grad,) = grads
        grads_qkv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

        def block(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            parts: tuple[Tensor, Tensor, Tensor] = backward(grad[:, :, queries], q, k, v, out[:, :, queries], lse[:, :, queries], 0.0, causal, scale=ctx.scale)
            return parts

        for start, stop, _ in ctx.plan.nodes:
            own = slice(start, stop)
            for total, part in zip(grads_qkv, block(own, own, True), strict=True):
                total[:, :, own] = part
        for start, stop, end in ctx.plan.nodes:
            if end > stop:
                below, own = slice(stop, end), slice(start, stop)
                for total, where, part in zip(grads_qkv, (below, own, own), block(below, own, False), strict=True):
                    total[:, :, where] += part
        grad_q, grad_k, grad_v = grads_qkv
        if ctx.groups > 1:
            grad_k, grad_v = (g.reshape(1, -1, ctx.groups, *g.shape[2:]).sum(2) for g in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None
