"""Whose server answers: one for all episodes (no state), or one for each episode, which lives, dies and forks with it.

A server may offer several tools over one state: what ``write`` stored, ``read`` finds. Those of one episode share one server, which they know by its origin.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from arpo_env.forking import ForkError
from arpo_env.tools.base import ToolResult
from arpo_env.tools.mcp_connection import CallFailed, CallTimedOut, Command, Connection, MCPServerError, ServerGone, Url
from arpo_env.tools.mcp_content import as_result, readable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a server is reached and what its calls may cost."""

    target: Command | Url
    timeout: float
    """Seconds of one call."""
    start_timeout: float
    """Seconds of a start."""
    output_chars: int


@dataclass(frozen=True)
class Remote:
    """A tool as the server knows it."""

    name: str
    repeatable: bool
    """The server says that a second call changes nothing (``readOnlyHint`` or ``idempotentHint``): such a call is tried again when its server died."""


class SharedServer:
    """One server for all episodes and forks, called from many threads at once. A dead or stuck one is replaced at the next call."""

    pristine = False

    def __init__(self, options: Options):
        self.options = options
        self.origin = self
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._finalizer: Any = None
        self._failed = 0.0, ""
        self.closed = False
        _servers.add(self)

    def adopt(self, connection: Connection) -> None:
        """Use a connection that is there already."""
        self._connection = connection
        self._finalizer = weakref.finalize(self, connection.stop)
        self._finalizer.atexit = False  # close_all does it, and waits

    def _open(self) -> Connection:
        asked = time.monotonic()
        with self._lock:
            if self.closed:
                raise MCPServerError(f"the connection to {self.options.target} was closed by close()")
            if self._connection is None or not self._connection.open:
                when, why = self._failed
                if when > asked:  # while this thread waited: a server that hangs is not waited for once by each thread
                    raise MCPServerError(why)
                self._drop()
                try:
                    self.adopt(Connection(self.options.target, start_timeout=self.options.start_timeout))
                except MCPServerError as error:
                    self._failed = time.monotonic(), str(error)
                    raise
            assert self._connection is not None
            return self._connection

    def _drop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._connection = self._finalizer = None

    def _replace(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._drop()

    def call(self, tool: Remote, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call. Never raises; a call that may have run is run again only where the server says that it may."""
        try:
            connection = self._open()
        except MCPServerError as error:
            return _unavailable(error)
        try:
            return as_result(connection.call(tool.name, arguments, self.options.timeout), self.options.output_chars)
        except CallFailed as error:
            return ToolResult.failure("exception", readable(str(error)))
        except CallTimedOut:
            threading.Thread(target=self._check, args=(connection,), name="arpo-mcp check", daemon=True).start()
            return ToolResult.failure("timeout", f"{tool.name} gave no result within {self.options.timeout:g} s. The call was cancelled.")
        except ServerGone as error:
            _log.warning("%s died during a call of %s: %s", self.options.target, tool.name, error)
            self._replace(connection)
            if tool.repeatable:
                return ToolResult.failure("unavailable", "The server of this tool died during the call.")
            return ToolResult.failure("died", "The server of this tool died during the call. Whether the call took effect is not known; it was not repeated.")

    def _check(self, connection: Connection) -> None:
        """Replace a server that is stuck; other calls on it would only wait for their deadlines."""
        if not connection.answers(self.options.timeout):
            self._replace(connection)

    def fresh(self) -> Self:
        return self

    def forks(self, n: int) -> list[Self]:
        return [self] * n

    def enter(self, tool: str) -> None:
        """Nothing: it does not count who uses it."""

    def leave(self, tool: str) -> None:
        """Nothing: others use it. :meth:`close` ends it."""

    def close(self) -> None:
        """End the server. Idempotent."""
        with self._lock:
            self.closed, connection = True, self._connection
            self._drop()
        if connection is not None:
            connection.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options, self.origin = state["options"], self
        self._start()


@dataclass(frozen=True)
class _Recorded:
    tool: Remote
    arguments: Mapping[str, Any]
    result: ToolResult


class EpisodeServer:
    """A server of one episode: started at the first call, ended when the last of its tools is closed. Calls run one after another.

    A call that overruns its deadline, or in which the server dies, ends it: the state is lost, the next call starts a fresh one. No call is run twice.
    With ``replays``, a fork is a new server on which the calls so far are made again, each result compared.
    """

    def __init__(self, options: Options, *, replays: bool, origin: EpisodeServer | None = None):
        self.options, self.replays = options, replays
        self.origin = origin or self
        """That of the prototypes: servers of one origin are one server in different episodes."""
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._finalizer: Any = None
        self._calls: tuple[_Recorded, ...] = ()
        self._touched = self.closed = False
        _servers.add(self)
        self.tools: set[str] = set()
        """Those that use it and are not closed."""

    def call(self, tool: Remote, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call; ``state`` says what became of the server's state. Raises only when the tool is closed."""
        with self._lock:
            if self.closed:
                raise MCPServerError("the tool is closed; bind() gives a new instance")
            self._touched = True
            if self._connection is None:
                try:
                    self._open()
                except MCPServerError as error:
                    return _unavailable(error)
                if self.closed:  # while it started
                    self._lose()
                    return ToolResult.failure("died", "The tool was closed before the call was made.", state="lost")
            result = self._call(tool, arguments)
            if result.state == "kept":
                self._calls = (*self._calls, _Recorded(tool, arguments, result))
            return result

    def _open(self) -> None:
        connection = Connection(self.options.target, start_timeout=self.options.start_timeout, sessions=True)
        self._connection = connection
        self._finalizer = weakref.finalize(self, connection.stop)
        self._finalizer.atexit = False  # close_all does it, and waits

    def _call(self, tool: Remote, arguments: dict[str, Any]) -> ToolResult:
        assert self._connection is not None
        try:
            answer = self._connection.call(tool.name, arguments, self.options.timeout)
            return replace(as_result(answer, self.options.output_chars), state="kept")
        except CallFailed as error:
            return ToolResult.failure("exception", readable(str(error)), state="kept")
        except CallTimedOut:
            self._lose()
            return ToolResult.failure(
                "timeout", f"{tool.name} gave no result within {self.options.timeout:g} s, so its server was stopped. {_LOST}", state="lost"
            )
        except ServerGone as error:
            _log.warning("%s died during a call of %s: %s", self.options.target, tool.name, error)
            self._lose()
            return ToolResult.failure("died", f"The server of {tool.name} died. The call was not repeated. {_LOST}", state="lost")

    def _lose(self) -> None:
        if self._finalizer is not None:
            self._finalizer()  # without waiting: a stuck server needs seconds to end
        self._connection = self._finalizer = None
        self._calls = ()

    def fresh(self) -> EpisodeServer:
        """A server of the same kind for another episode."""
        return EpisodeServer(self.options, replays=self.replays, origin=self.origin)

    @property
    def pristine(self) -> bool:
        """Whether there is no state yet, so that a copy is a fresh one."""
        return not self._touched and not self.closed

    def forks(self, n: int) -> list[EpisodeServer]:
        """``n`` new servers on which the calls of this one were made again, all or none."""
        if not self.replays:
            raise ForkError(f"{self.options.target}: {UNFORKABLE}")
        with self._lock:  # no call is under way
            if self.closed:
                raise ForkError("a closed tool cannot be forked")
            calls = self._calls
        twins = [self.fresh() for _ in range(n)]
        if not calls or not n:
            return twins
        with ThreadPoolExecutor(min(n, 8)) as pool:  # starting a server is waiting
            futures = [pool.submit(twin._replay, calls) for twin in twins]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for twin in twins:
                twin.close()
            raise errors[0]
        return twins

    def _replay(self, calls: tuple[_Recorded, ...]) -> None:
        for number, recorded in enumerate(calls):
            result = self.call(recorded.tool, dict(recorded.arguments))
            if result != recorded.result:
                failed = result.error in ("unavailable", "died", "timeout")
                why = "its new server failed" if failed else f"{self.options.target} is not deterministic: say fork='none'"
                raise ForkError(f"replay of call {number} ({recorded.tool.name}) gave {result.text!r:.80}, recorded was {recorded.result.text!r:.80}; {why}")

    def enter(self, tool: str) -> None:
        """``tool`` uses it."""
        self.tools.add(tool)

    def leave(self, tool: str) -> None:
        """``tool`` uses it no more; with the last one it ends."""
        self.tools.discard(tool)
        if not self.tools:
            self.close()

    def close(self) -> None:
        """End the server, a running call too. Idempotent."""
        self.closed = True
        connection = self._connection
        if connection is not None:
            connection.close()  # before the lock is taken: it ends a call that holds it
        with self._lock:
            self._lose()

    def __getstate__(self) -> dict[str, Any]:
        if self._connection is not None:
            raise TypeError("an MCP tool whose server runs cannot be pickled: the state lives in a process; pickle the prototype")
        return {"options": self.options, "replays": self.replays, "origin": self.origin, "tools": self.tools}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options, self.replays, self.origin = state["options"], state["replays"], state["origin"]
        self._start()
        self.tools = state["tools"]


def _unavailable(error: MCPServerError) -> ToolResult:
    """What the model reads of a server that is not to be had. What the server wrote to stderr is for people, and may hold secrets."""
    _log.warning("%s", error)
    return ToolResult.failure("unavailable", "The server of this tool cannot be started or reached now.")


_servers: weakref.WeakSet[SharedServer | EpisodeServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for server in _servers:
        server._lock = threading.RLock()  # whoever held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

UNFORKABLE = (
    "its state cannot be copied. Say fork='shared' if it keeps no state, fork='replay' if the same calls always give the same results;"
    " otherwise use it without branching"
)
_LOST = "Its state is lost; the next call starts a fresh server."
