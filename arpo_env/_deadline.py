"""Run a function under a deadline that holds, whatever the function does.

Python cannot stop a thread, so a call that overruns is *abandoned*: the caller goes on at the deadline and the daemon thread ends whenever its function
does. Nothing ever joins it, so a stuck tool delays neither other trajectories nor the end of the process.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """The function is still running; whatever it works on is not to be used any more."""


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]):
        self.function = function
        self.done = threading.Lock()  # a third of the cost of an Event; held until the function has ended
        self.done.acquire()
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:  # handed to the caller, who raises it
            self.error = error
        self.done.release()


class _Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="arpo-tool", daemon=True)
        self.jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job  # an idle worker keeps nothing of its last call alive


_idle: list[_Worker] = []  # append and pop of a list are atomic
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not live on in a forked process


def call_with_deadline(function: Callable[[], T], seconds: float) -> T:
    """What ``function()`` returns or raises; :class:`DeadlineExceeded` when it takes longer than ``seconds``."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    job = _Job(function)
    worker.jobs.put(job)  # type: ignore[arg-type]
    if not job.done.acquire(timeout=max(seconds, 0.0)):
        worker.jobs.put(None)
        raise DeadlineExceeded(f"no result within {seconds:g} s")
    _idle.append(worker)
    if job.error is not None:
        raise job.error
    return job.value  # type: ignore[return-value]
