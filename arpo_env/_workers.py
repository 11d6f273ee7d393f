"""A pool of worker processes that are killed when they are late: for library code that may hang, hold the GIL or eat the memory.

A worker is a command that writes a line of JSON when it is ready (``{}``, or ``{"error": "why not"}``), then answers each line of JSON on its standard input
with one on its standard output, and ends when its input closes. Requests are ``{"seconds": ..., ...}``: a worker should end itself some seconds after that
time, should the parent be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["WorkerDied", "WorkerFailed", "WorkerLate", "WorkerPool"]

_MAX_ANSWER = 1 << 25


class WorkerFailed(RuntimeError):
    """No worker could be had: it does not start, or all are busy."""


class WorkerLate(Exception):
    """The worker did not answer in time and was killed."""


class WorkerDied(Exception):
    """The worker ended before it answered: a crash, its memory limit, or an answer without end."""


class _Worker:
    """One process and its two pipes. Used by one thread at a time."""

    def __init__(self, command: Sequence[str], start_deadline: float):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        try:
            hello = json.loads(self._exchange(b"", time.monotonic() + start_deadline))
        except (WorkerLate, WorkerDied, ValueError):
            hello = {"error": f"it did not start within {start_deadline:.0f} s"}
        except BaseException:
            self.kill()
            raise
        if "error" in hello:
            self.kill()
            raise WorkerFailed(f"{hello['error']} (the command was {' '.join(command)})")

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """The worker's answer. Raises :class:`WorkerLate` or :class:`WorkerDied`; the worker is then of no use."""
        line = json.dumps({**request, "seconds": seconds}).encode() + b"\n"
        try:
            return json.loads(self._exchange(line, time.monotonic() + seconds))
        except ValueError as error:
            raise WorkerDied from error

    def _exchange(self, line: bytes, end: float) -> bytes:
        """One line for one line. Neither direction blocks beyond ``end``."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if line:
            poll.register(self._in, select.POLLOUT)
        unsent, answer = memoryview(line), bytearray()
        while not answer.endswith(b"\n"):
            ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
            if not ready:
                raise WorkerLate
            if any(fd == self._in for fd, _ in ready):
                unsent = unsent[self._write(unsent) :]
                if not unsent:
                    poll.unregister(self._in)
            if any(fd == self._out for fd, _ in ready):
                piece = os.read(self._out, 1 << 16)
                if not piece or len(answer) > _MAX_ANSWER:
                    raise WorkerDied
                answer += piece
        return bytes(answer)

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._in, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise WorkerDied from error

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """At most ``size`` workers, started when needed. All threads share it; a forked child process starts workers of its own.

    Workers end with :meth:`close`, when the pool is garbage, and with the process.
    """

    def __init__(self, command: Sequence[str], *, size: int, start_deadline: float):
        if size < 1 or not start_deadline > 0:
            raise ValueError(f"size must be at least 1 and start_deadline positive, got {size!r} and {start_deadline!r}")
        self.command, self.size, self.start_deadline = tuple(command), size, start_deadline
        self._all: set[_Worker] = set()
        weakref.finalize(self, _kill_all, self._all)
        self._start_afresh()
        _pools.add(self)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size)
        self._idle: list[_Worker] = []

    def start(self, seconds: float = 60.0) -> None:
        """Have a worker ready, so that the first request need not wait for it. :class:`WorkerFailed` when none starts within ``seconds``."""
        if self._all:
            return
        with self._slots:
            self._give(self._take(seconds))

    def ask(self, request: Mapping[str, Any], seconds: float, *, patience: float | None = None) -> Any:
        """The answer to ``request``, a JSON value. Raises :class:`WorkerLate`, :class:`WorkerDied` or :class:`WorkerFailed`.

        ``seconds`` is the time of the answer alone; ``patience`` the seconds for waiting until a worker is free and starting one, together. None: wait for
        ever, and start within ``start_deadline``.
        """
        begun = time.monotonic()
        if not self._slots.acquire(timeout=patience):
            raise WorkerFailed(f"all {self.size} workers are busy")
        try:
            worker = self._take(self.start_deadline if patience is None else patience - (time.monotonic() - begun))
            try:
                answer = worker.ask(request, seconds)
            except BaseException:
                self._drop(worker)
                raise
            self._give(worker)
            return answer
        finally:
            self._slots.release()

    def close(self) -> None:
        """Kill the workers; requests under way raise :class:`WorkerDied`. Idempotent; a later request starts new workers."""
        with self._lock:
            idle, busy = list(self._idle), self._all.difference(self._idle)
            self._all.clear()
            self._idle.clear()
        for worker in busy:
            worker.process.kill()  # whoever waits for its answer closes its pipes
        for worker in idle:
            worker.kill()

    def _take(self, seconds: float) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.process.poll() is None:
            return worker
        if worker is not None:
            self._drop(worker)
        worker = _Worker(self.command, max(0.0, seconds))
        with self._lock:
            self._all.add(worker)
        return worker

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            if worker in self._all:
                self._idle.append(worker)
                return
        worker.kill()  # the pool was closed meanwhile

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()

    def _forget(self) -> None:
        """In a forked child: the workers are the parent's. Their pipes are closed here, so that they end when the parent does."""
        for worker in self._all:
            worker.process.returncode = 0  # not this process's child: nothing to wait for
            with contextlib.suppress(OSError):
                worker.close_pipes()
        self._all.clear()
        self._start_afresh()


def _kill_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
