"""The browse tool: pages, cursor, forks, cache, answers of a second policy, and its place in an environment."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browse_fakes import PAGES, FakeFetcher, Site, bad, good, html, local_fetcher, make
from hypothesis import given
from hypothesis import strategies as st

import arpo_env
from arpo_env.testing import ToolConformance
from arpo_env.tools.base import Tool, check_tool
from arpo_env.tools.browse import BrowseTool, ChatEndpoint, Extractor, HttpFetcher
from arpo_env.tools.browse_pages import page_starts
from arpo_env.tools.cache import ToolCache


@pytest.fixture(scope="module")
def extractor() -> Iterator[Extractor]:
    """One for all tests: a worker takes a moment to start."""
    extractor = Extractor(main_text=False, timeout=60.0)
    extractor.start()
    yield extractor
    extractor.close()


# --- pages ------------------------------------------------------------------------------------------------------------------------------------------


def test_a_short_document(extractor: Extractor) -> None:
    result = good(make(extractor).bind(), url="example.org")
    assert result.text == "Title: Start\nURL: https://example.org/\n\nHello. See the long one or another."
    assert result.data == {
        "url": "https://example.org/",
        "title": "Start",
        "page": 1,
        "pages": 1,
        "reader": "plain",
        "links": ["https://example.org/long", "https://other.example/"],
    }
    assert result.state == "kept"


def test_turning_pages_by_the_main_argument_alone(extractor: Extractor) -> None:
    tool = make(extractor).bind()
    first = good(tool, url="https://example.org/long")
    assert first.text.startswith("Title: Long\nURL: https://example.org/long\n\nParagraph 0 word")
    assert first.text.endswith("[Page 1 of 4. For the next one, call with: next. For any other, for example: page 4.]")
    seen = [first]
    for command in ("next", "Next page", " page 4 "):
        seen.append(good(tool, url=command))
    assert seen[-1].text.endswith("[Page 4 of 4, the last one.]")
    text = "".join(result.text for result in seen)
    assert [text.count(f"Paragraph {number} ") for number in range(20)] == [1] * 20
    assert good(tool, url="previous").data["page"] == 3
    assert good(tool, url="2").text == seen[1].text
    assert good(tool, url="back").text == seen[0].text
    assert good(tool, url="https://example.org/long page 3").text == seen[2].text
    assert tool.fetcher.fetched == ["https://example.org/long"], "the open document is not fetched again"


def test_turning_pages_by_the_second_argument(extractor: Extractor) -> None:
    tool = make(extractor).bind()
    third = good(tool, url="https://example.org/long", page=3)
    assert third.data["page"] == 3
    assert good(tool, url="next", page=3).text == third.text == good(tool, url="https://EXAMPLE.org/long#x", page=3).text
    assert tool.fetcher.fetched == ["https://example.org/long"]


def test_following_links(extractor: Extractor) -> None:
    tool = make(extractor, links=1).bind()
    start = good(tool, url="example.org")
    assert start.text.endswith(
        "another.\n\nLinks (follow one by its number, for example: link 1):\n[1] the long one: https://example.org/long\n(1 more links on this page)"
    )
    assert good(tool, url="link 1").data["url"] == "https://example.org/long"
    assert "0 links" in bad(tool, url="link 1").text
    assert "Links" not in good(make(extractor).bind(), url="example.org").text


def test_links_are_listed_with_their_page_and_numbered_in_the_document(extractor: Extractor) -> None:
    body = "".join(f'<p>Paragraph {number} <a href="/{number}">to {number}</a> {"word " * 30}</p>' for number in range(20))
    tool = make(extractor, fetcher=FakeFetcher({"https://example.org/": body}), links=50).bind()
    listed = [
        line for page in range(1, 5) for line in good(tool, url="example.org", page=page).text.splitlines() if line.startswith("[") and "Page" not in line
    ]
    assert listed == [f"[{number + 1}] to {number}: https://example.org/{number}" for number in range(20)]
    for page in range(1, 5):
        result = good(tool, url=f"page {page}")
        assert all(f"to {url.rpartition('/')[2]} word" in result.text for url in result.data["links"])


def test_a_document_without_text_says_so(extractor: Extractor) -> None:
    assert "This page has no text" in good(make(extractor).bind(), url="example.org/empty").text


def test_a_cut_document_says_so_at_its_end(extractor: Extractor) -> None:
    site = Site({"/": html("word " * 500)})
    tool = make(extractor, fetcher=local_fetcher(max_bytes=1500)).bind()
    first, last = good(tool, url=site.url), good(tool, url="page 2")
    site.close()
    assert "its end is missing" not in first.text
    assert last.text.endswith("[Page 2 of 2, the last one.]\n[The document was too large: its end is missing.]")


@given(st.text(alphabet="ab \n", max_size=400), st.integers(1, 50))
def test_pages_together_are_the_text(text: str, size: int) -> None:
    starts = page_starts(text, size)
    pages = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pages) == text
    assert all(len(page) <= size for page in pages) and all(pages[1:])
    assert all(len(page) >= size - size // 4 for page in pages[:-1])


def test_pages_end_between_paragraphs_lines_or_words() -> None:
    assert page_starts("a" * 80 + "\n\n" + "b" * 10 + "\n" + "c " * 50, 100) == [0, 82, 181]
    assert page_starts("a" * 80 + "\n" + "b" * 10 + " " + "c" * 50, 100) == [0, 81]
    assert page_starts("a" * 80 + " " + "b" * 50, 100) == [0, 81]
    assert page_starts("a" * 74 + " " + "b" * 75, 100) == [0, 100]
    assert page_starts("", 100) == [0]


# --- failures ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": ""}, "expected a URL"),
        ({"url": "the capital of France"}, "expected a URL"),
        ({"url": "file:///etc/passwd"}, "only http and https"),
        ({"url": "next"}, "no document is open"),
        ({"url": "page 2"}, "no document is open"),
        ({"url": "link 1"}, "no document is open"),
        ({"url": "example.org/missing"}, "404"),
        ({"url": "example.org", "page": 2}, "has 1 page, got page 2"),
        ({"url": "example.org/long", "page": 9}, "has 4 pages, got page 9"),
        ({"url": "example.org", "page": 0}, "numbered from 1"),
        ({"url": "example.org", "page": -1}, "numbered from 1"),
        ({"url": "example.org\nexample.net"}, "one URL on one line"),
        ({"url": "\ud800"}, "expected a URL"),
    ],
)
def test_what_the_policy_gets_wrong_it_is_told(extractor: Extractor, arguments: dict[str, Any], words: str) -> None:
    result = bad(make(extractor).bind(), **arguments)
    assert result.error == "bad_arguments" and words in result.text and result.state == "none"


def test_a_failed_call_moves_nothing(extractor: Extractor) -> None:
    tool = make(extractor).bind()
    good(tool, url="example.org/long", page=2)
    for arguments in ({"url": "example.org/missing"}, {"url": "page 7"}, {"url": "link 1"}, {"url": "example.org/long", "page": 0}, {"url": ""}):
        assert bad(tool, **arguments).state == "kept"
    assert good(tool, url="next").data["page"] == 3
    good(tool, url="page 4")
    assert "page 4 of 4 is the last page" in bad(tool, url="next").text
    good(tool, url="page 1")
    assert "page 1 of 4 is the first page" in bad(tool, url="previous").text


def test_private_hosts_are_refused_by_default(extractor: Extractor) -> None:
    site = Site({"/": html("secret")})
    result = bad(BrowseTool(HttpFetcher(ports=None), extractor).bind(), url=site.url)
    assert bad(BrowseTool(extractor=extractor).bind(), url=site.url).error == "bad_arguments"
    site.close()
    assert result.error == "bad_arguments" and "not on the public internet" in result.text
    assert site.requests == []


def test_a_server_in_trouble_is_unavailable_and_tried_again_by_the_environment(extractor: Extractor) -> None:
    site = Site({"/": (503, {}, b"")})
    tool = make(extractor, fetcher=local_fetcher())
    env = arpo_env.ToolEnv([arpo_env.Task(question="q", answer="a")], tools=[tool])
    env.reset(seed=0)
    *_, info = env.step(f"<browse>{site.url}</browse>")
    assert info["tool_calls"][0]["error"] == "unavailable"
    assert len(site.requests) == tool.retries + 1
    env.close()
    site.close()


# --- forks and episodes -----------------------------------------------------------------------------------------------------------------------------


class TestConformance(ToolConformance):
    calls = ({"url": "example.org/long"}, {"url": "next"}, {"url": "next"}, {"url": "example.org", "page": 1}, {"url": "link 1"}, {"url": "page 2"})

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, extractor: Extractor) -> Iterator[None]:
        self.extractor, self.cache = extractor, ToolCache(tmp_path / "cache.sqlite")
        yield
        self.cache.close()

    def make_tool(self) -> Tool:
        tool = make(self.extractor, cache=self.cache)
        assert tool.deterministic, "with a cache"
        return tool


def test_the_cursor_forks(extractor: Extractor) -> None:
    parent = make(extractor).bind()
    good(parent, url="example.org/long", page=2)
    twins = [parent.fork(), copy.deepcopy(parent), *parent.fork_many(2)]
    assert good(parent, url="page 4").data["page"] == 4
    parent.close()
    for number, twin in enumerate(twins):
        assert good(twin, url="next").data["page"] == 3, f"twin {number}"
        twin.close()
        assert "no document is open" in bad(twin, url="next").text
    assert parent.fetcher.fetched == ["https://example.org/long"]


def test_a_fork_shares_the_document(extractor: Extractor) -> None:
    parent = make(extractor).bind()
    good(parent, url="example.org/long")
    twin = parent.fork()
    assert twin._place is parent._place and twin.extractor is parent.extractor and twin.fetcher is parent.fetcher


def test_episodes_start_with_no_document(extractor: Extractor) -> None:
    prototype = make(extractor)
    one = prototype.bind()
    good(one, url="example.org")
    for tool in (prototype.bind(), one.bind()):
        assert "no document is open" in bad(tool, url="next").text


def test_only_the_prototype_ends_the_workers() -> None:
    prototype = BrowseTool(FakeFetcher(PAGES), Extractor(main_text=False, timeout=60.0))
    assert not prototype.extractor._pool._all, "constructing starts nothing"
    threads = threading.active_count()
    tool = prototype.bind()
    (worker,) = prototype.extractor._pool._all
    good(tool, url="example.org")
    tool.close()
    assert worker.process.poll() is None
    prototype.close()
    prototype.close()
    assert worker.process.poll() is not None and not prototype.extractor._pool._all
    assert threading.active_count() == threads
    good(tool, url="example.org")  # starts another
    prototype.close()


def test_a_prototype_can_be_pickled() -> None:
    twin = pickle.loads(pickle.dumps(BrowseTool(FakeFetcher(PAGES), Extractor(main_text=False, timeout=60.0))))
    good(twin.bind(), url="example.org")
    twin.close()


def test_in_an_environment_that_forks(extractor: Extractor) -> None:
    env = arpo_env.ToolEnv([arpo_env.Task(question="q", answer="a")], tools=[make(extractor)])
    assert env.fork_support == "copy"
    env.reset(seed=0)
    env.step("<browse>https://example.org/long</browse>")
    twin = arpo_env.fork(env)
    there, *_ = env.step("<browse>page 4</browse>")
    here, *_ = twin.step("<browse>next</browse>")
    assert "[Page 4 of 4" in there and "[Page 2 of 4" in here
    env.close()
    assert "[Page 3 of 4" in twin.step("<browse>next</browse>")[0]
    twin.close()


def test_in_a_format_of_json_calls(extractor: Extractor) -> None:
    env = arpo_env.ToolEnv([arpo_env.Task(question="q", answer="a")], tools=[make(extractor)], call_format=arpo_env.Hermes())
    env.reset(seed=0)
    call = {"name": "browse", "arguments": {"url": "https://example.org/long", "page": 2}}
    observation, *_ = env.step(f"<tool_call>{json.dumps(call)}</tool_call>")
    assert "[Page 2 of 4" in observation
    env.close()


# --- cache ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ToolCache]:
    cache = ToolCache(tmp_path / "cache.sqlite")
    yield cache
    cache.close()


def test_documents_come_from_the_cache_whichever_page_is_shown(extractor: Extractor, cache: ToolCache) -> None:
    first = make(extractor, cache=cache)
    text = good(first.bind(), url="example.org/long", page=2).text
    second = make(extractor, cache=cache, links=3, page_chars=500)
    assert good(second.bind(), url="https://Example.org/long#part", page=2).data["pages"] > 4
    assert good(make(extractor, cache=cache).bind(), url="https://example.org/long", page=2).text == text
    assert second.fetcher.fetched == [] and first.fetcher.fetched == ["https://example.org/long"]


def test_other_settings_are_other_documents(extractor: Extractor, cache: ToolCache) -> None:
    good(make(extractor, cache=cache).bind(), url="example.org")
    other = Extractor(main_text=False, max_html=5, timeout=60.0)
    tool = make(other, cache=cache)
    good(tool.bind(), url="example.org")
    other.close()
    assert tool.fetcher.fetched == ["https://example.org/"]


def test_failures_are_not_kept(extractor: Extractor, cache: ToolCache) -> None:
    tool = make(extractor, cache=cache)
    for _ in range(2):
        assert bad(tool.bind(), url="example.org/missing").error == "bad_arguments"
    assert len(tool.fetcher.fetched) == 2
    assert cache.stats().entries == 0


def test_what_a_slow_reader_gave_is_not_kept(extractor: Extractor, cache: ToolCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = make(extractor, cache=cache)
    extract = extractor.extract
    monkeypatch.setattr(extractor, "extract", lambda page: (extract(page)[0], False))
    good(tool.bind(), url="example.org")
    assert cache.stats().entries == 0


def test_replay_needs_neither_network_nor_workers(extractor: Extractor, cache: ToolCache) -> None:
    text = good(make(extractor, cache=cache).bind(), url="example.org/long").text
    cache.close()
    replay = ToolCache(cache.path, mode="replay")
    tool = BrowseTool(FakeFetcher({}), Extractor(main_text=False), page_chars=1000, cache=replay)
    instance = tool.bind()
    assert good(instance, url="example.org/long").text == text
    missing = bad(instance, url="example.org")
    assert missing.error == "exception" and "not recorded" in missing.text and missing.state == "kept"
    assert not tool.extractor._pool._all and tool.fetcher.fetched == []
    replay.close()


# --- the object -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"page_chars": 10}, ValueError),
        ({"links": -1}, ValueError),
        ({"summarize_chars": 0}, ValueError),
        ({"summarize_timeout": 0.0}, ValueError),
        ({"summarize": "a model"}, TypeError),
    ],
)
def test_bad_configurations_raise(extractor: Extractor, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make(extractor, **options)


def test_the_contract_and_settings(extractor: Extractor) -> None:
    tool = BrowseTool(extractor=extractor, links=3, summarize=ChatEndpoint("http://localhost/v1", "tiny", api_key="secret-key"))
    check_tool(tool)
    assert tool.main_argument == "url" and not tool.deterministic
    settings = json.loads(json.dumps(tool.settings()))
    assert settings["summarize"]["model"] == "tiny" and settings["links"] == 3 and settings["fetcher"]["max_bytes"] == 1_000_000
    assert "secret-key" not in str(settings)
    assert make(extractor, summarize=len).settings()["summarize"] == {"function": "builtins.len"}
