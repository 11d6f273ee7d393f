"""Tools answered from a cache, and the import of recorded searches into one."""

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import arpo_env
from arpo_env.task import Task
from arpo_env.testing import ToolConformance
from arpo_env.tools.base import Tool, ToolResult
from arpo_env.tools.cache import CachedTool, ToolCache
from arpo_env.tools.search import KeywordIndex, SearchTool, import_searches

RECORD = Path(__file__).parents[3] / "shared" / "data" / "search_cache.json"


class Echo(Tool):
    """Counts its calls; fails on request."""

    name = "echo"
    description = "Repeats a text."
    version = "3"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def __init__(self, suffix: str = "!") -> None:
        self.suffix, self.calls = suffix, 0

    def settings(self) -> Mapping[str, Any]:
        return {"suffix": self.suffix}

    def call(self, **arguments: Any) -> ToolResult:
        self.calls += 1
        if arguments["text"] == "down":
            return ToolResult.failure("unavailable", "503")
        if arguments["text"] == "bad":
            return ToolResult.failure("bad_arguments", "no")
        return ToolResult(arguments["text"] + self.suffix, data=(self.calls, {"a": 1}))


def test_a_cached_tool_looks_like_the_tool_and_calls_it_once(tmp_path: Path) -> None:
    tool = Echo()
    cached = CachedTool(tool, ToolCache(tmp_path / "c"))
    assert cached.schema() == tool.schema() and cached.main_argument == "text" and (cached.version, cached.settings()) == ("3", {"suffix": "!"})
    first = cached.call(text="a")
    assert first == ToolResult("a!", data=[1, {"a": 1}])
    assert cached.call(text="a") == first and tool.calls == 1
    first.data[1]["a"] = 2
    assert cached.call(text="a").data == [1, {"a": 1}]
    assert cached.bind() is cached.fork() is copy.deepcopy(cached) is cached


def test_settings_and_version_of_the_tool_are_in_the_key(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    later = Echo()
    later.version = "4"
    assert [CachedTool(tool, cache).call(text="a").text for tool in (Echo(), Echo("?"), later)] == ["a!", "a?", "a!"]
    assert cache.stats().entries == 3


@pytest.mark.parametrize(("text", "error"), [("down", "unavailable"), ("bad", "bad_arguments")])
def test_no_failure_of_a_tool_is_kept(tmp_path: Path, text: str, error: str) -> None:
    tool = Echo()
    cached = CachedTool(tool, ToolCache(tmp_path / "c"))
    for calls in (1, 2):
        result = cached.call(text=text)
        assert (result.ok, result.error, tool.calls) == (False, error, calls)
    assert cached.cache.stats().entries == 0


def test_a_miss_in_replay_is_a_loud_failure_that_is_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CachedTool(Echo(), ToolCache(tmp_path / "c")).call(text="a")
    tool = Echo()
    cached = CachedTool(tool, ToolCache(tmp_path / "c", mode="replay"))
    assert cached.deterministic and cached.call(text="a").text == "a!"
    with caplog.at_level(logging.WARNING):
        result = cached.call(text="b")
    assert (result.ok, result.error) == (False, "exception") and "not recorded" in result.text and str(tmp_path) not in result.text
    assert '"text": "b"' in caplog.text and cached.cache.stats().here["echo"]["misses"] == 1 and tool.calls == 0


def test_a_tool_whose_results_depend_on_more_than_its_arguments_is_refused(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c", mode="off")

    class Stateful(Echo):
        stateful, fork_support = True, "copy"

    class OfTheTask(Echo):
        def start_episode(self, task: Task) -> None:
            self.suffix = task.question

    class Unclear(Echo):
        def settings(self) -> Mapping[str, Any]:
            return {"suffix": object()}

    for tool, reason in ((Stateful(), "stateful"), (OfTheTask(), "task"), (CachedTool(Echo(), cache), "already")):
        with pytest.raises(ValueError, match=reason):
            CachedTool(tool, cache)
    with pytest.raises(TypeError, match="settings of 'echo' cannot be part of a key"):
        CachedTool(Unclear(), cache)


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(("data", "expected"), [((Point(1), Point(2)), [{"x": 1}, {"x": 2}]), (object(), None), (None, None), ({1, 2}, None)])
def test_data_comes_as_json_from_the_first_call_on(tmp_path: Path, data: Any, expected: Any) -> None:
    @arpo_env.tool
    def look(what: str) -> ToolResult:
        """Looks."""
        return ToolResult(what, data=data)

    cached = CachedTool(look, ToolCache(tmp_path / "c"))
    assert [cached.call(what="x").data for _ in range(2)] == [expected] * 2


def test_branches_of_an_environment_ask_once(tmp_path: Path) -> None:
    tool = Echo()
    env = arpo_env.ToolEnv(
        [{"question": "q", "answer": "a"}],
        tools=[CachedTool(tool, ToolCache(tmp_path / "c"))],
        call_format=arpo_env.Tags(),
        reward=arpo_env.HierarchicalReward(),
    )
    env.reset(seed=0)
    twins = arpo_env.fork(env, 3)
    assert len({twin.step("<echo>hello</echo>")[0] for twin in (env, *twins)}) == 1
    assert tool.calls == 1


class TestCachedToolConformance(ToolConformance):
    calls = ({"text": "a"}, {"text": "b"})

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "c"

    def make_tool(self) -> Tool:
        return CachedTool(Echo(), ToolCache(self.path))


# -- import of recorded searches ---------------------------------------------------------------------------------------------------------------------------


def test_every_character_counts_unless_the_tool_says_otherwise(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    texts = ["a  b", "a b", " a b", "a\u0301", "á"]
    assert [CachedTool(Echo(), cache).call(text=text).text for text in texts] == [f"{text}!" for text in texts]
    search = CachedTool(SearchTool(KeywordIndex([{"text": "café au lait"}])), cache)
    results = {search.call(query=query).text for query in ("  café  au lait ", "cafe\u0301 au lait", "café\tau\u00a0\u00a0lait\n", "café au\nlait")}
    assert len(results) == 1 and cache.stats().here["search"] == {"misses": 1, "stored": 1, "hits": 3}


def test_a_cache_that_fails_in_replay_is_unavailable_and_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CachedTool(Echo(), ToolCache(tmp_path / "c")).call(text="a")
    tool = Echo()
    cached = CachedTool(tool, ToolCache(tmp_path / "c", mode="replay"))
    cached.cache.close()
    result = cached.call(text="a")
    assert (result.ok, result.error, tool.calls) == (False, "unavailable", 0) and str(tmp_path) not in result.text
    assert "is closed" in caplog.text


def test_imported_searches_answer_as_the_tool_would_have(tmp_path: Path) -> None:
    record = {"search query: Who ate C++?": "Page 1: One\npage.\nPage 2: Two.", "nothing": "No search results found.", "x </search> <result>": "Page 1: no"}
    (tmp_path / "r.json").write_text(json.dumps(record))
    tool = SearchTool(KeywordIndex([{"text": "other"}]), top_k=3)
    cache = ToolCache(tmp_path / "c")
    assert import_searches(tmp_path / "r.json", cache, tool) == 1
    replay = CachedTool(tool, ToolCache(tmp_path / "c", mode="replay"))
    assert replay.call(query="Who  ate C++?").text == "1. One page.\n2. Two."
    with pytest.raises(ValueError, match="mode 'record'"):
        import_searches(tmp_path / "r.json", replay.cache, tool)
    assert replay.call(query="nothing").error == replay.call(query="Who ate C#?").error == "exception"  # "nothing" may have been an error then


@pytest.mark.skipif(not RECORD.exists(), reason="the recorded searches are not on this machine")
def test_the_public_record_is_imported(tmp_path: Path) -> None:
    tool = SearchTool(KeywordIndex([{"text": "other"}]), top_k=10, max_chars=10_000)
    cache = ToolCache(tmp_path / "c")
    answered = sum(text != "No search results found." and "</search>" not in query for query, text in json.loads(RECORD.read_text()).items())
    assert import_searches(RECORD, cache, tool) == cache.stats().entries == answered == 996
    assert "Jun 1, 2019" in CachedTool(tool, ToolCache(tmp_path / "c", mode="replay")).call(query="Who directed the film Love Finds Andy Hardy?").text


def test_two_functions_of_one_name_do_not_share_answers(tmp_path: Path) -> None:
    def made(answer: str) -> Any:
        def ask(question: str) -> str:
            """Answers."""
            return answer

        ask.__qualname__ = f"{answer}.ask"
        return arpo_env.tool(timeout=None)(ask)

    cache = ToolCache(tmp_path / "cache.sqlite")
    assert [CachedTool(made(answer), cache).call(question="?").text for answer in ("one", "two")] == ["one", "two"]
    newer = arpo_env.tool(timeout=None, version="2")(made("one").function)
    assert CachedTool(newer, cache).call(question="?").text == "one"
    assert cache.stats().here["ask"]["misses"] == 3, "another version is another key"


def test_a_path_in_the_place_of_a_cache_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got str: write ToolCache\('c.sqlite'\)"):
        CachedTool(SearchTool(KeywordIndex([{"title": "a", "text": "b"}])), "c.sqlite")  # type: ignore[arg-type]
