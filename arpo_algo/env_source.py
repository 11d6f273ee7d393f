"""Where environments come from, and what may be asked of them besides ``reset`` and ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from arpo_algo.env_worker import Env

EnvSource = Env | Callable[[], Env]
"""One environment, which is reset for each group and forked for each trajectory; or a function that makes environments."""


def attribute_of(source: EnvSource, name: str) -> Any:
    """An attribute of the environment inside all wrappers. None where it has no such attribute, and of a function, whose environments are not made for it."""
    return getattr(source.unwrapped, name, None) if isinstance(source, gymnasium.Env) else None


def tool_counts(source: EnvSource) -> dict[str, float]:
    """What the environment's tools have counted so far (``telemetry`` of :class:`arpo_env.ToolEnv`): calls, seconds, retries, failures; empty without."""
    telemetry = attribute_of(source, "telemetry")
    return {} if telemetry is None else telemetry.snapshot()
