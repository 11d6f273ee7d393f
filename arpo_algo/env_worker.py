"""Environment calls from the event loop: off it, under a deadline, and never joined when stuck."""

from __future__ import annotations

import asyncio
import logging
import math
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
        async with self._limit:
            return await asyncio.wait_for(_in_thread(function), self._timeout)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What ``function()`` returns, and the seconds it took itself, without waiting for the event loop."""
    start = time.monotonic()
    value = function()
    return value, time.monotonic() - start


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
        try:
            loop.call_soon_threadsafe(resolve, value, error)
        except RuntimeError:  # the loop is gone; so is everybody who waited
            log.debug("an environment call ended after its run")

    threading.Thread(target=run, name="arpo-env", daemon=True).start()
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
