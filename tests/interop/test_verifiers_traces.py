"""Trees in the field names of verifiers, against numbers worked by hand. ``test_verifiers.py`` reads them with verifiers itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from arpo_algo.interop.verifiers import to_verifiers_trace, write_verifiers_traces
from arpo_algo.tree import RolloutTree, Trajectory


def branched_tree() -> RolloutTree:
    """0 prompt - 1 policy - 2 search result - { 3 policy: t0 | 4 policy: t2, branched };  0 - 5 policy: t1, not scored."""
    tree = RolloutTree(task_id="task", group=3, version=4)
    call = {"name": "search", "arguments": {"query": "Bel"}, "ok": True, "error": "", "executed": True}
    tree.add(None, "prompt", [0, 1], text="Who?")
    tree.add(0, "policy", [2, 3, 4], logprobs=[-0.1, -0.2, -0.3], entropies=[0.1, 0.2, 0.3], text="<search>", calls=[call], stop_reason="stop", seconds=0.5)
    tree.add(1, "observation", [5], text="Bel was it", tools=("search",))
    tree.add(2, "policy", [6, 7], logprobs=[-1.0, -2.0], entropies=[1.5, 0.5], text="Bel", stop_reason="eos")
    tree.add(2, "policy", [8], logprobs=[-3.0], entropies=[0.7], text="Bell", stop_reason="length")
    tree.add(0, "policy", [9], logprobs=[-4.0], entropies=[0.9], text="Ball")
    tree.trajectories = [
        Trajectory(tree=tree, index=0, origin="initial", leaf=3, reward=1.0, reward_parts={"accuracy": 1.0}, stop_reason="answer", answer="Bel"),
        Trajectory(tree=tree, index=1, origin="initial", leaf=5, scored=False, stop_reason="env_error"),
        Trajectory(tree=tree, index=2, origin="branched", branched_from=2, parent=0, leaf=4, reward=0.5),
    ]
    return tree


ADVANTAGES = np.array([1.0, 7.0, -0.5])


def test_nodes_are_the_message_graph() -> None:
    nodes = to_verifiers_trace(branched_tree(), ADVANTAGES)["nodes"]
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2, 2, 0]
    assert [node["sampled"] for node in nodes] == [False, True, False, True, True, True]
    assert [node["token_ids"] for node in nodes] == [[0, 1], [2, 3, 4], [5], [6, 7], [8], [9]]
    assert [node["mask"] for node in nodes] == [[False] * 2, [True] * 3, [False], [True] * 2, [True], [True]]
    assert [node["logprobs"] for node in nodes] == [[], [-0.1, -0.2, -0.3], [], [-1.0, -2.0], [-3.0], [-4.0]]
    assert [node["entropies"] for node in nodes] == [None, [0.1, 0.2, 0.3], None, [1.5, 0.5], [0.7], [0.9]]
    # node 1 is shared by trajectories 0 and 2: (1 - 0.5) / 2; node 5 has no scored owner
    assert [node["advantages"] for node in nodes] == [None, [0.25] * 3, None, [1.0] * 2, [-0.5], None]


def test_messages_say_who_spoke_and_which_call_was_answered() -> None:
    messages = [node["message"] for node in to_verifiers_trace(branched_tree())["nodes"]]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "assistant", "assistant"]
    assert [message["content"] for message in messages] == ["Who?", "<search>", "Bel was it", "Bel", "Bell", "Ball"]
    assert messages[1]["tool_calls"] == [{"id": "1-0", "name": "search", "arguments": '{"query": "Bel"}'}]
    assert messages[2]["tool_call_id"] == "1-0" and messages[2]["name"] == "search"
    assert messages[3]["tool_calls"] is None
    tree = branched_tree()
    tree.nodes[2].tools = ()
    assert to_verifiers_trace(tree)["nodes"][2]["message"] == {"role": "user", "content": "Bel was it"}


def test_rewards_stand_with_their_trajectories() -> None:
    trace = to_verifiers_trace(branched_tree(), ADVANTAGES)
    assert trace["rewards"] == {"mean_reward": {"score": 0.75, "weight": 1.0}}, "the mean of the scored: (1 + 0.5) / 2"
    first, failed, branch = trace["info"]["trajectories"]
    assert (first["leaf"], first["reward"], first["advantage"], first["reward_parts"], first["answer"]) == (3, 1.0, 1.0, {"accuracy": 1.0}, "Bel")
    assert not failed["scored"] and failed["stop_reason"] == "env_error"
    assert (branch["origin"], branch["branched_from"], branch["parent"], branch["leaf"]) == ("branched", 2, 0, 4)
    assert trace["ok"] and trace["is_completed"] and trace["info"]["group"] == 3


def test_calls_count_the_tokens_read_and_written() -> None:
    calls = to_verifiers_trace(branched_tree(), model="m")["calls"]
    assert [(call["node"], call["usage"]["prompt_tokens"], call["usage"]["completion_tokens"]) for call in calls] == [
        (1, 2, 3),
        (3, 6, 2),
        (4, 6, 1),
        (5, 2, 1),
    ]
    assert [call["finish_reason"] for call in calls] == ["stop", "stop", "length", "stop"]
    assert calls[0]["time"]["end"] == 0.5 and calls[0]["model"] == "m"


def test_without_advantages_and_without_a_score() -> None:
    tree = branched_tree()
    assert all(node["advantages"] is None for node in to_verifiers_trace(tree)["nodes"]), "None is not the same as a credit of zero"
    assert to_verifiers_trace(tree, np.zeros(3))["nodes"][1]["advantages"] == [0.0] * 3
    for trajectory in tree.trajectories:
        trajectory.scored = False
    trace = to_verifiers_trace(tree, ADVANTAGES)
    assert trace["rewards"] == {"mean_reward": None} and not trace["ok"] and trace["errors"]
    assert all(node["advantages"] is None for node in trace["nodes"])


def test_the_tree_is_not_touched_and_the_file_is_lines_of_json(tmp_path: Path) -> None:
    tree, other = branched_tree(), branched_tree()
    other.group = 4
    trace = to_verifiers_trace(tree, ADVANTAGES)
    trace["nodes"][1]["token_ids"].append(99)
    assert tree.nodes[1].token_ids == [2, 3, 4]
    file = write_verifiers_traces(tmp_path / "out", [tree, other], [ADVANTAGES, ADVANTAGES], model="m")
    assert file == tmp_path / "out" / "traces.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [record["group"]["id"] for record in records] == ["3", "4"]
    assert records[0]["traces"] == [json.loads(json.dumps(to_verifiers_trace(tree, ADVANTAGES, model="m")))]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\)"):
        to_verifiers_trace(branched_tree(), np.zeros(2))
    with pytest.raises(ValueError, match="trajectories"):
        to_verifiers_trace(RolloutTree())
