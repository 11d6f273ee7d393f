"""What an episode is: all that happened since ``reset``, as rewards read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arpo_env.formats import ParsedTurn
from arpo_env.task import Task
from arpo_env.tools.base import ToolResult


@dataclass(frozen=True, slots=True)
class ExecutedCall:
    """A call that reached its tool."""

    name: str
    arguments: Mapping[str, Any]
    result: ToolResult

    @property
    def ok(self) -> bool:
        return self.result.ok

    @property
    def error(self) -> str | None:
        return self.result.error


@dataclass(frozen=True, slots=True)
class Episode:
    """All that happened since ``reset``. Immutable: forks share it, a step replaces it."""

    task: Task
    turns: tuple[str, ...] = ()
    """The policy's own text, one entry a turn."""
    parsed: tuple[ParsedTurn, ...] = ()
    observations: tuple[str, ...] = ()
    calls: tuple[ExecutedCall, ...] = ()
    answer: str | None = None
    stop_reason: str = ""
