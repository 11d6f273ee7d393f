"""From the rewards of a group to one advantage for each sampled token. numpy, pure.

Two choices, made apart from each other:

1. *The number a trajectory gets*: an :data:`Estimator`, ``(rewards_M, scored_M) -> advantages_M``.
   :func:`group_advantages` (GRPO; Dr. GRPO with ``scale_by_std=False``) or :func:`leave_one_out` (RLOO).
2. *The number a token gets* from the trajectories that hold it: an :data:`Assignment`, ``(tree, advantages_M) -> M arrays``. :func:`soft` or :func:`hard`.
   They differ only on tokens that several trajectories share. Under both, a shared token is trained once for each of its owners.

Departures from the published code of ARPO (which calls the standard deviation of torch): 1. the standard deviation is the population's, so rewards
1, 1, 0, 0 give 1, 1, -1, -1; 2. a group of equal rewards gets exactly 0, where float residue over ``delta`` gave 0.056 to sixteen rewards of 0.7.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from arpo_algo.tree import RolloutTree

Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""``(rewards_M, scored_M) -> advantages_M``; 0 for trajectories that are not scored."""

Assignment = Callable[[RolloutTree, np.ndarray], list[np.ndarray]]
"""``(tree, advantages_M) ->`` for each trajectory a float64 array with one entry for each of its tokens; 0 where it sampled nothing."""


def group_advantages(rewards_M: np.ndarray, scored_M: np.ndarray, *, delta: float = 1e-6, scale_by_std: bool = True) -> np.ndarray:
    """Rewards relative to their group, ``A_i = (R_i - mean(R)) / (std(R) + delta)``: GRPO, arXiv:2402.03300.

    Mean and *population* standard deviation run over the scored trajectories. Exactly 0 for all when their rewards are equal or fewer than two are scored.
    ``scale_by_std=False`` leaves the division out (Dr. GRPO, arXiv:2503.20783).

    Shapes: ``rewards_M`` (M,) float, ``scored_M`` (M,) bool; returns (M,) float64. Raises ``ValueError`` when a scored reward is not finite.
    """
    advantages_M = np.zeros(len(rewards_M))
    rewards = _scored_rewards(rewards_M, scored_M)
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return advantages_M
    scale = rewards.std() + delta if scale_by_std else 1.0
    advantages_M[scored_M] = (rewards - rewards.mean()) / scale
    return advantages_M


def leave_one_out(rewards_M: np.ndarray, scored_M: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the others, ``A_i = R_i - sum_{j != i} R_j / (n - 1)``: RLOO, arXiv:2402.14740.

    Shapes, zeros and errors as in :func:`group_advantages`; n counts the scored trajectories.
    """
    advantages_M = np.zeros(len(rewards_M))
    rewards = _scored_rewards(rewards_M, scored_M)
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return advantages_M
    advantages_M[scored_M] = (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)
    return advantages_M


def soft(tree: RolloutTree, advantages_M: np.ndarray) -> list[np.ndarray]:
    """Every sampled token of a trajectory gets the trajectory's own advantage (ARPO, arXiv:2507.19849, the default of the paper).

    A token that d trajectories share is trained d times, each time with another owner's advantage.
    """
    _check_length(tree, advantages_M)
    return [np.where(trajectory.mask, advantages_M[trajectory.index], 0.0) for trajectory in tree.trajectories]


def hard(tree: RolloutTree, advantages_M: np.ndarray) -> list[np.ndarray]:
    """A token shared by d scored trajectories gets their mean advantage, ``(1/d) sum_i A_i``; any other its own (ARPO, arXiv:2507.19849).

    The token is still trained once for each owner. Equal lengths and ratio 1 make this the same gradient as :func:`soft`; otherwise they differ.
    """
    _check_length(tree, advantages_M)
    scored_M = tree.scored_M
    mean_of_node = np.zeros(len(tree.nodes))
    for node, owners in zip(tree.nodes, tree.owners(), strict=True):
        scored = [owner for owner in owners if scored_M[owner]]
        if node.sampled and scored:
            mean_of_node[node.id] = advantages_M[scored].mean()
    per_token = []
    for trajectory in tree.trajectories:
        nodes = trajectory.nodes() if trajectory.scored else []
        values = np.repeat([mean_of_node[node.id] for node in nodes], [len(node.token_ids) for node in nodes])
        per_token.append(values if trajectory.scored else np.zeros(len(trajectory.token_ids)))
    return per_token


def _scored_rewards(rewards_M: np.ndarray, scored_M: np.ndarray) -> np.ndarray:
    rewards_M, scored_M = np.asarray(rewards_M, dtype=np.float64), np.asarray(scored_M)
    if rewards_M.ndim != 1 or rewards_M.shape != scored_M.shape or scored_M.dtype != np.bool_:
        raise ValueError(f"expected rewards (M,) and bool scored (M,), got {rewards_M.shape} and {scored_M.dtype} {scored_M.shape}")
    rewards: np.ndarray = rewards_M[scored_M]
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards of scored trajectories must be finite, got {rewards.tolist()}")
    return rewards


def _check_length(tree: RolloutTree, advantages_M: np.ndarray) -> None:
    if len(advantages_M) != len(tree.trajectories):
        raise ValueError(f"expected one advantage for each of {len(tree.trajectories)} trajectories, got {len(advantages_M)}")
