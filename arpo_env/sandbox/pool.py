"""The host's end of a zygote, and the zygotes of this process, one a setting. Host side."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import weakref
from time import monotonic, sleep
from typing import Self

from . import proctree
from .branch import Branch
from .isolation import IsolationReport, SandboxError, guest_command, guest_environment, probe, report_of
from .limits import Limits
from .session import Session, open_session
from .wire import PROTOCOL, Channel

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_STATUS_SECONDS = 0.5

_every_pool: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """A zygote with the sessions that came from it. Thread-safe."""

    def __init__(self, imports: tuple[str, ...] = (), limits: Limits | None = None):
        """Start the zygote and wait until it has imported ``imports``. ``SandboxError`` when it does not come up."""
        probe()
        self.imports, self.limits = imports, limits or Limits()
        self.living: set[int] = set()
        self.branches: set[Branch] = set()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._host = os.getpid()
        self._exits_lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._partial = b""
        self._root = tempfile.mkdtemp(prefix="arpo-sandbox-")
        self._process: subprocess.Popen[bytes] | None = None
        self._exits, far_exits = os.pipe()
        os.set_blocking(self._exits, False)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(ours)
        _every_pool.add(self)
        try:
            with theirs:
                self._process = self._spawn(theirs.fileno())
            self._start(far_exits)
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox did not start: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            os.close(far_exits)

    def _spawn(self, control: int) -> subprocess.Popen[bytes]:
        with open(os.path.join(self._root, "zygote.log"), "wb") as log:
            return subprocess.Popen(
                guest_command("zygote", "main", "int(sys.argv[2])", (str(control),)),
                env=guest_environment() | {"HOME": self._root},
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(control,),
                start_new_session=True,  # Ctrl-C in a terminal is the host's
            )

    def _start(self, far_exits: int) -> None:
        deadline = monotonic() + _START_SECONDS
        setup = {"op": "setup", "protocol": PROTOCOL, "imports": self.imports, "limits": dataclasses.asdict(self.limits), "root": self._root}
        try:
            self._channel.send(setup, (far_exits,), deadline=deadline)
            hello, _ = self._channel.receive(deadline=deadline)
        except (EOFError, OSError) as error:
            with open(os.path.join(self._root, "zygote.log"), errors="replace") as log:
                raise SandboxError(f"the sandbox did not start: {error}\n{log.read()[-1000:]}".rstrip()) from None
        if hello["op"] != "hello" or hello["protocol"] != PROTOCOL:
            raise SandboxError(f"the sandbox did not start: {hello.get('reason', hello)}")
        self.report: IsolationReport = report_of(hello["isolation"])
        self.missing_imports: dict[str, str] = hello["missing"]

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

    def new_branch(self) -> Branch:
        """Channels and the name of a directory for a new worker."""
        branch = Branch(self, os.path.join(self._root, str(next(self._numbers))))
        self.branches.add(branch)
        return branch

    def admit(self, pid: int) -> None:
        """A new worker has the number ``pid``; a report under it is about an earlier process."""
        self.living.add(pid)
        with self._exits_lock:
            self._read_exits()  # also keeps the pipe from filling up
            self._statuses.pop(pid, None)

    def exit_status(self, pid: int) -> int | None:
        """How the worker ``pid`` ended (as from ``os.waitpid``): reported by the process that reaped it, or read while nobody has. None when not known."""
        deadline = monotonic() + _STATUS_SECONDS
        while monotonic() < deadline:
            entry = proctree.stat(pid)  # before the reports: reaped between the two, it is in the reports
            with self._exits_lock:
                self._read_exits()
                if pid in self._statuses:
                    return self._statuses.pop(pid)
            if entry is not None and entry.state == "Z" and entry.exit_status:
                return entry.exit_status
            sleep(0.002)
        return None

    def _read_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._exits, 1 << 16):
                *lines, self._partial = (self._partial + data).split(b"\n")
                self._statuses.update((int(pid), int(status)) for pid, status in (line.split() for line in lines))
        while len(self._statuses) > 1000:
            del self._statuses[next(iter(self._statuses))]

    def close(self) -> None:
        """End all sessions and the zygote. Idempotent."""
        self._channel.close()
        if not self.owned:
            return
        if self._process is not None:
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                proctree.kill_descendants(self._process.pid)
                self._process.kill()
                self._process.wait()
        for branch in list(self.branches):
            branch.free()
        if self._exits >= 0:
            os.close(self._exits)
            self._exits = -1
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def disown(self) -> None:
        """In a process forked from ours: drop the sockets, or the sandbox would outlive its host as long as this process lives."""
        self._channel.close()
        for branch in list(self.branches):
            branch.channel.close()


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
