"""A server on this machine that speaks the endpoints of E2B that its SDK uses; the interpreters behind it are sessions of the local sandbox.

A fault is a function of the request's handler and the sandbox it is about (None where there is none). ``server.faults[route].append(fault)`` makes the next
request to that route end in it. Routes: create, kill, fork, timeout, connect, health, execute.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from arpo_env.sandbox import Limits, SandboxError, Session, shared_pool

KEY = "e2b_" + "0" * 40
TOKEN = "access"
ROUTES = ("fork", "timeout", "connect")
_numbers = itertools.count()  # one for all servers: an id is never used again
_POOL = (("numpy",), Limits(memory_mb=203))


class FakeSandbox:
    """One machine: an id, an interpreter, and the lifetime it was last given."""

    def __init__(self, name: str, session: Session, lifetime: int):
        self.name, self.session, self.lifetime = name, session, lifetime
        self.cells: list[str] = []
        self.internet: bool | None = None
        self.lock = threading.Lock()
        """Held while a cell runs."""

    def describe(self) -> dict[str, str]:
        return {"sandboxID": self.name, "templateID": "code-interpreter-v1", "clientID": "c", "envdVersion": "0.4.0", "envdAccessToken": TOKEN}


Fault = Callable[["Handler", "FakeSandbox | None"], None]


class FakeE2B(ThreadingHTTPServer):
    """The service: its living sandboxes, what was asked of it, and the faults that come next."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.started = self.killed = 0
        self.requests: list[str] = []
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.running = threading.Event()
        """Set when a cell has begun."""
        self.interrupted = threading.Event()
        """Set when a client hung up on a running cell."""
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, session: Session, lifetime: int) -> FakeSandbox:
        sandbox = FakeSandbox(f"sandbox{next(_numbers)}", session, lifetime)
        self.sandboxes[sandbox.name] = sandbox
        self.started += 1
        return sandbox

    def remove(self, name: str) -> bool:
        """End a sandbox as at its deadline, or as asked."""
        sandbox = self.sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.session.close()
        return sandbox is not None

    def asked(self, route: str) -> int:
        """How many requests came to ``route``."""
        return self.requests.count(route)


@contextlib.contextmanager
def fake_e2b() -> Iterator[FakeE2B]:
    """A running server."""
    server = FakeE2B()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        for name in list(server.sandboxes):
            server.remove(name)
        for connection in list(server.connections):  # the SDK keeps them open, and each has a thread here
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()


# -- faults ------------------------------------------------------------------------------------------------------------------------------------------------


def answer(status: int, message: str = "scripted", **headers: str) -> Fault:
    """The request is refused with ``status`` before anything is done."""

    def fault(handler: Handler, sandbox: FakeSandbox | None) -> None:
        handler.reply(status, {"code": status, "message": message}, {name.replace("_", "-"): value for name, value in headers.items()})

    return fault


def hang_up(handler: Handler, sandbox: FakeSandbox | None) -> None:
    """The connection ends without an answer."""
    handler.cut()


def run_then_hang_up(handler: Handler, sandbox: FakeSandbox | None) -> None:
    """The cell runs, and the connection ends before its result is sent."""
    assert sandbox is not None
    handler.start_stream()
    sandbox.session.exec(handler.body["code"], timeout=60.0)
    handler.cut()


def vanish(handler: Handler, sandbox: FakeSandbox | None) -> None:
    """The sandbox ends while the cell runs."""
    assert sandbox is not None
    handler.start_stream()
    handler.server.remove(sandbox.name)
    handler.cut()


def stall(*lines: dict[str, Any]) -> Fault:
    """The cell prints ``lines`` and then nothing until the client hangs up, which interrupts it."""

    def fault(handler: Handler, sandbox: FakeSandbox | None) -> None:
        handler.start_stream()
        for line in lines:
            handler.line(line)
        while not handler.client_is_gone(0.05):
            with contextlib.suppress(OSError):
                handler.line({"type": "keepalive"})
        handler.server.interrupted.set()

    return fault


def flood(handler: Handler, sandbox: FakeSandbox | None) -> None:
    """The cell prints for ever."""
    handler.start_stream()
    with contextlib.suppress(OSError):
        while True:
            handler.line({"type": "stdout", "text": "x" * 100_000, "timestamp": 0})
    handler.server.interrupted.set()


def lines(*scripted: dict[str, Any]) -> Fault:
    """The cell gives exactly these lines."""

    def fault(handler: Handler, sandbox: FakeSandbox | None) -> None:
        handler.start_stream()
        for line in scripted:
            handler.line(line)
        handler.end_stream()

    return fault


# -- requests ----------------------------------------------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    server: FakeE2B
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("health", self.headers["E2b-Sandbox-Id"])

    def do_DELETE(self) -> None:
        self._serve("kill", self.path.split("/")[-1])

    def do_POST(self) -> None:
        parts = self.path.strip("/").split("/")
        if self.path == "/execute":
            self._serve("execute", self.headers["E2b-Sandbox-Id"])
        elif self.path == "/v2/sandboxes":
            self._serve("create", "")
        else:
            assert parts[-1] in ROUTES, f"the fake does not know {self.path}"
            self._serve(parts[-1], parts[-2])

    def _serve(self, route: str, name: str) -> None:
        self.body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        self.server.requests.append(route)
        sandbox = self.server.sandboxes.get(name)
        if self.server.faults[route]:
            self.server.faults[route].popleft()(self, sandbox)
        elif route in ("execute", "health"):
            if sandbox is None:
                self.reply(502, {"code": 502, "message": "The sandbox was not found", "sandboxId": name})
            elif self.headers["X-Access-Token"] != TOKEN:
                self.reply(401, {"code": 401, "message": "wrong token"})
            else:
                getattr(self, f"_{route}")(sandbox)
        elif self.headers["X-API-KEY"] != KEY:
            self.reply(401, {"code": 401, "message": "wrong key"})
        elif route == "create":
            self._create()
        elif sandbox is None:
            self.reply(404, {"code": 404, "message": f"sandbox {name} not found"})
        else:
            getattr(self, f"_{route}")(sandbox)

    def _create(self) -> None:
        sandbox = self.server.add(shared_pool(*_POOL).session(), self.body.get("timeout", 300))
        sandbox.internet = self.body.get("allow_internet_access")
        self.reply(201, sandbox.describe())

    def _kill(self, sandbox: FakeSandbox) -> None:
        self.server.killed += self.server.remove(sandbox.name)
        self.reply(204)

    def _timeout(self, sandbox: FakeSandbox) -> None:
        sandbox.lifetime = self.body["timeout"]
        self.reply(204)

    def _connect(self, sandbox: FakeSandbox) -> None:
        self.reply(200, sandbox.describe())

    def _health(self, sandbox: FakeSandbox) -> None:
        self.reply(204)

    def _fork(self, sandbox: FakeSandbox) -> None:
        """One result for each copy; a fault of the route ``copy`` makes one fail."""
        results: list[dict[str, Any]] = []
        for _ in range(self.body["count"]):
            if self.server.faults["copy"]:
                self.server.faults["copy"].popleft()
                results.append({"error": {"code": 503, "message": "no capacity"}})
                continue
            copy = self.server.add(sandbox.session.fork(), self.body.get("timeout", 300))
            copy.cells = list(sandbox.cells)
            results.append({"sandbox": copy.describe()})
        self.reply(201, results)

    def _execute(self, sandbox: FakeSandbox) -> None:
        self.start_stream()
        done: list[Any] = []
        thread = threading.Thread(target=self._run, args=(sandbox, self.body["code"], done), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.005)
            if self.client_is_gone(0):
                self.server.interrupted.set()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sandbox.session.pid, signal.SIGINT)
                return
        for line in done:
            self.line(line)
        self.end_stream()

    def _run(self, sandbox: FakeSandbox, code: str, done: list[Any]) -> None:
        """What a Jupyter kernel would send for ``code``."""
        with sandbox.lock:
            sandbox.cells.append(code)
            self.server.running.set()
            try:
                cell = sandbox.session.exec(code, timeout=3600.0, output_chars=1_000_000)
            except SandboxError:
                return
            done.append({"type": "number_of_executions", "execution_count": len(sandbox.cells)})
            if cell.output:
                done.append({"type": "stdout", "text": cell.output, "timestamp": 0})
            if cell.result is not None:
                done.append({"type": "result", "text": cell.result, "is_main_result": True})
            if not cell.kept:
                done.append({"type": "error", "name": "ContextRestarting", "value": "Context was restarted", "traceback": ""})
                sandbox.session = shared_pool(*_POOL).session()
            elif cell.status != "ok":
                name, _, value = cell.error.splitlines()[-1].partition(": ")
                colored = "-" * 75 + f"\x1b[0;31m{name}\x1b[0m   Traceback (most recent call last)" + "Cell \x1b[0;32mIn[1]\x1b[0m, line 1\n"
                done.append({"type": "error", "name": name, "value": value, "traceback": f"{colored}----> 1 code\n\n\x1b[0;31m{name}\x1b[0m: {value}"})

    # -- bytes ---------------------------------------------------------------------------------------------------------------------------------------------

    def reply(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def line(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.line({"type": "end_of_execution"})
        self.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def client_is_gone(self, wait: float) -> bool:
        readable = select.select([self.connection], [], [], wait)[0]
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True
