"""A local HTTP server that answers as it is told, and a clock that only moves when somebody sleeps."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from arpo_env.tools import _http


@dataclass
class Request:
    """What the server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """What it answers. ``before`` runs first, in the server's thread."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None

    @property
    def raw(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()


class LocalServer:
    """Answers with ``replies`` in their order, the last one for ever."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, self.rfile.read(length))
                reply = outer._take(request)
                reply.before()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.raw)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.raw)

            do_GET = do_POST = answer

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass  # a client that gave up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _take(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def reply(self, *replies: Reply) -> None:
        """Forget what was asked, and answer these from now on."""
        self.requests, self.replies = [], list(replies)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Clock:
    """Stands still but for what is slept. ``slept`` lists it."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.0, [0.0] * 0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(name="server")
def local_server() -> Iterator[LocalServer]:
    """A server of this test alone."""
    local = LocalServer()
    yield local
    local.close()


@pytest.fixture(name="clock")
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all HTTP clients. Jitter is left out: pauses are 0.5, 1, 2... s. No proxy of this machine is used."""
    fake = Clock()
    monkeypatch.setattr(_http, "_clock", lambda: fake.now)
    monkeypatch.setattr(_http, "_today", lambda: fake.now)
    monkeypatch.setattr(_http, "_sleep", fake.sleep)
    monkeypatch.setattr(_http._random, "uniform", lambda low, high: (low + high) / 2)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "DDGS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return fake
