"""SkyRL-Gym's environments: rows, calls, and copies whose tools act on the copy."""

from __future__ import annotations

import copy
import json
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import arpo_env
from arpo_env.testing import EnvConformance

pytest.importorskip("skyrl_gym")

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

from arpo_env.interop.skyrl_gym import SkyRLGymEnv

ROWS = [{"prompt": f"What is {n} + 3?", "reward_spec": {"ground_truth": str(n + 3)}, "extra_info": {"max_turns": 4}} for n in range(6)]
MULTI = "gsm8k_multi_turn"


class TestMultiTurn(EnvConformance):
    actions = ("thinking", "#### 999", "#### 998", "#### 997")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return SkyRLGymEnv(MULTI, ROWS)


class TestMultiTurnByReplay(EnvConformance):
    actions = ("thinking", "#### 999", "#### 998", "#### 997")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return SkyRLGymEnv(MULTI, ROWS, forks="replay")


class TestSingleTurn(EnvConformance):
    actions = ("#### 3",)

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return SkyRLGymEnv("gsm8k", ROWS)


class Counter(ToolGroup):  # type: ignore[misc]
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        super().__init__(name="Counter")

    @tool
    def count(self, by: str) -> str:
        self.calls += int(by)
        return f"count is {self.calls}"


class Counting(BaseTextEnv):  # type: ignore[misc]
    """Every turn is a call; "stop" ends."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.init_tool_groups([Counter()])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if action == "stop":
            return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})
        try:
            text, name = self._execute_tool("Counter", "count", [action]), "count"
        except ValueError as error:
            text, name = str(error), None
        metadata = {"tool_name": name, "tool_input": [action]}
        return BaseTextEnvStepOutput(observations=[{"role": "user", "content": text}], reward=0.0, done=False, metadata=metadata)


class TestCountingByReplay(EnvConformance):
    actions = ("1", "2", "x", "3", "stop")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return SkyRLGymEnv(Counting, ROWS)


class TestCountingByCopy(EnvConformance):
    """A tool group with a state: a plain deepcopy of it acts on the parent."""

    actions = ("1", "2", "x", "3", "stop")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return SkyRLGymEnv(Counting, ROWS, forks="copy")


def test_a_plain_deepcopy_acts_on_the_parent() -> None:
    """The fault that the adapter is there for; when SkyRL mends it, this fails and the mending can go."""
    theirs = Counting()
    twin = copy.deepcopy(theirs)
    twin.step("5")
    assert (theirs.tool_groups[0].calls, twin.tool_groups[0].calls) == (5, 0)


def test_calls_of_a_copy_act_on_the_copy() -> None:
    env = SkyRLGymEnv(Counting, ROWS, forks="copy")
    env.reset(seed=0)
    env.step("1")
    twin = env.fork()
    assert twin.step("10")[0] == "count is 11"
    assert env.step("100")[0] == "count is 101"
    assert twin.fork().step("1000")[0] == "count is 1011"
    assert twin.library_env.tool_groups[0].calls == 11


def test_tools_registered_by_hand_cannot_be_copied() -> None:
    class ByHand(Counting):
        def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
            super().__init__()
            self.tool_groups[0]._tool_registry["extra"] = lambda: "x"

    env = SkyRLGymEnv(ByHand, ROWS, forks="copy")
    env.reset(seed=0)
    with pytest.raises(arpo_env.ForkError, match=r"tools of Counter were registered by hand and cannot be copied: \['extra'\]"):
        env.fork()


def test_what_is_copied_and_what_is_replayed() -> None:
    assert arpo_env.fork_support(SkyRLGymEnv(MULTI, ROWS)) == "copy"
    assert arpo_env.fork_support(SkyRLGymEnv(Counting, ROWS)) == "replay"


def test_calls_as_far_as_skyrl_tells() -> None:
    env = SkyRLGymEnv(Counting, ROWS)
    env.reset(seed=0)
    *_, info = env.step("2")
    assert info["tool_calls"] == [{"name": "count", "arguments": {"input": ["2"]}, "ok": True, "error": "", "executed": True}]
    observation, *_, info = env.step("x")
    assert info["tool_calls"] == []
    assert "invalid literal" in observation
    assert info["n_tool_calls"] == 1


def test_rewards_of_every_turn_are_given() -> None:
    """0.2 / 4 for a well-formed wrong answer, 1 for the right one, 0 for none."""
    env = SkyRLGymEnv(MULTI, ROWS)
    opening, info = env.reset(options={"task": 2})
    assert (opening, info["task_id"]) == ("What is 2 + 3?", f"{MULTI}/2")
    rewards = [env.step(turn)[1] for turn in ("hm", "#### 7")]
    _, last, terminated, truncated, info = env.step("#### 5")
    assert ([*rewards, last], terminated, truncated) == ([0.0, 0.05, 1.0], True, False)
    assert info["stop_reason"] == "answer"


def test_max_turns_goes_to_the_environment() -> None:
    env = SkyRLGymEnv(MULTI, ROWS, max_turns=1)
    env.reset(seed=0)
    assert env.step("hm")[2] is True


def test_rows_as_tasks() -> None:
    env = SkyRLGymEnv(MULTI, ROWS)
    assert [task.answer for task in env.tasks] == ["3", "4", "5", "6", "7", "8"]
    assert env.reset(options={"task": env.tasks[4]}) == env.reset(options={"task": 4})
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    opening, info = env.reset(options={"task": {**ROWS[0], "prompt": system}})
    assert opening == "What is 1 + 1?"
    assert info["messages"] == system
    with pytest.raises(ValueError, match="holds no row of SkyRL's data"):
        env.reset(options={"task": arpo_env.Task(question="1 + 1?", answer="2")})
    with pytest.raises(IndexError):
        env.reset(options={"task": 6})


def test_an_environment_cannot_change_the_rows() -> None:
    class Greedy(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
            super().__init__()
            self.left = (extras or {})["left"]

        def step(self, action: str) -> BaseTextEnvStepOutput:
            return BaseTextEnvStepOutput(observations=[{"role": "user", "content": self.left.pop()}], reward=0.0, done=False, metadata={})

    env = SkyRLGymEnv(Greedy, [{"prompt": "?", "left": ["a", "b"]}])
    for _ in range(2):
        env.reset(seed=0)
        assert env.step("x")[0] == "b"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    env = SkyRLGymEnv(MULTI, str(path))
    assert len(env.tasks) == 6
    assert env.reset(options={"task": 1})[0] == "What is 1 + 3?"


def test_text_to_sql_with_its_own_tool(tmp_path: Path) -> None:
    """SkyRL's environment with a tool of its own, over a real data base: calls, fork, the reward of the whole."""
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as connection:
        connection.execute("create table item (name text, price int)")
        connection.execute("insert into item values ('lamp', 7), ('desk', 90)")
    connection.close()
    row = {"prompt": "The dearest item?", "db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "select name from item where price = 90"}}
    env = SkyRLGymEnv("text2sql", [row], env_config={"db_path": str(tmp_path)}, max_turns=4, stop_strings=("</sql>", "</solution>"))
    _, info = env.reset(seed=0)
    assert (env.fork_support, info["stop_strings"]) == ("copy", ("</sql>", "</solution>"))
    look = "<think>look</think>\n<sql>select max(price) from item</sql>"
    observation, *_, info = env.step(look)
    assert "90" in observation
    assert [call["name"] for call in info["tool_calls"]] == ["sql"]
    twin = env.fork()
    answer = "<think>it is the desk</think>\n<solution>select name from item order by price desc limit 1</solution>"
    for each in (env, twin):
        assert each.step(answer)[1:4] == (1.0, True, False)


class Retriever(BaseHTTPRequestHandler):
    """Speaks the retrieval protocol of Search-R1: every query is found once."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        body = json.dumps({"result": [[{"document": {"contents": f"about {query}"}}]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_search_over_http_with_its_own_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool holds an HTTP session, which a copy may not break."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {"search_url": f"http://127.0.0.1:{server.server_port}/retrieve", "topk": 1, "timeout": 30, "log_requests": False}
        row = {"prompt": "Who?", "reward_spec": {"ground_truth": {"target": ["Ada"]}}, "max_turns": 4}
        env = SkyRLGymEnv("search", [row], env_config=config, stop_strings=("</search>", "</answer>"))
        env.reset(seed=0)
        observation, *_, info = env.step("<search>engines</search>")
        assert "about engines" in observation
        assert info["tool_calls"][0]["arguments"] == {"input": ["engines"]}
        twin = env.fork()
        assert env.fork_support == "copy"
        assert "about looms" in twin.step("<search>looms</search>")[0]
        assert "about cards" in env.step("<search>cards</search>")[0]
        assert env.step("<search></search>x")[4]["n_tool_calls"] == 3
        assert twin.step("<answer>Ada</answer>")[1:4] == (1.0, True, False)
        server.shutdown()


def test_what_skyrl_raises_ends_the_episode() -> None:
    class Failing(Counting):
        def step(self, action: str) -> BaseTextEnvStepOutput:
            raise OSError("data base gone")

    env = SkyRLGymEnv(Failing, ROWS, error_reward=0.0)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("1")
    assert (reward, terminated, truncated, info["stop_reason"], info["scored"]) == (0.0, False, True, "env_error", False)
    assert info["answer"] == "OSError: data base gone"


def test_an_answer_without_a_reward_ends_the_episode() -> None:
    class Unrewarded(Counting):
        def step(self, action: str) -> BaseTextEnvStepOutput:
            return BaseTextEnvStepOutput(observations=[], reward=None, done=True, metadata={})

    env = SkyRLGymEnv(Unrewarded, ROWS)
    env.reset(seed=0)
    assert env.step("1")[4]["stop_reason"] == "env_error"


@pytest.mark.parametrize(("name", "isolation"), [("searchcode", "process"), (MULTI, "")])
def test_info_says_where_code_runs(name: str, isolation: str) -> None:
    assert SkyRLGymEnv(name, ROWS).reset(seed=0)[1]["isolation"] == isolation


def test_each_episode_is_closed_once() -> None:
    closed: list[int] = []

    class Closing(Counting):
        def close(self) -> None:
            closed.append(id(self))

    env = SkyRLGymEnv(Closing, ROWS)
    assert len(closed) == 1  # the one that was made to look at the first row
    env.reset(seed=0)
    env.reset(seed=1)
    assert len(closed) == 2
    twin = env.fork()
    env.close()
    env.close()
    assert len(closed) == 3
    assert twin.step("1")[0] == "count is 1"
    twin.close()
    assert len(closed) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env": "gsm8", "tasks": ROWS}, ValueError, r"SkyRL-Gym has no environment 'gsm8'; did you mean \['gsm8k'"),
        ({"env": "gsm8k", "tasks": []}, ValueError, "expected at least one row"),
        ({"env": "gsm8k", "tasks": "rows.csv"}, ValueError, r"must be rows, a \.jsonl or a \.parquet file, got rows.csv"),
        ({"env": "gsm8k", "tasks": [{"prompt": "?"}]}, ValueError, "gsm8k from the first row cannot be made: AssertionError: reward_spec field is required"),
        ({"env": "gsm8k", "tasks": [{"reward_spec": {}}]}, ValueError, "a row needs a 'prompt'"),
        ({"env": "search", "tasks": ROWS}, ValueError, "search from the first row cannot be made: AttributeError"),
    ],
)
def test_wrong_configuration(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SkyRLGymEnv(**arguments)


def test_recursive_environments_are_refused() -> None:
    from skyrl_gym.envs.rlm.env import BaseRLMEnv

    with pytest.raises(TypeError, match="BaseRLMEnv rewrites the conversation"):
        SkyRLGymEnv(BaseRLMEnv, ROWS)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[skyrl-gym\]'"):
        SkyRLGymEnv("gsm8k", ROWS)
