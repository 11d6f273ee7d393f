"""Fetching: who is connected to, how much is read, how long it may take. All servers are on 127.0.0.1."""

from __future__ import annotations

import copy
import gzip
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browse_fakes import RawServer, Site, drip, html, local_fetcher

from arpo_env.tools.browse import BrowseError, HttpFetcher

TEXT = {"Content-Type": "text/plain"}


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site({"/": html("<p>hello</p>")})
    yield server
    server.close()


def refused(fetcher: HttpFetcher, url: str) -> BrowseError:
    with pytest.raises(BrowseError) as caught:
        fetcher.fetch(url)
    return caught.value


# --- what is sent and what comes back ---------------------------------------------------------------------------------------------------------------


def test_a_page_and_what_the_request_says(site: Site) -> None:
    page = local_fetcher(user_agent="me/1").fetch(f"{site.url}/#part")
    assert (page.url, page.kind, page.charset, page.body, page.cut) == (f"{site.url}/", "html", "utf-8", b"<p>hello</p>", False)
    path, headers = site.requests[0]
    assert (path, headers["Host"], headers["User-Agent"], headers["Connection"]) == ("/", f"127.0.0.1:{site.port}", "me/1", "close")


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        ("application/xhtml+xml", b"<p>x</p>", "html"),
        ("TEXT/HTML ; charset=utf-8", b"<p>x</p>", "html"),
        ("text/plain", b"<p>x</p>", "text"),
        ("text/markdown", b"# x", "text"),
        ("application/json", b"{}", "text"),
        ("application/ld+json", b"{}", "text"),
        ("", b"  <html>x", "html"),
        ("", b"just words", "text"),
        ("text/plain; charset=utf-16", "héllo".encode("utf-16"), "text"),
    ],
)
def test_types_that_are_read(site: Site, content_type: str, body: bytes, kind: str) -> None:
    site.pages["/x"] = (200, {"Content-Type": content_type}, body)
    assert local_fetcher().fetch(f"{site.url}/x").kind == kind


@pytest.mark.parametrize("content_type", ["application/pdf", "image/png", "application/octet-stream", "video/mp4", "application/zip"])
def test_other_types_are_refused_in_words(site: Site, content_type: str) -> None:
    site.pages["/x"] = (200, {"Content-Type": content_type}, b"%PDF-1.7 ...")
    error = refused(local_fetcher(), f"{site.url}/x")
    assert error.kind == "bad_arguments" and content_type in error.text
    assert ("PDF files are not supported" in error.text) == (content_type == "application/pdf")


@pytest.mark.parametrize("content_type", ["text/plain", "text/html", ""])
def test_bytes_that_only_call_themselves_text_are_refused(site: Site, content_type: str) -> None:
    site.pages["/x"] = (200, {"Content-Type": content_type}, b"\x7fELF\0\0\0\1\0")
    assert refused(local_fetcher(), f"{site.url}/x").kind == "bad_arguments"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, "bad_arguments") for status in (400, 401, 403, 404, 410, 451)),
        *((status, "unavailable") for status in (408, 425, 429, 500, 502, 503, 504)),
        (304, "exception"),
        (302, "exception"),  # without a Location
    ],
)
def test_status_codes(site: Site, status: int, kind: str) -> None:
    site.pages["/x"] = (status, TEXT, b"")
    error = refused(local_fetcher(), f"{site.url}/x")
    assert error.kind == kind and str(status) in error.text


# --- redirects --------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(site: Site, status: int) -> None:
    site.pages["/a/b"] = (status, {"Location": "../#x"}, b"")
    page = local_fetcher().fetch(f"{site.url}/a/b")
    assert (page.url, page.body) == (f"{site.url}/", b"<p>hello</p>")


def test_a_redirect_in_raw_utf_8_is_read_as_such(site: Site) -> None:
    site.pages["/x"] = (302, {"Location": "/é".encode().decode("latin-1")}, b"")
    site.pages["/%C3%A9"] = html("there")
    assert local_fetcher().fetch(f"{site.url}/x").body == b"there"


def test_a_circle_of_redirects_ends(site: Site) -> None:
    site.pages["/x"] = (302, {"Location": "/x"}, b"")
    error = refused(local_fetcher(max_redirects=3), f"{site.url}/x")
    assert error.kind == "bad_arguments" and "more than 3 redirects" in error.text
    assert len(site.requests) == 4


@pytest.mark.parametrize(
    "location",
    ["http://169.254.169.254/latest/meta-data", "http://10.0.0.1/", "http://[::1]/", "http://[::ffff:10.0.0.1]/", "http://2130706433/", "file:///etc/passwd"],
)
def test_redirects_to_where_nothing_is_opened_are_refused(site: Site, location: str) -> None:
    site.pages["/x"] = (302, {"Location": location}, b"")
    fetcher = local_fetcher(allow_private={"127.0.0.1"})
    assert fetcher.fetch(f"{site.url}/").body == b"<p>hello</p>"
    assert refused(fetcher, f"{site.url}/x").kind == "bad_arguments"


def test_a_redirect_may_not_carry_a_password_or_name_another_port(site: Site) -> None:
    site.pages["/user"] = (302, {"Location": f"http://u:p@127.0.0.1:{site.port}/"}, b"")
    site.pages["/port"] = (302, {"Location": f"http://127.0.0.1:{site.port + 1}/"}, b"")
    assert "password" in refused(local_fetcher(), f"{site.url}/user").text
    assert "is not allowed" in refused(local_fetcher(ports={site.port}), f"{site.url}/port").text


# --- addresses --------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1", "[fd00:ec2::254]"])
def test_hosts_that_are_not_public_are_refused_without_a_connection(site: Site, host: str) -> None:
    error = refused(HttpFetcher(ports=None), f"http://{host}:{site.port}/")
    assert error.kind == "bad_arguments" and "not on the public internet" in error.text
    assert site.requests == []


def test_names_are_judged_by_their_addresses(site: Site) -> None:
    for addresses in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:127.0.0.1"], ["fe80::1%2"]):
        error = refused(HttpFetcher(ports=None, resolve=lambda host, port, found=addresses: found), f"http://innocent.example:{site.port}/")
        assert error.kind == "bad_arguments" and not any(address in error.text for address in addresses)
    assert site.requests == []


def test_private_hosts_can_be_allowed_by_name(site: Site) -> None:
    fetcher = HttpFetcher(ports=None, timeout=60, read_timeout=60, allow_private={"Intranet.example"}, resolve=lambda host, port: ["127.0.0.1"])
    assert fetcher.fetch(f"http://intranet.example:{site.port}/").body == b"<p>hello</p>"
    assert site.requests[0][1]["Host"] == f"intranet.example:{site.port}"
    assert refused(fetcher, f"http://other.example:{site.port}/").kind == "bad_arguments"


def test_the_name_is_looked_up_once_and_the_checked_address_is_connected_to(site: Site) -> None:
    """A name server that answers differently the second time gains nothing."""
    answers = [["127.0.0.1"], ["192.0.2.1"], ["192.0.2.1"]]
    asked: list[str] = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    fetcher = local_fetcher(allow_private={"site.test"}, resolve=rebinding)
    assert fetcher.fetch(f"http://site.test:{site.port}/").body == b"<p>hello</p>"
    assert asked == ["site.test"]


def test_every_redirect_is_looked_up_and_checked(site: Site) -> None:
    site.pages["/x"] = (302, {"Location": "http://inside.test/"}, b"")
    fetcher = local_fetcher(allow_private={"127.0.0.1"}, resolve=lambda host, port: ["10.0.0.8"])
    assert "inside.test is not on the public internet" in refused(fetcher, f"{site.url}/x").text


def test_the_next_address_is_tried_where_one_refuses(site: Site) -> None:
    fetcher = local_fetcher(resolve=lambda host, port: ["127.0.0.2", "127.0.0.1"])
    assert fetcher.fetch(f"http://site.test:{site.port}/").body == b"<p>hello</p>"


def test_blocked_hosts(site: Site) -> None:
    fetcher = local_fetcher(blocked_hosts={"Answers.example"}, resolve=lambda host, port: ["127.0.0.1"])
    for host in ("answers.example", "www.answers.example"):
        assert "blocked" in refused(fetcher, f"http://{host}:{site.port}/").text
    assert fetcher.fetch(f"http://noanswers.example:{site.port}/").body == b"<p>hello</p>"
    site.pages["/x"] = (302, {"Location": f"http://answers.example:{site.port}/"}, b"")
    assert "blocked" in refused(fetcher, f"{site.url}/x").text


@pytest.mark.parametrize(("code", "kind"), [(socket.EAI_NONAME, "bad_arguments"), (socket.EAI_AGAIN, "unavailable"), (socket.EAI_FAIL, "unavailable")])
def test_a_name_that_is_not_there_is_not_a_name_server_that_is_down(code: int, kind: str) -> None:
    def failing(host: str, port: int) -> list[str]:
        raise socket.gaierror(code, "words")

    assert refused(HttpFetcher(resolve=failing), "http://nowhere.example/").kind == kind


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert refused(local_fetcher(), f"http://127.0.0.1:{port}/").kind == "unavailable"


# --- size -------------------------------------------------------------------------------------------------------------------------------------------


def test_a_large_page_is_cut(site: Site) -> None:
    site.pages["/x"] = (200, TEXT, b"x" * 5000)
    for limit, cut in ((4999, True), (5000, False), (5001, False)):
        page = local_fetcher(max_bytes=limit).fetch(f"{site.url}/x")
        assert (len(page.body), page.cut) == (min(limit, 5000), cut)


def test_a_body_without_end_is_cut_and_its_announced_length_is_not_believed() -> None:
    def endless(connection: socket.socket, stopped: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 999999999999\r\n\r\n")
        while not stopped.is_set():
            connection.sendall(b"y" * 65536)

    server = RawServer(endless)
    page = local_fetcher(max_bytes=200_000).fetch(server.url)
    server.close()
    assert (page.body, page.cut) == (b"y" * 200_000, True)


def test_a_body_that_ends_before_its_announced_length_is_no_page(site: Site) -> None:
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"x" * 100)[:-9],
    ):
        server = RawServer(lambda connection, stopped, answer=answer: connection.sendall(answer))
        error = refused(local_fetcher(), server.url)
        server.close()
        assert error.kind == "unavailable" and "ended in the middle" in error.text


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(b"<p>words</p>")),
        ("x-gzip", gzip.compress(b"<p>wo") + gzip.compress(b"rds</p>")),
        ("gzip", gzip.compress(b"<p>words</p>") + b"\0" * 50),
        ("deflate", zlib.compress(b"<p>words</p>")),
        ("deflate", zlib.compress(b"<p>words</p>")[2:-4]),
        ("identity", b"<p>words</p>"),
        ("", b"<p>words</p>"),
    ],
)
def test_compressed_pages(site: Site, encoding: str, body: bytes) -> None:
    site.pages["/x"] = (200, {"Content-Type": "text/html", "Content-Encoding": encoding}, body)
    assert local_fetcher().fetch(f"{site.url}/x").body == b"<p>words</p>"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_not_inflated_beyond_the_limit(site: Site, encoding: str) -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    body = b"".join(bomb.compress(b"z" * 1_000_000) for _ in range(10)) + bomb.flush()  # 10 MB in 10 kB
    site.pages["/x"] = (200, TEXT | {"Content-Encoding": encoding}, body)
    fetcher = local_fetcher(max_bytes=100_000)
    tracemalloc.start()
    page = fetcher.fetch(f"{site.url}/x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (page.body, page.cut) == (b"z" * 100_000, True)
    assert peak < 2_000_000, "no more than a few times the limit is ever held"


@pytest.mark.parametrize(("encoding", "body"), [("br", b"x"), ("gzip, gzip", b"x"), ("gzip", b"not gzip"), ("deflate", b"\xff\xff\xff")])
def test_encodings_that_cannot_be_read(site: Site, encoding: str, body: bytes) -> None:
    site.pages["/x"] = (200, TEXT | {"Content-Encoding": encoding}, body)
    assert refused(local_fetcher(), f"{site.url}/x").kind == "exception"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 banana\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 30_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"Trailer: y\r\n" * 200_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
)
def test_what_is_not_http_is_a_failure(answer: bytes) -> None:
    server = RawServer(lambda connection, stopped: connection.sendall(answer))
    error = refused(local_fetcher(max_bytes=100_000), server.url)
    server.close()
    assert error.kind in ("exception", "unavailable") and len(error.text) < 300


# --- time -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"], ids=["status", "headers", "body"])
def test_a_server_that_drips_cannot_stretch_the_deadline(start: bytes) -> None:
    def script(connection: socket.socket, stopped: threading.Event) -> None:
        connection.sendall(start)
        drip(connection, stopped, b"a")

    server = RawServer(script)
    error = refused(local_fetcher(timeout=0.3), server.url)
    server.close()
    assert error.kind == "unavailable" and "in time" in error.text


def test_a_silent_server_is_given_up_before_the_deadline() -> None:
    server = RawServer(lambda connection, stopped: stopped.wait())
    assert refused(local_fetcher(timeout=600.0, read_timeout=0.2), server.url).kind == "unavailable"
    server.close()


def test_a_name_lookup_that_hangs_stands_under_the_deadline() -> None:
    hang = threading.Event()

    def hanging(host: str, port: int) -> list[str]:
        hang.wait(60)
        return []

    assert refused(HttpFetcher(timeout=0.2, resolve=hanging), "http://slow.example/").kind == "unavailable"
    hang.set()


# --- politeness -------------------------------------------------------------------------------------------------------------------------------------


def test_requests_to_one_host_at_a_time(site: Site) -> None:
    site.hold = threading.Event()
    fetcher = local_fetcher(per_host=2)
    with ThreadPoolExecutor(6) as pool:
        pages = [pool.submit(fetcher.fetch, f"{site.url}/") for _ in range(6)]
        for _ in range(2):
            assert site.arrived.acquire(timeout=60)
        site.hold.set()
        assert all(page.result().body == b"<p>hello</p>" for page in pages)
    assert site.most_at_once == 2


def test_who_waits_too_long_for_a_slot_is_told_so(site: Site) -> None:
    site.hold = threading.Event()
    patient = local_fetcher(per_host=1)
    hasty = copy.deepcopy(patient)
    assert hasty is patient, "episodes and forks share one fetcher, or the limit would be none"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(patient.fetch, f"{site.url}/")
        assert site.arrived.acquire(timeout=60)
        patient.timeout = 0.2
        assert refused(patient, f"{site.url}/").kind == "unavailable"
        site.hold.set()
        assert first.result().body == b"<p>hello</p>"
    assert len(site.requests) == 1


def test_starts_lie_apart() -> None:
    from arpo_env.tools.browse_gate import Busy, HostGate

    gate = HostGate(at_once=5, interval=1000.0)
    with gate.slot("a.example", 1.0):
        pass
    with gate.slot("b.example", 1.0), pytest.raises(Busy), gate.slot("a.example", 0.05):
        pass
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(gate._changed.acquire).result()  # as if held by a thread of the parent process, which a forked child does not have
    gate._process = -1
    with gate.slot("a.example", 1.0):
        pass
    quick = HostGate(at_once=1, interval=0.0)
    for number in range(100):
        with quick.slot(f"host-{number}.example", 1.0):
            pass
    assert len(quick._running) + len(quick._next_start) <= 2, "hosts at rest are forgotten"


# --- TLS --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_checks_the_name_that_was_asked_for(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=page.test -addext subjectAltName=DNS:page.test"
    subprocess.run([*make.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    serving, asked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), []
    serving.load_cert_chain(certificate, key)
    serving.sni_callback = lambda wire, name, context: asked.append(name)
    site = Site({"/": html("<p>safe</p>")}, tls=serving)
    trusting = ssl.create_default_context(cafile=str(certificate))
    try:
        fetcher = local_fetcher(resolve=lambda host, port: ["127.0.0.1"], tls=trusting)
        assert fetcher.fetch(f"https://page.test:{site.port}/").body == b"<p>safe</p>"
        assert asked == ["page.test"] and site.requests[0][1]["Host"] == f"page.test:{site.port}"
        for other in (fetcher, local_fetcher(resolve=fetcher.resolve)):
            error = refused(other, f"https://{'other' if other is fetcher else 'page'}.test:{site.port}/")
            assert error.kind == "exception" and "certificate" in error.text
        assert len(site.requests) == 1
    finally:
        site.close()


# --- the object -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"timeout": 0}, ValueError),
        ({"read_timeout": -1.0}, ValueError),
        ({"max_bytes": 0}, ValueError),
        ({"max_redirects": -1}, ValueError),
        ({"per_host": 0}, ValueError),
        ({"interval": -1.0}, ValueError),
        ({"allow_private": "localhost"}, TypeError),
        ({"blocked_hosts": "example.org"}, TypeError),
    ],
)
def test_bad_configurations_raise(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        HttpFetcher(**arguments)


def test_a_fetcher_can_be_pickled(site: Site) -> None:
    twin = pickle.loads(pickle.dumps(local_fetcher(per_host=3)))
    assert twin.fetch(f"{site.url}/").body == b"<p>hello</p>"
    assert twin._gate.at_once == 3


@pytest.mark.parametrize("name", ["127.0.0.1:8000", "http://example.org"])
def test_hosts_are_named_without_port_and_scheme(name: str) -> None:
    with pytest.raises(ValueError, match="without scheme and port"):
        HttpFetcher(allow_private=(name,))
    with pytest.raises(ValueError, match="without scheme and port"):
        HttpFetcher(blocked_hosts=(name,))
