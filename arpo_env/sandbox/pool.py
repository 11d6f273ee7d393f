"""The host's end of a zygote, and the zygotes of this process, one a setting. Host side."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping
from time import monotonic
from typing import Any, Self

with contextlib.suppress(ImportError):  # not on Windows, where the sandbox is refused before anything here is called
    import fcntl

from . import guest, proctree
from .branch import Branch
from .isolation import IsolationReport, Level, SandboxError, probe, report_of
from .limits import Limits
from .lineage import Lineage
from .roots import Root
from .session import Session, open_session
from .watchdog import Watchdog
from .wire import PROTOCOL, Channel

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0

_every_pool: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """A zygote with the sessions that came from it. Thread-safe."""

    def __init__(self, imports: tuple[str, ...] = (), limits: Limits | None = None, *, level: Level | None = None):
        """Start the zygote and wait until it has imported ``imports``. ``SandboxError`` when it does not come up.

        ``level`` asks for exactly this isolation level; ``None`` takes what :func:`~arpo_env.sandbox.isolation.probe` found.
        """
        promised = probe() if level is None else None
        self.level: Level = promised.level if promised is not None else level or "process"
        self.imports, self.limits = imports, limits or Limits()
        self.living: set[int] = set()
        self.branches: set[Branch] = set()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._host = os.getpid()
        self._watchdog: Watchdog | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.root = None if self.level == "namespaces" else Root()
            """The directory that holds the sessions' files; None where they are in the sandbox's own file system."""
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        self._channel = Channel(ours)
        _every_pool.add(self)
        try:
            with tempfile.TemporaryFile() as log:
                with theirs:
                    self._process = self._spawn(theirs.fileno(), log.fileno())
                hello = self._greet(log.fileno())
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox did not start: {error}") from error
        except BaseException:
            self.close()
            raise
        own = report_of(self.level, hello["facts"])
        self.report: IsolationReport = own if promised is None else dataclasses.replace(own, refused=promised.refused)
        self.missing_imports: dict[str, str] = hello["missing"]
        if not hello["facts"]["counted"]:
            self._watchdog = Watchdog(self)

    def _spawn(self, theirs: int, log: int) -> subprocess.Popen[bytes]:
        home = "/" if self.root is None else self.root.path
        control = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)  # in a host without standard streams it may lie where the guest's go
        try:
            return subprocess.Popen(
                guest.command(control),
                env=guest.environment() | {"HOME": home},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(control,),
                start_new_session=True,  # Ctrl-C in a terminal is the host's
            )
        finally:
            os.close(control)

    def _greet(self, log: int) -> Mapping[str, Any]:
        deadline = monotonic() + _START_SECONDS
        root = "" if self.root is None else self.root.path
        setup = {"op": "setup", "protocol": PROTOCOL, "level": self.level, "imports": self.imports, "limits": dataclasses.asdict(self.limits), "root": root}
        try:
            self._channel.send(setup, deadline=deadline)
            hello, _ = self._channel.receive(deadline=deadline)
        except (EOFError, OSError) as error:
            said = os.pread(log, 1 << 20, 0).decode("utf-8", "replace")
            raise SandboxError(f"the sandbox did not start: {error}\n{said[-1000:]}".rstrip()) from None
        if hello["op"] != "hello" or hello["protocol"] != PROTOCOL:
            raise SandboxError(f"the sandbox did not start: {hello.get('reason', hello)}")
        return hello

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return -1 if self._process is None else self._process.pid

    @property
    def open_sessions(self) -> int:
        """How many sessions live: for tests and telemetry."""
        return len(self.branches)

    @property
    def owned(self) -> bool:
        """False in a process that was forked from the one that made this pool: there it must not be touched."""
        return os.getpid() == self._host

    @property
    def alive(self) -> bool:
        """Whether the zygote runs and is ours."""
        return self.owned and self._channel.fileno() >= 0 and self._process is not None and self._process.poll() is None

    def session(self) -> Session:
        """A fresh interpreter with the imports done and nothing defined."""
        with self._lock:
            if not self.alive:
                raise SandboxError("the sandbox's parent process is gone")
            return open_session(self, self._channel)

    def new_lineage(self) -> Lineage:
        """Channels for a new keeper."""
        try:
            return Lineage(str(next(self._numbers)))
        except OSError as error:
            raise SandboxError(f"no descriptors for a new session: {error}") from error

    def new_branch(self, lineage: Lineage) -> Branch:
        """Channels and the name of a directory for a new worker."""
        try:
            branch = Branch(self, lineage, next(self._numbers))
        except OSError as error:
            raise SandboxError(
                f"no descriptors for a new session: {error}. A session holds 5, a copy 3; ulimit -n shows how many this process may have"
            ) from error
        self.branches.add(branch)
        return branch

    def close(self) -> None:
        """End all sessions and the zygote. Idempotent."""
        self._channel.close()
        if not self.owned:
            return
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._process is not None:
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                proctree.kill_descendants(self._process.pid)
                self._process.kill()
                self._process.wait()
        for branch in list(self.branches):
            branch.free()
        if self.root is not None:
            self.root.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def disown(self) -> None:
        """In a process forked from ours: drop the sockets, or the sandbox would outlive its host as long as this process lives."""
        self._channel.close()
        for branch in list(self.branches):
            branch.disown()


_pools: dict[tuple[tuple[str, ...], Limits], Pool] = {}
_pools_lock = threading.Lock()


def shared_pool(imports: tuple[str, ...], limits: Limits) -> Pool:
    """The pool of this process with these settings, started at the first call and again when its zygote is gone."""
    with _pools_lock:
        pool = _pools.get((imports, limits))
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = _pools[imports, limits] = Pool(imports, limits)
        return pool


@atexit.register
def close_pools() -> None:
    """End every sandbox of this process; the next session starts a new one."""
    with _pools_lock:
        while _pools:
            _pools.popitem()[1].close()


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()  # another thread of the parent may have held it
    for pool in list(_every_pool):
        pool.disown()
    _pools.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where the sandbox is refused, but this file can be imported
    os.register_at_fork(after_in_child=_after_fork_in_child)
