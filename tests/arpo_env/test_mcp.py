"""Tools of MCP servers: real server processes, of the SDK and of the standard library alone, over stdio and HTTP."""

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import arpo_env
from arpo_env.testing import ToolConformance, check_fork
from arpo_env.tools.base import Tool, ToolResult, check_arguments

pytest.importorskip("mcp_types")  # came with version 2 of the SDK

import mcp_server

from arpo_env.tools import mcp_connection
from arpo_env.tools.mcp import MCPServerError, MCPTool, MCPTools
from arpo_env.tools.mcp_content import as_parameters

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes of these tests are watched in Linux's ways")
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
PLAIN = [sys.executable, "-S", *SERVER[1:], "plain"]  # without site: these start in 20 ms
LONG = 60.0
"""Seconds of a deadline that must not be reached."""


class Diary:
    """What the server processes of a test wrote down: their process ids, and the calls that they ran."""

    def __init__(self, folder: Path):
        self._starts, self._calls = folder / "starts", folder / "calls"
        self.env = {"MCP_TEST_STARTS": str(self._starts), "MCP_TEST_CALLS": str(self._calls)}

    @staticmethod
    def _lines(path: Path) -> list[str]:
        return path.read_text().split() if path.exists() else []

    @property
    def started(self) -> int:
        return len(self._lines(self._starts))

    @property
    def alive(self) -> int:
        return sum(_lives(int(pid)) for pid in self._lines(self._starts))

    @property
    def calls(self) -> list[str]:
        return self._lines(self._calls)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    return Diary(tmp_path)


@pytest.fixture
def plain(diary: Diary) -> Iterator[Callable[..., MCPTools]]:
    """Makes the tools of a plain server; at the end no server process is left."""
    made = []

    def make(*flags: str, **settings: Any) -> MCPTools:
        made.append(MCPTools([*PLAIN, *flags], **{"env": diary.env, "timeout": LONG, **settings}))
        return made[-1]

    yield make
    for tools in made:
        tools.close()
    mcp_connection.close_all()
    assert diary.alive == 0


def named(tools: MCPTools) -> dict[str, MCPTool]:
    return {tool.name: tool for tool in tools}


def bound(tools: MCPTools) -> dict[str, MCPTool]:
    """The tools as an environment binds them."""
    episode: dict[str, MCPTool] = {}
    for tool in tools:
        episode[tool.name] = tool.bind_with(episode)
    return episode


def close(episode: dict[str, MCPTool]) -> None:
    for tool in episode.values():
        tool.close()


def turn(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_env(tools: MCPTools) -> arpo_env.ToolEnv:
    return arpo_env.ToolEnv([{"question": "?", "answer": "1"}], tools=[*tools], call_format=arpo_env.Hermes(), reward=lambda task, episode: 0.0)


# -- a server of the SDK ---------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with mcp_server.over_http() as url:
        yield url


@pytest.fixture(scope="module")
def over_http(address: str) -> Iterator[MCPTools]:
    with MCPTools(address, fork="shared", timeout=LONG) as tools:
        yield tools


def test_a_server_of_the_sdk_over_stdio() -> None:
    with MCPTools([*SERVER, "sdk"], include=["add", "echo"], timeout=LONG, fork="shared") as tools:  # shared: it takes seconds to start
        assert [tool.name for tool in tools] == ["add", "echo"]
        assert tools[0].description == "Add to the counter; returns the total." and tools[0].main_argument == "amount"
        assert tools[0].parameters["properties"]["amount"]["type"] == "integer"
        assert check_arguments(tools[0], {"amount": "x"}) is not None and check_arguments(tools[1], {"text": "x"}) is None
        env = make_env(tools)
        env.reset(seed=0)
        assert "5" in env.step(turn("add", amount=5))[0]
        assert "12" in env.step(turn("add", amount=7))[0]
        env.close()


def test_sessions_of_a_server_of_the_sdk_fork_by_replay(address: str) -> None:
    env = make_env(MCPTools(address, fork="replay", include=["add", "echo"], timeout=LONG))
    env.reset(seed=0)
    assert "5" in env.step(turn("add", amount=5))[0]
    twin = arpo_env.fork(env)
    assert "12" in twin.step(turn("add", amount=7))[0]
    assert "6" in env.step(turn("add", amount=1))[0]
    env.close()
    twin.close()


def test_results_in_words(over_http: MCPTools) -> None:
    tools = named(over_http)
    assert tools["echo"].call(text="café 🙂\n日本", times=2) == ToolResult("café 🙂\n日本café 🙂\n日本", data={"result": "café 🙂\n日本café 🙂\n日本"})
    assert tools["picture"].call().text == "[image: image/png, 8 bytes]"
    place = tools["place"].call()
    assert json.loads(place.text) == place.data == {"north": 1.5}
    failed = tools["fail"].call()
    assert (failed.ok, failed.error) == (False, "exception") and "fail" in failed.text
    assert tools["echo"].call(text=5).error == "exception"  # what our own check of arguments lets through, the server refuses


def test_a_large_result_is_cut_with_a_notice(over_http: MCPTools) -> None:
    text = named(over_http)["echo"].call(text="é" * 1000, times=200).text
    assert 16_000 < len(text) < 16_100 and "184,000 characters left out" in text


def test_eight_threads_call_at_once(over_http: MCPTools) -> None:
    echo = named(over_http)["echo"]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda number: echo.call(text=f"<{number}>").text, range(64)))
    assert texts == [f"<{number}>" for number in range(64)]


def test_a_call_past_its_deadline_does_not_wedge_a_shared_server(address: str) -> None:
    with MCPTools(address, fork="shared", timeout=0.2) as hasty:
        result = named(hasty)["wait"].call()
        assert (result.error, result.state) == ("timeout", "none") and "0.2 s" in result.text
    with MCPTools(address, fork="shared", timeout=LONG) as tools:
        connection = tools._server._open()  # type: ignore[union-attr]
        with pytest.raises(mcp_connection.CallTimedOut):
            connection.call("wait", {}, 0.2)
        assert named(tools)["echo"].call(text="still there").text == "still there"
        assert tools._server._open() is connection  # type: ignore[union-attr]


def test_over_http_each_episode_has_its_own_session(address: str) -> None:
    tools = MCPTools(address, timeout=LONG)
    assert tools[0].fork_support == "none"  # nothing is annotated as reading only
    one, two = bound(tools), bound(tools)
    assert [one["add"].call(amount=1).text, two["add"].call(amount=1).text, one["add"].call(amount=1).text] == ["1", "1", "2"]
    close(one)
    close(two)


def test_headers_are_sent(address: str) -> None:
    with MCPTools(address, fork="shared", headers={"Authorization": "Bearer 5"}, timeout=LONG) as tools:
        assert named(tools)["header"].call(name="authorization").text == "Bearer 5"


def test_a_server_without_sessions_cannot_keep_the_state_of_an_episode(over_http: MCPTools) -> None:
    connection = over_http._server._open()  # type: ignore[union-attr]
    assert connection.session_id is None  # for a shared server the newest protocol is spoken, which has none
    with pytest.raises(MCPServerError, match=r"no sessions.*fork='shared'"):
        connection.require_state_of_its_own()


# -- state: one server for each episode ------------------------------------------------------------------------------------------------------------------


class TestCounter(ToolConformance):
    calls = ({"amount": 1}, {"amount": 20})

    def make_tool(self) -> Tool:
        return named(MCPTools(PLAIN, fork="replay", timeout=LONG))["add"]


def test_construction_leaves_no_process_and_binding_starts_none(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = plain()
    assert (diary.started, diary.alive) == (1, 0)
    episode = bound(tools)
    assert diary.started == 1
    close(episode)


def test_the_tools_of_a_server_share_its_state_within_an_episode_only(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = plain()
    one, two = bound(tools), bound(tools)
    assert one["add"].call(amount=3) == ToolResult("3", state="kept")
    assert (one["total"].call().text, two["total"].call().text) == ("3", "0")
    assert diary.alive == 2
    close(one)
    assert diary.alive == 1
    with pytest.raises(MCPServerError, match="closed"):
        one["total"].call()
    close(one)
    close(two)


def test_episodes_bound_in_eight_threads_share_nothing(plain: Callable[..., MCPTools]) -> None:
    tools = plain()

    def episode(number: int) -> str:
        own = bound(tools)
        own["add"].call(amount=number)
        text = own["total"].call().text
        close(own)
        return text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(episode, range(8))) == [str(number) for number in range(8)]


def test_environments_of_some_of_the_tools(plain: Callable[..., MCPTools]) -> None:
    tools = named(plain())
    adding, reading = tools["add"].bind(), tools["total"].bind()
    adding.call(amount=5)
    assert reading.call().text == "0"
    late = tools["total"].bind_with({"add": adding})
    assert late.call().text == "5"
    adding.close()
    assert late.call().text == "5"
    again = tools["add"].bind_with({"total": late})
    assert again.call(amount=1).text == "6"
    for tool in (reading, late, again):
        tool.close()


@pytest.mark.parametrize(("name", "error"), [("die", "died"), ("stuck", "timeout"), ("silence", "timeout")])
def test_a_call_that_fails_for_good_loses_the_state_and_is_not_repeated(plain: Callable[..., MCPTools], diary: Diary, name: str, error: str) -> None:
    tools = bound(plain(timeout=LONG if name == "die" else 0.5))
    result = tools[name].call()
    assert (result.ok, result.error, result.state) == (False, error, "lost") and "fresh server" in result.text
    assert diary.calls.count(name) <= 1
    close(tools)


def test_after_a_loss_the_next_call_starts_afresh(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = bound(plain())
    tools["add"].call(amount=5)
    assert tools["die"].call().state == "lost"
    assert tools["add"].call(amount=1) == ToolResult("1", state="kept")
    assert diary.started == 3
    close(tools)


def test_a_refusal_keeps_the_state(plain: Callable[..., MCPTools]) -> None:
    tools = bound(plain())
    tools["add"].call(amount=5)
    assert tools["refuse"].call() == ToolResult.failure("exception", "not today", state="kept")  # with the code that the SDK uses for a lost connection
    assert tools["total"].call().text == "5"
    close(tools)


def test_every_kind_of_content_is_put_into_words(plain: Callable[..., MCPTools]) -> None:
    tools = bound(plain())
    expected = "A café 😀\n[image: image/png, 3 bytes]\n[file:///a.txt]\ninside\n[file:///b: data, 6 bytes]\n[third: file:///c]"
    assert tools["mixed"].call().text == expected
    close(tools)


# -- forks -----------------------------------------------------------------------------------------------------------------------------------------------


def test_forks_replay_the_calls_of_all_tools_in_order(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env = make_env(plain(fork="replay", include=["add", "total", "echo"]))
    assert arpo_env.fork_support(env) == "replay"
    env.reset(seed=0)
    env.step(turn("add", amount=1) + turn("total") + turn("add", amount=10))
    twins = arpo_env.fork(env, 3)
    assert (diary.calls.count("add"), diary.calls.count("total")) == (8, 4)
    assert diary.alive == 4
    for number, twin in enumerate(twins):
        assert str(11 + number) in twin.step(turn("add", amount=number))[0]
        assert str(11 + number) in twin.step(turn("total"))[0]
    assert "11" in env.step(turn("total"))[0]
    env.close()
    grandchild = arpo_env.fork(twins[2])
    assert "13" in grandchild.step(turn("total"))[0]
    for twin in (*twins, grandchild):
        twin.close()
    assert diary.alive == 0


def test_the_contract_of_forks_holds(plain: Callable[..., MCPTools]) -> None:
    tools = plain(fork="replay", include=["add", "total"])
    check_fork(lambda: make_env(tools), [turn("add", amount=1), turn("total")])


def test_a_fork_before_any_call_starts_nothing(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env = make_env(plain(fork="replay"))
    env.reset(seed=0)
    twin = arpo_env.fork(env)
    assert diary.started == 1
    env.close()
    twin.close()


def test_only_what_made_the_present_state_is_replayed(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env = make_env(plain(fork="replay"))
    env.reset(seed=0)
    for call in (turn("add", amount=1), turn("die"), turn("add", amount=2)):
        env.step(call)
    twin = arpo_env.fork(env)
    assert diary.calls == ["add", "die", "add", "add"]
    assert "2" in twin.step(turn("total"))[0]
    env.close()
    twin.close()


def test_a_server_that_is_not_deterministic_is_found_out(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env = make_env(plain(fork="replay"))
    env.reset(seed=0)
    env.step(turn("pid"))
    with pytest.raises(arpo_env.ForkError, match=r"replay of call 0 \(pid\).*not deterministic"):
        arpo_env.fork(env, 2)
    assert diary.alive == 1
    assert env.step(turn("pid"))[4]["tool_calls"][0]["ok"]
    env.close()


def test_by_default_a_server_with_state_refuses_to_fork(plain: Callable[..., MCPTools]) -> None:
    tools = plain()
    env = make_env(tools)
    env.reset(seed=0)
    assert arpo_env.fork_support(env) == "none"
    with pytest.raises(arpo_env.ForkError, match="fork='replay'"):
        arpo_env.fork(env)
    env.close()
    with pytest.raises(arpo_env.ForkError, match="fork='replay'"):
        tools[0].bind().fork()


# -- no state: one server for all ------------------------------------------------------------------------------------------------------------------------


def test_a_server_that_only_reads_is_shared(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = plain("read-only")
    tool = tools[0]
    assert (tool.fork_support, tool.stateful) == ("shared", False)
    assert tool.bind() is tool and tool.fork() is tool and copy.deepcopy(tool) is tool
    tool.close()
    assert named(tools)["echo"].call(text="a") == ToolResult("a")
    assert diary.started == 1
    tools.close()
    assert (named(tools)["echo"].call(text="a").error, diary.alive) == ("unavailable", 0)


def test_a_dead_shared_server_is_restarted(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = named(plain(fork="shared"))
    died = tools["die"].call()
    assert (died.error, died.state) == ("died", "none") and "not repeated" in died.text
    assert tools["echo"].call(text="a").ok
    assert (diary.started, diary.calls) == (2, ["die", "echo"])


def test_a_call_that_only_reads_may_be_repeated_by_the_environment(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env = make_env(plain("read-only"))
    env.reset(seed=0)
    assert env.step(turn("die"))[4]["tool_calls"][0]["error"] == "unavailable"
    assert diary.calls == ["die"] * 3  # the environment's two retries
    assert env.telemetry.snapshot()["die.retries"] == 2
    env.close()


def test_a_stuck_shared_server_is_replaced(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = plain(fork="shared", timeout=0.5)
    calls = named(tools)
    stuck = tools._server._open()  # type: ignore[union-attr]
    assert calls["stuck"].call().error == "timeout"
    stuck._thread.join(LONG)
    assert not stuck._thread.is_alive()
    assert tools._server._open() is not stuck  # type: ignore[union-attr]
    assert diary.started == 2


def test_threads_that_wait_for_a_start_share_its_failure(plain: Callable[..., MCPTools], monkeypatch: pytest.MonkeyPatch) -> None:
    tools = plain(fork="shared")
    tools._server._connection.close()  # type: ignore[union-attr]
    entered, starts = threading.Semaphore(0), []

    class Lock:
        """Counts who wants it."""

        lock = threading.RLock()

        def __enter__(self) -> None:
            entered.release()
            self.lock.acquire()

        def __exit__(self, *exception: object) -> None:
            self.lock.release()

    def hang(*arguments: object, **settings: object) -> None:
        starts.append(1)
        for _ in range(3 if len(starts) == 1 else 0):
            assert entered.acquire(timeout=60)
        raise MCPServerError("hung")

    monkeypatch.setattr("arpo_env.tools.mcp_server.Connection", hang)
    monkeypatch.setattr(tools._server, "_lock", Lock())
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: named(tools)["echo"].call(text="a"), range(3)))
    assert [result.error for result in results] == ["unavailable"] * 3 and len(starts) == 1
    assert named(tools)["echo"].call(text="a").error == "unavailable" and len(starts) == 2  # who comes later tries anew


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("fork", ["shared", "none"])
def test_a_process_forked_during_a_call_has_servers_of_its_own(plain: Callable[..., MCPTools], diary: Diary, fork: str) -> None:
    episode = bound(plain(fork=fork))
    episode["echo"].call(text="before")
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with episode["echo"]._server._lock:
            held.set()
            over.wait(60)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        assert held.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                first, second = episode["echo"].call(text="a"), episode["echo"].call(text="b")
                mcp_connection.close_all()
                os._exit(0 if (first.ok or first.error == "died") and second.ok else 1)
            finally:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        over.set()
    assert ended == 0
    assert episode["echo"].call(text="after").ok  # the parent's server is untouched
    close(episode)


# -- starts that fail ------------------------------------------------------------------------------------------------------------------------------------


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words() -> None:
    with pytest.raises(MCPServerError, match=r"(?s)MCP server 'python' did not start.*no licence found\ngiving up"):
        MCPTools([*PLAIN, "crash"])


def test_a_server_that_speaks_rubbish_is_quoted() -> None:
    with pytest.raises(MCPServerError, match=r"(?s)no JSON-RPC message.*Welcome to my server!"):
        MCPTools([*PLAIN, "rubbish"])


def test_a_server_that_does_not_answer_is_an_error_within_the_deadline(plain: Callable[..., MCPTools]) -> None:
    with pytest.raises(MCPServerError, match=r"did not answer the handshake and list its tools within 0.5 s"):
        plain("deaf", start_timeout=0.5)


@pytest.mark.parametrize("server", ["no-such-program --flag", "http://127.0.0.1:9/mcp"])
def test_what_is_not_there_is_an_error(server: str) -> None:
    with pytest.raises(MCPServerError, match=r"did not start: (FileNotFoundError|ConnectError)"):
        MCPTools(server)


def test_a_server_that_stops_starting_is_unavailable(plain: Callable[..., MCPTools], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "server.py"
    script.write_text(Path(SERVER[1]).read_text())
    tools = MCPTools([sys.executable, "-S", str(script), "plain"], timeout=LONG)
    script.unlink()
    episode = bound(tools)
    result = episode["total"].call()
    assert (result.error, result.state) == ("unavailable", "none") and "No such file" in caplog.text
    assert str(script) not in result.text  # what it wrote to stderr is not for the model
    close(episode)


# -- what the server lists -------------------------------------------------------------------------------------------------------------------------------


def test_a_name_that_does_not_suit_is_refused_or_changed() -> None:
    with pytest.raises(ValueError, match=r"'browser.click'.*rename="):
        MCPTools([*PLAIN, "bad-name"])
    tools = MCPTools([*PLAIN, "bad-name"], rename={"browser.click": "click"}, timeout=LONG)
    click = named(tools)["click"].bind()
    assert click.call(x=1).text == "['x']"
    click.close()
    assert "click" not in named(MCPTools([*PLAIN, "bad-name"], exclude=["browser.click"]))


def test_a_broken_schema_is_an_error_that_says_where() -> None:
    with pytest.raises(MCPServerError, match=r"(?s)list of tools is broken after .*'refuse'.*inputSchema.properties.x"):
        MCPTools([*PLAIN, "bad-schema"])
    with pytest.raises(ValueError, match=r"tool 'broken': 'required' must name properties"):
        MCPTools([*PLAIN, "bad-required"])


def test_unusual_schemas_pass_through() -> None:
    tools = named(MCPTools([*PLAIN, "odd-schema"], timeout=LONG))
    odd = tools["odd"].bind()
    assert odd.description == "Odd"
    assert check_arguments(odd, {"any": [1], "where": "x", "n": 3}) is None
    assert check_arguments(tools["open"], {"whatever": 1}) is None
    assert odd.call(where="x").text == "['where']"
    odd.close()
    anything = as_parameters({"type": "object", "properties": {"x": True}}, "tool 'x'")
    assert anything == {"type": "object", "properties": {"x": {}}}
    for property in (False, {"type": 3}, {"enum": "a"}, {"anyOf": []}, {"anyOf": [3]}):
        with pytest.raises(ValueError, match="tool 'x': argument 'x': expected a JSON schema"):
            as_parameters({"type": "object", "properties": {"x": property}}, "tool 'x'")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"include": ["add", "ad"]}, r"include names \['ad'\]"),
        ({"exclude": ["ad"]}, r"exclude names \['ad'\]"),
        ({"include": []}, "no tool is left"),
        ({"rename": {"add": "total"}}, "one name"),
        ({"include": "add"}, "string 'add'"),
        ({"fork": "copy"}, "fork must be"),
        ({"timeout": 0}, "must be positive"),
        ({"output_chars": 1}, "at least 100"),
        ({"headers": {"A": "b"}}, "headers= belong"),
    ],
)
def test_options_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MCPTools(PLAIN, **settings)


def test_options_of_a_command_do_not_fit_an_address() -> None:
    with pytest.raises(ValueError, match="env= and cwd= belong"):
        MCPTools("https://user:secret@example.org/mcp?key=secret", cwd="/")
    with pytest.raises(ValueError, match="expected the command"):
        MCPTools("")


def test_settings_identify_the_server_and_hold_no_secret(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = plain("--key=hush", env={**diary.env, "API_KEY": "hush"})
    shown = json.dumps(tools[0].settings())
    assert tools[0].settings()["server"]["name"] == "plain" and tools[0].settings()["server"]["version"] == "7"
    assert "hush" not in shown and "mcp_server.py" not in shown and "hush" not in repr(tools) + repr(tools._server.options)
    assert shown != json.dumps(plain()[0].settings())  # another environment is another server
    address = mcp_connection.Url("https://user:hush@example.org/mcp?key=hush", {"Authorization": "hush"})
    shown = address.settings()
    assert (shown["url"], shown["headers"]) == ("https://example.org/mcp", ["authorization"]) and "hush" not in f"{address} {shown}"
    assert shown["query"] != mcp_connection.Url("https://example.org/mcp?profile=2").settings()["query"]  # another profile may answer differently


# -- copies and the end ----------------------------------------------------------------------------------------------------------------------------------


def test_prototypes_can_be_pickled_and_copied(plain: Callable[..., MCPTools], diary: Diary) -> None:
    tools = plain(include=["add", "total"])
    for again in (pickle.loads(pickle.dumps(list(tools))), copy.deepcopy(list(tools))):
        add = again[0].bind()
        total = again[1].bind_with({"add": add})
        add.call(amount=4)
        assert total.call().text == "4"
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(add)
        add.close()
        total.close()
    again = pickle.loads(pickle.dumps(plain("read-only")))
    assert named(again)["echo"].call(text="a").ok
    again.close()


def test_a_forgotten_episode_ends_its_server(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env: Any = make_env(plain())
    env.reset(seed=0)
    env.step(turn("add", amount=1))
    assert diary.alive == 1
    (connection,) = mcp_connection._open
    del env
    gc.collect()
    connection._thread.join(LONG)
    assert diary.alive == 0


def test_reset_and_close_end_the_servers_of_an_environment(plain: Callable[..., MCPTools], diary: Diary) -> None:
    env = make_env(plain())
    for seed in range(2):
        env.reset(seed=seed)
        env.step(turn("add", amount=1))
        assert diary.alive == 1
    env.close()
    assert diary.alive == 0


def test_no_server_outlives_the_program(diary: Diary) -> None:
    program = textwrap.dedent(f"""
        from arpo_env.tools.mcp import MCPTools
        shared = MCPTools({PLAIN!r}, fork="shared", env={diary.env!r})
        own = MCPTools({PLAIN!r}, env={diary.env!r})[0].bind()
        assert own.call(amount=1).ok
        raise SystemExit(9)
    """)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (ran.returncode, ran.stderr) == (9, "")
    assert (diary.started, diary.alive) == (3, 0)
