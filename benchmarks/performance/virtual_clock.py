"""An event loop whose time jumps: hours of waiting take as long as the work between them, and the program that waits is the real one.

``run(main)`` is ``asyncio.run(main)`` on a loop that never sleeps. When nothing is ready, its clock moves to the next timer. Code in threads (environment
steps) waits by :meth:`VirtualClock.sleep`; the clock stands still until every thread of the given name either sleeps there or has ended, so that computing,
wherever it happens, takes no time and waiting takes no computing. Events at different times come in the order of their times, as on a real clock.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

POLL = 1e-4
"""Real seconds between looks at threads that are still computing."""


class VirtualClock:
    """Time in seconds since the loop was made. ``thread_name``: name of the threads that the clock waits for."""

    def __init__(self, thread_name: str) -> None:
        self.now = 0.0
        self.thread_name = thread_name
        self._lock = threading.Lock()
        self._sleeping = 0
        self._loop: VirtualLoop | None = None

    def attach(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds`` of this clock. Raises ``RuntimeError`` in the thread of the loop, which would wait for itself."""
        if self._loop is None or threading.current_thread().name != self.thread_name:
            raise RuntimeError(f"only threads named {self.thread_name!r} of a running loop can sleep here, got {threading.current_thread().name!r}")
        loop, woken = self._loop, threading.Event()

        def wake() -> None:
            with self._lock:
                self._sleeping -= 1
            woken.set()

        with self._lock:  # the loop sees the timer and the sleeper together or neither
            loop.call_soon_threadsafe(loop.call_at, self.now + seconds, wake)
            self._sleeping += 1
        woken.wait()

    def still(self) -> bool:
        """Whether no thread computes, so that time may pass."""
        with self._lock:
            return sum(thread.name == self.thread_name and not _idle(thread) for thread in threading.enumerate()) == self._sleeping


def _idle(thread: threading.Thread) -> bool:
    """Whether a thread of the environments' pool has answered all of its calls; any other thread computes as long as it lives."""
    given: int | None = getattr(thread, "given", None)
    return given is not None and given == getattr(thread, "done", None)


class _Selector(selectors.DefaultSelector):
    """Waits by moving the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        while not (events := super().select(0)):
            if self.clock.still():
                if not (events := super().select(0)):  # a thread that ended between the two looks may have left a message
                    self.clock.now += timeout
                return events
            if events := super().select(POLL):
                return events
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        super().__init__(_Selector(clock))
        clock.attach(self)

    def time(self) -> float:
        return self.clock.now


def run(main: Coroutine[Any, Any, T], clock: VirtualClock) -> T:
    """The result of ``main``; ``clock.now`` is then the time that it took."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main)
