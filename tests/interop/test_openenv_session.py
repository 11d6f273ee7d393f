"""The client of OpenEnv servers against a scripted server: what it makes of failures, and its forks by replay."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

pytest.importorskip("websockets")

from arpo_env import ForkError, fork, fork_support
from arpo_env.interop.openenv import OpenEnvEnv
from arpo_env.interop.openenv_session import Refused
from arpo_env.testing import EnvConformance

Answer = dict[str, Any] | str | None
"""A message to send, text to send as it is, or None to close the connection."""


def says(text: str, *, reward: float | None = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, **fields}, "reward": reward, "done": done}}


def fails(code: str, message: str = "no", **data: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **data}}


class Echo:
    """A session of the scripted server: says back what it hears, with its seed and how much it heard; "end" ends the episode."""

    def __init__(self, number: int) -> None:
        self.seed, self.heard = 0, 0

    def reset(self, data: dict[str, Any]) -> Answer:
        self.seed, self.heard = data["seed"], 0
        return says(f"seed {self.seed}")

    def step(self, data: dict[str, Any]) -> Answer:
        self.heard += 1
        done = "end" in data["text"]
        return says(f"{self.heard}: {data['text']}", reward=1.0 if done else None, done=done)


class Server:
    """A websocket server with a new ``session(number)`` for each connection. ``received`` holds all messages, by connection."""

    def __init__(self, session: Callable[[int], Any]) -> None:
        from websockets.sync.server import serve

        self.received: list[list[dict[str, Any]]] = []
        self.open = 0
        self.changed = threading.Condition()
        self._session = session
        self._server = serve(self._handle, "127.0.0.1", 0)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def _handle(self, socket: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        with self.changed:
            messages: list[dict[str, Any]] = []
            self.received.append(messages)
            self.open += 1
            session = self._session(len(self.received))
        with contextlib.suppress(ConnectionClosed), contextlib.ExitStack() as stack:
            stack.callback(self._left)
            for message in map(json.loads, socket):
                messages.append(message)
                answer = getattr(session, message["type"])(message["data"])
                if answer is None:
                    return
                socket.send(answer if isinstance(answer, str) else json.dumps(answer))

    def _left(self) -> None:
        with self.changed:
            self.open -= 1
            self.changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[int], Any]], Server]]:
    with contextlib.ExitStack() as stack:

        def started(session: Callable[[int], Any]) -> Server:
            server = Server(session)
            stack.callback(server.close)
            return server

        yield started


@pytest.fixture
def env_of() -> Iterator[Callable[..., OpenEnvEnv]]:
    with contextlib.ExitStack() as stack:
        yield lambda url, **settings: stack.enter_context(contextlib.closing(OpenEnvEnv(url, **settings)))


class TestForeignServer(EnvConformance):
    """The whole environment contract over a server that knows nothing of this library: forks by replay."""

    actions = ("one", "two", "end")

    @pytest.fixture(autouse=True)
    def _server(self, start: Callable[..., Server], env_of: Callable[..., OpenEnvEnv]) -> None:
        self.url, self.env_of = start(Echo).url, env_of

    def make_env(self) -> OpenEnvEnv:
        return self.env_of(self.url)


def test_an_episode_over_a_foreign_server(start: Any, env_of: Any) -> None:
    server = start(Echo)
    env = env_of(server.url, system_prompt="Talk.", stop_strings=["\n"])
    observation, info = env.reset(seed=5, options={"level": "hard"})
    assert observation == "seed 5"
    assert info["messages"] == [{"role": "system", "content": "Talk."}, {"role": "user", "content": "seed 5"}]
    assert info["stop_strings"] == ("\n",)
    assert server.received[0] == [{"type": "reset", "data": {"level": "hard", "seed": 5}}]
    keys = info.keys()
    observation, reward, terminated, truncated, info = env.step("hello \ud800")
    assert (observation, reward, terminated, truncated) == ("1: hello ?", 0.0, False, False), "a lone surrogate is not JSON that servers accept"
    assert info["messages"] == [{"role": "user", "content": "1: hello ?"}] and info["turn"] == 1
    assert info.keys() == keys
    observation, reward, terminated, truncated, info = env.step("end")
    assert (observation, reward, terminated, truncated) == ("2: end", 1.0, True, False)
    assert info["stop_reason"] == "terminated" and info["scored"] and info["messages"] == [] and info.keys() == keys
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("more")


def test_an_episode_without_any_reward_is_not_scored(start: Any, env_of: Any) -> None:
    class Silent(Echo):
        def step(self, data: dict[str, Any]) -> Answer:
            return says("over", done=True)

    env = env_of(start(Silent).url)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("x")
    assert terminated and reward == 0.0 and not info["scored"], "a reward that was never given means nothing"


def test_truncated_by_the_server_and_from_outside(start: Any, env_of: Any) -> None:
    class Limited(Echo):
        def step(self, data: dict[str, Any]) -> Answer:
            return says("time is up", reward=0.5, done=True, truncated=True)

    env = env_of(start(Limited).url)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("x")
    assert (reward, terminated, truncated, info["stop_reason"]) == (0.5, False, True, "truncated")
    env.reset(seed=0)
    assert env.truncate("context_full")[:4] == ("", 0.0, False, True)
    with pytest.raises(gymnasium.error.ResetNeeded, match="context_full"):
        env.step("x")


# -- failures ------------------------------------------------------------------------------------------------------------------------------------------


class Vanishing(Echo):
    """The first session closes its connection at the second step."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.first = number == 1

    def step(self, data: dict[str, Any]) -> Answer:
        answer = super().step(data)
        return None if self.first and self.heard == 2 else answer


def test_a_lost_session_ends_its_episode_and_never_goes_on_in_another(start: Any, env_of: Any) -> None:
    server = start(Vanishing)
    env = env_of(server.url)
    env.reset(seed=0)
    env.step("one")
    observation, reward, terminated, truncated, info = env.step("two")
    assert (observation, reward, terminated, truncated) == ("", 0.0, False, True)
    assert info["stop_reason"] == "env_error" and not info["scored"] and "gone" in info["answer"]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("three")
    assert len(server.received) == 1, "a new connection would be another environment"
    twin = fork(env)
    with pytest.raises(gymnasium.error.ResetNeeded):
        twin.step("three")
    assert env.reset(seed=1)[0] == "seed 1", "the next episode begins a new session"
    assert env.step("one")[0] == "1: one"
    assert len(server.received) == 2


def test_a_session_lost_between_episodes_is_replaced(start: Any, env_of: Any) -> None:
    class Leaves(Echo):
        def reset(self, data: dict[str, Any]) -> Answer:
            return None if data["seed"] == 1 and self.heard else super().reset(data)

    server = start(Leaves)
    env = env_of(server.url)
    env.reset(seed=0)
    env.step("x")
    assert env.reset(seed=1)[0] == "seed 1"
    assert len(server.received) == 2


def test_a_silent_server_costs_its_own_deadline(start: Any, env_of: Any) -> None:
    release = threading.Event()

    class Stuck(Echo):
        def step(self, data: dict[str, Any]) -> Answer:
            release.wait(60)
            return None

    env = env_of(start(Stuck).url)
    env.reset(seed=0)
    env._session._timeout = 0.3  # not before: connecting may take its time
    _, _, _, truncated, info = env.step("x")
    release.set()
    assert truncated and info["stop_reason"] == "env_timeout" and not info["scored"]
    assert "0.3 s" in info["answer"]


@pytest.mark.parametrize(
    "answer",
    [
        "not json",
        "[1]",
        '{"type": "observation", "data": {}}',
        '{"data": {}}',
        says("x") | {"data": {"observation": {"text": "x"}, "reward": "much"}},
        fails("EXECUTION_ERROR", "division by zero"),
        fails("SESSION_ERROR", "broken"),
    ],
)
def test_a_failing_step_is_no_exception(answer: Answer, start: Any, env_of: Any) -> None:
    class Failing(Echo):
        def step(self, data: dict[str, Any]) -> Answer:
            return answer

    env = env_of(start(Failing).url)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("x")
    assert (reward, terminated, truncated, info["stop_reason"], info["scored"]) == (0.0, False, True, "env_error", False)
    if isinstance(answer, dict) and answer["type"] == "error":
        assert answer["data"]["message"] in info["answer"]
    env.reset(seed=0)


def test_reset_says_why_it_fails(start: Any, env_of: Any) -> None:
    class Full(Echo):
        def reset(self, data: dict[str, Any]) -> Answer:
            return fails("CAPACITY_REACHED", "2 of 2 sessions")

    class Broken(Echo):
        def reset(self, data: dict[str, Any]) -> Answer:
            return fails("EXECUTION_ERROR", "no such level")

    with pytest.raises(ConnectionError, match="2 of 2 sessions"):
        env_of(start(Full).url).reset(seed=0)
    with pytest.raises(Refused, match="no such level"):
        env_of(start(Broken).url).reset(seed=0)
    stopped = start(Echo)
    stopped.close()
    env = env_of(stopped.url)
    with pytest.raises(ConnectionError, match="no OpenEnv server answers"):
        env.reset(seed=0)
    with pytest.raises(ForkError, match="before reset"):
        fork(env)


def test_a_login_in_the_address_stays_out_of_errors(start: Any, env_of: Any) -> None:
    class Leaving(Echo):
        def step(self, data: dict[str, Any]) -> Answer:
            return None

    server = start(Leaving)
    env = env_of(server.url.replace("//", "//me:secret@"))
    env.reset(seed=0)
    assert "is gone" in (answer := env.step("x")[4]["answer"]) and "secret" not in answer
    server.close()
    with pytest.raises(ConnectionError) as caught:
        env.reset(seed=0)
    assert "secret" not in str(caught.value)


def test_a_text_that_is_no_action_is_answered(start: Any, env_of: Any) -> None:
    class Strict(Echo):
        def step(self, data: dict[str, Any]) -> Answer:
            if "move" not in data:
                return fails("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["move"], "msg": "Field required"}])
            return super().step({"text": data["move"]})

    server = start(Strict)
    env = env_of(server.url, action=json.loads)  # a JSONDecodeError is a ValueError
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("up")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert observation.startswith("That was no valid action: Expecting value") and info["messages"] == [{"role": "user", "content": observation}]
    assert len(server.received[0]) == 1, "nothing was sent"
    observation, *_, info = env.step('{"go": "up"}')
    assert "move: Field required" in observation and info["errors"] and info["turn"] == 2
    assert env.step('{"move": "up"}')[0] == "1: up"
    twin = fork(env)
    assert [message["data"] for message in server.received[1]] == [{"seed": 0}, {"move": "up"}], "only what the server took is replayed"
    assert twin.step('{"move": "down"}') == env.step('{"move": "down"}')
    twin.close()


def test_an_observation_without_text_names_what_there_is(start: Any, env_of: Any) -> None:
    class Board(Echo):
        def reset(self, data: dict[str, Any]) -> Answer:
            return {"type": "observation", "data": {"observation": {"board": [1, 2]}, "done": False}}

    server = start(Board)
    with pytest.raises(ValueError, match=r"\['board'\]; pass observation="):
        env_of(server.url).reset(seed=0)
    assert env_of(server.url, observation=lambda o: str(o["board"])).reset(seed=0)[0] == "[1, 2]"


# -- forks ---------------------------------------------------------------------------------------------------------------------------------------------


def test_a_fork_that_turns_out_different_is_an_error(start: Any, env_of: Any) -> None:
    class SeedDropped(Echo):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.number = number

        def reset(self, data: dict[str, Any]) -> Answer:
            return super().reset({"seed": self.number})

    class Random(Echo):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.number = number

        def step(self, data: dict[str, Any]) -> Answer:
            return says(f"{self.number}")

    for session, where in ((SeedDropped, "reset"), (Random, "step 1")):
        env = env_of(start(session).url)
        env.reset(seed=0)
        env.step("x")
        with pytest.raises(ForkError, match=f"differs at {where}"):
            fork(env)
        env.step("y")  # the parent goes on


def test_a_fork_says_how_and_fails_as_one(start: Any, env_of: Any) -> None:
    class Few(Echo):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.number = number

        def reset(self, data: dict[str, Any]) -> Answer:
            return super().reset(data) if self.number < 3 else fails("CAPACITY_REACHED", "2 of 2 sessions")

    server = start(Few)
    env = env_of(server.url)
    assert fork_support(env) == "replay"
    env.reset(seed=0)
    with pytest.raises(ForkError, match="2 of 2 sessions"):
        fork(env, 2)
    assert env.step("x")[0] == "1: x"
    with server.changed:
        assert server.changed.wait_for(lambda: server.open == 1, timeout=60), f"{server.open} sessions are open, one is in use"


def test_wrong_settings_raise_at_construction() -> None:
    with pytest.raises(ValueError, match="http"):
        OpenEnvEnv("localhost:8000")
    with pytest.raises(ValueError, match="timeout"):
        OpenEnvEnv("http://localhost:8000", timeout=0)
