"""``GuessNumber``: hints, rewards worked by hand, and what counts as a guess."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from arpo_env.envs.dialogue import spoken
from arpo_env.envs.guess_number import GuessNumber
from arpo_env.testing import EnvConformance


class TestConformance(EnvConformance):
    actions = ("50", "I say 20.", "no idea", "75", "90")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return GuessNumber()


def hiding(number: int, **keywords: int) -> GuessNumber:
    env = GuessNumber(**keywords)
    env.reset(seed=0)
    env.number = number
    return env


def test_binary_search_finds_the_number() -> None:
    """42 of 1..100: 50 lower, 25 higher, 37 higher, 43 lower, 40 higher, 41 higher, 42 at the seventh guess: 1 - 6/10."""
    env = hiding(42)
    hints = []
    low, high = 1, 100
    while True:
        guess = (low + high) // 2
        hint, reward, terminated, truncated, info = env.step(f"<think>between {low} and {high}</think> I guess {guess}.")
        if terminated:
            break
        hints.append(hint)
        assert (reward, truncated) == (0.0, False)
        assert info["messages"] == [{"role": "user", "content": hint}]
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
    assert hints == ["lower", "higher", "higher", "lower", "higher", "higher"]
    assert reward == pytest.approx(0.4)
    assert info["reward"] == {"found": 1.0, "speed": pytest.approx(0.4)}
    assert (info["answer"], info["stop_reason"], info["turn"], hint, info["messages"]) == ("42", "answer", 7, "", [])


def test_first_and_last_guess() -> None:
    assert hiding(3, max_turns=4).step("3")[1:3] == (1.0, True)
    env = hiding(3, max_turns=4)
    for _ in range(3):
        assert env.step("4")[0] == "lower"
    assert env.step("3")[1:4] == (0.25, True, False)


def test_out_of_turns() -> None:
    env = hiding(3, max_turns=2)
    env.step("4")
    observation, reward, terminated, truncated, info = env.step("5")
    assert (observation, reward, terminated, truncated, info["stop_reason"]) == ("", 0.0, False, True, "max_turns")
    assert info["reward"] == {"found": 0.0, "speed": 0.0}
    with pytest.raises(ResetNeeded, match="max_turns"):
        env.step("3")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("7", "higher"),
        ("Not 90 and not 80, so 7!", "higher"),
        ("<think>maybe 90</think>7", "higher"),
        ("range 1-60", "lower"),
        ("<think>7 then? no: 60", "say one number from 1 to 100"),  # a thought that never ends is not heard
        ("60 <think>or 7", "lower"),
        ("it is 60</think>7", "higher"),  # the thought was opened in the prompt
        ("", "say one number from 1 to 100"),
        ("101", "say one number from 1 to 100"),
        ("-7", "say one number from 1 to 100"),
        ("7.5", "say one number from 1 to 100"),
        ("9" * 5000, "say one number from 1 to 100"),
        ("\u0667", "higher"),  # an Arabic seven
        ("\u00b2", "say one number from 1 to 100"),
    ],
)
def test_what_counts_as_a_guess(text: str, hint: str) -> None:
    observation, *_, info = hiding(42).step(text)
    assert observation == hint
    assert info["errors"] == ([hint] if hint.startswith("say") else [])


def test_the_number_is_a_function_of_seed_or_option_alone() -> None:
    env = GuessNumber()
    first = [(env.reset(seed=seed)[1]["task_id"], env.number) for seed in range(10)]
    assert len(set(first)) > 5
    assert [(env.reset(seed=seed)[1]["task_id"], env.number) for seed in range(10)] == first
    chosen = env.reset(seed=1, options={"task": 8})[1]["task_id"]
    assert env.reset(seed=2, options={"task": 8})[1]["task_id"] == chosen
    assert GuessNumber().reset(options={"task": 8})[1]["task_id"] == chosen
    assert len({env.reset(options={"task": i})[1]["task_id"] for i in range(10)}) > 5


def test_all_numbers_are_hidden_sometimes() -> None:
    env = GuessNumber(low=-1, high=1)
    assert {env.reset(seed=seed) and env.number for seed in range(40)} == {-1, 0, 1}
    env.number = -1
    assert env.step("-1")[2]


def test_limits_and_ends() -> None:
    with pytest.raises(ValueError, match="low=5, high=5"):
        GuessNumber(5, 5)
    with pytest.raises(ValueError, match="max_turns"):
        GuessNumber(max_turns=0)
    env = GuessNumber()
    with pytest.raises(ResetNeeded):
        env.step("5")
    with pytest.raises(TypeError):
        env.reset(options={"task": "first"})
    with pytest.raises(ResetNeeded, match="not begun"):
        env.step("5")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="got int"):
        env.step(5)  # type: ignore[arg-type]
    *_, truncated, info = env.truncate("context_full")
    assert truncated and info["stop_reason"] == "context_full"
    env.reset(seed=0)
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.step("5")


def test_spoken() -> None:
    assert spoken("<think>a</think> b <think>c</think> d") == "b   d"
    assert spoken("a</think>b") == "b"
    assert spoken("a <think>b") == "a"
