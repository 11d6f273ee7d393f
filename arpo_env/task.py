"""Tasks: a question with its reference answer, and sets of them."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

if TYPE_CHECKING:
    from arpo_env.task_report import LoadReport

__all__ = ["Task", "TaskSet", "TaskSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question. Immutable: environments and their forks share it."""

    question: str
    answer: str | tuple[str, ...] | None = None
    """The reference answer; a tuple means that any of its entries is right; None means unknown."""
    id: str = ""
    system_prompt: str | None = None
    ability: str | None = None
    """``"math"`` or ``"qa"``: which grader applies. None: the environment's own (``ToolEnv.ability``), else ``"qa"``."""
    data_source: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def answers(self) -> tuple[str, ...]:
        """All accepted answers, perhaps none."""
        if self.answer is None:
            return ()
        return (self.answer,) if isinstance(self.answer, str) else self.answer

    def to_json(self) -> str:
        """This task as JSON. ``ValueError`` for metadata that JSON cannot hold or would change (tuples, numbers as keys, NaN)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        try:
            text = json.dumps({**values, "metadata": dict(self.metadata)}, ensure_ascii=False)
            same = Task.from_json(text) == self
        except (TypeError, ValueError) as error:
            raise ValueError(f"task {self.id!r}: expected metadata that JSON can hold, got {self.metadata!r:.200}: {error}") from error
        if not same:
            raise ValueError(f"task {self.id!r}: its metadata comes back from JSON changed (tuples, numbers as keys, NaN), got {self.metadata!r:.200}")
        return text

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The task that :meth:`to_json` wrote."""
        values = json.loads(text)
        answer = values["answer"]
        return cls(**{**values, "answer": tuple(answer) if isinstance(answer, list) else answer})

    # A mapping proxy can be neither copied nor pickled. Copies of a fork share the task; a worker process gets an equal one.
    def __deepcopy__(self, memo: dict[int, Any]) -> Task:
        return self

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Task], tuple[dict[str, Any]]]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return _unpickle_task, ({**values, "metadata": dict(self.metadata)},)


def _unpickle_task(values: dict[str, Any]) -> Task:
    return Task(**{**values, "metadata": MappingProxyType(values["metadata"])})


class TaskSource(Protocol):
    """Where an environment takes its tasks from: a :class:`TaskSet`, or a generator of unlimited tasks."""

    def __getitem__(self, index: int, /) -> Task: ...

    def sample(self, rng: np.random.Generator, /) -> Task:
        """A task drawn with ``rng`` and nothing else."""
        ...


class TaskSet(Sequence[Task]):
    """Tasks in a fixed order. Immutable: what changes a set returns a new one.

    The loaders (``from_*``, ``load``) share three arguments. ``columns`` says where the user's own rows keep things, for example
    ``{"question": "text", "answer": "label.value"}``. ``repair=False`` keeps control characters where LaTeX commands belong.
    ``ability`` (``"math"`` or ``"qa"``) is given to rows that name none. A row that does not fit is left out and listed in
    :attr:`report`; a file of which no row fits is a ValueError.
    """

    __slots__ = ("_report", "_tasks")

    def __init__(self, tasks: Iterable[Task], *, report: LoadReport | None = None) -> None:
        self._tasks = tuple(tasks)
        for index, task in enumerate(self._tasks):
            if not isinstance(task, Task):
                raise TypeError(f"tasks[{index}] must be a Task, got {type(task).__name__}; TaskSet.from_rows makes tasks from mappings")
        self._report = report

    @property
    def report(self) -> LoadReport:
        """What was met while loading. Parts of a set (slices, splits, filters) keep the report of what was loaded."""
        if self._report is not None:
            return self._report
        from arpo_env.task_report import LoadReport, notes_on

        return LoadReport(rows=len(self), loaded=len(self), notes=notes_on(self._tasks))

    # -- loading ----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any] | Task], *, columns: Mapping[str, str] | None = None, repair: bool = True, ability: str | None = None
    ) -> TaskSet:
        """The tasks that ``rows`` hold: mappings with a question (or problem, or prompt) and an answer; a Task is taken as it is."""
        from arpo_env import task_loading as loading

        return cls._loaded(loading.load([loading.Source("rows", "rows", rows)], columns, repair, ability))

    @classmethod
    def from_jsonl(
        cls,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        columns: Mapping[str, str] | None = None,
        repair: bool = True,
        ability: str | None = None,
    ) -> TaskSet:
        """The tasks of one or several files of one JSON object a line."""
        from arpo_env import task_loading as loading

        return cls._loaded(loading.load([loading.jsonl(path) for path in _paths(paths)], columns, repair, ability))

    @classmethod
    def from_parquet(
        cls,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        columns: Mapping[str, str] | None = None,
        repair: bool = True,
        ability: str | None = None,
    ) -> TaskSet:
        """The tasks of one or several Parquet files, whose column types may differ. Needs pyarrow."""
        from arpo_env import task_loading as loading

        return cls._loaded(loading.load([loading.parquet(path) for path in _paths(paths)], columns, repair, ability))

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        split: str | None = None,
        config: str | None = None,
        revision: str | None = None,
        columns: Mapping[str, str] | None = None,
        repair: bool = True,
        ability: str | None = None,
    ) -> TaskSet:
        """The tasks of a Hugging Face dataset: a name (``"openai/gsm8k"``, with its ``config`` and ``revision``), a Dataset or a DatasetDict.

        ``split`` may be left out where there is only one. A name needs the package ``datasets``.
        """
        from arpo_env import task_loading as loading

        return cls._loaded(loading.load([loading.hf_dataset(dataset, split, config, revision)], columns, repair, ability))

    @classmethod
    def load(
        cls,
        source: str | PathLike[str],
        *,
        split: str | None = None,
        columns: Mapping[str, str] | None = None,
        repair: bool = True,
        ability: str | None = None,
    ) -> TaskSet:
        """The tasks of a file (``.jsonl``, ``.ndjson`` or ``.parquet``) or of the Hugging Face dataset of that name."""
        suffix = Path(source).suffix.lower()
        if suffix in (".jsonl", ".ndjson", ".parquet"):
            if split is not None:
                raise ValueError(f"split={split!r} belongs to a dataset name, got the file {source}")
            read = cls.from_parquet if suffix == ".parquet" else cls.from_jsonl
            return read(source, columns=columns, repair=repair, ability=ability)
        if suffix[1:].isalpha() or Path(source).exists():
            raise ValueError(f"expected a .jsonl, .ndjson or .parquet file or the name of a dataset, got {source} (other names: TaskSet.from_dataset)")
        return cls.from_dataset(str(source), split=split, columns=columns, repair=repair, ability=ability)

    @classmethod
    def _loaded(cls, loaded: tuple[list[Task], LoadReport]) -> TaskSet:
        return cls(loaded[0], report=loaded[1])

    # -- a sequence -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @overload
    def __getitem__(self, index: int, /) -> Task: ...
    @overload
    def __getitem__(self, index: slice, /) -> TaskSet: ...
    def __getitem__(self, index: int | slice, /) -> Task | TaskSet:
        if isinstance(index, slice):
            return self._part(self._tasks[index])
        try:
            return self._tasks[index]
        except IndexError:
            raise IndexError(f"task index must be in [{-len(self)}, {len(self) - 1}], got {index}") from None

    def __add__(self, other: TaskSet) -> TaskSet:
        """Both sets, one after the other."""
        if not isinstance(other, TaskSet):
            return NotImplemented
        return TaskSet(self._tasks + other._tasks, report=self.report.joined(other.report, self._tasks + other._tasks))

    def __repr__(self) -> str:
        return f"<TaskSet of {len(self)} tasks>"

    # Environments are forked by copying them: the tasks are shared.
    def __copy__(self) -> TaskSet:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TaskSet:
        return self

    # -- parts and orders -------------------------------------------------------------------------------------------------

    def sample(self, rng: np.random.Generator, /) -> Task:
        """A task drawn uniformly with one draw from ``rng``."""
        if not self._tasks:
            raise ValueError("cannot draw from a TaskSet without tasks")
        return self._tasks[int(rng.integers(len(self._tasks)))]

    def shuffle(self, seed: int) -> TaskSet:
        """The same tasks in an order that ``seed`` alone decides."""
        return self._part(self._tasks[i] for i in np.random.default_rng(seed).permutation(len(self)))

    def filter(self, keep: Callable[[Task], object]) -> TaskSet:
        """The tasks for which ``keep(task)`` is true."""
        return self._part(task for task in self._tasks if keep(task))

    def split(self, first: float | int, seed: int) -> tuple[TaskSet, TaskSet]:
        """Two parts that share no position: ``first`` tasks (an int) or that fraction (a float in (0, 1)), and the rest, each in its old order.

        A question that the set holds twice can fall on both sides: the report says whether there are any.
        """
        if isinstance(first, float):
            if not 0 < first < 1:
                raise ValueError(f"a fraction must be in (0, 1), got {first}; an int is a number of tasks")
            n = round(first * len(self))
        else:
            n = operator.index(first)
        if not 1 <= n < len(self):
            raise ValueError(f"both parts need a task: the first must have 1 to {len(self) - 1} of {len(self)} tasks, got {n}")
        order = np.random.default_rng(seed).permutation(len(self))
        return self._part(self._tasks[i] for i in sorted(order[:n])), self._part(self._tasks[i] for i in sorted(order[n:]))

    def _part(self, tasks: Iterable[Task]) -> TaskSet:
        return TaskSet(tasks, report=self._report)


def _paths(paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[str | PathLike[str]]:
    found: list[str | PathLike[str]] = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not found:
        raise ValueError("expected at least one path, got none")
    return found
