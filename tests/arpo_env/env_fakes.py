"""Small tools, environments and helpers with scripts, for the tests of the environment core."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

from arpo_env.core import Episode, ToolEnv
from arpo_env.forking import ForkableEnv
from arpo_env.formats import Hermes
from arpo_env.task import Task
from arpo_env.tools.base import Tool, ToolResult

ROWS = [{"id": f"t{i}", "question": f"question {i}", "answer": f"answer {i}"} for i in range(20)]

TEXT_ARGUMENT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def right(task: Task, episode: Episode) -> float:
    """1 for the reference answer, else 0."""
    return float(episode.answer == task.answer)


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    """The turn that makes ``calls``."""
    return "\n".join(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in calls)


def note(text: str) -> str:
    return f"<note>{text}</note>"


class Notebook(Tool):
    """Writes a line and shows all lines so far: state in plain Python objects."""

    name = "note"
    description = "Writes a line and shows all lines."
    parameters = TEXT_ARGUMENT
    stateful = True
    fork_support = "copy"
    timeout = None

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.closed = 0

    def call(self, text: str) -> str:
        self.lines.append(text)
        return " | ".join(self.lines)

    def close(self) -> None:
        self.closed += 1


class ReplayedNotebook(Notebook):
    """The same, brought to its state by replay; ``runs`` counts calls over all instances."""

    fork_support = "replay"

    def __init__(self, runs: list[str] | None = None) -> None:
        super().__init__()
        self.runs = runs if runs is not None else []

    def bind(self) -> ReplayedNotebook:
        return type(self)(self.runs)

    def call(self, text: str) -> str:
        self.runs.append(text)
        return super().call(text)

    def fork(self) -> ReplayedNotebook:
        raise AssertionError("a tool that declares 'replay' must be replayed, not forked")


class Scripted(Tool):
    """Does what ``script`` says at each call: returns it, raises it, or calls it. ``calls`` counts over all copies."""

    name = "act"
    description = "Does what its script says."
    parameters = TEXT_ARGUMENT
    timeout = None

    def __init__(self, *script: Any, timeout: float | None = None, retries: int = 2, max_concurrency: int | None = None, name: str = "act") -> None:
        self.script, self.calls = list(script), []  # type: ignore[var-annotated]
        self.timeout, self.retries, self.max_concurrency, self.name = timeout, retries, max_concurrency, name

    def call(self, text: str) -> ToolResult | str:
        self.calls.append(text)
        action = self.script[min(len(self.calls), len(self.script)) - 1]
        if isinstance(action, BaseException):
            raise action
        return action() if callable(action) else action


class Stuck(Notebook):
    """A notebook whose call for the text "stuck" waits until ``free`` is set. See :func:`step_stuck`."""

    timeout = 30.0

    def __init__(self, free: threading.Event, closed_instances: list[Tool] | None = None) -> None:
        super().__init__()
        self.free = free
        self.closed_instances = closed_instances if closed_instances is not None else []

    def bind(self) -> Stuck:
        return type(self)(self.free, self.closed_instances)

    def fork(self) -> Stuck:
        twin = self.bind()
        twin.lines = list(self.lines)
        return twin

    def call(self, text: str) -> str:
        if text == "stuck":
            self.free.wait()
        return super().call(text)

    def close(self) -> None:
        super().close()
        self.closed_instances.append(self)


def step_stuck(env: ToolEnv) -> Any:
    """A step whose call gets stuck, under a deadline of 0.05 s; other calls keep their 30 s, which a busy machine does not reach."""
    env._tools["note"].timeout = 0.05
    return env.step(note("stuck"))


def notebook_env(*tools: Tool | Callable[..., Any], **keywords: Any) -> ToolEnv:
    """An environment with a notebook, or with ``tools``."""
    return ToolEnv(ROWS, tools or [Notebook()], reward=keywords.pop("reward", right), **keywords)


def hermes_env(*tools: Tool | Callable[..., Any], **keywords: Any) -> ToolEnv:
    return notebook_env(*tools, call_format=Hermes(), **keywords)


class Dice(ForkableEnv):
    """Adds a die to a sum at every step: state in the generator and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rolls: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.rolls = []
        return "", {"rolls": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.rolls.append(int(self.np_random.integers(1, 7)))
        return f"{action[:20]} {sum(self.rolls)}", float(sum(self.rolls)), len(self.rolls) >= 6, False, {"rolls": len(self.rolls)}


class PlainCounter(gymnasium.Env[np.ndarray, int]):
    """A third-party environment that knows nothing of forks: counts and draws."""

    def __init__(self, size: int = 10) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1000.0, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(size)
        self.state = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = np.array([float((options or {}).get("start", 0)), float(self.np_random.integers(100))])
        return self.state.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.state += [float(action), float(self.np_random.integers(3))]
        return self.state.copy(), float(self.state[0]), False, False, {}


class PickledCounter(PlainCounter, EzPickle):
    """The same, derived from EzPickle: its deepcopy forgets the state."""

    def __init__(self, size: int = 10) -> None:
        EzPickle.__init__(self, size)
        super().__init__(size)
