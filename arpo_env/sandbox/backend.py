"""What runs the code of the Python tool: an object that owns its settings and opens sessions. Host side.

:class:`LocalPython` is the default; ``e2b.py`` and ``monty.py`` hold the others. A back end is shared by the prototype, its episodes and their forks, so it
is thread-safe; it is pickled with the prototype, so what it holds of a running service stays behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from arpo_env._together import all_or_none

from .isolation import LEVELS, IsolationError, IsolationReport, Level, probe
from .limits import Limits
from .pool import shared_pool
from .session import ForkableSession, Session


class PythonBackend(Protocol):
    """Opens the sessions that the Python tool runs its cells in. A setting that cannot work raises in the constructor."""

    @property
    def fork_support(self) -> Literal["native", "replay", "none"]:
        """``native`` where a session copies itself, ``replay`` where the environment has to run its calls again, ``none`` where neither is right."""
        ...

    @property
    def max_concurrency(self) -> int | None:
        """How many cells may run at once; None: as many as are asked for."""
        ...

    @property
    def overhead(self) -> float:
        """Seconds that a call may take beyond its cell's own limit: to open a session, to stop a cell, to bring the result."""
        ...

    @property
    def about(self) -> str:
        """Sentences for the model on what differs from plain Python; "" where nothing does."""
        ...

    @property
    def limits_in_words(self) -> str:
        """What a cell may use, for the notice of one that hit a limit: ``"1024 MiB of memory"``."""
        ...

    def prepare(self) -> None:
        """Start what sessions come from. Called before each episode, so cheap after the first time; ``SandboxError`` when sessions cannot start."""
        ...

    def open(self) -> ForkableSession:
        """A fresh interpreter. ``SandboxError`` when none can be had: no code has run then."""
        ...

    def isolation(self) -> IsolationReport:
        """What is protected from the code. ``IsolationError`` where it cannot run at all."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """What results depend on, as JSON values. No secrets."""
        ...


@runtime_checkable
class ForksMany(Protocol):
    """A session that makes several copies in one step."""

    def fork_many(self, n: int) -> list[ForkableSession]:
        """``n`` copies, all or none; raises as ``fork`` does."""
        ...


def fork_many(session: ForkableSession, n: int) -> list[ForkableSession]:
    """``n`` independent copies, all or none: in one step where the session can, else one after another."""
    if isinstance(session, ForksMany):
        return session.fork_many(n)
    return all_or_none(n, session.fork, lambda copy: copy.close())


def check_level(backend: PythonBackend, level: Level) -> None:
    """``IsolationError`` unless ``backend`` gives at least ``level``; ``ValueError`` for an unknown one."""
    if level not in LEVELS:
        raise ValueError(f"require must be None or one of {', '.join(map(repr, LEVELS))}, got {level!r}")
    report = backend.isolation()
    if LEVELS.index(report.level) < LEVELS.index(level):
        raise IsolationError(f"isolation level {level!r} was required, {backend!r} gives {report.level!r} here\n{report}")


@dataclass(frozen=True, kw_only=True)
class LocalPython:
    """Sessions are processes of this machine, forked from one that has done the imports; a copy is an ``os.fork()``. Linux."""

    imports: tuple[str, ...] = ("numpy", "sympy")
    """Modules imported once, before the first session; the code still has to import them, which is then instant. Missing ones are skipped."""
    memory_mb: int = 1024
    """MiB that the code may use beyond the imported modules."""

    fork_support: ClassVar[Literal["native"]] = "native"
    max_concurrency: ClassVar[int] = 2 * (os.cpu_count() or 1)
    overhead: ClassVar[float] = 5.0
    about: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if isinstance(self.imports, str):
            raise TypeError(f"imports must be a tuple of module names, got the string {self.imports!r}")
        object.__setattr__(self, "imports", tuple(self.imports))
        Limits(memory_mb=self.memory_mb)  # raises for one that cannot work

    @property
    def limits(self) -> Limits:
        """All limits of a session."""
        return Limits(memory_mb=self.memory_mb)

    @property
    def limits_in_words(self) -> str:
        return f"{self.limits.memory_mb} MiB of memory, {self.limits.file_mb} MiB a file"

    def prepare(self) -> None:
        """Start the process that sessions come from (half a second of imports), so that no call pays for it out of its deadline."""
        shared_pool(self.imports, self.limits)

    def open(self) -> Session:
        return shared_pool(self.imports, self.limits).session()

    def isolation(self) -> IsolationReport:
        return probe()

    def settings(self) -> Mapping[str, Any]:
        return {"backend": "local", "imports": list(self.imports), "memory_mb": self.memory_mb}
