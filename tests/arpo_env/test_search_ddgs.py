"""Web search through ``ddgs``, its engines pointed at a local server."""

import json
import pickle
import socket
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from search_fakes import Clock, LocalServer, Reply, local_server, standing_clock  # noqa: F401 - fixtures

from arpo_env.tools.base import ToolResult
from arpo_env.tools.cache import CachedTool, ToolCache
from arpo_env.tools.search import SearchHit, SearchTool, SearchUnavailable
from arpo_env.tools.search_ddgs import DDGS
from arpo_env.tools.search_http import HttpClient

pytest.importorskip("ddgs")
pytestmark = pytest.mark.usefixtures("clock")

ROW = '<div class="result body"><h2>{title}</h2><a href="{url}">{text}</a></div>'
ROWS = [{"title": "A", "url": "http://a", "text": "about a"}, {"title": "B", "url": "http://b", "text": "about b"}]
PAGE = f"<html><body>{''.join(ROW.format(**row) for row in ROWS)}</body></html>"
EMPTY = '<html><body><div class="no-results">No results.</div></body></html>'
ROBOT = '<html><body><div class="anomaly-modal__title">Unfortunately, bots use DuckDuckGo too.</div></body></html>'

Point = Callable[[str, str], None]


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch, server: LocalServer) -> Point:
    """Points an engine at an address; ``duckduckgo`` points at the server already."""
    from ddgs.engines import ENGINES

    def to(engine: str, url: str) -> None:
        monkeypatch.setattr(ENGINES["text"][engine], "search_url", url)

    for engine in ENGINES["text"]:
        to(engine, f"{server.url}/{engine}")
    return to


pytestmark = [pytestmark, pytest.mark.usefixtures("point")]  # type: ignore[assignment]


def test_rows_of_a_page_are_hits(server: LocalServer) -> None:
    server.reply(Reply(body=PAGE))
    backend = DDGS(region="de-de")
    assert backend.search("C++ é", 5) == [
        SearchHit(title="A", text="about a", url="http://a", score=1.0, rank=1, source="ddgs: duckduckgo"),
        SearchHit(title="B", text="about b", url="http://b", score=0.5, rank=2, source="ddgs: duckduckgo"),
    ]
    assert len(backend.search("q", 1)) == 1
    assert sorted(server.requests[0].body.split(b"&")) == [b"b=", b"l=de-de", b"q=C%2B%2B+%C3%A9"]


def test_hostile_queries_arrive(server: LocalServer) -> None:
    server.reply(Reply(body=PAGE))
    tool = SearchTool(DDGS())
    for query in ('"', "\ud800 x", "日本語 🙂", "a&q=b", "x" * 5000, "\0 y"):
        assert tool.call(query=query).ok


def test_a_page_without_results_is_a_success(server: LocalServer) -> None:
    server.reply(Reply(body=EMPTY))
    assert SearchTool(DDGS()).call(query="q") == ToolResult("No results found.", data=())
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "said"), [(429, "asked too often"), (202, "asked too often"), (500, "the engine failed"), (503, "the engine failed")])
def test_what_passes_is_tried_again_and_then_unavailable(server: LocalServer, clock: Clock, status: int, said: str) -> None:
    server.reply(Reply(status, PAGE if status == 202 else "busy"))  # 202 comes with a page that looks like any other
    if status == 202:
        server.reply(Reply(status, ROBOT))
    result = SearchTool(DDGS()).call(query="q")
    assert (result.ok, result.error, len(server.requests), clock.slept) == (False, "unavailable", 3, [0.5, 1.0])
    assert f"duckduckgo: HTTP {status}: {said}" in result.text


@pytest.mark.parametrize(
    ("reply", "said"),
    [(Reply(403, "no"), "HTTP 403: the engine blocks"), (Reply(404, "no"), "HTTP 404, expected 200"), (Reply(body=ROBOT), "whether a person is there")],
    ids=["403", "404", "robot"],
)
def test_what_does_not_pass_is_asked_once(server: LocalServer, reply: Reply, said: str) -> None:
    server.reply(reply)
    result = SearchTool(DDGS()).call(query="q")
    assert (result.error, len(server.requests)) == ("unavailable", 1)
    assert f"duckduckgo: {said}" in result.text or said in result.text


def test_an_empty_body_is_not_an_empty_page(server: LocalServer) -> None:
    server.reply(Reply(body=""), Reply(body=PAGE))
    assert len(DDGS().search("q", 5)) == 2 and len(server.requests) == 2


def test_retry_after_is_obeyed(server: LocalServer, clock: Clock) -> None:
    server.reply(Reply(429, headers={"Retry-After": "7"}), Reply(body=PAGE))
    assert DDGS().search("q", 5) and clock.slept == [7.0]
    server.reply(Reply(429, headers={"Retry-After": "60"}))
    with pytest.raises(SearchUnavailable, match="asked to wait 60 s"):
        DDGS().search("q", 5)
    assert len(server.requests) == 1


def test_the_next_engine_is_asked_when_one_fails_not_when_it_finds_nothing(server: LocalServer) -> None:
    backend = DDGS(engines=("mojeek", "duckduckgo"))
    server.reply(Reply(403), Reply(body=PAGE))
    assert [hit.source for hit in backend.search("q", 1)] == ["ddgs: duckduckgo"]
    assert [request.path.split("?")[0] for request in server.requests] == ["/mojeek", "/duckduckgo"]
    server.reply(Reply(body=EMPTY))
    assert backend.search("q", 1) == [] and len(server.requests) == 1
    server.reply(Reply(403))
    with pytest.raises(SearchUnavailable, match=r"mojeek: HTTP 403.*; duckduckgo: HTTP 403"):
        backend.search("q", 1)


def test_all_engines_together_keep_to_the_deadline(server: LocalServer, clock: Clock) -> None:
    server.reply(Reply(500))
    with pytest.raises(SearchUnavailable):
        DDGS(engines=("duckduckgo", "mojeek", "brave"), http=HttpClient(deadline=3)).search("q", 1)
    assert clock.now <= 1003


def test_nobody_listens(point: Point, clock: Clock) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        point("duckduckgo", f"http://127.0.0.1:{taken.getsockname()[1]}/")
        result = SearchTool(DDGS()).call(query="q")
    assert (result.error, clock.slept) == ("unavailable", [0.5, 1.0]) and "ConnectError" in result.text


def test_a_silent_engine_costs_the_timeout(server: LocalServer) -> None:
    over = threading.Event()
    server.reply(Reply(body=PAGE, before=lambda: over.wait(30)))  # who waits longer gets an answer
    with pytest.raises(SearchUnavailable, match="TimeoutException"):
        DDGS(http=HttpClient(timeout=0.1, retries=0)).search("q", 1)
    over.set()


def test_a_page_that_ddgs_cannot_read_is_unavailable(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddgs.engines import ENGINES

    def broken(self: Any, text: str) -> list[Any]:
        raise IndexError("list index out of range")

    monkeypatch.setattr(ENGINES["text"]["duckduckgo"], "extract_results", broken)
    server.reply(Reply(body=PAGE))
    result = SearchTool(DDGS()).call(query="q")
    assert result.error == "unavailable" and "ddgs cannot read its page: IndexError" in result.text


def test_failures_are_not_cached_and_nothing_found_is(server: LocalServer, tmp_path: Path) -> None:
    tool = CachedTool(SearchTool(DDGS(http=HttpClient(retries=0))), ToolCache(tmp_path / "c"))
    for reply in (Reply(429), Reply(202, ROBOT), Reply(403), Reply(500), Reply(body=ROBOT), Reply(body="")):
        server.reply(reply)
        assert tool.call(query="q").error == "unavailable"
    server.reply(Reply(body=EMPTY), Reply(body=PAGE))
    assert [tool.call(query="q").text for _ in range(2)] == ["No results found."] * 2
    assert len(server.requests) == 1 and tool.cache.stats().entries == 1


def test_settings_are_checked_and_tell_apart_what_answers_differently() -> None:
    for wrong, said in (
        ({"engines": ()}, "at least one name"),
        ({"engines": "duckduckgo"}, "tuple"),
        ({"engines": ("google2",)}, "no text engine 'google2'; it has .*duckduckgo"),
        ({"region": "en"}, "region"),
        ({"safesearch": "none"}, "safesearch"),
    ):
        with pytest.raises(ValueError, match=said):
            DDGS(**wrong)  # type: ignore[arg-type]
    backends = [DDGS(), DDGS(engines=("brave",)), DDGS(region="de-de"), DDGS(safesearch="off")]
    assert len({json.dumps(dict(backend.settings())) for backend in backends}) == 4
    assert "secret" not in str(DDGS(proxy="http://user:secret@127.0.0.1:1").settings())


def test_a_proxy_that_is_down_does_not_give_its_password_away() -> None:
    result = SearchTool(DDGS(proxy="http://user:secret@127.0.0.1:1", http=HttpClient(retries=0))).call(query="q")
    assert result.error == "unavailable" and "secret" not in result.text


def test_a_backend_goes_to_another_process(server: LocalServer) -> None:
    server.reply(Reply(body=PAGE))
    assert pickle.loads(pickle.dumps(DDGS())).search("q", 1)[0].title == "A"


# -- the predecessor ---------------------------------------------------------------------------------------------------------------------------------------


class Predecessor:
    """The class that ``duckduckgo_search`` 8 has."""

    answer: Any = ()

    def __init__(self, proxy: str | None = None, timeout: int = 10):
        assert isinstance(timeout, int)

    def text(self, keywords: str, region: str, safesearch: str) -> list[Mapping[str, str]]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return list(self.answer)


def test_the_predecessor_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("duckduckgo_search")
    module.DDGS = Predecessor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "duckduckgo_search", module)
    monkeypatch.setitem(sys.modules, "ddgs.engines", None)
    with pytest.warns(UserWarning, match=r"asks Bing alone.*arpo\[ddgs\]") as caught:
        backend = DDGS()
    assert caught[0].filename == __file__ and backend.settings()["backend"] == "duckduckgo_search"
    assert backend.search("q", 3) == []
    monkeypatch.setattr(Predecessor, "answer", [{"title": "A", "href": "http://a", "body": "b"}])
    assert [(hit.title, hit.url, hit.text) for hit in backend.search("q", 3)] == [("A", "http://a", "b")]
    monkeypatch.setattr(Predecessor, "answer", RuntimeError("202 Ratelimit"))
    with pytest.raises(SearchUnavailable, match="202 Ratelimit"):
        backend.search("q", 3)


def test_without_any_of_them_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ddgs.engines", None)
    monkeypatch.setitem(sys.modules, "duckduckgo_search", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[ddgs\]'"):
        DDGS()
