"""The Python tool: an interpreter that keeps its state between calls and forks with the environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Literal, Self

from arpo_env.sandbox import isolation
from arpo_env.sandbox.isolation import IsolationReport, SandboxError, SessionLost
from arpo_env.sandbox.limits import Limits
from arpo_env.sandbox.pool import shared_pool
from arpo_env.sandbox.session import ForkableSession
from arpo_env.sandbox.text import shorten
from arpo_env.sandbox.watch import CellResult
from arpo_env.tools.base import ErrorKind, Tool, ToolResult

_MARGIN = 5.0
"""Seconds by which the environment's deadline lies beyond ours: interrupt, grace, kill and a copy of what was printed fit in between."""

_FRESH = "[The interpreter of the calls before was lost ({why}). This one is fresh: variables, imports and files of before are gone.]\n"


class PythonTool(Tool):
    """Runs Python code as a notebook does: names persist between calls, the value of a last expression is shown, so is everything printed.

    Constructing a prototype leaves no process behind. ``bind()`` gives an instance whose session starts at its first call; ``fork()`` copies the session
    (variables, open files, working directory, state of ``random`` and numpy) in milliseconds. All sessions of this process with the same ``imports`` and
    limits come from one parent process, which has done the imports.

    Failures are results: ``exception`` (the text is the traceback), ``timeout``, ``limit`` (memory, output, CPU), ``died`` (``os._exit``, a crash).
    ``ToolResult.state`` says whether the variables live on. After ``lost`` the next call runs in a fresh interpreter, and its text begins by saying so.
    ``unavailable`` is given only when no session could be started: no code has run, so a retry is safe. Code itself is never run twice, and a cell that
    prints nothing is a success.
    """

    name = "python"
    description = "Runs Python code in an interpreter that keeps its state between calls. Returns what the code prints and the value of its last expression."
    stateful = True
    deterministic = False  # code may read clocks and process ids; random and numpy start from a fixed seed
    fork_support = "native"
    max_concurrency = 2 * (os.cpu_count() or 1)
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source; names that it defines stay for later calls"}},
        "required": ["code"],
    }

    def __init__(
        self,
        *,
        imports: tuple[str, ...] = ("numpy", "sympy"),
        timeout: float = 10.0,
        memory_mb: int = 1024,
        output_chars: int = 8000,
        require: isolation.Level | None = None,
    ):
        """A prototype.

        Args:
            imports: modules imported once, before the first session; the code still has to import them, which is then instant. Missing ones are skipped.
            timeout: seconds of wall time for one call. At the deadline the code is interrupted and its state kept; a second later it is killed.
            memory_mb: MiB that the code may use beyond the imported modules.
            output_chars: characters of one result, each of printed text and value or traceback cut in the middle with a notice.
            require: the isolation level that is asked for; ``IsolationError`` when this machine does not give it. ``None`` takes what there is and
                warns once a process (:class:`~arpo_env.sandbox.IsolationWarning`) of what is not protected; ``"process"`` takes it without a warning.
        """
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r}")
        if output_chars < 100:
            raise ValueError(f"output_chars must be at least 100, got {output_chars!r}")
        self.imports = tuple(imports)
        self.limits = Limits(memory_mb=memory_mb)
        self.cell_timeout = float(timeout)
        self.timeout = self.cell_timeout + _MARGIN
        self.output_chars = output_chars
        if require is None:
            isolation.warn_once(isolation.probe())
        else:
            isolation.require(require)
        self._start_unbound()

    def _start_unbound(self) -> None:
        self._lock = threading.Lock()
        self._session: ForkableSession | None = None
        self._lost = ""
        self._closed = False

    def isolation(self) -> IsolationReport:
        """What is protected from the code on this machine, and what is not, with reasons. ``print`` it."""
        return isolation.probe()

    def call(self, **arguments: Any) -> ToolResult:
        """Run ``code`` (see the class). Raises only when the tool is closed."""
        code: str = arguments["code"]
        if not code.strip():
            state: Literal["none", "kept"] = "none" if self._session is None else "kept"
            return ToolResult.failure("bad_arguments", "The code is empty: nothing was run. Write the Python code to run.", state=state)
        try:
            session, note = self._open()
        except SandboxError as error:
            if self._closed:
                raise
            return ToolResult.failure("unavailable", f"The Python interpreter could not be started: {error}", state="none")
        try:
            cell = session.exec(code, timeout=self.cell_timeout, output_chars=self.output_chars)
        except SessionLost as error:  # it ended between two calls, so this code has not run
            self._lose(session, str(error))
            return ToolResult.failure("died", f"{_sentence(str(error))} The code was not run. {_NEXT}", state="lost")
        if not cell.kept:
            self._lose(session, _reason(cell))
        return self._result(cell, note)

    def _open(self) -> tuple[ForkableSession, str]:
        """The session, started if there is none, and the note that it is a fresh one after a loss."""
        with self._lock:
            if self._closed:
                raise SandboxError("the Python tool is closed; bind() gives a new instance")
            if self._session is not None:
                return self._session, ""
            self._session = shared_pool(self.imports, self.limits).session()
            note = _FRESH.format(why=self._lost) if self._lost else ""
            self._lost = ""
            return self._session, note

    def _lose(self, session: ForkableSession, why: str) -> None:
        with self._lock:
            if self._session is session:
                self._session, self._lost = None, why
        session.close()

    def _result(self, cell: CellResult, note: str) -> ToolResult:
        """The cell as the model reads it: note, output, then the value or what went wrong."""
        output, last = shorten(cell.output, self.output_chars), cell.result or ""
        if cell.status == "ok":
            return ToolResult(text=_readable(note + (_join(output, last) or "(no output)")), state="kept")
        last = cell.error
        if cell.status == "limit" and cell.kept:
            last += f"\n[Limits: {self.limits.memory_mb} MiB of memory, {self.limits.file_mb} MiB a file.]" if "MemoryError" in last else ""
        if not cell.kept:
            last = f"{_sentence(last)} {_NEXT}"
        kinds: Mapping[str, ErrorKind] = {"exception": "exception", "timeout": "timeout", "died": "died", "limit": "limit"}
        return ToolResult.failure(kinds[cell.status], _readable(note + _join(output, last)), state="kept" if cell.kept else "lost")

    def _sibling(self) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._start_unbound()
        return new

    def bind(self) -> Self:
        """An instance of its own for one episode, whose session starts at its first call.

        The first ``bind`` of a process starts what all sessions come from (half a second of imports): so no call pays for it out of its deadline, and a sandbox
        that cannot start is a ``SandboxError`` before the first episode, not a failing call in every one.
        """
        shared_pool(self.imports, self.limits)
        return self._sibling()

    def fork(self) -> Self:
        """An independent copy in the present state. Waits for a running call.

        ``ForkRefused`` when threads run in the interpreter (a copy would lose them), ``SandboxError`` when the tool is closed or the machine has no room.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("a closed Python tool cannot be forked")
            session, lost = self._session, self._lost
        new = self._sibling()
        new._lost = lost
        if session is not None:
            try:
                new._session = session.fork()
            except SessionLost as error:  # both are then in the same state: lost, and they say so
                self._lose(session, str(error))
                new._lost = str(error)
        return new

    def close(self) -> None:
        """End the session, a running call too. Forks live on. Idempotent."""
        self._closed = True
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __copy__(self) -> Self:
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:
            raise TypeError("a Python tool with a running session cannot be pickled: the state lives in a process; pickle the prototype")
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


_NEXT = "All variables and files are lost; the next call starts a fresh interpreter."


def _sentence(text: str) -> str:
    """``text`` as a sentence: first letter large, a full stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _reason(cell: CellResult) -> str:
    return cell.error.removeprefix("TimeoutError: ")


def _join(output: str, last: str) -> str:
    separator = "" if not output or not last or output.endswith("\n") else "\n"
    return f"{output}{separator}{last}".rstrip("\n")


def _readable(text: str) -> str:
    """``text`` without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
