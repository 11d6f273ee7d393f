"""Tasks and traces for a small model out of the public training set and the record of searches.

The record holds 1,000 queries, so most of the 10,000 training questions would find nothing. Kept are those questions that come near to a recorded query and
whose answer stands in what the environment then shows. Half of them become traces for a cold start (the question as the query, the recorded result, the
reference answer), the other half tasks; they share no question.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arpo_env import RecordedSearch, SearchQAEnv, Task, TaskSet


@dataclass(frozen=True, kw_only=True)
class Split:
    """What was found and where it was written."""

    tasks: Path
    traces: Path
    n_tasks: int
    n_traces: int


def split_tasks(data: Path, out: Path, env_args: dict[str, Any]) -> Split:
    """Write ``tasks.jsonl`` and ``traces.jsonl`` to ``out``. ``env_args``: those of the environment that the tasks are for."""
    record = RecordedSearch.from_json(data / "search_cache.json")
    near = [
        task for task in TaskSet.from_parquet(data / "train_10k.parquet") if task.ability == "qa" and record.nearest(task.question)[1] >= record.min_similarity
    ]
    # The system prompt of a task is the data set's: without it, the environment's own holds for all.
    env = SearchQAEnv(TaskSet([replace(task, system_prompt=None) for task in near]), data / "search_cache.json", **env_args)
    found = [(task, trace) for task in near if (trace := _trace(env, task)) is not None]
    env.close()
    traces, tasks = found[::2], found[1::2]
    split = Split(tasks=out / "tasks.jsonl", traces=out / "traces.jsonl", n_tasks=len(tasks), n_traces=len(traces))
    _write(split.tasks, [{"id": task.id, "question": task.question, "answer": list(task.answers), "ability": task.ability} for task, _ in tasks])
    _write(split.traces, [trace for _, trace in traces])
    return split


def _trace(env: SearchQAEnv, task: Task) -> dict[str, Any] | None:
    """The conversation that searches for the question and answers rightly; None where the answer does not stand in the result, or is a mere yes or no."""
    _, info = env.reset(seed=0, options={"task": task})
    messages = [dict(message) for message in info["messages"]]
    search, answer = f"<search> {task.question.strip()} </search>", f"<answer> \\boxed{{{task.answers[0]}}} </answer>"
    observation = env.step(search)[0]
    if task.answers[0].lower() in ("yes", "no") or task.answers[0].lower() not in observation.lower():
        return None
    reward = env.step(answer)[1]
    if reward != 1:
        raise ValueError(f"the reference answer of {task.id} must be worth 1, got {reward}")
    shown = (("assistant", search), ("user", observation), ("assistant", answer))
    return {"messages": [*messages, *({"role": role, "content": content} for role, content in shown)], "observation_role": "inline"}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
