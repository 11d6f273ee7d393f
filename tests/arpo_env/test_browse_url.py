"""Which URLs and addresses the browse tool opens."""

from __future__ import annotations

import pytest

from arpo_env.tools.browse_url import BrowseError, is_public, join_url, read_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://example.org", "https://example.org/"),
        ("HTTP://Example.ORG:80/a?b=1#part", "http://example.org/a?b=1"),
        ("  <https://example.org/x>  ", "https://example.org/x"),
        ("`https://example.org/x`", "https://example.org/x"),
        ("en.wikipedia.org/wiki/Paris", "https://en.wikipedia.org/wiki/Paris"),
        ("//example.org/x", "https://example.org/x"),
        ("https://example.org/Albert Einstein?q=a b", "https://example.org/Albert%20Einstein?q=a%20b"),
        ("https://example.org/%41?x=%20", "https://example.org/%41?x=%20"),
        ("https://de.wikipedia.org/wiki/Köln", "https://de.wikipedia.org/wiki/K%C3%B6ln"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        ("https://example.org./x", "https://example.org/x"),
        ("https://[2606:4700::1111]:443/", "https://[2606:4700::1111]/"),
        ("https://8.8.8.8/x", "https://8.8.8.8/x"),
        ("example.org:443/x", "https://example.org/x"),
    ],
)
def test_urls_are_read(text: str, expected: str) -> None:
    assert read_url(text).url == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "the capital of France",
        "file:///etc/passwd",
        "ftp://example.org/x",
        "javascript:alert(1)",
        "data:text/html,x",
        "gopher://example.org/",
        "https://user:secret@example.org/",
        "https://example.org@10.0.0.1/",
        "https://example.org:22/",
        "https://example.org:99999/",
        "https://example.org:x/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://0x7f000001/",
        "http://1.2.3.256/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://ex ample.org/",
        "http://example.org\\@10.0.0.1/",
        "http:///x",
        "http://.../",
        "http://" + "a" * 64 + ".org/",
        "https://example.org/" + "x" * 2000,
        "http://a..b/",
    ],
)
def test_what_is_no_public_url_is_refused_in_words(text: str) -> None:
    with pytest.raises(BrowseError) as caught:
        read_url(text)
    assert caught.value.kind == "bad_arguments"
    assert caught.value.text.startswith("The page was not opened: ")
    assert "secret" not in caught.value.text


def test_no_line_break_reaches_the_request_line() -> None:
    address = read_url("http://example.org/a\r\nHost: evil\r\n\r\n?x=\u2028 \x00")
    assert address.target.isascii() and not any(c.isspace() or not c.isprintable() for c in address.target)
    assert address.netloc == "example.org"


def test_digits_of_other_scripts_are_read_as_the_digits_that_they_stand_for() -> None:
    assert read_url("http://１２７.0.0.1/").host == "127.0.0.1"


def test_ports_can_be_opened() -> None:
    assert read_url("http://example.org:8080/", ports=(8080,)).netloc == "example.org:8080"
    assert read_url("http://example.org:8080/", ports=None).port == 8080
    with pytest.raises(BrowseError, match="port 80 is not allowed"):
        read_url("http://example.org/", ports=(8080,))


def test_redirects_are_read_from_where_they_stand() -> None:
    assert join_url("https://example.org/a/b?c", " ../d ") == "https://example.org/d"
    with pytest.raises(BrowseError):
        join_url("https://example.org/", "http://[oops")


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "151.101.1.69", "2606:4700::1111", "2a00:1450:4001::200e", "64:ff9b::808:808", "192.0.1.1"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
        "168.63.129.16",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1",
        "2001:db8::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "3fff::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_on_the_public_internet(address: str) -> None:
    assert not is_public(address)
