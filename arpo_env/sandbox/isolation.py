"""What the sandbox protects on this machine, said aloud. Host side.

Three levels are known; this version reaches the first:

* ``process``: own processes with resource limits and a clean environment; where the kernel gives us namespaces, no TCP or UDP. Files are not protected;
* ``landlock``: the host's files and network are out of reach as well;
* ``namespaces``: the host's files and processes do not exist for a cell, and disk use is limited.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["process", "landlock", "namespaces"]
LEVELS: tuple[Level, ...] = get_args(Level)

GUEST_ROOT = os.path.dirname(os.path.abspath(__file__))
_BOOT = (
    "import sys, types; package = types.ModuleType('arpo_sandbox'); package.__path__ = [sys.argv[1]]; sys.modules['arpo_sandbox'] = package; "
    "from arpo_sandbox.{module} import {function}; {function}({argument})"
)
_PROBE_SECONDS = 60.0


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

    guarantees = (
        "host files unreadable",
        "host files unwritable",
        "no network",
        "no unix sockets of the host",
        "host processes cannot be signalled",
        "processes counted per session",
        "disk use limited",
        "absolute paths private to a copy",
        "memory, file size, open files, CPU and wall time limited",
        "environment variables of the host hidden",
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
        return "\n".join(lines)


def report_of(isolation: Mapping[str, str]) -> IsolationReport:
    """The report for what the guest side says it could do (``user`` and ``network``: the empty string, or why not)."""
    own_files = "cells run with this user's rights to files"
    missing = {"host files unreadable": own_files, "host files unwritable": own_files}
    if isolation["network"]:
        missing["no network"] = f"the kernel gave no network namespace ({isolation['network']})"
    missing["no unix sockets of the host"] = "a socket that has a path is reached through the file system"
    missing["host processes cannot be signalled"] = "cells run as this user"
    if isolation["user"]:
        missing["processes counted per session"] = f"the kernel gave no user namespace ({isolation['user']})"
    elif os.getuid() == 0:
        missing["processes counted per session"] = "RLIMIT_NPROC does not bind the root user: run as another user"
    if isolation["user"]:
        missing["environment variables of the host hidden"] = "without a user namespace /proc shows them to every process of this user"
    missing["disk use limited"] = "the session's directory is an ordinary one; only the size of one file is limited"
    missing["absolute paths private to a copy"] = "an absolute path that was saved before the fork names the parent's file; relative paths are safe"
    return IsolationReport(level="process", missing=missing)


@functools.cache
def probe() -> IsolationReport:
    """What the sandbox protects on this machine, found by trying it in a process of its own. ``IsolationError`` where it cannot run at all."""
    if not sys.platform.startswith("linux"):
        raise IsolationError(f"the local Python sandbox needs Linux (fork with namespaces and /proc), got {sys.platform!r}")
    done = subprocess.run(guest_command("isolate", "probe"), env=guest_environment(), capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    if done.returncode != 0:
        raise IsolationError(f"the sandbox cannot start here: {done.stderr.strip()[-500:] or f'exit status {done.returncode}'}")
    return report_of(json.loads(done.stdout))


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
    if report.level == LEVELS[-1] or _warned.is_set():
        return
    _warned.set()
    gaps = "; ".join(f"{name}: {reason}" for name, reason in report.missing.items())
    text = f"code of the model runs at isolation level {report.level!r}. Not protected: {gaps}. Pass require='process' to accept this without a warning."
    warnings.warn(text, IsolationWarning, stacklevel=3)


def guest_command(module: str, function: str, argument: str = "", extra: tuple[str, ...] = ()) -> list[str]:
    """The command that runs ``function`` of a guest file under this interpreter, with this directory as a package and without the rest of ``arpo_env``.

    ``-s -P`` and the clean environment give what ``-I`` gives, and leave PYTHONHASHSEED in force: sets print in the same order in every run.
    """
    if not sys.executable:
        raise IsolationError("sys.executable is empty: the sandbox needs a Python interpreter to start")
    boot = _BOOT.format(module=module, function=function, argument=argument)
    return [sys.executable, "-s", "-P", "-c", boot, GUEST_ROOT, *extra]


def guest_environment() -> dict[str, str]:
    """The whole environment of the guest: nothing of the host's, so no keys and tokens, but where its libraries lie."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # a process that forks has one thread
    python = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "MPLBACKEND": "Agg", **kept, **threads, **python}
