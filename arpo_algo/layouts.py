"""Which layout a batch is computed in: a packed token tree where that pays, padded rows where it does not. The layout changes time and memory, not the result.

The gain of the tree is predicted from three ratios (:class:`~arpo_algo.token_tree.Sharing`) and the sizes of the model, as floating-point operations:

    gain = (B tokens + A pairs + H targets) / (B unique tokens + A unique pairs + H unique targets)

with B = 6 times the parameters that every token passes, A = 14 times the width of all attention heads of all layers, and H = 8 times the parameters of the
head, whose logits are computed twice in each update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from arpo_algo.learner_config import LearnerConfig
from arpo_algo.logprobs import Packed, TokenLogprobs
from arpo_algo.packing import Layout, Rows, tree_micro_batches, unique_tokens
from arpo_algo.sharding import tree_shares
from arpo_algo.token_tree import Branches, Sharing, TokenTree, build_tree, cut, in_all, sharing
from arpo_algo.tree_attention import Backend, TrunkKeys, model_inputs, tree_attention
from arpo_algo.tree_support import TreeSupport

log = logging.getLogger(__name__)

MIN_GAIN = 1.2
"""Predicted gain from which a tree is faster than padded rows in micro-batches of the best size, which fit into the processor's caches better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Floating-point operations of one update of a model: for each token, for each pair of query and key, for each trained token."""

    token: float
    pair: float
    target: float

    @classmethod
    def of(cls, model: nn.Module) -> Costs:
        """From the sizes of the model; mixtures of experts are counted as if every expert saw every token."""
        lm: Any = model
        config, embeddings, head = lm.config.get_text_config(), lm.get_input_embeddings(), lm.get_output_embeddings()
        vocabulary = {id(layer.weight): layer.weight.numel() for layer in (embeddings, head) if layer is not None}
        body = sum(parameter.numel() for parameter in model.parameters()) - sum(vocabulary.values())
        layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers  # heads may differ from layer to layer
        width = sum(of.num_attention_heads * (getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads) for of in layers)
        return cls(token=6.0 * body, pair=14.0 * width, target=8.0 * (0 if head is None else head.weight.numel()))

    def gain(self, shared: Sharing) -> float:
        """Predicted time of padded rows over that of their tree; 1 where nothing is shared."""
        unique = self.token * shared.unique_tokens, self.pair * shared.unique_pairs, self.target * shared.unique_targets
        once = sum(unique)
        return sum(cost * ratio for cost, ratio in zip(unique, (shared.tokens, shared.pairs, shared.targets), strict=True)) / once if once else 1.0


MIN_REPEATED = 1.05
"""Tokens computed / unique tokens from which the bins of a tree take their trunk from one pass of its own."""


class Cut(NamedTuple):
    """A tree cut into its trunk and bins: :func:`arpo_algo.token_tree.cut`."""

    trunk: TokenTree
    bins: list[tuple[Branches, np.ndarray]]
    """What each bin has of its own, and the trained tokens (N,) of its rows, one after another, below the trunk."""


class Layouts:
    """The layouts of one model."""

    def __init__(self, model: nn.Module, config: LearnerConfig, support: TreeSupport, ranks: int = 1) -> None:
        """``ValueError`` where the model cannot take the layout that the config asks for by name."""
        wanted = config.layout
        if wanted in ("tree", "packed") and support.backend is None:
            raise ValueError(f"layout={wanted!r} does not work with {type(model).__name__}: {support.reason}; expected layout='auto' or 'padded'")
        if wanted == "auto" and support.reason:
            log.warning("%s: %s", type(model).__name__, support.reason)
        self.model, self.wanted, self.backend, self.max_tokens = model, wanted, support.backend, config.micro_batch_tokens
        self.ranks = ranks
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else next(model.parameters()).dtype
        """Of the activations."""
        self.costs = Costs.of(model) if wanted == "auto" and self.backend is not None else None

    def choose(self, rows: Rows) -> tuple[Layout, Sharing]:
        """The layout of the rows of a step, and what they share of what is computed: within a micro-batch, or within a tree that can be cut at its trunk."""
        if self.ranks > 1:
            bins = [index for of_rank in tree_shares(rows, self.max_tokens, self.ranks) for index in of_rank]
        else:
            pieces = tree_micro_batches(rows, self.max_tokens)
            bins = [np.concatenate(piece) for piece in pieces] if self.backend == "path" else [index for piece in pieces for index in piece]
        batches = [rows.select(index) for index in bins]
        shared = in_all([sharing(batch.token_ids, batch.lengths, batch.mask) for batch in batches])
        if self.wanted != "auto":
            return self.wanted, shared
        priced = _under_a_mask(shared, self.max_tokens) if self.backend == "dense" else shared
        return ("tree" if self.costs is not None and self.costs.gain(priced) >= MIN_GAIN else "padded"), shared

    @contextmanager
    def active(self, layout: Layout) -> Iterator[None]:
        """Inside, the model computes batches of this layout, in the forward and in the backward pass."""
        if layout == "padded":
            yield
            return
        with tree_attention(self.model, self._backend):
            yield

    def pack(self, rows: Rows, layout: Layout, *, device: torch.device) -> Packed | None:
        """The rows in this layout; None for padded rows, which are it already."""
        if layout == "padded":
            return None
        tree = build_tree(rows.token_ids, rows.lengths, share=layout == "tree")
        unique, copies = np.unique(tree.where[rows.mask], return_inverse=True)
        inputs = model_inputs(tree, self._backend, device=device, dtype=self.dtype, config=self.model.config)
        return Packed(inputs, *_on(device, tree.parents[unique], tree.token_ids[unique], copies))

    def cut(self, rows: Rows, bins: Sequence[np.ndarray]) -> Cut | None:
        """How to compute bins (row numbers) of one tree without repeating their trunk; None where they repeat little, or the back end is against it.

        The trunk has at most as many tokens as a micro-batch, or as the longest row, which alone needs as much.
        """
        if len(bins) < 2 or self._backend != "path" or self.ranks > 1:
            return None
        whole = rows.select(np.concatenate(bins))
        places = np.split(np.arange(len(whole)), np.cumsum([len(index) for index in bins])[:-1])
        tree = build_tree(whole.token_ids, whole.lengths)
        trunk, parts = cut(tree, places, whole.lengths, max(self.max_tokens, int(whole.lengths.max())))
        repeated = sum(unique_tokens(whole.select(place)) for place in places)
        computed = len(trunk) + sum(len(part.tree) for part in parts)
        if repeated < MIN_REPEATED * computed or not all(len(part.tree) for part in parts):
            return None
        return Cut(trunk, [(part, part.tree.where[place][whole.mask[place]]) for part, place in zip(parts, places, strict=True)])

    @contextmanager
    def with_trunk(self, scorer: TokenLogprobs, plan: Cut, *, entropy_grad: bool, device: torch.device) -> Iterator[list[Packed]]:
        """The bins, their trunk computed. Each is to have had its backward pass, if any, before this ends: then comes that of the trunk."""
        computed = TrunkKeys()
        inputs = partial(model_inputs, backend="path", device=device, dtype=self.dtype)
        size = len(plan.trunk)
        shared = np.unique(np.concatenate([targets for _, targets in plan.bins]))
        shared = shared[shared < size]
        first = Packed(inputs(plan.trunk, record=computed), *_on(device, plan.trunk.parents[shared], plan.trunk.token_ids[shared], shared[:0]))
        trunk = scorer.trunk(first, computed, entropy_grad=entropy_grad)
        packs = []
        for part, targets in plan.bins:
            own = np.unique(targets[targets >= size])
            copies = np.searchsorted(np.concatenate((shared, own)), targets)
            tensors = _on(device, part.sources[own - size], part.tree.token_ids[own - size], copies)
            packs.append(Packed(inputs(part.tree, trunk=trunk.attention, rectangles=part.rectangles), *tensors, trunk=trunk))
        yield packs
        trunk.backward()

    @property
    def _backend(self) -> Backend:
        assert self.backend is not None, "checked when the layout was chosen"
        return self.backend


def _under_a_mask(shared: Sharing, max_tokens: int) -> Sharing:
    """What sharing is worth under a mask: every pair of the tokens of a micro-batch is computed, seen or not."""
    computed = max(shared.unique_tokens * min(shared.unique_tokens, max_tokens), 1)
    return replace(shared, pairs=shared.pairs * shared.unique_pairs / computed, unique_pairs=computed)


def _on(device: torch.device, sources: np.ndarray, targets: np.ndarray, copies: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.as_tensor(sources, device=device), torch.as_tensor(targets, device=device), torch.as_tensor(copies, device=device)
