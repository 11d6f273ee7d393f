"""A running cell seen from the host: its output, its result, its deadline, its end."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from .branch import Branch
from .text import NOTICE_CHARS, HeadTail, shorten
from .wire import MAX_FRAME, SHORT_FRAME, Message, close_all

GRACE = 1.0
"""Seconds between the interrupt at a cell's deadline, which keeps the state, and the kill, which does not."""
FLOOD = 16 << 20
"""Bytes of output after which a cell is interrupted."""
_CHUNK = 1 << 16
_LONGEST_WAIT = 3600.0
"""Seconds of one wait: poll() takes no more than 24 days."""

Status = Literal["ok", "exception", "timeout", "died", "limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """What one cell gave."""

    status: Status
    output: str = ""
    """stdout and stderr in the order they were written, bounded."""
    result: str | None = None
    """The ``repr`` of a last expression, bounded."""
    error: str = ""
    """The traceback, or in words what ended the cell."""
    kept: bool = True
    """Whether the state of the interpreter lives on."""


class Watch:
    """Reads a running cell: its output, its result, its deadline, its end."""

    def __init__(self, branch: Branch, output: HeadTail, deadline: float, timeout: float):
        self.branch, self.output, self.deadline, self.timeout = branch, output, deadline, timeout
        self.stopped: Literal["", "time", "output"] = ""
        self._most = min(MAX_FRAME, 32 * output.limit + SHORT_FRAME)  # two texts of that many characters, of at most 12 bytes each in JSON

    def run(self) -> CellResult:
        """Wait for the cell's result; interrupt it at its deadline or in a flood of output, kill it when that does not help."""
        poller = select.poll()
        for fd in (self.branch.channel.fileno(), self.branch.output, self.branch.pidfd):
            poller.register(fd, select.POLLIN)
        while True:
            rest = self.deadline - monotonic()
            if rest <= 0:
                if self.stopped:
                    return self._kill()
                self._interrupt("time")
                continue
            ready = {fd for fd, _ in poller.poll(math.ceil(min(rest, _LONGEST_WAIT) * 1000))}
            if self.branch.output in ready and not self._read():
                poller.unregister(self.branch.output)
            if self.output.total > FLOOD and not self.stopped:
                self._interrupt("output")
            if self.branch.channel.fileno() in ready and (found := self.branch.channel.receive_now(self._most)) is not None:
                message, fds = found
                close_all(fds)  # none is due, but a cell may write to the socket
                self.drain()
                return self._finish(message)
            if self.branch.pidfd in ready:
                return self.died()

    def _interrupt(self, why: Literal["time", "output"]) -> None:
        self.stopped = why
        self.deadline = monotonic() + GRACE
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.branch.pidfd, signal.SIGINT)

    def _read(self) -> bool:
        """Read once; False at the end of the output."""
        try:
            data = os.read(self.branch.output, _CHUNK)
        except BlockingIOError:
            return True
        self.output.add(data)
        return bool(data)

    def drain(self) -> None:
        """Read what is there now, bounded: a process that the cell left behind may write for ever."""
        for _ in range(64):
            before = self.output.total
            if not self._read() or self.output.total == before:
                return

    def _finish(self, message: Message) -> CellResult:
        status, result, error = (message.get(name) for name in ("status", "result", "error"))
        if not isinstance(status, str) or not isinstance(result, str | None) or not isinstance(error, str | None):
            raise EOFError(f"the answer to a cell is not one: {sorted(message)}: not our protocol")
        longest = self.output.limit + NOTICE_CHARS  # a worker cuts its texts, unless a cell answers in its place
        output, error = self.output.text(), shorten(error or "", longest)
        if self.stopped:
            return CellResult(status="timeout" if self.stopped == "time" else "limit", output=output, error=f"{error}\n{self._why()}".lstrip())
        if status == "memory":
            return CellResult(status="limit", output=output, error=error)
        if status == "exception":
            return CellResult(status="exception", output=output, error=error)
        return CellResult(status="ok", output=output, result=None if result is None else shorten(result, longest))

    def _why(self) -> str:
        if self.stopped == "time":
            return f"TimeoutError: the cell ran longer than {self.timeout:g} s and was stopped"
        return f"the cell wrote more than {FLOOD >> 20} MiB of output and was stopped"

    def _kill(self) -> CellResult:
        self.branch.kill()
        self.drain()
        status: Status = "timeout" if self.stopped == "time" else "limit"
        return CellResult(status=status, output=self.output.text(), error=f"{self._why()}; it did not react to the interrupt", kept=False)

    def died(self) -> CellResult:
        """The result of a cell whose process has ended."""
        self.drain()
        if self.branch.killed_for:
            return CellResult(status="limit", output=self.output.text(), error=self.branch.killed_for, kept=False)
        code = self.branch.lineage.exit_status(self.branch.inner_pid, self.branch.pid)
        self.branch.kill()
        status: Status = "limit" if code is not None and os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGXCPU else "died"
        return CellResult(status=status, output=self.output.text(), error=f"the interpreter ended ({_ending(code)})", kept=False)


def _ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "how is not known"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"signal {number}, {signal.strsignal(number)}"
    return f"exit status {os.WEXITSTATUS(status)}"
