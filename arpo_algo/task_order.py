"""Which task comes when: a task set in a new random order each epoch, an unlimited source in its own."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from arpo_env.task import Task, TaskSource


@dataclass(frozen=True)
class TaskOrder:
    """Reset options of groups by their number; a function of the number and ``seed`` alone, so that a resumed run goes on where it was."""

    tasks: TaskSource | None
    """None: the environment has no tasks and is reset with a new seed for each group."""
    seed: int

    def options(self, first: int, n: int) -> list[dict[str, Any] | None]:
        """What ``env.reset`` takes for the groups ``first`` to ``first + n - 1``."""
        if self.tasks is None:
            return [None] * n
        numbers = range(first, first + n)
        if not isinstance(self.tasks, Sized):
            return [{"task": self.tasks[number]} for number in numbers]
        size = len(self.tasks)
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(size) for epoch in {number // size for number in numbers}}
        return [{"task": self.tasks[int(orders[number // size][number % size])]} for number in numbers]


def first_tasks(tasks: TaskSource, n: int) -> list[Task]:
    """The first ``n`` tasks, or all where there are fewer."""
    size = len(tasks) if isinstance(tasks, Sized) else n
    return [tasks[index] for index in range(min(n, size))]
