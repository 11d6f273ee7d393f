"""Environment calls from the event loop: off it, under a deadline, and never joined when stuck."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import gymnasium

T = TypeVar("T")
Env = gymnasium.Env[str, str]
Step = tuple[str, float, bool, bool, Mapping[str, Any]]

log = logging.getLogger(__name__)


class EnvWorker:
    """Runs environment calls: inline (``workers=0``), or each in a daemon thread, at most ``workers`` at once, nobody joining a stuck one."""

    def __init__(self, workers: int, timeout: float | None):
        self._limit = asyncio.Semaphore(workers) if workers else None
        self._timeout = timeout

    async def __call__(self, function: Callable[[], T]) -> T:
        if self._limit is None:
            return function()
        async with self._limit, asyncio.timeout(self._timeout):
            return await _in_thread(function)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What ``function()`` returns, and the seconds it took itself, without waiting for the event loop."""
    start = time.monotonic()
    value = function()
    return value, time.monotonic() - start


class _Thread(threading.Thread):
    """Runs one call after another, and is idle between them. A stuck one is left alone and is idle again when its call ends after all."""

    def __init__(self) -> None:
        super().__init__(name="arpo-env", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.given = self.done = 0  # calls; the first is written by whoever gives one, the second by the thread, after its answer
        self.start()

    def run(self) -> None:
        while True:
            call = self.calls.get()
            contextvars.Context().run(call)  # what a call sets in its context is not seen by the next
            self.done += 1
            del call  # an idle thread keeps nothing of its last call alive


_idle: list[_Thread] = []  # of all event loops; append and pop of a list are atomic
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not live on in a forked process


def _in_thread(function: Callable[[], T]) -> Awaitable[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(value: T | None, error: Exception | None) -> None:
        if future.done():  # given up meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        error: Exception | None = None
        try:
            value = function()
        except BaseException as caught:
            ordinary = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            # A future refuses StopIteration, and SystemExit would end the loop; unresolved, it would be waited for until the deadline.
            error = caught if ordinary else RuntimeError(f"the environment raised {type(caught).__name__}: {caught}")  # type: ignore[assignment]
        _idle.append(thread)  # before the answer, so that whoever calls next because of it finds this thread
        try:
            loop.call_soon_threadsafe(resolve, value, error)
        except RuntimeError:  # the loop is gone; so is everybody who waited
            log.debug("an environment call ended after its run")

    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.given += 1
    thread.calls.put(run)
    return future


def step(env: Env, text: str, *, cut: bool) -> Step:
    """What the environment answers to a turn; ``cut``: the turn ran into a limit, which ends the episode. Raises ``ValueError`` for an answer of no use.

    Where a wrapper (``TimeLimit``) cuts an episode of which the environment inside knows nothing, that one is told and scores it as it stands.
    """
    if cut:
        return truncate(env, "length", text)
    outcome = _checked(env.step(text))
    _, reward, terminated, truncated, info = outcome
    if terminated or not truncated or info.get("stop_reason") or not hasattr(env.unwrapped, "truncate"):
        return outcome
    observation, score, terminated, _, ending = truncate(env, "time_limit")
    calls = {"tool_calls": info["tool_calls"]} if "tool_calls" in info else {}  # the last turn's, made before the cut
    return observation, reward + score, terminated, True, {**ending, **calls}


def truncate(env: Env, reason: str, text: str | None = None) -> Step:
    """End an episode from outside. ``ToolEnv`` scores it as it stands; another environment gets the cut turn, if any, and is marked as truncated."""
    own = getattr(env.unwrapped, "truncate", None)
    if own is not None:
        return _checked(own(reason))
    if text is None:
        return "", 0.0, False, True, {}
    observation, reward, terminated, truncated, info = _checked(env.step(text))
    return observation, reward, terminated, truncated or not terminated, {**info, "stop_reason": info.get("stop_reason") or reason}


def _checked(outcome: tuple[Any, Any, bool, bool, Mapping[str, Any]]) -> Step:
    observation, reward, terminated, truncated, info = outcome
    if not isinstance(observation, str) or not math.isfinite(float(reward)):
        raise ValueError(f"expected a text and a finite reward from the environment, got {observation!r:.80} and {reward!r:.80}")
    return observation, float(reward), terminated, truncated, info
