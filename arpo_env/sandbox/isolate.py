"""The levels of isolation as the steps that the processes of a pool take. Guest side, standard library only.

::

    zygote   enter_pool()     once, before anything is imported
    keeper   enter_session()  the process that all branches of a session are below
    worker   enter_branch()   goes to its directory, and after each fork to the copy's
    worker   lock()           the last step before code of others runs; nothing of it can be undone

:class:`Process` is what works everywhere; :class:`Landlocked` adds Landlock to it; :class:`Namespaces` takes the host's files and processes out of sight.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from . import kernel, landlock, mounts, places, proctree, seccomp
from .trees import remove_tree

OUTSIDE_UID = 60000
"""Who the cells of a root user are at the level ``namespaces``; every user's cells see this number."""


@dataclass(frozen=True)
class Home:
    """The directory of one branch (``work`` and ``tmp`` are in it): where it lies, and the path by which its cells know it."""

    storage: str
    view: str


class Process:
    """Resource limits, no sockets, no privileges; a user, network and IPC namespace where the kernel gives them. Files are not protected."""

    name = "process"

    def __init__(self, root: str, disk_mb: int):
        self.root, self.disk_mb = root, disk_mb
        self.facts = {"user": "", "network": "", "seccomp": "", "signals": "", "truncate": ""}
        """What could not be had, as ``name: reason``; the empty string where it could."""
        self._filter = b""

    def enter_pool(self, imports: list[str]) -> None:
        """Cut the pool off. Only the process that is to be the zygote returns. ``OSError`` where this level is not to be had."""
        del imports
        kernel.become_subreaper()
        kernel.forbid_new_privileges()
        self.facts |= _own_namespaces()
        self._filter = self._try_filter()

    def _try_filter(self) -> bytes:
        try:
            program = seccomp.program(own_mounts=False)
        except OSError as error:
            self.facts["seccomp"] = kernel.reason(error)
            return b""
        self.facts["seccomp"] = _refusal(lambda: kernel.install_filter(program))
        return b"" if self.facts["seccomp"] else program

    @property
    def counts_processes(self) -> bool:
        """Whether RLIMIT_NPROC counts the processes of a session, and only those. It does not bind the machine's root user."""
        return not self.facts["user"] and os.getuid() != 0

    def fork(self) -> int:
        """Fork the keeper of a new session."""
        return os.fork()

    def enter_session(self, session: str) -> None:
        """Prepare what the branches of one session share."""
        os.mkdir(os.path.join(self.root, session), 0o700)
        if not self.facts["user"]:
            kernel.enter_user_namespace(os.getuid())  # a process count of its own
        kernel.become_subreaper()
        kernel.signal_at_parents_end(signal.SIGTERM)

    def home(self, branch: str) -> Home:
        """Where the branch of this name lives."""
        path = os.path.join(self.root, branch)
        return Home(path, path)

    def fill(self, home: Home) -> None:
        """Make the directories of a fresh branch."""
        for name in ("work", "tmp"):
            os.makedirs(os.path.join(home.storage, name), mode=0o700)

    def enter_branch(self, home: Home, *, copy: bool) -> None:
        """Show the branch at its view."""

    def lock(self, home: Home) -> None:
        """Give up everything that code of others must not have."""
        kernel.keep_capabilities(0)
        if self._filter:
            kernel.install_filter(self._filter)

    def end_session(self, session: str) -> None:
        """End all processes below this one, the keeper, and remove the session's files."""
        proctree.kill_descendants(os.getpid())
        remove_tree(os.path.join(self.root, session))

    def end_pool(self) -> None:
        """End all processes below this one, the zygote, and remove the pool's files."""
        proctree.kill_descendants(os.getpid())
        remove_tree(self.root)


class Landlocked(Process):
    """:class:`Process`, and Landlock: only the interpreter can be read, only the session's own directory written, no signals to the outside (ABI 6)."""

    name = "landlock"

    def enter_pool(self, imports: list[str]) -> None:
        version = landlock.abi()
        super().enter_pool(imports)
        if self.facts["seccomp"]:
            raise OSError(errno.ENOSYS, f"the level needs seccomp: {self.facts['seccomp']}")
        if version < landlock.SIGNALS_ABI:
            self.facts["signals"] = f"Landlock has version {version} here, and keeps signals in from version {landlock.SIGNALS_ABI} on (Linux 6.12)"
        if version < landlock.TRUNCATE_ABI:
            self.facts["truncate"] = f"Landlock has version {version} here, and keeps files from being cut from version {landlock.TRUNCATE_ABI} on (Linux 6.2)"
        self._readable = [*places.SYSTEM, *places.ETC, "/etc/passwd", "/etc/group", "/proc", *places.interpreter(imports)]

    def lock(self, home: Home) -> None:
        landlock.restrict(self._readable, places.DEVICES, [os.path.dirname(home.storage)])
        super().lock(home)


class Namespaces(Process):
    """Namespaces of every kind, a root with nothing but the interpreter, files in memory. Root becomes another user."""

    name = "namespaces"

    def enter_pool(self, imports: list[str]) -> None:
        self._root_user = _is_full_root()
        if not self._root_user and os.getuid() == 0:
            raise OSError(errno.EPERM, "root without the capabilities SYS_ADMIN, SETUID and SETGID cannot become another user")
        kernel.forbid_new_privileges()
        others = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
        if self._root_user:
            kernel.unshare(others)
        else:
            kernel.enter_user_namespace(OUTSIDE_UID, others)
        _wait_for_child()
        kernel.signal_at_parents_end(signal.SIGKILL)
        socket.sethostname("sandbox")
        kernel.unshare(kernel.CLONE_NEWNS)
        self._filter = seccomp.program(own_mounts=True)
        mounts.enter_new_root(imports, OUTSIDE_UID)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def counts_processes(self) -> bool:
        return True

    def fork(self) -> int:
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid:  # the zygote; its next child would otherwise land in the same namespace
                kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
        return pid

    def enter_session(self, session: str) -> None:
        os.close(self._own_pids)
        kernel.unshare(kernel.CLONE_NEWNS)
        mounts.mount_session(self.disk_mb, OUTSIDE_UID)
        if self._root_user:
            os.setgroups([])
            os.setresgid(OUTSIDE_UID, OUTSIDE_UID, OUTSIDE_UID)
            os.setresuid(OUTSIDE_UID, OUTSIDE_UID, OUTSIDE_UID)
            kernel.own_proc_entries()
        kernel.enter_user_namespace(OUTSIDE_UID, kernel.CLONE_NEWNS)  # from here on all mounts so far are locked
        for path in (os.__file__, sys.prefix, sys.executable):  # a virtual environment may be private where its interpreter is not
            if not os.access(path, os.R_OK):
                raise OSError(errno.EACCES, f"{path} is not readable for others than root, and cells run as user {OUTSIDE_UID}")
        os.mkdir(f"{mounts.BRANCHES}/{session}", 0o700)

    def home(self, branch: str) -> Home:
        return Home(f"{mounts.BRANCHES}/{branch}", mounts.VIEW)

    def fill(self, home: Home) -> None:
        shutil.copytree(mounts.VIEW, home.storage, symlinks=True)

    def enter_branch(self, home: Home, *, copy: bool) -> None:
        mounts.bind_branch(home.storage, copy=copy)

    def lock(self, home: Home) -> None:
        kernel.keep_capabilities(1 << kernel.CAP_SYS_ADMIN)  # for the mounts of copies; the filter leaves no other use of it
        kernel.install_filter(self._filter)

    def end_session(self, session: str) -> None:
        """Nothing to do: the end of a PID namespace's first process is the end of all."""

    def end_pool(self) -> None:
        """Nothing to do: see :meth:`end_session`."""


LEVELS: dict[str, type[Process]] = {level.name: level for level in (Process, Landlocked, Namespaces)}


def _is_full_root() -> bool:
    """Whether this process can mount and can become :data:`OUTSIDE_UID` (which a container's user namespace may not know)."""
    needed = sum(1 << capability for capability in (kernel.CAP_SYS_ADMIN, kernel.CAP_SETUID, kernel.CAP_SETGID))
    if os.getuid() != 0 or kernel.capabilities() & needed != needed:
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= OUTSIDE_UID < first + count for first, _, count in ranges)


def _wait_for_child() -> None:
    """Fork; the child returns, the first process of the new PID namespace. The parent ends when the child does."""
    pid = os.fork()
    if pid == 0:
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the host must see the end of the child as the end of the pool's socket
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    os._exit(0)


def _own_namespaces() -> dict[str, str]:
    """Enter a user, network and IPC namespace where they can be had. Gives for ``user`` and ``network`` the empty string, or why it was not possible."""

    def both() -> None:
        kernel.enter_user_namespace(os.getuid(), kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC)

    def network_alone() -> None:
        kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC)

    user = _refusal(both)
    if not user:
        both()
        return {"user": "", "network": ""}
    network = _refusal(network_alone)  # root of a container may have this one where the other is denied
    if not network:
        network_alone()
    return {"user": user, "network": network}


def _refusal(step: Callable[[], None]) -> str:
    """Why ``step`` fails, tried in a child of ours; "" where it works. A step that fails half-way would leave this process without its user id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            step()
        except OSError as error:
            os.write(writer, kernel.reason(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reason = file.read().decode()
    os.waitpid(pid, 0)
    return reason
