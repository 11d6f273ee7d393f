"""GEM's environments: episodes decided by the seed alone, process-wide generators left alone, calls and failures reported."""

from __future__ import annotations

import logging
import random
import sys
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest

import arpo_env
from arpo_env.testing import EnvConformance, check_fork

pytest.importorskip("gem")
pytest.importorskip("nltk")

import gem
import nltk
from gem.tools.base_tool import BaseTool
from gem.tools.python_code_tool import PythonCodeTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper

from arpo_env.interop.gem import GemEnv

GUESS = "game:GuessTheNumber-v0-easy"
GUESSES = tuple(f"<think>\\boxed{{1}}</think> \\boxed{{{n}}}" for n in (5, 3, 9, 7))
DRAWING = "game:Game2048-v0-easy"  # draws a tile at every step
MOVES = ("\\boxed{up}", "\\boxed{left}", "\\boxed{down}", "\\boxed{right}", "\\boxed{up}")


class TestGuessTheNumber(EnvConformance):
    actions = GUESSES

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return GemEnv(GUESS)


class TestGame2048(EnvConformance):
    actions = MOVES

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return GemEnv(DRAWING)


class TestGame2048ByReplay(EnvConformance):
    actions = MOVES[:3]

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return GemEnv(DRAWING, forks="replay")


class TestReasoningGym(EnvConformance):
    actions = ("\\boxed{4}",)

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return GemEnv("rg:leg_counting", size=10)


class Doubler(BaseTool):  # type: ignore[misc]
    """Doubles the number between <double> tags; counts its calls, so that two branches that share it would see one another."""

    tool_type = "double"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def instruction_string(self) -> str:
        return "Write <double>n</double> to double n."

    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        _, opened, rest = action.partition("<double>")
        if not opened:
            return False, True, "", action
        self.calls += 1
        given = rest.partition("</double>")[0]
        number = int(given) if given.strip().isdigit() else None
        return True, number is None, f"call {self.calls}: {'not a number' if number is None else 2 * number}", action


def with_tool() -> Any:
    return ToolEnvWrapper(gem.make("rg:leg_counting", size=10), tools=[Doubler()], tool_reward=0.25, max_tool_uses=3)


class TestToolByReplay(EnvConformance):
    """A tool that is not GEM's own: whether its deepcopy is right is not known, so its environment is replayed."""

    actions = ("<double>4</double>", "<double>x</double>", "\\boxed{4}")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return GemEnv(with_tool)


def test_what_the_policy_reads_is_new_and_holds_the_board() -> None:
    env = GemEnv("game:Minesweeper-v0-easy")
    opening, info = env.reset(seed=0)
    assert "Here is the current board layout" in opening
    assert info["messages"] == [{"role": "user", "content": opening}]
    observation, *_ = env.step("\\boxed{reveal 2 2}")
    assert "Here is the current board layout" in observation
    assert opening not in observation


def test_an_episode_is_gems_own_with_that_seed() -> None:
    env, theirs = GemEnv(GUESS), gem.make(GUESS)
    outside = random.getstate()
    text, _ = theirs.reset(seed=1234)
    random.setstate(outside)
    observation, info = env.reset(options={"task": 1234})
    assert observation == f"{text}\nEnter your next guess."
    assert info["task_id"] == f"{GUESS}/1234" == env.tasks[1234].id
    assert env.library_env.game_number == theirs.game_number
    assert env.reset(options={"task": env.tasks[1234]})[1] == info
    rewards = [env.step(f"\\boxed{{{theirs.game_number}}}")[1:4]]
    assert rewards == [(1.0, True, False)]


def test_process_wide_generators_are_left_alone() -> None:
    """GEM's reset seeds them and its games draw from them; others in the process must not notice, and the game must not notice others."""
    random.seed(5)
    np.random.seed(5)
    np.random.normal()  # half of a pair is kept for the next draw, which is part of the state
    before = random.getstate(), np.random.get_state()
    quiet, noisy = GemEnv(DRAWING), GemEnv(DRAWING)
    quiet.reset(seed=3)
    noisy.reset(seed=3)
    expected = [quiet.step(move)[0] for move in MOVES]
    after = random.getstate(), np.random.get_state()
    assert before[0] == after[0]
    assert all(np.array_equal(one, other) for one, other in zip(before[1], after[1], strict=True))
    got = []
    for move in MOVES:
        random.seed(0)
        np.random.seed(0)
        got.append(noisy.step(move)[0])
    assert got == expected


def test_an_environment_that_ignores_its_seed_is_decided_by_it_all_the_same() -> None:
    class Careless(gem.Env):  # type: ignore[misc]
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return f"{random.random()} {np.random.random()}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return f"{random.random()} {np.random.random()}", 0.0, False, False, {}

    env = GemEnv(Careless)
    first = env.reset(seed=1)
    then = env.step("x")
    assert env.reset(seed=2)[0] != first[0]
    assert (env.reset(seed=1), env.step("x")) == (first, then)
    check_fork(lambda: GemEnv(Careless), ["x"] * 3)
    check_fork(lambda: GemEnv(Careless, forks="copy"), ["x"] * 3)


def test_one_environment_holds_the_generators_at_a_time() -> None:
    inside, entered = threading.Event(), threading.Event()

    class Slow(gem.Env):  # type: ignore[misc]
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return "go on", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if action == "wait":
                inside.set()
                return f"alone: {not entered.wait(0.2)}", 0.0, False, False, {}
            entered.set()
            return "", 0.0, False, False, {}

    one, other = GemEnv(Slow), GemEnv(Slow)
    one.reset(seed=0)
    other.reset(seed=0)

    def second() -> None:
        assert inside.wait(60)
        other.step("enter")

    thread = threading.Thread(target=second)
    thread.start()
    observation = one.step("wait")[0]
    thread.join()
    assert observation == "alone: True"
    assert entered.is_set()


def test_forks_draw_alike_and_apart() -> None:
    env = GemEnv(DRAWING)
    env.reset(seed=3)
    env.step(MOVES[0])
    one, other = env.fork(), env.fork()
    assert [one.step(move) for move in MOVES[1:4]] == [other.step(move) for move in MOVES[1:4]]
    assert one.library_env is not env.library_env


def test_an_episode_does_not_depend_on_how_many_came_before() -> None:
    """GEM's reasoning-gym environment makes new data when its counter reaches the size."""
    env = GemEnv("rg:leg_counting", size=4)
    first = env.reset(seed=8)
    for seed in range(6):
        env.reset(seed=seed)
    assert env.reset(seed=8) == first


def test_an_episode_of_one_turn_is_terminated_not_truncated() -> None:
    env = GemEnv("rg:leg_counting", size=4)
    env.reset(seed=0)
    entry = env.library_env.data
    observation, reward, terminated, truncated, info = env.step(f"\\boxed{{{entry['answer']}}}")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert (info["stop_reason"], info["answer"], info["messages"]) == ("answer", "", [])


def test_calls_of_gems_tools() -> None:
    env = GemEnv(with_tool)
    opening, _ = env.reset(seed=0)
    assert "Write <double>n</double>" in opening
    observation, reward, _, _, info = env.step("<double>4</double>")
    assert (observation, reward, info["n_tool_calls"]) == ("call 1: 8", 0.25, 1)
    assert info["tool_calls"] == [{"name": "double", "arguments": {"turn": "<double>4</double>"}, "ok": True, "error": "", "executed": True}]
    *_, info = env.step("<double>x</double>")
    assert [(call["ok"], call["error"]) for call in info["tool_calls"]] == [(False, "exception")]
    assert info["n_tool_calls"] == 2
    assert env.step("\\boxed{1}")[4]["tool_calls"] == []


def test_a_fork_by_replay_has_a_tool_of_its_own() -> None:
    env = GemEnv(with_tool)
    assert arpo_env.fork_support(env) == "replay"
    env.reset(seed=0)
    env.step("<double>4</double>")
    twin = env.fork()
    assert twin.step("<double>5</double>")[0].startswith("call 2: 10")
    assert env.step("<double>6</double>")[0].startswith("call 2: 12")


def test_a_replay_that_differs_is_refused() -> None:
    """The same seed gives another episode in an environment that draws from a generator of its own."""
    numbers = iter(range(100))

    class Unrepeatable(gem.Env):  # type: ignore[misc]
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return f"opening {next(numbers)}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 0.0, False, False, {}

    env = GemEnv(Unrepeatable)
    env.reset(seed=0)
    with pytest.raises(arpo_env.ForkError, match=r"replay differs at reset.*Unrepeatable/\d+ is not deterministic"):
        env.fork()


def test_many_forks_refuse_as_one_does() -> None:
    env = GemEnv(GUESS)
    env.reset(seed=0)
    env.library_env.lock = threading.Lock()
    for fork in (env.fork, lambda: env.fork_many(2), lambda: arpo_env.fork(env, 2)):
        with pytest.raises(arpo_env.ForkError, match=r'cannot be forked by copy: TypeError.*pass forks="replay"'):
            fork()


def test_info_says_where_code_runs() -> None:
    def with_python() -> Any:
        return ToolEnvWrapper(gem.make(GUESS), tools=[PythonCodeTool()])

    assert GemEnv(with_python).reset(seed=0)[1]["isolation"] == "process"
    assert GemEnv(GUESS).reset(seed=0)[1]["isolation"] == ""


class Fragile(gem.Env):  # type: ignore[misc]
    """Raises what the turn names."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "go on", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "down":
            raise ConnectionError("no route")
        return action, 0.5 if int(action) else 0.0, False, False, {}


@pytest.mark.parametrize(
    ("error_reward", "turn", "expected"),
    [
        (None, "words", (0.0, "env_error", False)),
        (-1.0, "words", (-1.0, "library_error", True)),
        (-1.0, "down", (0.0, "env_error", False)),  # says nothing about the text
    ],
)
def test_what_gem_raises_ends_the_episode(error_reward: float | None, turn: str, expected: tuple[Any, ...], caplog: pytest.LogCaptureFixture) -> None:
    env = GemEnv(Fragile, error_reward=error_reward)
    env.reset(seed=0)
    assert env.step("1")[1:4] == (0.5, False, False)
    _, reward, terminated, truncated, info = env.step(turn)
    assert (reward, info["stop_reason"], info["scored"]) == expected
    assert (terminated, truncated) == (False, True)
    assert info["errors"] == [info["answer"]]
    assert info["answer"].startswith("ConnectionError: no route" if turn == "down" else "ValueError: ")
    assert env.telemetry.snapshot() == {expected[1]: 1.0}
    assert expected[1] in caplog.text
    env.reset(seed=0)
    assert env.step("0")[4]["stop_reason"] == ""


def test_an_environment_that_cannot_be_copied_says_what_to_do() -> None:
    class WithALock(Fragile):
        def __init__(self) -> None:
            self.lock = sys.stdout.buffer

    env = GemEnv(WithALock)
    assert env.fork_support == "replay"
    with pytest.raises(ValueError, match=r"WithALock cannot be deep-copied .*forks='replay'"):
        GemEnv(WithALock, forks="copy")
    check_fork(lambda: GemEnv(WithALock), ["1", "0"])


def test_no_history_wrapper() -> None:
    from gem.wrappers.observation_wrapper import ObservationWrapper

    with pytest.raises(ValueError, match="ObservationWrapper, which repeats the whole conversation"):
        GemEnv(lambda: ObservationWrapper(gem.make(GUESS), include_action=False, include_chat_template=False))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env": "game:GuessTheNumber-v0"}, ValueError, r"GEM has no environment 'game:GuessTheNumber-v0'; did you mean \['game:GuessTheNumber-v0-"),
        ({"env": GUESS, "forks": "deepcopy"}, ValueError, "forks must be 'copy' or 'replay', got 'deepcopy'"),
        ({"env": GUESS, "stop_strings": "}"}, TypeError, "stop_strings must be a sequence of strings"),
        ({"env": with_tool, "size": 3}, TypeError, r"arguments go to the function that makes the environment, got \['size'\]"),
        ({"env": "game:FifteenPuzzle-v0-random"}, TypeError, "FifteenPuzzle-v0-random cannot be made"),
    ],
)
def test_wrong_configuration(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GemEnv(**arguments)


def test_wrong_tasks() -> None:
    env = GemEnv(GUESS)
    with pytest.raises(IndexError, match="must be at least 0, got -1"):
        env.reset(options={"task": -1})
    with pytest.raises(ValueError, match="is no episode of"):
        env.reset(options={"task": arpo_env.Task(question="?")})
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel 0.1.0 declares neither ``datasets`` nor ``pylatexenc``."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "gem.envs.math_env", raising=False)
    with pytest.raises(ImportError, match=r"GEM's math:GSM8K needs something that cannot be imported: .*datasets"):
        GemEnv("math:GSM8K")


def test_missing_word_lists_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(FileNotFoundError, match=r"Wordle-v0-easy needs word lists of NLTK.*nltk\.downloader words"):
        GemEnv("game:Wordle-v0-easy")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[gem\]'"):
        GemEnv(GUESS)


def test_the_root_logger_keeps_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEM calls ``logging.basicConfig`` when it is imported."""
    for name in [name for name in sys.modules if name == "gem"]:
        monkeypatch.delitem(sys.modules, name)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    GemEnv(GUESS)
    assert root.handlers == []
    assert root.level == level
