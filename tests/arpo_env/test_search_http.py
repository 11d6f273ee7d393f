"""Search services over HTTP, against a local server."""

import copy
import json
import os
import pickle
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from search_fakes import Clock, LocalServer, Reply, local_server, standing_clock  # noqa: F401 - fixtures

import arpo_env
from arpo_env.tools.base import ToolResult, check_tool
from arpo_env.tools.cache import CachedTool, ToolCache
from arpo_env.tools.search import SearchBackend, SearchHit, SearchRefused, SearchTool, SearchUnavailable
from arpo_env.tools.search_http import HttpClient, RetrieverServer, SearxNG, Serper, Tavily

KEY = "sk-secret-7f3a"
pytestmark = pytest.mark.usefixtures("clock")

SEARXNG = {"results": [{"title": "A", "url": "http://a", "content": "about a", "engine": "google", "score": 2.5}, {"title": "B", "url": "http://b"}]}
SERPER = {"organic": [{"title": "A", "link": "http://a", "snippet": "about a", "position": 1}, {"title": "B", "link": "http://b", "snippet": "about b"}]}
TAVILY = {"query": "q", "results": [{"title": "A", "url": "http://a", "content": "about a", "score": 0.9}]}
RETRIEVER = {
    "result": [[{"document": {"id": "7", "contents": '"Aldo Brun"\nborn in Sarn'}, "score": 0.8}, {"document": {"contents": "no title"}, "score": 0.1}]]
}


def searxng(url: str, http: HttpClient | None = None) -> SearchBackend:
    return SearxNG(url, http=http)


def serper(url: str, http: HttpClient | None = None) -> SearchBackend:
    return Serper(KEY, url=f"{url}/search", http=http)


def tavily(url: str, http: HttpClient | None = None) -> SearchBackend:
    return Tavily(KEY, url=f"{url}/search", http=http)


def retriever(url: str, http: HttpClient | None = None) -> SearchBackend:
    return RetrieverServer(f"{url}/retrieve", http=http)


Make = Callable[..., SearchBackend]
NAMES = ["searxng", "serper", "tavily", "retriever"]
every = pytest.mark.parametrize("make", [searxng, serper, tavily, retriever], ids=NAMES)
every_with_answer = pytest.mark.parametrize(("make", "answer"), [(searxng, SEARXNG), (serper, SERPER), (tavily, TAVILY), (retriever, RETRIEVER)], ids=NAMES)


# -- what is asked and found -------------------------------------------------------------------------------------------------------------------------------


def test_searxng(server: LocalServer) -> None:
    server.reply(Reply(body=SEARXNG))
    hits = SearxNG(f"{server.url}/", engines=("google", "bing"), language="en").search("C++ & C#?", 5)
    assert hits == [
        SearchHit(title="A", text="about a", url="http://a", score=2.5, rank=1, source="searxng: google"),
        SearchHit(title="B", text="", url="http://b", score=0.5, rank=2, source="searxng"),
    ]
    (request,) = server.requests
    assert (request.method, request.path) == ("GET", "/search?q=C%2B%2B+%26+C%23%3F&format=json&language=en&engines=google%2Cbing")


def test_searxng_with_failed_engines_and_nothing_found_is_not_nothing_found(server: LocalServer) -> None:
    server.reply(
        Reply(body={"results": [], "unresponsive_engines": [["google", "too many requests"]]}), Reply(body={"results": [], "unresponsive_engines": []})
    )
    backend = SearxNG(server.url)
    with pytest.raises(SearchUnavailable, match=r"engines failed.*google.*too many requests"):
        backend.search("q", 5)
    assert backend.search("q", 5) == []


def test_serper(server: LocalServer) -> None:
    server.reply(Reply(body=SERPER))
    hits = Serper(KEY, url=server.url, country="de", language="fr").search("q", 1)
    assert hits == [SearchHit(title="A", text="about a", url="http://a", score=1.0, rank=1, source="serper")]
    (request,) = server.requests
    assert request.method == "POST" and request.json == {"q": "q", "num": 1, "gl": "de", "hl": "fr"}
    assert request.headers["x-api-key"] == KEY and request.headers["content-type"] == "application/json"


def test_tavily(server: LocalServer) -> None:
    server.reply(Reply(body=TAVILY))
    hits = Tavily(KEY, url=server.url, depth="advanced").search("q", 3)
    assert hits == [SearchHit(title="A", text="about a", url="http://a", score=0.9, rank=1, source="tavily")]
    (request,) = server.requests
    assert request.json == {"query": "q", "max_results": 3, "search_depth": "advanced"} and request.headers["authorization"] == f"Bearer {KEY}"


def test_the_retriever_protocol(server: LocalServer) -> None:
    server.reply(Reply(body=RETRIEVER))
    hits = RetrieverServer(f"{server.url}/retrieve").search("Brun", 3)
    assert hits == [
        SearchHit(title="Aldo Brun", text="born in Sarn", url="", score=0.8, rank=1, source="retriever"),
        SearchHit(title="", text="no title", url="", score=0.1, rank=2, source="retriever"),
    ]
    (request,) = server.requests
    assert (request.path, request.json) == ("/retrieve", {"queries": ["Brun"], "topk": 3, "return_scores": True})


def test_serper_leaves_the_list_out_where_nothing_was_found(server: LocalServer) -> None:
    server.reply(Reply(body={"searchParameters": {"q": "q"}, "credits": 1}))
    assert Serper(KEY, url=server.url).search("q", 5) == []


def test_tavily_is_asked_for_no_more_than_it_takes(server: LocalServer) -> None:
    server.reply(Reply(body=TAVILY))
    Tavily(KEY, url=server.url).search("x" * 401, 21)
    assert server.requests[0].json == {"query": "x" * 400, "max_results": 20, "search_depth": "basic"}


def test_a_retriever_that_gives_no_scores(server: LocalServer) -> None:
    server.reply(Reply(body={"result": [[{"contents": "a\nb"}, {"contents": "c"}]]}))
    assert [hit.score for hit in RetrieverServer(server.url).search("q", 3)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("make", "answer"),
    [(searxng, {"results": []}), (serper, {"organic": []}), (tavily, {"results": []}), (retriever, {"result": [[]]})],
    ids=NAMES,
)
def test_nothing_found_is_a_success(server: LocalServer, make: Make, answer: Any) -> None:
    server.reply(Reply(body=answer))
    tool = SearchTool(make(server.url))
    check_tool(tool)
    assert tool.call(query="q") == ToolResult("No results found.", data=())
    assert len(server.requests) == 1


@every_with_answer
def test_never_more_than_asked_for_and_hostile_queries_arrive(server: LocalServer, make: Make, answer: Any) -> None:
    server.reply(Reply(body=answer))
    backend = make(server.url)
    for query in ('"', "\ud800 x", "日本語 🙂", "a&q=b", "x" * 5000, "\0"):
        assert len(backend.search(query, 1)) == 1


# -- failures, told apart ----------------------------------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 408])
def test_a_passing_failure_is_tried_again_and_then_unavailable(server: LocalServer, clock: Clock, make: Make, status: int) -> None:
    server.reply(Reply(status, "try later"))
    result = SearchTool(make(server.url)).call(query="q")
    assert (result.ok, result.error, len(server.requests), clock.slept) == (False, "unavailable", 3, [0.5, 1.0])
    assert f"HTTP {status}" in result.text and "try later" in result.text and "3 attempts" in result.text


@every_with_answer
def test_a_second_attempt_that_succeeds_is_a_success(server: LocalServer, make: Make, answer: Any) -> None:
    server.reply(Reply(503), Reply(body="<html>"), Reply(body=answer))
    assert SearchTool(make(server.url)).call(query="q").ok and len(server.requests) == 3


@every
@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_asked_once_and_said_loudly(server: LocalServer, make: Make, status: int, caplog: pytest.LogCaptureFixture) -> None:
    server.reply(Reply(status, {"message": f"invalid key {KEY}"}))
    result = SearchTool(make(server.url)).call(query="q")
    assert (result.ok, result.error, len(server.requests)) == (False, "exception", 1)
    assert f"HTTP {status}" in result.text and f"HTTP {status}" in caplog.text and caplog.records[-1].levelname == "ERROR"


def test_a_refusal_says_what_to_look_at(server: LocalServer) -> None:
    server.reply(Reply(403))
    with pytest.raises(SearchRefused, match=r"settings\.yml"):
        SearxNG(server.url).search("q", 1)
    with pytest.raises(SearchRefused, match="SERPER_API_KEY"):
        Serper(KEY, url=server.url).search("q", 1)
    with pytest.raises(SearchRefused, match="TAVILY_API_KEY"):
        Tavily(KEY, url=server.url).search("q", 1)


def test_a_redirect_is_not_followed_with_the_key(server: LocalServer) -> None:
    server.reply(Reply(302, headers={"Location": f"{server.url}/elsewhere"}))
    with pytest.raises(SearchRefused, match=r"HTTP 302.*redirects to .*elsewhere.*final address"):
        Serper(KEY, url=server.url).search("q", 1)
    assert len(server.requests) == 1


@every
@pytest.mark.parametrize("body", ["", "<html>busy</html>", '{"results": [', "[" * 100_000], ids=["empty", "html", "cut", "deep"])
def test_what_is_not_json_is_unavailable(server: LocalServer, make: Make, body: str) -> None:
    server.reply(Reply(body=body))
    result = SearchTool(make(server.url)).call(query="q")
    assert result.error == "unavailable" and "not JSON" in result.text and len(server.requests) == 3


@every
@pytest.mark.parametrize("answer", [[], None, 3, {}, {"results": 1, "organic": 1, "result": 1}, {"results": ["x"], "organic": ["x"], "result": ["x"]}])
def test_another_shape_is_unavailable_and_said(server: LocalServer, make: Make, answer: Any) -> None:
    server.reply(Reply(body=answer))
    result = SearchTool(make(server.url)).call(query="q")
    assert result.error == "unavailable" and "expected a JSON object with a list" in result.text and len(server.requests) == 1


@pytest.mark.parametrize("answer", [{"result": [[{"document": {"text": "x"}}]]}, {"result": [["x"]]}, {"result": [[], []]}, {"result": []}])
def test_another_shape_of_documents_is_said_too(server: LocalServer, answer: Any) -> None:
    server.reply(Reply(body=answer))
    with pytest.raises(SearchUnavailable, match="retriever: expected"):
        RetrieverServer(server.url).search("q", 3)


@every_with_answer
def test_fields_of_another_type_do_not_raise(server: LocalServer, make: Make, answer: Any) -> None:
    odd = json.loads(json.dumps(answer).replace('"A"', "3").replace('"about a"', "null").replace("2.5", '"high"'))
    server.reply(Reply(body=odd))
    assert make(server.url).search("q", 1)[0].rank == 1


@every
def test_nobody_listens(clock: Clock, make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        result = SearchTool(make(f"http://127.0.0.1:{taken.getsockname()[1]}")).call(query="q")
    assert (result.ok, result.error, clock.slept) == (False, "unavailable", [0.5, 1.0])
    assert "ConnectionRefusedError" in result.text


def test_a_connection_that_breaks_is_unavailable(server: LocalServer) -> None:
    server.reply(Reply(body={"results": []}, headers={"Content-Length": "5000"}))  # promises more than it sends
    with pytest.raises(SearchUnavailable, match="broke in the middle"):
        SearxNG(server.url).search("q", 1)


def test_a_silent_server_costs_the_timeout(server: LocalServer) -> None:
    over = threading.Event()
    server.reply(Reply(body=SEARXNG, before=lambda: over.wait(30)))  # who waits longer gets an answer
    with pytest.raises(SearchUnavailable, match="TimeoutError"):
        SearxNG(server.url, http=HttpClient(timeout=0.05, retries=1)).search("q", 1)
    over.set()
    assert len(server.requests) == 2


def test_an_answer_without_end_is_cut_at_the_deadline(server: LocalServer, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def late() -> None:
        clock.now += 21

    server.reply(Reply(body={"results": []}, before=late))
    with pytest.raises(SearchUnavailable, match="still coming at the deadline"):
        SearxNG(server.url, http=HttpClient(deadline=20)).search("q", 1)
    assert len(server.requests) == 1
    monkeypatch.setattr("arpo_env.tools._http._MAX_BYTES", 1000)
    server.reply(Reply(body="x" * 1001))
    with pytest.raises(SearchUnavailable, match="larger than 1000 bytes"):
        SearxNG(server.url).search("q", 1)


# -- Retry-After, deadline, limits -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("Thu, 01 Jan 1970 00:16:47 GMT", 7.0), ("soon", 0.5), ("-1", 0.0), ("9" * 400, 0.5)])
def test_retry_after_is_obeyed_in_seconds_and_as_a_date(server: LocalServer, clock: Clock, value: str, seconds: float) -> None:
    server.reply(Reply(429, headers={"Retry-After": value}), Reply(body=SEARXNG))
    assert len(SearxNG(server.url).search("q", 5)) == 2
    assert clock.now == 1000 + seconds and len(server.requests) == 2


def test_retry_after_beyond_the_deadline_fails_at_once_and_holds_the_next_ones_back(server: LocalServer, clock: Clock) -> None:
    server.reply(Reply(429, headers={"Retry-After": "60"}))
    backend = SearxNG(server.url, http=HttpClient(deadline=20))
    with pytest.raises(SearchUnavailable, match=r"HTTP 429.*asked to wait 60 s \(1 attempt\)"):
        backend.search("q", 1)
    with pytest.raises(SearchUnavailable, match="after this call's deadline"):
        backend.search("another", 1)
    assert len(server.requests) == 1 and clock.slept == []
    clock.now += 45  # 15 s are left of the 60, and 20 s until the deadline
    server.reply(Reply(body=SEARXNG))
    assert backend.search("q", 1) != [] and clock.slept == [15.0]


def test_pauses_end_with_the_deadline(server: LocalServer, clock: Clock) -> None:
    server.reply(Reply(500))
    with pytest.raises(SearchUnavailable, match="3 attempts"):  # 0.5 + 1 s; the next 2 s would pass the deadline
        SearxNG(server.url, http=HttpClient(deadline=3, retries=9)).search("q", 1)
    assert clock.slept == [0.5, 1.0]


def test_a_rate_limit_spaces_requests_out_for_all_backends_of_a_client(server: LocalServer, clock: Clock) -> None:
    http = HttpClient(per_second=2, deadline=10)
    one, other = SearxNG(server.url, http=http), SearxNG(server.url, engines=("bing",), http=copy.deepcopy(http))
    server.reply(Reply(body=SEARXNG))
    for backend in (one, other, one):
        backend.search("q", 1)
    assert clock.slept == [0.5, 0.5]
    with pytest.raises(SearchUnavailable, match="rate limit"):
        SearxNG(server.url, http=HttpClient(per_second=0.01, deadline=10)).http.attempts("x", "h", clock.now, lambda _: None)


def test_no_more_requests_at_once_than_allowed(server: LocalServer) -> None:
    gate, entered = threading.Event(), threading.Semaphore(0)
    running, most, lock = [0], [0], threading.Lock()

    def enter() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        entered.release()
        gate.wait(60)
        with lock:
            running[0] -= 1

    server.reply(Reply(body=SEARXNG, before=enter))
    backend = SearxNG(server.url, http=HttpClient(max_concurrency=2, timeout=60, deadline=60))
    with ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(backend.search, "q", 1) for _ in range(6)]
        for _ in range(2):
            assert entered.acquire(timeout=60)
        gate.set()
        assert all(future.result() for future in futures)
    assert most[0] == 2


def test_a_place_that_does_not_come_free_is_unavailable(server: LocalServer, clock: Clock) -> None:
    http = HttpClient(max_concurrency=1)

    def nested(_: float) -> None:
        http.attempts("inner", "host", clock.now, lambda _: None)

    with pytest.raises(SearchUnavailable, match="too many requests are waiting"):
        http.attempts("outer", "host", clock.now + 5, nested)
    http.attempts("after", "host", clock.now + 5, lambda _: None)  # and the place is free again


def test_proxies_come_from_the_environment(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    server.reply(Reply(body=SEARXNG))
    assert SearxNG("http://searx.invalid").search("q", 1)
    assert server.requests[0].path.startswith("http://searx.invalid/search?q=q")


# -- secrets, settings, copies -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [serper, tavily])
def test_a_key_appears_nowhere(server: LocalServer, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    backend = make(server.url)
    tool = CachedTool(SearchTool(backend), ToolCache(tmp_path / "cache"))
    seen = [repr(backend), json.dumps(dict(tool.settings())), str(tool.key({"query": "q"}))]
    for status in (401, 429, 500):
        server.reply(Reply(status, {"error": f"bad key {KEY}"}))
        seen.append(repr(tool.call(query=f"q {status}")))
    server.reply(Reply(body=SERPER if make is serper else TAVILY))
    assert tool.call(query="q").ok
    tool.cache.close()
    seen += [caplog.text, *(path.read_bytes().decode("latin-1") for path in tmp_path.iterdir())]
    assert not any(KEY in text for text in seen)
    assert "***" in seen[3]


def test_no_half_of_a_key_is_left_where_a_message_is_cut(server: LocalServer) -> None:
    server.reply(Reply(401, "x" * 190 + KEY))
    assert KEY[:6] not in SearchTool(Serper(KEY, url=server.url)).call(query="q").text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_during_a_request_can_search(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()
    server.reply(Reply(body=SEARXNG, before=lambda: (entered.set(), gate.wait(60))), Reply(body=SEARXNG))
    backend = SearxNG(server.url, http=HttpClient(max_concurrency=1, timeout=60, deadline=60))
    monkeypatch.setattr(ssl, "create_default_context", None)  # the first request makes nothing under a lock that the child would find taken
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(backend.search, "q", 1)
        assert entered.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                os._exit(0 if backend.search("q", 1) else 1)
            finally:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gate.set()
        assert (ended, len(first.result(60))) == (0, 1)


def test_keys_come_from_the_environment_or_are_missed_at_once(monkeypatch: pytest.MonkeyPatch, server: LocalServer) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", " from-env ")
    server.reply(Reply(body=TAVILY))
    Tavily(url=server.url).search("q", 1)
    assert server.requests[0].headers["authorization"] == "Bearer from-env"
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="Serper needs an API key: pass api_key= or set SERPER_API_KEY"):
        Serper()
    with pytest.raises(ValueError, match="characters that no key has") as caught:
        Serper("se\ncret")
    assert "cret" not in str(caught.value).replace("characters", "")


@pytest.mark.parametrize("url", ["localhost:8080", "", "ftp://x", "http://", "http://user:pw@host/"])
def test_an_address_that_is_none_is_refused_at_construction(url: str) -> None:
    for make in (SearxNG, RetrieverServer):
        with pytest.raises(ValueError, match="address") as caught:
            make(url)
        assert "pw" not in str(caught.value)


def test_limits_are_checked() -> None:
    for wrong in ({"timeout": 0}, {"deadline": -1}, {"retries": -1}, {"max_concurrency": 0}, {"per_second": 0}):
        with pytest.raises(ValueError, match="must be"):
            HttpClient(**wrong)  # type: ignore[arg-type]


@every
def test_only_a_cache_makes_the_web_repeat_itself(make: Make, tmp_path: Path) -> None:
    tool = SearchTool(make("http://a"))
    assert tool.retries == 0  # the client tries again itself: twice nested they would pass the tool's deadline, and "unavailable" become "timeout"
    assert not tool.deterministic and CachedTool(tool, ToolCache(tmp_path / "c")).deterministic
    assert not CachedTool(tool, ToolCache(tmp_path / "c", mode="off")).deterministic


def test_settings_tell_apart_what_answers_differently() -> None:
    backends = [SearxNG("http://a"), SearxNG("http://b"), SearxNG("http://a", engines=("bing",)), SearxNG("http://a", language="de")]
    backends += [Serper(KEY), Serper(KEY, country="de"), Serper(KEY, language="de"), Tavily(KEY), Tavily(KEY, depth="advanced")]  # type: ignore[list-item]
    backends += [RetrieverServer("http://a"), RetrieverServer("http://a", corpus="wiki-18"), RetrieverServer("http://b")]  # type: ignore[list-item]
    assert len({json.dumps(dict(backend.settings())) for backend in backends}) == len(backends)
    assert Serper(KEY).settings() == Serper("another").settings()


@every_with_answer
def test_a_backend_goes_to_another_process(server: LocalServer, make: Make, answer: Any) -> None:
    server.reply(Reply(body=answer))
    backend = make(server.url, HttpClient(timeout=3, deadline=4, retries=5, per_second=6, max_concurrency=7))
    assert backend.search("q", 1)
    twin = pickle.loads(pickle.dumps(backend))
    assert twin.search("q", 1) == backend.search("q", 1)
    assert (twin.http.timeout, twin.http.deadline, twin.http.retries, twin.http.per_second, twin.http.max_concurrency) == (3, 4, 5, 6, 7)


def test_in_an_environment_a_service_that_is_down_is_unavailable_and_the_episode_goes_on(server: LocalServer, clock: Clock) -> None:
    server.reply(Reply(503))
    tool = SearchTool(Tavily(KEY, url=server.url))
    env = arpo_env.ToolEnv([{"question": "q", "answer": "a"}], tools=[tool], call_format=arpo_env.Tags(), reward=arpo_env.HierarchicalReward())
    env.reset(seed=0)
    observation, _, terminated, truncated, info = env.step("<search>who</search>")
    assert "HTTP 503" in observation and not (terminated or truncated)
    assert info["tool_calls"][0]["error"] == "unavailable" and len(server.requests) == 3
