"""JSON over HTTP to one server: many requests at once, tried again while they fail for reasons that pass.

The connections belong to an event loop in a thread of their own. Whoever asks may do so from a new event loop every time, as a training run does at each
step, and connections stay open in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of a server that may answer the same request later."""
_LONGEST_WAIT = 30.0
"""Seconds between two tries, unless the server asks for more."""
_KEEP_ALIVE = 2.0
"""Seconds that an idle connection is kept: less than servers do (uvicorn: 5), so that a request seldom meets one that is being closed."""


class ServerError(RuntimeError):
    """The server cannot be reached, refuses, or does not answer as it must. Says which request, and what came."""


class _Unavailable(Exception):
    """A try that failed and may succeed later. ``wait``: seconds that the server asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class JSONClient:
    """Asks the server at ``url``. A request that fails for now is tried again ``max_retries`` times, after ``backoff`` seconds, then twice as many, at most 30.

    Raises ``ImportError`` without httpx.
    """

    def __init__(self, url: str, *, api_key: str | None, max_retries: int, backoff: float) -> None:
        self.url, self._max_retries, self._backoff = url, max_retries, backoff
        self._client = _client(api_key)
        self._lock = threading.Lock()
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-policy", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs ``coroutine`` where requests can be awaited. Raises :class:`ServerError` once the client is closed."""
        with self._lock:
            if not self.closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ServerError(f"the policy over {self.url} was closed")

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server answers. To be awaited in :meth:`run`. Raises :class:`ServerError` when it refuses, or the last try failed."""
        for number in range(self._max_retries + 1):
            try:
                return await self._try(method, path, body)
            except _Unavailable as error:
                failure = error
            if number < self._max_retries:
                wait = min(self._backoff * 2**number, _LONGEST_WAIT) * random.uniform(0.5, 1.0)  # clients that failed together come back one by one
                log.warning("%s %s%s: %s; try %d of %d follows", method, self.url, path, failure, number + 2, self._max_retries + 1)
                await asyncio.sleep(max(wait, failure.wait))
        raise ServerError(f"{method} {self.url}{path} failed {self._max_retries + 1} times, the last time with {failure}") from failure

    async def _try(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        import httpx

        try:
            response = await self._client.request(method, self.url + path, json=body)
        except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{method} {self.url}{path} is not possible: {type(error).__name__}: {error}") from error
        if response.status_code in _RETRIED:
            raise _Unavailable(f"status {response.status_code}: {_excerpt(response.text)}", _seconds(response.headers.get("retry-after")))
        if response.status_code != 200:
            raise ServerError(f"{method} {self.url}{path} was refused with status {response.status_code}: {_excerpt(response.text)}")
        try:
            return response.json()
        except json.JSONDecodeError as error:
            raise ServerError(f"{method} {self.url}{path} answered no JSON: {_excerpt(response.text)}") from error

    def close(self) -> None:
        """Cancels what runs and closes the connections. Can be called twice."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.aclose()


def _client(api_key: str | None) -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ImportError("a policy over a server needs httpx: pip install 'arpo[server]'") from error
    return httpx.AsyncClient(
        timeout=None,  # a turn has a deadline of its own
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )


def _excerpt(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]}..."


def _seconds(retry_after: str | None) -> float:
    """0 where the header is missing or a date."""
    try:
        return max(0.0, float(retry_after or 0.0))
    except ValueError:
        return 0.0
