"""Rollouts on disk: what is written comes back, other programs read it, and a crash leaves no half step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arpo_algo.recording as recording
from arpo_algo.entropy import EntropyBounds
from arpo_algo.recording import read_rollouts, step_folder, write_rollouts
from arpo_algo.tree import Decision, RolloutTree, Trajectory

parquet = pytest.importorskip("pyarrow.parquet")


def decode(ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def branched_tree(group: int = 0) -> RolloutTree:
    """0 prompt - 1 policy - 2 search result - { 3 policy: t0 | 4 policy: t2, branched };  0 - 5 policy: t1, fresh, not scored."""
    tree = RolloutTree(task_id=f"w-{group}", group=group, version=4, metadata={"question": "Wo?", "facts": [1, 2], "fork_failures": 0})
    call = {"name": "search", "arguments": {"query": "Bel", "top": 3}, "ok": False, "error": "timeout", "executed": True}
    tree.add(None, "prompt", [0, 1], text="ab")
    tree.add(0, "policy", [2, 3, 4], logprobs=[-0.1, -1 / 3, -2.5e-8], entropies=[0.1, 0.2, 0.3], text="cde", version=4, calls=[call], stop_reason="stop")
    tree.add(1, "observation", [5], text="Zürich\n東京", tools=("search", "python"), seconds=0.25)
    tree.add(2, "policy", [6, 7], logprobs=[-1.0, -2.0], entropies=[1.5, 0.5], version=5, versions=[5, 6], stop_reason="eos")
    tree.add(2, "policy", [8], logprobs=[-3.0], entropies=[0.7], bounds=EntropyBounds(lower=(0.5,), upper=(0.8,), covered=(0.9,)))
    tree.add(0, "policy", [], logprobs=[], entropies=[])  # a turn without a token
    parts = {"accuracy": 1.0, "tool_bonus": 0.1}
    tree.trajectories = [
        Trajectory(tree=tree, index=0, origin="initial", leaf=3, reward=1.1, reward_parts=parts, stop_reason="answered", answer="Bel"),
        Trajectory(tree=tree, index=1, origin="fresh", leaf=5, scored=False, stop_reason="env_error"),
        Trajectory(tree=tree, index=2, origin="branched", branched_from=2, parent=0, leaf=4, reward=-1.0, reward_parts={"accuracy": 0.0}),
    ]
    tree.decisions = [Decision(node=2, trajectory=0, depth=1, initial_entropy=0.2, entropy=1.0, score=0.9, children=1, reason="P=0.900 > 0.3", settled=False)]
    return tree


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return rows


def test_trees_come_back_equal_in_every_field(tmp_path: Path) -> None:
    trees = [branched_tree(7), branched_tree(2)]
    trees[1].decisions = []
    folder = write_rollouts(tmp_path, 12, trees, decode=decode, advantages=[np.array([1.0, 0.0, -1.0])] * 2)
    assert folder == step_folder(tmp_path, 12) == tmp_path / "step_000012"
    again = read_rollouts(folder)
    assert again == trees  # nodes, trajectories, decisions, metadata
    for tree in again:
        assert all(trajectory.tree is tree for trajectory in tree.trajectories)
        assert all(type(node.tools) is tuple and type(node.token_ids) is list for node in tree.nodes)
    assert again[0].trajectories[0].calls == trees[0].trajectories[0].calls
    assert again[0].add(3, "observation", [1]).id == 6  # a tree that was read can grow


def test_completions_have_the_names_and_values_of_trl(tmp_path: Path) -> None:
    folder = write_rollouts(tmp_path, 3, [branched_tree()], decode=decode, advantages=[np.array([1.0, 0.0, -1.0])])
    rows = table(folder, "completions")
    assert [row["step"] for row in rows] == [3, 3, 3]
    assert [row["prompt"] for row in rows] == ["ab"] * 3
    assert [row["completion"] for row in rows] == ["cdefgh", "", "cdefi"]
    assert [row["advantage"] for row in rows] == [1.0, None, -1.0]  # not scored is not zero
    assert [row["reward/accuracy"] for row in rows] == [1.0, None, 0.0]
    assert [row["reward/tool_bonus"] for row in rows] == [0.1, None, None]
    assert [(row["origin"], row["branched_from"], row["parent"], row["n_calls"]) for row in rows] == [
        ("initial", None, None, 1), ("fresh", None, None, 0), ("branched", 2, 0, 1),
    ]  # fmt: skip


def test_nodes_follow_the_message_graph(tmp_path: Path) -> None:
    folder = write_rollouts(tmp_path, 0, [branched_tree()], decode=decode, advantages=[np.array([1.0, 0.0, -0.5])])
    rows = table(folder, "nodes")
    assert [row["parent"] for row in rows] == [None, 0, 1, 2, 2, 0]
    assert [row["n_descendants"] for row in rows] == [5, 3, 2, 0, 0, 0]
    assert [row["owners"] for row in rows] == [[0, 1, 2], [0, 2], [0, 2], [0], [2], [1]]
    assert [row["mask"] for row in rows] == [[False] * 2, [True] * 3, [False], [True] * 2, [True], []]
    assert all(len(row["advantages"]) == len(row["token_ids"]) for row in rows[:5])
    assert [row["advantages"] for row in rows] == [[0.0] * 2, [0.25] * 3, [0.0], [1.0] * 2, [-0.5], None]  # node 1: mean of its owners 1 and -0.5
    assert all(row["advantages"] is None for row in table(write_rollouts(tmp_path, 1, [branched_tree()], decode=decode), "nodes"))


def test_an_owner_that_is_not_scored_does_not_enter_the_mean(tmp_path: Path) -> None:
    tree = branched_tree()
    tree.trajectories[2].scored = False
    folder = write_rollouts(tmp_path, 0, [tree], decode=decode, advantages=[np.array([1.0, 0.0, 0.0])])
    assert [row["advantages"] for row in table(folder, "nodes")][1:5] == [[1.0] * 3, [0.0], [1.0] * 2, None]


def test_decisions_join_on_the_node(tmp_path: Path) -> None:
    folder = write_rollouts(tmp_path, 5, [branched_tree(4)], decode=decode)
    (row,) = table(folder, "decisions")
    assert (row["step"], row["group"], row["node"], row["trajectory"], row["children"]) == (5, 4, 2, 0, 1)
    assert row["delta"] == pytest.approx(0.8)
    assert (row["initial_entropy"], row["entropy"], row["score"], row["reason"]) == (0.2, 1.0, 0.9, "P=0.900 > 0.3")


def test_pandas_reads_and_joins_the_tables(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    folder = write_rollouts(tmp_path, 5, [branched_tree(1), branched_tree(2)], decode=decode)
    nodes, decisions = (pandas.read_parquet(folder / f"{name}.parquet") for name in ("nodes", "decisions"))
    joined = nodes.merge(decisions, on=["step", "group", "node"])
    assert joined[["group", "node", "children"]].values.tolist() == [[1, 2, 1], [2, 2, 1]]
    assert pandas.read_parquet(folder / "completions.parquet").groupby("origin").size().to_dict() == {"branched": 2, "fresh": 2, "initial": 2}


def test_datasets_reads_several_steps(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for step in (1, 2):
        tree = branched_tree()
        tree.decisions = tree.decisions if step == 1 else []  # a step without branch points has the same columns
        write_rollouts(tmp_path, step, [tree], decode=decode)
    for name, rows in (("completions", 6), ("nodes", 12), ("decisions", 1)):
        files = [str(file) for file in sorted(tmp_path.glob(f"*/{name}.parquet"))]
        assert datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path / "cache")).num_rows == rows


def test_a_step_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, [branched_tree(0), branched_tree(1)], decode=decode)
    write_rollouts(tmp_path, 1, [branched_tree(8)], decode=decode)
    assert [tree.group for tree in read_rollouts(tmp_path / "step_000001")] == [8]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000001"]


def test_a_crash_while_writing_leaves_the_old_step_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_rollouts(tmp_path, 1, [branched_tree(0)], decode=decode)
    write = recording._write

    def crash(file: Path, *arguments: Any) -> None:
        if file.name == "decisions.parquet":
            raise OSError("no space left on device")
        write(file, *arguments)

    monkeypatch.setattr(recording, "_write", crash)
    for step in (1, 2):
        with pytest.raises(OSError, match="no space"):
            write_rollouts(tmp_path, step, [branched_tree(9)], decode=decode)
    assert [tree.group for tree in read_rollouts(folder)] == [0]
    assert not step_folder(tmp_path, 2).exists()
    monkeypatch.undo()
    write_rollouts(tmp_path, 2, [branched_tree(9)], decode=decode)  # what the crash left is no obstacle
    assert [tree.group for tree in read_rollouts(step_folder(tmp_path, 2))] == [9]


def test_text_that_parquet_cannot_hold_does_not_end_the_run(tmp_path: Path) -> None:
    tree = branched_tree()
    tree.trajectories[0].answer = "half \ud83d of a pair"
    tree.nodes[2].text = "nul \x00 stays"
    tree.nodes[2].tools = ("\ud800",)
    tree.nodes[1].calls[0]["arguments"] = {"query": "\ud800", "when": {1}}
    (again,) = read_rollouts(write_rollouts(tmp_path, 1, [tree], decode=decode))
    assert again.trajectories[0].answer == r"half \ud83d of a pair"
    assert (again.nodes[2].text, again.nodes[2].tools) == ("nul \x00 stays", (r"\ud800",))
    assert again.nodes[1].calls[0]["arguments"] == {"query": "\ud800", "when": "{1}"}


def test_not_finite_numbers_are_kept_and_told_from_missing_ones(tmp_path: Path) -> None:
    tree = branched_tree()
    tree.nodes[4].logprobs, tree.trajectories[0].reward = [float("-inf")], float("nan")
    tree.trajectories[0].reward_parts = {"accuracy": float("nan")}
    (again,) = read_rollouts(write_rollouts(tmp_path, 1, [tree], decode=decode))
    assert again.nodes[4].logprobs == [float("-inf")]
    assert np.isnan(again.trajectories[0].reward) and np.isnan(again.trajectories[0].reward_parts["accuracy"])
    assert again.trajectories[1].reward_parts == {}


def test_what_cannot_be_told_apart_on_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"own group number, got \[3, 3\]"):
        write_rollouts(tmp_path, 1, [branched_tree(3), branched_tree(3)], decode=decode)
    with pytest.raises(ValueError, match=r"groups \[6\] have none"):
        write_rollouts(tmp_path, 1, [RolloutTree(group=6)], decode=decode)
    with pytest.raises(ValueError, match=r"\[\(3,\)\], got \[\(2,\)\]"):
        write_rollouts(tmp_path, 1, [branched_tree()], decode=decode, advantages=[np.zeros(2)])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path / "step_000001")


def test_a_step_without_groups_is_a_step(tmp_path: Path) -> None:
    assert read_rollouts(write_rollouts(tmp_path, 1, [], decode=decode)) == []


def test_pyarrow_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[train\]'"):
        write_rollouts(tmp_path, 1, [branched_tree()], decode=decode)
    assert list(tmp_path.glob("step_*")) == []
