"""MontyPython: a back end of the Python tool without Linux and without ``os.fork``: a small interpreter that cannot reach its host. Host side.

The interpreter (``pydantic-monty``) runs a part of Python in worker processes. Between two cells a session is nothing but the bytes of its last snapshot: a
cell takes a worker, loads the snapshot, runs, and takes a new one. So a fork is a second reference to the same bytes, thousands of sessions share a few
workers, and whatever becomes of a worker, the state of before the cell is still there.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import os
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from .isolation import IsolationReport, SandboxError
from .text import HeadTail, shorten
from .watch import FLOOD, CellResult

if TYPE_CHECKING:
    import pydantic_monty

SEED = 0
"""``random`` starts from it in every session."""
_CHECKOUT_SECONDS = 30.0
_LACKS = (
    "class inheritance, generators, properties, class methods, del, input, files, network, processes, and all modules but asyncio, base64, binascii, "
    "bisect, collections, copy, csv, datetime, decimal, dataclasses, functools, hashlib, itertools, json, math, random, re, time, tomllib, typing"
)
_PARSED_CHARS = 100_000
_ESCAPE = re.compile(r"""\\(?![\r\n])['"\\]?""")
_OWN_LIMIT = "feed time limit exceeded"
_WRAPPER = "(lambda value: None if value is None else repr(value))(("


def _library() -> Any:
    try:
        import pydantic_monty
    except ImportError:
        raise ImportError("MontyPython needs pydantic-monty: pip install 'arpo[monty]'") from None
    return pydantic_monty


@dataclass(frozen=True, kw_only=True)
class MontyPython:
    """Sessions are snapshots of a small interpreter without access to the host. It has a part of Python only: no numpy, no generators, no inheritance."""

    memory_mb: int = 256
    """MiB that a cell may use. What it leaves behind is written to a snapshot within the same limit, so it may fill somewhat less than half."""
    workers: int | None = None
    """Processes that run cells, each one cell at a time; None: one a core."""

    fork_support: ClassVar[Literal["native"]] = "native"
    overhead: ClassVar[float] = _CHECKOUT_SECONDS + 5.0
    about: ClassVar[str] = f"It is a small interpreter that has a part of Python only; it lacks {_LACKS}."

    def __post_init__(self) -> None:
        if self.memory_mb < 1:
            raise ValueError(f"memory_mb must be at least 1, got {self.memory_mb}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1 or None, got {self.workers}")
        _library()

    @property
    def max_concurrency(self) -> int:
        return self.workers or os.cpu_count() or 1

    @property
    def limits_in_words(self) -> str:
        return f"{self.memory_mb} MiB of memory"

    def prepare(self) -> None:
        """Start the first worker."""
        _workers(self.max_concurrency)

    def open(self) -> MontySession:
        return MontySession(self)

    def isolation(self) -> IsolationReport:
        """Level ``language``: the interpreter has no way to the host's files, network or processes, and its limits of time and memory are its own."""
        flaw = "a flaw in the interpreter would run as this user: its worker processes are ordinary ones"
        return IsolationReport(level="language", missing={"protection by the kernel beneath the interpreter": flaw})

    def settings(self) -> Mapping[str, Any]:
        return {"backend": "monty", "version": _library().__version__, "memory_mb": self.memory_mb}


class MontySession:
    """One interpreter's state. Thread-safe: cells and forks of one session take turns; ``close`` ends a running cell."""

    def __init__(self, backend: MontyPython, snapshot: bytes = b"", timeout: float | None = None):
        self._backend = backend
        self._snapshot = snapshot
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = False
        self._kill_lock = threading.Lock()
        self._worker: int | None = None

    @property
    def alive(self) -> bool:
        """Whether the state is still there: until ``close``."""
        return not self._closed

    def exec(self, code: str, *, timeout: float, output_chars: int) -> CellResult:
        """Run ``code`` for at most ``timeout`` seconds, which the first cell fixes for the session (they are part of its snapshots).

        Everything the code does is a result, and the state is always kept: that after the cell, or that before it where its worker ended or was stopped.
        ``SandboxError`` when no worker was to be had: the code has not run.
        """
        with self._lock:
            if self._timeout not in (None, timeout):
                raise ValueError(f"the cells of this session have {self._timeout} s each, since its first; got {timeout} s")
            self._timeout = timeout
            cell = _Cell(code, timeout, output_chars)
            with contextlib.ExitStack() as stack:
                repl = self._checkout(stack)
                stack.callback(self._set_worker, None)  # before the worker goes back: close() must not end another session's cell
                self._set_worker(repl.worker_pid)
                if self._closed:
                    raise SandboxError("the session is closed")
                result, self._snapshot = cell.run(repl, self._snapshot)
            return result

    def _set_worker(self, pid: int | None) -> None:
        with self._kill_lock:
            self._worker = pid

    def _checkout(self, stack: contextlib.ExitStack) -> pydantic_monty.MontySession:
        """A worker in the state of the snapshot."""
        limits: pydantic_monty.ResourceLimits = {"max_feed_duration_secs": self._timeout, "max_memory": self._backend.memory_mb << 20}
        policy: pydantic_monty.OSPolicy = {"sleep": "zero", "random_start": {"seed": SEED}}  # a second slept is a second wasted
        try:
            repl = stack.enter_context(_workers(self._backend.max_concurrency).checkout(limits=limits, os_policy=policy))
            if self._snapshot:
                repl.load_session(self._snapshot)
            return repl
        except (_library().MontyError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            raise SandboxError(f"no worker of the monty interpreter: {error}") from error

    def fork(self) -> Self:
        """An independent copy. Free: both begin from the same snapshot."""
        with self._lock:
            if self._closed:
                raise SandboxError("the session is closed")
            return type(self)(self._backend, self._snapshot, self._timeout)

    def close(self) -> None:
        """Drop the state and end a running cell. Idempotent, from any thread."""
        self._closed = True
        with self._kill_lock:
            if self._worker is not None:
                _kill(self._worker)


class _Cell:
    """One cell in one worker."""

    def __init__(self, code: str, timeout: float, limit: int):
        self.code, self.timeout, self.limit = code, timeout, limit
        self.output = HeadTail(limit)
        self.flooded = False
        self.worker: int | None = None

    def run(self, repl: pydantic_monty.MontySession, before: bytes) -> tuple[CellResult, bytes]:
        """What the cell gave, and the snapshot to go on from."""
        monty = _library()
        self.worker, start = repl.worker_pid, monotonic()
        try:
            result, sound = self._feed(repl)
            return result, repl.dump() if sound else before
        except monty.MontyRuntimeError as error:  # of dump(): the heap is too full for it
            return self._undone("limit", error.display("type-msg")), before
        except monty.MontyError as error:  # the worker is gone
            if self.flooded:
                return self._undone("limit", f"the cell wrote more than {FLOOD >> 20} MiB of output and was stopped"), before
            if monotonic() - start >= self.timeout:
                return self._undone("timeout", self._too_long()), before
            return self._undone("died", f"the interpreter ended ({error}) and the cell with it"), before

    def _feed(self, repl: pydantic_monty.MontySession) -> tuple[CellResult, bool]:
        """What the cell gave, and whether its heap may be gone on with: the library does not vouch for that of a cell which it stopped."""
        monty = _library()
        try:
            return self._result("ok", result=repl.feed_run(_with_repr_of_last(self.code), print_callback=self._print)), True
        except monty.MontySyntaxError as error:
            return self._result("exception", shorten(_explained(error), self.limit)), True
        except monty.MontyRuntimeError as error:
            inner = error.exception()
            if isinstance(inner, TimeoutError) and not error.traceback() and _OWN_LIMIT in str(error):
                return self._undone("timeout", self._too_long()), False
            if isinstance(inner, MemoryError):
                return self._undone("limit", _explained(error)), False
            left = isinstance(inner, SystemExit) and inner.code in (None, 0, "")
            return (self._result("ok") if left else self._result("exception", shorten(_explained(error), self.limit))), True

    def _print(self, stream: str, text: str) -> None:
        self.output.add(text.encode("utf-8", "backslashreplace"))
        if self.output.total > FLOOD and not self.flooded and self.worker is not None:
            self.flooded = True
            _kill(self.worker)  # an exception from here would not stop it before its deadline

    def _too_long(self) -> str:
        return f"TimeoutError: the cell ran longer than {self.timeout:g} s and was stopped"

    def _undone(self, status: Literal["timeout", "died", "limit"], why: str) -> CellResult:
        return self._result(status, f"{shorten(why, self.limit)}; it was undone: all variables are as they were before it")

    def _result(self, status: Literal["ok", "exception", "timeout", "died", "limit"], error: str = "", result: Any = None) -> CellResult:
        value = None if result is None else shorten(str(result), self.limit)
        return CellResult(status=status, output=self.output.text(), result=value, error=error)


def _with_repr_of_last(code: str) -> str:
    """``code`` whose last expression gives its ``repr``, made inside: the library's own conversion knows neither ``__repr__`` nor functions."""
    if len(code) > _PARSED_CHARS:
        return code
    try:
        tree = ast.parse(_ESCAPE.sub(lambda found: "_" * len(found[0]), code))  # an unknown escape would be a warning in this process
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # for the interpreter to say what is wrong
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return code
    lines = code.encode("utf-8", "surrogatepass").splitlines(keepends=True)
    assert last.end_lineno is not None and last.end_col_offset is not None
    before = b"".join(lines[: last.lineno - 1]) + lines[last.lineno - 1][: last.col_offset]
    upto = b"".join(lines[: last.end_lineno - 1]) + lines[last.end_lineno - 1][: last.end_col_offset]
    expression = upto[len(before) :]
    return (before + _WRAPPER.encode() + expression + b"\n))").decode("utf-8", "surrogatepass")


def _explained(error: pydantic_monty.MontySyntaxError | pydantic_monty.MontyRuntimeError) -> str:
    """The traceback, and what this interpreter lacks where that may be the reason."""
    lines = ["Traceback (most recent call last):"] if error.traceback() else []
    for frame in error.traceback():
        source = (frame.source_line or "").strip().partition("\n")[0]
        if frame.function_name == "<lambda>" and source.startswith(_WRAPPER):
            continue
        lines.append(f'  File "{frame.filename}", line {frame.line}' + (f", in {frame.function_name}" if frame.function_name else ""))
        lines += [f"    {source.replace(_WRAPPER, '')}"] if source else []
    text = "\n".join([*lines, error.display("type-msg")])
    if isinstance(error.exception(), NotImplementedError | ImportError | PermissionError):
        text += f"\n[This interpreter has a part of Python only. It lacks {_LACKS}.]"
    return text


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


_pools: dict[int, pydantic_monty.Monty] = {}
_pools_lock = threading.Lock()


def _workers(processes: int) -> pydantic_monty.Monty:
    """The worker processes of this process, started at the first call. ``SandboxError`` when the first does not answer."""
    with _pools_lock:
        if processes not in _pools:
            monty = _library()
            pool = monty.Monty(min_processes=1, max_processes=processes, checkout_timeout=_CHECKOUT_SECONDS)
            try:
                pool.__enter__()
                with pool.checkout() as repl:
                    repl.feed_run("None")
            except (monty.MontyError, OSError, RuntimeError) as error:
                raise SandboxError(f"the monty interpreter did not start: {error}") from error
            _pools[processes] = pool
        return _pools[processes]


@atexit.register
def close_workers() -> None:
    """End the worker processes; the next cell starts new ones."""
    with _pools_lock:
        while _pools:
            _pools.popitem()[1].__exit__(None, None, None)


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()  # they answer to the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
