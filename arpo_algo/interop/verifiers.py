"""Rollout trees as traces of verifiers 0.4: their viewers and readers open them. Plain dicts; verifiers is not needed to write them.

A tree is one trace: a node of ours is a node of its message graph, with ``parent``, ``message``, ``sampled``, ``token_ids``, ``mask``, ``logprobs``,
``entropies`` and ``advantages`` as verifiers defines them (lists with an entry a token that the policy sampled; ``mask`` with an entry a token). Its
``branches`` are the trajectories. Four departures, because a trace of verifiers is one attempt and a tree is a group:

1. A trace has one reward, a tree one for each trajectory. ``rewards`` holds ``mean_reward`` over the scored ones; each trajectory stands in
   ``info["trajectories"]`` with its ``leaf`` (a node), reward, parts, advantage, stop reason and origin.
2. ``advantages`` of a node that several trajectories share are the mean over its scored owners.
3. ``entropies`` are those of the policy when it sampled; verifiers fills them from the trainer.
4. The opening of a conversation is one node, a user message, though it may hold a system message too: a tree keeps its ids as one run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arpo_algo.tree import Node, RolloutTree, Trajectory

VERSION = 1
"""Of the trace schema of verifiers."""


def to_verifiers_trace(tree: RolloutTree, advantages: np.ndarray | None = None, *, model: str = "") -> dict[str, Any]:
    """The tree as a trace: what ``verifiers.v1.trace.WireTrace.model_validate`` takes and ``json.dumps`` writes.

    ``advantages``: (M,), one number a trajectory; None leaves them open. Raises ``ValueError`` for another shape or a tree without trajectories.
    """
    if not tree.trajectories:
        raise ValueError(f"expected a tree with trajectories, got none in group {tree.group}")
    if advantages is not None and np.shape(advantages) != (len(tree.trajectories),):
        raise ValueError(f"advantages must have shape ({len(tree.trajectories)},), one a trajectory, got {np.shape(advantages)}")
    numbers = [None] * len(tree.trajectories) if advantages is None else [float(number) for number in advantages]
    scored = [trajectory.reward for trajectory in tree.trajectories if trajectory.scored]
    opening = tree.nodes[0].text
    return {
        "version": VERSION,
        "id": f"{tree.task_id}/{tree.group}/{tree.version}",
        "task": {"type": "RolloutTree", "data": {"id": tree.task_id, "prompt": opening}, "key": tree.task_id},
        "agent": {"config": {"model": model}, "name": "policy"},
        "nodes": [_node(tree, node, credit) for node, credit in zip(tree.nodes, _credits(tree, numbers), strict=True)],
        "calls": _calls(tree, model),
        "rewards": {"mean_reward": {"score": float(np.mean(scored)), "weight": 1.0} if scored else None},
        "metrics": {"trajectories": float(len(tree.trajectories)), "scored": float(len(scored))},
        "info": {
            "group": tree.group,
            "trajectories": [_trajectory(trajectory, number) for trajectory, number in zip(tree.trajectories, numbers, strict=True)],
        },
        "is_completed": True,
        "ok": bool(scored),
        "errors": [] if scored else [{"type": "Unscored", "message": "no trajectory of the group could be scored"}],
    }


def write_verifiers_traces(
    path: str | os.PathLike[str], trees: Sequence[RolloutTree], advantages: Sequence[np.ndarray] | None = None, *, model: str = ""
) -> Path:
    """Write the trees as a ``traces.jsonl`` of verifiers, one episode of one trace a line, into the folder ``path``; returns the file."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    given = [None] * len(trees) if advantages is None else advantages
    file = folder / "traces.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for tree, numbers in zip(trees, given, strict=True):
            trace = to_verifiers_trace(tree, numbers, model=model)
            record = {"id": trace["id"], "env": {"id": "arpo"}, "task": trace["task"], "group": {"id": str(tree.group)}, "ok": trace["ok"], "traces": [trace]}
            out.write(json.dumps(record, default=repr) + "\n")
    return file


def _node(tree: RolloutTree, node: Node, credit: float | None) -> dict[str, Any]:
    sampled = node.sampled
    return {
        "parent": node.parent,
        "message": _message(tree, node),
        "sampled": sampled,
        "token_ids": list(node.token_ids),
        "mask": [sampled] * len(node.token_ids),
        "logprobs": list(node.logprobs) if sampled else [],
        "entropies": list(node.entropies) if sampled else None,
        "advantages": [credit] * len(node.token_ids) if sampled and credit is not None else None,
    }


def _message(tree: RolloutTree, node: Node) -> dict[str, Any]:
    if node.sampled:
        calls = [{"id": f"{node.id}-{number}", "name": call["name"], "arguments": json.dumps(call.get("arguments", {}), default=repr)}
                 for number, call in enumerate(node.calls)]  # fmt: skip
        return {"role": "assistant", "content": node.text, "tool_calls": calls or None}
    if node.role == "observation" and node.tools and node.parent is not None and tree.nodes[node.parent].calls:
        return {"role": "tool", "content": node.text, "name": " ".join(node.tools), "tool_call_id": f"{node.parent}-0"}
    return {"role": "user", "content": node.text}


def _credits(tree: RolloutTree, numbers: Sequence[float | None]) -> list[float | None]:
    """For each node the mean advantage over the scored trajectories that pass through it; None without any."""
    position = {trajectory.index: place for place, trajectory in enumerate(tree.trajectories) if trajectory.scored}
    found = [[number for owner in owners if owner in position and (number := numbers[position[owner]]) is not None] for owners in tree.owners()]
    return [float(np.mean(values)) if values else None for values in found]


def _calls(tree: RolloutTree, model: str) -> list[dict[str, Any]]:
    """A model call for each sampled node, with the tokens that it read and wrote."""
    length: list[int] = []
    calls = []
    for node in tree.nodes:  # a child is always younger than its parent
        before = 0 if node.parent is None else length[node.parent]
        length.append(before + len(node.token_ids))
        if node.sampled:
            usage = {"prompt_tokens": before, "completion_tokens": len(node.token_ids)}
            reason = "length" if node.stop_reason == "length" else "stop"
            calls.append({"node": node.id, "model": model, "finish_reason": reason, "usage": usage, "time": {"start": 0.0, "end": node.seconds}})
    return calls


def _trajectory(trajectory: Trajectory, advantage: float | None) -> dict[str, Any]:
    same = ("index", "origin", "branched_from", "parent", "leaf", "reward", "scored", "stop_reason", "answer")
    return {name: getattr(trajectory, name) for name in same} | {"reward_parts": dict(trajectory.reward_parts), "advantage": advantage}
