"""Token sequences with every shared prefix stored once: a packed token tree.

Sorted sequences share with their predecessor exactly what they share with anything before them, so one pass over the sorted rows lays the tree out depth
first. Three rows ``a b c d``, ``a b x`` and ``a b x y``::

    packed index   0   1   2   3   4   5
    token          a   b   c   d   x   y
    depth          0   1   2   3   2   3        the position that the token has in its row
    parent        -1   0   1   2   1   4
    end            6   6   4   4   6   6        the subtree of token k is k .. end[k] - 1

Token q sees token k exactly where ``k <= q < end[k]``: k is q itself or lies on the path from the root to q. ``where`` says at which packed index each
token of each row is, so whatever is computed once for a packed token is read back for all rows that pass through it.

The tree is built from tokens and not from the lineage of the rollout: equal text that was sampled twice is shared too, and where a codec renders a shared turn
in two ways the rows simply part earlier. Both stay exact.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """The U unique tokens of R rows of at most T tokens, depth first; several trees side by side where rows share nothing. numpy int64."""

    token_ids: np.ndarray
    """(U,)"""
    depths: np.ndarray
    """(U,) position of each token in its row."""
    parents: np.ndarray
    """(U,) packed index of the token before it; -1 for the first of a row."""
    ends: np.ndarray
    """(U,) packed index after the last token of its subtree."""
    nodes: np.ndarray
    """(N, 3) runs of tokens without a branch, in order: first token, after the last token, end of the subtree."""
    where: np.ndarray
    """(R, T) packed index of each token of each row; 0 where padded."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How often rows hold what is unique in them: the three ratios that decide what a packed tree saves."""

    tokens: float
    """Tokens of all rows / unique tokens: the limit of the gain of everything that works token by token."""
    pairs: float
    """Pairs of a query and a key that it sees, over rows / over the tree."""
    targets: float
    """Tokens in the mask, over rows / over the tree: what goes through the head."""
    unique_tokens: int
    unique_pairs: int
    unique_targets: int


def build_tree(token_ids: np.ndarray, lengths: np.ndarray, *, share: bool = True) -> TokenTree:
    """The tree of right-padded rows ``token_ids`` (R, T) with ``lengths`` (R,) tokens each. Without ``share`` every row has its own tokens: plain packing."""
    order, common = _sorted(token_ids, lengths)
    if not share:
        common = np.zeros_like(common)
    where = np.zeros(token_ids.shape, dtype=np.int64)
    new = lengths[order] - common
    firsts = np.cumsum(new) - new
    total = int(new.sum())
    ids, depths, parents = (np.empty(total, dtype=np.int64) for _ in range(3))
    ends = np.full(total, total, dtype=np.int64)
    before = -1
    for row, shared, first in zip(order.tolist(), common.tolist(), firsts.tolist(), strict=True):
        length = int(lengths[row])
        if before >= 0:
            where[row, :shared] = where[before, :shared]
            ends[where[before, shared : int(lengths[before])]] = first  # all of the row before is open; what is not shared closes here
        last = first + length - shared
        where[row, shared:length] = np.arange(first, last)
        ids[first:last] = token_ids[row, shared:length]
        depths[first:last] = np.arange(shared, length)
        parents[first:last] = np.arange(first - 1, last - 1)
        if last > first:
            parents[first] = where[row, shared - 1] if shared else -1
        before = row
    return TokenTree(token_ids=ids, depths=depths, parents=parents, ends=ends, nodes=_nodes(parents, ends), where=where)


def partition(token_ids: np.ndarray, lengths: np.ndarray, max_tokens: int, *, share: bool = True) -> list[np.ndarray]:
    """Row numbers of bins whose trees hold at most ``max_tokens`` unique tokens each, a longer row alone or with its copies; every row is in one bin.

    Neighbours in the tree stay together, so a bin repeats of another only the path to where they were cut.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    order, common = _sorted(token_ids, lengths)
    if not share:
        common = np.zeros_like(common)
    bins: list[list[int]] = []
    held = 0
    for row, shared in zip(order.tolist(), common.tolist(), strict=True):
        new = int(lengths[row]) - shared
        if not bins or (new and held + new > max_tokens):  # a copy of a row adds nothing
            bins.append([])
            held, new = 0, int(lengths[row])
        bins[-1].append(row)
        held += new
    return [np.array(rows, dtype=np.int64) for rows in bins]


def in_all(parts: Sequence[Sharing]) -> Sharing:
    """The ratios of several batches that share nothing with each other."""

    def ratio(ratios: list[float], uniques: list[int]) -> float:
        return sum(map(operator.mul, ratios, uniques)) / sum(uniques) if sum(uniques) else 1.0

    tokens, pairs, targets = [p.unique_tokens for p in parts], [p.unique_pairs for p in parts], [p.unique_targets for p in parts]
    return Sharing(
        tokens=ratio([p.tokens for p in parts], tokens),
        pairs=ratio([p.pairs for p in parts], pairs),
        targets=ratio([p.targets for p in parts], targets),
        unique_tokens=sum(tokens),
        unique_pairs=sum(pairs),
        unique_targets=sum(targets),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The tokens of one bin that are not in the trunk that bins share. Indices *below the trunk* count the trunk's tokens first."""

    tree: TokenTree
    """Of the bin's own U tokens; the parents of those that hang on the trunk are -1, ``where`` is below the trunk."""
    sources: np.ndarray
    """(U,) parent of each token, below the trunk."""
    rectangles: np.ndarray
    """(B, 4) first key, after the last key (of the trunk), first query, after the last query (of the bin): who sees the trunk."""


def cut(tree: TokenTree, bins: Sequence[np.ndarray], lengths: np.ndarray, most: int) -> tuple[TokenTree, list[Branches]]:
    """The trunk, and what each bin has beside it. ``bins`` are row numbers, ``lengths`` (R,) those of all rows.

    The trunk is what at least two of the bins hold, or three and so on, until it has at most ``most`` tokens. What bins share beyond it is repeated in each of
    them. ``where`` of the trunk is 0 for tokens that are not in it.
    """
    held = np.zeros((len(bins), len(tree)), dtype=bool)
    for number, rows in enumerate(bins):
        for row in rows:
            held[number, tree.where[row, : lengths[row]]] = True
    holders = held.sum(0)
    shared = next(kept for least in range(2, len(bins) + 2) if (kept := holders >= least).sum() <= most)
    trunk, in_trunk = _part(tree, shared)
    starts, stops, ends = tree.nodes.T
    before = _counts(shared)
    cuts = starts + before[stops] - before[starts]  # where each node leaves the trunk, in which it may begin
    parts = []
    for own_and_shared in held:
        own = own_and_shared & ~shared
        part, in_own = _part(tree, own)
        below = np.where(shared, in_trunk, len(trunk) + in_own)
        own_before = _counts(own)
        rectangles = np.stack((before[starts], before[cuts], own_before[cuts], own_before[ends]), axis=1)
        sees = (rectangles[:, 0] < rectangles[:, 1]) & (rectangles[:, 2] < rectangles[:, 3])
        parents = tree.parents[own]
        sources = np.where(parents >= 0, below[parents], -1)
        parts.append(Branches(tree=replace(part, where=below[tree.where]), sources=sources, rectangles=rectangles[sees]))
    return trunk, parts


def _part(tree: TokenTree, chosen: np.ndarray) -> tuple[TokenTree, np.ndarray]:
    """The chosen tokens (U,) bool as a tree, and how many chosen ones stand before each token."""
    before = _counts(chosen)
    index = before[:-1]
    parents = tree.parents[chosen]
    kept = (parents >= 0) & chosen[parents]
    parents = np.where(kept, index[parents], -1)
    ends = before[tree.ends[chosen]]
    part = TokenTree(
        token_ids=tree.token_ids[chosen],
        depths=tree.depths[chosen],
        parents=parents,
        ends=ends,
        nodes=_nodes(parents, ends),
        where=np.where(chosen[tree.where], index[tree.where], 0),
    )
    return part, index


def _counts(chosen: np.ndarray) -> np.ndarray:
    """(U + 1,) how many are chosen before each index."""
    return np.concatenate(([0], np.cumsum(chosen)))


def sharing(token_ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray) -> Sharing:
    """The ratios of rows ``token_ids`` (R, T) with ``lengths`` (R,) and trained tokens ``mask`` (R, T) bool; 1 where there are no rows."""
    tree = build_tree(token_ids, lengths)
    pairs, targets = int((tree.depths + 1).sum()), len(np.unique(tree.where[mask]))
    return Sharing(
        tokens=float(lengths.sum()) / max(len(tree), 1) if len(tree) else 1.0,
        pairs=float((lengths * (lengths + 1) // 2).sum()) / pairs if pairs else 1.0,
        targets=float(mask.sum()) / targets if targets else 1.0,
        unique_tokens=len(tree),
        unique_pairs=pairs,
        unique_targets=targets,
    )


def _sorted(token_ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers in lexicographic order (a prefix before what continues it) and how many first tokens each has in common with the row before it."""
    inside = np.arange(token_ids.shape[1]) < lengths[:, None]
    keys = np.where(inside, token_ids + 1, 0).astype(">u4")  # (R, T); big-endian, so that the order of bytes is that of ids, and padding comes first
    order = np.array(sorted(range(len(keys)), key=lambda row: keys[row].tobytes()), dtype=np.int64)
    common = np.zeros(len(order), dtype=np.int64)
    if len(order) > 1 and keys.shape[1]:
        after, before = keys[order[1:]], keys[order[:-1]]
        differs = (after != before) | (before == 0)
        common[1:] = np.where(differs.any(1), differs.argmax(1), keys.shape[1])
    return order, common


def _nodes(parents: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """(N, 3): a node begins where a token does not follow the one before it, or follows one that has other children too."""
    total = len(parents)
    children = np.bincount(parents[parents >= 0], minlength=total)
    index = np.arange(total)
    begins = (parents != index - 1) | (parents < 0)
    begins[1:] |= children[:-1] > 1
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], total)[: len(starts)]
    return np.stack((starts, stops, ends[stops - 1] if total else starts), axis=1)
