"""The Python tool on the monty interpreter: snapshots, limits, what it lacks, and that its end is not ours."""

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pydantic_monty")

from arpo_env.sandbox import SandboxError
from arpo_env.sandbox import monty as backend
from arpo_env.sandbox.monty import MontyPython, MontySession, close_workers
from arpo_env.sandbox.watch import CellResult
from arpo_env.testing import ToolConformance
from arpo_env.tools.python import PythonTool

ROOT = Path(__file__).parents[2]
UNDONE = "it was undone: all variables are as they were before it"


@pytest.fixture(scope="module", autouse=True)
def end_of_workers() -> Iterator[None]:
    yield
    close_workers()


@pytest.fixture
def session() -> MontySession:
    return MontyPython(memory_mb=64).open()


def run(session: MontySession, code: str, timeout: float = 5.0) -> CellResult:
    return session.exec(code, timeout=timeout, output_chars=2000)


def tool(**settings: float) -> PythonTool:
    return PythonTool(MontyPython(memory_mb=64), require="process", **settings)  # type: ignore[arg-type]


class DeterministicMonty(PythonTool):
    """Its cells read no clock, so the kit may compare."""

    deterministic = True


class TestMontyTool(ToolConformance):
    calls = ({"code": "import random\nx = [random.random()]"}, {"code": "x.append(2)\nprint(len(x))"}, {"code": "x, random.random()"})

    def make_tool(self) -> PythonTool:
        return DeterministicMonty(MontyPython(memory_mb=64), require="process")


# -- cells -------------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("x = 1\nx + 1", "2"),
        ("x = 3; x  # the value", "3"),
        ("(1,\n 2) ;", "(1, 2)"),
        ("'é'; ('é',\n x)", "('é', 'before')"),
        (r"'\d\'', 'a\\'", r"('\\d\'', 'a\\')".replace(r"'\\d\''", '"\\\\d\'"')),
        ("None", None),
        ("x = 4", None),
        ("# nothing", None),
        ("def f(): pass\nf", "<function 'f' at"),
        ("class R:\n    def __repr__(self): return 'mine'\nR()", "mine"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nP(1)", "P(x=1)"),
        ("[1] * 3 if x else 0", "[1, 1, 1]"),
    ],
)
def test_the_last_expression_is_shown_as_the_interpreter_shows_it(session: MontySession, code: str, value: str | None) -> None:
    run(session, "x = 'before'")
    cell = run(session, code)
    assert (cell.status, cell.kept) == ("ok", True), cell.error
    assert cell.result == value or (value is not None and cell.result is not None and value.endswith("at") and cell.result.startswith(value))


def test_output_of_both_streams_in_order(session: MontySession) -> None:
    cell = run(session, "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c', end='')\n1 / 0")
    assert cell.output == "a\nb\nc"
    assert cell.error.splitlines()[-3:] == ['  File "<python-input-0>", line 5, in <module>', "    1 / 0", "ZeroDivisionError: division by zero"]


def test_a_traceback_shows_the_cells_own_lines(session: MontySession) -> None:
    error = run(session, "def f():\n    return 1 / 0\nf()").error
    assert [line.strip() for line in error.splitlines() if not line.startswith("  File")] == [
        "Traceback (most recent call last):",
        "f()",
        "return 1 / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert "lambda" not in run(session, "1 / 0").error
    assert "lambda" not in run(session, "class R:\n    def __repr__(self): return 1 / 0\nR()").error


def test_exit_is_a_success_and_keeps_the_state(session: MontySession) -> None:
    run(session, "x = 1")
    assert run(session, "print('bye')\nraise SystemExit").status == "ok"
    assert run(session, "x").result == "1"


@pytest.mark.parametrize(
    "code", ["import numpy", "class B(dict):\n    pass", "def g():\n    yield 1", "del x", "open('f').read()", "from collections import OrderedDict"]
)
def test_what_the_interpreter_lacks_is_an_error_that_says_so(session: MontySession, code: str) -> None:
    cell = run(session, code)
    assert (cell.status, cell.kept) == ("exception", True)
    assert "[This interpreter has a part of Python only. It lacks class inheritance, generators" in cell.error


def test_an_ordinary_error_says_nothing_of_lacks(session: MontySession) -> None:
    assert "part of Python" not in run(session, "undefined").error


@pytest.mark.parametrize(
    "code", ["def broken(:", "x = '\ud800'", "\x00", "(" * 5000, "a" + ".b" * 40_000, "-" * 90_000 + "1", "0" * 200_000 + ".a", "'''", r"'\x'"]
)
def test_hostile_source_is_a_bounded_error(session: MontySession, code: str) -> None:
    run(session, "x = 1")
    cell = run(session, code)
    assert (cell.status, cell.kept) == ("exception", True)
    assert len(cell.error) < 2100
    assert run(session, "x").result == "1"


def test_source_that_is_too_long_to_look_into_still_runs(session: MontySession) -> None:
    assert run(session, "x = 1\n" + "#" * 200_000 + "\nx").status == "ok"
    assert run(session, "x").result == "1"


# -- limits ------------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["x = 2\nwhile True: pass", "x = 2\nsum(range(10**12))", "x = 2\ntry:\n    while True: pass\nexcept BaseException: pass"])
def test_a_timeout_undoes_the_cell(session: MontySession, code: str) -> None:
    run(session, "x = 1", 0.3)
    cell = run(session, code, 0.3)
    assert (cell.status, cell.kept) == ("timeout", True)
    assert cell.error == f"TimeoutError: the cell ran longer than 0.3 s and was stopped; {UNDONE}"
    assert run(session, "x", 0.3).result == "1"


def test_a_timeout_that_the_code_raises_is_its_own(session: MontySession) -> None:
    cell = run(session, "x = 2\nraise TimeoutError('feed time limit exceeded')")
    assert cell.status == "exception" and run(session, "x").result == "2"


def test_the_time_limit_of_a_session_is_that_of_its_first_cell(session: MontySession) -> None:
    run(session, "1", 5.0)
    with pytest.raises(ValueError, match=r"have 5.0 s each, since its first; got 6.0 s"):
        run(session.fork(), "1", 6.0)


@pytest.mark.parametrize(
    "code",
    ["y = 2\n'a' * 10**9", "y = 2\n[0] * 10**8", "y = 2\nx = []\nwhile True: x.append('a' * 1000)", "y = 2\nx = ['a' * 1000 + str(i) for i in range(50_000)]"],
)
def test_memory_is_limited_and_a_cell_beyond_it_undone(session: MontySession, code: str) -> None:
    run(session, "y = 1")
    cell = run(session, code)
    assert (cell.status, cell.kept) == ("limit", True) and "MemoryError" in cell.error and cell.error.endswith(UNDONE)
    assert run(session, "y").result == "1"


def test_the_notice_of_the_tool_names_the_limit() -> None:
    assert tool().call(code="'a' * 10**9").text.endswith("[Limits: 64 MiB of memory.]")


def test_a_flood_of_output_is_stopped_and_undone(session: MontySession) -> None:
    run(session, "x = 1", 60.0)
    cell = run(session, "x = 2\nwhile True: print('a' * 1000)", 60.0)  # were the worker not killed, it would print for a minute
    assert (cell.status, cell.kept) == ("limit", True)
    assert cell.error == f"the cell wrote more than 16 MiB of output and was stopped; {UNDONE}" and len(cell.output) < 2100
    assert run(session, "x", 60.0).result == "1"


def test_the_end_of_a_worker_is_a_result_and_undoes_the_cell(session: MontySession, monkeypatch: pytest.MonkeyPatch) -> None:
    run(session, "x = 1", 60.0)
    original = backend._Cell._print

    def kill(self: backend._Cell, stream: str, text: str) -> None:
        original(self, stream, text)
        assert self.worker is not None
        os.kill(self.worker, signal.SIGKILL)

    monkeypatch.setattr(backend._Cell, "_print", kill)
    cell = run(session, "x = 2\nprint('bye')\nwhile True: pass", 60.0)
    monkeypatch.undo()
    assert (cell.status, cell.kept, cell.output) == ("died", True, "bye\n") and cell.error.endswith(UNDONE)
    assert run(session, "x", 60.0).result == "1"


def test_sleep_does_not_sleep(session: MontySession) -> None:
    assert run(session, "import time\ntime.sleep(1e6)\n1").result == "1"


# -- forks, episodes, ends ---------------------------------------------------------------------------------------------------------------------------------


def test_a_fork_goes_its_own_way_and_draws_the_same_numbers(session: MontySession) -> None:
    run(session, "import random\nrandom.random()\nx = [1]")
    twin = session.fork()
    assert run(twin, "x.append(2)\nx").result == "[1, 2]"
    assert run(session, "x").result == "[1]"
    assert run(session, "random.random()").result == run(twin, "random.random()").result
    session.close()
    assert run(twin, "x").result == "[1, 2]"
    with pytest.raises(SandboxError, match="closed"):
        session.fork()
    with pytest.raises(SandboxError, match="closed"):
        run(session, "1")


def test_equal_sessions_draw_equal_numbers() -> None:
    first, second = MontyPython().open(), MontyPython().open()
    assert run(first, "import random\nrandom.random()").result == run(second, "import random\nrandom.random()").result


def test_many_sessions_share_few_workers() -> None:
    few = PythonTool(MontyPython(workers=1), require="process")
    tools = [few.bind() for _ in range(20)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pair: pair[1].call(code=f"x = {pair[0]}"), enumerate(tools)))
        texts = list(threads.map(lambda made: made.call(code="x").text, tools))
    assert texts == [str(number) for number in range(20)]


def test_close_from_another_thread_ends_a_running_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = tool(timeout=100.0).bind()
    started = threading.Event()
    original = backend._Cell._print

    def note(self: backend._Cell, stream: str, text: str) -> None:
        original(self, stream, text)
        started.set()

    monkeypatch.setattr(backend._Cell, "_print", note)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(bound.call, code="print('started')\nwhile True: pass")
        assert started.wait(60)
        bound.close()
        assert running.result().error == "died"
    with pytest.raises(SandboxError, match="closed"):
        bound.call(code="1")


def test_no_worker_to_be_had_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    close_workers()
    for broken in ("/bin/false", "/no/such/monty"):
        monkeypatch.setenv("MONTY_BIN", broken)
        with pytest.raises(SandboxError, match="the monty interpreter did not start"):
            tool().bind()
        result = tool().call(code="1")
        assert (result.error, result.state) == ("unavailable", "kept")
    monkeypatch.undo()
    assert tool().bind().call(code="1").text == "1"


def test_the_model_is_told_what_it_has_to_do_with() -> None:
    assert "lacks class inheritance, generators" in tool().description and tool().schema()["function"]["description"] == tool().description


def test_isolation_and_settings() -> None:
    report = tool().isolation()
    assert report.level == "language" and set(report.kept) == set(report.guarantees)
    assert "a flaw in the interpreter would run as this user" in str(report)
    settings = tool(timeout=3.0).settings()
    assert settings["backend"] == "monty" and settings["memory_mb"] == 64 and settings["timeout"] == 3.0 and settings["version"]
    assert pickle.loads(pickle.dumps(tool(timeout=3.0))).call(code="1 + 1").text == "2"


def test_settings_that_cannot_work_raise_at_once() -> None:
    with pytest.raises(ValueError, match="memory_mb must be at least 1, got 0"):
        MontyPython(memory_mb=0)
    with pytest.raises(ValueError, match="workers must be at least 1 or None, got 0"):
        MontyPython(workers=0)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[monty\]'"):
        MontyPython()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open to wait for a process that is not a child")
def test_no_worker_outlives_its_host() -> None:
    code = """
import os
from arpo_env.sandbox import monty
session = monty.MontyPython(workers=1).open()
class Spy(monty._Cell):
    def run(self, repl, before):
        print(repl.worker_pid, flush=True)
        return super().run(repl, before)
monty._Cell = Spy
session.exec("1", timeout=5.0, output_chars=100)
input()
"""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    host = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None and host.stdin is not None
    worker = os.pidfd_open(int(host.stdout.readline()))
    host.kill()
    host.wait()
    host.stdin.close()
    host.stdout.close()
    assert select.select([worker], [], [], 60)[0], "the worker lives on"
    os.close(worker)
