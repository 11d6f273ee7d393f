"""TextArena's games: what is new at each turn, opponents, generators of their own, and what cannot be made."""

from __future__ import annotations

import random
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

import arpo_env
from arpo_env.testing import EnvConformance

pytest.importorskip("textarena")
pytest.importorskip("nltk")

import nltk
import textarena
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

from arpo_env.interop.textarena import TextArenaEnv, bracketed_move

GUESS = "GuessTheNumber-v0"
CELLS = tuple(f"[{cell}]" for cell in (4, 0, 1, 2, 3, 5, 6, 7, 8))


class TestGuessTheNumber(EnvConformance):
    actions = ("[5]", "seven", "[17]", "[30]", "[31]")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return TextArenaEnv(GUESS)


class TestTicTacToe(EnvConformance):
    actions = CELLS

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return TextArenaEnv("TicTacToe-v0", 2, bracketed_move)


class TestTicTacToeByReplay(EnvConformance):
    actions = CELLS

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return TextArenaEnv("TicTacToe-v0", 2, bracketed_move, forks="replay")


class TestPigDice(EnvConformance):
    """Dice are thrown at every step, by the policy and by the opponent."""

    actions = ("[roll]", "[roll]", "[hold]", "[roll]", "[hold]")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return TextArenaEnv("PigDice-v0", 2, lambda observation, rng: "[roll]" if rng.random() < 0.5 else "[hold]")


def test_what_the_policy_reads_is_new_and_not_its_own_words() -> None:
    env = TextArenaEnv(GUESS)
    opening, info = env.reset(options={"task": 3})
    assert opening.startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    assert info["messages"] == [{"role": "user", "content": opening}]
    assert info["task_id"] == f"{GUESS}/3" == env.tasks[3].id
    secret = env.library_env.game_number
    guess = 20 if secret < 20 else 19
    observation, *_ = env.step(f"I say [{guess}]")
    assert observation == ("[GAME] The target number is lower." if secret < guess else "[GAME] The target number is higher.")


def test_the_episode_before_leaves_nothing_behind() -> None:
    """TextArena's own wrapper begins the next episode with the whole history of the last one."""
    env = TextArenaEnv(GUESS)
    first = env.reset(seed=1)
    env.step("[1]")
    env.reset(seed=2)
    env.step("[2]")
    assert env.reset(seed=1) == first


def test_an_episode_is_textarenas_own_with_that_seed() -> None:
    outside = random.getstate()
    theirs = textarena.make(GUESS)
    theirs.reset(num_players=1, seed=77)
    random.setstate(outside)
    env = TextArenaEnv(GUESS)
    env.reset(options={"task": 77})
    assert env.library_env.game_number == theirs.game_number
    observation, reward, terminated, truncated, info = env.step(f"[{theirs.game_number}]")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert (info["answer"], info["stop_reason"], info["errors"]) == ("Congratulations! You guessed the correct number.", "answer", [])


def test_thoughts_are_not_spoken() -> None:
    """TextArena takes the first number in brackets: a thought would be the move, and the opponents would read it."""
    env = TextArenaEnv(GUESS)
    env.reset(seed=0)
    env.step("<think>perhaps [1], no</think> [20]")
    assert env.library_env.guessed_numbers == {20}


def test_brackets_are_added_as_textarena_does() -> None:
    env = TextArenaEnv(GUESS)
    env.reset(seed=0)
    env.step("20")
    assert env.library_env.guessed_numbers == {20}
    raw = TextArenaEnv(f"{GUESS}-raw")
    raw.reset(seed=0)
    assert "invalid move" in raw.step("20")[0]


def test_the_end_of_a_bad_game_says_why() -> None:
    env = TextArenaEnv(GUESS)
    env.reset(seed=0)
    assert env.step("[99]")[1:4] == (0.0, False, False)
    _, _, terminated, _, info = env.step("[99]")
    assert terminated
    assert info["errors"] == [info["answer"]]
    assert "outside the range" in info["answer"]


def test_process_wide_generators_are_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    game = "2048-v0"
    quiet, noisy = TextArenaEnv(game), TextArenaEnv(game)
    quiet.reset(seed=3)
    noisy.reset(seed=3)
    moves = ("[Up]", "[Left]", "[Down]", "[Right]")
    expected = [quiet.step(move)[0] for move in moves]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    got = []
    for move in moves:
        random.seed(0)
        got.append(noisy.step(move)[0])
    assert got == expected
    assert len(set(expected)) == 4


class Script:
    """An opponent with a state: it says its lines in turn."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        self.lines, self.heard = list(lines), []  # type: ignore[var-annotated]

    def __call__(self, observation: str, rng: np.random.Generator) -> str:
        self.heard.append(observation)
        return self.lines.pop(0)


def test_the_opponent_reads_its_own_side_and_forks_with_the_game() -> None:
    script = Script(("[0]", "[1]", "[2]"))
    env = TextArenaEnv("TicTacToe-v0", 2, script)
    env.reset(seed=0)
    observation, *_ = env.step("[4]")
    assert "Player 1 placed their symbol (X) in cell 0" in observation
    assert "[Player 0] [4]" not in observation
    twin = env.fork()
    assert "cell 1" in env.step("[8]")[0]
    assert "cell 1" in twin.step("[3]")[0]
    assert script.heard == []
    played = env._opponent
    assert isinstance(played, Script)
    assert played.heard[0].startswith("[GAME] You are Player 1 in Tic Tac Toe.")
    assert "[Player 0] [8]" in played.heard[1]
    env.reset(seed=0)
    assert "cell 0" in env.step("[4]")[0]


def test_an_opponent_that_loses_gives_the_reward() -> None:
    env = TextArenaEnv("TicTacToe-v0", 2, lambda observation, rng: "nonsense")
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("[4]")
    assert (reward, terminated, info["errors"]) == (1.0, True, [])


def test_a_game_in_which_others_play_first() -> None:
    env = TextArenaEnv("KuhnPoker-v0", 2, lambda observation, rng: "[check]")
    opening, _ = env.reset(seed=0)
    assert "[Player 1] [check]" in opening
    assert env.library_env.state.current_player_id == 0


@pytest.mark.parametrize(
    ("observation", "moves"),
    [
        ("For example, '[4]'. Available Moves: '[0]', '[7]'", {"[0]", "[7]"}),
        ("[GAME] Your valid actions are: [check], [bet]. [Player 0] hi", {"[check]", "[bet]"}),
        ("[GAME] say something", {"[pass]"}),
    ],
)
def test_bracketed_move(observation: str, moves: set[str]) -> None:
    rng = np.random.default_rng(0)
    assert {bracketed_move(observation, rng) for _ in range(40)} == moves


@pytest.mark.parametrize(("error_reward", "stop_reason", "scored"), [(None, "env_error", False), (-1.0, "library_error", True)])
def test_what_textarena_raises_ends_the_episode(error_reward: float | None, stop_reason: str, scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TextArenaEnv(GUESS, error_reward=error_reward)
    env.reset(seed=0)
    monkeypatch.setattr(GuessTheNumberEnv, "step", lambda self, action: self.state.add_observation(action))
    _, reward, terminated, truncated, info = env.step("[1]")
    assert (reward, terminated, truncated) == (error_reward or 0.0, False, True)
    assert (info["stop_reason"], info["scored"]) == (stop_reason, scored)
    assert info["answer"].startswith("TypeError: State.add_observation() missing")


def test_a_game_that_opponents_end_before_the_first_turn_is_begun_anew() -> None:
    def folds_often(observation: str, rng: np.random.Generator) -> str:
        return "[fold]" if rng.random() < 0.8 else "[check]"

    env = TextArenaEnv("IndianPoker-v0", 2, folds_often)
    openings = [env.reset(seed=seed) for seed in range(8)]
    assert all(info["stop_reason"] == "" and info["messages"] for _, info in openings)
    assert [env.reset(seed=seed) for seed in range(8)] == openings
    hopeless = TextArenaEnv("KuhnPoker-v0", 2, lambda observation, rng: "nonsense")
    with pytest.raises(RuntimeError, match=r"KuhnPoker-v0/\d+ ended 20 times before the policy's first turn"):
        hopeless.reset(seed=0)


def test_what_an_opponent_raises_ends_the_episode() -> None:
    def unreachable(observation: str, rng: np.random.Generator) -> str:
        raise ConnectionError("the other model is down")

    env = TextArenaEnv("TicTacToe-v0", 2, unreachable, error_reward=-1.0)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("[4]")
    assert (reward, terminated, truncated, info["stop_reason"], info["scored"]) == (0.0, False, True, "env_error", False)
    assert info["answer"] == "ConnectionError: the other model is down"


def test_opponents_that_go_on_for_ever_end_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo_env.interop.textarena.MAX_OPPONENT_TURNS", 20)
    env = TextArenaEnv("TicTacToe-v0", 2, lambda observation, rng: "[0]")
    env.reset(seed=0)
    env.library_env.state.error_allowance = 10**9
    _, _, _, truncated, info = env.step("[0]")
    assert (truncated, info["stop_reason"], info["scored"]) == (True, "env_error", False)
    assert "took 20 turns in a row" in info["answer"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env": "GuessNumber-v0"}, ValueError, r"TextArena has no environment 'GuessNumber-v0'; did you mean \['GuessTheNumber-v0'"),
        ({"env": "TicTacToe-v0"}, ValueError, "TicTacToe-v0 for 1 player.* has to be 2, received 1"),
        ({"env": "TicTacToe-v0", "num_players": 2}, ValueError, "num_players=2 needs an opponent="),
        ({"env": GUESS, "limit": 3}, TypeError, "limit"),
    ],
)
def test_wrong_configuration(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TextArenaEnv(**arguments)


def test_missing_word_lists_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.delitem(sys.modules, "textarena.envs.Hangman.env", raising=False)
    with pytest.raises(FileNotFoundError, match=r"Hangman-v0 for 1 player\(s\) needs word lists of NLTK.*nltk\.downloader words"):
        TextArenaEnv("Hangman-v0")


def test_a_game_that_asks_a_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENROUTER_API_KEY"):
        TextArenaEnv("TwentyQuestions-v0")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[textarena\]'"):
        TextArenaEnv(GUESS)


def test_fork_support() -> None:
    assert arpo_env.fork_support(TextArenaEnv(GUESS)) == "copy"
    assert arpo_env.fork_support(TextArenaEnv(GUESS, forks="replay")) == "replay"
