"""``ToolEnv``: episodes, tool calls, failures, limits, info."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_fakes import ROWS, Notebook, Scripted, Stuck, hermes, hermes_env, note, notebook_env, right, step_stuck
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st

import arpo_env
from arpo_env.core import Episode, ToolEnv
from arpo_env.formats import Hermes
from arpo_env.rewards import ExactMatch, Score, WeightedSum
from arpo_env.sandbox import IsolationReport
from arpo_env.task import Task, TaskSet
from arpo_env.tools.base import Tool, ToolResult, tool

ROOT = Path(__file__).resolve().parents[2]
INFO_KEYS = {
    "turn", "messages", "observation_role", "stop_strings", "tools", "tool_calls", "n_tool_calls", "errors", "answer", "reward", "scored", "stop_reason",
    "task_id",
    "isolation",
}  # fmt: skip


def only_call(info: dict[str, Any]) -> dict[str, Any]:
    (call,) = info["tool_calls"]
    return call


def run_one(*script: Any, text: str = "x", **keywords: Any) -> tuple[ToolEnv, Scripted, str, dict[str, Any]]:
    """An environment whose tool follows ``script``, after one call of it: env, tool, observation, info."""
    acting = Scripted(*script, **keywords)
    env = hermes_env(acting)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(hermes(("act", {"text": text})))
    assert (reward, terminated, truncated) == (0.0, False, False)
    return env, acting, observation, info


class TestReset:
    def test_gives_the_question_and_the_opening_messages(self) -> None:
        observation, info = notebook_env().reset(seed=0, options={"task": 3})
        assert observation == "question 3"
        assert info["task_id"] == "t3"
        assert [message["role"] for message in info["messages"]] == ["system", "user"]
        assert info["messages"][1]["content"] == "question 3"
        assert "<note>" in info["messages"][0]["content"]
        assert info["stop_strings"] == ("</note>", "</answer>")
        assert info["tools"][0]["function"]["name"] == "note"

    def test_system_prompt_of_the_environment_then_the_task_then_the_format(self) -> None:
        task = Task(question="q", answer="a", system_prompt="of the task")
        own = {"role": "system", "content": "mine"}
        assert notebook_env(system_prompt="mine").reset(options={"task": task})[1]["messages"][0] == own
        assert notebook_env().reset(options={"task": task})[1]["messages"][0]["content"] == "of the task"
        assert [m["role"] for m in notebook_env(system_prompt="").reset(options={"task": task})[1]["messages"]] == ["user"]

    def test_the_seed_alone_decides_the_task(self) -> None:
        """Also after other resets and steps, and in another environment. 20 tasks and 12 seeds: a constant task would show."""
        env, other = notebook_env(), notebook_env()
        drawn = [env.reset(seed=seed)[0] for seed in range(12)]
        assert len(set(drawn)) > 3
        env.reset()
        env.step(note("a"))
        assert [env.reset(seed=seed)[0] for seed in range(12)] == drawn
        assert [other.reset(seed=seed)[0] for seed in range(12)] == drawn

    def test_reset_without_a_seed_goes_on_drawing(self) -> None:
        env = notebook_env()
        env.reset(seed=0)
        drawn = [env.reset()[0] for _ in range(20)]
        assert len(set(drawn)) > 3
        env.reset(seed=0)
        assert [env.reset()[0] for _ in range(20)] == drawn

    @pytest.mark.parametrize("wanted", [5, np.int64(5), -15, ROWS[5], Task(question="question 5", answer="answer 5", id="t5")])
    def test_options_choose_the_task(self, wanted: Any) -> None:
        env = notebook_env()
        for seed in (None, 1, 2):
            observation, info = env.reset(seed=seed, options={"task": wanted})
            assert (observation, info["task_id"]) == ("question 5", "t5")

    @pytest.mark.parametrize(("wanted", "error"), [(20, IndexError), (1.5, TypeError), ("5", TypeError)])
    def test_a_task_that_there_is_not(self, wanted: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            notebook_env().reset(options={"task": wanted})

    def test_the_next_episode_holds_nothing_of_the_last(self) -> None:
        env = notebook_env()
        fresh = env.reset(seed=1)
        env.step(note("secret"))
        assert data_equivalence(env.reset(seed=1), fresh)
        observation, *_, info = env.step(note("new"))
        assert "secret" not in observation
        assert (info["turn"], info["n_tool_calls"]) == (1, 1)
        assert env.episode.turns == (note("new"),)

    def test_two_environments_share_no_tool_state(self) -> None:
        prototype = Notebook()
        one, other = notebook_env(prototype), notebook_env(prototype)
        one.reset(seed=0)
        other.reset(seed=0)
        one.step(note("mine"))
        assert "mine" not in other.step(note("yours"))[0]
        assert prototype.lines == []

    def test_a_tool_that_cannot_start_leaves_no_episode(self) -> None:
        """Nothing goes on with half of its tools: no step, no fork; what was bound is closed."""
        bound: list[Tool] = []

        class Broken(Notebook):
            name = "broken"

            def start_episode(self, task: Task) -> None:
                raise ConnectionError("no such host")

        env = notebook_env(Stuck(threading.Event(), closed_instances=bound), Broken())
        with pytest.raises(ConnectionError, match="no such host"):
            env.reset(seed=0)
        with pytest.raises(ResetNeeded):
            env.step(note("x"))
        with pytest.raises(arpo_env.ForkError):
            env.fork()
        env.close()
        assert len(bound) == 1


class TestStep:
    def test_a_call_and_then_the_answer(self) -> None:
        env = notebook_env()
        env.reset(seed=0, options={"task": 4})
        observation, reward, terminated, truncated, info = env.step("<think>hm</think>" + note("a"))
        assert (observation, reward, terminated, truncated) == ("\n<result>\na\n</result>\n", 0.0, False, False)
        assert info["messages"] == [{"role": "user", "content": observation}]
        assert only_call(info) == {"name": "note", "arguments": {"text": "a"}, "ok": True, "error": "", "executed": True}
        observation, reward, terminated, truncated, info = env.step("<answer>\\boxed{answer 4}</answer>")
        assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
        assert (info["answer"], info["stop_reason"], info["reward"], info["scored"]) == ("answer 4", "answer", {"right": 1.0}, True)
        assert (info["messages"], info["tool_calls"], info["turn"], info["n_tool_calls"]) == ([], [], 2, 1)

    def test_info_has_one_shape(self) -> None:
        """The keys of the docstring, with the same types, whatever happened: call, failure, nonsense, end."""
        env = notebook_env(max_turns=4, reward=WeightedSum(((0.5, ExactMatch()), (0.5, arpo_env.as_reward(right)))))
        infos = [env.reset(seed=0)[1]]
        infos += [env.step(text)[-1] for text in (note("a"), "nonsense", "<answer>no", note("last"))]
        assert infos[-1]["stop_reason"] == "max_turns"
        infos += [env.reset(seed=0)[1], env.step("<answer>x</answer>")[-1]]
        for info in infos:
            assert set(info) == INFO_KEYS
            assert {key: type(value) for key, value in info.items()} == {key: type(value) for key, value in infos[0].items()}
            assert {key: type(value) for key, value in info["reward"].items()} == {"exact_match": float, "right": float}
            assert type(info["scored"]) is bool
        documented = str(sys.modules["arpo_env.core"].__doc__)
        assert all(f"``{key}``" in documented for key in INFO_KEYS)

    def test_two_equal_episodes_are_equal(self) -> None:
        def record() -> list[Any]:
            env = hermes_env(Scripted("a", ValueError("b"), ToolResult.failure("limit", "c")))
            return [env.reset(seed=3), *(env.step(hermes(("act", {"text": "x"}))) for _ in range(3))]

        assert data_equivalence(record(), record())

    def test_info_is_not_the_episode(self) -> None:
        """Whoever changes the info that it was given changes neither the record of calls nor a fork."""

        @tool
        def add(numbers: list[int]) -> str:
            """Adds numbers."""
            numbers.append(1)
            return str(sum(numbers))

        env = hermes_env(add)
        env.reset(seed=0)
        observation, *_, info = env.step(hermes(("add", {"numbers": [2, 3]})))
        assert observation == "6"
        assert only_call(info)["arguments"] == {"numbers": [2, 3]}
        only_call(info)["arguments"]["numbers"].clear()
        assert env.episode.calls[0].arguments == {"numbers": [2, 3]}

    def test_the_end_has_to_be_heeded(self) -> None:
        env = notebook_env()
        with pytest.raises(ResetNeeded):
            env.step("x")
        env.reset(seed=0)
        with pytest.raises(TypeError, match="str, got int"):
            env.step(3)  # type: ignore[arg-type]
        env.step("<answer>x</answer>")
        for act in (lambda: env.step("x"), lambda: env.truncate("interrupted")):
            with pytest.raises(ResetNeeded, match="answer"):
                act()
        env.reset(seed=0)
        env.step("y")
        env.close()
        for act in (lambda: env.step("x"), lambda: env.truncate("interrupted"), env.reset):  # type: ignore[assignment]
            with pytest.raises(ClosedEnvironmentError):
                act()

    def test_calls_of_the_last_turn_are_not_run(self) -> None:
        acting = Scripted("done")
        env = hermes_env(acting, max_turns=2)
        env.reset(seed=0)
        assert env.step(hermes(("act", {"text": "1"})))[2:4] == (False, False)
        observation, reward, terminated, truncated, info = env.step(hermes(("act", {"text": "2"})))
        assert (observation, reward, terminated, truncated) == ("", 0.0, False, True)
        assert (info["stop_reason"], info["n_tool_calls"]) == ("max_turns", 1)
        assert acting.calls == ["1"]

    def test_an_answer_in_the_last_turn_counts(self) -> None:
        env = notebook_env(max_turns=1)
        env.reset(options={"task": 0})
        assert env.step("<answer>answer 0</answer>")[1:4] == (1.0, True, False)

    def test_truncate_scores_what_there_is(self) -> None:
        def turns(task: Task, episode: Episode) -> float:
            return float(len(episode.turns))

        env = notebook_env(reward=turns)
        env.reset(seed=0)
        env.step(note("a"))
        observation, reward, terminated, truncated, info = env.truncate("context_full")
        assert (observation, reward, terminated, truncated, info["stop_reason"]) == ("", 1.0, False, True, "context_full")
        env.reset(seed=0)
        with pytest.raises(ValueError, match="reason"):
            env.truncate("")

    def test_unscored_is_not_zero(self) -> None:
        env = notebook_env(reward=lambda task, episode: None)
        env.reset(seed=0)
        _, reward, *_, info = env.step("<answer>x</answer>")
        assert (reward, info["scored"]) == (0.0, False)

    def test_reward_sees_executed_calls_and_the_policys_words_only(self) -> None:
        seen: list[Episode] = []

        class Spy:
            parts = ("calls",)

            def __call__(self, task: Task, episode: Episode) -> Score:
                seen.append(episode)
                return Score(0.5, {"calls": float(len(episode.calls))})

        env = hermes_env(Scripted("<answer>\\boxed{answer 0}</answer>"), reward=Spy())
        env.reset(options={"task": 0})
        *_, terminated, truncated, info = env.step(hermes(("act", {"text": "x"}), ("nothing", {}), ("act", {"wrong": 1})))
        assert (terminated, truncated, info["answer"]) == (False, False, "")  # the answer in the tool's text is nobody's answer
        *_, info = env.step("<answer>mine</answer>")
        assert info["reward"] == {"calls": 1.0}
        assert seen[0].answer == "mine"
        assert [call.name for call in seen[0].calls] == ["act"]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.text() | st.sampled_from(["<note>", "</note>", "<answer>", "</answer>", "<think>", "</think>", "\\boxed{"]), max_size=8))
    def test_any_text_is_answered(self, pieces: list[str]) -> None:
        env = notebook_env()
        env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step("".join(pieces))
        assert env.observation_space.contains(observation)
        assert terminated == (info["answer"] != "") and not truncated and isinstance(reward, float)
        assert observation or terminated, "the model must be told what was wrong"


class TestToolFailures:
    def test_an_exception_is_an_observation(self) -> None:
        env, _, observation, info = run_one(ValueError("negative size"))
        assert observation == "ValueError: negative size"
        assert (only_call(info)["ok"], only_call(info)["error"], only_call(info)["executed"]) == (False, "exception", True)
        assert info["n_tool_calls"] == 1
        assert env.telemetry.snapshot()["act.exception"] == 1

    def test_a_tool_that_exits_does_not_end_the_process(self) -> None:
        assert only_call(run_one(SystemExit(3))[3])["error"] == "exception"
        assert only_call(run_one(SystemExit(3), timeout=5.0)[3])["error"] == "exception"

    @pytest.mark.parametrize(("result", "named"), [(5, "int"), (None, "NoneType"), (ToolResult(7), "int")])  # type: ignore[arg-type]
    def test_a_result_of_another_type(self, result: Any, named: str) -> None:
        *_, observation, info = run_one(result)
        assert only_call(info)["error"] == "exception"
        assert "expected str" in observation and named in observation

    def test_unknown_tool_names_those_that_there_are(self) -> None:
        env = hermes_env(Scripted("done"))
        env.reset(seed=0)
        observation, *_, info = env.step(hermes(("browse", {"text": "x"})))
        assert "browse" in observation and "act" in observation
        assert only_call(info) == {"name": "browse", "arguments": {"text": "x"}, "ok": False, "error": "unknown_tool", "executed": False}
        assert info["errors"] == [] and info["n_tool_calls"] == 0
        assert info["messages"] == [{"role": "tool", "name": "browse", "content": "There is no tool 'browse'. Available: act."}]

    def test_unknown_tool_in_tags(self) -> None:
        env = notebook_env(Notebook())
        env.reset(seed=0)
        observation, *_, info = env.step("<nott>x</nott>")
        assert observation == "\n<result>\nthere is no tool 'nott'; expected <note>...</note>, <answer>...</answer>\n</result>\n"
        assert only_call(info) == {"name": "nott", "arguments": {}, "ok": False, "error": "unknown_tool", "executed": False}
        assert info["errors"] == [] and info["n_tool_calls"] == 0
        assert not env.episode.parsed[0].well_formed

    def test_a_call_that_cannot_be_read_has_no_name(self) -> None:
        env = hermes_env(Scripted("done"))
        env.reset(seed=0)
        *_, info = env.step("<tool_call>{</tool_call>")
        assert (only_call(info)["name"], only_call(info)["error"], len(info["errors"])) == ("unparsed", "malformed", 1)

    @pytest.mark.parametrize("arguments", [{}, {"text": 1}, {"text": "a", "more": 1}, {"self": "x"}])
    def test_bad_arguments_never_reach_the_tool(self, arguments: dict[str, Any]) -> None:
        acting = Scripted("done")
        env = hermes_env(acting)
        env.reset(seed=0)
        observation, *_, info = env.step(hermes(("act", arguments)))
        assert (only_call(info)["error"], only_call(info)["executed"], info["n_tool_calls"]) == ("bad_arguments", False, 0)
        assert "not run" in observation
        assert acting.calls == []

    def test_a_bad_call_does_not_stop_the_later_ones(self) -> None:
        acting = Scripted("first", RuntimeError("second"), "third")
        env = hermes_env(acting)
        env.reset(seed=0)
        good = [hermes(("act", {"text": str(i)})) for i in range(3)]
        bad = ['<tool_call>{"name": "act", </tool_call>', '<tool_call>["act"]</tool_call>']
        observation, _, terminated, truncated, info = env.step("\n".join([good[0], bad[0], good[1], bad[1], good[2]]))
        assert acting.calls == ["0", "1", "2"]
        assert [call["error"] for call in info["tool_calls"] if call["executed"]] == ["", "exception", ""]
        assert "third" in observation and len(info["errors"]) == 2
        assert not terminated and not truncated

    def test_empty_output_is_a_success_and_runs_once(self) -> None:
        _, acting, _, info = run_one("")
        assert only_call(info)["ok"]
        assert acting.calls == ["x"]

    def test_a_result_of_a_megabyte_loses_its_middle(self) -> None:
        """100 characters are kept of 1,000,000: 75 at the head, 25 at the tail, and a notice that counts the 999,900 others."""
        env = hermes_env(Scripted("a" * 500_000 + "b" * 500_000), max_observation_chars=100)
        env.reset(seed=0)
        observation = env.step(hermes(("act", {"text": "x"})))[0]
        assert observation == "a" * 75 + "\n[... 999900 characters left out ...]\n" + "b" * 25

    def test_retries_are_for_unavailable_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pauses: list[float] = []
        monkeypatch.setattr("arpo_env.core.time.sleep", pauses.append)
        down = ToolResult.failure("unavailable", "503")
        env, acting, observation, info = run_one(down, down, "found")
        assert (observation, only_call(info)["ok"], len(acting.calls)) == ("found", True, 3)
        assert pauses == [0.1, 0.2]
        assert env.telemetry.snapshot()["act.retries"] == 2
        assert info["n_tool_calls"] == 1
        _, acting, observation, info = run_one(down)
        assert (only_call(info)["error"], len(acting.calls)) == ("unavailable", 3)
        for kind in ("exception", "timeout", "died", "limit"):
            assert len(run_one(ToolResult.failure(kind, "no"))[1].calls) == 1  # type: ignore[arg-type]

    def test_retries_end_with_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pauses double from 0.1 s. Those up to 3.2 s fit before a deadline of 6 s, the next, 6.4 s, does not: seven tries of the eleven allowed."""
        pauses: list[float] = []
        monkeypatch.setattr("arpo_env.core.time.sleep", pauses.append)
        _, acting, _, info = run_one(ToolResult.failure("unavailable", "503"), timeout=6.0, retries=10)
        assert (only_call(info)["error"], len(acting.calls)) == ("unavailable", 7)
        assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])

    def test_the_limit_of_calls_holds_within_a_turn(self) -> None:
        acting = Scripted("done")
        env = hermes_env(acting, max_tool_calls=2)
        env.reset(seed=0)
        *_, info = env.step(hermes(*[("act", {"text": str(i)}) for i in range(4)]))
        assert acting.calls == ["0", "1"]
        assert [(call["executed"], call["error"]) for call in info["tool_calls"]] == [(True, ""), (True, ""), (False, "limit"), (False, "limit")]
        *_, info = env.step(hermes(("act", {"text": "again"})))
        assert (only_call(info)["error"], info["n_tool_calls"]) == ("limit", 2)


class TestDeadlines:
    def test_a_stuck_tool_costs_only_its_own_trajectory(self) -> None:
        """One of eight waits for an event that comes after all have answered: the others never wait for it."""
        free = threading.Event()
        envs = [notebook_env(Stuck(free)) for _ in range(8)]
        for env in envs:
            env.reset(seed=0)
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda i: step_stuck(envs[i]) if i == 3 else envs[i].step(note("fine")), range(8)))
        assert not free.is_set()
        assert [only_call(result[-1])["error"] for result in results] == ["timeout" if i == 3 else "" for i in range(8)]
        assert envs[3].telemetry.snapshot()["note.timeout"] == 1
        free.set()

    def test_a_stateful_tool_that_was_abandoned_starts_afresh(self) -> None:
        """The late thread may write what it likes into the abandoned instance: nobody sees it. What it held is freed."""
        free = threading.Event()
        closed: list[Tool] = []
        env = notebook_env(Stuck(free, closed_instances=closed))
        env.reset(seed=0)
        env.step(note("before"))
        observation, *_ = step_stuck(env)
        assert "0.05 s" in observation and "state is lost" in observation
        assert len(closed) == 1
        assert env.episode.calls[-1].result.state == "lost"
        free.set()
        assert env.step(note("after"))[0] == "\n<result>\nafter\n</result>\n"

    def test_the_process_ends_while_a_tool_is_stuck(self) -> None:
        program = """
import threading, arpo_env
class Stuck(arpo_env.Tool):
    name, description, timeout = "stuck", "Never ends.", 0.05
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    def call(self, x=""):
        threading.Event().wait()
env = arpo_env.ToolEnv([{"question": "q", "answer": "a"}], [Stuck()], reward=lambda task, episode: 0.0)
env.reset(seed=0)
print(env.step("<stuck>x</stuck>")[-1]["tool_calls"][0]["error"])
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.strip()) == (0, "timeout"), done.stderr

    def test_no_more_calls_at_once_than_the_tool_allows(self) -> None:
        """Two of six forks are let into the tool; a third never comes while they are in it."""
        lock, full, over, go = threading.Lock(), threading.Event(), threading.Event(), threading.Event()
        running = most = 0

        def occupy() -> str:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
                if running == 2:
                    full.set()
                if running > 2:
                    over.set()
            go.wait(30)
            with lock:
                running -= 1
            return "done"

        env = hermes_env(Scripted(occupy, max_concurrency=2))
        env.reset(seed=0)
        envs = [env, *env_forks(env, 5)]
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(each.step, hermes(("act", {"text": "x"}))) for each in envs]
            assert full.wait(30)
            assert not over.wait(0.05)
            go.set()
            assert all(only_call(future.result()[-1])["ok"] for future in futures)
        assert most == 2

    def test_a_failed_call_gives_its_place_back(self) -> None:
        env = hermes_env(Scripted(ValueError("no"), "done", max_concurrency=1))
        env.reset(seed=0)
        for expected in ("exception", ""):
            assert only_call(env.step(hermes(("act", {"text": "x"})))[-1])["error"] == expected


def env_forks(env: ToolEnv, n: int) -> list[ToolEnv]:
    return arpo_env.fork(env, n)


class TestConstruction:
    @pytest.mark.parametrize(
        ("keywords", "problem"),
        [
            ({"max_turns": 0}, "max_turns"),
            ({"max_tool_calls": -1}, "max_tool_calls"),
            ({"max_observation_chars": 10}, "max_observation_chars"),
            ({"render_mode": "rgb_array"}, "render_mode"),
        ],
    )
    def test_limits_that_cannot_work(self, keywords: dict[str, Any], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            notebook_env(**keywords)

    def test_two_tools_of_one_name(self) -> None:
        with pytest.raises(ValueError, match="two tools are named 'note'"):
            notebook_env(Notebook(), Notebook())

    def test_a_tool_named_like_a_tag_of_the_format(self) -> None:
        with pytest.raises(ValueError, match="think"):
            notebook_env(Scripted("x", name="think"))
        hermes_env(Scripted("x", name="think"))

    def test_something_that_is_no_tool(self) -> None:
        with pytest.raises(TypeError, match="must be a Tool"):
            notebook_env("search")  # type: ignore[arg-type]

    def test_no_tasks(self) -> None:
        with pytest.raises(ValueError, match=r"task|row"):
            ToolEnv([], [Notebook()], reward=right)
        with pytest.raises(ValueError, match="without tasks"):
            ToolEnv(TaskSet([]), [Notebook()], reward=right).reset(seed=0)

    def test_plain_functions_are_made_into_tools(self) -> None:
        def double(number: int) -> str:
            """Doubles a number."""
            return str(2 * number)

        env = notebook_env(double)
        env.reset(seed=0)
        assert env.step("<double>21</double>")[0] == "\n<result>\n42\n</result>\n"

    def test_the_papers_reward_is_the_default(self) -> None:
        env = ToolEnv(ROWS, [Notebook()])
        env.reset(options={"task": 0})
        assert env.step("<answer>\\boxed{answer 0}</answer>")[1] == 1.0
        env.reset(options={"task": 0})
        env.step("nonsense")
        assert env.step("<answer>\\boxed{answer 0}</answer>")[1] == -1.0  # one turn broke the format

    def test_tasks_without_mathematics_need_no_package_for_it(self) -> None:
        program = """
import sys
sys.modules["math_verify"] = None  # as if it were not installed
import arpo_env
rows = [{"question": "q", "answer": "blue"}]
env = arpo_env.ToolEnv(rows)
env.reset(seed=0)
print(env.step("<answer>blue</answer>")[1])
env = arpo_env.ToolEnv([{**rows[0], "ability": "math"}])
try:
    env.reset(seed=0)
except ImportError as error:
    print("arpo[math]" in str(error))
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["1.0", "True"], done.stdout + done.stderr


class TestClosing:
    def test_close_and_reset_free_the_tools_and_can_be_repeated(self) -> None:
        closed: list[Tool] = []
        env = notebook_env(Stuck(threading.Event(), closed_instances=closed))
        env.reset(seed=0)
        env.reset(seed=0)
        assert len(closed) == 1
        env.step(note("x"))
        env.truncate("interrupted")
        env.close()
        env.close()
        assert len(closed) == 2
        assert all(instance.closed == 1 for instance in closed)  # type: ignore[attr-defined]

    def test_one_that_fails_to_close_does_not_keep_the_others_open(self) -> None:
        closed: list[Tool] = []

        class Failing(Notebook):
            name = "failing"

            def close(self) -> None:
                raise OSError("disk full")

        class FailingToo(Failing):
            name = "failing_too"

        env = notebook_env(Failing(), Stuck(threading.Event(), closed_instances=closed), FailingToo())
        env.reset(seed=0)
        with pytest.raises(OSError, match="disk full"):
            env.close()
        assert len(closed) == 1
        env.close()


class TestGymnasium:
    def test_vector_environments_stack_the_info(self) -> None:
        envs = gymnasium.vector.SyncVectorEnv([notebook_env] * 3, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
        observations, info = envs.reset(seed=[0, 1, 2])
        assert observations == tuple(notebook_env().reset(seed=seed)[0] for seed in range(3))
        assert list(info["task_id"]) == [notebook_env().reset(seed=seed)[1]["task_id"] for seed in range(3)]
        observations, rewards, terminations, truncations, info = envs.step((note("a"), "<answer>x</answer>", "nonsense"))
        assert observations[0] == "\n<result>\na\n</result>\n" and observations[1] == ""
        assert list(terminations) == [False, True, False] and not truncations.any() and not rewards.any()
        assert list(info["n_tool_calls"]) == [1, 0, 0]
        assert list(info["stop_reason"]) == ["", "answer", ""]
        assert list(info["reward"]["right"]) == [0.0, 0.0, 0.0]
        envs.close()

    def test_in_worker_processes(self) -> None:
        """Also with a deadline: the worker threads of the parent do not exist in a forked process."""
        run_one("done", timeout=30.0)
        envs = gymnasium.vector.AsyncVectorEnv([deadline_env] * 2, shared_memory=False, context="fork")
        try:
            envs.reset(seed=[0, 1])
            observations = envs.step((hermes(("act", {"text": "x"})),) * 2)[0]
        finally:
            envs.close()
        assert observations == ("done", "done")

    def test_rendering(self, capsys: pytest.CaptureFixture[str]) -> None:
        env = notebook_env(render_mode="ansi")
        env.reset(options={"task": 1})
        env.step(note("a"))
        assert env.render() == "question 1\n<note>a</note>\n\n<result>\na\n</result>\n"
        assert capsys.readouterr().out == ""
        env = notebook_env(render_mode="human")
        env.reset(options={"task": 1})
        env.step("<answer>x</answer>")
        assert env.render() is None
        assert capsys.readouterr().out.splitlines() == ["question 1", "<answer>x</answer>", "[answer, reward 0.0]"]

    def test_telemetry_is_beside_the_info_and_common_to_forks(self) -> None:
        env = notebook_env()
        env.reset(seed=0)
        *_, info = env.step(note("a"))
        twin = env.fork()
        twin.step(note("b"))
        assert twin.telemetry is env.telemetry is copy.deepcopy(env.telemetry)
        counts = env.telemetry.snapshot()
        assert counts["note.calls"] == 2
        assert counts["note.seconds"] >= 0
        assert "seconds" not in str(info)

    def test_each_result_is_a_message_where_the_template_has_a_role_for_it(self) -> None:
        env = ToolEnv(ROWS, [Scripted("one", "two")], call_format=Hermes(), reward=right)
        env.reset(seed=0)
        observation, *_, info = env.step(hermes(("act", {"text": "x"}), ("act", {"text": "y"})))
        assert info["messages"] == [{"role": "tool", "name": "act", "content": "one"}, {"role": "tool", "name": "act", "content": "two"}]
        assert observation.index("one") < observation.index("two")
        *_, info = env.step('<tool_call>["act"]</tool_call>')
        assert [message["role"] for message in info["messages"]] == ["tool"]
        assert info["errors"][0] in info["messages"][0]["content"]


def deadline_env() -> ToolEnv:
    return hermes_env(Scripted("done", timeout=30.0))


class TestIsolation:
    def test_info_names_the_weakest_level_of_tools_that_run_code(self) -> None:
        class Runs(Notebook):
            def __init__(self, name: str, level: Any) -> None:
                super().__init__()
                self.name, self.level = name, level

            def isolation(self) -> IsolationReport:
                return IsolationReport(level=self.level, missing={})

        assert notebook_env().reset(seed=0)[1]["isolation"] == ""
        env = notebook_env(Notebook(), Runs("one", "namespaces"), Runs("two", "process"), Runs("three", "landlock"))
        assert env.reset(seed=0)[1]["isolation"] == env.fork().step(note("a"))[-1]["isolation"] == env.isolation == "process"


def test_a_forked_process_has_places_of_its_own() -> None:
    """A thread holds the only place of a tool when the process forks: the child, which has no such thread, is not kept waiting."""
    code = """
import os, signal, threading
import arpo_env

busy, free = threading.Event(), threading.Event()

class Slow(arpo_env.Tool):
    name, description, timeout, max_concurrency = "slow", "Waits.", None, 1

    def call(self):
        if threading.current_thread() is not threading.main_thread():
            busy.set(); free.wait()
        return "done"

env = arpo_env.ToolEnv([{"question": "q", "answer": "a"}], [Slow()])
env.reset(seed=0)
other = env.fork()
thread = threading.Thread(target=other.step, args=("<slow></slow>",)); thread.start(); busy.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if "done" in env.step("<slow></slow>")[0] else 1)
status = os.waitpid(child, 0)[1]
free.set(); thread.join()
print(status)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.strip() == "0", done.stderr
