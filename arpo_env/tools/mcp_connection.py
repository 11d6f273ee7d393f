"""A connection to an MCP server: the official SDK is asynchronous, so an event loop in a thread of its own drives it; calls from any thread wait for it.

One thread a server: a server that floods or blocks its connection delays nobody else's. Nothing here waits without a deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

_log = logging.getLogger(__name__)
_CLOSING = 8.0
"""Seconds until a server that ignores everything is gone: the SDK closes its stdin, after 2 s sends SIGTERM, after 2 more SIGKILL."""

_PAGES = 1000
"""Of a list of tools: more is a loop."""


class MCPServerError(RuntimeError):
    """An MCP server could not be started, does not answer, or broke the protocol."""


class ServerGone(MCPServerError):
    """The server ended or lost the session while a call was under way; whether the call took effect is not known."""


class CallFailed(MCPServerError):
    """The server is well and refused the call, or answered with something that breaks the protocol."""


class CallTimedOut(MCPServerError):
    """No answer within the deadline. The server was told to cancel the call; whether it took effect is not known."""


@dataclass(frozen=True)
class Command:
    """A server that is started as a process and spoken to over its stdin and stdout."""

    argv: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None

    def __str__(self) -> str:
        """The program alone: arguments may hold secrets, and this goes into messages, logs and names of threads."""
        return f"MCP server {os.path.basename(self.argv[0])!r}"

    def settings(self) -> dict[str, Any]:
        """What identifies the server in a cache. Arguments and environment, which may hold secrets, as a digest."""
        digest = hashlib.sha256(json.dumps([self.argv, sorted(self.env.items()), self.cwd]).encode()).hexdigest()
        return {"command": os.path.basename(self.argv[0]), "digest": digest[:16]}

    @contextlib.asynccontextmanager
    async def transport(self, connection: Connection) -> AsyncIterator[Any]:
        """The SDK's streams to a new process, whose stderr goes to the log."""
        from mcp.client.stdio import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(command=self.argv[0], args=list(self.argv[1:]), env=dict(self.env), cwd=self.cwd)
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        os.set_blocking(reading, False)
        loop.add_reader(reading, connection.read_stderr, reading)
        try:
            with os.fdopen(writing, "w") as stderr:
                async with stdio_client(parameters, stderr) as streams:
                    yield streams
        finally:
            connection.read_stderr(reading)  # what it said last
            loop.remove_reader(reading)
            os.close(reading)


@dataclass(frozen=True)
class Url:
    """A server that runs elsewhere and speaks streamable HTTP."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"MCP server {self._public()}"

    def _public(self) -> str:
        """The address without what may be a secret."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    def settings(self) -> dict[str, Any]:
        """What identifies the server in a cache. The query, which may choose what it does and may hold secrets, as a digest; of the headers the names alone:
        tokens change, and are nobody's business."""
        query = hashlib.sha256(urlsplit(self.url).query.encode()).hexdigest()
        return {"url": self._public(), "query": query[:16], "headers": sorted(name.lower() for name in self.headers)}

    @contextlib.asynccontextmanager
    async def transport(self, connection: Connection) -> AsyncIterator[Any]:
        """The SDK's streams to the address."""
        import httpx2  # the SDK's own HTTP client
        from mcp.client.streamable_http import streamable_http_client

        async def note(response: Any) -> None:
            connection.session_id = response.headers.get("mcp-session-id", connection.session_id)

        timeout = httpx2.Timeout(30.0, read=None)  # how long an answer may take is the call's own deadline
        client = httpx2.AsyncClient(headers=dict(self.headers), timeout=timeout, event_hooks={"response": [note]})
        async with client, streamable_http_client(self.url, http_client=client) as streams:
            yield streams


class Connection:
    """A server that runs and has listed its tools. :class:`MCPServerError` says why it has not, with what the server wrote to stderr.

    Args:
        target: what to start, or where to call.
        start_timeout: seconds within which the handshake must be done and the tools listed.
        sessions: ask an HTTP server for a session of one's own, which protocols before 2026-07-28 have.
    """

    def __init__(self, target: Command | Url, *, start_timeout: float, sessions: bool = False):
        self.target = target
        self.session_id: str | None = None
        self.name, self.version = "", ""
        self.tools: list[Any] = []
        """What the server lists, as the SDK describes it."""
        self._mode: Any = "legacy" if sessions and isinstance(target, Url) else "auto"
        self._stderr, self._rubbish = bytearray(), ""
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._client: Any = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=f"arpo-mcp {target}", daemon=True)
        _open.add(self)
        self._thread.start()
        self._await_start(start_timeout)

    def _await_start(self, seconds: float) -> None:
        concurrent.futures.wait([self._started], seconds)
        if not self._started.done():
            self.stop()
            raise MCPServerError(f"{self.target} did not answer the handshake and list its tools within {seconds:g} s{self._evidence()}")
        error = self._started.exception()
        if error is not None:
            self._thread.join(_CLOSING)  # its last words arrive while it is closed
            _log.debug("%s did not start", self.target, exc_info=error)  # the SDK's groups of groups of tracebacks tell a user nothing
            raise MCPServerError(f"{self.target} did not start: {_reason(error)}{self._evidence()}") from None

    # -- in the thread of the event loop ---------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # the thread's last act: whoever waits is told
            if not self._started.done():
                self._started.set_exception(error)
            elif not self._stopping.is_set():
                _log.warning("the connection to %s ended: %s", self.target, _reason(error))
        finally:
            for future in list(self._waiting):
                future.cancel()
            _open.discard(self)

    async def _serve(self) -> None:
        from mcp.client import Client

        self._serving = asyncio.current_task()
        if self._stopping.is_set():
            raise MCPServerError("stopped before it was started")
        async with Client(self.target.transport(self), mode=self._mode, cache=None, message_handler=self._note) as client:
            self._client = client
            if client.server_info is not None:
                self.name, self.version = client.server_info.name, client.server_info.version
            await self._list_tools()
            self._started.set_result(None)
            await self._stopping.wait()

    async def _list_tools(self) -> None:
        """All pages: the SDK checks results against schemas that it has seen."""
        cursor = None
        for _ in range(_PAGES):
            try:
                page = await self._client.list_tools(cursor=cursor)
            except Exception as error:
                raise MCPServerError(f"its list of tools is broken after {[tool.name for tool in self.tools]}: {_reason(error)}") from error
            self.tools.extend(page.tools)
            cursor = page.next_cursor
            if cursor is None:
                return
        raise MCPServerError(f"its list of tools has no end ({_PAGES} pages)")

    async def _note(self, message: Any) -> None:
        """Keep what the server wrote that is no message: in a start that fails it is the reason."""
        if isinstance(message, Exception):
            self._rubbish = str(message)

    def read_stderr(self, descriptor: int) -> None:
        """Log what the server wrote to stderr and keep its end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 65536):
                self._stderr += data
                del self._stderr[:-4096]
                _log.debug("%s: %s", self.target, data.decode("utf-8", "replace").rstrip())

    def _evidence(self) -> str:
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()[-12:]
        found = f". It wrote to stdout what is no JSON-RPC message: {self._rubbish[:300]}" if self._rubbish else ""
        return found + (". It wrote to stderr:\n" + "\n".join(lines) if lines else "")

    async def _answers(self, seconds: float) -> bool:
        """Whether the server is there and not stuck."""
        try:
            await asyncio.wait_for(self._client.list_tools(), seconds)
        except Exception:
            return False
        return True

    async def _call(self, tool: str, arguments: dict[str, Any], seconds: float) -> Any:
        try:
            return await self._client.call_tool(tool, arguments)
        except (
            Exception
        ) as error:  # the SDK raises the server's refusals, breaches of the protocol and lost connections; only a second request tells them apart
            reason = _reason(error)
            if await self._answers(seconds):
                raise CallFailed(reason) from error
            raise ServerGone(reason) from error

    # -- for every thread ------------------------------------------------------------------------------------------------------------------------------

    def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> Any:
        """The SDK's ``CallToolResult``. Raises :class:`CallFailed`, :class:`CallTimedOut` or :class:`ServerGone`."""
        return self._submit(lambda: self._call(tool, arguments, seconds), seconds)

    def answers(self, seconds: float) -> bool:
        """Whether the server answers another request within ``seconds``."""
        try:
            return self._submit(lambda: self._answers(seconds), seconds)
        except MCPServerError:
            return False

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        if not self.open:
            raise ServerGone(f"the connection to {self.target} is closed")
        coroutine = work()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop was closed a moment ago
            coroutine.close()
            raise ServerGone(f"the connection to {self.target} is closed") from error
        self._waiting.add(future)
        try:
            concurrent.futures.wait([future], seconds if self._thread.is_alive() else 0)
            if not future.done():
                future.cancel()  # the SDK tells the server
                raise CallTimedOut(f"no answer within {seconds:g} s")
            return future.result()
        except concurrent.futures.CancelledError:
            raise ServerGone(f"the connection to {self.target} was closed during the call") from None
        finally:
            self._waiting.discard(future)

    def require_state_of_its_own(self) -> None:
        """Raise :class:`MCPServerError` where what other clients do would change what this one sees."""
        if isinstance(self.target, Url) and self.session_id is None:
            raise MCPServerError(
                f"{self.target} gives its clients no sessions, so its state would be common to all episodes. Run it by a command, so that each episode has"
                " a process of its own, or say fork='shared' if it keeps no state"
            )

    @property
    def open(self) -> bool:
        """Whether the connection is in use in this process; the server may have died without our having noticed."""
        return self._thread.is_alive() and self._pid == os.getpid() and not self._stopping.is_set()

    def stop(self) -> None:
        """Begin to close it and return at once."""
        if self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._stop_serving)

    def _stop_serving(self) -> None:
        first = not self._stopping.is_set()
        self._stopping.set()
        if first and self._serving is not None and not self._started.done():  # a second cancellation would cut short the end of the process
            self._serving.cancel()

    def close(self) -> None:
        """End the server's process, or the session with it, and wait until it is gone. Idempotent."""
        self.stop()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING)


def _reason(error: BaseException) -> str:
    """The innermost causes of a failure in one line; the SDK's come in groups."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_reason, error.exceptions))
    text, kind = str(error).strip(), type(error).__name__
    if kind in ("MCPError", "MCPServerError") and text:  # the text is a sentence already
        return text
    return f"{kind}: {text}" if text else kind


_open: set[Connection] = set()  # add, discard and list() of a set are atomic


@atexit.register
def close_all() -> None:
    """Close all connections of this process. Called at its end; harmless at any time."""
    connections = list(_open)
    for connection in connections:
        connection.stop()
    for connection in connections:
        connection.close()


def parse_target(
    server: str | Sequence[str], env: Mapping[str, str] | None, cwd: str | os.PathLike[str] | None, headers: Mapping[str, str] | None
) -> Command | Url:
    """What a user wrote as a server: an address that begins with ``http``, else a command. ``ValueError`` where an option does not belong to it."""
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        if env or cwd is not None:
            raise ValueError(f"env= and cwd= belong to a server that is started by a command, got the address {Url(server)}")
        return Url(server, dict(headers or {}))
    if headers:
        raise ValueError("headers= belong to a server at an http address, got a command")
    argv = shlex.split(server) if isinstance(server, str) else [os.fspath(part) for part in server]
    if not argv:
        raise ValueError(f"expected the command or the address of an MCP server, got {server!r}")
    return Command(tuple(argv), dict(env or {}), None if cwd is None else os.fspath(cwd))
