"""The resources of one session on the host's side: process, descriptors, directory."""

from __future__ import annotations

import os
import select
import shutil
import socket
import threading
from typing import TYPE_CHECKING

from . import proctree
from .isolation import SandboxError
from .wire import PROTOCOL, Channel

if TYPE_CHECKING:
    from .pool import Pool


class Branch:
    """The resources of one session: process, descriptors, directory. Apart from ``Session`` so that a finaliser can free them."""

    def __init__(self, pool: Pool, directory: str):
        self.pool, self.directory = pool, directory
        self.pid = self.pidfd = -1
        self._lock = threading.Lock()
        self._killed = self._freed = False
        ours, self._far_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(ours)
        self.output, self._far_output = os.pipe()
        os.set_blocking(self.output, False)

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
            message, _ = self.channel.receive(deadline=deadline)
        except (EOFError, TimeoutError) as error:
            raise SandboxError(f"a new session did not come up: {error}") from None
        if message["op"] != "hello" or message["protocol"] != PROTOCOL:
            raise SandboxError(f"a new session did not come up: {message.get('reason', message)}")
        try:
            self.pidfd = os.pidfd_open(message["pid"])
        except ProcessLookupError:
            raise SandboxError("a new session ended at once") from None
        self.pid = message["pid"]
        self.pool.admit(self.pid)

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs."""
        return self.pidfd >= 0 and not self._killed and not select.select([self.pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """End the worker and everything below it except living copies. Idempotent; needs no other lock, so it ends a running cell."""
        with self._lock:
            if self._killed or not self.pool.owned:
                return
            self._killed = True
            if self.pid > 0:
                self.pool.living.discard(self.pid)
                proctree.kill_branch(self.pidfd, self.pid, frozenset(self.pool.living))

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
            shutil.rmtree(self.directory, ignore_errors=True)
            self.pool.branches.discard(self)
