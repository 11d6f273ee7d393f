"""The virtual machines that this process has at E2B: started, copied, killed and counted. Host side.

E2B bills a machine until it is killed or reaches its lifetime. So every machine is entered here the moment it exists and leaves when the service has confirmed
its end; what is left at exit is killed then. A finaliser only leaves a note for the next call: it may run in the middle of the SDK, which holds locks.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .isolation import SandboxError, SessionLost

if TYPE_CHECKING:
    from e2b_code_interpreter import Sandbox

MAX_COPIES = 20
"""Machines that one request may ask for (the SDK's limit)."""
_EXIT_SECONDS = 10.0


def sdk() -> Any:
    """The package ``e2b_code_interpreter``. ``ImportError`` names the extra."""
    try:
        import e2b_code_interpreter
    except ImportError:
        raise ImportError("E2BPython needs the E2B SDK: pip install 'arpo[e2b]'") from None
    return e2b_code_interpreter


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise what one call of the SDK raises as ``SessionLost`` where the machine is gone, else as ``SandboxError``. Its errors have no base in common."""
    import e2b

    try:
        yield
    except (e2b.NotFoundException, e2b.exceptions.SandboxNotRunningException) as error:
        raise SessionLost(f"its machine at E2B is gone: it was killed or reached its lifetime ({error})") from error
    except Exception as error:
        raise SandboxError(f"E2B did not {doing}: {type(error).__name__}: {error}") from error


def running(sandbox: Sandbox) -> bool | None:
    """Whether the machine runs; None when it could not be asked."""
    try:
        with translated("answer"):
            return bool(sandbox.is_running())
    except SessionLost:
        return False
    except SandboxError:
        return None


@dataclass(frozen=True, kw_only=True)
class Service:
    """How the service is asked for machines."""

    api_key: str | None = field(repr=False)
    template: str | None
    lifetime: int
    request_timeout: float
    internet: bool

    def start(self) -> Sandbox:
        """A new machine. ``SandboxError`` when there is none to be had."""
        _end_orphans()
        with translated("start a machine"):
            sandbox: Sandbox = sdk().Sandbox.create(
                template=self.template,
                timeout=self.lifetime,
                allow_internet_access=self.internet,
                metadata={"started-by": "arpo"},
                idempotency_key=str(uuid.uuid4()),  # sent again with a retry, so that it does not start a second machine
                api_key=self.api_key,
                request_timeout=self.request_timeout,
            )
        _machines.enter([sandbox])
        return sandbox

    def copies(self, sandbox: Sandbox, n: int) -> list[Sandbox]:
        """``n`` running copies of the machine with its memory, all or none."""
        _end_orphans()
        made: list[Sandbox] = []
        try:
            while len(made) < n:
                with translated("copy the machine"):
                    answers = sandbox.fork(count=min(n - len(made), MAX_COPIES), timeout=self.lifetime, request_timeout=self.request_timeout)
                fresh = [answer for answer in answers if not isinstance(answer, Exception)]
                made += fresh
                _machines.enter(fresh)
                if failed := [answer for answer in answers if isinstance(answer, Exception)]:
                    raise SandboxError(f"E2B made {len(fresh)} of {len(answers)} copies: {type(failed[0]).__name__}: {failed[0]}")
        except BaseException:
            for copy in made:
                end(copy)
            raise
        return made


@dataclass(frozen=True)
class Counts:
    """How many machines of this process began, were ended, and live."""

    begun: int
    ended: int
    living: int


class _Machines:
    """What this process has to answer for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: dict[str, Sandbox] = {}
        self._begun = self._ended = 0

    def enter(self, sandboxes: list[Sandbox]) -> None:
        with self._lock:
            self._living.update((sandbox.sandbox_id, sandbox) for sandbox in sandboxes)
            self._begun += len(sandboxes)

    def leave(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._ended += self._living.pop(sandbox.sandbox_id, None) is not None

    def living(self) -> dict[str, Sandbox]:
        with self._lock:
            return dict(self._living)

    def counts(self) -> Counts:
        with self._lock:
            return Counts(self._begun, self._ended, len(self._living))


_machines = _Machines()
_orphans: collections.deque[str] = collections.deque()


def counts() -> Counts:
    """The machines of this process so far."""
    return _machines.counts()


def end(sandbox: Sandbox, *, request_timeout: float | None = None) -> None:
    """Kill the machine; where the service does not confirm it, that is tried again at the next start and at exit. One of another process is left alone."""
    if sandbox.sandbox_id not in _machines.living():
        return
    try:
        with translated("end the machine"):
            sandbox.kill(request_timeout=request_timeout)
    except SessionLost:
        pass
    except SandboxError:
        _orphans.append(sandbox.sandbox_id)
        return
    _machines.leave(sandbox)


def orphan(sandbox_id: str) -> None:
    """Note that nobody holds the machine any more; takes no lock and asks nothing of the service."""
    _orphans.append(sandbox_id)


def _end_orphans() -> None:
    living = _machines.living()
    for _ in range(len(_orphans)):
        with contextlib.suppress(IndexError):  # another thread was faster
            sandbox = living.get(_orphans.popleft())
            if sandbox is not None:
                end(sandbox)


@atexit.register
def end_all() -> None:
    """Kill every machine of this process."""
    for sandbox in _machines.living().values():
        end(sandbox, request_timeout=_EXIT_SECONDS)


def _after_fork_in_child() -> None:
    global _machines
    _machines = _Machines()  # the parent's go on with the parent
    _orphans.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
