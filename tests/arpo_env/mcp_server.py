"""MCP servers for the tests, run as a script: ``mcp_server.py sdk | plain [FLAG ...]``.

``sdk`` is a server of the official SDK; :func:`over_http` runs it in a thread. ``plain`` speaks the protocol with the standard library alone: it starts at
once, and does what a server of the SDK cannot be made to do. Flags of ``plain``:

``read-only``  all its tools are annotated as reading only
``deaf``       never answers anything
``rubbish``    writes what is no message, then ends
``crash``      writes to stderr and ends
``bad-name``, ``bad-schema``, ``bad-required``, ``odd-schema``  also lists a tool whose name or schema is unusual

Each process of ``plain`` adds its process id as a line to the file that ``MCP_TEST_STARTS`` names, and each call its tool's name to ``MCP_TEST_CALLS``.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def note(variable: str, line: str) -> None:
    if path := os.environ.get(variable):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


# -- the standard library alone --------------------------------------------------------------------------------------------------------------------------

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "add": {"amount": INTEGER},
    "total": {},
    "echo": {"text": STRING},
    "pid": {},
    "silence": {},
    "stuck": {},
    "die": {},
    "refuse": {},
    "mixed": {},
}
MIXED = [
    {"type": "text", "text": "A caf\u00e9 \U0001f600"},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "inside"}},
    {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAAAAAAA"}},
    {"type": "resource_link", "uri": "file:///c", "name": "third"},
]


def plain(flags: list[str]) -> None:
    note("MCP_TEST_STARTS", str(os.getpid()))
    if "crash" in flags:
        sys.exit("no licence found\ngiving up")
    if "rubbish" in flags:
        print("Welcome to my server!", flush=True)
        return
    total = 0
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "deaf" in flags:
            continue
        method, params = message["method"], message.get("params", {})
        if method == "initialize":
            info = {"name": "plain", "version": "7"}
            answer: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        elif method == "tools/list":
            answer = listing(flags, params.get("cursor"))
        elif method == "tools/call":
            note("MCP_TEST_CALLS", params["name"])
            total += params.get("arguments", {}).get("amount", 0)
            if params["name"] == "silence":
                continue
            answer = call(params["name"], params.get("arguments", {}), total)
        else:
            reply(message["id"], error={"code": -32601, "message": f"no method {method}"})
            continue
        if "refusal" in answer:
            reply(message["id"], error={"code": -32000, "message": answer["refusal"]})
        else:
            reply(message["id"], result=answer)


def reply(number: Any, **outcome: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", "id": number, **outcome}), flush=True)


def listing(flags: list[str], cursor: str | None) -> dict[str, Any]:
    """Four tools a page."""
    tools = [{"name": name, "inputSchema": {"type": "object", "properties": properties, "required": list(properties)}} for name, properties in TOOLS.items()]
    if "bad-name" in flags:
        tools.append({"name": "browser.click", "inputSchema": {"type": "object"}})
    if "bad-schema" in flags:
        tools.append({"name": "broken", "inputSchema": {"type": "object", "properties": {"x": 3}}})
    if "bad-required" in flags:
        tools.append({"name": "broken", "inputSchema": {"type": "object", "properties": {}, "required": ["x"]}})
    if "odd-schema" in flags:
        properties = {"any": {}, "where": {"$ref": "#/$defs/Place"}, "n": {"anyOf": [True, {"type": "null"}]}}
        tools.append({"name": "odd", "title": "Odd", "inputSchema": {"type": "object", "properties": properties, "$defs": {"Place": {"type": "string"}}}})
        tools.append({"name": "open", "inputSchema": {"type": "object"}})
    start = int(cursor or 0)
    page = [{**tool, "annotations": {"readOnlyHint": "read-only" in flags}} for tool in tools[start : start + 4]]
    return {"tools": page} | ({"nextCursor": str(start + 4)} if start + 4 < len(tools) else {})


def call(name: str, arguments: dict[str, Any], total: int) -> dict[str, Any]:
    if name == "die":
        os._exit(3)
    if name == "stuck":
        signal.pause()
    if name == "refuse":
        return {"refusal": "not today"}
    if name == "mixed":
        return {"content": MIXED}
    answers: dict[str, Any] = {"add": total, "total": total, "pid": os.getpid(), "echo": arguments.get("text")}
    return {"content": [{"type": "text", "text": str(answers.get(name, sorted(arguments)))}]}


# -- the SDK ---------------------------------------------------------------------------------------------------------------------------------------------


def sdk() -> Any:
    """A counter, kept for each HTTP session, or for the process."""
    import anyio
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context, Image

    server = MCPServer("counter", version="1.2", log_level="ERROR")
    totals: dict[str, int] = {}

    def session(context: Any) -> str:
        request = context.request_context.request
        return "" if request is None else request.headers.get("mcp-session-id", "")

    @server.tool()
    def add(amount: int, context: Context) -> int:
        """Add to the counter; returns the total."""
        totals[session(context)] = totals.get(session(context), 0) + amount
        return totals[session(context)]

    @server.tool()
    def echo(text: str, times: int = 1) -> str:
        """The text, as often as wanted."""
        return text * times

    @server.tool()
    def header(name: str, context: Context) -> str:
        """A header of the request that made this call."""
        return context.request_context.request.headers.get(name, "")

    @server.tool()
    def picture() -> Image:
        """A picture."""
        return Image(data=b"\x89PNG1234", format="png")

    @server.tool()
    def place() -> dict[str, float]:
        """Where it is."""
        return {"north": 1.5}

    @server.tool()
    def fail() -> str:
        """Always fails."""
        raise ValueError("no such town")

    @server.tool()
    async def wait() -> str:
        """Never ends by itself."""
        await anyio.sleep_forever()
        return ""

    return server


@contextmanager
def over_http() -> Iterator[str]:
    """The address of :func:`sdk` in a thread of this process, which has imported most of it already."""
    import socket
    import threading

    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(sdk().streamable_http_app(), log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2:])
    else:
        sdk().run()
