"""Trajectories that ran into a token limit: left out, or punished softly."""

from __future__ import annotations

from arpo_algo.config import ARPOConfig
from arpo_algo.health import TOKEN_LIMITS
from arpo_algo.tree import RolloutTree


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then linearly down to -1 at ``limit``. DAPO (arXiv:2503.14476), eq. 13."""
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def shape_overlong(tree: RolloutTree, config: ARPOConfig) -> None:
    """Takes cut trajectories out of the group's score and lowers the reward of long ones, as the config asks."""
    for trajectory in tree.trajectories:
        if config.drop_truncated and trajectory.stop_reason in TOKEN_LIMITS:
            trajectory.scored = False
        if penalty := overlong_penalty(trajectory.sampled_tokens, limit=config.overlong_limit, buffer=config.overlong_buffer):
            trajectory.reward += penalty
            trajectory.reward_parts["overlong"] = penalty
