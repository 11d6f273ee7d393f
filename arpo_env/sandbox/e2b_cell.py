"""One cell in a machine of E2B: its output, its result, and what became of it when the way to it failed. Host side.

Every failure is sorted by one question: may the code have run? If not, it is raised, and a retry is safe. If so, it is a result, and the code is not sent
again.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Literal

from . import e2b_machines as machines
from .isolation import SandboxError, SessionLost
from .text import HeadTail, shorten
from .watch import FLOOD, CellResult, Status

if TYPE_CHECKING:
    from e2b_code_interpreter import Execution, ExecutionError, Sandbox

GRACE = 10.0
"""Seconds in which the kernel must answer after a cell was stopped. The service notices a client that hung up after 5 s at the latest."""
SET_UP = """__import__("sys")._arpo_session = True
__import__("random").seed(0)
try: __import__("numpy").random.seed(0)
except ImportError: pass"""
"""Run in a new machine: equal sessions draw equal numbers, and the mark tells this kernel from one that was started anew."""
_PROBE = 'print(hasattr(__import__("sys"), "_arpo_session"))'
_KERNEL_ENDED = "ContextRestarting"
_CUT_OFF = ("WebSocketError", "UnexpectedEndOfExecution", "ExecutionAborted")
_UNKNOWN = "the connection to the cell was lost: how far it ran is not known, and it was not run again"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _Flood(Exception):
    """The cell prints too much. Raised in a callback of the SDK, which then hangs up; the service interrupts the cell."""


class Cell:
    """One run of ``code`` in the machine ``sandbox``."""

    def __init__(self, sandbox: Sandbox, code: str, *, timeout: float, request_timeout: float, limit: int):
        self.sandbox, self.code, self.timeout, self.request_timeout, self.limit = sandbox, code, timeout, request_timeout, limit
        self.output = HeadTail(limit)

    def run(self) -> CellResult:
        """What the cell gave. ``SandboxError`` when it did not run, ``SessionLost`` when it did not because the machine is gone."""
        try:
            execution = self.sandbox.run_code(
                self.code,
                on_stdout=self._print,
                on_stderr=self._print,
                on_result=self._show,
                timeout=self.timeout / _counted_timeouts(),
                request_timeout=self.request_timeout,
            )
        except _Flood:
            return self._stopped("limit", f"the cell wrote more than {FLOOD >> 20} MiB of output and was stopped")
        except Exception as error:  # the SDK's own, httpx's, and a broken line of the answer: they have no base in common
            return self._failed(error)
        return self._finished(execution)

    def _print(self, message: Any) -> None:
        self.output.add(message.line.encode("utf-8", "backslashreplace"))
        if self.output.total > FLOOD:
            raise _Flood

    def _show(self, result: Any) -> None:
        """What the cell displays beside its value (a table, a figure) becomes output."""
        if not result.is_main_result and result.text:
            self.output.add(f"{result.text}\n".encode("utf-8", "backslashreplace"))

    def _finished(self, execution: Execution) -> CellResult:
        error = execution.error
        if error is None or (error.name == "SystemExit" and error.value in ("", "0", "None")):
            return self._result("ok", result=execution.text)
        if error.name == _KERNEL_ENDED:
            return self._result("died", "the interpreter ended", kept=False)
        if error.name in _CUT_OFF:
            return self._stopped("died", _UNKNOWN)
        return self._result("limit" if error.name == "MemoryError" else "exception", traceback_of(error))

    def _failed(self, error: Exception) -> CellResult:
        import e2b

        fate, running = fate_of(error), machines.running(self.sandbox)
        if fate == "not run":
            if isinstance(error, e2b.NotFoundException) or running is False:
                raise SessionLost("its machine at E2B is gone: it was killed or reached its lifetime") from error
            raise SandboxError(f"E2B did not run the cell: {type(error).__name__}: {error}") from error
        if running is False:
            return self._result("died", "the virtual machine was lost while the cell ran", kept=False)
        if fate == "timeout":
            return self._stopped("timeout", f"TimeoutError: the cell ran longer than {self.timeout:g} s and was stopped")
        return self._stopped("died", _UNKNOWN)

    def _stopped(self, status: Status, why: str) -> CellResult:
        """The result of a cell that the service was made to interrupt; its state is kept if the same kernel answers."""
        if self._kernel_is_back():
            return self._result(status, why)
        return self._result(status, f"{why}; the interpreter did not answer any more", kept=False)

    def _kernel_is_back(self) -> bool:
        try:
            with machines.translated("answer"):
                execution = self.sandbox.run_code(_PROBE, timeout=GRACE / _counted_timeouts(), request_timeout=self.request_timeout)
        except SandboxError:
            return False
        return "".join(execution.logs.stdout).strip() == "True"

    def _result(self, status: Status, error: str = "", *, result: str | None = None, kept: bool = True) -> CellResult:
        value = None if result is None else shorten(result, self.limit)
        return CellResult(status=status, output=self.output.text(), result=value, error=shorten(error, self.limit), kept=kept)


Fate = Literal["not run", "timeout", "cut off"]


def fate_of(error: Exception) -> Fate:
    """What an error of ``run_code`` says of the cell."""
    import e2b
    import httpx

    cause = error.__cause__ or error.__context__
    if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.LocalProtocolError) or isinstance(cause, httpx.ConnectTimeout):
        return "not run"
    if isinstance(error, e2b.TimeoutException) and cause is not None:  # the SDK's words for an error of the connection
        return "timeout" if isinstance(cause, httpx.ReadTimeout) else "cut off"
    if isinstance(error, e2b.TimeoutException | e2b.NotFoundException):  # 502 and 404: nothing behind the proxy took the cell
        return "not run"
    if isinstance(error, e2b.SandboxException):  # "503 Service Unavailable: ..."
        status = str(error)[:3]
        return "not run" if status == "503" or status.startswith("4") else "cut off"
    return "cut off"


def traceback_of(error: ExecutionError) -> str:
    """The kernel's traceback as plain text that ends in ``name: value``. The service joins its parts without line ends."""
    last = f"{error.name}: {error.value}" if error.value else error.name
    text = _ANSI.sub("", error.traceback).lstrip("-").removeprefix(error.name).lstrip()
    body = text.rstrip().removesuffix(last).rstrip().replace("(most recent call last)", "(most recent call last):\n", 1)
    return f"{body}\n{last}".lstrip()


@functools.cache
def _counted_timeouts() -> float:
    """By how much the SDK's transport multiplies a cell's time limit: pyqwest 0.12 takes the sum of the limits for reading and for writing."""
    try:
        import httpx
        from pyqwest.httpx._transport import convert_timeout

        return convert_timeout({"timeout": httpx.Timeout(1.0).as_dict()}) or 1.0
    except (ImportError, TypeError):  # another version, which is taken at its word
        return 1.0
