"""Web sites for the tests of the browse tool: an HTTP server on 127.0.0.1, one that sends raw bytes, and a fetcher without any network."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from arpo_env.tools.base import Tool, ToolResult, check_arguments
from arpo_env.tools.browse import BrowseError, BrowseTool, Extractor, Fetched, HttpFetcher

Page = tuple[int, Mapping[str, str], bytes]


def html(text: str, charset: str = "utf-8") -> Page:
    return 200, {"Content-Type": f"text/html; charset={charset}"}, text.encode(charset)


class Site:
    """Serves ``pages`` (path -> status, headers, body); other paths are 404. ``requests`` lists what was asked: path and headers."""

    def __init__(self, pages: Mapping[str, Page], tls: ssl.SSLContext | None = None):
        self.pages = dict(pages)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.running = self.most_at_once = 0
        self.hold: threading.Event | None = None
        """While set to an event, every request waits for it."""
        self.arrived = threading.Semaphore(0)
        self._lock = threading.Lock()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site._answer(self)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # closing waits for them
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self.requests.append((handler.path, dict(handler.headers)))
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        self.arrived.release()
        if self.hold is not None:
            self.hold.wait(60)
        with self._lock:
            self.running -= 1
        status, headers, body = self.pages.get(handler.path, (404, {"Content-Type": "text/html"}, b"no such page"))
        handler.send_response_only(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            if value:
                handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):  # the client had enough
            handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class RawServer:
    """Calls ``script(connection, stopped)`` for each connection, in a thread of its own, after the request has been read."""

    def __init__(self, script: Callable[[socket.socket, threading.Event], object]):
        self._script = script
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._stopped.is_set():
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._run, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _run(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client has gone
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += connection.recv(4096)
            self._script(connection, self._stopped)

    def close(self) -> None:
        self._stopped.set()
        socket.create_connection(self._listener.getsockname()).close()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def drip(connection: socket.socket, stopped: threading.Event, piece: bytes) -> None:
    """Send ``piece`` again and again, slowly, until the client goes."""
    while not stopped.wait(0.01):
        connection.sendall(piece)


def local_fetcher(**changes: Any) -> HttpFetcher:
    """One that opens 127.0.0.1, patient and without pauses."""
    return HttpFetcher(**{"allow_private": True, "ports": None, "interval": 0.0, "timeout": 60.0, "read_timeout": 60.0} | changes)


class FakeFetcher:
    """Documents from a dict of URL to HTML; counts what was fetched."""

    def __init__(self, pages: Mapping[str, str]):
        self.pages = dict(pages)
        self.fetched: list[str] = []
        self.timeout = 5.0

    def fetch(self, url: str) -> Fetched:
        self.fetched.append(url)
        if url not in self.pages:
            raise BrowseError("bad_arguments", f"The server answered 404 Not Found for {url}.")
        return Fetched(url, "html", "utf-8", self.pages[url].encode(), False)

    def settings(self) -> Mapping[str, Any]:
        return {"fetcher": "fake"}

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeFetcher:
        return self


LONG = "\n".join(f"<p>Paragraph {number} {'word ' * 30}</p>" for number in range(20))
"""Twenty paragraphs of 165 to 166 characters."""
PAGES = {
    "https://example.org/": '<title>Start</title><p>Hello. See <a href="/long">the long one</a> or <a href="https://other.example/">another</a>.</p>',
    "https://example.org/long": f"<title>Long</title>{LONG}",
    "https://example.org/empty": "<title>App</title><script>render()</script>",
}


def make(extractor: Extractor, **options: Any) -> BrowseTool:
    return BrowseTool(options.pop("fetcher", None) or FakeFetcher(PAGES), extractor, **({"page_chars": 1000} | options))


def good(tool: Tool, **arguments: Any) -> ToolResult:
    assert check_arguments(tool, arguments) is None
    result = tool.call(**arguments)
    assert isinstance(result, ToolResult) and result.ok, result
    return result


def bad(tool: Tool, **arguments: Any) -> ToolResult:
    result = tool.call(**arguments)
    assert isinstance(result, ToolResult) and not result.ok, result
    return result
