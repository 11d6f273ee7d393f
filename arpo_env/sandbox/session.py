"""The host's end of a session: run a cell, fork, close. Host side."""

from __future__ import annotations

import math
import os
import threading
import weakref
from time import monotonic
from typing import TYPE_CHECKING, Protocol, Self

from .branch import Branch
from .isolation import ForkRefused, SandboxError, SessionLost
from .lineage import Lineage
from .text import HeadTail
from .watch import GRACE, CellResult, Watch
from .wire import SHORT_FRAME, Channel, Message, close_all

if TYPE_CHECKING:
    from .pool import Pool

_ANSWER_SECONDS = 60.0
"""How long a fork or a new session may take before it counts as failed. Generous: it bounds a copy of large files on a loaded machine."""


class ForkableSession(Protocol):
    """What the Python tool needs of an interpreter, wherever it runs; :class:`Session` is the local one."""

    @property
    def alive(self) -> bool:
        """Whether the state is still there."""
        ...

    def exec(self, code: str, *, timeout: float, output_chars: int) -> CellResult:
        """Run one cell; ``SessionLost`` when there is no interpreter any more (the cell has not run then)."""
        ...

    def fork(self) -> Self:
        """An independent copy; ``SandboxError`` when there can be none."""
        ...

    def close(self) -> None:
        """Free it, ending a running cell. Idempotent."""
        ...


class Session:
    """One interpreter with its state. Thread-safe: cells and forks of one session take turns; ``close`` ends a running cell."""

    def __init__(self, branch: Branch):
        self._branch = branch
        self._lock = threading.Lock()
        self._lost = ""
        self._closed = False
        self._finalizer = weakref.finalize(self, branch.free)
        self._finalizer.atexit = False  # the pool ends everything at exit

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._branch.pid

    @property
    def directory(self) -> str:
        """Where the session's files lie, seen from the host: ``work`` (its current directory at the start) and ``tmp``."""
        return self._branch.directory

    @property
    def alive(self) -> bool:
        """Whether the state is still there."""
        return not self._lost and not self._closed and self._branch.alive

    def exec(self, code: str, *, timeout: float = 10.0, output_chars: int = 8000) -> CellResult:
        """Run ``code`` for at most ``timeout`` seconds of wall time. Everything the code does is a result; ``SessionLost`` when there is no interpreter."""
        self._check_owner()
        with self._lock:
            self._check()
            deadline = monotonic() + timeout
            message = {"op": "exec", "code": code, "limit": output_chars, "cpu": math.ceil(timeout + GRACE) * (os.cpu_count() or 1)}
            watch = Watch(self._branch, HeadTail(output_chars), deadline, timeout)
            try:
                watch.drain()  # what background threads wrote since the last cell
                self._branch.channel.send(message, deadline=deadline)
                result = watch.run()
            except (OSError, EOFError):  # the worker ended before it took the message
                result = watch.died()
            except BaseException:  # Ctrl-C in the host: the answer to this cell would be taken for the next one's
                self._lose("a call to the interpreter was broken off by the host")
                raise
            if not result.kept:
                self._lose(result.error)
            return result

    def fork(self) -> Self:
        """An independent copy of this session in its present state.

        ``ForkRefused`` when threads run in it, ``SessionLost`` when its interpreter has ended, ``SandboxError`` when the machine has no room for a copy.
        """
        self._check_owner()
        with self._lock:
            self._check()
            branch = self._branch.pool.new_branch(self._branch.lineage)
            try:
                _ask(self._branch.channel, {"op": "fork", "branch": branch.name}, branch)
            except (EOFError, OSError) as error:
                branch.free()
                self._lose(f"the interpreter ended while it was copied ({error})")
                raise SessionLost(self._lost) from None
            except SandboxError:
                branch.free()
                raise
            except BaseException:
                branch.free()
                self._lose("a copy of the interpreter was broken off by the host")
                raise
            return type(self)(branch)

    def close(self) -> None:
        """End the interpreter and free what it holds; copies live on. Idempotent, from any thread."""
        self._closed = True
        if not self._branch.pool.owned:  # the lock may be held by a thread that this process does not have
            self._finalizer()
            return
        self._branch.kill()
        with self._lock:
            self._finalizer()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        """Before the lock: in a process forked from ours, a thread that is not there may hold it."""
        if not self._branch.pool.owned:
            raise SandboxError("the session belongs to the process that this one was forked from; make a new one here")

    def _check(self) -> None:
        if self._closed:
            raise SandboxError("the session is closed")
        if not self._lost and not self._branch.alive:
            self._lose(self._branch.killed_for or "the interpreter ended between two calls")
        if self._lost:
            raise SessionLost(self._lost)

    def _lose(self, why: str) -> None:
        self._lost = why
        self._finalizer()


def open_session(pool: Pool, control: Channel) -> Session:
    """A fresh session from the zygote behind ``control``; the caller holds the zygote's lock."""
    lineage = pool.new_lineage()
    try:
        branch = pool.new_branch(lineage)
    except SandboxError:
        lineage.close_far_ends()
        lineage.close()
        raise
    try:
        _ask(control, {"op": "session", "session": lineage.name, "branch": branch.name}, branch, lineage)
    except (EOFError, OSError) as error:
        branch.free()
        raise SandboxError(f"the sandbox's parent process is gone ({error})") from None
    except BaseException:
        branch.free()
        raise
    return Session(branch)


def _ask(parent: Channel, message: Message, branch: Branch, lineage: Lineage | None = None) -> None:
    """Have ``parent`` fork a process for ``branch``, and first a keeper for ``lineage`` if it is a new one, and wait until both sides have answered."""
    deadline = monotonic() + _ANSWER_SECONDS
    try:
        parent.send(message, (*(lineage.far_ends if lineage else ()), *branch.far_ends), deadline=deadline)
    finally:
        branch.close_far_ends()
        if lineage is not None:
            lineage.close_far_ends()
    answer, fds = parent.receive(deadline=deadline, most=SHORT_FRAME)
    close_all(fds)  # none is due
    if answer.get("op") == "refused":
        raise ForkRefused(f"this session cannot be forked now: {answer.get('reason')}")
    if answer.get("op") != "forked":
        raise SandboxError(f"no process for a new session: {answer.get('reason', answer)}")
    branch.greet(deadline)
