"""Sampling ahead of the learner: batches of the steps to come are made in a thread while the learner works on the present one.

With ``ahead = k`` the batch of step t is begun when the weights of step ``t - k`` or newer are in place::

    k = 0   sample 0 | update 0 | sample 1 | update 1 | ...           every batch by the newest weights; no thread
    k = 1   sample 0 | sample 1 | sample 2 | ...                      batch t by the weights of update t - 1 exactly: the step takes
                     | update 0 | update 1 | ...                      as long as the slower of the two
    k > 1   up to k batches wait for a learner that is late: which weights sampled a batch then depends on the clock, and never by more than k steps

New weights go through :meth:`Pipeline.publish`; what else needs the sampler idle, through :meth:`Pipeline.between`, which waits for the batch under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Pipeline(Generic[T]):
    """``make(step)`` for the steps ``first`` to ``last - 1`` in order, each at most ``ahead`` steps before its turn."""

    def __init__(self, make: Callable[[int], T], *, first: int, last: int, ahead: int) -> None:
        self._make, self._next, self._last, self._ahead = make, first, last, ahead
        self._published = first
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._busy = False
        """A batch is being made."""
        self._held = False
        """No batch may be begun."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="arpo-sampling", daemon=True) if ahead else None
        if self._thread is not None:
            self._thread.start()

    def get(self) -> T:
        """The batch of the next step; waits for it, or makes it here when nothing is made ahead. Raises what ``make`` raised."""
        if self._thread is None:
            step, self._next = self._next, self._next + 1
            return self._make(step)
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._ready:
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise RuntimeError("the pipeline is closed")

    def between(self, action: Callable[[], R]) -> R:
        """What ``action`` returns, called while no batch is being made."""
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._busy)
        try:
            return action()
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def publish(self, update: Callable[[], object], *, in_flight: bool = False) -> None:
        """Calls ``update``, which puts weights one step newer in place: between two batches, or at once and in the middle of one with ``in_flight``.

        One ahead, it first waits for the batch that the present weights are to sample, which is the next to be trained on: the clock decides nothing then.
        """
        if in_flight:
            update()
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._ahead != 1 or self._next > self._published + 1 or self._next >= self._last or self._closed)
            self.between(update)
        with self._changed:
            self._published += 1
            self._changed.notify_all()

    def close(self, *, wait: bool = True) -> None:
        """Begins no further batch and waits for the one under way, which is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and wait:
            self._thread.join()

    def __enter__(self) -> Pipeline[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(wait=kind is None or issubclass(kind, Exception))  # whoever interrupts wants to go

    def _run(self) -> None:
        while (step := self._begin()) is not None:
            try:
                batch = self._make(step)
            except BaseException as error:
                with self._changed:
                    self._error, self._closed = error, True
            else:
                self._ready.append(batch)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _begin(self) -> int | None:
        """The step of the next batch once it may be begun; None when there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next >= self._last or (not self._held and self._next - self._published <= self._ahead))
            if self._closed or self._next >= self._last:
                return None
            self._busy = True
            step, self._next = self._next, self._next + 1
            self._changed.notify_all()
            return step
