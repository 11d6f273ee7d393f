"""Environments played by verifiers itself against a scripted chat endpoint, and rollout trees read by verifiers' own models."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

if not os.environ.get("ARPO_REQUIRE_VERIFIERS"):  # where it is set, a missing package is a failure
    pytest.importorskip("verifiers")

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
from verifiers.v1.utils.trace_store import read_episodes

from arpo_algo.interop.verifiers import to_verifiers_trace, write_verifiers_traces
from arpo_algo.tree import RolloutTree, Trajectory
from arpo_env import GuessNumber, Hermes, Score, TaskSet, ToolEnv, tool
from arpo_env.interop.verifiers import turn_text, verifiers_environment

TASKS = TaskSet.from_rows([{"id": f"t{i}", "question": f"question {i}", "answer": f"answer {i}"} for i in range(4)])
CLOSED: list[str] = []


@tool
def search(query: str) -> str:
    """Look something up."""
    return f"value of {query}"


class Watched(ToolEnv):
    def close(self) -> None:
        super().close()
        CLOSED.append("closed")


class Unscored:
    """A reward that cannot grade."""

    parts = ("accuracy",)

    def __call__(self, task: Any, episode: Any) -> Score:
        return Score(None, {})


class Endpoint:
    """Chat completions on 127.0.0.1. ``says(n)``: the text of the n-th turn of a conversation and why it stopped. ``asked``: the requests."""

    def __init__(self, says: Callable[[int], tuple[str, str]], *, fails_at: int | None = None) -> None:
        endpoint = self
        self.asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.asked.append(body)
                turn = sum(message["role"] == "assistant" for message in body["messages"])
                if turn == fails_at:
                    self.send_error(400, "the endpoint refuses")
                    return
                text, reason = says(turn)
                choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
                usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
                answer = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice], "usage": usage}
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def endpoint() -> Iterator[Callable[..., Endpoint]]:
    made: list[Endpoint] = []

    def make(says: Callable[[int], tuple[str, str]], **settings: Any) -> Endpoint:
        made.append(Endpoint(says, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., vf.Env]:
    """The environment that verifiers finds by the name of a module that exports what ``verifiers_environment`` gives."""
    numbers = itertools.count()

    def load(make: Callable[[], Any], **config: Any) -> vf.Env:
        module = ModuleType(f"served_by_test_{next(numbers)}")
        module.Tasks, module.Env, module.Chat = verifiers_environment(make)  # type: ignore[attr-defined]
        module.__all__ = ["Tasks", "Env", "Chat"]  # type: ignore[attr-defined]
        module.__spec__ = __spec__  # what verifiers looks for before it imports
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return load_environment(resolve_env_config({"taskset": {"id": module.__name__}, **config}))

    return load


def play(env: vf.Env, endpoint: Endpoint, index: int = 0) -> Any:
    """The episode of the task at ``index``."""
    context = ModelContext(model="m", client=EvalClientConfig(base_url=endpoint.url, api_key_var="NO_KEY"))

    async def run() -> Any:
        async with env.serving():
            (slot,) = env.slots(next(itertools.islice(env.taskset, index, None)))
            return await env.run_slot(slot, context)

    return asyncio.run(run())


def test_an_episode(loaded: Any, endpoint: Any) -> None:
    CLOSED.clear()
    turns = ["<think>look</think><search>the bridge", "<think>so</think><answer>\\boxed{answer 2}"]  # as endpoints cut them at stop strings
    chat = endpoint(lambda n: (turns[n], "stop"))
    env = loaded(lambda: Watched(TASKS, [search]))
    episode = play(env, chat, 2)
    assert episode.ok and not episode.errors
    (trace,) = episode.traces
    assert trace.reward == 1.0
    assert trace.metrics == {"reward/accuracy": 1.0, "reward/format": 1.0, "reward/tool_bonus": 0.0, "n_tool_calls": 1.0}
    assert trace.info == {"task_id": "t2", "answer": "answer 2", "stop_reason": "answer"} and trace.stop_condition == "answer"
    assert [(message.role, message.content) for message in trace.messages][1:] == [
        ("user", "question 2"),
        ("assistant", turns[0]),
        ("user", "\n<result>\nvalue of the bridge\n</result>\n"),
        ("assistant", turns[1]),
    ]
    assert "<search> query </search>" in trace.messages[0].content, "the system prompt of the environment"
    assert all(request["stop"] == ["</search>", "</answer>"] and request["model"] == "m" for request in chat.asked)
    assert "answer 2" not in json.dumps(chat.asked[0]), "the reference answer is not shown"
    assert len(CLOSED) == 2, "that of the task set and that of the episode"


def test_a_call_in_hermes_and_a_wrong_answer(loaded: Any, endpoint: Any) -> None:
    turns = ['<think>a</think><tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', "<think>b</think><answer>\\boxed{no}</answer>"]
    (trace,) = play(loaded(lambda: ToolEnv(TASKS, [search], call_format=Hermes())), endpoint(lambda n: (turns[n], "stop"))).traces
    assert trace.ok and trace.reward == 0.0 and trace.metrics["reward/format"] == 1.0
    assert trace.messages[3].content == "value of x"


def test_a_turn_cut_by_its_length_ends_the_episode(loaded: Any, endpoint: Any) -> None:
    chat = endpoint(lambda n: ("<think>on and on <search>never", "length"))
    (trace,) = play(loaded(lambda: ToolEnv(TASKS, [search])), chat).traces
    assert trace.stop_condition == "length" and trace.reward == -1.0 and trace.metrics["n_tool_calls"] == 0.0
    assert trace.is_truncated and len(chat.asked) == 1


def test_limits_of_the_environment_and_of_verifiers(loaded: Any, endpoint: Any) -> None:
    def chat() -> Endpoint:
        made: Endpoint = endpoint(lambda n: (f"<search>{n}", "stop"))
        return made

    (trace,) = play(loaded(lambda: ToolEnv(TASKS, [search], max_turns=3)), chat()).traces
    assert trace.stop_condition == "max_turns" and trace.is_truncated and trace.num_turns == 3 and trace.metrics["n_tool_calls"] == 2.0
    (trace,) = play(loaded(lambda: ToolEnv(TASKS, [search]), player={"max_turns": 2}), chat()).traces
    assert trace.stop_condition == "max_turns" and trace.num_turns == 2
    assert trace.info["stop_reason"] == "max_turns" and trace.reward == -1.0, "cut from outside, scored as it stands"


def test_what_cannot_be_scored_is_a_failed_trace(loaded: Any, endpoint: Any) -> None:
    chat = endpoint(lambda n: ("<think>a</think><answer>\\boxed{x}</answer>", "stop"))
    episode = play(loaded(lambda: ToolEnv(TASKS, reward=Unscored())), chat)
    (trace,) = episode.traces
    assert not trace.ok and "could not score" in trace.errors[-1].message


def test_an_endpoint_that_fails_fails_the_trace_and_nothing_is_scored(loaded: Any, endpoint: Any) -> None:
    CLOSED.clear()
    chat = endpoint(lambda n: ("<search>x", "stop"), fails_at=1)
    episode = play(loaded(lambda: Watched(TASKS, [search])), chat)
    (trace,) = episode.traces
    assert not episode.ok and not trace.ok and trace.rewards == {} and "400" in trace.errors[-1].message
    assert len(CLOSED) == 2


def test_a_bug_in_the_environment_fails_the_episode(loaded: Any, endpoint: Any) -> None:
    class Broken(ToolEnv):
        def step(self, action: str) -> Any:
            raise RuntimeError("a bug")

    episode = play(loaded(lambda: Broken(TASKS)), endpoint(lambda n: ("x", "stop")))
    assert not episode.ok and "a bug" in episode.errors[-1].message


def test_tasks_are_those_of_the_environment(loaded: Any, endpoint: Any) -> None:
    tasks = list(loaded(lambda: ToolEnv(TASKS)).taskset)
    assert [(task.data.id, task.data.answer, task.data.options) for task in tasks] == [(f"t{i}", f"answer {i}", {"task": i}) for i in range(4)]
    assert len({task.key for task in tasks}) == 4
    env = loaded(GuessNumber)
    assert not env.taskset.bounded
    assert [task.data.seed for task in env.taskset.take(3)] == [0, 1, 2]
    chat = endpoint(lambda n: (str(n), "stop"))
    (trace,) = play(env, chat, 5).traces
    assert trace.ok and trace.messages[0].content == GuessNumber().reset(seed=5)[0]


def test_the_text_that_the_environment_reads() -> None:
    stops = ("</search>", "</answer>", "\n\n")

    def read(content: str, reasoning: str | None = None) -> str:
        return turn_text(AssistantMessage(content=content, reasoning_content=reasoning), stops)

    assert read("<search>x") == "<search>x</search>"
    assert read("<search>x</search> and <answer>y") == "<search>x</search> and <answer>y</answer>"
    assert read("<search>x</search>") == "<search>x</search>"
    assert read("no tag at all") == "no tag at all"
    assert read("so <answer>y", "hm") == "<think>hm</think>so <answer>y</answer>"


# -- rollout trees ---------------------------------------------------------------------------------------------------------------------------------------


def tree() -> RolloutTree:
    made = RolloutTree(task_id="task", group=1)
    made.add(None, "prompt", [0, 1], text="Who?")
    call = {"name": "search", "arguments": {"query": "x"}, "ok": True, "error": "", "executed": True}
    made.add(0, "policy", [2, 3], logprobs=[-0.1, -0.2], entropies=[0.1, 0.2], text="<search>x</search>", calls=[call])
    made.add(1, "observation", [4], text="found", tools=("search",))
    made.add(2, "policy", [5, 6], logprobs=[-1.0, -2.0], entropies=[1.5, 0.5], text="one")
    made.add(2, "policy", [7], logprobs=[-3.0], entropies=[0.7], text="two")
    made.trajectories = [
        Trajectory(tree=made, index=0, origin="initial", leaf=3, reward=1.0),
        Trajectory(tree=made, index=1, origin="branched", branched_from=2, parent=0, leaf=4),
    ]
    return made


def test_verifiers_reads_a_tree_and_its_branches_are_the_trajectories() -> None:
    ours = tree()
    trace = WireTrace.model_validate(to_verifiers_trace(ours, np.array([1.0, -0.5]), model="m"))
    assert trace.reward == 0.5 and trace.task.data.id == "task"
    for branch, trajectory in zip(trace.branches, ours.trajectories, strict=True):
        assert branch.token_ids == trajectory.token_ids
        assert branch.sampled_mask == trajectory.mask
        assert branch.logprobs == trajectory.logprobs
        assert branch.entropies == trajectory.entropies
    assert [branch.advantages for branch in trace.branches] == [[0.0, 0.0, 0.25, 0.25, 0.0, 1.0, 1.0], [0.0, 0.0, 0.25, 0.25, 0.0, -0.5]]
    assert [message.role for message in trace.branches[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert (trace.num_branches, trace.num_turns, trace.num_output_tokens) == (2, 3, 2 + 2 + 2 + 1)
    again = WireTrace.model_validate(trace.to_record(float_decimals=None))
    assert again.branches[1].logprobs == ours.trajectories[1].logprobs


def test_verifiers_reads_the_file(tmp_path: Path) -> None:
    write_verifiers_traces(tmp_path, [tree()], model="m")
    (episode,) = read_episodes(tmp_path, WireTrace)
    assert episode.ok and episode.group.id == "1" and episode.env.id == "arpo"
    assert episode.traces[0].branches[0].advantages is None
