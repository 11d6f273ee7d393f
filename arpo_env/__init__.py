"""Environments of tasks and tools that fork in the middle of an episode, for training language-model agents that use tools.

::

    env = arpo_env.ToolEnv(rows, tools=[search], reward=my_reward)  # or gymnasium.make("arpo/World-v0")
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("<search> who built the bridge </search>")
    twin = arpo_env.fork(env)  # the same state, nothing shared; through any chain of wrappers

Importing this package registers the ids ``arpo/...`` with Gymnasium. It needs gymnasium and numpy alone; tools and environments are imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

import gymnasium

from arpo_env.core import Episode, ExecutedCall, Telemetry, ToolEnv
from arpo_env.forking import ForkableEnv, ForkError, TextSpace, fork, fork_support
from arpo_env.formats import CallFormat, Hermes, ParsedTurn, Tags, ToolCall
from arpo_env.rewards import (
    Accuracy,
    ExactMatch,
    Format,
    HierarchicalReward,
    MathEquality,
    Reward,
    Score,
    TokenF1,
    WeightedSum,
    as_reward,
    token_f1,
)
from arpo_env.task import Task, TaskSet, TaskSource
from arpo_env.tools.base import Tool, ToolResult, tool

if TYPE_CHECKING:
    from arpo_env import testing
    from arpo_env.envs.dialogue import DialogueEnv, Reply
    from arpo_env.envs.guess_number import GuessNumber
    from arpo_env.envs.math import MathEnv
    from arpo_env.envs.negotiation import Negotiation
    from arpo_env.envs.search_qa import SearchQAEnv
    from arpo_env.envs.world import WorldConfig, WorldEnv
    from arpo_env.math_grading import math_equal
    from arpo_env.sandbox.backend import LocalPython
    from arpo_env.sandbox.e2b import E2BPython
    from arpo_env.sandbox.monty import MontyPython
    from arpo_env.tools.browse import BrowseTool
    from arpo_env.tools.cache import CachedTool, ToolCache
    from arpo_env.tools.mcp import MCPTools
    from arpo_env.tools.python import PythonTool
    from arpo_env.tools.search import KeywordIndex, RecordedSearch, SearchHit, SearchTool, SearchUnavailable, TantivyIndex
    from arpo_env.wrappers import ReplayFork

_HOME = {
    "envs.dialogue": ("DialogueEnv", "Reply"),
    "envs.guess_number": ("GuessNumber",),
    "envs.math": ("MathEnv",),
    "envs.negotiation": ("Negotiation",),
    "envs.search_qa": ("SearchQAEnv",),
    "envs.world": ("WorldConfig", "WorldEnv"),
    "math_grading": ("math_equal",),
    "sandbox.backend": ("LocalPython",),
    "sandbox.e2b": ("E2BPython",),
    "sandbox.monty": ("MontyPython",),
    "tools.browse": ("BrowseTool",),
    "tools.cache": ("CachedTool", "ToolCache"),
    "tools.mcp": ("MCPTools",),
    "tools.python": ("PythonTool",),
    "tools.search": ("KeywordIndex", "RecordedSearch", "SearchHit", "SearchTool", "SearchUnavailable", "TantivyIndex"),
    "wrappers": ("ReplayFork",),
}

__all__ = [
    "Accuracy",
    "BrowseTool",
    "CachedTool",
    "CallFormat",
    "DialogueEnv",
    "E2BPython",
    "Episode",
    "ExactMatch",
    "ExecutedCall",
    "ForkError",
    "ForkableEnv",
    "Format",
    "GuessNumber",
    "Hermes",
    "HierarchicalReward",
    "KeywordIndex",
    "LocalPython",
    "MCPTools",
    "MathEnv",
    "MathEquality",
    "MontyPython",
    "Negotiation",
    "ParsedTurn",
    "PythonTool",
    "RecordedSearch",
    "ReplayFork",
    "Reply",
    "Reward",
    "Score",
    "SearchHit",
    "SearchQAEnv",
    "SearchTool",
    "SearchUnavailable",
    "Tags",
    "TantivyIndex",
    "Task",
    "TaskSet",
    "TaskSource",
    "Telemetry",
    "TextSpace",
    "TokenF1",
    "Tool",
    "ToolCache",
    "ToolCall",
    "ToolEnv",
    "ToolResult",
    "WeightedSum",
    "WorldConfig",
    "WorldEnv",
    "as_reward",
    "fork",
    "fork_support",
    "math_equal",
    "testing",
    "token_f1",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("arpo_env.testing")
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"arpo_env.{module}"), name)
    raise AttributeError(f"module 'arpo_env' has no attribute {name!r}")


for _id, _entry_point in (
    ("arpo/GuessNumber-v0", "arpo_env.envs.guess_number:GuessNumber"),
    ("arpo/Math-v0", "arpo_env.envs.math:MathEnv"),
    ("arpo/Negotiation-v0", "arpo_env.envs.negotiation:Negotiation"),
    ("arpo/SearchQA-v0", "arpo_env.envs.search_qa:SearchQAEnv"),
    ("arpo/World-v0", "arpo_env.envs.world:WorldEnv"),
):
    if _id not in gymnasium.registry:
        gymnasium.register(id=_id, entry_point=_entry_point)
