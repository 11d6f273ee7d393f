"""Resource limits of a worker, and how they are set. Standard library only (the guest loads this file too)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

with contextlib.suppress(ImportError):  # not on Windows, where the sandbox is refused before anything here is called
    import resource

RESERVE = 64 << 20
"""Bytes above the memory limit that the worker may use between cells, so that it can report a MemoryError."""
_MB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one worker process may use. Every process that a cell starts gets the same limits again; there is no common total."""

    memory_mb: int = 1024
    """MiB of memory above what the interpreter and the modules imported in advance use. Beyond: MemoryError in the cell."""
    file_mb: int = 256
    """MiB of one written file. Beyond: OSError in the cell."""
    disk_mb: int = 1024
    """MiB of all files of one session with all its copies, at the level ``namespaces`` (they are in memory there). Beyond: OSError in the cell."""
    open_files: int = 1024
    """Open descriptors. At least 1024: the worker keeps its own at 1000 and 1001."""
    processes: int = 256
    """Processes and threads of one session with all its copies. Beyond: an error in the cell, or, where the kernel does not count them per session, its end
    within a fraction of a second."""

    def __post_init__(self) -> None:
        for name, least in (("memory_mb", 16), ("file_mb", 1), ("disk_mb", 1), ("open_files", 1024), ("processes", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class MemoryLimit:
    """The memory limit of this process: ``lower()`` before a cell, ``lift()`` after it."""

    def __init__(self, memory_mb: int):
        used = _memory_used()
        # RLIMIT_DATA does not count shared mappings, RLIMIT_AS does.
        self._limits = {which: used[name] + memory_mb * _MB for which, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))}

    def lower(self) -> None:
        """Set the limits that hold while a cell runs."""
        for which, value in self._limits.items():
            _set(which, value, reserve=RESERVE)

    def lift(self) -> None:
        """Give the worker its reserve."""
        for which, value in self._limits.items():
            _set(which, value + RESERVE)


def apply(limits: Limits, *, count_processes: bool) -> MemoryLimit:
    """Set all limits on this process, hard limits too, and return the memory limit, lifted."""
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_FSIZE, limits.file_mb * _MB)
    _set(resource.RLIMIT_NOFILE, limits.open_files)
    if count_processes:
        _set(resource.RLIMIT_NPROC, limits.processes)
    memory = MemoryLimit(limits.memory_mb)
    memory.lift()
    return memory


def limit_cpu(seconds: int) -> None:
    """Let this process use ``seconds`` more of CPU time; beyond, SIGXCPU ends it. The last resort when nobody is left to stop a cell."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _set(which: int, value: int, *, reserve: int = 0) -> None:
    """Set the soft limit to ``value`` and the hard one ``reserve`` above it, neither above the present hard limit."""
    present = resource.getrlimit(which)[1]
    hard = value + reserve if present == resource.RLIM_INFINITY else min(value + reserve, present)
    resource.setrlimit(which, (min(value, hard), hard))


def _memory_used() -> dict[str, int]:
    """Bytes of VmData and VmSize of this process."""
    with open(f"/proc/{os.getpid()}/status") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith(("VmData", "VmSize")))
    return {name: int(value.split()[0]) * 1024 for name, value in lines.items()}
