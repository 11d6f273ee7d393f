"""From bytes to text: character sets, the plain reader, and the worker processes that are killed when a page is too much for them."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arpo_env._workers import WorkerDied, WorkerFailed, WorkerLate, WorkerPool
from arpo_env.tools import browse_worker
from arpo_env.tools.browse import BrowseError, Extractor, Fetched, WebDocument
from arpo_env.tools.browse_extract import decode

# --- character sets ---------------------------------------------------------------------------------------------------------------------------------

WORDS = "Grüße, naïve – 日本語"


@pytest.mark.parametrize(
    ("body", "declared", "expected"),
    [
        (WORDS.encode(), "utf-8", WORDS),
        (WORDS.encode(), "", WORDS),
        (WORDS.encode(), "iso-8859-1", WORDS),  # a wrong header
        (b'<meta charset="iso-8859-1">' + WORDS.encode(), "", '<meta charset="iso-8859-1">' + WORDS),  # a wrong meta
        (WORDS.encode("utf-8-sig"), "latin-1", WORDS),
        (WORDS.encode("utf-16"), "utf-8", WORDS),
        (b"\xfe\xff" + WORDS.encode("utf-16-be"), "", WORDS),
        (WORDS.encode("utf-16-le"), "utf-16-le", WORDS),
        ("Grüße €".encode("cp1252"), "", "Grüße €"),
        ("Grüße €".encode("cp1252"), "iso-8859-1", "Grüße €"),  # as browsers read it
        ("Grüße".encode("latin-1"), "utf-8", "Gr\ufffd\ufffde"),
        ("日本語".encode("shift_jis"), "Shift_JIS", "日本語"),
        ("日本語".encode("iso2022_jp"), "iso-2022-jp", "日本語"),
        (b'<META http-equiv=content-type content="text/html; charset=euc-jp">' + "日本語".encode("euc_jp"), "", None),
        ("Привет".encode("koi8-r"), "koi8-r", "Привет"),
        ("Привет".encode("cp1251"), "windows-1251", "Привет"),
        ("Grüße".encode("cp1252"), "no-such-charset", "Grüße"),
        ("Grüße".encode("cp1252"), "zlib", "Grüße"),  # a codec, but not one of text
        ("Grüße".encode("cp1252"), "unicode_escape", "Grüße"),
        ("Grüße".encode("cp1252"), "x\0y", "Grüße"),
        (b"\\u0041", "unicode_escape", "\\u0041"),
        ("日本語".encode()[:-1], "utf-8", "日本"),  # the size limit cut a character in half
        (b"", "", ""),
    ],
)
def test_character_sets(body: bytes, declared: str, expected: str | None) -> None:
    text = decode(body, declared)
    assert text == expected if expected is not None else text.endswith(">日本語")


# --- the plain reader -------------------------------------------------------------------------------------------------------------------------------


def test_the_plain_reader_shows_what_is_visible_and_how_it_is_built() -> None:
    page = """<!DOCTYPE html><html><head><title>A &amp;
      B</title><style>p {color: red}</style><script>if (1 < 2) document.write("<p>no</p>")</script></head>
    <body><h2>Head</h2><!-- <p>hidden</p> --><p>One <b>bold</b>, two&nbsp;&lt;3&gt;.
      three<br>line</p><ul><li>a<li>b</ul><pre>x = 1
  y = 2</pre><table><tr><th>k</th><td>v</td></tr><tr><td>w</td></tr></table><SCRIPT>x</ScRiPt ><a title="a > b">end</a></body></html>"""
    answer = browse_worker.read(page, "https://example.org/", False)
    assert answer["title"] == "A & B"
    assert answer["text"] == "## Head\n\nOne bold, two <3>. three\nline\n\n- a\n- b\n\nx = 1\n  y = 2\n\n| k | v\n| w\n\nend"
    assert answer["reader"] == "plain"


def test_links_of_the_plain_reader() -> None:
    page = """<p>go <A HREF="/a_(b)?x=1&amp;y=2"> to <i>the</i> end</A>, <a href=#top>top</a> <a href="mailto:x@y">m</a> <a>n</a>
        <a href='c'></a><a data-href=q href=d>D"""
    text, links = browse_worker.plain(page, "https://example.org/p/q")
    assert text == "go to the end, top m n D"
    assert links == [[3, "to the end", "https://example.org/a_(b)?x=1&y=2"], [23, "D", "https://example.org/p/d"]]


HOSTILE = {
    "nested blocks": "<div>" * 60_000 + "word",
    "nested lists": "<ul><li>" * 40_000 + "word",
    "tags that do not end": "<a " * 100_000,
    "comments that do not end": "<!--" * 100_000,
    "declarations": "<![CDATA[" * 50_000,
    "instructions": "<?" * 100_000,
    "end tags": "</" * 100_000,
    "quotes that do not end": '<a b="' * 60_000,
    "quotes within quotes": "<a b=\"'" * 60_000,
    "raw elements that do not end": "<svg>" * 60_000,
    "scripts that do not end": "<script>" * 60_000,
    "titles that do not end": "<title " * 60_000,
    "angle brackets": "<" * 300_000,
    "ampersands": "&" * 300_000,
    "a huge number": "word &#" + "9" * 300_000 + ";",
    "a huge attribute": f'<p title="{"x" * 300_000}">word',
    "links": "<a href=x>" * 30_000,
    "brackets": "[" * 150_000 + "](" * 70_000,
    "binary": "".join(map(chr, range(256))) * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pages_are_read_in_linear_time(name: str) -> None:
    """Each is quadratic or worse for a careless reader: minutes to hours. The test's own deadline is the judge."""
    answer = browse_worker.read(HOSTILE[name], "https://example.org/", False)
    assert len(answer["text"]) <= 2 * len(HOSTILE[name]) and len(answer["links"]) <= 1000
    browse_worker._take_links(HOSTILE[name], "https://example.org/")


def test_letters_that_grow_in_lower_case_hide_nothing() -> None:
    assert browse_worker.plain("İİ<script>x</script> after", "https://example.org/")[0] == "İİ after"


# --- the extractor ----------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_reader() -> Iterator[Extractor]:
    extractor = Extractor(main_text=False, timeout=60.0)
    extractor.start()
    yield extractor
    extractor.close()


def fetched(text: str, kind: str = "html", cut: bool = False) -> Fetched:
    return Fetched("https://example.org/p", kind, "utf-8", text.encode("utf-8", "surrogatepass"), cut)


def test_html_becomes_a_document(plain_reader: Extractor) -> None:
    document, steady = plain_reader.extract(fetched("<title>T</title><p>Grüße <a href=/x>dort</a></p>\r\n", cut=True))
    assert (document.url, document.title, document.text, document.reader, document.cut) == ("https://example.org/p", "T", "Grüße dort", "plain", True)
    assert [(link.position, link.label, link.url) for link in document.links] == [(6, "dort", "https://example.org/x")]
    assert steady
    assert WebDocument.from_json(document.to_json()) == document


def test_text_needs_no_worker() -> None:
    extractor = Extractor(main_text=False)
    document, _ = extractor.extract(fetched('{"a": "<b>"}\r\n', kind="text"))
    assert (document.text, document.reader, document.title) == ('{"a": "<b>"}', "text", "")
    assert not extractor._pool._all


def test_what_a_terminal_or_a_tokenizer_would_choke_on_is_removed(plain_reader: Extractor) -> None:
    document, _ = plain_reader.extract(fetched("<title>a\x1b[31m</title><p>b\0\x07\x85c &#0; &#27; \ud800 &#xD800; \ufeffd</p>"))
    assert document.title == "a[31m"
    for character in document.text:
        assert character == "\ufffd" or (character.isprintable() and not 0xD800 <= ord(character) < 0xE000)
    assert document.text.startswith("bc") and document.text.endswith("d")


def test_pages_of_all_sizes_pass_the_pipes(plain_reader: Extractor) -> None:
    for size in (0, 1, 70_000, 1_000_000):
        document, _ = plain_reader.extract(fetched("é" * size))
        assert document.text == "é" * size


def test_an_extractor_can_be_pickled() -> None:
    twin = pickle.loads(pickle.dumps(Extractor(main_text=False, timeout=60.0, workers=1)))
    twin.start()
    assert twin.extract(fetched("<p>x"))[0].text == "x"
    twin.close()


@pytest.mark.parametrize("arguments", [{"max_html": 0}, {"timeout": 0.0}, {"memory_mb": 1}, {"workers": 0}])
def test_bad_configurations_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Extractor(main_text=False, **arguments)


def test_asking_for_main_text_without_the_extra_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[browse\]'"):
        Extractor(main_text=True)
    assert Extractor().main_text is False


# --- the worker processes ---------------------------------------------------------------------------------------------------------------------------

STANDIN = """
import json, sys, time
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("touch"):
        open(request["touch"], "w").close()
    if request.get("main"):
        time.sleep(600)
    if request.get("die"):
        sys.exit(3)
    if request.get("endless"):
        while True: sys.stdout.write("x" * 65536)
    if request.get("babble"):
        print("not json", flush=True); continue
    print(json.dumps({"title": "", "text": request.get("html", ""), "links": [], "reader": "plain", "size": len(line)}), flush=True)
"""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool([sys.executable, "-c", STANDIN], size=2, start_deadline=60.0)
    yield workers
    workers.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(pool: WorkerPool) -> list[int]:
    return [worker.process.pid for worker in pool._all]


def test_workers_are_used_again_and_never_more_than_allowed(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: pool.ask({"html": str(number)}, 60.0)["text"], range(40)))
    assert answers == [str(number) for number in range(40)]
    assert 1 <= len(pids(pool)) <= 2


@pytest.mark.parametrize(
    ("request_", "error", "seconds"),
    [({"main": 1}, WorkerLate, 0.1), ({"die": 1}, WorkerDied, 60.0), ({"endless": 1}, WorkerDied, 60.0), ({"babble": 1}, WorkerDied, 60.0)],
)
def test_a_worker_that_fails_is_killed_and_replaced(pool: WorkerPool, request_: dict[str, int], error: type[Exception], seconds: float) -> None:
    pool.start()
    (before,) = pids(pool)
    with pytest.raises(error):
        pool.ask(request_, seconds)
    assert not alive(before)
    assert pool.ask({"html": "next"}, 60.0)["text"] == "next"


def test_a_worker_that_does_not_read_cannot_block_the_writer() -> None:
    pool = WorkerPool([sys.executable, "-c", "print('{}', flush=True); import time; time.sleep(600)"], size=1, start_deadline=60.0)
    with pytest.raises(WorkerLate):
        pool.ask({"html": "x" * 1_000_000}, 0.1)
    assert not pids(pool)


@pytest.mark.parametrize("script", ['print(\'{"error": "no library"}\')', "import sys; sys.exit(1)", "print('what')", "import time; time.sleep(600)"])
def test_a_worker_that_does_not_start_says_why(script: str) -> None:
    pool = WorkerPool([sys.executable, "-c", script], size=1, start_deadline=0.5)
    with pytest.raises(WorkerFailed, match="no library" if "error" in script else "did not start"):
        pool.start(0.5 if "sleep" in script else 60.0)
    assert not pids(pool)


def test_a_worker_killed_between_two_requests_is_replaced(pool: WorkerPool) -> None:
    pool.start()
    (before,) = pids(pool)
    worker = next(iter(pool._all))
    worker.process.kill()
    worker.process.wait()
    assert pool.ask({"html": "x"}, 60.0)["text"] == "x"
    assert before not in pids(pool)


def test_no_process_and_no_file_is_left(pool: WorkerPool) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pool.start()
        (pid,) = pids(pool)
        pool.close()
        pool.close()
        assert not alive(pid)
    assert len(os.listdir("/proc/self/fd")) == files
    forgotten = WorkerPool(pool.command, size=1, start_deadline=60.0)
    forgotten.start()
    (pid,) = pids(forgotten)
    del forgotten
    gc.collect()
    assert not alive(pid)


def test_a_worker_whose_answer_comes_after_closing_is_not_kept(pool: WorkerPool) -> None:
    worker = pool._take(60.0)
    pool.close()
    pool._give(worker)
    assert worker.process.returncode is not None and worker.process.stdin is not None and worker.process.stdin.closed
    assert not pool._idle


def test_closing_ends_a_running_request(pool: WorkerPool, tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    pool.start()
    (pid,) = pids(pool)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pool.ask, {"main": 1, "touch": str(arrived)}, 60.0)
        while not arrived.exists() and not running.done():
            threading.Event().wait(0.005)
        pool.close()
        assert isinstance(running.exception(), WorkerDied)
    assert not alive(pid) and not pids(pool)


class ScriptedPool:
    """Raises ``first`` for the main text and ``then`` for all text, where that is an exception."""

    def __init__(self, first: Exception, then: Exception | None):
        self.first, self.then = first, then
        self.asked: list[bool] = []

    def ask(self, request: dict[str, Any], seconds: float, *, patience: float) -> dict[str, Any]:
        self.asked.append(request["main"])
        if error := self.first if request["main"] else self.then:
            raise error
        return {"title": "", "text": "all of it", "links": [], "reader": "plain"}


@pytest.mark.parametrize("first", [WorkerLate(), WorkerDied()])
def test_a_page_that_is_too_much_for_the_first_reader_is_read_by_the_second(first: Exception) -> None:
    extractor = Extractor(main_text=False)
    extractor.main_text, extractor._pool = True, ScriptedPool(first, None)  # type: ignore[assignment]
    document, steady = extractor.extract(fetched("<p>x"))
    assert (document.text, document.reader, steady) == ("all of it", "plain", False), "and it is not steady: on an idle machine the first may be in time"


@pytest.mark.parametrize(("then", "kind"), [(WorkerLate(), "limit"), (WorkerDied(), "limit"), (WorkerFailed("busy"), "unavailable")])
def test_a_page_that_no_reader_reads_is_a_failure(then: Exception, kind: str) -> None:
    extractor = Extractor(main_text=False)
    extractor.main_text, extractor._pool = True, ScriptedPool(WorkerLate(), then)  # type: ignore[assignment]
    with pytest.raises(BrowseError) as caught:
        extractor.extract(fetched("<p>x"))
    assert caught.value.kind == kind


def test_memory_is_limited() -> None:
    extractor = Extractor(main_text=False, memory_mb=128, workers=1, timeout=60.0)
    extractor.start()
    page = Fetched("https://example.org/", "html", "utf-8", b"x" * 25_000_000, False)
    with pytest.raises(BrowseError) as caught:
        extractor.extract(page)
    assert caught.value.kind == "limit" and "128 MiB" in caught.value.text
    extractor.start()
    assert extractor.extract(fetched("<p>next"))[0].text == "next"
    extractor.close()


FORKED = """
import os, signal
from arpo_env.tools.browse import Extractor, Fetched
extractor = Extractor(main_text=False, timeout=60.0)
page = Fetched("https://example.org/", "html", "", b"<p>words", False)
extractor.start()
assert extractor.extract(page)[0].text == "words"
(parents,) = [worker.process.pid for worker in extractor._pool._all]
(pipe,) = [worker.process.stdin.fileno() for worker in extractor._pool._all]
with extractor._pool._lock:  # as another thread may at the moment of the fork
    child = os.fork()
if child == 0:
    status = 1
    signal.alarm(100)
    try:
        assert not os.path.exists(f"/proc/self/fd/{pipe}"), "or the parent's worker would outlive it"
        extractor.start()
        assert extractor.extract(page)[0].text == "words"
        assert [worker.process.pid for worker in extractor._pool._all] != [parents]
        extractor.close()
        os.kill(parents, 0)  # still there
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
assert extractor.extract(page)[0].text == "words"
assert [worker.process.pid for worker in extractor._pool._all] == [parents]
print(parents)
"""


def test_after_a_fork_of_the_host_both_have_workers_and_all_end_with_it() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(FORKED)], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert not alive(int(done.stdout))


def test_a_request_without_patience_waits_until_a_worker_is_free() -> None:
    """One worker, two requests: with patience the second gives up, without it waits its turn."""
    script = "print('{}', flush=True)\nfor line in iter(input, ''): print('1', flush=True)"
    with contextlib.closing(WorkerPool([sys.executable, "-c", script], size=1, start_deadline=60.0)) as pool:
        pool._slots.acquire()
        with pytest.raises(WorkerFailed, match="all 1 workers are busy"):
            pool.ask({}, 60.0, patience=0.01)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(pool.ask, {}, 60.0)
            pool._slots.release()
            assert waiting.result(60) == 1
