"""reasoning-gym (github.com/open-thought/reasoning-gym, extra ``reasoning-gym``) as a :class:`arpo_env.ToolEnv`.

::

    env = ReasoningGymEnv("basic_arithmetic", size=200, seed=7, max_digits=3)
    env = ReasoningGymEnv("countdown", tools=[PythonTool()])  # tools make branch points

Every item of a data set is a task, so the environment has ``tasks`` to train and evaluate on, takes tools, forks natively and shares the data set with its
forks. The library alone decides the reward: its ``score_answer``, in [0, 1], for the content of ``<answer>``; no bonus, no penalty. The answer is read by the
call format, outside thoughts, never from the whole turn, because the library pays in part for an answer that merely contains the right one. Text at which
``score_answer`` raises (three of the data sets do) is worth 0, the least that it gives. A turn without an answer is told so until ``max_turns``.

The library draws a random seed where none is given, so that two processes have different data; here it is ``0`` unless said. Two of its data sets draw items
from the process-wide generators (``list_functions``, which is then another at every look) or seed them (``pool_matrix``); here neither gets through. Three
(``isomorphic_strings``, ``polynomial_multiplication``, ``ransom_note``) go by the order of a set: two processes have equal items only under an equal
``PYTHONHASHSEED``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from arpo_env.core import Episode, ToolEnv
from arpo_env.formats import CallFormat
from arpo_env.interop.foreign_library import ProcessGenerators, check_known, load, making
from arpo_env.rewards import Score
from arpo_env.task import Task
from arpo_env.tools.base import Shared, Tool


class ReasoningGymEnv(ToolEnv):
    """The items of a reasoning-gym data set.

    Args:
        dataset: its name.
        size: number of items.
        seed: decides the items, with ``config``; which one an episode has is decided by ``reset``.
        tools: prototypes, as in :class:`ToolEnv`.
        call_format: how calls and answers are written; by default ``Tags()``.
        max_turns: the episode is truncated after so many turns. 1 is the library's own protocol.
        system_prompt: replaces the format's; "" for none.
        config: further fields of the data set's configuration.

    Raises ``ValueError`` for an unknown name or a value that the data set refuses, ``TypeError`` for an unknown field.
    """

    def __init__(
        self,
        dataset: str = "basic_arithmetic",
        *,
        size: int = 500,
        seed: int = 0,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        call_format: CallFormat | None = None,
        max_turns: int = 8,
        system_prompt: str | None = None,
        render_mode: str | None = None,
        **config: Any,
    ) -> None:
        reasoning_gym = load("reasoning_gym", "reasoning-gym")
        check_known(dataset, load("reasoning_gym.factory", "reasoning-gym").DATASETS, "reasoning-gym")
        with making(f"reasoning-gym's {dataset}"):
            made = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **config)
        super().__init__(
            Items(made, dataset, seed),
            tools,
            call_format=call_format,
            reward=ScoreAnswer(made),
            max_turns=max_turns,
            system_prompt=system_prompt,
            render_mode=render_mode,
        )


class Items(Shared):
    """A data set as tasks, made when asked for. The same number gives the same item, in any order. The item itself is ``task.metadata["entry"]``."""

    def __init__(self, dataset: Any, name: str, seed: int) -> None:
        self.dataset, self.name, self.seed = dataset, f"{name}/{seed}", seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Task:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"task index must be in [0, {len(self) - 1}], got {index}")
        with ProcessGenerators(self.seed + index).in_force():
            entry = self.dataset[index]
        answer = entry["answer"]  # None where many answers are right
        text = answer if isinstance(answer, str) or answer is None else json.dumps(answer, default=str)
        return Task(
            question=entry["question"], answer=text, id=f"{self.name}/{index}", data_source="reasoning-gym", metadata=MappingProxyType({"entry": entry})
        )

    def sample(self, rng: np.random.Generator, /) -> Task:
        """An item drawn uniformly with one draw from ``rng``."""
        return self[int(rng.integers(len(self)))]


class ScoreAnswer(Shared):
    """The data set's own ``score_answer`` as a reward."""

    parts = ("accuracy",)

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def check(self, task: Task) -> None:
        """``ValueError`` for a task that is no item of a data set."""
        if "entry" not in task.metadata:
            raise ValueError(f"task {task.id!r} is no item of a reasoning-gym data set; take it from env.tasks")

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        try:
            value = float(self.dataset.score_answer(episode.answer, task.metadata["entry"]))
        except Exception:  # on text that it cannot read; the answer is wrong
            value = 0.0
        return Score(value, {"accuracy": value})
