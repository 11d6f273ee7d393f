"""The Python tool: results, loss and recovery, forks, isolation asked for."""

import copy
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arpo_env.sandbox import (
    ForkRefused,
    IsolationError,
    IsolationReport,
    IsolationWarning,
    Pool,
    SandboxError,
    Session,
    SessionLost,
    close_pools,
    isolation,
    probe,
    shared_pool,
)
from arpo_env.sandbox.backend import LocalPython
from arpo_env.sandbox.watch import CellResult, Watch
from arpo_env.testing import ToolConformance
from arpo_env.tools.base import ToolResult, check_arguments, check_tool
from arpo_env.tools.python import PythonTool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local sandbox needs Linux")
ROOT = Path(__file__).parents[2]


def prototype(memory_mb: int = 1024, **settings: Any) -> PythonTool:
    return PythonTool(LocalPython(imports=(), memory_mb=memory_mb), **{"require": "process", **settings})


@pytest.fixture(scope="module", autouse=True)
def end_of_sandboxes() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture
def tool() -> Iterator[PythonTool]:
    bound = prototype().bind()
    yield bound
    bound.close()


def pool_of(tool: PythonTool) -> Pool:
    assert isinstance(tool.backend, LocalPython)
    return shared_pool(tool.backend.imports, tool.backend.limits)


def sessions(tool: PythonTool) -> int:
    return pool_of(tool).open_sessions


class DeterministicPython(PythonTool):
    """Its cells read no clock, so the kit may compare."""

    deterministic = True


class TestLocalTool(ToolConformance):
    calls = ({"code": "import random\nx = [random.random()]"}, {"code": "x.append(2)\nprint(len(x))"}, {"code": "x, random.random()"})

    def make_tool(self) -> PythonTool:
        return DeterministicPython(LocalPython(imports=()), require="process")


# -- what the model reads --------------------------------------------------------------------------------------------------------------------------------


def test_the_contract_of_a_tool_holds(tool: PythonTool) -> None:
    check_tool(tool)
    assert tool.main_argument == "code" and tool.fork_support == "native" and tool.stateful
    assert tool.schema()["function"]["name"] == "python"
    assert check_arguments(tool, {"code": 3}) is not None
    # The environment's deadline lies beyond ours by more than the second of grace that an interrupted cell has.
    assert tool.timeout == tool.cell_timeout + 5.0


def test_state_output_and_value(tool: PythonTool) -> None:
    assert tool.call(code="x = 6") == ToolResult(text="(no output)", state="kept")
    assert tool.call(code="print('a')\nx * 7") == ToolResult(text="a\n42", state="kept")
    assert tool.call(code="print('a', end='')\n'b'").text == "a\n'b'"


def test_an_exception_is_a_result_with_its_traceback(tool: PythonTool) -> None:
    result = tool.call(code="print('before')\n1 / 0")
    assert (result.ok, result.error, result.state) == (False, "exception", "kept")
    assert result.text.startswith("before\nTraceback") and result.text.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("code", ["", "  \n\t"])
def test_empty_code_is_the_models_mistake_and_starts_nothing(tool: PythonTool, code: str) -> None:
    result = tool.call(code=code)
    assert (result.ok, result.error, result.state) == (False, "bad_arguments", "none")
    assert "empty" in result.text
    assert tool._session is None
    tool.call(code="x = 1")
    assert tool.call(code=code).state == "kept"


@pytest.mark.parametrize("code", ["runs += 1", "runs += 1\n1 / 0", "runs += 1\nimport time\ntime.sleep(1000)", "runs += 1\nbytearray(1 << 33)"])
def test_a_cell_runs_once_whatever_comes_of_it(code: str) -> None:
    bound = prototype(timeout=0.3).bind()
    bound.call(code="runs = 0")
    bound.call(code=code)
    assert bound.call(code="runs").text == "1"
    bound.close()


def test_kinds_of_failure(tool: PythonTool) -> None:
    short = prototype(timeout=0.2, memory_mb=128).bind()
    short.call(code="x = 1")
    timeout = short.call(code="import time\ntime.sleep(1000)")
    assert (timeout.error, timeout.state) == ("timeout", "kept") and "longer than 0.2 s" in timeout.text
    memory = short.call(code="bytearray(1 << 30)")
    assert (memory.error, memory.state) == ("limit", "kept") and memory.text.endswith("[Limits: 128 MiB of memory, 256 MiB a file.]")
    assert short.call(code="x").text == "1"
    short.close()


def test_after_a_loss_the_next_call_is_fresh_and_says_so(tool: PythonTool) -> None:
    tool.call(code="x = 1; open('f', 'w').close()")
    died = tool.call(code="import os\nprint('bye')\nos._exit(3)")
    assert (died.ok, died.error, died.state) == (False, "died", "lost")
    assert died.text == "bye\nThe interpreter ended (exit status 3). All variables and files are lost; the next call starts a fresh interpreter."
    fresh = tool.call(code="import os\n'x' in globals(), os.listdir()")
    assert (fresh.ok, fresh.state) == (True, "kept")
    assert fresh.text.splitlines() == [
        "[The interpreter of the calls before was lost (the interpreter ended (exit status 3)). "
        "This one is fresh: variables, imports and files of before are gone.]",
        "(False, [])",
    ]
    assert tool.call(code="1").text == "1"


def test_an_interpreter_that_ends_between_calls(tool: PythonTool) -> None:
    tool.call(code="x = 1")
    session = tool._session
    assert isinstance(session, Session)
    pidfd = os.pidfd_open(session.pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    gone = tool.call(code="print('ran')")
    os.close(pidfd)
    assert (gone.error, gone.state) == ("died", "lost")
    assert "ran" not in gone.text.replace("ran.", "")
    assert tool.call(code="'x' in globals()").text.endswith("False")


def test_output_is_bounded_and_readable() -> None:
    bound = prototype(output_chars=200).bind()
    text = bound.call(code="print('s' * 10**6)\n'v' * 10**6").text
    assert len(text) < 500 and text.startswith("sss") and text.endswith("v'") and text.count("left out") == 2
    surrogate = bound.call(code="'\\ud800'.join('ab'), print('\\ud800')").text
    assert surrogate.encode("utf-8")
    raised = bound.call(code="raise ValueError('\\ud800')").text
    assert raised.encode("utf-8") and "ud800" in raised
    bound.close()


def test_a_sandbox_that_cannot_start_stops_the_first_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = prototype(memory_mb=201)
    fds = len(os.listdir("/proc/self/fd"))
    for broken in ("/bin/false", "/no/such/python"):
        monkeypatch.setattr(sys, "executable", broken)
        with pytest.raises(SandboxError, match="the sandbox did not start"):
            proto.bind()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_sandbox_that_is_gone_later_is_infrastructure_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = prototype(memory_mb=202).bind()
    pool = pool_of(bound)
    zygote = os.pidfd_open(pool.pid)
    signal.pidfd_send_signal(zygote, signal.SIGKILL)
    select.select([zygote], [], [])
    os.close(zygote)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = bound.call(code="x = 1")
    assert (result.ok, result.error, result.state) == (False, "unavailable", "none")
    monkeypatch.undo()
    assert bound.call(code="x = 1").text == "(no output)"
    bound.close()


def test_another_system_can_import_it_and_is_told_at_construction() -> None:
    code = """
import sys
sys.modules["resource"] = sys.modules["fcntl"] = None
from arpo_env.sandbox import IsolationError
from arpo_env.tools.python import PythonTool
sys.platform = "win32"
try:
    PythonTool()
except IsolationError as error:
    print(error)
"""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert "needs Linux" in done.stdout and "win32" in done.stdout


# -- episodes and forks ------------------------------------------------------------------------------------------------------------------------------------


def test_a_prototype_starts_nothing_and_episodes_share_nothing() -> None:
    proto = prototype()
    first, second = proto.bind(), proto.bind()
    assert proto._session is first._session is second._session is None
    first.call(code="x = 'first'; open('f', 'w').write('first')")
    assert second.call(code="import os\n'x' in globals(), os.listdir()").text == "(False, [])"
    assert proto._session is None
    first.close()
    assert second.call(code="1").text == "1"
    second.close()


def test_a_fork_goes_its_own_way(tool: PythonTool) -> None:
    tool.call(code="import random\nx = [1]\nrandom.seed(3)")
    twin = tool.fork()
    twin.call(code="x.append(2)")
    assert (tool.call(code="x").text, twin.call(code="x").text) == ("[1]", "[1, 2]")
    assert tool.call(code="random.random()") == twin.call(code="random.random()")
    deep = copy.deepcopy(twin)
    twin.close()
    assert deep.call(code="x").text == "[1, 2]"
    deep.close()


def test_a_fork_before_the_first_call_copies_nothing(tool: PythonTool) -> None:
    twin = tool.fork()
    assert tool._session is twin._session is None
    tool.call(code="x = 1")
    assert twin.call(code="'x' in globals()").text == "False"
    twin.close()


def test_a_fork_after_a_loss_is_told_too(tool: PythonTool) -> None:
    tool.call(code="import os\nos._exit(0)")
    twin = tool.fork()
    for made in (tool, twin):
        assert made.call(code="1").text.startswith("[The interpreter of the calls before was lost")
    tool.call(code="x = 1")
    session = tool._session
    assert isinstance(session, Session)
    os.kill(session.pid, signal.SIGKILL)
    while session.alive:
        pass
    late = tool.fork()
    for made in (tool, late):
        assert made.call(code="'x' in globals()").text.endswith("gone.]\nFalse")
    for made in (twin, late):
        made.close()


def test_threads_in_the_interpreter_refuse_a_fork(tool: PythonTool) -> None:
    tool.call(code="import threading\ne = threading.Event()\nthreading.Thread(target=e.wait, name='poller').start()")
    with pytest.raises(ForkRefused, match="poller"):
        tool.fork()
    tool.call(code="e.set()")


def test_many_instances_and_forks_from_many_threads(tool: PythonTool) -> None:
    tool.call(code="x = 0")

    def branch(number: int) -> tuple[str, str]:
        twin, other = tool.fork(), tool.bind()
        try:
            twin.call(code=f"x += {number}")
            return twin.call(code="x").text, other.call(code=f"{number} * 2").text
        finally:
            twin.close()
            other.close()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(branch, range(16))) == [(str(n), str(2 * n)) for n in range(16)]
    assert tool.call(code="x").text == "0"


def test_nothing_is_left_after_close_and_close_is_idempotent(tool: PythonTool) -> None:
    tool.call(code="x = 1")
    before = sessions(tool)
    twins = [tool.fork() for _ in range(5)]
    assert sessions(tool) == before + 5
    for twin in twins:
        twin.close()
        twin.close()
    assert sessions(tool) == before
    with pytest.raises(SandboxError, match="closed"):
        twins[0].call(code="1")
    with pytest.raises(SandboxError, match="closed"):
        twins[0].fork()


def test_an_instance_that_is_dropped_leaves_nothing(tool: PythonTool) -> None:
    tool.call(code="x = 1")
    before = sessions(tool)
    tool.fork()  # never closed
    gc.collect()
    assert sessions(tool) == before


def test_close_from_another_thread_ends_a_running_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = prototype(timeout=100.0).bind()
    bound.call(code="x = 1")
    sent, watch = threading.Event(), Watch.run

    def run(self: Watch) -> CellResult:
        sent.set()
        return watch(self)

    monkeypatch.setattr(Watch, "run", run)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(bound.call, code="while True: pass")
        assert sent.wait(60)
        bound.close()
        assert running.result().error == "died"
    with pytest.raises(SandboxError, match="closed"):
        bound.call(code="1")


def test_a_prototype_can_be_pickled_a_running_session_cannot(tool: PythonTool) -> None:
    again = pickle.loads(pickle.dumps(prototype(timeout=3.0)))
    assert (again.cell_timeout, again.call(code="1 + 1").text) == (3.0, "2")
    again.close()
    tool.call(code="x = 1")
    with pytest.raises(TypeError, match="state lives in a process"):
        pickle.dumps(tool)


# -- isolation ---------------------------------------------------------------------------------------------------------------------------------------------


class Weak(LocalPython):
    """Gives the weakest level, whatever this machine offers."""

    def isolation(self) -> IsolationReport:
        return IsolationReport(level="process", missing={"host files unwritable": "cells run as this user"})


def test_a_level_that_is_not_to_be_had_raises_at_construction() -> None:
    with pytest.raises(IsolationError, match=r"'namespaces' was required, Weak\(.*gives 'process' here\n(.*\n)+.*unwritable"):
        PythonTool(Weak(), require="namespaces")
    PythonTool(Weak(), require="process")
    with pytest.raises(ValueError, match="require must be None or one of 'process'"):
        prototype(require="full")


def test_a_weak_level_warns_once_and_names_what_is_not_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_warned", threading.Event())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PythonTool(Weak(), require="process")
        assert caught == []
        PythonTool(Weak())
        PythonTool(Weak())
    assert [w.category for w in caught] == [IsolationWarning]
    assert caught[0].filename == __file__
    assert "host files unwritable: cells run as this user" in str(caught[0].message)


def test_the_report_names_every_guarantee_once() -> None:
    report = prototype().isolation()
    assert report == probe()
    assert set(report.kept) | set(report.missing) == set(report.guarantees) and not set(report.kept) & set(report.missing)
    assert str(report).count("NO   ") == len(report.missing)


def test_a_pool_gives_what_the_probe_promised(tool: PythonTool) -> None:
    tool.call(code="1")
    assert pool_of(tool).report == probe()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"timeout": 0}, "timeout must be positive"),
        ({"timeout": float("inf")}, "finite"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"output_chars": 5}, "output_chars"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        prototype(**settings)


def test_imports_are_names_not_one_name() -> None:
    with pytest.raises(TypeError, match="imports must be a tuple of module names, got the string 'numpy'"):
        LocalPython(imports="numpy")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["local", LocalPython])
def test_a_backend_is_an_object(backend: Any) -> None:
    with pytest.raises(TypeError, match=r"backend must be a PythonBackend, such as LocalPython\(\), got"):
        PythonTool(backend)


def test_what_results_depend_on_is_told_as_json() -> None:
    bound = prototype(memory_mb=512, timeout=3.0).bind()
    expected = {"backend": "local", "imports": [], "memory_mb": 512, "timeout": 3.0, "output_chars": 8000, "transactional": False}
    assert json.loads(json.dumps(bound.settings())) == expected == bound.fork().settings()


# -- copies before each call -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "why"),
    [("os._exit(3)", "exit status 3"), ("os.kill(os.getpid(), 9)", "signal 9"), ("import ctypes\nctypes.string_at(0)", "signal 11")],
)
def test_a_call_that_loses_the_interpreter_is_undone(end: str, why: str) -> None:
    bound = prototype(transactional=True, timeout=60.0, memory_mb=302).bind()
    bound.call(code="import random\nrandom.seed(1)\nx = 1\nopen('f', 'w').write('1')")
    twin = bound.fork()
    result = bound.call(code=f"import os\nx = 2\nopen('f', 'w').write('2')\nprint('bye', flush=True)\n{end}")
    assert (result.ok, result.error, result.state) == (False, "died", "kept")
    assert result.text.startswith(f"bye\nThe interpreter ended ({why}")
    assert result.text.endswith("The call was undone: all variables and files are as they were before it.")
    for made in (bound, twin):
        assert made.call(code="x, open('f').read()").text == "(1, '1')"
    assert bound.call(code="random.random()") == twin.call(code="random.random()")
    twin.close()
    bound.close()
    assert sessions(bound) == 0


def test_a_call_that_keeps_the_interpreter_is_not_undone_and_leaves_no_copy() -> None:
    bound = prototype(transactional=True, memory_mb=300).bind()
    bound.call(code="x = 1")
    assert bound.call(code="x = 2\n1 / 0").error == "exception"
    assert bound.call(code="x").text == "2"
    assert sessions(bound) == 1
    bound.close()
    assert sessions(bound) == 0


def test_where_there_can_be_no_copy_a_loss_says_why() -> None:
    bound = prototype(transactional=True).bind()
    bound.call(code="import threading\ne = threading.Event()\nthreading.Thread(target=e.wait, name='poller', daemon=True).start()")
    result = bound.call(code="import os\nos._exit(0)")
    assert result.state == "lost" and "No copy of before the call was kept: " in result.text and "poller" in result.text
    assert bound.call(code="1").text.startswith("[The interpreter of the calls before was lost")
    bound.close()


class Scripted:
    """A session whose cells give ``result``, after ``close`` where it is None; its copies are remembered."""

    alive = True

    def __init__(self, result: CellResult | None):
        self.result = result
        self.copies: list[Scripted] = []
        self.running, self.closed = threading.Event(), threading.Event()

    def exec(self, code: str, *, timeout: float, output_chars: int) -> CellResult:
        self.running.set()
        if self.result is None:
            assert self.closed.wait(60)
        return self.result or CellResult(status="died", error="it ended", kept=False)

    def fork(self) -> "Scripted":
        self.copies.append(Scripted(CellResult(status="ok", result="'from the copy'")))
        return self.copies[-1]

    def close(self) -> None:
        self.closed.set()


def test_a_call_that_was_killed_at_its_deadline_is_undone_too() -> None:
    bound = prototype(transactional=True).bind()
    first = bound._session = Scripted(CellResult(status="timeout", error="TimeoutError: too long", kept=False))
    result = bound.call(code="1")
    assert (result.error, result.state) == ("timeout", "kept") and result.text.startswith("TimeoutError: too long. The call was undone")
    assert first.closed.is_set() and bound.call(code="1").text == "'from the copy'"
    assert bound._session is first.copies[0]
    assert first.copies[0].copies[0].closed.is_set(), "the copy of before a call that went well is dropped"


def test_a_session_that_ends_before_the_code_runs_is_replaced_by_its_copy() -> None:
    class Gone(Scripted):
        def exec(self, code: str, *, timeout: float, output_chars: int) -> CellResult:
            raise SessionLost("its machine is gone")

    bound = prototype(transactional=True).bind()
    gone = bound._session = Gone(None)
    result = bound.call(code="1")
    assert (result.error, result.state) == ("died", "kept")
    assert result.text == "Its machine is gone. The code was not run: all variables and files are as they were."
    assert gone.closed.is_set() and bound.call(code="1").text == "'from the copy'"


def test_close_during_a_transactional_call_ends_its_copy_too() -> None:
    bound = prototype(transactional=True).bind()
    session = bound._session = Scripted(None)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(bound.call, code="1")
        assert session.running.wait(60)
        bound.close()
        assert running.result().error == "died"
    assert [copy.closed.is_set() for copy in session.copies] == [True] and bound._session is None


# -- many at once ------------------------------------------------------------------------------------------------------------------------------------------


def test_many_copies_at_once(tool: PythonTool) -> None:
    tool.call(code="x = [0]")
    twins = tool.fork_many(3)
    for number, twin in enumerate(twins):
        twin.call(code=f"x.append({number})")
    assert [twin.call(code="x").text for twin in twins] == ["[0, 0]", "[0, 1]", "[0, 2]"]
    assert tool.call(code="x").text == "[0]"
    assert tool.fork_many(0) == []
    for twin in twins:
        twin.close()


class Reluctant:
    """A session that cannot be reached, and can be copied ``room`` times."""

    alive = True

    def __init__(self, room: int, error: SandboxError | None = None):
        self.room = room
        self.error = error or SandboxError("the line is busy")
        self.copies: list[Reluctant] = []
        self.closed = False

    def exec(self, code: str, *, timeout: float, output_chars: int) -> CellResult:
        raise self.error

    def fork(self) -> "Reluctant":
        if len(self.copies) == self.room:
            raise SandboxError("no room")
        self.copies.append(Reluctant(0))
        return self.copies[-1]

    def close(self) -> None:
        self.closed = True


def test_all_copies_or_none(tool: PythonTool) -> None:
    session = tool._session = Reluctant(2)
    with pytest.raises(SandboxError, match="no room"):
        tool.fork_many(3)
    assert [copy.closed for copy in session.copies] == [True, True] and not session.closed


def test_code_that_could_not_be_sent_is_infrastructure_and_keeps_the_state(tool: PythonTool) -> None:
    tool._lost = "why"
    session = tool._session = Reluctant(0)
    result = tool.call(code="1")
    assert (result.ok, result.error, result.state) == (False, "unavailable", "kept")
    assert "the code was not run: the line is busy" in result.text
    assert tool._session is session and tool._lost == "why"  # the notice of the loss waits for a result that is shown


def test_a_session_that_is_gone_is_replaced_and_the_loss_told_twice(tool: PythonTool) -> None:
    session = tool._session = Reluctant(0, SessionLost("it ended between two calls"))
    result = tool.call(code="1")
    assert (result.error, result.state) == ("died", "lost") and result.text.startswith("It ended between two calls. The code was not run. All variables")
    assert session.closed and tool.call(code="1").text.startswith("[The interpreter of the calls before was lost (it ended between two calls).")
