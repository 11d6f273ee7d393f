"""What the sandbox protects on this machine, said aloud. Host side.

The local sandbox has three levels and takes the strongest that works, found by trying:

* ``namespaces``: the host's files, network and processes do not exist for a cell; processes and disk use are limited for each session;
* ``landlock``: they exist and are out of reach;
* ``process``: own processes with resource limits, a clean environment and no sockets. Files are not protected.

Two more belong to other back ends of the Python tool: ``language`` (an interpreter that has no access to the host by construction) and ``vm`` (a machine of
its own). No local level withstands a fault of the kernel; ``vm`` does.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Level = Literal["process", "language", "landlock", "namespaces", "vm"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Weakest first."""
LOCAL_LEVELS: tuple[Level, ...] = ("namespaces", "landlock", "process")
"""Those of the local sandbox, in the order in which they are tried."""
LEVEL_VARIABLE = "ARPO_SANDBOX_LEVEL"
"""Environment variable that asks the local sandbox for exactly one level, for instance to try code at a weaker one."""


class SandboxError(RuntimeError):
    """The sandbox could not do what was asked: its own failure, not that of the code in it.

    ::

        SandboxError
         ├── IsolationError     the protection that was asked for is not to be had here
         ├── ForkRefused        the session holds something that a copy would lose (running threads)
         └── SessionLost        the interpreter behind the session has ended
    """


class IsolationError(SandboxError):
    """The protection that was asked for is not to be had here."""


class ForkRefused(SandboxError):
    """The session holds something that a copy would lose; the message names it."""


class SessionLost(SandboxError):
    """The interpreter behind the session has ended; its state is gone."""


class IsolationWarning(UserWarning):
    """Code of a model runs with less protection than full namespaces give. Filter by this class once you have read it."""


@dataclass(frozen=True, kw_only=True)
class IsolationReport:
    """What is protected: the level, and each guarantee with the reason where it is missing."""

    level: Level
    missing: Mapping[str, str]
    """Guarantee -> why it does not hold here."""
    refused: Mapping[Level, str] = field(default_factory=dict)
    """Stronger level -> why this machine does not give it, and what would."""

    guarantees = (
        "host files unreadable",
        "host files unwritable",
        "modes, owners and times of host files fixed",
        "no network",
        "no unix sockets of the host",
        "host processes invisible",
        "host processes cannot be signalled",
        "host processes cannot be traced",
        "environment variables of the host hidden",
        "sessions cannot reach each other",
        "processes counted per session",
        "disk use limited",
        "absolute paths private to a copy",
        "memory, CPU, file size and open files of a process limited, and the time of a cell",
    )
    """All guarantees that are reported, kept or missing."""

    @property
    def kept(self) -> tuple[str, ...]:
        """The guarantees that hold."""
        return tuple(name for name in self.guarantees if name not in self.missing)

    def __str__(self) -> str:
        lines = [f"sandbox isolation level: {self.level}"]
        lines += [f"  yes  {name}" for name in self.kept]
        lines += [f"  NO   {name}: {reason}" for name, reason in self.missing.items()]
        lines += [f"  level {level} is not to be had: {reason}" for level, reason in self.refused.items()]
        return "\n".join(lines)


def report_of(level: Level, facts: Mapping[str, str]) -> IsolationReport:
    """The report for what the guest side says it could do (``user``, ``network``, ``seccomp``, ``signals``, ``truncate``: the empty string, or why not)."""
    return IsolationReport(level=level, missing=_MISSING[level](facts))


def _missing_process(facts: Mapping[str, str]) -> dict[str, str]:
    own_rights = "cells run with this user's rights"
    missing = {"host files unreadable": own_rights, "host files unwritable": own_rights, _MODES: own_rights}
    if facts["seccomp"]:
        if facts["network"]:
            missing["no network"] = f"the kernel gave neither a seccomp filter ({facts['seccomp']}) nor a network namespace ({facts['network']})"
        missing["no unix sockets of the host"] = f"without a seccomp filter ({facts['seccomp']}) they are reached through the file system"
    missing["host processes invisible"] = "cells see the host's /proc"
    missing["host processes cannot be signalled"] = missing["sessions cannot reach each other"] = own_rights
    if facts["user"]:
        reason = f"the kernel gave no user namespace ({facts['user']}): /proc shows memory and environment of this user's processes"
        missing["host processes cannot be traced"] = missing["environment variables of the host hidden"] = reason
    return missing | _ON_HOST


def _missing_landlock(facts: Mapping[str, str]) -> dict[str, str]:
    missing = {_MODES: "Landlock does not cover chmod, chown and utime of files that this user owns"}
    missing["host processes invisible"] = "cells see the host's /proc (names and arguments of processes, not their memory or environment)"
    if facts["signals"]:
        missing["host processes cannot be signalled"] = missing["sessions cannot reach each other"] = facts["signals"]
    if facts["truncate"]:
        missing["host files unwritable"] = facts["truncate"]
    return missing | _ON_HOST


_MODES = "modes, owners and times of host files fixed"
_ON_HOST = {
    "disk use limited": "the session's directory is an ordinary one; only the size of one file is limited",
    "absolute paths private to a copy": "an absolute path that was saved before the fork names the parent's file; relative paths are safe",
}
_MISSING: Mapping[Level, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "process": _missing_process,
    "landlock": _missing_landlock,
    "namespaces": lambda facts: {},
}

_FIXES = (
    ("unshare", "EPERM", "Docker: --security-opt seccomp=unconfined (and apparmor=unconfined); Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; "
     "Debian before 11: sysctl kernel.unprivileged_userns_clone=1"),
    ("unshare", "ENOSPC", "sysctl user.max_user_namespaces and user.max_pid_namespaces must be above 0"),
    ("unshare", "EINVAL", "the kernel was built without a kind of namespace"),
    ("mount(proc", "EPERM", "the container hides parts of /proc. Docker: --security-opt systempaths=unconfined"),
    ("mount", "EPERM", "Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined"),
    ("mount", "EACCES", "AppArmor or SELinux denies it. Docker: --security-opt apparmor=unconfined"),
    ("mount_setattr", "ENOSYS", "Linux 5.12 or later has it"),
    ("landlock", "ENOSYS", "Linux 5.13 or later has it; an old container runtime hides it"),
    ("landlock", "EOPNOTSUPP", "boot with landlock in the lsm= list"),
)  # fmt: skip
"""Call, errno, and what to change. The first that fits is shown."""


def _with_fix(reason: str) -> str:
    """``reason``, and how to change it where that is known."""
    fix = next((fix for call, code, fix in _FIXES if call in reason and code in reason), "")
    return f"{reason}. To change that: {fix}" if fix else reason


@functools.cache
def _try(level: Level) -> IsolationReport | str:
    """Start a sandbox of this level, with a session and a copy of it: its report, or why it does not work."""
    from .pool import Pool  # it needs this file

    try:
        with Pool(level=level) as pool, pool.session() as session, session.fork() as copy:
            for made in (session, copy):
                cell = made.exec("1 + 1", timeout=_TRIAL_SECONDS)
                if cell.result != "2":
                    return f"a cell in it gave {cell}"
            return pool.report
    except SandboxError as error:
        return _with_fix(str(error).removeprefix("the sandbox did not start: "))


_TRIAL_SECONDS = 60.0


def probe(level: Level | None = None) -> IsolationReport:
    """What the sandbox protects on this machine, found by trying the levels in processes of their own, strongest first; once a process.

    ``level`` (or, where it is None, the environment variable :data:`LEVEL_VARIABLE`) tries that one alone. ``IsolationError`` where none works.
    """
    if not sys.platform.startswith("linux"):
        raise IsolationError(f"the local Python sandbox needs Linux (fork with namespaces and /proc), got {sys.platform!r}")
    wanted = level or os.environ.get(LEVEL_VARIABLE) or None
    if wanted is not None and wanted not in LOCAL_LEVELS:
        raise ValueError(f"the local sandbox has the levels {', '.join(LOCAL_LEVELS)}; asked for (by {LEVEL_VARIABLE} or an argument) was {wanted!r}")
    refused: dict[Level, str] = {}
    for candidate in LOCAL_LEVELS if wanted is None else (wanted,):
        found = _try(candidate)
        if isinstance(found, IsolationReport):
            return dataclasses.replace(found, refused=refused)
        refused[candidate] = found
    reasons = "\n".join(f"{name}: {reason}" for name, reason in refused.items())
    raise IsolationError(f"the sandbox cannot start here at isolation level {wanted or 'process'!r}:\n{reasons}")


def require(level: Level) -> IsolationReport:
    """:func:`probe`, but ``IsolationError`` unless the level is at least ``level``. ``ValueError`` for an unknown one."""
    if level not in LEVELS:
        raise ValueError(f"require must be None or one of {', '.join(map(repr, LEVELS))}, got {level!r}")
    report = probe()
    if LEVELS.index(report.level) < LEVELS.index(level):
        raise IsolationError(f"isolation level {level!r} was required, this machine and version give {report.level!r}\n{report}")
    return report


_warned = threading.Event()


def warn_once(report: IsolationReport) -> None:
    """One :class:`IsolationWarning` a process when the level is weaker than full namespaces. It says exactly what is not protected."""
    if LEVELS.index(report.level) >= LEVELS.index("namespaces") or _warned.is_set():
        return
    _warned.set()
    gaps = "; ".join(f"{name}: {reason}" for name, reason in report.missing.items())
    text = f"code of the model runs at isolation level {report.level!r}. Not protected: {gaps}. Pass require={report.level!r} to accept this without a warning."
    warnings.warn(text, IsolationWarning, stacklevel=3)
