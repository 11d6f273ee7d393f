"""Calls that several threads want at the same time, made once: single flight."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")

_JOIN_SECONDS = 60.0
"""A call that runs longer is taken for stuck: whoever asks the same then makes a call of its own."""


class Flight(Generic[V]):
    """One running call that others may wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.thread, self.give_up = threading.get_ident(), time.monotonic() + _JOIN_SECONDS
        self.value: V
        self.error: BaseException | None = None

    def run(self, call: Callable[[], V]) -> V:
        try:
            self.value = call()
            return self.value
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.done.set()


class Flights:
    """The running calls of one process by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, Flight[Any]] = {}
        self._process = os.getpid()

    def join(self, digest: str, call: Callable[[], V]) -> tuple[V, bool]:
        """What the running call for ``digest`` gives (a copy), or else ``call()``; and whether the call was one's own."""
        flight, own = self._enter(digest)
        if own:
            try:
                return flight.run(call), True
            finally:
                with self._lock:
                    if self._running.get(digest) is flight:
                        del self._running[digest]
        if not flight.done.wait(max(0.0, flight.give_up - time.monotonic())):
            return call(), True
        if isinstance(flight.error, Exception):
            raise flight.error
        if flight.error is not None:  # whoever flew was interrupted: no reason to interrupt this thread
            return call(), True
        return copy.deepcopy(flight.value), False

    def _enter(self, digest: str) -> tuple[Flight[Any], bool]:
        if self._process != os.getpid():  # the threads that ran these calls are not in a forked child, and one of them may have held the lock
            self._process, self._lock, self._running = os.getpid(), threading.Lock(), {}
        with self._lock:
            flight = self._running.get(digest)
            if flight is not None and flight.thread != threading.get_ident() and time.monotonic() < flight.give_up:
                return flight, False
            flight = self._running[digest] = Flight()
            return flight, True
