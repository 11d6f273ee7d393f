"""Which addresses the browse tool opens: URLs read strictly, hosts that are on the public internet.

A policy writes the URL, and the machine that opens it stands inside a network: without these checks a page is a way to the cloud's metadata service, to
the router, or to a database without a password. The address that was checked is the one that is connected to (see ``browse_fetch.py``); what the name
server says a moment later does not matter.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from arpo_env.tools.base import ErrorKind

__all__ = ["BrowseError", "WebAddress", "is_public", "join_url", "read_url"]

_MAX_URL = 2000
_EXAMPLE = "expected a URL such as https://en.wikipedia.org/wiki/Paris"


class BrowseError(Exception):
    """A call that gave no document: the kind of failure and what the model reads."""

    def __init__(self, kind: ErrorKind, text: str):
        super().__init__(text)
        self.kind: ErrorKind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A checked URL in parts, all of them ASCII and without white space."""

    scheme: str
    host: str
    """Lower case; a name in its IDNA form, or an IP address without brackets."""
    port: int
    target: str
    """Path and query as they stand in the request line; at least ``/``."""

    @property
    def netloc(self) -> str:
        """The value of the Host header: the port is left out where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL without a fragment. Two ways to write the same URL give the same text."""
        return f"{self.scheme}://{self.netloc}{self.target}"


_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!\d)")  # "host:8080" is no scheme
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")
_SAFE = "/%:=&?~+!$,;'@()*[]|"


def read_url(text: str, ports: Collection[int] | None = (80, 443)) -> WebAddress:
    """The URL that ``text`` is; ``https://`` may be missing, a fragment is dropped. :class:`BrowseError` (``bad_arguments``) for anything else.

    Args:
        ports: the ports that may be named; None for any.
    """
    text = text.strip().strip("<>\"'`").strip()
    if not text or len(text) > _MAX_URL:
        raise _bad(f"{_EXAMPLE}, got {f'{len(text):,} characters' if text else 'nothing'}")
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme.group(1).lower() not in _PORTS:
        raise _bad(f"only http and https are opened, got {text!r:.80}")
    try:
        parts = urlsplit(text if scheme is not None else f"https://{text.removeprefix('//')}")
        port = parts.port
    except ValueError as error:
        raise _bad(f"{_EXAMPLE}, got {text!r:.80} ({error})") from None
    if "@" in parts.netloc:
        raise _bad(f"a user name or password in a URL is not allowed; {_EXAMPLE}")
    port = _PORTS[parts.scheme] if port is None else port
    if ports is not None and port not in ports:
        raise _bad(f"port {port} is not allowed; allowed: {', '.join(map(str, sorted(ports)))}")
    target = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
    return WebAddress(parts.scheme, _host(parts.hostname or "", text), port, target)


def join_url(base: str, location: str) -> str:
    """Where a redirect or a link leads, seen from ``base``. :class:`BrowseError` where that is no URL."""
    try:
        return urljoin(base, location.strip())
    except ValueError:
        raise _bad(f"{location!r:.80} is not a URL") from None


def _host(name: str, text: str) -> str:
    """The host in its ASCII form. Numbers that are no plain IPv4 address (``2130706433``, ``0x7f.1``, ``0177.0.0.1``) are refused."""
    if ":" in name:
        try:
            return str(ipaddress.IPv6Address(name.replace("%", " ")))  # a zone means nothing beyond this machine
        except ValueError:
            raise _bad(f"{name!r:.80} is not a host") from None
    try:
        host = name.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        host = ""
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise _bad(f"{_EXAMPLE}, got {text!r:.80}")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _bad(f"{host!r:.80} is neither a host name nor an IP address") from None
    return host


def _bad(text: str) -> BrowseError:
    return BrowseError("bad_arguments", f"The page was not opened: {text}.")


_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24",
            "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
            "168.63.129.16/32",  # the metadata and name service of one cloud, at an address that looks public
            "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",  # tunnels that carry IPv4 addresses inside, documentation
        ),
    )
)  # fmt: skip
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet: not loopback, private, link-local, multicast, reserved, nor one of those wrapped in IPv6.

    The list is written out (IANA's special-purpose registries), since what ``ipaddress.is_global`` says differs between versions of Python.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:  # how IPv4 hosts look in an IPv6-only network
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip not in _GLOBAL_V6:
            return False
    return not any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)
