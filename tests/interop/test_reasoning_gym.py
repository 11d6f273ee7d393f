"""reasoning-gym's data sets as environments: fixed data, the library's own score, tools."""

from __future__ import annotations

import copy
import random
from typing import Any

import gymnasium
import numpy as np
import pytest

import arpo_env
from arpo_env.testing import EnvConformance

pytest.importorskip("reasoning_gym")

from arpo_env.interop.reasoning_gym import ReasoningGymEnv


@arpo_env.tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


class TestArithmetic(EnvConformance):
    actions = ("no answer yet", "<think>6 * 7</think> <answer>42</answer>")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return ReasoningGymEnv("basic_arithmetic", size=20)


class TestCountdownWithATool(EnvConformance):
    actions = ('<add>{"a": 1, "b": 2}</add>', '<add>{"a": 3, "b": 4}</add>', "<answer>7</answer>")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return ReasoningGymEnv("countdown", size=20, tools=[add])


def answered(env: ReasoningGymEnv, index: int, answer: str) -> tuple[float, dict[str, Any]]:
    env.reset(options={"task": index})
    _, reward, terminated, truncated, info = env.step(answer)
    assert (terminated, truncated) == (True, False)
    return reward, info


def test_the_reward_is_the_librarys_own_score() -> None:
    """Right 1; an answer that contains the right one is paid in proportion; wrong 0. No bonus and no penalty beside."""
    env = ReasoningGymEnv("basic_arithmetic", size=5)
    truth = env.tasks[3].answer
    assert isinstance(truth, str)
    padded = f"{truth} apples"
    assert answered(env, 3, f"<answer>{truth}</answer>")[0] == 1.0
    assert answered(env, 3, f"<answer>{padded}</answer>")[0] == len(truth) / len(padded)
    reward, info = answered(env, 3, "<answer>no idea</answer>")
    assert (reward, info["reward"], info["scored"], info["stop_reason"]) == (0.0, {"accuracy": 0.0}, True, "answer")


@pytest.mark.parametrize("dataset", ["list_functions", "pool_matrix"])
def test_items_depend_on_seed_and_number_alone_and_leave_the_process_wide_generators_as_they_were(dataset: str) -> None:
    openings = []
    for _ in range(2):
        before = random.getstate(), np.random.get_state()[1].tolist()
        openings.append([ReasoningGymEnv(dataset, size=3).reset(options={"task": index}) for index in range(3)])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        random.seed()
        np.random.seed()
    assert openings[0] == openings[1]
    assert ReasoningGymEnv(dataset, size=3, seed=1).reset(options={"task": 0})[0] != openings[0][0][0]


def test_the_answer_is_what_the_tag_holds_and_nothing_else() -> None:
    """The whole turn would be paid in part for naming the truth in passing."""
    env = ReasoningGymEnv("basic_arithmetic", size=5, max_turns=1)
    truth = env.tasks[0].answer
    for turn in (f"It is {truth}", f"<think><answer>{truth}</answer></think>"):
        env.reset(options={"task": 0})
        _, reward, terminated, truncated, info = env.step(turn)
        assert (reward, terminated, truncated, info["stop_reason"]) == (0.0, False, True, "max_turns")


def test_text_at_which_the_scorer_raises_is_a_wrong_answer() -> None:
    env = ReasoningGymEnv("prime_factorization", size=3)
    with pytest.raises(ValueError, match="x"):
        env.tasks.dataset.score_answer("x", env.tasks[0].metadata["entry"])  # type: ignore[attr-defined]
    assert answered(env, 0, "<answer>x</answer>")[0] == 0.0


def test_an_item_without_a_single_truth_is_a_task_all_the_same() -> None:
    env = ReasoningGymEnv("graph_color", size=3)
    assert env.tasks[0].answer is None
    reward, info = answered(env, 0, "<answer>none</answer>")
    assert (reward, info["scored"]) == (0.0, True)


def test_the_data_are_the_same_in_every_process_unless_a_seed_is_given() -> None:
    one, other, third = ReasoningGymEnv("countdown", size=4), ReasoningGymEnv("countdown", size=4), ReasoningGymEnv("countdown", size=4, seed=1)
    questions = [[env.tasks[i].question for i in range(4)] for env in (one, other, third)]
    assert questions[0] == questions[1] != questions[2]


def test_an_item_is_a_function_of_the_seed_or_the_number_alone() -> None:
    env = ReasoningGymEnv("basic_arithmetic", size=50)
    first = env.reset(seed=11)
    env.reset(options={"task": 4})
    env.reset()
    assert env.reset(seed=11) == first
    question, info = env.reset(options={"task": 4})
    assert (question, info["task_id"]) == (env.tasks[4].question, "basic_arithmetic/0/4")
    assert env.reset(seed=99, options={"task": env.tasks[4]})[0] == question


def test_configuration_reaches_the_data_set() -> None:
    env = ReasoningGymEnv("basic_arithmetic", size=10, min_terms=2, max_terms=2, min_digits=1, max_digits=1, operators=["+"], allow_parentheses=False)
    assert all(len(entry.metadata["entry"]["question"]) < 30 for entry in (env.tasks[i] for i in range(10)))
    assert len(env.tasks) == 10  # type: ignore[arg-type]


def test_forks_share_the_data_set() -> None:
    env = ReasoningGymEnv("basic_arithmetic", size=5)
    env.reset(seed=0)
    assert env.fork().tasks is env.tasks
    assert copy.deepcopy(env.tasks) is env.tasks
    assert arpo_env.fork_support(env) == "native"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": "basic_arithmetics"}, ValueError, r"reasoning-gym has no environment 'basic_arithmetics'; did you mean \['basic_arithmetic'"),
        ({"dataset": "basic_arithmetic", "digits": 3}, TypeError, "digits"),
        ({"dataset": "basic_arithmetic", "min_terms": -1}, ValueError, "basic_arithmetic cannot be made: AssertionError"),
        ({"dataset": "basic_arithmetic", "max_turns": 0}, ValueError, "max_turns must be at least 1"),
    ],
)
def test_wrong_configuration(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReasoningGymEnv(**arguments)


def test_what_is_no_item_is_refused_before_a_token_is_spent() -> None:
    env = ReasoningGymEnv("basic_arithmetic", size=5)
    with pytest.raises(IndexError, match=r"\[0, 4\], got 5"):
        env.reset(options={"task": 5})
    with pytest.raises(ValueError, match="is no item of a reasoning-gym data set"):
        env.reset(options={"task": arpo_env.Task(question="1 + 1?", answer="2")})
