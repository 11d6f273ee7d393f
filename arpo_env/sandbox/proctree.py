"""Processes below a process, read from /proc, and how to end them. Linux; both sides use this file."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What /proc/PID/stat says of one process."""

    state: str
    parent: int
    session: int
    threads: int
    exit_status: int
    """As from ``os.waitpid``; meaningful for a zombie only, 0 when we may not know it."""


def stat(pid: int) -> ProcessStat | None:
    """The process's stat line, None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets; fields[0] is field 3 of proc(5)
    return ProcessStat(state=fields[0].decode(), parent=int(fields[1]), session=int(fields[3]), threads=int(fields[17]), exit_status=int(fields[49]))


def pid_of(pidfd: int) -> int | None:
    """The number that the process behind ``pidfd`` has here, whatever number it has in its own PID namespace. None when it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        number = next((int(line.split()[1]) for line in file if line.startswith("Pid:")), -1)
    return number if number > 0 else None


def children(pid: int) -> list[int]:
    """The pids of the children of all threads of ``pid``, zombies included; empty when it is gone."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/task"):  # alive, so the kernel lacks CONFIG_PROC_CHILDREN
            return [other for other in _all_pids() if (entry := stat(other)) is not None and entry.parent == pid]
    except ProcessLookupError:
        pass
    return found


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def ancestors(pid: int) -> Iterator[int]:
    """The parent of ``pid``, its parent, and so on."""
    while pid > 1 and (entry := stat(pid)) is not None:
        pid = entry.parent
        yield pid


def descendants(pid: int, keep: Collection[int] = ()) -> list[int]:
    """Living processes below ``pid``; those in ``keep`` and all below them are left out."""
    found: list[int] = []
    seen = set(keep)
    queue = children(pid)
    while queue:
        child = queue.pop()
        if child in seen:
            continue
        seen.add(child)
        entry = stat(child)
        if entry is not None and entry.state not in "ZX":
            found.append(child)
        queue += children(child)
    return found


def count_threads(pids: Iterable[int]) -> int:
    """Threads of all these processes: what the kernel counts as processes."""
    return sum(entry.threads for pid in pids if (entry := stat(pid)) is not None)


def kill_descendants(pid: int, keep: Collection[int] = ()) -> None:
    """Send SIGKILL to everything below ``pid`` except ``keep``, again and again until nothing new appears (a fork bomb makes new ones meanwhile)."""
    for _ in range(_ROUNDS):
        found = descendants(pid, keep)
        if not found:
            return
        for victim in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)


def kill_branch(pidfd: int, pid: int, keep: Collection[int] = ()) -> None:
    """End the worker ``pid`` (leader of its own session), its process group and everything below it; copies in ``keep`` live on.

    ``pidfd`` guards against a number that was given to another process after the worker's end.
    """
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)  # a stopped worker starts nothing while its children are ended
    except ProcessLookupError:
        entry = stat(pid)
        if entry is not None and entry.state not in "ZX":
            return  # another process by now; it could not have the number while anything was left in the group of that number
    else:
        kill_descendants(pid, keep)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
