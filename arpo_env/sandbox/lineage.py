"""All branches that came from one fresh session, and the keeper process above them. Host side."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from time import monotonic, sleep

from . import proctree
from .wire import Channel, open_ends

_STATUS_SECONDS = 0.5
_SEND_SECONDS = 1.0
_READS = 64
_LINE_BYTES = 64


class Lineage:
    """The host's end of a keeper: how its workers ended, and its own end with the last branch. Thread-safe."""

    def __init__(self, name: str):
        self.name = name
        self.keeper_pid = -1
        self._lock = threading.RLock()  # a finaliser may come in between
        self._branches: set[object] = set()
        self._statuses: dict[int, int] = {}
        self._partial = b""
        self._closed = False
        ours, self._far_control, self._exits, self._far_exits = open_ends()
        self._channel = Channel(ours)
        os.set_blocking(self._exits, False)
        os.set_blocking(self._far_exits, False)  # a full pipe must not stop a worker

    @property
    def far_ends(self) -> tuple[int, int]:
        """The descriptors that go to the keeper."""
        return self._far_control.fileno(), self._far_exits

    def close_far_ends(self) -> None:
        """Close what was sent."""
        self._far_control.close()
        os.close(self._far_exits)

    def add(self, branch: object) -> None:
        """One more branch lives."""
        with self._lock:
            self._branches.add(branch)

    def remove(self, branch: object, name: str | None) -> None:
        """A branch has ended; the keeper removes its directory ``name`` if there is one. After the last branch the keeper ends, with all that is left."""
        with self._lock:
            self._branches.discard(branch)
            if not self._branches:
                self.close()
            elif name is not None and not self._closed:
                with contextlib.suppress(OSError):
                    self._channel.send({"op": "gone", "branch": name}, deadline=monotonic() + _SEND_SECONDS)

    def close(self) -> None:
        """End the keeper. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._channel.close()
            os.close(self._exits)

    def disown(self) -> None:
        """In a process forked from ours: drop the socket, or the keeper would live as long as this process, and the lock, which a thread may have held."""
        self._lock = threading.RLock()
        self._channel.close()

    def admit(self, pid: int) -> None:
        """A new worker has the number ``pid`` in its own PID namespace; a report under it is about an earlier process."""
        with self._lock:
            self._read()  # also keeps the pipe from filling up
            self._statuses.pop(pid, None)

    def exit_status(self, inner: int, outer: int) -> int | None:
        """How a worker ended (as from ``os.waitpid``): reported by the process that reaped it, or read while nobody has. None when not known.

        ``inner`` and ``outer`` are its numbers in its own PID namespace and in ours.
        """
        deadline = monotonic() + _STATUS_SECONDS
        while monotonic() < deadline:
            entry = proctree.stat(outer)  # before the reports: reaped between the two, it is in the reports
            with self._lock:
                self._read()
                if inner in self._statuses:
                    return self._statuses.pop(inner)
            if entry is not None and entry.state == "Z" and entry.exit_status:
                return entry.exit_status
            sleep(0.002)
        return None

    def _read(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS):  # a cell can write here: anything, and without end
                *lines, rest = (self._partial + os.read(self._exits, 1 << 16)).split(b"\n")
                self._partial = rest[:_LINE_BYTES]
                for line in lines:
                    with contextlib.suppress(ValueError):
                        pid, status = map(int, line.split())
                        if 0 <= status < 1 << 16 and os.WTERMSIG(status) < signal.NSIG:
                            self._statuses[pid] = status
        while len(self._statuses) > 1000:
            del self._statuses[next(iter(self._statuses))]
