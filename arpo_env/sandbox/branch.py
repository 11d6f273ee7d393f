"""The resources of one branch on the host's side: process, descriptors, directory."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

from . import proctree
from .isolation import SandboxError
from .lineage import Lineage
from .trees import remove_tree
from .wire import PROTOCOL, SHORT_FRAME, Channel, close_all, open_ends

if TYPE_CHECKING:
    from .pool import Pool


class Branch:
    """The resources of one session: process, descriptors, directory. Apart from ``Session`` so that a finaliser can free them."""

    def __init__(self, pool: Pool, lineage: Lineage, number: int):
        self.pool, self.lineage, self.name = pool, lineage, f"{lineage.name}/{number}"
        self.pid = self.pidfd = self.inner_pid = -1
        self.killed_for = ""
        """Why the sandbox ended it on its own account."""
        self._lock = threading.RLock()  # a finaliser may come in between
        self._killed = self._freed = False
        ours, self._far_control, self.output, self._far_output = open_ends()
        self.channel = Channel(ours)
        os.set_blocking(self.output, False)
        lineage.add(self)

    @property
    def directory(self) -> str:
        """Where its files lie, seen from here: at the level ``namespaces`` through its process, so only as long as it lives."""
        return f"/proc/{self.pid}/root/sandbox" if self.pool.root is None else os.path.join(self.pool.root.path, self.name)

    @property
    def far_ends(self) -> tuple[int, int]:
        """The descriptors that go to the worker."""
        return self._far_control.fileno(), self._far_output

    def close_far_ends(self) -> None:
        """Close what was sent, so that the end of the worker is an end of file here."""
        self._far_control.close()
        os.close(self._far_output)

    def greet(self, deadline: float) -> None:
        """Wait for the worker's hello. ``SandboxError`` when it reports a failure, ends, or keeps silent."""
        try:
            message, fds = self.channel.receive(deadline=deadline, most=SHORT_FRAME)
        except (EOFError, TimeoutError) as error:
            raise SandboxError(f"a new session did not come up: {error}") from None
        inner = message.get("pid")
        if message.get("op") != "hello" or message.get("protocol") != PROTOCOL or not isinstance(inner, int) or len(fds) != 1:
            close_all(fds)
            raise SandboxError(f"a new session did not come up: {message.get('reason', message)}")
        (self.pidfd,) = fds
        pid = proctree.pid_of(self.pidfd)
        if pid is None:
            raise SandboxError("a new session ended at once")
        if pid in self.pool.living or (self.lineage.keeper_pid > 0 and self.lineage.keeper_pid not in proctree.ancestors(pid)):
            # The parent may be under the control of a hostile cell: what it names is ended when the session is, so it must be the session's own.
            raise SandboxError(f"a new session did not come up: it says that it is process {pid}, which is another one")
        self.pid, self.inner_pid = pid, inner
        self.pool.living.add(pid)
        self.lineage.admit(self.inner_pid)
        if self.lineage.keeper_pid < 0 and (entry := proctree.stat(pid)) is not None:  # the first worker is the keeper's own child
            self.lineage.keeper_pid = entry.parent

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs."""
        with self._lock:  # the descriptor is closed after a kill only
            if self.pidfd < 0 or self._killed:
                return False
            poller = select.poll()  # select() takes no descriptor above 1023
            poller.register(self.pidfd, select.POLLIN)
            return not poller.poll(0)

    def kill(self, why: str = "") -> None:
        """End the worker and everything below it except living copies. Idempotent; needs no other lock, so it ends a running cell."""
        with self._lock:
            if self._killed or not self.pool.owned:
                return
            self._killed, self.killed_for = True, why
            if self.pid > 0:
                self.pool.living.discard(self.pid)
                proctree.kill_branch(self.pidfd, self.pid, frozenset(self.pool.living))

    def disown(self) -> None:
        """In a process forked from ours: drop the sockets, and the locks, which a thread of the other process may have held."""
        self._lock = threading.RLock()
        self.channel.close()
        self.lineage.disown()

    def free(self) -> None:
        """:meth:`kill`, and give back descriptors and directory. Idempotent."""
        self.kill()
        with self._lock:
            if self._freed:
                return
            self._freed = True
        self.channel.close()
        for fd in (self.output, self.pidfd):
            if fd >= 0:
                os.close(fd)
        if self.pool.owned:
            on_host = self.pool.root is not None
            if on_host:
                remove_tree(self.directory)
            self.lineage.remove(self, None if on_host else self.name)
            self.pool.branches.discard(self)
