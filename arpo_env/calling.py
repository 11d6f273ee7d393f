"""How an environment calls its tools: the contract checked, an instance bound for each episode, a deadline, retries, a concurrency limit, counters."""

from __future__ import annotations

import copy
import functools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from arpo_env._deadline import DeadlineExceeded, call_with_deadline
from arpo_env.task import Task
from arpo_env.tools.base import Shared, Tool, ToolResult, check_tool, tool


class Telemetry(Shared):
    """Counters that are not part of the episode: calls, failures by kind, retries and seconds for each tool. Forks share it; thread-safe."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, amount in counts.items():
                self._counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """A copy of the counters: ``search.calls``, ``search.seconds``, ``search.timeout``, ..."""
        with self._lock:
            return dict(self._counts)


class Slots(Shared):
    """A tool's concurrency limit, common to an environment and its forks. A forked process has its own: places are held by threads that it lacks."""

    __slots__ = ("_limit", "_places")

    def __init__(self, limit: int | None):
        self._limit = limit
        self._places: dict[int, threading.BoundedSemaphore] = {}

    def place(self) -> AbstractContextManager[Any]:
        """Waits for a place where it is entered, and holds it."""
        if self._limit is None:
            return _UNLIMITED
        return self._places.setdefault(os.getpid(), threading.BoundedSemaphore(self._limit))


_UNLIMITED = nullcontext()


def check_prototypes(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """The tools by name, plain functions made into tools. ``TypeError`` or ``ValueError`` for one that breaks the contract or a name."""
    if isinstance(tools, Tool) or callable(tools):
        raise TypeError(f"tools must be a list of tools, got {getattr(tools, 'name', None) or getattr(tools, '__name__', tools)!r} alone: write tools=[...]")
    prototypes: dict[str, Tool] = {}
    for given in tools:
        if isinstance(given, type):
            raise TypeError(f"a tool must be an object, got the class {given.__name__}: write {given.__name__}()")
        prototype = given if isinstance(given, Tool) or not callable(given) else tool(given)
        check_tool(prototype)
        if prototype.name in prototypes:
            raise ValueError(f"two tools are named {prototype.name!r}; names must differ")
        prototypes[prototype.name] = prototype
    return prototypes


def bind_tool(prototype: Tool, others: Mapping[str, Tool], task: Task) -> Tool:
    """An instance for an episode for which ``others`` are bound. What it raises is nobody's observation: without its tool an episode must not begin."""
    try:
        instance = prototype.bind_with(others)
        instance.start_episode(task)
    except Exception as error:
        error.add_note(f"raised by the tool {prototype.name!r} at the start of an episode; no token was sampled in it")
        raise
    return instance


def call_tool(instance: Tool, arguments: Mapping[str, Any], telemetry: Telemetry) -> ToolResult:
    """The result of a call, retried while it is ``unavailable`` and time is left. Raises ``DeadlineExceeded``."""
    deadline = None if instance.timeout is None else time.monotonic() + instance.timeout
    for attempt in range(instance.retries + 1):
        result = _attempt(instance, arguments, deadline)
        pause = 0.1 * 2**attempt
        if result.error != "unavailable" or attempt == instance.retries or (deadline is not None and time.monotonic() + pause >= deadline):
            break
        telemetry.add(**{f"{instance.name}.retries": 1.0})
        time.sleep(pause)
    return result


def _attempt(instance: Tool, arguments: Mapping[str, Any], deadline: float | None) -> ToolResult:
    own = copy_arguments(arguments)  # the recorded call stays as the policy wrote it
    try:
        if deadline is None:
            result = instance.call(**own)
        else:
            result = call_with_deadline(functools.partial(instance.call, **own), max(deadline - time.monotonic(), 1e-3))
    except DeadlineExceeded:
        raise
    except (Exception, SystemExit) as error:
        return ToolResult.failure("exception", f"{type(error).__name__}: {error}")
    if isinstance(result, str):
        return ToolResult(result)
    if not isinstance(result, ToolResult):
        return ToolResult.failure("exception", f"{instance.name} returned {type(result).__name__}, expected str or ToolResult")
    if not isinstance(result.text, str):
        return ToolResult.failure("exception", f"{instance.name} returned a ToolResult whose text is {type(result.text).__name__}, expected str")
    return result


def copy_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing mutable; of flat arguments, which most are, without the cost of ``deepcopy``."""
    flat = all(type(value) in _IMMUTABLE for value in arguments.values())
    return dict(arguments) if flat else copy.deepcopy(dict(arguments))


_IMMUTABLE = frozenset({str, int, float, bool, type(None)})


def weakest_isolation(prototypes: Iterable[Tool]) -> str:
    """The weakest isolation level of the tools that run foreign code; "" where none does."""
    reports = [report for report in (prototype.isolation() for prototype in prototypes) if report is not None]
    if not reports:
        return ""
    from arpo_env.sandbox.isolation import LEVELS  # not loaded for tools that run no code

    return min((report.level for report in reports), key=LEVELS.index)
