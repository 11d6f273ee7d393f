"""Rollouts on disk: each step is a folder of three Parquet tables that pandas, datasets and DuckDB open as they are.

``step_000012/completions.parquet``, a row a trajectory. ``step, prompt, completion, advantage`` are named as TRL names its logged completions, and there is a
    column ``reward/<part>`` for each part of the reward; ``advantage`` is null where none was given or the trajectory is not scored.
``step_000012/nodes.parquet``, a row a node of the rollout tree. ``parent, token_ids, mask, logprobs, entropies, advantages`` are named as in the message
    graph of verifiers and mean the same: lists with an entry a token, ``logprobs`` and ``entropies`` empty where nothing was sampled. Estimated entropies lie
    between ``entropy_lower`` and ``entropy_upper`` (null: they are exact); ``versions`` is empty where all tokens are of ``version``. A token that several
    trajectories share has no advantage of its own: ``advantages`` holds the mean over its scored ``owners`` (null: none given, or no owner is scored).
``step_000012/decisions.parquet``, a row a branch point, in the order in which they were decided, whether they branched or not.

Join them on ``step, group`` and ``node``. The folder appears under its name when it is whole; a step written again replaces the old one.
Only the ids are the truth: ``prompt`` and ``completion`` are decoded for reading.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arpo_algo.entropy import EntropyBounds
from arpo_algo.tree import Decision, Node, RolloutTree, Trajectory

Row = dict[str, Any]


def step_folder(path: str | os.PathLike[str], step: int) -> Path:
    """Where the tables of a step lie under ``path``."""
    return Path(path) / f"step_{step:06d}"


def write_rollouts(
    path: str | os.PathLike[str],
    step: int,
    trees: Sequence[RolloutTree],
    *,
    decode: Callable[[list[int]], str],
    advantages: Sequence[np.ndarray] | None = None,
) -> Path:
    """Write the trees of a step and return their folder. ``advantages``: for each tree a (M,) array.

    Raises ``ValueError`` for two trees of one group number, a tree without trajectories, or advantages of another shape; ``ImportError`` without pyarrow.
    """
    _check(trees, advantages)
    given = [None] * len(trees) if advantages is None else advantages
    paired = list(zip(trees, given, strict=True))
    parts = sorted({name for tree in trees for trajectory in tree.trajectories for name in trajectory.reward_parts})
    tables = {
        "completions": (_completion_fields(parts), [row for tree, numbers in paired for row in _completions(tree, numbers, decode)]),
        "nodes": (_NODE_FIELDS, [row for tree, numbers in paired for row in _nodes(tree, numbers)]),
        "decisions": (_DECISION_FIELDS, [row for tree in trees for row in _decisions(tree)]),
    }
    folder = step_folder(path, step)
    partial, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    for rest in (partial, old):
        shutil.rmtree(rest, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, (fields, rows) in tables.items():
        _write(partial / f"{name}.parquet", fields, [{"step": step} | row for row in rows])
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def read_rollouts(folder: str | os.PathLike[str]) -> list[RolloutTree]:
    """The trees of one step folder, in the order in which they were written.

    All that a tree holds comes back, with two limits: what JSON lacks in tool arguments and metadata (tuples become lists, objects their ``repr``), and lone
    surrogates in texts, which Parquet cannot hold (they come back escaped). Raises ``FileNotFoundError`` where there is no such folder.
    """
    completions, nodes, decisions = (_read(Path(folder) / f"{name}.parquet") for name in ("completions", "nodes", "decisions"))
    trees: dict[int, RolloutTree] = {}
    for row in completions:
        if row["group"] not in trees:
            tree = RolloutTree(task_id=row["task_id"], group=row["group"], version=row["version"], metadata=json.loads(row["metadata"]))
            trees[row["group"]] = tree
        trees[row["group"]].trajectories.append(_trajectory(trees[row["group"]], row))
    for row in nodes:
        trees[row["group"]].nodes.append(_node(row))
    for row in decisions:
        trees[row["group"]].decisions.append(Decision(**{name: row[name] for name, _ in _DECISION_FIELDS if name not in ("step", "group", "delta")}))
    return list(trees.values())


def _check(trees: Sequence[RolloutTree], advantages: Sequence[np.ndarray] | None) -> None:
    groups = [tree.group for tree in trees]
    if len(set(groups)) < len(groups):
        raise ValueError(f"each tree of a step needs its own group number, got {groups}")
    if empty := [tree.group for tree in trees if not tree.trajectories]:
        raise ValueError(f"each tree needs at least one trajectory, groups {empty} have none")
    expected = [(len(tree.trajectories),) for tree in trees]
    if advantages is not None and expected != [np.shape(numbers) for numbers in advantages]:
        raise ValueError(f"advantages must hold one number for each trajectory, shapes {expected}, got {[np.shape(numbers) for numbers in advantages]}")


# -- rows ----------------------------------------------------------------------------------------------------------------------------------------------

_DECISION_FIELDS = (
    ("step", "int64"), ("group", "int64"), ("node", "int64"), ("trajectory", "int64"), ("depth", "int64"), ("initial_entropy", "float64"),
    ("entropy", "float64"), ("delta", "float64"), ("score", "float64"), ("children", "int64"), ("reason", "string"), ("settled", "bool"),
)  # fmt: skip
_NODE_FIELDS = (
    ("step", "int64"), ("group", "int64"), ("node", "int64"), ("parent", "int64"), ("role", "string"), ("tools", "strings"), ("calls", "string"),
    ("text", "string"), ("token_ids", "ints"), ("mask", "bools"), ("logprobs", "floats"), ("entropies", "floats"), ("entropy_lower", "floats"),
    ("entropy_upper", "floats"), ("mass_covered", "floats"), ("advantages", "floats"), ("owners", "ints"), ("n_descendants", "int64"), ("version", "int64"),
    ("versions", "ints"), ("stop_reason", "string"), ("seconds", "float64"),
)  # fmt: skip

_SAME = ("parent", "role", "text", "token_ids", "logprobs", "entropies", "version", "versions", "stop_reason", "seconds")
_BOUNDS = (("entropy_lower", "lower"), ("entropy_upper", "upper"), ("mass_covered", "covered"))


def _completion_fields(parts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return (
        ("step", "int64"), ("prompt", "string"), ("completion", "string"), ("reward", "float64"), *((f"reward/{name}", "float64") for name in parts),
        ("advantage", "float64"), ("group", "int64"), ("task_id", "string"), ("trajectory", "int64"), ("origin", "string"), ("branched_from", "int64"),
        ("parent", "int64"), ("leaf", "int64"), ("scored", "bool"), ("stop_reason", "string"), ("answer", "string"), ("n_calls", "int64"),
        ("version", "int64"), ("metadata", "string"),
    )  # fmt: skip


def _completions(tree: RolloutTree, advantages_M: np.ndarray | None, decode: Callable[[list[int]], str]) -> Iterable[Row]:
    prompt, metadata = decode(tree.nodes[0].token_ids), _to_json(dict(tree.metadata))
    for position, trajectory in enumerate(tree.trajectories):
        yield {
            "prompt": prompt,
            "completion": decode([token for node in trajectory.nodes()[1:] for token in node.token_ids]),
            "reward": trajectory.reward,
            **{f"reward/{name}": value for name, value in trajectory.reward_parts.items()},
            "advantage": float(advantages_M[position]) if advantages_M is not None and trajectory.scored else None,
            "group": tree.group,
            "task_id": tree.task_id,
            "trajectory": trajectory.index,
            **{name: getattr(trajectory, name) for name in ("origin", "branched_from", "parent", "leaf", "scored", "stop_reason", "answer")},
            "n_calls": len(trajectory.calls),
            "version": tree.version,
            "metadata": metadata,
        }


def _trajectory(tree: RolloutTree, row: Row) -> Trajectory:
    prefix = "reward/"
    same = ("origin", "branched_from", "parent", "leaf", "reward", "scored", "stop_reason", "answer")
    parts = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix) and value is not None}
    return Trajectory(tree=tree, index=row["trajectory"], reward_parts=parts, **{name: row[name] for name in same})


def _nodes(tree: RolloutTree, advantages_M: np.ndarray | None) -> Iterable[Row]:
    descendants = [0] * len(tree.nodes)
    for node in reversed(tree.nodes):  # a child is always younger than its parent
        if node.parent is not None:
            descendants[node.parent] += 1 + descendants[node.id]
    scored = {trajectory.index: position for position, trajectory in enumerate(tree.trajectories) if trajectory.scored}
    for node, owners in zip(tree.nodes, tree.owners(), strict=True):
        numbers = [] if advantages_M is None else [float(advantages_M[scored[owner]]) for owner in owners if owner in scored]
        yield {
            "group": tree.group,
            "node": node.id,
            **{name: getattr(node, name) for name in _SAME},
            **{column: None if node.bounds is None else list(getattr(node.bounds, name)) for column, name in _BOUNDS},
            "tools": list(node.tools),
            "calls": _to_json(node.calls),
            "mask": [node.sampled] * len(node.token_ids),
            "advantages": [float(np.mean(numbers)) if node.sampled else 0.0] * len(node.token_ids) if numbers else None,
            "owners": owners,
            "n_descendants": descendants[node.id],
        }


def _node(row: Row) -> Node:
    bounds = None if row["mass_covered"] is None else EntropyBounds(**{name: tuple(row[column]) for column, name in _BOUNDS})
    return Node(id=row["node"], tools=tuple(row["tools"]), calls=json.loads(row["calls"]), bounds=bounds, **{name: row[name] for name in _SAME})


def _decisions(tree: RolloutTree) -> Iterable[Row]:
    for decision in tree.decisions:
        yield {"group": tree.group} | {name: getattr(decision, name) for name, _ in _DECISION_FIELDS if name not in ("step", "group")}


def _to_json(value: Any) -> str:
    return json.dumps(value, default=repr)


# -- files ---------------------------------------------------------------------------------------------------------------------------------------------


def _write(file: Path, fields: Sequence[tuple[str, str]], rows: Sequence[Row]) -> None:
    arrow, parquet = _pyarrow()
    types = {
        "int64": arrow.int64(), "float64": arrow.float64(), "bool": arrow.bool_(), "string": arrow.string(), "ints": arrow.list_(arrow.int32()),
        "floats": arrow.list_(arrow.float64()), "bools": arrow.list_(arrow.bool_()), "strings": arrow.list_(arrow.string()),
    }  # fmt: skip
    schema = arrow.schema([(name, types[kind]) for name, kind in fields])
    columns = [arrow.array([_storable(row.get(name)) for row in rows], types[kind]) for name, kind in fields]
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        if rows:  # datasets cannot read a row group of no rows, but a file without row groups it can
            writer.write_table(arrow.table(columns, schema))


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [_storable(item) for item in value]
    return value


def _read(file: Path) -> list[Row]:
    _, parquet = _pyarrow()
    rows: list[Row] = parquet.ParquetFile(file).read().to_pylist()
    return rows


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("recording rollouts needs pyarrow: pip install 'arpo[train]'") from error
    return pyarrow, pyarrow.parquet
