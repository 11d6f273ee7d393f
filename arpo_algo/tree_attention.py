"""Attention of a transformers model over a packed token tree: every query against the keys of its own path, and nothing else.

Back ends:

``path``
    Exact blocks on any device, see :mod:`arpo_algo.tree_kernels`: the choice on a CPU, a slow reference elsewhere.
``dense``
    The model's own attention under an additive 4D mask, U x U: for small trees, and for models whose attention cannot be exchanged.
``flex``
    transformers' FlexAttention under a block mask built from the tree: for a GPU and many short nodes. Its backward pass exists on GPUs only.
``varlen``
    One call of variable-length flash attention, each node's queries against its gathered path: for a GPU, 16 bits and long nodes.

The last two need a GPU and have not run on one yet: trust them where tests/gpu passes, which compares their gradients with those of ``path``. What a CPU can
show of them is tested: the block masks, their logits, and ``varlen`` on a kernel that aligns as PyTorch's is said to.

A model reaches ``path`` and ``varlen`` through transformers' ``AttentionInterface``; nothing is patched. Tree positions without a plan are an error:
transformers would take each branch for a separate packed sequence and say nothing. What an attention function cannot do and would leave out in silence is an
error too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from arpo_algo.token_tree import TokenTree
from arpo_algo.tree_kernels import TreePlan, path_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Backend = Literal["path", "dense", "flex", "varlen"]

_IMPLEMENTATIONS: dict[str, str] = {"path": "arpo_path", "varlen": "arpo_varlen", "flex": "flex_attention"}
_HARMLESS = {"position_ids", "position_embeddings", "cache_position", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch"}
"""Arguments that pass through some models to the attention and do not change it."""
_BLOCK = 128
"""Tokens of a block of FlexAttention."""


@dataclass(slots=True)
class TrunkKeys:
    """Keys and values (1, H_kv, V, d) of the V tokens of one pass, by layer, for the bins that attend to them in later passes."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    depths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(V,)"""

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep what a layer computed, the first time: gradient checkpointing computes it again. ``ValueError`` where only then it has a graph."""
        kept = self.keys.setdefault(layer, key)
        self.values.setdefault(layer, value)
        if key.requires_grad and not kept.requires_grad:
            raise ValueError(
                "expected gradient checkpointing with use_reentrant=False, got a first forward without a graph: the trunk's gradients would be lost"
            )

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value of a layer. ``KeyError`` where it was not recorded."""
        if layer not in self.keys:
            raise KeyError(f"expected keys of layer {layer} in the trunk, got those of {sorted(self.keys)}")
        return self.keys[layer], self.values[layer]

    def tensors(self) -> list[Tensor]:
        """All keys, then all values, in the order of recording."""
        return [*self.keys.values(), *self.values.values()]

    def leaves(self) -> TrunkKeys:
        """The same numbers without their graph: leaves, which collect the gradients of the bins where the trunk has any."""
        keys, values = ({layer: tensor.detach().requires_grad_(tensor.requires_grad) for layer, tensor in of.items()} for of in (self.keys, self.values))
        return TrunkKeys(keys, values, self.depths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What the attention of every layer needs to know of a tree: model_inputs hands it through the model's forward."""

    plan: TreePlan
    trunk: TrunkKeys | None = None
    """What the tree's tokens attend to beside each other."""
    record: TrunkKeys | None = None
    """Where the tree's own keys go."""
    paths: tuple[Tensor, Tensor, Tensor, int, int] | None = None
    """Of ``varlen``, see :func:`_gathered_paths`."""


def model_inputs(
    tree: TokenTree,
    backend: Backend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    config: Any = None,
    record: TrunkKeys | None = None,
    trunk: TrunkKeys | None = None,
    rectangles: np.ndarray | None = None,
) -> dict[str, Any]:
    """Arguments of a forward over the tree, inside :func:`tree_attention`; ``dtype`` is that of the model's activations.

    ``config`` is the model's: ``dense`` and ``flex`` take the windows of its layers from it. With ``flex`` the forward is over a multiple of 128 tokens, the
    tree's first. ``path`` alone cuts trees: ``record`` is filled with the keys and values of the tree; ``trunk`` holds those of a recorded one, seen by
    ``rectangles`` (B, 4), for each the first trunk key, after the last (consecutive depths), first query, after the last.
    """
    if backend != "path" and (record is not None or trunk is not None):
        raise ValueError(f"expected back end 'path' with a trunk, got {backend!r}")
    if (trunk is None) != (rectangles is None):
        raise ValueError("expected a trunk and the rectangles that see it, got one of them")
    windows = _layer_windows(config) if backend in ("dense", "flex") else {}
    if backend == "flex":
        tree = _padded_tree(tree)
    inputs: dict[str, Any] = {
        "input_ids": torch.as_tensor(tree.token_ids, device=device)[None],
        "position_ids": torch.as_tensor(tree.depths, device=device)[None],
    }
    if backend == "dense":
        return inputs | {"attention_mask": _by_layer({kind: _dense_mask(tree, window, device, dtype) for kind, window in windows.items()})}
    if backend == "flex":
        return inputs | {"attention_mask": _by_layer({kind: block_mask(tree, window, device) for kind, window in windows.items()})}
    plan = TreePlan(tree.depths, tree.ends, tree.nodes)
    if backend == "varlen":
        return inputs | {"attention_mask": None, "tree_plan": Attended(plan=plan, paths=_gathered_paths(tree, device))}
    if backend != "path":
        raise ValueError(f"expected one of {', '.join(map(repr, ('path', 'dense', 'flex', 'varlen')))}, got {backend!r}")
    if record is not None:
        record.depths = tree.depths
    if trunk is not None and rectangles is not None:
        _check(rectangles, len(trunk.depths), len(tree))
        plan = TreePlan(tree.depths, tree.ends, tree.nodes, trunk.depths, rectangles)
    return inputs | {"attention_mask": None, "tree_plan": Attended(plan=plan, trunk=trunk, record=record)}


def _by_layer(masks: dict[str, Any]) -> Any:
    """One mask where all layers are of one kind, which every model takes; models with several kinds take a dict."""
    return next(iter(masks.values())) if len(masks) == 1 else masks


def _check(rectangles: np.ndarray, keys: int, queries: int) -> None:
    inside = (rectangles >= 0) & (rectangles <= (keys, keys, queries, queries)) if rectangles.shape[1:] == (4,) else np.zeros(1, dtype=bool)
    if not (inside.all() and (rectangles[:, 0] < rectangles[:, 1]).all() and (rectangles[:, 2] < rectangles[:, 3]).all()):
        raise ValueError(f"expected rectangles (B, 4), none empty, of {keys} trunk keys and {queries} queries, got {rectangles.tolist()}")


@contextmanager
def tree_attention(model: nn.Module, backend: Backend) -> Iterator[None]:
    """Inside, the model's attention understands :func:`model_inputs`, in the forward and where the backward pass recomputes it.

    Padded rows must not go through the model meanwhile. ``ValueError`` with ``dense`` where the model's attention takes no mask; ``RuntimeError`` where another
    thread has changed the attention of the same config object, since the numbers would be wrong.
    """
    whole: Any = model
    config = whole.config.get_text_config()
    before = config._attn_implementation
    if backend == "dense" and before not in ("sdpa", "eager"):
        raise ValueError(f"expected attention 'sdpa' or 'eager', which take a mask, got {before!r}")
    _register()
    ours = _IMPLEMENTATIONS.get(backend, before)
    try:
        config._attn_implementation = ours
        yield
        if config._attn_implementation != ours:
            raise RuntimeError(f"expected attention {ours!r} throughout, got {config._attn_implementation!r}: a model of the same config object ran meanwhile")
    finally:
        config._attn_implementation = before


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATIONS["path"], _path_forward)
    AttentionInterface.register(_IMPLEMENTATIONS["varlen"], _varlen_forward)


def _path_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_plan: Attended | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (1, H, U, d); key and value (1, H_kv, U, d); returns (1, U, H, d)."""
    tree = _checked(module, query, key, attention_mask, tree_plan, sliding_window, others)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast only the value, straight from its matrix product, is in the narrow type
    trunk = None
    if tree.record is not None or tree.trunk is not None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ValueError(f"expected attention that knows its layer_idx, by which keys of a trunk are told apart, got {type(module).__name__}")
        if tree.record is not None:
            tree.record.record(layer, key, value)
        trunk = None if tree.trunk is None else tree.trunk.of(layer)
    return path_attention(query, key, value, tree.plan, scale=scaling, window=sliding_window, trunk=trunk), None


def _varlen_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_plan: Attended | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (1, H, U, d); key and value (1, H_kv, U, d); returns (1, U, H, d).

    The kernel aligns causal masks and windows at the last query and the last key, which is the last token of a node in both. Gathered keys are a few times
    the tree's, so they are gathered again in the backward pass rather than kept.
    """
    from torch.nn.attention.varlen import varlen_attn
    from torch.utils.checkpoint import checkpoint

    tree = _checked(module, query, key, attention_mask, tree_plan, sliding_window, others)
    assert tree.paths is not None
    index, firsts, path_firsts, longest, longest_path = tree.paths

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(U, H, d)"""
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        keys, values = (tensor.index_select(0, index) for tensor in rows[1:])
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(rows[0].contiguous(), keys, values, firsts, path_firsts, longest, longest_path, scale=scaling, window_size=window, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    narrow = query.to(value.dtype), key.to(value.dtype), value
    out: Tensor = checkpoint(attend, *narrow, use_reentrant=False, preserve_rng_state=False)
    return out[None], None


def _checked(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, tree_plan: Attended | None, window: int | None, others: Mapping[str, Any]
) -> Attended:
    """The plan. ``ValueError`` for whatever would otherwise be left out in silence."""
    if tree_plan is None:
        raise ValueError("expected a plan of the tree beside its positions, got none: this model does not pass it on to its attention")
    if mask is not None:
        raise ValueError(f"expected no attention mask beside the plan of a tree, got one of shape {tuple(mask.shape)}")
    tokens = len(tree_plan.plan.ends)
    if query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
        came = f"{query.shape[0]} x {query.shape[2]} queries and {key.shape[2]} keys"
        raise ValueError(f"expected one tree of {tokens} tokens, without a cache, got {came}")
    if not others.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise ValueError(f"expected causal attention, got {type(module).__name__} with is_causal=False")
    if window is not None and window < 1:
        raise ValueError(f"expected sliding_window None or at least 1, got {window}")
    for name, given in others.items():
        nothing = given is None or (isinstance(given, bool | int | float) and not given)
        if not nothing and name not in _HARMLESS and name != "is_causal":
            what = f"{type(given).__name__} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
            raise ValueError(f"expected attention without {name}, which trees do not support, got {what}")
    return tree_plan


def _layer_windows(config: Any) -> dict[str, int | None]:
    """Window in tokens, or None, of each kind of layer that a model's ``config`` names. ``ValueError`` for kinds that a mask does not describe."""
    if config is None:
        return {"full_attention": None}
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    if unknown := kinds.keys() - {"full_attention", "sliding_attention"}:
        raise ValueError(f"expected layers of full_attention or sliding_attention, got {', '.join(sorted(unknown))}")
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _dense_mask(tree: TokenTree, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(1, 1, U, U) to add to the scores: 0, or the smallest number of the dtype where a query does not see a key."""
    index, ends, depths = (torch.as_tensor(array, device=device) for array in (np.arange(len(tree)), tree.ends, tree.depths))
    hidden = (index[None] > index[:, None]) | (index[:, None] >= ends[None])  # (U, U): query, key
    if window is not None:
        hidden |= depths[:, None] - depths[None] >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


def _padded_tree(tree: TokenTree) -> TokenTree:
    """The tree with tokens behind it that see only themselves, up to a multiple of ``_BLOCK``."""
    total = len(tree)
    more = -total % _BLOCK
    behind = np.arange(total, total + more)
    zeros, ones = np.zeros_like(behind), np.ones_like(behind)
    return replace(
        tree,
        token_ids=np.concatenate((tree.token_ids, zeros)),
        depths=np.concatenate((tree.depths, zeros)),
        parents=np.concatenate((tree.parents, -ones)),
        ends=np.concatenate((tree.ends, behind + 1)),
        nodes=np.concatenate((tree.nodes, np.stack((behind, behind + 1, behind + 1), axis=1))),
    )


def block_mask(tree: TokenTree, window: int | None, device: torch.device) -> BlockMask:
    """Which blocks of keys each block of queries needs, from extremes of ``ends`` and ``depths`` alone: no U x U array, unlike ``create_block_mask``.

    ``tree`` is a multiple of ``_BLOCK`` long. Without a window the blocks are exactly those with a visible pair; with one there may be a few too many, which
    the mask inside the block empties.
    """
    from torch.nn.attention.flex_attention import BlockMask as Blocks

    ends, depths = (array.reshape(-1, _BLOCK) for array in (tree.ends, tree.depths))
    first = np.arange(0, len(tree), _BLOCK)
    before, same = np.tri(len(first), k=-1, dtype=bool), np.eye(len(first), dtype=bool)  # (query block, key block)
    needed = same | (before & (ends.max(1)[None] > first[:, None]))
    full = before & (ends.min(1)[None] >= first[:, None] + _BLOCK)
    if window is not None:
        needed &= depths.min(1)[:, None] - depths.max(1)[None] < window
        full &= depths.max(1)[:, None] - depths.min(1)[None] < window
    end, depth = (torch.as_tensor(array, device=device) for array in (tree.ends, tree.depths))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key <= query) & (query < end[key])
        return visible if window is None else visible & (depth[query] - depth[key] < window)

    partial, whole = (_block_lists(chosen, device) for chosen in (needed & ~full, full))
    return Blocks.from_kv_blocks(*partial, *whole, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(len(tree), len(tree)))


def _block_lists(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """(1, 1, blocks) how many key blocks are chosen for each query block, and (1, 1, blocks, blocks) which, those first."""
    counts, order = chosen.sum(1), np.argsort(~chosen, axis=1, kind="stable")
    return tuple(torch.as_tensor(array.astype(np.int32), device=device)[None, None] for array in (counts, order))  # type: ignore[return-value]


def _gathered_paths(tree: TokenTree, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Packed index of the tokens on each node's path, its own last; firsts (N + 1,) int32 of the nodes and of the paths; the longest node and path."""
    paths: dict[int, np.ndarray] = {-1: np.zeros(0, dtype=np.int64)}  # by the node's last token
    for start, stop, _ in tree.nodes.tolist():
        paths[stop - 1] = np.concatenate((paths[int(tree.parents[start])], np.arange(start, stop)))
    del paths[-1]
    lengths = np.array([len(path) for path in paths.values()])
    sizes = tree.nodes[:, 1] - tree.nodes[:, 0]
    firsts, path_firsts = (torch.as_tensor(np.append(0, np.cumsum(array)).astype(np.int32), device=device) for array in (sizes, lengths))
    index = torch.as_tensor(np.concatenate(list(paths.values())), device=device)
    return index, firsts, path_firsts, int(sizes.max()), int(lengths.max())
