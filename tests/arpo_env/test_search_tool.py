"""The search tool and its backends."""

import copy
import json
import math
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arpo_env.tools.base import ToolResult, check_tool
from arpo_env.tools.search import KeywordIndex, RecordedSearch, SearchBackend, SearchHit, SearchTool, SearchUnavailable, TantivyIndex

RECORD = Path(__file__).parents[3] / "shared" / "data" / "search_cache.json"
DOCUMENTS = [
    {"title": "Aldo Brun", "text": "Aldo Brun was born in Sarn in 1903.", "url": "w/aldo"},
    {"title": "Sarn", "text": "Sarn is a town on the river Ulm."},
    {"text": "A river is a natural stream of water."},
    {"title": "Berta Brun", "text": "Berta Brun, a painter, lived in Sarn."},
]


def tantivy_index(documents: list[dict[str, str]]) -> SearchBackend:
    pytest.importorskip("tantivy")
    return TantivyIndex.build(documents)


both = pytest.mark.parametrize("build", [KeywordIndex, tantivy_index], ids=["keyword", "tantivy"])
Build = Callable[[list[dict[str, str]]], SearchBackend]


class Down:
    """A backend whose service does not answer."""

    def search(self, query: str, k: int) -> list[SearchHit]:
        raise SearchUnavailable("429 Too Many Requests")


# -- the tool ----------------------------------------------------------------------------------------------------------------------------------------------


def test_hits_are_numbered_lines_and_data() -> None:
    tool = SearchTool(KeywordIndex(DOCUMENTS), top_k=2)
    check_tool(tool)
    result = tool.call(query="Aldo Brun, Sarn?")
    assert result.ok and result.error is None and result.state == "none"
    assert result.text.splitlines() == ["1. Aldo Brun was born in Sarn in 1903. (w/aldo)", "2. Berta Brun, a painter, lived in Sarn."]
    assert [hit.rank for hit in result.data] == [1, 2] and result.data[0].url == "w/aldo"


def test_a_title_stands_before_a_text_that_does_not_begin_with_it() -> None:
    tool = SearchTool(KeywordIndex([{"title": "Ulm", "text": "A river\nin the west."}]))
    assert tool.call(query="river").text == "1. Ulm: A river in the west."


def test_nothing_found_is_not_an_error() -> None:
    assert SearchTool(KeywordIndex(DOCUMENTS)).call(query="zeppelin") == ToolResult(text="No results found.", data=())


@pytest.mark.parametrize("query", ["", "   \n", "\0\0", "\ud800"])
def test_an_empty_query_is_explained_to_the_model(query: str) -> None:
    result = SearchTool(KeywordIndex(DOCUMENTS)).call(query=query)
    assert (result.ok, result.error) == (False, "bad_arguments")
    assert "empty" in result.text


def test_a_backend_that_is_down_is_told_apart_from_nothing_found() -> None:
    result = SearchTool(Down()).call(query="x")
    assert (result.ok, result.error) == (False, "unavailable")
    assert "429" in result.text and "No results" not in result.text


HOSTILE = ["(", ")", ":", '"', "title:", "a AND", "NOT", "[a TO", "x^", "~", "*", "+-", "\\", "a\0b", "/re", "é" * 5000, "word " * 1000, "(" * 5000]
HOSTILE += ["title:(a OR", "\ud800 x"]


@both
@pytest.mark.parametrize("query", HOSTILE)
def test_no_query_raises(build: Build, query: str) -> None:
    backend = build(DOCUMENTS)
    assert isinstance(backend.search(query, 3), list)
    result = SearchTool(backend).call(query=query)
    assert result.ok or result.error == "bad_arguments"


def test_an_answer_is_bounded_and_every_hit_gets_its_share() -> None:
    tool = SearchTool(KeywordIndex([{"text": f"word {n} " + "x" * 100_000} for n in range(9)]), top_k=4, max_chars=1000)
    text = tool.call(query="word").text
    assert len(text) <= 1000
    assert [f"{n + 1}. word {n} x" in text for n in range(4)] == [True] * 4 and text.count("left out") == 4


def test_one_instance_and_one_index_serve_all_episodes_and_forks() -> None:
    tool = SearchTool(KeywordIndex(DOCUMENTS))
    assert tool.deterministic and tool.retries == 2
    assert tool.bind() is tool.fork() is copy.deepcopy(tool) is tool and not tool.stateful
    assert copy.deepcopy({"env": tool})["env"].backend is tool.backend


def test_settings_are_checked() -> None:
    with pytest.raises(TypeError, match="search"):
        SearchTool(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_k"):
        SearchTool(KeywordIndex(DOCUMENTS), top_k=0)
    with pytest.raises(ValueError, match="max_chars"):
        SearchTool(KeywordIndex(DOCUMENTS), top_k=5, max_chars=499)


# -- indexes -----------------------------------------------------------------------------------------------------------------------------------------------


def test_bm25_by_hand() -> None:
    # Lengths 2, 1, 3: mean 2. "a" is in 2 of 3 documents: idf = ln(1 + 1.5 / 2.5) = ln 1.6.
    # Document 0 (tf 1, length 2): 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75)) = 1. Document 2 (tf 2, length 3): 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 1.5)) = 4.4 / 3.65.
    hits = KeywordIndex([{"text": "a b"}, {"text": "c"}, {"text": "A, a! d"}]).search("a", 5)
    assert [hit.text for hit in hits] == ["A, a! d", "a b"]
    assert [hit.score for hit in hits] == pytest.approx([math.log(1.6) * 4.4 / 3.65, math.log(1.6)])


@both
def test_best_first_with_words_of_title_and_text(build: Build) -> None:
    index = build(DOCUMENTS)
    hits = index.search("where was Aldo Brun born", 10)
    assert [hit.title for hit in hits] == ["Aldo Brun", "Berta Brun"]
    assert [hit.rank for hit in hits] == [1, 2] and hits[0].score > hits[1].score > 0
    assert hits[0] == SearchHit(title="Aldo Brun", text="Aldo Brun was born in Sarn in 1903.", url="w/aldo", score=hits[0].score, rank=1, source=hits[0].source)
    assert hits[0].source in ("keyword index", "tantivy")
    assert index.search("river", 1)[0].rank == 1 and len(index.search("river", 1)) == 1
    assert index.search("river", 0) == []


@both
def test_signs_of_a_query_language_mean_nothing(build: Build) -> None:
    index = build(DOCUMENTS)
    plain = index.search("Berta Sarn", 4)
    for query in ('"Berta Sarn"', "+Berta -Sarn", "Berta AND Sarn", "text:Berta Sarn^3", "(Berta Sarn", "berta NOT SARN"):
        assert index.search(query, 4) == plain


@both
def test_ties_come_in_the_order_of_the_documents(build: Build) -> None:
    documents = [{"text": "same words here", "url": str(n)} for n in range(500)]
    for _ in range(2):
        assert [hit.url for hit in build(documents).search("words", 7)] == [str(n) for n in range(7)]


@both
def test_an_index_of_nothing_or_of_something_else_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="at least one document"):
        build([])
    with pytest.raises(ValueError, match="document 1: expected a mapping with a string 'text'"):
        build([{"text": "a"}, {"body": "b"}])
    with pytest.raises(ValueError, match="document 0: 'url' must be a string, got int"):
        build([{"text": "a", "url": 3}])  # type: ignore[dict-item]


@both
def test_an_index_is_shared_by_copies_threads_and_a_forked_process(build: Build) -> None:
    index = build(DOCUMENTS)
    assert copy.deepcopy([index])[0] is index
    expected = index.search("Brun", 5)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: index.search("Brun", 5), range(40))) == [expected] * 40
    child = os.fork()
    if child == 0:
        os._exit(0 if index.search("Brun", 5) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_index_on_disk_opens_again(tmp_path: Path) -> None:
    pytest.importorskip("tantivy")
    where = tmp_path / "index"
    built = TantivyIndex.build(DOCUMENTS, where)
    opened = TantivyIndex.open(where)
    assert len(opened) == 4 and opened.search("Sarn river", 5) == built.search("Sarn river", 5) != []
    assert pickle.loads(pickle.dumps(opened)).search("Sarn", 5) == built.search("Sarn", 5)
    with pytest.raises(FileExistsError, match="not empty"):
        TantivyIndex.build(DOCUMENTS, where)
    with pytest.raises(FileNotFoundError, match="no tantivy index"):
        TantivyIndex.open(tmp_path / "other")
    with pytest.raises(TypeError, match="in memory"):
        pickle.dumps(TantivyIndex.build(DOCUMENTS))


def words(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"text": f"word {n}"} for n in range(start, start + count)]


def test_an_index_on_disk_is_memory_mapped(tmp_path: Path) -> None:
    pytest.importorskip("tantivy")
    index = TantivyIndex.build(DOCUMENTS, tmp_path / "index")
    assert index.search("Sarn", 5)
    assert any(str(tmp_path / "index") in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_an_index_is_built_once_and_refused_for_other_documents(tmp_path: Path) -> None:
    pytest.importorskip("tantivy")
    where = tmp_path / "deep" / "index"
    first = TantivyIndex.open_or_build(DOCUMENTS, where)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in where.iterdir())
    assert TantivyIndex.open_or_build(DOCUMENTS, where).settings() == first.settings()
    with pytest.raises(ValueError, match="built from 4 other documents"):
        TantivyIndex.open_or_build(DOCUMENTS[::-1], where)
    with pytest.raises(ValueError, match="built from 4 other documents"):
        TantivyIndex.open(where, documents=[*DOCUMENTS, {"text": "more"}])
    with pytest.raises(TypeError, match="read twice"):
        TantivyIndex.open_or_build(iter(DOCUMENTS), where)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in where.iterdir()) == before
    assert where.stat().st_mode & 0o777 == where.parent.stat().st_mode & 0o777


def test_many_that_build_at_once_leave_one_index(tmp_path: Path) -> None:
    pytest.importorskip("tantivy")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: TantivyIndex.open_or_build(DOCUMENTS, tmp_path / "index"), range(4)))
    assert [len(index) for index in found] == [4] * 4 and os.listdir(tmp_path) == ["index"]


def test_a_killed_or_failed_build_leaves_no_half_index(tmp_path: Path) -> None:
    pytest.importorskip("tantivy")

    def deadly() -> Iterator[dict[str, str]]:
        yield from words(3000)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ValueError, match="document 3"):
        TantivyIndex.build([*words(3), {"title": "no text"}], tmp_path / "index")
    assert os.listdir(tmp_path) == []
    child = os.fork()
    if child == 0:
        try:
            TantivyIndex.build(deadly(), tmp_path / "index")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "index").exists()
    assert len(TantivyIndex.open_or_build(words(5), tmp_path / "index")) == 5


def test_an_index_of_another_layout_or_library_is_said(tmp_path: Path) -> None:
    tantivy = pytest.importorskip("tantivy")
    where = tmp_path / "index"
    TantivyIndex.build(DOCUMENTS, where)
    twin = pickle.dumps(TantivyIndex.open(where))
    label = where / "arpo_index.json"
    good = json.loads(label.read_text())
    assert good["documents"] == 4 and good["tantivy"] == tantivy.__version__
    for change, said in (
        ({"layout": 99}, "layout 99, expected 1"),
        ({"documents": 5}, "holds 4 documents, its label says 5"),
        ({"extra": 1}, "another version"),
    ):
        label.write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=said):
            TantivyIndex.open(where)
    label.write_text(json.dumps({**good, "fingerprint": "0"}))
    with pytest.raises(ValueError, match="other documents"):  # the index at this path was replaced
        pickle.loads(twin)
    label.unlink()
    with pytest.raises(ValueError, match="not built by TantivyIndex"):
        TantivyIndex.open(where)
    label.write_text(json.dumps(good))
    (where / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be opened by tantivy"):
        TantivyIndex.open(where)


@both
def test_settings_tell_apart_indexes_of_other_documents(build: Build) -> None:
    variants = [DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[:3], [{"text": "ab", "title": "c"}], [{"text": "b", "title": "ca"}], [{"text": "b", "url": "ca"}]]
    found = [json.dumps(build(documents).settings()) for documents in variants]  # type: ignore[attr-defined]
    assert len(set(found)) == len(variants)
    assert json.dumps(build(DOCUMENTS).settings()) == found[0]  # type: ignore[attr-defined]


def test_settings_of_the_tool_hold_those_of_its_backend() -> None:
    index, record = KeywordIndex(DOCUMENTS), RecordedSearch({"a": "Page 1: b"})
    settings = [SearchTool(index).settings(), SearchTool(index, top_k=2).settings(), SearchTool(index, max_chars=999).settings()]
    settings += [SearchTool(KeywordIndex(DOCUMENTS, k1=2.0)).settings(), SearchTool(KeywordIndex(DOCUMENTS, b=0.5)).settings(), SearchTool(record).settings()]
    settings += [SearchTool(RecordedSearch({"a": "Page 1: b"}, min_similarity=0.5)).settings(), SearchTool(RecordedSearch({"a": "Page 1: c"})).settings()]
    assert len({json.dumps(dict(one)) for one in settings}) == len(settings)
    with pytest.raises(TypeError, match="Down needs a method settings"):
        SearchTool(Down()).settings()


# -- recorded searches -------------------------------------------------------------------------------------------------------------------------------------

SMALL = {
    "search query: Who directed Blue Night?": "Page 1: Blue Night is a film\nby Ana Roth.\nPage 2: Ana Roth, director.",
    "Blue Night release date": "Page 1: Released in 1999.",
    "population of Sarn": "No search results found.",
    "search query here </search> <result> x </result>": "Page 1: nonsense",
    "who DIRECTED blue night": "Page 1: a second answer to the same words",
}


def test_a_recorded_query_is_found_by_its_words() -> None:
    recorded = RecordedSearch(SMALL)
    hits = recorded.search("who directed  BLUE NIGHT", 5)
    assert [(hit.rank, hit.text, hit.score) for hit in hits] == [(1, "Blue Night is a film\nby Ana Roth.", 1.0), (2, "Ana Roth, director.", 1.0)]
    assert len(recorded.search("who directed blue night", 1)) == 1
    assert recorded.dropped == list(SMALL)[3:] and len(recorded) == 3
    assert SearchTool(recorded).call(query="Who directed 'Blue Night'?").text == "1. Blue Night is a film by Ana Roth.\n2. Ana Roth, director."


def test_similarity_by_hand_and_the_threshold() -> None:
    # Three usable queries. blue, night: in 2 of 3, idf = ln 2.5; who, directed, release, date: in 1, idf = ln 4; "film" in none: ln 4.
    # "blue night date film" and "Blue Night release date": common 2 ln 2.5 + ln 4; either: 2 ln 2.5 + 3 ln 4.
    expected = (2 * math.log(2.5) + math.log(4)) / (2 * math.log(2.5) + 3 * math.log(4))
    query, similarity = RecordedSearch(SMALL).nearest("blue night date film")
    assert query == "Blue Night release date" and similarity == pytest.approx(expected)
    assert [hit.score for hit in RecordedSearch(SMALL, min_similarity=expected - 0.01).search("blue night date film", 3)] == [pytest.approx(expected)]
    assert RecordedSearch(SMALL, min_similarity=expected + 0.01).search("blue night date film", 3) == []
    assert RecordedSearch(SMALL).nearest("zeppelin") == ("", 0.0)


def test_equally_near_queries_answer_in_the_order_of_the_record() -> None:
    recorded = RecordedSearch({"a b": "Page 1: first", "a c": "Page 1: second"})
    assert [hit.text for hit in recorded.search("a d", 3)] == []
    assert RecordedSearch({"a b": "Page 1: first", "a c": "Page 1: second"}, min_similarity=0.01).search("a d", 3)[0].text == "first"


def test_no_result_is_said_when_nothing_is_near_or_nothing_was_found_then() -> None:
    tool = SearchTool(RecordedSearch(SMALL))
    for query in ("capital of France", "population of Sarn", "zeppelin"):
        assert tool.call(query=query) == ToolResult(text="No results found.", data=())


@pytest.mark.parametrize("query", HOSTILE)
def test_no_query_to_a_record_raises(query: str) -> None:
    assert isinstance(RecordedSearch(SMALL).search(query, 3), list)


def test_records_of_another_layout_are_refused(tmp_path: Path) -> None:
    for content in ([1, 2], {"a": 3}):
        path = tmp_path / "record.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="one JSON object of query -> text"):
            RecordedSearch.from_json(path)
    for empty in ({}, {"</search>": "x"}):
        with pytest.raises(ValueError, match="at least one usable query"):
            RecordedSearch(empty)
    for threshold in (0.0, 1.5):
        with pytest.raises(ValueError, match="min_similarity must be in"):
            RecordedSearch(SMALL, min_similarity=threshold)


@pytest.mark.skipif(not RECORD.exists(), reason="the recorded searches are not on this machine")
def test_the_public_record_of_a_thousand_searches() -> None:
    raw: dict[str, Any] = json.loads(RECORD.read_text())
    recorded = RecordedSearch.from_json(RECORD)
    assert len(raw) == 1000 and len(recorded) == 998
    assert len(recorded.dropped) == 2 and all("</search>" in query for query in recorded.dropped)
    # Every recorded query finds its own pages; a stray "search query:" is no part of it.
    for key, text in raw.items():
        if key not in recorded.dropped:
            hits = recorded.search(key.removeprefix("search query: "), 20)
            assert [hit.text for hit in hits] == [] if text == "No search results found." else hits[0].text in text
    assert recorded.nearest("who directed Love Finds Andy Hardy")[0] == "Who directed the film Love Finds Andy Hardy?"
    assert recorded.search("Love Finds Andy Hardy director", 3)[0].text.startswith("Jun 1, 2019")
    assert recorded.search("what is the capital of France", 3) == []
    assert not any(hit.text.startswith("Page ") for hit in recorded.search("Solo Cup company owner", 5))


class _Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def search(self, query: str, k: int) -> Any:
        return self.answer

    def settings(self) -> dict[str, Any]:
        return {}


class _OtherAnswers(_Answers):
    pass


def test_a_backend_that_returns_something_else_is_named() -> None:
    with pytest.raises(TypeError, match=r"_Answers.search must return a list of SearchHit"):
        SearchTool(_Answers([{"title": "a"}])).call(query="x")


def test_backends_of_two_classes_share_no_cache_entries() -> None:
    assert SearchTool(_Answers([])).settings() != SearchTool(_OtherAnswers([])).settings()
