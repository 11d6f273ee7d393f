"""One session on an OpenEnv server: the protocol of OpenEnv 0.10, messages ``reset`` and ``step`` over a websocket at ``/ws``.

OpenEnv's own client is not used: when its connection is lost it connects again by itself, and the next ``step`` then acts on an environment in which
nothing has happened yet. It also loads the server's packages (fastapi, gradio and 2,000 modules more). Here a lost connection is a lost session, and
``websockets`` is all it takes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MAX_MESSAGE_BYTES = 100 * 2**20
LOST_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Error codes after which the server closes the connection."""


class Refused(RuntimeError):
    """The server answered with an error; ``code`` is OpenEnv's (``VALIDATION_ERROR``, ``EXECUTION_ERROR``, ...), or ``BAD_ANSWER`` for no message of its."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the OpenEnv server answered {code}: {message}")
        self.code = code
        self.message = message


class Session:
    """One websocket, one environment on the server. It never connects again: a new connection would be another environment.

    Raises ``ConnectionError`` where the server cannot be reached.
    """

    def __init__(self, base_url: str, *, timeout: float, headers: Mapping[str, str]) -> None:
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise ImportError("OpenEnvEnv needs websockets: pip install 'arpo[openenv]'") from error
        self._failures = (OSError, WebSocketException, json.JSONDecodeError)
        self._timeout = timeout
        self._base_url = _without_login(base_url)
        stack = contextlib.ExitStack()
        url = f"ws{base_url.removeprefix('http').removeprefix('ws').rstrip('/')}/ws"
        proxy: Any = None if _is_loopback(base_url) else True
        try:
            self._socket = stack.enter_context(
                connect(url, open_timeout=timeout, close_timeout=1.0, max_size=MAX_MESSAGE_BYTES, additional_headers=dict(headers), proxy=proxy)
            )
        except self._failures as error:
            raise ConnectionError(f"no OpenEnv server answers at {_without_login(url)}: {type(error).__name__}: {error}") from error
        self._closing = weakref.finalize(self, stack.close)

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the server's answer to one message.

        Raises :class:`Refused` when it is an error, ``TimeoutError`` or ``ConnectionError`` when there is none; the session is then closed.
        """
        from websockets.exceptions import ConnectionClosed

        message = json.dumps({"type": kind, "data": data})
        try:
            with contextlib.suppress(ConnectionClosed):  # a server that refuses the session says why before it closes
                self._socket.send(message)
            answer = json.loads(self._socket.recv(timeout=self._timeout))
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"the OpenEnv server at {self._base_url} did not answer {kind!r} within {self._timeout:g} s") from error
        except self._failures as error:
            self.close()
            raise ConnectionError(f"the OpenEnv server at {self._base_url} is gone: {type(error).__name__}: {error}") from error
        told = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(told, dict):
            raise Refused("BAD_ANSWER", f"expected a message of OpenEnv, got {answer!r:.200}")
        if answer.get("type") != "error":
            return told
        code, text = str(told.get("code", "unknown")), _message(told)
        if code in LOST_SESSION:
            self.close()
            raise ConnectionError(f"the OpenEnv server at {self._base_url} gives no session: {text} ({code})")
        raise Refused(code, text)

    def close(self) -> None:
        """Leave; the server closes its environment. Idempotent."""
        self._closing()


def _message(told: Mapping[str, Any]) -> str:
    """The error message with the fields that a validation error names."""
    details = [f"{'.'.join(map(str, entry.get('loc', ())))}: {entry.get('msg', '')}" for entry in told.get("errors") or () if isinstance(entry, dict)]
    return "; ".join([str(told.get("message", "unknown error")), *details])


def _without_login(url: str) -> str:
    """``url`` as it may stand in an error, which ends up in trajectories and logs."""
    netloc = urlsplit(url).netloc
    return url.replace(netloc, netloc.rpartition("@")[2], 1)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
