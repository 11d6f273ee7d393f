"""How a group is sampled: all numbers of :mod:`arpo_algo.rollout` in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from arpo_algo.bounds import check_at_least

Unsettled = Literal["count", "error"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a group is sampled."""

    group_size: int = 16
    """M, trajectories a group (paper: 16)."""
    initial: int = 8
    """N, trajectories started from the question; M - N are left for branches (paper: 8)."""
    window: int = 20
    """k, tokens over which entropy is averaged, at the start of the trajectory and after each observation."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_turn_tokens: int = 1024
    """A longer turn ends its trajectory with stop reason ``length``."""
    max_context: int | None = None
    """Most tokens of a trajectory; None: the policy's context length."""
    reserve_tokens: int = 32
    """Room that an observation must leave for the turn after it; a longer observation loses its middle."""
    max_live: int = 512
    """Trajectories alive at once over all groups; further groups wait."""
    env_workers: int = 32
    """Threads for environment steps: many for tools that wait, about the number of cores for tools that compute. 0: steps run inline in the event loop, which
    makes a run with in-process tools deterministic to the bit."""
    step_timeout: float | None = 600.0
    """Seconds after which an environment step is given up (with ``env_workers`` > 0). Tools have deadlines of their own."""
    unsettled: Unsettled = "count"
    """A decision that estimated entropies leave open: ``count`` goes by the estimates and counts it, ``error`` stops the run. Exact ones leave none open."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "group_size", "initial", "window", "max_turn_tokens", "reserve_tokens", "max_live")
        check_at_least(self, 0, "temperature", "env_workers")
        if self.initial > self.group_size:
            raise ValueError(f"initial must be in [1, group_size={self.group_size}], got {self.initial}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.unsettled not in get_args(Unsettled):
            raise ValueError(f"unsettled must be one of {', '.join(get_args(Unsettled))}, got {self.unsettled!r}")

    @property
    def live_groups(self) -> int:
        """Groups sampled at once."""
        return max(1, self.max_live // self.group_size)
