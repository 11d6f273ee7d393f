"""The tools of an MCP server (Model Context Protocol) as tools of an environment, through the official SDK (``pip install 'arpo[mcp]'``).

::

    env = ToolEnv(tasks, tools=[*MCPTools("npx -y some-server"), *MCPTools("https://host/mcp", fork="shared"), calculator])
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, overload

from arpo_env.tools.base import ForkSupport, Tool, ToolResult, check_tool
from arpo_env.tools.mcp_connection import Connection, MCPServerError, parse_target
from arpo_env.tools.mcp_content import as_parameters
from arpo_env.tools.mcp_server import UNFORKABLE, EpisodeServer, Options, Remote, SharedServer

__all__ = ["MCPServerError", "MCPTool", "MCPTools"]

_MARGIN = 5.0
"""Seconds by which the environment's deadline lies beyond ours, which is enforced without it."""


class MCPTool(Tool):
    """One tool of an MCP server; :class:`MCPTools` makes them. The tools of one server share its state within an episode, and only there."""

    unforkable = UNFORKABLE
    """Why it cannot be forked and what to do, where ``fork_support`` is ``"none"``."""

    def __init__(self, described: Any, name: str, server: SharedServer | EpisodeServer, fork: ForkSupport, identity: Mapping[str, Any]):
        self.name = name
        self.description = described.description or described.title or name
        self.parameters = as_parameters(described.input_schema, f"tool {described.name!r}")
        self.remote = Remote(described.name, repeatable=_says(described, "read_only_hint") or _says(described, "idempotent_hint"))
        self.stateful = isinstance(server, EpisodeServer)
        self.deterministic = fork != "none"
        self.fork_support = fork
        self.timeout = server.options.timeout + server.options.start_timeout + _MARGIN  # the first call starts the server
        self._server = server
        self._identity = identity
        try:
            check_tool(self)
        except ValueError as error:
            raise ValueError(f"{error}; give it another name with rename=, or leave it out with exclude=") from None

    def call(self, **arguments: Any) -> ToolResult:
        """Make the call on the server. Raises only when the tool is closed."""
        return self._server.call(self.remote, arguments)

    def settings(self) -> Mapping[str, Any]:
        """The server's name, version and address or command; no secrets (see :meth:`Command.settings`)."""
        return {**self._identity, "tool": self.remote.name, "output_chars": self._server.options.output_chars}

    def _on(self, server: SharedServer | EpisodeServer) -> Self:
        server.enter(self.name)
        if server is self._server:
            return self
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, _server=server)
        return new

    def _partner(self, others: Mapping[str, Tool]) -> SharedServer | EpisodeServer | None:
        """The server on which other tools of ours are in the same episode."""
        servers = (other._server for other in others.values() if isinstance(other, MCPTool))
        return next((server for server in servers if server.origin is self._server.origin and not server.closed), None)

    def bind(self) -> Self:
        """An instance for one episode, on a server of the episode's own where the server has state. It starts at the first call."""
        return self.bind_with({})

    def bind_with(self, others: Mapping[str, Tool]) -> Self:
        """An instance for the episode of ``others``, on their server."""
        server = self._partner(others)
        if server is None:
            server = self._server.fresh()
        return self._on(server)

    def fork(self) -> Self:
        """An independent copy in the present state: ``ForkError`` where the server is not said to be deterministic, or turns out not to be."""
        return self.fork_many(1)[0]

    def fork_many(self, n: int) -> list[Self]:
        """``n`` copies, all or none; their servers start side by side."""
        return self.fork_with([{}] * n)

    def fork_with(self, others: Sequence[Mapping[str, Tool]]) -> list[Self]:
        """A copy for each of ``others``: on their server, which is a copy already, or on a new one, on which the calls of all tools are replayed in order."""
        partners = [self._partner(each) for each in others]
        new: Iterator[SharedServer | EpisodeServer] = iter(self._server.forks(partners.count(None)))
        return [self._on(next(new) if partner is None else partner) for partner in partners]

    def close(self) -> None:
        """Take no more part in the episode; with its last tool the server ends. Idempotent. One server for all ends by :meth:`MCPTools.close`."""
        self._server.leave(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.bind() if self._server.pristine else self.fork()

    def __copy__(self) -> Self:
        return self.__deepcopy__({})


class MCPTools(Sequence[MCPTool]):
    """The tools of an MCP server. The server is started once at construction and asked for them; what is wrong raises here, before the first token.

    Args:
        server: a command line (``"python server.py"``, or a list of its words), or an address that begins with ``http`` (streamable HTTP).
        fork: what the server does with state, which the protocol does not tell:
            ``"none"``    it has some: every episode gets a server process (over HTTP: a session) of its own, and forks are refused.
            ``"shared"``  it has none: one server for all episodes, forks and threads.
            ``"replay"``  it has some, and the same calls always give the same results: every episode gets its own; a fork is a new server on which the
            calls of the episode are made again, each result compared. Only for servers whose calls have no effect outside of the server.
            By default ``"shared"`` where the server says ``readOnlyHint`` of every chosen tool, otherwise ``"none"``.
        include: names of the tools wanted; by default all.
        exclude: names of those not wanted.
        rename: the server's name of a tool -> the name in the environment, where two servers use one name or a name does not suit.
        env: environment variables of the process beside PATH, HOME and the like; nothing else of this process's environment reaches it.
        cwd: working directory of the process.
        headers: HTTP headers, for example ``{"Authorization": "Bearer ..."}``.
        timeout: seconds of one call. Then the server is told to cancel it; one with state is stopped, since nobody knows what the call did to it.
        start_timeout: seconds until a server must have answered the handshake and listed its tools.
        output_chars: a longer result loses its middle, with a notice.

    Raises :class:`MCPServerError` for a server that does not start or answer, with what it wrote to stderr, and ``ValueError`` or ``TypeError`` for options and
    tools that do not fit. Of a server with state, construction leaves no process behind.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        fork: Literal["none", "shared", "replay"] | None = None,
        include: Collection[str] | None = None,
        exclude: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 60.0,
        output_chars: int = 16_000,
    ):
        if fork not in (None, "none", "shared", "replay"):
            raise ValueError(f"fork must be 'none', 'shared', 'replay' or None, got {fork!r}")
        if not timeout > 0 or not start_timeout > 0:
            raise ValueError(f"timeout and start_timeout must be positive, got {timeout!r} and {start_timeout!r}")
        if output_chars < 100:
            raise ValueError(f"output_chars must be at least 100, got {output_chars!r}")
        _check_sdk()
        options = Options(parse_target(server, env, cwd, headers), timeout, start_timeout, output_chars)
        connection = Connection(options.target, start_timeout=start_timeout, sessions=fork != "shared")
        try:
            described = _chosen(connection.tools, include, exclude, dict(rename or {}), str(options.target))
            identity = {"server": {**options.target.settings(), "name": connection.name, "version": connection.version}}
            if fork is None:
                fork = "shared" if all(_says(tool, "read_only_hint") for tool in described.values()) else "none"
            if fork != "shared":
                connection.require_state_of_its_own()
            self._server = SharedServer(options) if fork == "shared" else EpisodeServer(options, replays=fork == "replay")
            self.tools: tuple[MCPTool, ...] = tuple(MCPTool(tool, name, self._server, fork, identity) for name, tool in described.items())
            """The tools, prototypes all; the same as iterating over this object."""
        except BaseException:
            connection.close()
            raise
        if isinstance(self._server, SharedServer):
            self._server.adopt(connection)
        else:
            connection.close()

    def close(self) -> None:
        """End the server that all episodes share; those of single episodes end with them. Idempotent. The end of the process does it too."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.tools)

    @overload
    def __getitem__(self, index: int) -> MCPTool: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[MCPTool, ...]: ...
    def __getitem__(self, index: int | slice) -> MCPTool | tuple[MCPTool, ...]:
        return self.tools[index]

    def __iter__(self) -> Iterator[MCPTool]:
        return iter(self.tools)

    def __repr__(self) -> str:
        return f"<{self._server.options.target}: {', '.join(tool.name for tool in self.tools)}>"


def _chosen(listed: Sequence[Any], include: Collection[str] | None, exclude: Collection[str], rename: dict[str, str], server: str) -> dict[str, Any]:
    """The name in the environment -> the SDK's description of the tools that are wanted, in the server's order."""
    known = [tool.name for tool in listed]
    for option, names in (("include", include or ()), ("exclude", exclude), ("rename", rename)):
        if isinstance(names, str):
            raise TypeError(f"{option} must be a collection of names, got the string {names!r}")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{option} names {unknown}; {server} has the tools {known}")
    wanted = [tool for tool in listed if (include is None or tool.name in include) and tool.name not in exclude]
    if not wanted:
        raise ValueError(f"no tool is left to use; {server} has the tools {known}")
    chosen = {rename.get(tool.name, tool.name): tool for tool in wanted}
    if len(chosen) < len(wanted):
        raise ValueError(f"two tools of {server} would have one name: {[rename.get(tool.name, tool.name) for tool in wanted]}; rename= or exclude= one")
    return chosen


def _says(tool: Any, hint: str) -> bool:
    return bool(tool.annotations is not None and getattr(tool.annotations, hint))


def _check_sdk() -> None:
    try:
        from mcp.client import Client  # noqa: F401
    except ImportError as error:
        raise ImportError("MCPTools needs the MCP SDK, version 2: pip install 'arpo[mcp]'") from error
