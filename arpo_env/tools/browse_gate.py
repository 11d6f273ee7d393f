"""Politeness: how many requests go to one host at once, and how far apart they start. Shared by all threads, episodes and forks of one fetcher."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator


class Busy(Exception):
    """No slot became free in the time given."""


class HostGate:
    """At most ``at_once`` requests to a host at a time, whose starts lie at least ``interval`` seconds apart."""

    def __init__(self, at_once: int, interval: float):
        self.at_once, self.interval = at_once, interval
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._running: dict[str, int] = {}
        self._next_start: dict[str, float] = {}

    @contextlib.contextmanager
    def slot(self, host: str, seconds: float) -> Iterator[None]:
        """Hold one of the host's slots. :class:`Busy` when none is free within ``seconds``."""
        if self._process != os.getpid():  # the requests of the parent process are not this one's, and its lock may be held for ever
            self._reset()
        self._enter(host, time.monotonic() + seconds)
        try:
            yield
        finally:
            with self._changed:
                self._running[host] -= 1
                self._forget_idle()
                self._changed.notify_all()

    def _enter(self, host: str, end: float) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                full = self._running.get(host, 0) >= self.at_once
                start = self._next_start.get(host, now)
                if not full and start <= now:
                    break
                if now >= end:
                    raise Busy(host)
                self._changed.wait((end if full else min(end, start)) - now)
            self._running[host] = self._running.get(host, 0) + 1
            self._next_start[host] = now + self.interval

    def _forget_idle(self) -> None:
        """Keep nothing about hosts at rest: a policy invents many."""
        now = time.monotonic()
        for host in [host for host, count in self._running.items() if count == 0 and self._next_start[host] <= now]:
            del self._running[host], self._next_start[host]
