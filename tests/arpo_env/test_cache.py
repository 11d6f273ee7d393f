"""The cache of tool results: keys, modes, limits, threads, processes, sudden death."""

import copy
import json
import logging
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import arpo_env
from arpo_env.tools import cache_flights, cache_store
from arpo_env.tools.cache import CacheError, CacheKey, CacheMiss, ToolCache


def key(query: str = "q", *, tool: str = "search", version: str = "1", **settings: Any) -> CacheKey:
    return CacheKey(tool, version, settings, {"query": query})


def never() -> Any:
    raise AssertionError("the call was to be answered from the cache")


def ask(cache: ToolCache, query: str, value: Any) -> Any:
    return cache.get_or_call(key(query), lambda: value, keep=lambda _: True)


# -- keys --------------------------------------------------------------------------------------------------------------------------------------------------


def test_everything_a_result_depends_on_is_in_the_key() -> None:
    keys = [key(), key("Q"), key(tool="browse"), key(version="2"), key(k=5), key(k=6)]
    keys += [key(query) for query in ("C", "C++", "C#", "3.5", "35", "-3", "3")]  # a key without punctuation took these for the same
    keys += [key(query) for query in ("'a  b'", "'a b'", "'a b' ", "if a:\n  b", "if a:\nb", "café", "cafe\u0301")]  # white space may be code or a name
    keys += [
        CacheKey("search", "1", {}, arguments) for arguments in ({}, {"text": "q"}, {"query": "q", "page": 2}, {"query": ["q"]}, {"query": 1}, {"query": None})
    ]
    assert len({one.digest for one in keys}) == len(keys)


def test_order_of_arguments_and_settings_does_not_matter() -> None:
    assert CacheKey("t", "1", {"a": 1, "b": 2}, {"c": 1, "d": 2}).digest == CacheKey("t", "1", {"b": 2, "a": 1}, {"d": 2, "c": 1}).digest


def test_hostile_texts_are_keys_and_values_too(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    for text in ("", "\0", "\ud800 x", "日本語 🙂", "é" * 100_000, "'; DROP TABLE results; --"):
        assert ask(cache, text, {"text": text}) == {"text": text}
        assert cache.get(key(text)) == {"text": text}
    assert cache.stats().entries == 6


# -- modes -------------------------------------------------------------------------------------------------------------------------------------------------


def test_record_calls_once_and_a_new_process_needs_no_call(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "deep" / "er" / "cache")
    assert ask(cache, "a", [1, {"b": None}]) == [1, {"b": None}]
    assert cache.get_or_call(key("a"), never, keep=bool) == [1, {"b": None}]
    assert cache.get(key("b")) is None
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "deep" / "er").iterdir()} == {0o600}
    cache.close()
    again = ToolCache(tmp_path / "deep" / "er" / "cache")
    assert again.get_or_call(key("a"), never, keep=bool) == [1, {"b": None}]


def test_a_cache_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    ask(cache, "a", 1)
    assert len(os.listdir(tmp_path)) == 3
    del cache
    assert os.listdir(tmp_path) == ["c"]


def test_a_stored_null_is_a_hit(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    assert ask(cache, "a", None) is None
    assert cache.get_or_call(key("a"), never, keep=bool) is None


def test_replay_never_calls_and_never_writes(tmp_path: Path) -> None:
    ask(recorded := ToolCache(tmp_path / "c"), "a", "b")
    recorded.close()
    before = (tmp_path / "c").read_bytes()
    cache = ToolCache(tmp_path / "c", mode="replay")
    assert cache.get_or_call(key("a"), never, keep=bool) == "b"
    with pytest.raises(CacheMiss, match=r"replay only.*does not hold search \(version 1\).*\"query\": \"C\+\+\""):
        cache.get_or_call(key("C++"), never, keep=bool)
    cache.put(key("x"), 1)
    assert cache.get(key("x")) is None
    assert cache.stats().here == {"search": {"hits": 1, "misses": 2}}
    cache.close()
    assert (tmp_path / "c").read_bytes() == before


def test_replay_from_a_directory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(recorded := ToolCache(tmp_path / "c"), "a", "b")
    recorded.close()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert ToolCache(tmp_path / "c", mode="replay").get(key("a")) == "b"
    assert os.listdir(tmp_path) == ["c"]


def test_off_calls_every_time_and_makes_no_file(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c", mode="off")
    assert [ask(cache, "a", n) for n in range(3)] == [0, 1, 2]
    cache.put(key("a"), 1)
    assert cache.get(key("a")) is None and cache.stats().entries == 0
    assert not (tmp_path / "c").exists()


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode must be"):
        ToolCache(tmp_path / "c", mode="write")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expire_after must be positive"):
        ToolCache(tmp_path / "c", expire_after=0)
    with pytest.raises(ValueError, match="max_mb must be at least 1"):
        ToolCache(tmp_path / "c", max_mb=0)
    with pytest.raises(CacheError, match="no tool cache to replay"):
        ToolCache(tmp_path / "c", mode="replay")
    assert os.listdir(tmp_path) == []


# -- what is kept, and for how long ------------------------------------------------------------------------------------------------------------------------


def test_failures_are_never_kept(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    assert cache.get_or_call(key(), lambda: "failed", keep=lambda value: value != "failed") == "failed"
    with pytest.raises(ZeroDivisionError):
        cache.get_or_call(key(), lambda: 1 / 0, keep=lambda _: True)
    assert ask(cache, "q", "worked") == "worked"


def test_an_expired_result_is_asked_for_again_and_replay_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(cache_store.time, "time", lambda: clock[0])
    cache = ToolCache(tmp_path / "c", expire_after=60)
    ask(cache, "a", "old")
    clock[0] = 1059.0
    assert ask(cache, "a", "new") == "old"
    clock[0] = 1060.0
    assert cache.get(key("a")) is None
    assert ToolCache(tmp_path / "c", mode="replay", expire_after=60).get(key("a")) == "old"
    assert ask(cache, "a", "new") == "new" and ask(cache, "a", "newer") == "new"
    assert cache.stats().entries == 1


def test_the_size_limit_evicts_what_was_unused_for_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cache_store.time, "time", lambda: clock[0])
    cache = ToolCache(tmp_path / "c", max_mb=1)
    text = "x" * 100_000
    for n in range(10):  # ten of 100 kB fit into 1 MiB
        clock[0] += 1
        ask(cache, str(n), text)
    clock[0] += 1
    assert cache.get(key("0")) == text  # the oldest, but used just now
    clock[0] += 1
    ask(cache, "10", text)
    # 1.1 MB are more than 1 MiB (1,048,576): down to 90 % of it, 943,718 bytes, so two of them go.
    assert [n for n in range(11) if cache.get(key(str(n))) is None] == [1, 2]
    stats = cache.stats()
    assert stats.entries == 9 and 900_000 < stats.bytes < 943_718
    assert stats.here["search"]["evicted"] == 2


def test_one_value_beyond_the_limit_evicts_nothing(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c", max_mb=1)
    ask(cache, "small", 1)
    assert ask(cache, "large", "x" * 2**21) == "x" * 2**21
    assert cache.get(key("small")) == 1 and cache.get(key("large")) is None
    assert cache.stats().here["search"]["too_large"] == 1


def test_counts_are_per_tool_and_outlive_the_process(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    for query in ("a", "a", "b", "a"):
        ask(cache, query, 1)
    assert cache.get(key("a", tool="browse")) is None
    stats = cache.stats()
    assert stats.here == stats.ever == {"search": {"hits": 2, "misses": 2, "stored": 2}, "browse": {"misses": 1}}
    assert (stats.hit_rate("search"), stats.hit_rate("browse"), stats.hit_rate("python")) == (0.5, 0.0, None)
    cache.close()
    cache.close()
    again = ToolCache(tmp_path / "c")
    ask(again, "a", 1)
    assert again.stats().here == {"search": {"hits": 1}}
    assert again.stats().ever["search"] == {"hits": 3, "misses": 2, "stored": 2}


# -- the file ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"x", b'{"query": "Page 1: ..."}', b"\0" * 5000, b"SQLite format 3\0" + b"x" * 5000], ids=["byte", "json", "zeros", "head"]
)
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(CacheError, match=r"not a tool cache but something else; nothing was changed"):
        ToolCache(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == content and os.listdir(tmp_path) == ["c"]


def test_a_database_of_another_program_or_layout_is_refused(tmp_path: Path) -> None:
    ToolCache(tmp_path / "later").close()
    for name, statement in (("other", "CREATE TABLE results (a)"), ("later", "PRAGMA user_version = 2")):
        connection = sqlite3.connect(tmp_path / name)
        connection.execute(statement)
        connection.close()
    for name, expected in (("other", "of another program"), ("later", "layout 2, expected 1")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(CacheError, match=expected):
            ToolCache(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def damage(path: Path) -> None:
    """Overwrite every page but the first."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


def test_a_damaged_file_costs_the_cache_not_the_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ask(recorded := ToolCache(tmp_path / "c"), "a", "b")
    recorded.close()
    damage(tmp_path / "c")
    cache = ToolCache(tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        assert [ask(cache, "a", n) for n in range(3)] == [0, 1, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "malformed" in caplog.text
    for failing in (lambda: cache.get(key("a")), lambda: cache.put(key("a"), 1), cache.stats):
        with pytest.raises(CacheError, match="malformed"):
            failing()
    with pytest.raises(CacheError, match="malformed"):  # in replay there is nothing to fall back on
        ToolCache(tmp_path / "c", mode="replay").get_or_call(key("a"), never, keep=bool)


def test_a_locked_or_full_or_closed_cache_costs_the_cache_not_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_store, "_BUSY_SECONDS", 0.01)
    cache = ToolCache(tmp_path / "c")
    ask(cache, "a", 1)
    other = sqlite3.connect(tmp_path / "c", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert ask(cache, "b", 2) == 2 and ask(cache, "a", 3) == 1  # reads go on
    other.execute("ROLLBACK")
    other.close()
    cache._store._connection.execute("PRAGMA max_page_count = 1")  # type: ignore[union-attr]
    assert ask(cache, "c", "x" * 100_000) == "x" * 100_000  # "database or disk is full"
    cache._store._connection.execute("PRAGMA max_page_count = 1000000")  # type: ignore[union-attr]
    assert ask(cache, "d", 4) == 4
    assert cache.get(key("d")) == 4 and cache.get(key("b")) is None and cache.get(key("c")) is None
    cache.close()
    assert ask(cache, "a", 5) == 5
    assert cache._store.here()["search"]["failures"] == 4  # two writes; a read and a write of the closed cache
    with pytest.raises(CacheError, match="closed"):
        cache.get(key("a"))


def test_a_value_without_a_json_form_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        ToolCache(tmp_path / "c").put(key(), object())


# -- threads and processes ---------------------------------------------------------------------------------------------------------------------------------


class Gate:
    """A call that waits inside until it is let go."""

    def __init__(self, result: Callable[[], Any] = lambda: [1]) -> None:
        self.result, self.calls = result, 0
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.go.wait(60)
        return self.result()


def ask_together(cache: ToolCache, gate: Gate, monkeypatch: pytest.MonkeyPatch, keep: Callable[[Any], bool] = bool) -> list[Any]:
    """What four threads get that ask while the call of a first one runs. Errors are returned."""
    joined = threading.Semaphore(0)

    class Announced(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            joined.release()
            return super().wait(timeout)

    class Flight(cache_flights.Flight[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.done = Announced()

    def run() -> Any:
        try:
            return cache.get_or_call(key(), gate, keep=keep)
        except Exception as error:
            return error

    with ThreadPoolExecutor(5) as threads, monkeypatch.context() as patch:
        patch.setattr(cache_flights, "Flight", Flight)
        futures = [threads.submit(run)]
        assert gate.entered.wait(60)
        futures += [threads.submit(run) for _ in range(4)]
        for _ in range(4):
            assert joined.acquire(timeout=60)
        gate.go.set()
        return [future.result() for future in futures]


def test_threads_that_ask_the_same_share_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, gate = ToolCache(tmp_path / "c"), Gate()
    answers = ask_together(cache, gate, monkeypatch)
    assert answers == [[1]] * 5 and gate.calls == 1
    assert len({id(answer) for answer in answers}) == 5  # branches share nothing mutable
    assert cache.stats().here["search"] == {"misses": 1, "stored": 1, "shared": 4}
    assert cache.stats().hit_rate("search") == 0.8


def test_a_shared_failure_stays_a_failure_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ToolCache(tmp_path / "c")
    gate = Gate(lambda: 1 / 0)
    assert [type(answer) for answer in ask_together(cache, gate, monkeypatch)] == [ZeroDivisionError] * 5 and gate.calls == 1
    gate = Gate(lambda: "503")
    assert ask_together(cache, gate, monkeypatch, keep=lambda value: value != "503") == ["503"] * 5 and gate.calls == 1
    assert ask(cache, "q", "worked") == "worked"


def test_an_interrupted_call_interrupts_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        if gate.calls == 1:
            raise SystemExit
        return [2]

    cache, gate = ToolCache(tmp_path / "c"), Gate(interrupted)
    with pytest.raises(SystemExit):
        ask_together(cache, gate, monkeypatch)
    assert cache.get(key()) == [2]


def test_a_stuck_call_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, gate = ToolCache(tmp_path / "c"), Gate()
    monkeypatch.setattr(cache_flights, "_JOIN_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(cache.get_or_call, key(), gate, keep=bool)
        assert gate.entered.wait(60)
        assert ask(cache, "q", "own") == "own"
        gate.go.set()
        assert stuck.result() == [1]


def test_a_call_that_asks_for_itself_does_not_wait_for_itself(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    assert cache.get_or_call(key(), lambda: ask(cache, "q", 1), keep=lambda _: True) == 1


def test_many_threads(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: ask(cache, str(n % 20), n % 20), range(400)))
    assert answers == [n % 20 for n in range(400)]
    counts = cache.stats().here["search"]
    assert counts["stored"] == cache.stats().entries == 20
    assert counts["hits"] + counts["misses"] + counts.get("shared", 0) == 400


WORKER = """
import sys
from arpo_env.tools.cache import CacheKey, ToolCache
path, worker, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
cache = ToolCache(path)
for n in range(count):
    key = CacheKey("search", "1", {}, {"query": f"{n % 50} {worker % 2}"})
    got = cache.get_or_call(key, lambda: [n % 50, worker % 2, "x" * 2000], keep=bool)
    assert got == [n % 50, worker % 2, "x" * 2000], got
    if n == 100:
        print("going", flush=True)
assert "failures" not in cache.stats().here["search"], cache.stats()
"""


def start(path: Path, worker: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(path), str(worker), str(count)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(arpo_env.__file__).parents[1])}
    )


def whole(path: Path) -> int:
    """Rows of the file, whose integrity and sum of sizes are checked."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    rows, total = connection.execute("SELECT COUNT(*), SUM(bytes) FROM results").fetchone()
    assert connection.execute("SELECT bytes FROM size").fetchall() == [(total,)]
    for (value,) in connection.execute("SELECT value FROM results"):
        json.loads(value)
    connection.close()
    return int(rows)


def test_processes_that_make_and_fill_one_file_at_once(tmp_path: Path) -> None:
    workers = [start(tmp_path / "c", worker, 200) for worker in range(3)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    outputs = [worker.communicate("go\n")[0] if worker is workers[-1] else _go(worker) for worker in workers]
    assert len(outputs) == 3
    for worker in workers:
        worker.communicate()
        assert worker.returncode == 0
    assert whole(tmp_path / "c") == 100
    ever = ToolCache(tmp_path / "c").stats().ever["search"]
    assert ever["hits"] + ever["misses"] == 600


def _go(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    for _ in range(2):
        worker = start(tmp_path / "c", 0, 10**9)
        _go(worker)
        assert worker.stdout is not None and [worker.stdout.readline() for _ in range(2)] == ["ready\n", "going\n"]
        worker.kill()
        worker.communicate()
        assert worker.returncode == -signal.SIGKILL
    assert whole(tmp_path / "c") == 50
    cache = ToolCache(tmp_path / "c")
    assert cache.get(CacheKey("search", "1", {}, {"query": "7 0"})) == [7, 0, "x" * 2000]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # it may: no lock of the cache is held at the fork
def test_a_forked_process_goes_on_with_connections_of_its_own(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c")
    ask(cache, "before", 1)
    gate = Gate()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(cache.get_or_call, key("running"), gate, keep=bool)
        assert gate.entered.wait(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert cache.get(key("before")) == 1
                assert ask(cache, "running", [2]) == [2]  # nobody here flies that flight
                for n in range(50):
                    ask(cache, f"child {n}", n)
                assert cache.stats().here["search"] == {"hits": 1, "misses": 51, "stored": 51}
                cache.close()
                code = 0
            finally:
                os._exit(code)
        for n in range(50):
            ask(cache, f"parent {n}", n)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.go.set()
        assert running.result(60) == [1]
    assert [cache.get(key(f"{who} {n}")) for who in ("child", "parent") for n in range(50)] == [*range(50)] * 2
    cache.close()
    assert whole(tmp_path / "c") == 102


def test_copies_are_the_same_cache_and_a_pickle_opens_the_file_again(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c", expire_after=50, max_mb=7)
    assert copy.deepcopy([cache])[0] is cache
    ask(cache, "a", 1)
    twin = pickle.loads(pickle.dumps(cache))
    assert twin is not cache and twin.get(key("a")) == 1
    assert (twin.mode, twin.expire_after, twin.max_mb) == ("record", 50, 7)
    twin.close()
    assert ask(cache, "b", 2) == 2 and cache.get(key("b")) == 2  # two connections of one process do not take each other's locks away
