"""The sampling loop when something goes wrong: stuck, raising and unforkable environments, contexts that are full, foreign environments."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import pytest
from fakes import CharCodec, End, Talk, Turn, Writer, check_tree, echo, sample, sample_one, text_of, wanderer

from arpo_algo.branching import EntropyBranching, NoBranching, UniformBranching
from arpo_algo.rollout import PromptTooLong, RolloutConfig, sample_groups
from arpo_env.core import ForkError, ToolEnv
from arpo_env.forking import TextSpace
from arpo_env.tools.base import tool


def numbered(n_calls: int) -> Callable[[str, int], Turn]:
    """Trajectories that begin with different letters, make ``n_calls`` calls and end with reward 1; entropy rises after the first call."""
    letters = iter("abcdfghijklmnop")

    def turn(context: str, seed: int) -> Turn:
        count = context.count("<")
        if count == n_calls:
            return Turn("e1", 0.5)
        return Turn(next(letters), 0.1) if count == 0 else Turn("z", 0.9)

    return turn


# -- environments that hang or raise ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_a_stuck_environment_costs_its_own_trajectory_alone(workers: int) -> None:
    free = threading.Event()
    stuck = Talk(echo, before=lambda turns: free.wait() if turns == ["c"] else None)
    try:
        tree = sample_one(Writer(numbered(2)), stuck, NoBranching(), group_size=8, initial=8, env_workers=workers, step_timeout=2.0)
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "arpo-env"), "the process could not exit"
    finally:
        free.set()
    assert [(t.scored, t.stop_reason) for t in tree.trajectories if t.nodes()[1].text == "c"] == [(False, "env_timeout")]
    others = [t for t in tree.trajectories if t.nodes()[1].text != "c"]
    assert [(t.scored, t.stop_reason, t.reward) for t in others] == [(True, "answer", 1.0)] * 7


def test_a_stuck_environment_does_not_hold_up_a_round_for_ever() -> None:
    free = threading.Event()
    stuck = Talk(echo, before=lambda turns: free.wait() if turns == ["a"] else None)
    try:
        tree = sample_one(Writer(numbered(2)), stuck, EntropyBranching(), group_size=4, initial=2, env_workers=2, step_timeout=2.0)
    finally:
        free.set()
    assert [t.stop_reason for t in tree.trajectories] == ["env_timeout", "answer", "answer", "answer"]
    assert tree.trajectories[2].parent == 1
    check_tree(tree, size=4, initial=2)


@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration(3), KeyError("k")])
@pytest.mark.parametrize("workers", [0, 4])
def test_an_environment_that_raises_is_unscored_and_others_go_on(error: Exception, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    def before(turns: list[str]) -> None:
        if turns == ["b", "z"]:
            raise error

    with caplog.at_level(logging.WARNING):
        tree = sample_one(Writer(numbered(3)), Talk(echo, before=before), NoBranching(), group_size=4, initial=4, env_workers=workers, step_timeout=5)
    failed = [t for t in tree.trajectories if t.nodes()[1].text == "b"]
    assert [(t.scored, t.stop_reason, t.reward) for t in failed] == [(False, "env_error", 0.0)]
    assert [(t.scored, t.reward) for t in tree.trajectories if t not in failed] == [(True, 1.0)] * 3
    assert "env_error" in caplog.text
    check_tree(tree, size=4, initial=4)


@pytest.mark.parametrize("answer", [(7, 0.0), ("<1>", float("nan")), ("<1>", float("inf")), ("<1>", None), (None, 1.0)])
@pytest.mark.parametrize("limit", [10, 1])
def test_an_environment_that_answers_nonsense_is_unscored(answer: tuple[Any, Any], limit: int) -> None:
    class Nonsense(Foreign):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            done = super().step(action)
            return (*answer, True, False, {}) if action.startswith("a") else done

    policy = numbered(1)
    tree = sample_one(Writer(lambda c, s: Turn(2 * str(policy(c, s).text))), Nonsense(), NoBranching(), group_size=2, initial=2, max_turn_tokens=limit)
    failed, other = tree.trajectories
    assert (failed.scored, failed.stop_reason, failed.reward) == (False, "env_error", 0.0)
    assert "expected a text and a finite reward" in failed.answer or "NoneType" in failed.answer
    assert other.scored and other.reward > 0


def test_an_environment_that_exits_the_process_is_unscored() -> None:
    def before(turns: list[str]) -> None:
        if turns == ["a"]:
            raise SystemExit(2)

    tree = sample_one(Writer(numbered(2)), Talk(echo, before=before), NoBranching(), group_size=2, initial=2, env_workers=2, step_timeout=5)
    assert sorted(t.stop_reason for t in tree.trajectories) == ["answer", "env_error"]
    assert any("SystemExit: 2" in t.answer for t in tree.trajectories)


def test_an_environment_that_raises_after_a_branch_point_still_counts_as_a_point() -> None:
    def before(turns: list[str]) -> None:
        if turns == ["a", "z"]:
            raise ValueError("boom")

    tree = sample_one(Writer(numbered(2)), Talk(echo, before=before), EntropyBranching(), group_size=2, initial=1)
    assert [(t.origin, t.stop_reason) for t in tree.trajectories] == [("initial", "env_error"), ("branched", "env_error")]
    check_tree(tree, size=2, initial=1)


def test_an_environment_that_cannot_be_closed_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Talk):
        def close(self) -> None:
            super().close()
            raise OSError("busy")

    env = Sticky(echo)
    with caplog.at_level(logging.WARNING):
        tree = sample_one(Writer(wanderer()), env)
    check_tree(tree, size=4, initial=2)
    assert "closing an environment of task 'Q:' failed" in caplog.text
    assert env.events.count("close") == env.events.count("fork")  # the others are closed all the same


def test_a_policy_that_raises_ends_the_run_with_its_own_error_and_leaves_nothing_open() -> None:
    def turn(context: str, seed: int) -> Turn:
        if context.count("<") == 2:
            raise RuntimeError("engine died")
        return Turn("a", context.count("<"))

    env = Talk(echo)
    with pytest.raises(RuntimeError, match="engine died"):
        sample(Writer(turn, yields=lambda: 1), env, UniformBranching(), group_size=8, initial=4, options=[None, None])
    assert env.events.count("close") == env.events.count("fork") > 10


def test_a_cancelled_run_leaves_nothing_open() -> None:
    env = Talk(echo)

    class Never(Writer):
        async def generate(self, prompt_ids: Sequence[int], params: Any) -> Any:
            if prompt_ids.count(ord("<")) == 1:
                await asyncio.Event().wait()
            return await super().generate(prompt_ids, params)

    async def main() -> None:
        config = RolloutConfig(group_size=4, initial=2, window=2, env_workers=0)
        run = asyncio.ensure_future(sample_groups(env, Never(lambda c, s: Turn("a")), CharCodec(), EntropyBranching(), config, [None], seed=0))
        while env.events.count("fork") < 5:
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(main())
    assert env.events.count("close") == env.events.count("fork") == 5  # two roots, the spare one, two snapshots


# -- forks that fail -------------------------------------------------------------------------------------------------------------------------------------


def test_a_fork_that_fails_in_the_middle_is_counted_and_the_group_is_filled() -> None:
    env = Talk(echo, forks=lambda turns: turns != ["a"])
    with pytest.warns(UserWarning, match="no branch point after node 2: ForkError scripted refusal"):
        tree = sample_one(Writer(numbered(1)), env, UniformBranching(), group_size=4, initial=2)
    assert tree.metadata["fork_failures"] == 1
    assert [(t.origin, t.parent) for t in tree.trajectories] == [("initial", None), ("initial", None), ("branched", 1), ("fresh", None)]
    assert all(t.scored for t in tree.trajectories)
    assert (1, 0) not in [(d.depth, d.trajectory) for d in tree.decisions]
    check_tree(tree, size=4, initial=2)


def test_a_fork_that_hangs_is_a_failed_fork() -> None:
    free = threading.Event()
    env = Talk(echo, forks=lambda turns: bool(free.wait()) if turns == ["a"] else True)
    try:
        with pytest.warns(UserWarning, match="no branch point after node 2: TimeoutError"):
            tree = sample_one(Writer(numbered(1)), env, UniformBranching(), group_size=2, initial=1, env_workers=2, step_timeout=2.0)
    finally:
        free.set()
    assert tree.metadata["fork_failures"] == 1
    assert [t.origin for t in tree.trajectories] == ["initial", "fresh"]


def test_a_fork_that_comes_too_late_is_closed() -> None:
    free, made = threading.Event(), threading.Event()

    class Late(Talk):
        def _fork_into(self, twin: Talk) -> None:
            super()._fork_into(twin)
            if self.turns:
                free.wait()

        def close(self) -> None:
            super().close()
            if free.is_set():
                made.set()

    env = Late(echo)
    with pytest.warns(UserWarning, match="no branch point"):
        sample_one(Writer(numbered(1)), env, UniformBranching(), group_size=2, initial=1, env_workers=2, step_timeout=2.0)
    assert env.events.count("close") == env.events.count("fork") - 1
    free.set()
    assert made.wait(30)


def test_children_whose_environment_cannot_be_made_are_unscored() -> None:
    asked: list[int] = []

    def forks(turns: list[str]) -> bool:  # the snapshot, the first twin, not the second
        if turns:
            asked.append(1)
        return len(asked) != 3

    env = Talk(echo, forks=forks)
    with pytest.warns(UserWarning, match="3 trajectories of task 'Q:' have no environment: scripted refusal"):
        tree = sample_one(Writer(numbered(1)), env, EntropyBranching(children=4, beta=1.0), group_size=5, initial=1)
    assert [(t.origin, t.scored, t.stop_reason) for t in tree.trajectories] == [("initial", True, "answer"), ("branched", True, "answer")] + [
        ("branched", False, "env_error")
    ] * 3
    assert [t.leaf == t.branched_from for t in tree.trajectories[1:]] == [False, True, True, True]
    assert tree.metadata["fork_failures"] == 3
    assert tree.canonical() == tree.canonical()
    assert env.events.count("close") == env.events.count("fork") - 1  # the refused one


def test_fresh_trajectories_whose_environment_cannot_be_made_are_unscored() -> None:
    opened: list[int] = []

    def forks(turns: list[str]) -> bool:
        opened.append(1)
        return len(opened) <= 2

    with pytest.warns(UserWarning, match="2 trajectories of task 'Q:' have no environment"):
        tree = sample_one(Writer(lambda c, s: Turn("e1")), Talk(echo, forks=forks), None, group_size=4, initial=1)
    assert [(t.origin, t.scored) for t in tree.trajectories] == [("initial", True), ("fresh", True), ("fresh", False), ("fresh", False)]


def test_an_environment_that_never_forks_is_refused_before_the_first_token() -> None:
    policy = Writer(wanderer())
    with pytest.raises(ForkError, match="scripted refusal"):
        sample_one(policy, Talk(echo, forks=lambda turns: False))
    assert not policy.calls


# -- a function that makes environments ------------------------------------------------------------------------------------------------------------------


def test_environments_from_a_function_give_the_same_tree_as_forks_of_one() -> None:
    made: list[Talk] = []

    def make() -> Talk:
        made.append(Talk(echo))
        return made[-1]

    for strategy in (EntropyBranching(), NoBranching(), UniformBranching(children=2)):
        made.clear()
        tree = sample_one(Writer(wanderer()), make, strategy, group_size=6, initial=2)
        assert tree.canonical() == sample_one(Writer(wanderer()), Talk(echo), strategy, group_size=6, initial=2).canonical()
        fresh = sum(t.origin == "fresh" for t in tree.trajectories)
        assert len(made) == sum(t.origin == "initial" for t in tree.trajectories) + fresh
        assert all(env._closed for env in made)


def test_a_function_serves_environments_that_do_not_fork() -> None:
    with pytest.warns(UserWarning, match="no branch point"):
        tree = sample_one(Writer(numbered(1)), lambda: Talk(echo, forks=lambda turns: False), EntropyBranching(), group_size=5, initial=2)
    assert [t.origin for t in tree.trajectories] == ["initial"] * 2 + ["fresh"] * 3
    assert all(t.scored for t in tree.trajectories)
    assert tree.metadata["fork_failures"] == 2


def test_environments_that_ignore_their_seed_do_not_make_a_group() -> None:
    questions = iter("UVWXYZ")
    made: list[Talk] = []

    def make() -> Talk:
        made.append(Talk(echo, opening=next(questions)))
        return made[-1]

    with pytest.raises(ValueError, match=r"one group needs one task.*'U'.*'V'.*ignores its seed"):
        sample_one(Writer(wanderer()), make)
    assert all(env._closed for env in made)
    with pytest.warns(UserWarning, match="have no environment: one group needs one task"):  # also where only a fresh trajectory shows it
        tree = sample_one(Writer(lambda c, s: Turn("e1")), make, group_size=2, initial=1)
    assert [(t.origin, t.scored) for t in tree.trajectories] == [("initial", True), ("fresh", False)]
    assert all(env._closed for env in made)


def test_all_environments_of_a_group_are_reset_alike() -> None:
    resets: list[tuple[int | None, dict[str, Any] | None]] = []

    class Noting(Talk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
            resets.append((seed, dict(options) if options else options))
            if options is not None:
                options.clear()  # its own copy
            return super().reset(seed=seed)

    sample(Writer(lambda c, s: Turn("e1")), lambda: Noting(echo), None, options=[{"task": 1}, {"task": 2}], group_size=3, initial=2)
    assert sorted(options["task"] for _, options in resets if options) == [1, 1, 1, 2, 2, 2]
    assert len({seed for seed, _ in resets}) == 2 and all(seed is not None and 0 <= seed < 2**31 for seed, _ in resets)


# -- foreign environments --------------------------------------------------------------------------------------------------------------------------------


class Foreign(gymnasium.Env[str, str]):
    """Knows nothing of messages, stop strings, truncation or forks."""

    def __init__(self) -> None:
        self.action_space = self.observation_space = TextSpace()
        self.heard: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.heard = []
        return "Q:", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.heard.append(action)
        done = action.startswith("e")
        return f"<{len(self.heard)}:{action}>", 0.5, done, False, {}


def test_a_foreign_text_environment_works_and_branches() -> None:
    policy = Writer(numbered(2))
    tree = sample_one(policy, Foreign(), EntropyBranching(), group_size=3, initial=1)
    check_tree(tree, size=3, initial=1, calls=policy.calls)
    assert [t.origin for t in tree.trajectories] == ["initial", "branched", "branched"]
    assert [(t.reward, t.stop_reason, t.scored, t.answer) for t in tree.trajectories] == [(1.5, "terminated", True, "")] * 3
    assert {text_of(t) for t in tree.trajectories} == {"Q:a<1:a>z<2:z>e1"}
    assert tree.task_id == ""


def test_a_foreign_environment_may_use_the_keys_of_info_for_something_else() -> None:
    class Odd(Foreign):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            *rest, _ = super().step(action)
            made: Any = 3 if len(self.heard) == 1 else [{"function": {"name": "x"}}, "y", {"name": "z"}]
            return *rest, {"tool_calls": made, "answer": None, "reward": 0.5}  # type: ignore[return-value]

    (trajectory,) = sample_one(Writer(numbered(2)), Odd(), NoBranching(), group_size=1, initial=1).trajectories
    assert (trajectory.stop_reason, trajectory.answer, trajectory.reward, trajectory.reward_parts) == ("terminated", "", 1.5, {})
    assert [n.tools for n in trajectory.nodes() if n.role == "observation"] == [(), ("z",)]
    assert trajectory.calls == [{"name": "z"}, {"name": "z"}]


def test_gymnasium_wrappers_keep_their_state_in_branches() -> None:
    tree = sample_one(Writer(numbered(9)), gymnasium.wrappers.TimeLimit(Foreign(), 3), EntropyBranching(), group_size=3, initial=1)
    assert [(t.stop_reason, len(t.nodes())) for t in tree.trajectories] == [("truncated", 6)] * 3


def test_a_foreign_environment_gets_the_cut_turn() -> None:
    tree = sample_one(Writer(lambda c, s: Turn("abcdef")), Foreign(), NoBranching(), group_size=1, initial=1, max_turn_tokens=4)
    (trajectory,) = tree.trajectories
    assert (text_of(trajectory), trajectory.stop_reason, trajectory.reward, trajectory.scored) == ("Q:abcd", "length", 0.5, True)


# -- limits ----------------------------------------------------------------------------------------------------------------------------------------------


@tool
def search(query: str) -> str:
    """Search."""
    return "long " * 4000 if query == "big" else f"found {query}"


def tool_env(**settings: Any) -> ToolEnv:
    return ToolEnv([{"id": "t", "question": "Q?", "answer": "yes"}], [search], system_prompt="", **settings)


def searching(*texts: str) -> Writer:
    return Writer(lambda context, seed: Turn(texts[context.count("\n</result>\n")]), context_length=600)


def test_a_result_that_does_not_fit_is_cut_with_a_notice() -> None:
    policy = searching("<search>big</search>", "<answer>\\boxed{yes}</answer>")
    tree = sample_one(policy, tool_env(), None, group_size=1, initial=1, max_turn_tokens=100, reserve_tokens=100)
    (trajectory,) = tree.trajectories
    assert (trajectory.stop_reason, trajectory.scored) == ("answer", True)
    observation = tree.nodes[2]
    shown = "".join(map(chr, observation.token_ids))
    assert shown.startswith("\n<result>\nlong long") and shown.endswith("long \n</result>\n")
    assert "characters left out" in shown
    assert observation.text == shown  # what the policy saw, not what did not fit
    room = 600 - len("Q?<search>big</search>") - 100
    assert room // 2 < len(observation.token_ids) <= room
    assert trajectory.mask == [False] * 2 + [True] * 20 + [False] * len(observation.token_ids) + [True] * 28
    assert policy.calls[1].params.max_new_tokens == 100


def test_a_megabyte_of_result() -> None:
    policy = Writer(lambda c, s: Turn("e1" if "<" in c else "a"), context_length=1000)
    tree = sample_one(policy, Talk(lambda turns: echo(turns) if len(turns) > 1 else "<" + "x" * 1_000_000 + ">"), None, group_size=2, initial=1)
    check_tree(tree, size=2, initial=1)
    assert [t.stop_reason for t in tree.trajectories] == ["answer"] * 2
    assert all(len(t.token_ids) <= 1000 for t in tree.trajectories)
    notices = [n.text for n in tree.nodes if n.role == "observation"]
    assert all("left out" in text and text.startswith("<xx") and text.endswith("xx>") for text in notices)


def test_a_full_context_ends_the_trajectory_with_its_reason_and_a_score() -> None:
    reasons: list[str] = []

    def reward(task: Any, episode: Any) -> float:
        reasons.append(episode.stop_reason)
        return 0.25

    policy = searching("<search>" + "a" * 200 + "</search>")
    tree = sample_one(policy, tool_env(reward=reward), None, group_size=1, initial=1, max_context=270, max_turn_tokens=250, reserve_tokens=20)
    (trajectory,) = tree.trajectories
    assert (trajectory.stop_reason, trajectory.scored, trajectory.reward) == ("context_full", True, 0.25)
    assert reasons == ["context_full"]
    assert [n.role for n in trajectory.nodes()] == ["prompt", "policy"]  # no half observation
    assert not tree.decisions


def test_a_full_context_in_a_foreign_environment_keeps_what_it_earned() -> None:
    tree = sample_one(Writer(lambda c, s: Turn("a"), context_length=11), Foreign(), None, group_size=1, initial=1, reserve_tokens=4)
    assert [(t.stop_reason, t.reward, t.scored) for t in tree.trajectories] == [("context_full", 0.5, True)]


def test_what_an_observation_leaves_is_enough_for_a_turn() -> None:
    policy = Writer(lambda c, s: Turn("a"), context_length=60)
    tree = sample_one(policy, Foreign(), None, group_size=1, initial=1, reserve_tokens=7)
    assert tree.trajectories[0].stop_reason == "context_full"
    assert len(policy.calls) > 3
    assert all(call.params.max_new_tokens >= 7 for call in policy.calls)
    # the last observation that fits leaves 7: 5 tokens a turn and "<n:a>" each; 2 + 6 * 8 = 50 and 60 - 50 >= 7, 57 would not
    assert len(tree.trajectories[0].token_ids) == 2 + 6 * 8 + 1


def test_a_turn_that_never_stops_ends_at_its_limit_and_is_scored() -> None:
    reasons: list[str] = []

    def reward(task: Any, episode: Any) -> float:
        reasons.append(episode.stop_reason)
        return -1.0

    policy = Writer(lambda c, s: Turn("x" * 5000), context_length=6000)
    tree = sample_one(policy, tool_env(reward=reward), None, group_size=2, initial=1, max_turn_tokens=50)
    assert [(t.stop_reason, t.scored, t.reward, t.sampled_tokens) for t in tree.trajectories] == [("length", True, -1.0, 50)] * 2
    assert reasons == ["length"] * 2
    assert [t.origin for t in tree.trajectories] == ["initial", "fresh"]  # such an end is no branch point


def test_the_call_in_a_cut_turn_is_not_run() -> None:
    env = tool_env()
    sample_one(Writer(lambda c, s: Turn("<search>a</search>bbbbbb")), env, None, group_size=1, initial=1, max_turn_tokens=20)
    assert env.telemetry.snapshot() == {}


def test_a_prompt_that_is_too_long_is_skipped_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    env = Talk(echo)
    with caplog.at_level(logging.WARNING):
        trees = sample(Writer(wanderer(), context_length=200), env, options=[{"task": "Q" * 200}, {"task": "Q"}])
    assert [(tree.task_id, tree.group) for tree in trees] == [("Q", 1)]
    assert "has 200 tokens, the context holds 200" in caplog.text
    assert env.events.count("close") == env.events.count("fork")


def test_when_every_prompt_is_too_long_the_error_says_what_to_do() -> None:
    with pytest.raises(PromptTooLong, match=r"the prompt of task 'Q+' has 30 tokens, the context holds 20: raise max_context, shorten the prompt, or filter"):
        sample(Writer(wanderer(), context_length=200), options=[{"task": "Q" * 30}, {"task": "Q" * 40}], max_context=20)
    assert sample(Writer(wanderer()), options=[]) == []


def test_a_turn_without_a_token_is_a_turn() -> None:
    policy = Writer(lambda c, s: Turn("" if "<" not in c else "e1", 0.3, stop="eos" if "<" not in c else "stop"))
    tree = sample_one(policy, Talk(lambda turns: End(1.0) if len(turns) > 1 else "<empty call>"), None, group_size=2, initial=1)
    assert [(d.initial_entropy, d.entropy) for d in tree.decisions] == [(0.0, 0.3)]
    assert [t.origin for t in tree.trajectories] == ["initial", "branched"]


# -- what a trajectory says of its end -------------------------------------------------------------------------------------------------------------------


def test_what_the_environment_says_of_the_end_is_kept() -> None:
    end = End(0.75, {"reward": {"accuracy": 1, "bonus": 0.5}, "answer": "42", "scored": False, "stop_reason": "gave_up", "tool_calls": [{"name": "x"}]})
    (trajectory,) = sample_one(Writer(lambda c, s: Turn("a")), Talk(lambda turns: end), None, group_size=1, initial=1).trajectories
    assert (trajectory.reward, trajectory.reward_parts) == (0.75, {"accuracy": 1.0, "bonus": 0.5})
    assert (trajectory.answer, trajectory.scored, trajectory.stop_reason) == ("42", False, "gave_up")
    assert trajectory.calls == [{"name": "x"}]


def test_calls_and_tools_stand_at_the_nodes_that_made_and_show_them() -> None:
    tree = sample_one(searching("<search>a</search>", "no call", "<answer>\\boxed{yes}</answer>"), tool_env(), None, group_size=2, initial=1)
    for trajectory in tree.trajectories:
        nodes = trajectory.nodes()
        assert [[c["name"] for c in n.calls] for n in nodes] == [[], ["search"], [], ["unparsed"], [], []]
        assert [n.tools for n in nodes] == [(), (), ("search",), (), (), ()]
        assert [n.text for n in nodes[1::2]] == ["<search>a</search>", "no call", "<answer>\\boxed{yes}</answer>"]
    assert {p for d in tree.decisions for p in tree.nodes[d.node].tools} == {"search"}


def test_a_tool_that_is_not_there_gives_no_branch_point_its_name() -> None:
    """Branch points are counted by tool: names that the policy makes up would be metrics without end."""
    tree = sample_one(searching("<serach>a</serach>", "<answer>\\boxed{yes}</answer>"), tool_env(), None, group_size=1, initial=1)
    nodes = tree.trajectories[0].nodes()
    assert [[c["name"] for c in n.calls] for n in nodes] == [[], ["serach"], [], []]
    assert [n.tools for n in nodes] == [(), (), (), ()]
