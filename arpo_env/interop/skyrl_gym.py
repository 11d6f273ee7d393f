"""SkyRL-Gym (github.com/NovaSky-AI/SkyRL, extra ``skyrl-gym``) as ``gymnasium.Env[str, str]`` that forks.

::

    rows = [{"prompt": "What is 2 + 3?", "reward_spec": {"ground_truth": "5"}, "extra_info": {"max_turns": 3}}]
    env = SkyRLGymEnv("gsm8k_multi_turn", rows)

A row is one of SkyRL's training data: ``prompt`` (chat messages, or a text) goes to ``init``, everything else to the environment as ``extras``. The turn
goes to SkyRL exactly as the policy wrote it, thoughts included, because its rewards judge the format of the whole. SkyRL knows no truncation: an episode that
ends is ``terminated``. Its search and SQL environments expect sampling to stop at their closing tags: pass them, ``stop_strings=("</search>", ...)``.

Fork: by copy for SkyRL's own environments and tools, by replay for all others. A plain deepcopy would be wrong: a tool group keeps closures over itself, so
that the copy's calls act on the parent; after a copy the tools are registered anew. ``info["tool_calls"]`` is filled as far as SkyRL's ``metadata`` tells: the
name and the input of the tool, not whether the call succeeded.

SkyRL has no seeds, and none of its environments draws. One of yours that does needs a generator of its own, started from its row: what it draws from ``random``
belongs to all environments of the process, and its forks by replay are refused.

Not supported: SkyRL's recursive environments (``BaseRLMEnv``), which rewrite the conversation that the trainer holds.
"""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from arpo_env.forking import ForkError
from arpo_env.interop.foreign import ForeignEnv, Forks, Message, Outcome
from arpo_env.interop.foreign_library import check_known, defined_in, load, making
from arpo_env.task import Task, TaskSet

COPIED = ("skyrl_gym.envs", "skyrl_gym.tools")
"""Modules whose environments and tools hold nothing but plain Python objects (and HTTP sessions, which copies may share)."""
RUN_CODE = ("skyrl_gym.tools.python", "skyrl_gym.envs.lcb")
"""Modules that run the policy's code, in processes of this machine that nothing but a time limit holds."""


class SkyRLGymEnv(ForeignEnv):
    """An environment of SkyRL-Gym over rows of its data.

    Args:
        env: the id of a registered environment, or what makes one from ``env_config`` and ``extras`` (a subclass of ``BaseTextEnv``).
        tasks: rows, or a file of them (``.jsonl``, ``.parquet``).
        env_config: the environment's configuration; a mapping is read by attributes.
        max_turns: goes to the environment in ``extras``; None: the row's own, else the environment's.
        forks: overrules how it is forked; None: as the module says.
        stop_strings: where sampling of a turn ends.
        error_reward: what a turn at which SkyRL raises is worth; None: the trajectory is left unscored.

    ``options={"task": ...}`` takes the number of a row, a row, or a :class:`Task` of ``env.tasks``. Raises ``ValueError`` where the first row does not fit.
    """

    shared = ForeignEnv.shared | {"tasks", "max_turns", "_maker", "_name", "_config"}

    def __init__(
        self,
        env: str | Callable[..., Any],
        tasks: Sequence[Mapping[str, Any]] | str | PathLike[str],
        *,
        env_config: Any = None,
        max_turns: int | None = None,
        forks: Forks | None = None,
        stop_strings: Sequence[str] = (),
        error_reward: float | None = None,
    ) -> None:
        skyrl_gym = load("skyrl_gym", "skyrl-gym")
        if isinstance(env, str):
            check_known(env, load("skyrl_gym.envs.registration", "skyrl-gym").registry, "SkyRL-Gym")
        self._maker: Callable[..., Any] = partial(skyrl_gym.make, env) if isinstance(env, str) else env
        self._name = env if isinstance(env, str) else getattr(env, "__name__", "skyrl")
        self._config = SimpleNamespace(**env_config) if isinstance(env_config, Mapping) else env_config
        self.max_turns = max_turns
        rows = _read(tasks) if isinstance(tasks, str | PathLike) else list(tasks)
        self.tasks = TaskSet(_task(row, f"{self._name}/{index}") for index, row in enumerate(rows))
        if not rows:
            raise ValueError("expected at least one row, got none")
        with making(f"SkyRL-Gym's {self._name} from the first row"):
            made = self._made(self.tasks[0])
        if hasattr(made, "_chat_history_ref"):
            raise TypeError(f"{type(made).__name__} rewrites the conversation that SkyRL's trainer holds; such environments are not supported")
        self._close_library(made)
        parts = (made, *getattr(made, "tool_groups", ()))
        self.isolation = "process" if any(defined_in(part, RUN_CODE) for part in parts) else ""
        super().__init__(
            forks=forks or ("copy" if all(defined_in(part, COPIED) for part in parts) else "replay"),
            draws="nothing",  # none of SkyRL's environments does, and some wait for a network
            stop_strings=stop_strings,
            error_reward=error_reward,
        )

    def _made(self, task: Task) -> Any:
        extras = {name: copy.deepcopy(value) for name, value in task.metadata.items() if name not in ("prompt", "env_class")}
        if self.max_turns is not None:
            extras["max_turns"] = self.max_turns
        return self._maker(env_config=self._config, extras=extras)

    def _choose(self, wanted: Any) -> Task:
        if wanted is None:
            return self.tasks.sample(self.np_random)
        if isinstance(wanted, Mapping):
            return _task(wanted, f"{self._name}/row")
        if not isinstance(wanted, Task):
            return self.tasks[operator.index(wanted)]
        if "prompt" not in wanted.metadata:
            raise ValueError(f"task {wanted.id!r} holds no row of SkyRL's data; take it from env.tasks")
        return wanted

    def _open(self, start: Task) -> tuple[str, Outcome]:
        env = self._renew(partial(self._made, start))
        messages, _ = env.init(_prompt(start.metadata))
        return start.id, Outcome(messages=_messages(messages))

    def _take(self, action: str) -> Outcome:
        with self._library():
            answer = self._held.env.step(action)
            return Outcome(
                messages=_messages(answer["observations"]),
                reward=float(answer["reward"]),
                terminated=bool(answer["done"]),
                calls=_calls(answer.get("metadata") or {}),
            )

    def _mend(self, env: Any) -> None:
        for group in getattr(env, "tool_groups", ()):
            names, group._tool_registry = set(group._tool_registry), {}
            group._register_tools()
            if set(group._tool_registry) != names:
                raise ForkError(f"tools of {type(group).__name__} were registered by hand and cannot be copied: {sorted(names - set(group._tool_registry))}")

    def _close_library(self, env: Any) -> None:
        env.close()


def _read(path: str | PathLike[str]) -> list[Mapping[str, Any]]:
    """The rows of a file."""
    suffix = Path(path).suffix.lower()
    if suffix == ".jsonl":
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if suffix == ".parquet":
        rows: list[Mapping[str, Any]] = load("pyarrow.parquet", "data").read_table(path).to_pylist()
        return rows
    raise ValueError(f"tasks must be rows, a .jsonl or a .parquet file, got {path}")


def _task(row: Mapping[str, Any], name: str) -> Task:
    """A row as a task, which holds the row as its metadata."""
    truth = (row.get("reward_spec") or row.get("reward_model") or {}).get("ground_truth")
    return Task(
        question=_prompt(row)[-1]["content"],
        answer=truth if isinstance(truth, str) else None,
        id=name,
        metadata=MappingProxyType(dict(row)),
    )


def _prompt(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """A new list of the messages that a row begins with."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError(f"a row needs a 'prompt', chat messages or a text, got {prompt!r:.100}")
    return [dict(message) for message in prompt]


def _messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple({"role": str(message["role"]), "content": str(message["content"])} for message in messages)


def _calls(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The call of a turn. SkyRL names no tool where it found no call or the tool raised."""
    name, given = metadata.get("tool_name"), metadata.get("tool_input")
    inputs = list(given) if isinstance(given, list | tuple) else [given]
    if not name or inputs == [None]:
        return ()
    return ({"name": str(name), "arguments": {"input": inputs}, "ok": True, "error": "", "executed": True},)
