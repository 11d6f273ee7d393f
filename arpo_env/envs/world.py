"""``arpo/World-v0``: questions about invented people, a search tool that knows only the question's own world, and a calculator.

The tasks are in ``world_tasks``, their words in ``world_text``, the tools in ``world_tools``, demonstrations for a cold start in ``world_traces``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from arpo_env.core import Episode, ToolEnv
from arpo_env.envs.world_tasks import WorldConfig, WorldTasks, world_vocabulary
from arpo_env.envs.world_text import TEXTS, Style, WorldText
from arpo_env.envs.world_tools import WorldCalculator, WorldSearch
from arpo_env.formats import CallFormat, Tags
from arpo_env.rewards import ExactMatch, HierarchicalReward, Reward
from arpo_env.task import Task
from arpo_env.tools.base import Tool, ToolResult

__all__ = ["CompactTags", "WorldCalculator", "WorldConfig", "WorldEnv", "WorldSearch", "WorldTasks", "world_format", "world_vocabulary"]


@dataclass(frozen=True, slots=True)
class CompactTags(Tags):
    """``Tags`` within the closed vocabulary: spaces around results, and the one word ``error`` for whatever went wrong."""

    result_prefix: str = " <result> "
    result_suffix: str = " </result> "

    def render_results(self, results: Sequence[tuple[str, ToolResult]], /) -> str:
        return "".join(f"{self.result_prefix}{result.text if result.ok else 'error'}{self.result_suffix}" for _, result in results)

    def render_error(self, message: str, /) -> str:
        return f"{self.result_prefix}error{self.result_suffix}"


def world_format(style: Style) -> CallFormat:
    """The call format that a world of ``style`` is spoken in by default."""
    return CompactTags() if style == "compact" else Tags()


class WorldEnv(ToolEnv):
    """The world as an environment: ``WorldEnv(split="test", hops=(2, 3))``; keywords are the fields of :class:`WorldConfig`.

    Args:
        config: the world, instead of its fields as keywords.
        python_tool: replaces the calculator, for example a ``PythonTool()``; it must be named "python".
        reward: the paper's reward over exact match by default: answers are exact, and part of a number is worth nothing.
        call_format, max_turns, max_tool_calls, render_mode: as in :class:`ToolEnv`. The compact style has no system prompt.
    """

    shared: ClassVar[frozenset[str]] = ToolEnv.shared | {"config"}

    def __init__(
        self,
        config: WorldConfig | None = None,
        *,
        python_tool: Tool | None = None,
        call_format: CallFormat | None = None,
        reward: Reward | Callable[[Task, Episode], float] | None = None,
        max_turns: int = 8,
        max_tool_calls: int | None = None,
        render_mode: str | None = None,
        **fields: Any,
    ) -> None:
        if config is not None and fields:
            raise TypeError(f"give either config or its fields, got config and {sorted(fields)}")
        self.config = config if config is not None else WorldConfig(**fields)
        if python_tool is not None and python_tool.name != "python":
            raise ValueError(f"python_tool must be named 'python', got {python_tool.name!r}")
        compact = self.config.style == "compact"
        super().__init__(
            WorldTasks(self.config),
            [WorldSearch(), python_tool if python_tool is not None else WorldCalculator(spaced=compact)],
            call_format=call_format if call_format is not None else world_format(self.config.style),
            reward=reward if reward is not None else HierarchicalReward(accuracy=ExactMatch()),
            max_turns=max_turns,
            max_tool_calls=max_tool_calls,
            system_prompt="" if compact else None,
            render_mode=render_mode,
        )

    @property
    def held_out_tasks(self) -> WorldTasks:
        """Tasks of the test split of this world: the same questions about people, places and facts of their own."""
        return WorldTasks(replace(self.config, split="test"))

    @property
    def text(self) -> WorldText:
        """How this world speaks."""
        return TEXTS[self.config.style]
