"""A batch of groups as rows, and how the rows are cut into micro-batches.

Everything the loss needs is aligned to *targets*: column ``t`` of ``mask``, ``old_logprobs``, ``advantages`` and ``weights`` speaks of the token
``token_ids[:, t]``, which the logits of column ``t - 1`` predict. Column 0 is never a target.

The weight of each token in the loss is fixed here, once, over the whole batch. The loss of any part of the batch is then a plain sum of
``weight * objective``, and cutting the batch into micro-batches or shares for ranks cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from arpo_algo.token_tree import build_tree, partition
from arpo_algo.tree import RolloutTree, Trajectory

Layout = Literal["tree", "packed", "padded"]
"""How rows are computed: as a packed token tree, packed one behind the other, or padded to one length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """R trajectories of at most T tokens, right-padded. numpy; the learner moves them to its device."""

    token_ids: np.ndarray  # (R, T) int64, pad_id where padded
    attention: np.ndarray  # (R, T) bool, False where padded
    mask: np.ndarray  # (R, T) bool, True exactly on sampled ids of scored trajectories
    old_logprobs: np.ndarray  # (R, T) float32
    advantages: np.ndarray  # (R, T) float32
    weights: np.ndarray  # (R, T) float32; sums over the whole batch as the loss's global denominator says; 0 where not mask
    groups: np.ndarray  # (R,) int64, number of the group that each row belongs to; rows of one group stand together
    ref_logprobs: np.ndarray | None = None  # (R, T) float32, of the reference, where the loss has a KL term

    def __post_init__(self) -> None:
        if self.mask[:, :1].any():
            raise ValueError(f"expected no trained token in column 0, which nothing predicts, got rows {np.flatnonzero(self.mask[:, 0]).tolist()}")

    def __len__(self) -> int:
        return len(self.token_ids)

    def select(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """The given rows, cut to the longest among them."""
        length = int(self.attention[rows].sum(1).max(initial=0))
        arrays: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        chosen: dict[str, Any] = {name: None if a is None else a[rows][:, :length] if a.ndim > 1 else a[rows] for name, a in arrays.items()}
        return Rows(**chosen)

    @property
    def lengths(self) -> np.ndarray:
        """(R,) tokens of each row."""
        return np.asarray(self.attention.sum(1))


Weigh = Callable[[np.ndarray], np.ndarray]
"""``mask (R, T) bool of the whole batch -> weights (R, T) float64``, 0 where not mask: how tokens are averaged into the loss."""


def trajectory_mean(mask: np.ndarray) -> np.ndarray:
    """``1 / (G |y_i|)``: the mean over trajectories of the mean over their own sampled tokens. GRPO, arXiv:2402.03300 eq. 3; ARPO, arXiv:2507.19849 eq. 6.

    G counts the rows with at least one token in the mask, ``|y_i|`` the masked-in tokens of row i.
    """
    tokens_R1 = mask.sum(1, keepdims=True)
    rows = int(mask.any(1).sum())
    return np.asarray(mask / np.maximum(tokens_R1 * rows, 1))


def token_mean(mask: np.ndarray) -> np.ndarray:
    """``1 / sum_i |y_i|``: every sampled token of the batch counts the same. DAPO, arXiv:2503.14476."""
    return np.asarray(mask / max(int(mask.sum()), 1))


def constant_length(length: int) -> Weigh:
    """``1 / (G L)`` with a constant L, such as the most tokens a trajectory may have: no bias towards short or long ones. Dr. GRPO, arXiv:2503.20783."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")

    def weigh(mask: np.ndarray) -> np.ndarray:
        rows = int(mask.any(1).sum())
        return np.asarray(mask / (max(rows, 1) * length))

    return weigh


def pad_groups(trees: Sequence[RolloutTree], token_advantages: Sequence[Sequence[np.ndarray]], *, pad_id: int, weigh: Weigh) -> Rows:
    """All trajectories of all trees as rows, in order; rows of trajectories that are not scored have an empty mask.

    ``token_advantages[i][j]`` has one entry for each token of trajectory j of tree i. Raises ``ValueError`` when a length differs or when a trajectory
    starts with a sampled token (nothing predicts it).
    """
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    advantages = [values for tree, per_trajectory in zip(trees, token_advantages, strict=True) for values in _paired(tree, per_trajectory)]
    ids = [trajectory.token_ids for trajectory in trajectories]
    shape = (len(ids), max(map(len, ids), default=0))
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    attention, mask = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    old_logprobs, row_advantages = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for row, (trajectory, values) in enumerate(zip(trajectories, advantages, strict=True)):
        length = len(ids[row])
        token_ids[row, :length] = ids[row]
        attention[row, :length] = True
        if trajectory.scored:
            mask[row, :length] = _targets(trajectory)
            old_logprobs[row, :length] = trajectory.logprobs
            row_advantages[row, :length] = np.where(mask[row, :length], values, 0.0)
    weights, groups = weigh(mask).astype(np.float32), np.repeat(np.arange(len(trees)), [len(tree.trajectories) for tree in trees])
    numbers = {"old_logprobs": old_logprobs, "advantages": row_advantages, "weights": weights}
    return Rows(token_ids=token_ids, attention=attention, mask=mask, groups=groups, **numbers)


def micro_batches(rows: Rows, max_tokens: int) -> list[np.ndarray]:
    """Index arrays that cover every row once, longest rows first, neighbours in length together.

    Each micro-batch holds at most ``max_tokens`` tokens, padding included; a row longer than that is alone. Longest first, so that what does not fit into
    memory fails at once and not at the end of a step.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    lengths = rows.attention.sum(1)
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, max_tokens // max(int(lengths[order[start]]), 1))
        batches.append(order[start : start + size])
        start += size
    return batches


def tree_micro_batches(rows: Rows, max_tokens: int, *, share: bool = True) -> list[list[np.ndarray]]:
    """Index arrays that cover every row once, whose packed trees hold at most ``max_tokens`` unique tokens each, the largest groups first.

    Small groups come together in one. A group that is larger is cut between neighbours in its tree: its pieces stand in one list, and what they share can be
    computed for all of them. Without ``share`` the tokens of all rows count.
    """
    groups = [np.flatnonzero(rows.groups == group) for group in np.unique(rows.groups)]
    sizes = [unique_tokens(rows.select(group), share=share) for group in groups]
    batches: list[list[np.ndarray]] = []
    room = 0
    for number in sorted(range(len(groups)), key=lambda number: -sizes[number]):
        group, size = groups[number], sizes[number]
        if size > max_tokens:
            part = rows.select(group)
            batches.append([group[piece] for piece in partition(part.token_ids, part.lengths, max_tokens, share=share)])
        elif size <= room:
            batches[-1][0] = np.concatenate((batches[-1][0], group))
            room -= size
        else:
            batches.append([group])
            room = max_tokens - size
    return batches


def unique_tokens(rows: Rows, *, share: bool = True) -> int:
    """Tokens that a packed tree of the rows computes; all of them without ``share``."""
    return len(build_tree(rows.token_ids, rows.lengths)) if share else int(rows.attention.sum())


def _paired(tree: RolloutTree, per_trajectory: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    got, expected = [len(values) for values in per_trajectory], [len(trajectory.token_ids) for trajectory in tree.trajectories]
    if got != expected:
        raise ValueError(f"expected one advantage for each token of the trajectories of group {tree.group}, lengths {expected}, got {got}")
    return per_trajectory


def _targets(trajectory: Trajectory) -> list[bool]:
    mask = trajectory.mask
    if mask and mask[0]:
        raise ValueError(f"trajectory {trajectory.index} starts with a sampled token, which nothing predicts; the prompt must not be empty")
    return mask
