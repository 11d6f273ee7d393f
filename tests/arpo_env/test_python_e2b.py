"""The Python tool on E2B: the real SDK against a server on this machine, and once against the service where there is a key."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("E2B_CONNECTION_RETRIES", "0")  # read when the SDK is imported; a refused connection is then refused at once
pytest.importorskip("e2b_code_interpreter")
if not sys.platform.startswith("linux"):
    pytest.skip("the interpreters behind the server are those of the local sandbox", allow_module_level=True)

from fake_e2b_server import KEY, FakeE2B, answer, fake_e2b, flood, hang_up, lines, run_then_hang_up, stall, vanish

import arpo_env
from arpo_env.sandbox import SandboxError, SessionLost, close_pools, e2b, e2b_machines
from arpo_env.sandbox import e2b_cell as cells
from arpo_env.sandbox.e2b import E2BPython, E2BSession
from arpo_env.sandbox.watch import CellResult
from arpo_env.testing import ToolConformance
from arpo_env.tools.python import PythonTool

ROOT = Path(__file__).parents[2]
REAL_KEY = os.environ.get("E2B_API_KEY")
LONG = 60.0


@pytest.fixture(scope="module", autouse=True)
def end_of_sandboxes() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeE2B]:
    """A service of its own for each test; at its end nothing may be left at it."""
    with fake_e2b() as running:
        for name, value in {"E2B_API_KEY": KEY, "E2B_API_URL": running.url, "E2B_SANDBOX_URL": running.url}.items():
            monkeypatch.setenv(name, value)
        e2b._spares.clear()
        yield running
        for spare in filter(None, e2b._spares.values()):
            spare.close()
        e2b._spares.clear()
        e2b_machines.end_all()
        assert running.sandboxes == {}, "machines were left at the service"
        assert e2b_machines.counts().living == 0


@pytest.fixture
def session(server: FakeE2B) -> Iterator[E2BSession]:
    opened = E2BPython().open()
    yield opened
    opened.close()


def run(session: E2BSession, code: str, timeout: float = LONG) -> CellResult:
    return session.exec(code, timeout=timeout, output_chars=2000)


def tool(timeout: float = LONG, **settings: Any) -> PythonTool:
    return PythonTool(E2BPython(**settings), timeout=timeout)


class DeterministicE2B(PythonTool):
    """Its cells read no clock, so the kit may compare."""

    deterministic = True


class TestE2BTool(ToolConformance):
    calls = ({"code": "import random\nx = [random.random()]"}, {"code": "x.append(2)\nprint(len(x))"}, {"code": "x, random.random()"})

    def make_tool(self) -> PythonTool:
        return DeterministicE2B(E2BPython(), timeout=LONG)


# -- cells -------------------------------------------------------------------------------------------------------------------------------------------------


def test_state_output_and_value(session: E2BSession) -> None:
    assert run(session, "x = 6") == CellResult(status="ok")
    assert run(session, "print('a')\nx * 7") == CellResult(status="ok", output="a\n", result="42")


def test_both_streams_in_order_and_what_is_displayed(session: E2BSession, server: FakeE2B) -> None:
    out, err = ({"type": kind, "text": f"{kind}\n", "timestamp": 0} for kind in ("stdout", "stderr"))
    shown, value = {"type": "result", "text": "<table>", "is_main_result": False}, {"type": "result", "text": "3", "is_main_result": True}
    server.faults["execute"].append(lines(out, err, out, shown, {"type": "keepalive"}, value))
    assert run(session, "1") == CellResult(status="ok", output="stdout\nstderr\nstdout\n<table>\n", result="3")


def test_an_exception_has_a_plain_traceback(session: E2BSession) -> None:
    cell = run(session, "print('before')\n1 / 0")
    assert (cell.status, cell.kept, cell.output) == ("exception", True, "before\n")
    assert cell.error.splitlines() == [
        "Traceback (most recent call last):",
        "Cell In[1], line 1",
        "----> 1 code",
        "ZeroDivisionError: division by zero",
    ]


def test_exit_is_a_success_and_memory_a_limit(session: E2BSession) -> None:
    run(session, "x = 1")
    assert run(session, "import sys\nsys.exit()").status == "ok"
    assert run(session, "import sys\nsys.exit(3)").status == "exception"
    assert run(session, "bytearray(1 << 33)").status == "limit"
    assert run(session, "x").result == "1"


def test_results_are_bounded(session: E2BSession) -> None:
    cell = session.exec("print('o' * 10_000)\n'v' * 10_000", timeout=LONG, output_chars=200)
    assert cell.result is not None
    assert max(len(cell.output), len(cell.result)) < 300 and "left out" in cell.output and "left out" in cell.result


def test_equal_sessions_draw_equal_numbers(session: E2BSession) -> None:
    other = E2BPython().open()
    code = "import random, numpy\nrandom.random(), numpy.random.rand()"
    assert run(session, code) == run(other, code)
    other.close()


# -- forks -------------------------------------------------------------------------------------------------------------------------------------------------


def test_three_copies_in_one_request_go_their_own_ways(server: FakeE2B) -> None:
    bound = tool().bind()
    bound.call(code="x = [0]")
    twins = bound.fork_many(3)
    for number, twin in enumerate(twins):
        twin.call(code=f"x.append({number})")
    bound.close()
    assert [twin.call(code="x").text for twin in twins] == ["[0, 0]", "[0, 1]", "[0, 2]"]
    assert server.asked("fork") == 1 and server.started == 4
    for twin in twins:
        twin.close()


def test_an_environment_forks_n_times_in_one_request(server: FakeE2B) -> None:
    env = arpo_env.ToolEnv([{"question": "?", "answer": "1"}], tools=[tool()])
    env.reset(seed=0)
    env.step("<python>x = 1</python>")
    twins = arpo_env.fork(env, 3)
    assert server.asked("fork") == 1 and len(server.sandboxes) == 4
    assert [twin.step(f"<python>x + {number}</python>")[0].count(str(1 + number)) for number, twin in enumerate(twins)] == [1, 1, 1]
    for each in (env, *twins):
        each.close()
    assert server.sandboxes == {}


def test_more_copies_than_one_request_may_ask_for(session: E2BSession, server: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2b_machines, "MAX_COPIES", 2)
    copies = session.fork_many(5)
    assert len(copies) == 5 and server.asked("fork") == 3
    for copy in copies:
        copy.close()


def test_all_copies_or_none(session: E2BSession, server: FakeE2B) -> None:
    run(session, "x = 1")
    server.faults["copy"].append(answer(503))
    with pytest.raises(SandboxError, match="E2B made 2 of 3 copies: ServiceBusyException: 503"):
        session.fork_many(3)
    assert list(server.sandboxes) == [session._sandbox.sandbox_id], "the copies that were made are ended"
    assert run(session, "x").result == "1"


def test_a_refused_copy_is_not_replaced_unless_asked_for(session: E2BSession, server: FakeE2B) -> None:
    server.faults["fork"].append(answer(403, "not in this plan"))
    with pytest.raises(SandboxError, match=r"E2B did not copy the machine: .*not in this plan"):
        session.fork()
    assert server.asked("create") == 1


def test_a_copy_by_replay_where_that_was_asked_for(server: FakeE2B) -> None:
    parent = E2BPython(on_fork_error="replay").open()
    run(parent, "import random\nx = [random.random()]")
    run(parent, "print(x)\n1 / 0")
    server.faults["fork"].append(answer(403))
    with pytest.warns(RuntimeWarning, match="2 sessions are copied by running 2 cells again, because: E2B did not copy the machine"):
        copies = parent.fork_many(2)
    assert server.asked("create") == 3 and [run(copy, "x") for copy in copies] == [run(parent, "x")] * 2
    assert run(parent, "random.random()") == run(copies[0], "random.random()")
    native = copies[1].fork()
    assert server.asked("create") == 3
    for each in (parent, native, *copies):
        each.close()


def test_a_replay_that_differs_is_refused_and_leaves_nothing(server: FakeE2B) -> None:
    parent = E2BPython(on_fork_error="replay").open()
    run(parent, "1")
    run(parent, "import os\nos.urandom(8)")
    server.faults["fork"].append(answer(403))
    with pytest.warns(RuntimeWarning), pytest.raises(SandboxError, match=r"cell 1 gave .* before it gave .* cannot be copied by replay"):
        parent.fork()
    assert list(server.sandboxes) == [parent._sandbox.sandbox_id]
    parent.close()


def test_a_replay_that_loses_its_machine_leaves_the_parent_alone(server: FakeE2B) -> None:
    parent = E2BPython(on_fork_error="replay").open()
    run(parent, "x = 1")
    server.faults["fork"].append(answer(403))
    server.faults["execute"].append(answer(404))  # a machine that has no kernel
    with pytest.warns(RuntimeWarning), pytest.raises(SandboxError, match="a copy by replay was lost") as caught:
        parent.fork()
    assert not isinstance(caught.value, SessionLost) and run(parent, "x").result == "1"
    parent.close()


def test_a_copy_before_each_call(server: FakeE2B) -> None:
    bound = PythonTool(E2BPython(), timeout=LONG, transactional=True).bind()
    bound.call(code="x = 1")
    assert (server.started, len(server.sandboxes)) == (2, 1)
    result = bound.call(code="x = 2\nimport os\nos._exit(3)")
    assert (result.error, result.state) == ("died", "kept") and result.text.endswith("are as they were before it.")
    assert bound.call(code="x").text == "1" and len(server.sandboxes) == 1
    bound.close()


# -- slow cells and floods ---------------------------------------------------------------------------------------------------------------------------------


def test_a_slow_cell_is_stopped_and_the_state_kept(session: E2BSession, server: FakeE2B) -> None:
    run(session, "x = 1")
    slow = "import time\nwhile True: time.sleep(0.01)"
    cell = run(session, slow, timeout=0.5)
    assert (cell.status, cell.kept, cell.error) == ("timeout", True, "TimeoutError: the cell ran longer than 0.5 s and was stopped")
    assert server.interrupted.wait(LONG)
    assert run(session, "x").result == "1"
    assert next(iter(server.sandboxes.values())).cells.count(slow) == 1


def test_the_limit_of_a_cell_is_not_doubled_by_the_transport(session: E2BSession, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from pyqwest.httpx._transport import convert_timeout

    asked: list[float] = []
    original = type(session._sandbox).run_code

    def spy(self: Any, code: str, **settings: Any) -> Any:
        asked.append(settings["timeout"])
        return original(self, code, **settings)

    monkeypatch.setattr(type(session._sandbox), "run_code", spy)
    run(session, "1", timeout=8.0)
    assert convert_timeout({"timeout": httpx.Timeout(asked[0]).as_dict()}) == 8.0


def test_what_a_slow_cell_printed_is_shown(session: E2BSession, server: FakeE2B) -> None:
    server.faults["execute"].append(stall({"type": "stdout", "text": "half\n", "timestamp": 0}))
    cell = run(session, "1", timeout=0.5)
    assert (cell.status, cell.kept, cell.output) == ("timeout", True, "half\n")


def test_a_kernel_that_does_not_come_back_is_lost(session: E2BSession, server: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "GRACE", 0.2)
    server.faults["execute"].extend([stall(), stall()])  # the cell, and the question whether the kernel is back
    cell = run(session, "1", timeout=0.2)
    assert (cell.status, cell.kept) == ("timeout", False) and cell.error.endswith("was stopped; the interpreter did not answer any more")
    assert server.sandboxes == {}
    with pytest.raises(SessionLost, match="was stopped"):
        run(session, "1")


def test_a_kernel_that_was_started_anew_is_not_taken_for_the_old_one(session: E2BSession, server: FakeE2B) -> None:
    server.faults["execute"].extend([stall(), lines({"type": "stdout", "text": "False\n", "timestamp": 0})])
    assert run(session, "1", timeout=0.2).kept is False


def test_a_flood_is_stopped(session: E2BSession, server: FakeE2B) -> None:
    run(session, "x = 1")
    server.faults["execute"].append(flood)
    cell = run(session, "1")
    assert (cell.status, cell.kept) == ("limit", True) and "more than 16 MiB of output" in cell.error and len(cell.output) < 2100
    assert server.interrupted.wait(LONG)
    assert run(session, "x").result == "1"


# -- ends --------------------------------------------------------------------------------------------------------------------------------------------------


def test_the_end_of_the_interpreter_is_a_loss(server: FakeE2B) -> None:
    bound = tool().bind()
    bound.call(code="x = 1")
    result = bound.call(code="print('bye')\nimport os\nos._exit(3)")
    assert (result.error, result.state) == ("died", "lost") and result.text.startswith("bye\nThe interpreter ended. All variables")
    assert server.sandboxes == {}, "the machine of a lost interpreter is ended at once"
    assert bound.call(code="'x' in globals()").text.endswith("gone.]\nFalse")
    bound.close()


@pytest.mark.parametrize("name", ["WebSocketError", "UnexpectedEndOfExecution"])
def test_a_cell_that_was_cut_off_in_the_machine_is_told_and_not_run_again(session: E2BSession, server: FakeE2B, name: str) -> None:
    server.faults["execute"].append(lines({"type": "error", "name": name, "value": "lost", "traceback": ""}))
    asked = server.asked("execute")
    cell = run(session, "1")
    assert (cell.status, cell.kept) == ("died", True) and "how far it ran is not known, and it was not run again" in cell.error
    assert server.asked("execute") == asked + 2, "the cell once, and the question whether the kernel is back"


def test_a_connection_that_ends_while_the_cell_runs(session: E2BSession, server: FakeE2B) -> None:
    run(session, "x = 0")
    server.faults["execute"].append(run_then_hang_up)
    cell = run(session, "x += 1")
    assert (cell.status, cell.kept) == ("died", True) and "how far it ran is not known" in cell.error
    assert run(session, "x").result == "1", "it was not sent again"


def test_a_connection_that_ends_before_an_answer_may_have_brought_the_cell(session: E2BSession, server: FakeE2B) -> None:
    server.faults["execute"].append(hang_up)
    assert run(session, "1").status == "died"


def test_a_broken_answer_may_have_brought_the_cell(session: E2BSession, server: FakeE2B) -> None:
    server.faults["execute"].append(lines({"type": "stdout"}))
    cell = run(session, "1")
    assert (cell.status, cell.kept) == ("died", True)


def test_a_machine_that_is_lost_while_the_cell_runs(session: E2BSession, server: FakeE2B) -> None:
    server.faults["execute"].append(vanish)
    cell = run(session, "1")
    assert (cell.status, cell.kept, cell.error) == ("died", False, "the virtual machine was lost while the cell ran")


def test_a_machine_that_ended_between_two_cells(server: FakeE2B) -> None:
    bound = tool().bind()
    bound.call(code="x = 1")
    for name in list(server.sandboxes):
        server.remove(name)
    result = bound.call(code="print('ran')")
    assert (result.error, result.state) == ("died", "lost") and "gone: it was killed or reached its lifetime. The code was not run." in result.text
    assert bound.call(code="'x' in globals()").text.endswith("gone.]\nFalse")
    bound.close()


def test_a_copy_of_a_machine_that_ended_is_told_of_the_loss(server: FakeE2B) -> None:
    bound = tool().bind()
    bound.call(code="x = 1")
    for name in list(server.sandboxes):
        server.remove(name)
    twin = bound.fork()
    for made in (bound, twin):
        assert made.call(code="1").text.startswith("[The interpreter of the calls before was lost (its machine at E2B is gone")
        made.close()


def test_close_from_another_thread_ends_a_running_cell(session: E2BSession, server: FakeE2B) -> None:
    server.running.clear()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, session, "while True: pass")
        assert server.running.wait(LONG)
        session.close()
        assert running.result().kept is False
    with pytest.raises(SandboxError, match="closed"):
        run(session, "1")


# -- refusals: the code has not run ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [answer(429), answer(503), answer(401), answer(502)], ids=["429", "503", "401", "502"])
def test_a_cell_that_the_service_refuses_is_unavailable_and_keeps_its_state(server: FakeE2B, fault: Any) -> None:
    bound = tool().bind()
    bound.call(code="x = 1")
    server.faults["execute"].append(fault)
    result = bound.call(code="x += 1")
    assert (result.error, result.state) == ("unavailable", "kept") and "the code was not run: E2B did not run the cell" in result.text
    assert bound.call(code="x").text == "1" and server.asked("connect") == 1, "the next call reaches the machine anew"
    bound.close()


@pytest.mark.parametrize("status", [500, 504])
def test_an_answer_that_may_come_after_the_cell_is_not_a_refusal(session: E2BSession, server: FakeE2B, status: int) -> None:
    server.faults["execute"].append(answer(status))
    assert run(session, "1").status == "died"


def test_a_connection_that_is_refused(session: E2BSession, server: FakeE2B) -> None:
    session._sandbox.connection_config._sandbox_url = "http://127.0.0.1:9"  # the port of the discard service: nobody listens
    with pytest.raises(SandboxError, match="E2B did not run the cell: ConnectError"):
        run(session, "1")
    session._sandbox.connection_config._sandbox_url = server.url
    assert run(session, "1 + 1").result == "2" and server.asked("connect") == 1, "the next cell reaches the machine anew"


def test_a_machine_that_cannot_be_reached_anew_is_lost(session: E2BSession, server: FakeE2B) -> None:
    server.faults["execute"].append(answer(503))
    with pytest.raises(SandboxError):
        run(session, "1")
    server.remove(session._sandbox.sandbox_id)
    with pytest.raises(SessionLost, match="gone"):
        run(session, "1")


START_FAULTS = {
    "RateLimitException: 429": [answer(429, Retry_After="0")] * 4,
    "ServiceBusyException: 503": [answer(503, Retry_After="0")] * 4,
    "AuthenticationException: 401": [answer(401)],
    "SandboxException: 404: template": [answer(404, "template 'x' not found")],
    "RemoteProtocolError": [hang_up],
}


@pytest.mark.parametrize("expected", START_FAULTS)
def test_a_service_that_gives_no_machine_stops_the_first_bind(server: FakeE2B, expected: str) -> None:
    server.faults["create"].extend(START_FAULTS[expected])
    proto = tool()
    with pytest.raises(SandboxError, match=f"E2B did not start a machine: {expected}"):
        proto.bind()
    proto.bind().close()
    assert server.started == 1


def test_the_sdk_retries_a_machine_and_it_is_started_once(server: FakeE2B) -> None:
    server.faults["create"].extend([answer(429, Retry_After="0"), answer(503, Retry_After="0")])
    E2BPython().open().close()
    assert server.asked("create") == 3 and server.started == 1


def test_a_service_that_gives_no_machine_later_is_unavailable(server: FakeE2B) -> None:
    first, second = tool().bind(), tool().bind()
    first.call(code="1")  # takes the machine that was kept for the first session
    server.faults["create"].append(answer(401))
    result = second.call(code="1")
    assert (result.error, result.state) == ("unavailable", "none") and "401" in result.text
    assert second.call(code="1").text == "1"
    first.close()
    second.close()


def test_a_service_that_is_not_there(server: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with pytest.raises(SandboxError, match="E2B did not start a machine: ConnectError"):
        tool().bind()


def test_a_machine_whose_kernel_does_not_answer_is_ended(server: FakeE2B) -> None:
    server.faults["execute"].append(answer(503))
    with pytest.raises(SandboxError, match="E2B did not run the cell"):
        E2BPython().open()
    assert server.started == 1 and server.sandboxes == {}


# -- lifetime, cleaning up ---------------------------------------------------------------------------------------------------------------------------------


def test_the_life_of_a_machine_is_extended_when_half_of_it_is_over(server: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(e2b, "monotonic", lambda: now[0])
    session = E2BPython(lifetime=600).open()
    now[0] += 299.0
    run(session, "1")
    assert server.asked("timeout") == 0
    now[0] += 2.0
    run(session, "1")
    run(session, "1")
    assert server.asked("timeout") == 1
    run(session, "1", timeout=580.0)  # might last until the machine ends
    assert server.asked("timeout") == 2 and next(iter(server.sandboxes.values())).lifetime == 640
    server.faults["timeout"].append(answer(401))
    now[0] += 600.0
    with pytest.raises(SandboxError, match="E2B did not extend the life of a machine"):
        run(session, "1")
    session.close()


def test_machines_live_as_long_and_reach_as_far_as_was_asked(server: FakeE2B) -> None:
    session = E2BPython(lifetime=120).open()
    copy = session.fork()
    assert [sandbox.lifetime for sandbox in server.sandboxes.values()] == [120, 120]
    assert next(iter(server.sandboxes.values())).internet is False
    copy.close()
    session.close()


def test_the_first_machine_is_kept_for_the_first_session(server: FakeE2B) -> None:
    proto = tool()
    one, two = proto.bind(), proto.bind()
    assert server.started == 1
    assert (one.call(code="x = 1").ok, two.call(code="'x' in globals()").text, server.started) == (True, "False", 2)
    one.close()
    two.close()


def test_a_kept_machine_that_ended_meanwhile_is_not_handed_out(server: FakeE2B) -> None:
    bound = tool().bind()
    server.remove(*server.sandboxes)
    assert bound.call(code="1").text == "1"
    bound.close()


def test_everything_that_was_begun_is_ended_and_counted(server: FakeE2B) -> None:
    backend = E2BPython()
    before = backend.counts()
    session = backend.open()
    copies = session.fork_many(3)
    for each in (session, *copies, *copies):
        each.close()
    after = backend.counts()
    assert (after.begun - before.begun, after.ended - before.ended, after.living) == (4, 4, 0)
    assert (server.started, server.killed, server.asked("kill")) == (4, 4, 4)


def test_a_machine_whose_end_was_not_confirmed_is_ended_later(server: FakeE2B) -> None:
    session = E2BPython().open()
    server.faults["kill"].append(answer(401))
    session.close()
    assert len(server.sandboxes) == 1
    E2BPython().open().close()
    assert server.sandboxes == {}


def test_a_session_that_is_dropped_is_ended_at_the_next_start(server: FakeE2B) -> None:
    E2BPython().open()  # never closed
    assert len(server.sandboxes) == 1
    E2BPython().open().close()
    assert server.sandboxes == {}


def test_a_process_ends_its_machines_at_exit_and_one_forked_from_it_leaves_them(server: FakeE2B) -> None:
    code = """
    import os, sys
    from arpo_env.sandbox.e2b import E2BPython
    session = E2BPython().open()
    pid = os.fork()
    if pid == 0:
        session.close()
        sys.exit()  # runs what is registered for the exit
    os.waitpid(pid, 0)
    assert session.exec("1 + 1", timeout=60.0, output_chars=100).result == "2"
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": path}, check=True)
    assert server.started == 1 and server.killed == 1


def test_sessions_and_forks_from_many_threads(server: FakeE2B) -> None:
    proto = tool()
    parent = proto.bind()
    parent.call(code="x = 0")

    def branch(number: int) -> str:
        twin = parent.fork()
        try:
            return twin.call(code=f"x += {number}\nx").text
        finally:
            twin.close()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(branch, range(8))) == [str(number) for number in range(8)]
    parent.close()


# -- settings ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lifetime": 5}, "lifetime must be a whole number of seconds from 60 to 86400"),
        ({"lifetime": 90.5}, "lifetime must be a whole number"),
        ({"request_timeout": 0}, "request_timeout must be positive, got 0"),
        ({"on_fork_error": "copy"}, "on_fork_error must be 'raise' or 'replay', got 'copy'"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1 or None, got 0"),
    ],
)
def test_settings_that_cannot_work_raise_at_once(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        E2BPython(**settings)


def test_a_missing_key_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ValueError, match="E2BPython needs an API key"):
        E2BPython()
    assert E2BPython(api_key=KEY).api_key == KEY
    monkeypatch.setitem(sys.modules, "e2b_code_interpreter", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[e2b\]'"):
        E2BPython()


def test_isolation_settings_and_secrets(server: FakeE2B) -> None:
    proto = tool(api_key=KEY)
    assert proto.isolation().level == "vm" and proto.isolation().missing == {}
    assert set(tool(internet=True).isolation().missing) == {"no network"}
    assert proto.settings()["backend"] == "e2b" and KEY not in json.dumps(dict(proto.settings()))
    assert KEY not in repr(proto.backend) and KEY not in repr(E2BPython(api_key=KEY).service)
    bound = pickle.loads(pickle.dumps(proto)).bind()
    assert bound.call(code="1 + 1").text == "2"
    bound.close()
    assert PythonTool(E2BPython(), require="vm").fork_support == "native"
    assert server.sandboxes == {}


@pytest.mark.skipif(not REAL_KEY, reason="E2B_API_KEY is not set: no call of the real service")
def test_the_real_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", REAL_KEY or "")
    monkeypatch.delenv("E2B_API_URL")
    monkeypatch.delenv("E2B_SANDBOX_URL")
    bound = tool().bind()
    try:
        assert bound.call(code="import random\nx = [random.random()]\nlen(x)").text == "1"
        assert bound.call(code="1 / 0").text.endswith("ZeroDivisionError: division by zero")
        twins = bound.fork_many(2)
        for number, twin in enumerate(twins):
            assert twin.call(code=f"x.append({number})\nx[1]").text == str(number)
        assert bound.call(code="len(x)").text == "1"
        for twin in twins:
            twin.close()
    finally:
        bound.close()
