"""JSON over HTTP for search services: a deadline over all attempts, back-off, Retry-After, a rate limit and a concurrency limit for each host.

Standard library alone; proxies come from the environment as urllib reads them. Redirects are not followed: urllib would send the API key along.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import itertools
import json
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from arpo_env.tools.base import Shared
from arpo_env.tools.search_index import SearchRefused, SearchUnavailable

T = TypeVar("T")

_MAX_BYTES = 10 * 2**20
_FIRST_PAUSE = 0.5
_clock, _sleep, _today = time.monotonic, time.sleep, time.time  # tests put a clock of their own here
_random = random.Random()  # its own: jitter must not move the numbers that an experiment draws


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A GET, or a POST of ``body``. ``secret`` is blotted out of what the service says."""

    service: str
    """Its name in messages."""
    url: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: str = field(default="", repr=False)
    hint: str = ""
    """What to look at when the service refuses, for the message."""


class TryAgainError(Exception):
    """This attempt failed; another may not."""

    def __init__(self, message: str, after: float | None = None):
        super().__init__(message)
        self.after = after
        """Seconds that the service asked to wait."""


class HttpClient(Shared):
    """Makes requests, several threads at once. Copies are the same object, so that forks keep to the limits together; processes count apart.

    Args:
        timeout: seconds for one attempt to connect, and for each wait for data.
        deadline: seconds for a request with all its attempts and pauses; keep it below the tool's ``timeout``.
        retries: further attempts after 429, 5xx, a timeout, a failed connection or an answer that is not JSON; pauses 0.5 s, 1 s, 2 s, give or take half.
        per_second: requests a second to one host; None: no limit.
        max_concurrency: requests at once to one host.
    """

    def __init__(self, *, timeout: float = 10.0, deadline: float = 20.0, retries: int = 2, per_second: float | None = None, max_concurrency: int = 8):
        if not (timeout > 0 and deadline > 0):
            raise ValueError(f"timeout and deadline must be positive seconds, got {timeout!r} and {deadline!r}")
        if retries < 0 or max_concurrency < 1:
            raise ValueError(f"retries must be at least 0 and max_concurrency at least 1, got {retries!r} and {max_concurrency!r}")
        if per_second is not None and not per_second > 0:
            raise ValueError(f"per_second must be positive or None, got {per_second!r}")
        self.timeout, self.deadline, self.retries, self.per_second, self.max_concurrency = timeout, deadline, retries, per_second, max_concurrency
        self._hosts: dict[tuple[int, str], _Host] = {}
        # Here and not at the first request: OpenSSL holds locks while it makes a context, which a child forked at that moment would wait for for ever.
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=ssl.create_default_context()), _NoRedirect)

    def json(self, request: JsonRequest) -> Any:
        """The answer's JSON value. :class:`SearchUnavailable` when there was none in time, :class:`SearchRefused` for what another attempt cannot change."""
        return self.attempts(request.service, urllib.parse.urlsplit(request.url).netloc, self.end(), lambda seconds: self._attempt(request, seconds))

    def end(self) -> float:
        """The deadline of a request that starts now, on the clock of :meth:`attempts`."""
        return _clock() + self.deadline

    def attempts(self, service: str, host: str, end: float, attempt: Callable[[float], T]) -> T:
        """What ``attempt(seconds left)`` returns, called again after a pause when it raises :class:`TryAgainError`, under the limits of ``host``."""
        limits = self._host(host)
        for number in itertools.count(1):
            try:
                with limits.turn(service, end):
                    return attempt(max(0.001, end - _clock()))
            except TryAgainError as failure:
                pause = _FIRST_PAUSE * 2 ** (number - 1) * _random.uniform(0.5, 1.5)
                if failure.after is not None:
                    limits.hold(failure.after)
                    pause = failure.after
                if number > self.retries or _clock() + pause >= end:
                    asked = "" if failure.after is None else f"; it asked to wait {failure.after:.0f} s"
                    raise SearchUnavailable(f"{service}: {failure}{asked} ({number} attempt{'s' * (number > 1)})") from None
                _sleep(pause)
        raise AssertionError("unreachable")

    def _host(self, netloc: str) -> _Host:
        # A forked child has none of the threads that hold places, so it counts anew. ``setdefault`` is atomic: no lock that a fork might find taken.
        return self._hosts.setdefault((os.getpid(), netloc), _Host(self.per_second, self.max_concurrency))

    def _attempt(self, request: JsonRequest, seconds: float) -> Any:
        data = None if request.body is None else json.dumps(request.body).encode()
        headers = {"Accept": "application/json", "User-Agent": "arpo", **({} if data is None else {"Content-Type": "application/json"}), **request.headers}
        wire = urllib.request.Request(request.url, data=data, headers=headers)
        end = _clock() + seconds
        try:
            with self._opener.open(wire, timeout=min(self.timeout, seconds)) as response:
                return _parse(_read(response, end))
        except urllib.error.HTTPError as error:
            _raise_for_status(request, error)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise SearchRefused(f"{request.service}: its certificate cannot be verified: {error.reason}") from None
            raise TryAgainError(f"no connection: {_words(error.reason)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise TryAgainError(f"no answer: {_words(error)}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Host:
    """The limits of one host."""

    def __init__(self, per_second: float | None, max_concurrency: int):
        self._interval = 1 / per_second if per_second else 0.0
        self._places = threading.BoundedSemaphore(max_concurrency)
        self._lock = threading.Lock()
        self._next = 0.0

    def hold(self, seconds: float) -> None:
        """Start nothing for so long: the service asked for it, and all threads obey."""
        with self._lock:
            self._next = max(self._next, _clock() + seconds)

    @contextlib.contextmanager
    def turn(self, service: str, end: float) -> Iterator[None]:
        """A place among the requests at once, at a time that the rate allows. :class:`SearchUnavailable` where that is after ``end``."""
        if not self._places.acquire(timeout=max(0.0, end - _clock())):
            raise SearchUnavailable(f"{service}: too many requests are waiting for it already")
        try:
            pause = self._reserve(end)
            if pause is None:
                raise SearchUnavailable(f"{service}: the next request is allowed after this call's deadline only (rate limit)")
            if pause > 0:
                _sleep(pause)
            yield
        finally:
            self._places.release()

    def _reserve(self, end: float) -> float | None:
        """Seconds until the request may start; None, and nothing is reserved, where that is too late."""
        with self._lock:
            now = _clock()
            start = max(now, self._next)
            if start >= end:
                return None
            self._next = start + self._interval
            return start - now


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None  # the answer 3xx then comes as an HTTPError


def _read(response: Any, end: float) -> bytes:
    chunks: list[bytes] = []
    while chunk := response.read1(65536):
        chunks.append(chunk)
        if sum(map(len, chunks)) > _MAX_BYTES:
            raise TryAgainError(f"the answer is larger than {_MAX_BYTES} bytes")
        if _clock() > end:
            raise TryAgainError("the answer was still coming at the deadline")
    if response.length:  # of the bytes that its header promised
        raise TryAgainError("the connection broke in the middle of the answer")
    return b"".join(chunks)


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        start = raw[:80].decode("utf-8", "replace")
        raise TryAgainError(f"the answer is not JSON: {start!r}") from None


def _raise_for_status(request: JsonRequest, error: urllib.error.HTTPError) -> NoReturn:
    with error:
        try:
            body = error.read1(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, AttributeError):  # AttributeError: an answer without a body
            body = ""
    if request.secret:
        body = body.replace(request.secret, "***")  # before it is cut: half a key is too much
    body = " ".join(body.split())[:200]
    message = f"HTTP {error.code} {error.reason}" + (f": {body}" if body else "")
    if error.code in (408, 425, 429) or error.code >= 500:
        raise TryAgainError(message, retry_after(error.headers.get("Retry-After"))) from None
    if error.code < 400:
        message += f" (it redirects to {error.headers.get('Location')}; redirects are not followed: give the final address)"
    raise SearchRefused(f"{request.service}: {message}" + (f"; {request.hint}" if request.hint else "")) from None


def retry_after(value: str | None) -> float | None:
    """Seconds from the header ``Retry-After``, which holds seconds or a date; None where it holds neither."""
    if value is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, float(int(value)))
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - _today())
    return None


def _words(error: Any) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
