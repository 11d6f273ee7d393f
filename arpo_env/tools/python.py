"""The Python tool: an interpreter that keeps its state between calls and forks with the environment."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping
from typing import Any, Literal, Self

from arpo_env.sandbox import isolation
from arpo_env.sandbox.backend import LocalPython, PythonBackend, check_level, fork_many
from arpo_env.sandbox.isolation import ForkRefused, IsolationReport, SandboxError, SessionLost
from arpo_env.sandbox.session import ForkableSession
from arpo_env.sandbox.text import shorten
from arpo_env.sandbox.watch import CellResult
from arpo_env.tools.base import ErrorKind, Tool, ToolResult

_FRESH = "[The interpreter of the calls before was lost ({why}). This one is fresh: variables, imports and files of before are gone.]\n"
_NEXT = "All variables and files are lost; the next call starts a fresh interpreter."
_UNDONE = "The call was undone: all variables and files are as they were before it."
_UNTOUCHED = "The code was not run: all variables and files are as they were."
_KINDS: Mapping[str, ErrorKind] = {"exception": "exception", "timeout": "timeout", "died": "died", "limit": "limit"}


class PythonTool(Tool):
    """Runs Python code as a notebook does: names persist between calls, the value of a last expression is shown, so is everything printed.

    Where the code runs is the back end's matter: processes of this machine (:class:`~arpo_env.sandbox.backend.LocalPython`, the default), virtual machines
    of E2B (:class:`~arpo_env.sandbox.e2b.E2BPython`), or a small interpreter without access to the host (:class:`~arpo_env.sandbox.monty.MontyPython`).

    Constructing a prototype leaves no process behind. ``bind()`` gives an instance whose session starts at its first call; ``fork()`` copies the session:
    with the default back end variables, open files, working directory, state of ``random`` and numpy, in milliseconds.

    Failures are results: ``exception`` (the text is the traceback), ``timeout``, ``limit`` (memory, output, CPU), ``died`` (``os._exit``, a crash).
    ``ToolResult.state`` says whether the variables live on. After ``lost`` the next call runs in a fresh interpreter, and its text begins by saying so.
    ``unavailable`` is given only when no code has run, so a retry is safe. Code itself is never run twice, and a cell that prints nothing is a success.
    """

    name = "python"
    description = "Runs Python code in an interpreter that keeps its state between calls. Returns what the code prints and the value of its last expression."
    stateful = True
    deterministic = False  # code may read clocks and process ids; random and numpy start from a fixed seed
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source; names that it defines stay for later calls"}},
        "required": ["code"],
    }

    def __init__(
        self,
        backend: PythonBackend | None = None,
        *,
        timeout: float = 10.0,
        output_chars: int = 8000,
        transactional: bool = False,
        require: isolation.Level | None = None,
    ):
        """A prototype.

        Args:
            backend: where the code runs, and its own limits; None: ``LocalPython()``.
            timeout: seconds of wall time for one call. At the deadline the code is interrupted, its state kept where the back end can; a second later killed.
            output_chars: characters of one result, each of printed text and value or traceback cut in the middle with a notice.
            transactional: copy the session before each call. A call that loses the interpreter (a crash, a kill, ``os._exit``) is then undone: the copy
                takes its place, with the variables and files of before the call. Costs one fork a call in time (locally about 10 ms) and, while the
                call runs, what a fork holds in memory. While threads run in the interpreter there can be no copy; a loss then says so.
            require: the isolation level that is asked for; ``IsolationError`` when the back end does not give it here. ``None`` takes what there is and
                warns once a process (:class:`~arpo_env.sandbox.IsolationWarning`) of what is not protected; ``"process"`` takes it without a warning.
        """
        if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be positive and finite, got {timeout!r}")
        if output_chars < 100:
            raise ValueError(f"output_chars must be at least 100, got {output_chars!r}")
        if isinstance(backend, type) or not (backend is None or callable(getattr(backend, "open", None))):
            raise TypeError(f"backend must be a PythonBackend, such as LocalPython(), got {backend!r}")
        self.backend: PythonBackend = backend if backend is not None else LocalPython()
        self.cell_timeout = float(timeout)
        self.timeout = self.cell_timeout + self.backend.overhead
        self.output_chars = output_chars
        self.transactional = transactional
        self.fork_support = self.backend.fork_support
        self.max_concurrency = self.backend.max_concurrency
        self.description = f"{type(self).description} {self.backend.about}".rstrip()
        if require is None:
            isolation.warn_once(self.backend.isolation())
        else:
            check_level(self.backend, require)
        self._start_unbound()

    def _start_unbound(self) -> None:
        self._lock = threading.Lock()
        self._session: ForkableSession | None = None
        self._lost = ""
        self._closed = False

    def isolation(self) -> IsolationReport:
        """What is protected from the code, and what is not, with reasons. ``print`` it."""
        return self.backend.isolation()

    def settings(self) -> Mapping[str, Any]:
        own = {"timeout": self.cell_timeout, "output_chars": self.output_chars, "transactional": self.transactional}
        return {**self.backend.settings(), **own}

    # -- calls ---------------------------------------------------------------------------------------------------------------------------------------

    def call(self, **arguments: Any) -> ToolResult:
        """Run ``code`` (see the class). Raises only when the tool is closed."""
        code: str = arguments["code"]
        if not code.strip():
            state: Literal["none", "kept"] = "none" if self._session is None else "kept"
            return ToolResult.failure("bad_arguments", "The code is empty: nothing was run. Write the Python code to run.", state=state)
        try:
            session = self._open()
        except SandboxError as error:
            if self._closed:
                raise
            return ToolResult.failure("unavailable", f"The Python interpreter could not be started: {error}", state="none")
        try:
            return self._run(session, code)
        except SessionLost as error:  # it ended between two calls, so this code has not run
            self._replace(session, None, str(error))
            return ToolResult.failure("died", f"{_sentence(str(error))} The code was not run. {_NEXT}", state="lost")
        except SandboxError as error:  # nor has it here, but the state is still there
            if self._closed:
                raise
            return ToolResult.failure("unavailable", f"The Python interpreter could not be reached, the code was not run: {error}", state="kept")

    def _open(self) -> ForkableSession:
        """The session, started if there is none."""
        with self._lock:
            if self._closed:
                raise SandboxError("the Python tool is closed; bind() gives a new instance")
            if self._session is None:
                self._session = self.backend.open()
            return self._session

    def _run(self, session: ForkableSession, code: str) -> ToolResult:
        with contextlib.ExitStack() as drop:
            spare, gap = self._copy_before(session)
            if spare is not None:
                drop.callback(spare.close)
            try:
                cell = session.exec(code, timeout=self.cell_timeout, output_chars=self.output_chars)
            except SessionLost as error:  # it ended after the copy was made, so this code has not run
                if spare is None:
                    raise
                drop.pop_all()
                self._replace(session, spare, self._lost)
                return ToolResult.failure("died", f"{_sentence(str(error))} {_UNTOUCHED}", state="kept")
            with self._lock:
                note, self._lost = _FRESH.format(why=self._lost) if self._lost else "", ""
            if cell.kept:
                return self._result(cell, note)
            if spare is None:
                self._replace(session, None, _reason(cell))
                return self._result(cell, note, f"{gap}{_NEXT}")
            drop.pop_all()
            self._replace(session, spare, "")
            return self._result(cell, note, _UNDONE, state="kept")

    def _copy_before(self, session: ForkableSession) -> tuple[ForkableSession | None, str]:
        """What takes the place of ``session`` if the call loses it, or the sentence that says why there is nothing."""
        if not self.transactional:
            return None, ""
        try:
            return session.fork(), ""
        except ForkRefused as error:
            return None, f"No copy of before the call was kept: {error}. "

    def _replace(self, session: ForkableSession, spare: ForkableSession | None, lost: str) -> None:
        """Put ``spare`` in the place of ``session``, which ended; ``lost`` is what a fresh one begins by saying."""
        with self._lock:
            if self._session is session:
                self._session, self._lost, spare = spare, lost, None
        session.close()
        if spare is not None:  # closed meanwhile, by another thread
            spare.close()

    def _result(self, cell: CellResult, note: str, fate: str = "", *, state: Literal["kept", "lost"] = "lost") -> ToolResult:
        """The cell as the model reads it: note, output, then the value or what went wrong, and the ``fate`` of an interpreter that ended."""
        output, last = shorten(cell.output, self.output_chars), cell.result or ""
        if cell.status == "ok":
            return ToolResult(text=_readable(note + (_join(output, last) or "(no output)")), state="kept")
        last = cell.error
        if cell.status == "limit" and cell.kept:
            last += f"\n[Limits: {self.backend.limits_in_words}.]" if "MemoryError" in last else ""
        if not cell.kept:
            last = f"{_sentence(last)} {fate}"
        return ToolResult.failure(_KINDS[cell.status], _readable(note + _join(output, last)), state="kept" if cell.kept else state)

    # -- episodes and forks --------------------------------------------------------------------------------------------------------------------------

    def _sibling(self) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._start_unbound()
        return new

    def bind(self) -> Self:
        """An instance of its own for one episode, whose session starts at its first call.

        The first ``bind`` of a process starts what all sessions come from, so that a back end that cannot start is a ``SandboxError`` before the first
        episode, not a failing call in every one.
        """
        self.backend.prepare()
        return self._sibling()

    def fork(self) -> Self:
        """An independent copy in the present state. Waits for a running call.

        ``ForkRefused`` when threads run in the interpreter (a copy would lose them), ``SandboxError`` when the tool is closed or there is no room for a copy.
        """
        return self.fork_many(1)[0]

    def fork_many(self, n: int) -> list[Self]:
        """``n`` copies, all or none; a remote back end makes them in one request. Raises as :meth:`fork`."""
        with self._lock:
            if self._closed:
                raise SandboxError("a closed Python tool cannot be forked")
            session, lost = self._session, self._lost
        copies: list[ForkableSession | None] = [None] * n
        if session is not None:
            try:
                copies[:] = fork_many(session, n)
            except SessionLost as error:  # all are then in the same state: lost, and they say so
                lost = str(error)
                self._replace(session, None, lost)
        twins = [self._sibling() for _ in range(n)]
        for twin, copied in zip(twins, copies, strict=True):
            twin._session, twin._lost = copied, lost
        return twins

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
