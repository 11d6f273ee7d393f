"""An episode that ``gymnasium.wrappers.TimeLimit`` cuts is scored by the environment inside, as one that reaches ``max_turns`` is."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from fakes import Talk, Turn, Writer, echo, sample_one
from gymnasium.wrappers import TimeLimit, TransformReward

from arpo_algo.branching import NoBranching
from arpo_algo.tree import Trajectory
from arpo_env.core import ToolEnv
from arpo_env.tools.base import tool


@tool
def look(text: str) -> str:
    """Looks something up."""
    return text


def tool_env(**options: Any) -> ToolEnv:
    return ToolEnv([{"question": "Q:", "answer": "five"}], [look], system_prompt="", **options)


def only(policy: Writer, env: gymnasium.Env[str, str]) -> Trajectory:
    tree = sample_one(policy, env, NoBranching(), group_size=1, initial=1)
    return tree.trajectories[0]


def searcher() -> Writer:
    return Writer(lambda context, seed: Turn("<look>x</look>"))


def test_never_answering_earns_the_same_under_a_time_limit_as_under_max_turns() -> None:
    """The paper's reward of an episode without a well-formed answer is -1. At 0 it would be better never to answer than to answer badly."""
    inside = only(searcher(), tool_env(max_turns=3))
    outside = only(searcher(), TimeLimit(tool_env(max_turns=8), max_episode_steps=3))
    assert (inside.reward, inside.scored, inside.stop_reason) == (-1.0, True, "max_turns")
    assert (outside.reward, outside.scored, outside.stop_reason) == (-1.0, True, "time_limit")
    assert outside.reward_parts == inside.reward_parts == {"accuracy": 0.0, "format": 0.0, "tool_bonus": 0.0}


def test_the_calls_of_the_turn_that_was_cut_are_kept() -> None:
    trajectory = only(searcher(), TimeLimit(tool_env(), max_episode_steps=2))
    assert [[call["name"] for call in node.calls] for node in trajectory.nodes() if node.sampled] == [["look"], ["look"]]


def test_an_answer_or_max_turns_at_the_limit_is_no_cut() -> None:
    answer = only(Writer(lambda context, seed: Turn("<answer>five</answer>")), TimeLimit(tool_env(), max_episode_steps=1))
    assert (answer.reward, answer.stop_reason) == (1.0, "answer")
    turns = only(searcher(), TimeLimit(tool_env(max_turns=2), max_episode_steps=2))
    assert (turns.reward, turns.stop_reason) == (-1.0, "max_turns")


def test_what_wrappers_paid_for_the_last_turn_is_added_to_the_score() -> None:
    """Two turns of 0.25 from the wrapper, and -1 at the end."""
    trajectory = only(searcher(), TimeLimit(TransformReward(tool_env(), lambda reward: reward + 0.25), max_episode_steps=2))
    assert trajectory.reward == pytest.approx(-0.5)


def test_an_environment_without_truncate_keeps_its_own_outcome() -> None:
    trajectory = only(Writer(lambda context, seed: Turn("a")), TimeLimit(Talk(echo), max_episode_steps=2))
    assert (trajectory.reward, trajectory.scored, trajectory.stop_reason) == (0.0, True, "truncated")
