"""E2BPython: a back end of the Python tool whose sessions are virtual machines of E2B, one each. Host side.

Cells run in the Jupyter kernel of the machine. A session forks by the service's own copy of a running machine, memory included; ``n`` copies are one request.
What can go wrong on the way is sorted by one question: may the code have run? If not, ``SandboxError`` (a retry is safe) or ``SessionLost``; if so, the cell
is ``died`` or ``timeout`` and never sent again.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from . import e2b_machines as machines
from .e2b_cell import GRACE, SET_UP, Cell
from .e2b_machines import Service, translated
from .isolation import IsolationReport, SandboxError, SessionLost
from .watch import CellResult

if TYPE_CHECKING:
    from e2b_code_interpreter import Sandbox

_MARGIN = 30.0
"""Seconds that a machine must still live when a cell reaches its deadline."""


@dataclass(frozen=True, kw_only=True)
class E2BPython:
    """Sessions are virtual machines of E2B: the strongest isolation, a second to start, a fork in one request. Billed by the service until they are closed."""

    api_key: str | None = field(default=None, repr=False)
    """None: the environment variable E2B_API_KEY, which a worker on another machine then needs too."""
    template: str | None = None
    """Name or id of the machine's template; None: the SDK's default, with numpy, sympy, pandas and others installed."""
    lifetime: int = 900
    """Seconds after which the service ends a machine that nobody uses: what a trainer that was killed leaves behind. Extended by every cell that needs it."""
    request_timeout: float = 30.0
    """Seconds for one request to the service other than a cell, its retries of "too many requests" and "busy" included."""
    internet: bool = False
    """Whether code may reach the internet."""
    on_fork_error: Literal["raise", "replay"] = "raise"
    """What a copy that the service refuses becomes: a ``SandboxError``; or a fresh machine in which all cells are run again and their results compared, with a
    warning."""
    max_concurrency: int | None = None
    """How many cells may run at once; None: as many as are asked for. Machines are limited by the account."""

    fork_support: ClassVar[Literal["native"]] = "native"
    about: ClassVar[str] = ""
    limits_in_words: ClassVar[str] = "the memory of its virtual machine"

    def __post_init__(self) -> None:
        if not 60 <= self.lifetime <= 86_400 or self.lifetime != int(self.lifetime):
            raise ValueError(f"lifetime must be a whole number of seconds from 60 to 86400 (a day), got {self.lifetime!r}")
        if not self.request_timeout > 0:
            raise ValueError(f"request_timeout must be positive, got {self.request_timeout!r}")
        if self.on_fork_error not in ("raise", "replay"):
            raise ValueError(f"on_fork_error must be 'raise' or 'replay', got {self.on_fork_error!r}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1 or None, got {self.max_concurrency}")
        machines.sdk()
        if not (self.api_key or os.environ.get("E2B_API_KEY")):
            raise ValueError("E2BPython needs an API key of E2B: api_key=... or the environment variable E2B_API_KEY")

    @property
    def overhead(self) -> float:
        return 2 * self.request_timeout + 2 * GRACE

    @property
    def service(self) -> Service:
        """How machines are asked for."""
        own = {"api_key": self.api_key, "template": self.template, "lifetime": self.lifetime}
        return Service(**own, request_timeout=self.request_timeout, internet=self.internet)  # type: ignore[arg-type]

    def prepare(self) -> None:
        """Start the first machine of this process and keep it for the first session: key, template and quota are then known to be good."""
        with _spares_lock:
            if self not in _spares:
                _spares[self] = None
                try:
                    _spares[self] = _fresh(self)
                except BaseException:
                    del _spares[self]
                    raise

    def open(self) -> E2BSession:
        with _spares_lock:
            spare = _spares.get(self)
            if spare is not None:
                _spares[self] = None
        if spare is not None:
            if spare.alive:
                return spare
            spare.close()
        return _fresh(self)

    def isolation(self) -> IsolationReport:
        """Level ``vm``: the code runs on a machine of its own at E2B."""
        open_network = {"no network": "internet=True lets code reach the internet from its virtual machine, not this machine's network"}
        return IsolationReport(level="vm", missing=open_network if self.internet else {})

    def settings(self) -> Mapping[str, Any]:
        return {"backend": "e2b", "template": self.template, "internet": self.internet}

    def counts(self) -> machines.Counts:
        """How many machines this process began and ended, and how many live: for telemetry and the bill."""
        return machines.counts()


_spares: dict[E2BPython, E2BSession | None] = {}
_spares_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _spares_lock
    _spares_lock = threading.Lock()
    _spares.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class _Record(NamedTuple):
    """A cell that ran, for a replay."""

    code: str
    timeout: float
    output_chars: int
    result: CellResult


def _fresh(backend: E2BPython) -> E2BSession:
    """A session in a new machine whose kernel has answered."""
    session = E2BSession(backend, backend.service.start())
    try:
        session.set_up()
    except BaseException:
        session.close()
        raise
    return session


class E2BSession:
    """One machine with its kernel. Thread-safe: cells and forks take turns; ``close`` ends a running cell."""

    def __init__(self, backend: E2BPython, sandbox: Sandbox, cells: tuple[_Record, ...] = ()):
        self._backend, self._sandbox = backend, sandbox
        self._cells = cells
        self._lock = threading.Lock()
        self._lost = ""
        self._closed = self._doubtful = False
        self._end_of_life = monotonic() + backend.lifetime
        self._finalizer = weakref.finalize(self, machines.orphan, sandbox.sandbox_id)
        self._finalizer.atexit = False  # the machines of this process end at exit anyway

    @property
    def alive(self) -> bool:
        """Whether the machine runs. Asks it."""
        return not self._lost and not self._closed and machines.running(self._sandbox) is not False

    def set_up(self) -> None:
        """Prepare the kernel of a new machine. ``SandboxError`` when it does not answer."""
        cell = self.exec(SET_UP, timeout=self._backend.request_timeout, output_chars=1000)
        self._cells = ()
        if cell.status != "ok":
            raise SandboxError(f"the kernel of a new machine at E2B did not answer: {cell.error}")

    def exec(self, code: str, *, timeout: float, output_chars: int) -> CellResult:
        """Run ``code`` for at most ``timeout`` seconds of wall time. ``SandboxError`` and ``SessionLost`` only when it has not run."""
        with self._lock:
            self._check()
            try:
                self._see_that_it_lives(timeout)
                cell = Cell(self._sandbox, code, timeout=timeout, request_timeout=self._backend.request_timeout, limit=output_chars).run()
            except SessionLost as error:
                self._lose(str(error))
                raise
            except SandboxError:
                self._doubtful = True
                raise
            if not cell.kept:
                self._lose(cell.error)
            elif self._backend.on_fork_error == "replay":
                self._cells = (*self._cells, _Record(code, timeout, output_chars, cell))
            return cell

    def fork(self) -> E2BSession:
        """An independent copy of the machine. Raises as :meth:`fork_many`."""
        return self.fork_many(1)[0]

    def fork_many(self, n: int) -> list[E2BSession]:
        """``n`` copies of one snapshot (one for every 20), all or none. ``SessionLost`` when the machine is gone, ``SandboxError`` when it cannot be copied."""
        with self._lock:
            self._check()
            try:
                copies = self._backend.service.copies(self._sandbox, n)
            except SessionLost as error:
                self._lose(str(error))
                raise
            except SandboxError as error:
                if self._backend.on_fork_error == "raise":
                    raise
                return self._replayed(n, error)
            return [E2BSession(self._backend, copy, self._cells) for copy in copies]

    def _replayed(self, n: int, refused: SandboxError) -> list[E2BSession]:
        """``n`` fresh machines in which the cells were run again, each result compared with the one recorded."""
        warnings.warn(f"{n} sessions are copied by running {len(self._cells)} cells again, because: {refused}", RuntimeWarning, stacklevel=3)
        made: list[E2BSession] = []
        try:
            for _ in range(n):
                made.append(_fresh(self._backend))
                made[-1]._repeat(self._cells)
        except BaseException as error:
            for copy in made:
                copy.close()
            if isinstance(error, SessionLost):  # the copy is lost, not this session
                raise SandboxError(f"a copy by replay was lost: {error}") from error
            raise
        return made

    def _repeat(self, cells: tuple[_Record, ...]) -> None:
        """Run ``cells``. ``SandboxError`` where a result is not the one recorded."""
        for number, record in enumerate(cells):
            again = self.exec(record.code, timeout=record.timeout, output_chars=record.output_chars)
            if again != record.result:
                raise SandboxError(f"cell {number} gave {again!r:.200}, before it gave {record.result!r:.200}: it cannot be copied by replay")

    def close(self) -> None:
        """End the machine and with it a running cell; copies live on. Idempotent, from any thread."""
        self._closed = True
        self._finalizer.detach()
        machines.end(self._sandbox)

    # -- the machine ---------------------------------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise SandboxError("the session is closed")
        if self._lost:
            raise SessionLost(self._lost)

    def _lose(self, why: str) -> None:
        self._lost = why
        self._finalizer.detach()
        machines.end(self._sandbox)

    def _see_that_it_lives(self, timeout: float) -> None:
        """Reach the machine anew after a failure, and extend its life where it might end before a cell of ``timeout`` seconds does."""
        lifetime = max(self._backend.lifetime, math.ceil(timeout + 2 * _MARGIN))
        if self._doubtful:
            with translated("connect to a machine"):
                self._sandbox = self._sandbox.connect(timeout=lifetime, request_timeout=self._backend.request_timeout)
            self._doubtful = False
        if self._end_of_life - monotonic() > max(self._backend.lifetime / 2, timeout + _MARGIN):
            return
        with translated("extend the life of a machine"):
            self._sandbox.set_timeout(lifetime, request_timeout=self._backend.request_timeout)
        self._end_of_life = monotonic() + lifetime
