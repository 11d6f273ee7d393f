"""Environments served by the real OpenEnv server, and read back by this library's client and by OpenEnv's own."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

if not os.environ.get("ARPO_REQUIRE_OPENENV"):  # where it is set, a missing package is a failure
    pytest.importorskip("openenv")

import httpx
import uvicorn
from fakes import Turn, Writer, check_tree, sample_one
from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from arpo_algo.branching import UniformBranching
from arpo_env import DialogueEnv, ForkError, Negotiation, Reply, Task, TaskSet, Tool, ToolEnv, fork, fork_support, tool
from arpo_env.interop.openenv import OpenEnvEnv
from arpo_env.interop.openenv_server import openenv_app, serve
from arpo_env.interop.openenv_session import Refused, Session
from arpo_env.testing import EnvConformance, play

TASKS = TaskSet.from_rows([{"id": f"t{i}", "question": f"question {i}", "answer": f"answer {i}"} for i in range(40)])
PLAYED = ("<note>one</note>", "<lookup>x</lookup>", "<note>two</note>", "no call at all", "<answer>\\boxed{answer 1}</answer>")


@tool
def lookup(key: str) -> str:
    """Look something up."""
    return f"value of {key}"


class Notebook(Tool):
    """State in plain Python objects."""

    name = "note"
    description = "Writes a line and shows all lines."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}  # noqa: RUF012
    stateful = True
    fork_support = "copy"
    timeout = None

    def __init__(self) -> None:
        self.lines: list[str] = []

    def call(self, text: str) -> str:
        self.lines.append(text)
        return " | ".join(self.lines)


class Watched(ToolEnv):
    """Knows how many of its kind are open, and with which ``n`` it was forked."""

    changed = threading.Condition()
    living: set[int] = set()  # noqa: RUF012
    forks: list[int] = []  # noqa: RUF012

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._enter()

    def _enter(self) -> None:
        with self.changed:
            self.living.add(id(self))
            self.changed.notify_all()

    def fork_many(self, n: int) -> list[Any]:
        self.forks.append(n)
        twins = super().fork_many(n)
        for twin in twins:
            twin._enter()
        return twins

    def close(self) -> None:
        super().close()
        with self.changed:
            self.living.discard(id(self))
            self.changed.notify_all()


def wait_for_living(n: int) -> None:
    with Watched.changed:
        assert Watched.changed.wait_for(lambda: len(Watched.living) == n, timeout=60), f"{len(Watched.living)} environments are open, expected {n}"


class Uvicorn(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    server = Uvicorn(app)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server.up.wait(60), "the server did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


def make_tool_env() -> Watched:
    return Watched(TASKS, [Notebook(), lookup], max_turns=6)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(openenv_app(make_tool_env)) as address:
        yield address
    wait_for_living(0)  # a server that stops leaves none open


@pytest.fixture
def env_of() -> Iterator[Callable[..., OpenEnvEnv]]:
    with contextlib.ExitStack() as stack:
        yield lambda url, **settings: stack.enter_context(contextlib.closing(OpenEnvEnv(url, **settings)))


class TestServedToolEnv(EnvConformance):
    actions = PLAYED

    @pytest.fixture(autouse=True)
    def _served(self, url: str, env_of: Callable[..., OpenEnvEnv]) -> None:
        self.url, self.env_of = url, env_of

    def make_env(self) -> OpenEnvEnv:
        return self.env_of(self.url)


class Down(Action):
    by: int


class Left(Observation):
    left: int


class Countdown(Environment[Down, Left, State]):
    """A foreign server: counts down from a number that the seed decides; the action is a step width."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Left:
        self.left = 5 + (seed or 0) % 7
        return Left(left=self.left)

    def step(self, action: Down, timeout_s: float | None = None, **_: Any) -> Left:
        if action.by > 3:
            raise RuntimeError("too wide")
        self.left -= action.by
        return Left(left=self.left, done=self.left <= 0, reward=float(self.left == 0) if self.left <= 0 else None)

    @property
    def state(self) -> State:
        return State()


def countdown(text: str) -> dict[str, Any]:
    return {"by": int(text) if text.strip().isdecimal() else text}


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with running(create_fastapi_app(Countdown, Down, Left, max_concurrent_envs=64)) as address:
        yield address


class TestForeignServer(EnvConformance):
    """A server written with OpenEnv alone: forks by replay."""

    actions = ("1", "2", "wide", "3")

    @pytest.fixture(autouse=True)
    def _served(self, foreign: str, env_of: Callable[..., OpenEnvEnv]) -> None:
        self.url, self.env_of = foreign, env_of

    def make_env(self) -> OpenEnvEnv:
        return self.env_of(self.url, action=countdown, observation=lambda o: f"{o['left']} left")

    def test_episode(self) -> None:
        env = self.make_env()
        assert env.reset(seed=1)[0] == "6 left"
        assert fork_support(env) == "replay"
        assert env.step("3")[:4] == ("3 left", 0.0, False, False)
        assert "by: Input should be a valid integer" in env.step("sideways")[0]
        twin = fork(env)
        assert env.step("3")[:4] == ("0 left", 1.0, True, False)
        _, _, terminated, truncated, info = twin.step("9")
        assert (terminated, truncated, info["stop_reason"], info["scored"]) == (False, True, "env_error", False) and "too wide" in info["answer"]
        twin.close()


# -- the way there and back changes nothing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [None, {"task": 7}, {"task": {"question": "What?", "answer": "this"}}, {"task": Task(question="Q", answer=("a", "b"), id="own", metadata={"level": 3})}],
)
def test_an_episode_is_the_same_as_without_a_server(options: dict[str, Any] | None, url: str, env_of: Any) -> None:
    local, remote = make_tool_env(), env_of(url)
    assert remote.reset(seed=11, options=options) == local.reset(seed=11, options=options)
    assert play(remote, PLAYED) == play(local, PLAYED)
    assert remote.reset(seed=11, options=options) == local.reset(seed=11, options=options)
    for _ in range(2):
        assert remote.step("<note>n</note>") == local.step("<note>n</note>")
    assert remote.truncate("context_full") == local.truncate("context_full"), "a cut episode is scored where the environment is"
    local.close()


def test_the_turn_limit_of_the_server_truncates(url: str, env_of: Any) -> None:
    env = env_of(url)
    env.reset(seed=0)
    *_, (_, _, terminated, truncated, info) = play(env, ["nothing"] * 6)
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "max_turns")


def test_a_time_limit_on_the_server_can_still_be_scored(env_of: Any) -> None:
    with running(openenv_app(lambda: gymnasium.wrappers.TimeLimit(make_tool_env(), max_episode_steps=2))) as address:
        env = env_of(address)
        env.reset(seed=0)
        *_, (_, _, terminated, truncated, info) = play(env, ["<note>a</note>", "<note>b</note>", "<note>c</note>"])
        assert (terminated, truncated, info["turn"], info["stop_reason"]) == (False, True, 2, "")
        _, reward, _, truncated, info = env.truncate("time_limit")  # as a rollout does with a cut of which the environment inside knows nothing
        assert (reward, truncated, info["stop_reason"]) == (-1.0, True, "time_limit")


def test_the_seed_alone_decides_the_task(url: str, env_of: Any) -> None:
    one, two = env_of(url), env_of(url)
    drawn = [one.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    two.reset()
    assert [two.reset(seed=seed)[1]["task_id"] for seed in reversed(range(30))] == drawn[::-1]
    assert len(set(drawn)) > 10, "the seed must reach the environment"


def test_a_dialogue_is_served_too(env_of: Any) -> None:
    with running(openenv_app(Negotiation)) as address:
        local, remote = Negotiation(), env_of(address)
        assert remote.reset(seed=3, options={"task": 5}) == local.reset(seed=3, options={"task": 5})
        assert remote.step("I take everything.") == local.step("I take everything.")
        assert fork_support(remote) == "native"


# -- sessions ------------------------------------------------------------------------------------------------------------------------------------------


def test_sessions_are_independent_and_closed_when_their_client_leaves(url: str) -> None:
    wait_for_living(0)
    envs = [OpenEnvEnv(url) for _ in range(3)]
    for number, env in enumerate(envs):
        env.reset(seed=0)
        env.step(f"<note>{number}</note>")
    assert [env.step("<note>x</note>")[0] for env in envs] == [f"\n<result>\n{number} | x\n</result>\n" for number in range(3)]
    wait_for_living(3)
    envs[0].close()
    wait_for_living(2)
    envs[1]._session._socket.socket.close()  # gone without a word
    wait_for_living(1)
    del envs[2], env  # forgotten, not closed
    gc.collect()
    wait_for_living(0)
    envs[1].close()


def test_a_full_server_says_so(env_of: Any) -> None:
    with running(openenv_app(make_tool_env, max_sessions=1)) as address:
        env = env_of(address)
        env.reset(seed=0)
        with pytest.raises(ConnectionError, match="CAPACITY_REACHED"):
            env_of(address).reset(seed=0)
        with pytest.raises(ForkError, match="CAPACITY_REACHED"):
            fork(env)
        assert env.step("<note>still here</note>")[0]
        env.close()
        wait_for_living(0)


def test_a_server_that_stops_ends_the_episode(env_of: Any) -> None:
    with running(openenv_app(make_tool_env)) as address:
        env = env_of(address)
        env.reset(seed=0)
    wait_for_living(0)
    _, reward, _, truncated, info = env.step("<note>x</note>")
    assert (reward, truncated, info["stop_reason"], info["scored"]) == (0.0, True, "env_error", False)
    with pytest.raises(ConnectionError, match="no OpenEnv server answers"):
        env.reset(seed=0)


# -- forks ---------------------------------------------------------------------------------------------------------------------------------------------


def test_the_server_forks_its_environment_all_at_once(url: str, env_of: Any) -> None:
    env = env_of(url)
    env.reset(seed=0)
    env.step("<note>shared</note>")
    assert fork_support(env) == "copy", "as the environment behind the server does"
    Watched.forks.clear()
    twins = fork(env, 3)
    assert Watched.forks == [3]
    assert [twin.step(f"<note>{n}</note>")[0] for n, twin in enumerate(twins)] == [f"\n<result>\nshared | {n}\n</result>\n" for n in range(3)]
    grandchild = fork(twins[0])
    twins[0].close()
    env.close()
    assert grandchild.step("<note>g</note>")[0] == "\n<result>\nshared | 0 | g\n</result>\n"
    grandchild.close()
    for twin in twins:
        twin.close()
    wait_for_living(0)


def test_a_branching_rollout_over_a_server_is_the_rollout_without_one(url: str, env_of: Any) -> None:
    def turn(context: str, seed: int) -> Turn:
        calls = context.count("</note>")
        return Turn(f"<note>{calls}.{seed % 100}</note>" if calls < 3 else "<answer>\\boxed{answer 1}</answer>", float(calls))

    def tree(env: Any) -> Any:
        return sample_one(Writer(turn), env, UniformBranching(), group_size=6, initial=2, options=[{"task": 1}], env_workers=4).canonical()

    local, remote = make_tool_env(), env_of(url)
    sampled = tree(remote)
    check_tree(sampled, size=6, initial=2)
    assert any(trajectory.origin == "branched" for trajectory in sampled.trajectories)
    assert sampled == tree(local)
    assert all(trajectory.reward == 1.0 for trajectory in sampled.trajectories)
    for env in (local, remote):
        env.close()
    wait_for_living(0)


def test_forks_that_nobody_adopts_go_with_their_maker(url: str) -> None:
    wait_for_living(0)
    session = Session(url, timeout=60.0, headers={})
    session.ask("reset", {"seed": 0})
    keys = session.ask("step", {"fork": 2})["observation"]["forks"]
    wait_for_living(3)
    other = Session(url, timeout=60.0, headers={})
    other.ask("reset", {"adopt": keys[0]})
    with pytest.raises(Refused, match="adopted before"):
        other.ask("reset", {"adopt": keys[0]})
    session.close()
    wait_for_living(1)
    with pytest.raises(Refused, match="has ended"):
        other.ask("reset", {"adopt": keys[1]})
    other.ask("step", {"text": "<note>on</note>"})
    other.close()
    wait_for_living(0)


def test_an_environment_that_cannot_fork_refuses(env_of: Any) -> None:
    class Fixed(Notebook):
        fork_support = "none"

    with running(openenv_app(lambda: ToolEnv(TASKS, [Fixed()]))) as address:
        env = env_of(address)
        env.reset(seed=0)
        assert fork_support(env) == "none"
        with pytest.raises(ForkError, match=r"'note' .*cannot be forked"):
            fork(env)
        assert env.step("<note>on</note>")[0]


class Raising(DialogueEnv):
    def __init__(self) -> None:
        super().__init__(max_turns=4)

    def begin(self, rng: Any) -> tuple[str, str]:
        return "t", "hello"

    def reply(self, heard: str) -> Reply:
        if heard == "odd":
            return Reply("lone \ud800 surrogate")
        raise RuntimeError("a bug in the environment")


def test_what_the_environment_raises_ends_the_episode(env_of: Any) -> None:
    with running(openenv_app(Raising)) as address:
        env = env_of(address)
        env.reset(seed=0)
        assert env.step("odd")[0] == "lone ? surrogate"
        *_, info = env.step("x")
        assert info["stop_reason"] == "env_error" and "a bug in the environment" in info["answer"] and not info["scored"]
        assert env.reset(seed=0)[0] == "hello"


# -- OpenEnv's own client and task discovery -----------------------------------------------------------------------------------------------------------


def test_openenv_s_own_client_plays_an_episode(url: str) -> None:
    local = make_tool_env()
    question, _ = local.reset(seed=4)
    with GenericEnvClient(base_url=url).sync() as client:
        result = client.reset(seed=4)
        assert result.observation["text"] == question and result.observation["info"]["task_id"] == local.episode.task.id and not result.done
        result = client.step({"text": "<note>hello</note>"})
        assert result.observation["text"] == "\n<result>\nhello\n</result>\n" and result.reward == 0.0
        assert client.state()["step_count"] == 1
        result = client.step({"text": f"<answer>\\boxed{{{local.episode.task.answer}}}</answer>"})
        assert result.done and result.reward == 1.0 and not result.observation["truncated"]
        assert client.reset(index=3).observation["info"]["task_id"] == "t3"
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.step({"words": "x"})
    local.close()


def test_task_discovery_keeps_the_answers(url: str) -> None:
    ask = {"split": "train", "index": 3, "start": 38, "stop": None}

    def post(route: str, *names: str) -> Any:
        return httpx.post(f"{url}/arpo/{route}", json={name: ask[name] for name in names}).raise_for_status().json()

    assert httpx.get(f"{url}/arpo/splits").json() == [{"name": "train", "type": "train"}]
    assert post("num_tasks", "split") == {"num_tasks": 40}
    assert post("task", "split", "index") == {"task": {"id": "t3", "index": 3, "question": "question 3"}}
    assert [task["id"] for task in post("task_range", "split", "start", "stop")["tasks"]] == ["t38", "t39"]
    assert "answer 3" not in str(post("tasks", "split"))
    assert httpx.get(f"{url}/metadata").json()["name"] == "Watched"


def test_serve_runs_the_app_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **where: run.update(where, app=app))
    serve(make_tool_env)
    assert (run["host"], run["port"]) == ("127.0.0.1", 8000), "nobody else is let in unless asked for"
    serve(make_tool_env, host="0.0.0.0", port=9)
    assert (run["host"], run["port"]) == ("0.0.0.0", 9)
    assert any(getattr(route, "path", "") == "/ws" for route in run["app"].routes)


def test_an_environment_before_reset_is_not_stepped(url: str) -> None:
    session = Session(url, timeout=60.0, headers={})
    with pytest.raises(Refused, match=r"EXECUTION_ERROR.*reset"):
        session.ask("step", {"text": "x"})
    session.close()
    with pytest.raises(gymnasium.error.ResetNeeded):
        OpenEnvEnv(url).step("x")
