"""Main text by trafilatura, in a worker process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arpo_env.tools.browse import BrowseTool, Extractor, Fetched
from arpo_env.tools.browse_worker import read

pytest.importorskip("trafilatura", exc_type=ImportError)

SENTENCES = " ".join(f"Sentence number {number} of the article says something about rivers." for number in range(60))
PAGE = f"""<html><head><title>Rivers</title></head><body>
<nav><ul>{"".join(f'<li><a href="/menu{i}">Menu entry {i}</a></li>' for i in range(30))}</ul></nav>
<main><article><h1>On rivers</h1><p>{SENTENCES}</p>
<p>See <a href="/wiki/Delta_(river)">the delta</a> and <a href="https://other.example/a">another</a> for more about where rivers end.</p>
<table><tr><th>Name</th><th>Length</th></tr><tr><td>Nile</td><td>6650</td></tr></table>
<pre><code>x = 1</code></pre></article></main>
<footer>Copyright, imprint, cookies</footer></body></html>"""


@pytest.fixture(scope="module")
def extractor() -> Iterator[Extractor]:
    extractor = Extractor(timeout=60.0)
    assert extractor.main_text, "installed, so it is the default"
    extractor.start()
    yield extractor
    extractor.close()


def fetched(text: str) -> Fetched:
    return Fetched("https://example.org/wiki/River", "html", "utf-8", text.encode(), False)


def test_the_main_text_without_the_rest(extractor: Extractor) -> None:
    document, steady = extractor.extract(fetched(PAGE))
    assert (document.title, document.reader, steady) == ("Rivers", "trafilatura", True)
    assert "Sentence number 59 of the article" in document.text and "Nile | 6650" in document.text and "x = 1" in document.text
    assert "Menu entry" not in document.text and "cookies" not in document.text
    assert "See the delta and another for more" in document.text, "links are their labels"


def test_links_of_the_main_text(extractor: Extractor) -> None:
    document, _ = extractor.extract(fetched(PAGE))
    assert [(link.label, link.url) for link in document.links] == [
        ("the delta", "https://example.org/wiki/Delta_(river)"),
        ("another", "https://other.example/a"),
    ]
    for link in document.links:
        assert document.text[link.position :].startswith(link.label)


def test_a_short_page_is_shown_whole(extractor: Extractor) -> None:
    document, _ = extractor.extract(fetched("<nav>Menu</nav><p>Short.</p>"))
    assert (document.text, document.reader) == ("Menu\n\nShort.", "plain")


def test_a_page_beyond_the_size_limit_is_read_by_the_plain_reader() -> None:
    extractor = Extractor(max_html=len(PAGE) - 1, timeout=60.0)
    extractor.start()
    document, steady = extractor.extract(fetched(PAGE))
    extractor.close()
    assert (document.reader, steady) == ("plain", True)
    assert "Menu entry 3" in document.text and "Sentence number 59" in document.text


def test_where_there_is_no_main_text_all_text_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in (lambda *arguments, **options: "", lambda *arguments, **options: None, lambda *arguments, **options: 1 / 0):
        monkeypatch.setattr("trafilatura.extract", outcome)
        answer = read(PAGE, "https://example.org/", True)
        assert answer["reader"] == "plain" and "Menu entry 3" in answer["text"]


@pytest.mark.parametrize(
    "page", ["<div>" * 20_000 + "word " * 1000, "<p>" + "<" * 100_000, f'<p title="{"x" * 250_000}">' + "word " * 1000, "\x01\x02\xff" * 50_000]
)
def test_hostile_pages_give_a_bounded_result(extractor: Extractor, page: str) -> None:
    document, _ = extractor.extract(fetched(page))
    assert len(document.text) <= 2 * len(page)


def test_the_tool_takes_it_by_default() -> None:
    tool = BrowseTool()
    assert tool.settings()["extractor"] == {"main_text": True, "max_html": 300_000}
