"""Any ``ToolEnv`` as an environment of TRL's ``GRPOTrainer``: its tools become methods, its reward a reward function.

::

    trainer = GRPOTrainer(
        model, reward_func, args, train_dataset=dataset(tasks), processing_class=tokenizer, environment_factory=environment_factory(env)
    )

TRL owns the turns here: it renders the tools' schemas with the model's chat template, reads the calls out of what the model writes, calls the methods one
after another, and ends when a turn holds no call. So

* each call is one turn of the environment, whose limits (``max_turns``, ``max_tool_calls``, wrappers) hold; its call format and system prompt have no part;
* what went wrong in a call is text for the model. An unavailable tool raises, which TRL counts as a failure and shows the model as an error;
* the environment does not see the final answer until :func:`reward_func` hands it the last message of the completion. There is no ``get_reward``: TRL calls
  it with no argument, so it could not know the answer, and its reward would be added to that of ``reward_func``;
* nothing branches: a forked conversation has no place in TRL's loop. ``arpo_algo.interop.trl.rollout_func`` branches.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import gymnasium

from arpo_env.core import ToolEnv
from arpo_env.forking import fork, fork_support
from arpo_env.formats import Hermes
from arpo_env.interop.trl_schema import method_of
from arpo_env.task import Task

__all__ = ["ToolUnavailable", "dataset", "environment_factory", "reward_func"]

Env = gymnasium.Env[str, str]


class ToolUnavailable(RuntimeError):
    """The infrastructure behind a tool failed; nothing that the model did."""


def dataset(tasks: Iterable[Task], *, system_prompt: str = "") -> Any:
    """A ``datasets.Dataset`` for ``GRPOTrainer`` with the column ``prompt``: a system message (the task's own, else ``system_prompt``) and the question.

    The message of the question carries its whole task as JSON under the key ``task``, which chat templates leave alone: that is how a prompt finds its
    task again. Raises ``ValueError`` for a task that JSON cannot hold.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise ImportError("dataset() needs the package datasets: pip install 'arpo[data]'") from error
    if hasattr(tasks, "sample") and not isinstance(tasks, Sized):
        raise ValueError(f"a {type(tasks).__name__} has no end: pass itertools.islice(tasks, n)")
    return Dataset.from_list([{"prompt": _prompt(task, system_prompt)} for task in tasks])


def environment_factory(env_or_make: Env | Callable[[], Env]) -> Callable[[], object]:
    """An ``environment_factory`` for ``GRPOTrainer``: every environment it makes has a public method for each tool, and episodes of its own.

    ``env_or_make``: a ``ToolEnv``, perhaps in wrappers, which is reset and forked for each episode; or a function that makes one, called for each episode.
    Raises ``TypeError`` or ``ValueError`` where it is no ``ToolEnv``, cannot be forked, or has a tool that cannot be a method.
    """
    env = env_or_make if isinstance(env_or_make, gymnasium.Env) else env_or_make()
    base = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise TypeError(f"expected a ToolEnv, whose tools become methods, got {type(base).__name__}; arpo_algo.interop.trl.rollout_func takes any environment")
    if env is env_or_make and fork_support(env) == "none":
        raise ValueError(f"{env} cannot be forked: pass a function that makes such environments")
    methods = {name: method_of(tool) for name, tool in base.prototypes.items()}
    if env is not env_or_make:
        env.close()
    made = type("ToolEnvironment", (_Environment,), methods)
    lock = threading.Lock()
    return lambda: made(env_or_make, lock)


def reward_func(completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float | None]:
    """The environment's reward of each completion, whose last message is the answer; None where it could not be scored."""
    return [environment._score(completion) for environment, completion in zip(environments, completions, strict=True)]


class _Environment:
    """One environment of TRL's pool: an episode of a ``ToolEnv`` at a time. Subclasses have the tools as methods."""

    def __init__(self, source: Env | Callable[[], Env], lock: threading.Lock) -> None:
        self._source, self._lock = source, lock
        self._env: Env | None = None
        self._reward = 0.0
        self._scored = True
        self._over = "reset() was not called"

    def reset(self, **row: Any) -> None:
        """Begin an episode with the task of a row of the dataset: that of :func:`dataset`, or any columns that ``TaskSet.from_rows`` understands."""
        if self._env is not None:
            self._env.close()
        options = {"task": _task(row)}
        if isinstance(self._source, gymnasium.Env):
            with self._lock:
                self._source.reset(options=options)
                self._env = fork(self._source)
        else:
            self._env = self._source()
            self._env.reset(options=options)
        self._base.call_format = Hermes()  # whatever the chat template looks like, calls come parsed; this is how they are written again
        self._reward, self._scored, self._over = 0.0, True, ""

    @property
    def _base(self) -> ToolEnv:
        assert self._env is not None and isinstance(self._env.unwrapped, ToolEnv)
        return self._env.unwrapped

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result. Raises :class:`ToolUnavailable`."""
        if self._over or self._env is None:
            return f"The call of {name} was not run: the episode has ended ({self._over})."
        call = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")  # no tag in an argument is one of the call format's
        observation, info = self._take(self._env.step(f"<tool_call>{call}</tool_call>"))
        if any(call["error"] == "unavailable" for call in info["tool_calls"]):
            raise ToolUnavailable(observation)
        return observation if not self._over else f"The call of {name} was not run: the episode has ended ({self._over})."

    def _score(self, completion: Any) -> float | None:
        """The reward of the episode with the last message of ``completion`` as its answer. The episode then is over; asked again, the same."""
        if not self._over and self._env is not None:
            message = completion[-1] if isinstance(completion, Sequence) and not isinstance(completion, str) and completion else {"content": completion}
            text = message.get("content")
            if isinstance(text, str) and message.get("role", "assistant") == "assistant" and not message.get("tool_calls"):
                self._take(self._env.step(text))
            if not self._over:
                self._take(self._base.truncate("no_answer"))
        return self._reward if self._scored else None

    def _take(self, outcome: tuple[str, Any, bool, bool, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        """Note what a step gave; when it ended the episode, free its tools."""
        observation, reward, terminated, truncated, info = outcome
        self._reward += float(reward)
        if not terminated and not truncated:
            return observation, info
        if not info["stop_reason"]:  # a wrapper's limit, of which the environment inside knows nothing
            _, score, _, _, ending = self._base.truncate("time_limit")
            self._reward += score
            info = {**ending, "tool_calls": info["tool_calls"]}
        self._scored, self._over = info["scored"], info["stop_reason"]
        assert self._env is not None
        self._env.close()
        return observation, info


def _prompt(task: Task, system_prompt: str) -> list[dict[str, str]]:
    system = task.system_prompt if task.system_prompt is not None else system_prompt
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": task.question, "task": task.to_json()}]


def _task(row: Mapping[str, Any]) -> Task | Mapping[str, Any]:
    """The task that :func:`dataset` wrote into the prompt, else the row itself, for the environment to read."""
    prompt = row.get("prompt")
    last = prompt[-1] if isinstance(prompt, Sequence) and prompt else None
    text = last.get("task") if isinstance(last, Mapping) else None
    return Task.from_json(text) if text else row
