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

from dataclasses import dataclass

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
    """Row numbers of bins whose trees hold at most ``max_tokens`` unique tokens each, a single longer row alone; every row is in one bin.

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
        if not bins or held + int(lengths[row]) - shared > max_tokens:
            bins.append([])
            held, shared = 0, 0
        bins[-1].append(row)
        held += int(lengths[row]) - shared
    return [np.array(rows, dtype=np.int64) for rows in bins]


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
