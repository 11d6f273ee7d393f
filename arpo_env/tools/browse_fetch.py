"""Fetching a web page under limits that hold: who is asked, how much is read, how long it may take.

``HttpFetcher`` is the standard library's HTTP client over a socket of our own, which gives what the client alone does not: the connection goes to the
address that was checked, every single read stands under the total deadline (a server that sends one byte a second cannot stretch it), and bytes are counted
on the wire and again after decompression. Proxies named in the environment are not used: through them the address could not be checked. ``robots.txt``
is not consulted; requests carry an honest User-Agent and are few at a time for one host.
"""

from __future__ import annotations

import codecs
import functools
import http.client
import io
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from arpo_env._deadline import DeadlineExceeded, call_with_deadline
from arpo_env.tools.browse_gate import Busy, HostGate
from arpo_env.tools.browse_url import BrowseError, WebAddress, is_public, join_url, read_url

__all__ = ["Fetched", "Fetcher", "HttpFetcher", "system_resolve"]

_OVERHEAD = 1 << 18  # bytes on the wire beyond the body: headers, chunk sizes
_PIECE = 1 << 14
_HTML = ("text/html", "application/xhtml+xml")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a server sent."""

    url: str
    """Where it was found, after redirects."""
    kind: str
    """``html`` or ``text``."""
    charset: str
    """As declared in the headers; "" where they say nothing."""
    body: bytes
    """Decompressed."""
    cut: bool
    """There was more than the size limit."""


class Fetcher(Protocol):
    """What the browse tool gets pages from. Shared by threads, episodes and forks. Write your own for a proxy, a browser, or a recorded set of pages."""

    timeout: float
    """Seconds that :meth:`fetch` may take."""

    def fetch(self, url: str) -> Fetched:
        """The page at ``url``. Raises :class:`BrowseError`: of kind ``unavailable`` where a later try may succeed."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """What the pages depend on beside the URL, as JSON values."""
        ...


def system_resolve(host: str, port: int) -> list[str]:
    """The IP addresses of ``host``, as the system's resolver orders them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class HttpFetcher:
    """Fetches HTML and text over http and https from public hosts.

    Args:
        timeout: seconds for a page: name lookup, waiting for a slot, all redirects and the whole body.
        read_timeout: seconds of silence after which a server is given up.
        max_bytes: bytes of a page that are read, both on the wire and after decompression; the rest is left out, with a notice.
        max_redirects: redirects that are followed. Each goes through all checks again.
        allow_private: True, or the host names, for which addresses that are not on the public internet are opened too (an intranet, tests).
        blocked_hosts: hosts never opened, with all below them: ``"example.org"`` blocks ``www.example.org``. For sites that hold the answers of a benchmark.
        ports: ports that a URL may name; None for any.
        per_host, interval: requests to one host at a time, and seconds between their starts.
        user_agent: what is sent as User-Agent.
        resolve: name and port to IP addresses.
        tls: the context for https; None: the system's certificates.
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        read_timeout: float = 5.0,
        max_bytes: int = 1_000_000,
        max_redirects: int = 5,
        allow_private: bool | Collection[str] = False,
        blocked_hosts: Collection[str] = (),
        ports: Collection[int] | None = (80, 443),
        per_host: int = 4,
        interval: float = 0.1,
        user_agent: str = "arpo-browse/1 (research agent)",
        resolve: Callable[[str, int], Sequence[str]] = system_resolve,
        tls: ssl.SSLContext | None = None,
    ):
        if not timeout > 0 or not read_timeout > 0:
            raise ValueError(f"timeout and read_timeout must be positive, got {timeout!r} and {read_timeout!r}")
        if max_bytes < 1 or max_redirects < 0:
            raise ValueError(f"max_bytes must be at least 1 and max_redirects at least 0, got {max_bytes!r} and {max_redirects!r}")
        if per_host < 1 or not interval >= 0:
            raise ValueError(f"per_host must be at least 1 and interval at least 0, got {per_host!r} and {interval!r}")
        if isinstance(allow_private, str) or isinstance(blocked_hosts, str):
            raise TypeError("allow_private and blocked_hosts take a collection of host names, got a single string")
        self.timeout, self.read_timeout = float(timeout), float(read_timeout)
        self.max_bytes, self.max_redirects = max_bytes, max_redirects
        names = () if isinstance(allow_private, bool) else tuple(allow_private)
        if wrong := [name for name in (*names, *blocked_hosts) if "/" in name or (":" in name and name.count(":") == 1)]:
            raise ValueError(f"allow_private and blocked_hosts take host names without scheme and port (ports= takes those), got {wrong}")
        self.allow_private = allow_private if isinstance(allow_private, bool) else frozenset(map(str.lower, allow_private))
        self.blocked_hosts = frozenset(map(str.lower, blocked_hosts))
        self.ports = None if ports is None else frozenset(ports)
        self.user_agent, self.resolve, self.tls = user_agent, resolve, tls
        self._gate = HostGate(per_host, interval)
        self._tls_context = _tls_context(tls)

    def settings(self) -> Mapping[str, Any]:
        return {"fetcher": "http", "max_bytes": self.max_bytes, "user_agent": self.user_agent, "blocked_hosts": sorted(self.blocked_hosts)}

    def fetch(self, url: str) -> Fetched:
        """The page at ``url``.

        ``bad_arguments`` is what the choice of this URL explains (no such page, not a public host, a type that is no text), ``exception`` a server that cannot
        be understood, ``unavailable`` one that is down, slow or overloaded.
        """
        deadline = _Deadline(self.timeout)
        for _ in range(self.max_redirects + 1):
            address = read_url(url, self.ports)
            answer = self._get(address, deadline)
            if isinstance(answer, Fetched):
                return answer
            url = join_url(address.url, answer)
        raise BrowseError("bad_arguments", f"The page was not opened: more than {self.max_redirects} redirects, the last to {url:.200}.")

    def _get(self, address: WebAddress, deadline: _Deadline) -> Fetched | str:
        """The page, or where the server redirects to."""
        host = address.host
        try:
            ips = self._addresses(address, deadline)
            with self._gate.slot(host, deadline.left()), self._connect(address, ips, deadline) as wire:
                return self._exchange(address, _Wire(wire, deadline, self.read_timeout, self.max_bytes + _OVERHEAD))
        except Busy:
            raise BrowseError("unavailable", f"Too many requests to {host} are waiting; try again later.") from None
        except (TimeoutError, DeadlineExceeded):
            raise BrowseError("unavailable", f"{host} did not answer in time.") from None
        except ssl.SSLCertVerificationError as error:
            raise BrowseError("exception", f"The certificate of {host} is not valid: {error.verify_message}.") from None
        except http.client.IncompleteRead:
            raise BrowseError("unavailable", f"The connection to {host} ended in the middle of the page.") from None
        except (http.client.HTTPException, zlib.error) as error:
            raise BrowseError("exception", f"{host} sent something that is not HTTP as it should be ({type(error).__name__}).") from None
        except OSError as error:
            raise BrowseError("unavailable", f"{host} cannot be reached: {error.strerror or type(error).__name__}.") from None

    def _addresses(self, address: WebAddress, deadline: _Deadline) -> Sequence[str]:
        """The IP addresses to connect to, all of them checked."""
        host = address.host
        if any(host == blocked or host.endswith(f".{blocked}") for blocked in self.blocked_hosts):
            raise BrowseError("bad_arguments", f"{host} is blocked; use another source.")
        if ":" in host or host.replace(".", "").isdigit():
            ips: Sequence[str] = [host]
        else:
            ips = call_with_deadline(functools.partial(self._look_up, host, address.port), deadline.left())
        private = self.allow_private if isinstance(self.allow_private, bool) else host in self.allow_private
        if not private and not all(map(is_public, ips)):
            raise BrowseError("bad_arguments", f"{host} is not on the public internet; such addresses are not opened.")
        return ips

    def _look_up(self, host: str, port: int) -> Sequence[str]:
        try:
            ips = self.resolve(host, port)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
                raise BrowseError("bad_arguments", f"There is no host {host}.") from None
            raise BrowseError("unavailable", f"The name {host} cannot be looked up now: {error.strerror}.") from None
        if not ips:
            raise BrowseError("bad_arguments", f"There is no host {host}.")
        return ips

    def _connect(self, address: WebAddress, ips: Sequence[str], deadline: _Deadline) -> socket.socket:
        """A connection to the first of ``ips`` that takes one, with TLS for https."""
        failure: OSError | None = None
        for ip in ips[:4]:
            try:
                wire = socket.create_connection((ip, address.port), timeout=min(self.read_timeout, deadline.left()))
                break
            except OSError as error:
                failure = error
        else:
            assert failure is not None
            raise failure
        if address.scheme == "http":
            return wire
        try:
            wire.settimeout(min(self.read_timeout, deadline.left()))
            return self._tls_context.wrap_socket(wire, server_hostname=address.host)
        except BaseException:
            wire.close()
            raise

    def _exchange(self, address: WebAddress, wire: _Wire) -> Fetched | str:
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.sock = wire
        connection.request(
            "GET",
            address.target,
            headers={
                "Host": address.netloc,
                "User-Agent": self.user_agent,
                "Accept": "text/html,application/xhtml+xml,text/plain,text/markdown,application/json;q=0.9,*/*;q=0.1",
                "Accept-Encoding": "gzip, deflate",
                "Connection": "close",
            },
        )
        response = connection.getresponse()
        location = response.headers.get("Location")
        if response.status in (301, 302, 303, 307, 308) and location:
            return location.encode("latin-1", "replace").decode("utf-8", "replace")  # raw bytes in a header are read as UTF-8, as browsers do
        _check_status(response, address)
        kind = _kind(response, address)
        body, cut = _read_body(response, self.max_bytes)
        if not kind:
            kind = "html" if body.lstrip()[:1] == b"<" else "text"
        charset = response.headers.get_content_charset() or ""
        if _is_binary(body, charset):
            raise BrowseError("bad_arguments", f"{address.url:.200} is not text, whatever its server says; {_ACCEPTED}")
        return Fetched(address.url, kind, charset, body, cut)

    def __deepcopy__(self, memo: dict[int, Any]) -> HttpFetcher:
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_tls_context"}
        return state | {"_gate": (self._gate.at_once, self._gate.interval)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_gate": HostGate(*state["_gate"]), "_tls_context": _tls_context(state["tls"])})


def _tls_context(given: ssl.SSLContext | None) -> ssl.SSLContext:
    """Made at once: OpenSSL loads certificates under a lock, which must not be held by another thread when the process forks."""
    return given or ssl.create_default_context()


class _Deadline:
    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left. ``TimeoutError`` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Wire(io.RawIOBase):
    """A socket for ``http.client``, each read and write of which stands under the deadline; no more than ``room`` bytes are read in all."""

    def __init__(self, wire: socket.socket, deadline: _Deadline, read_timeout: float, room: int):
        super().__init__()
        self._wire, self._deadline, self._read_timeout, self._room = wire, deadline, read_timeout, room

    def sendall(self, data: bytes) -> None:
        self._wire.settimeout(min(self._read_timeout, self._deadline.left()))
        self._wire.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, _PIECE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._wire.settimeout(min(self._read_timeout, self._deadline.left()))
        count = self._wire.recv_into(buffer)
        self._room -= count
        if self._room < 0:
            raise http.client.HTTPException("endless headers")
        return count

    def close(self) -> None:
        """Nothing: ``http.client`` closes before the body is read; the socket is closed by who opened it."""


def _check_status(response: http.client.HTTPResponse, address: WebAddress) -> None:
    status = response.status
    if 200 <= status < 300:
        return
    said = f"The server answered {status} {http.client.responses.get(status, '')} for {address.url:.200}."
    if status in (408, 425, 429) or status >= 500:
        raise BrowseError("unavailable", said)
    raise BrowseError("bad_arguments" if status >= 400 else "exception", said)


def _kind(response: http.client.HTTPResponse, address: WebAddress) -> str:
    """``html``, ``text``, or "" where the server does not say. :class:`BrowseError` for what is neither."""
    if not response.headers.get("Content-Type", "").strip():
        return ""
    declared = response.headers.get_content_type()
    if declared in _HTML:
        return "html"
    if declared.startswith("text/") or declared == "application/json" or declared.endswith("+json"):
        return "text"
    hint = " PDF files are not supported; look for an HTML version." if declared == "application/pdf" else ""
    raise BrowseError("bad_arguments", f"{address.url:.200} is of the type {declared!r:.60}; {_ACCEPTED}{hint}")


_ACCEPTED = "only HTML, plain text and JSON are read."


def _is_binary(body: bytes, charset: str) -> bool:
    """Whether more than a hundredth of the first thousand bytes are zero and it is not UTF-16."""
    start = body[:1000]
    return start.count(0) * 100 > len(start) and not charset.startswith("utf-16") and start[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _read_body(response: http.client.HTTPResponse, limit: int) -> tuple[bytes, bool]:
    """At most ``limit`` bytes of the decompressed body, and whether there were more. ``IncompleteRead`` where it ends before its announced end."""
    decoder = _decoder(response.headers.get("Content-Encoding", "").strip().lower())
    body, on_wire = bytearray(), 0
    while len(body) <= limit and on_wire <= limit and (piece := response.read(_PIECE)):
        on_wire += len(piece)
        body += decoder.decode(piece, limit + 1 - len(body))
    cut = len(body) > limit or on_wire > limit
    if not cut and (response.length or not decoder.complete):
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(body[:limit]), cut


class _Identity:
    """No compression."""

    complete = True

    def decode(self, data: bytes, room: int) -> bytes:
        return data


class _Inflate:
    """gzip (of any number of members) or deflate (with or without its header), never giving more than it is asked for."""

    def __init__(self, *window_bits: int):
        self._window_bits = window_bits
        self._stream: Any = None

    @property
    def complete(self) -> bool:
        return self._stream is None or self._stream.eof

    def decode(self, data: bytes, room: int) -> bytes:
        """At most ``room`` (at least 1) bytes of what ``data`` continues."""
        out = b""
        while data and len(out) < room:
            if self._stream is None or self._stream.eof:
                if self._stream is not None and not data.strip(b"\0"):
                    break  # padding after the end
                self._stream = self._open(data)
            out += self._stream.decompress(data, room - len(out))
            data = self._stream.unused_data
        return out

    def _open(self, data: bytes) -> Any:
        for bits in self._window_bits[:-1]:
            try:
                zlib.decompressobj(bits).decompress(data[:2], 1)
                return zlib.decompressobj(bits)
            except zlib.error:
                continue
        return zlib.decompressobj(self._window_bits[-1])


def _decoder(encoding: str) -> _Identity | _Inflate:
    if encoding in ("", "identity"):
        return _Identity()
    if encoding in ("gzip", "x-gzip"):
        return _Inflate(zlib.MAX_WBITS | 16)
    if encoding == "deflate":
        return _Inflate(zlib.MAX_WBITS, -zlib.MAX_WBITS)
    raise BrowseError("exception", f"The page is compressed in a way that was not asked for ({encoding!r:.40}).")
