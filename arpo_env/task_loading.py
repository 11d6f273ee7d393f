"""Where rows come from (JSON lines, Parquet, Hugging Face datasets), and the loop that makes them tasks and a report."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from arpo_env.latex_repair import Repair, as_it_is, repair_latex
from arpo_env.task import Task
from arpo_env.task_report import LoadReport, RowProblem, notes_on
from arpo_env.task_rows import BadRow, resolve, task_from_row


class Source(NamedTuple):
    """Rows (mappings, Tasks, or a BadRow in the place of one that could not be read), their file, and the prefix of the ids of rows without one."""

    file: str
    stem: str
    rows: Iterable[Any]


def jsonl(path: str | PathLike[str]) -> Source:
    """One JSON object a line; empty lines are skipped and do not count as rows."""
    return Source(str(path), Path(path).stem, _json_lines(path))


def _json_lines(path: str | PathLike[str]) -> Iterator[Any]:
    with open(path, "rb") as file:  # bytes: a line that is not UTF-8 must not stop the others
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
                yield BadRow(f"line {number} is not JSON: {error}")


def parquet(path: str | PathLike[str]) -> Source:
    """The rows of a Parquet file. Each file is read alone, so files of different column types can be loaded together."""
    return Source(str(path), Path(path).stem, _parquet_rows(path))


def _parquet_rows(path: str | PathLike[str]) -> Iterator[Any]:
    pq = _require("pyarrow.parquet")
    with open(path, "rb") as handle:
        try:
            file = pq.ParquetFile(handle)
        except ValueError as error:  # pyarrow.ArrowInvalid is one
            raise ValueError(f"{path}: expected a Parquet file: {error}") from error
        for batch in file.iter_batches(batch_size=2048):
            yield from batch.to_pylist()


def hf_dataset(dataset: Any, split: str | None, config: str | None, revision: str | None) -> Source:
    """The rows of one split of a Hugging Face dataset, given by name or as an object of the package ``datasets``."""
    name = dataset if isinstance(dataset, str) else "dataset"
    if isinstance(dataset, str):
        dataset = _require("datasets").load_dataset(dataset, name=config, split=split, revision=revision)
    elif config is not None or revision is not None:
        raise ValueError(f"config and revision belong to a dataset name, got a {type(dataset).__name__}")
    elif split is not None and not isinstance(dataset, Mapping):
        raise ValueError(f"split={split!r} belongs to a dataset name or a DatasetDict, got a {type(dataset).__name__}")
    if isinstance(dataset, Mapping):  # a DatasetDict: split -> Dataset
        split = next(iter(dataset)) if split is None and len(dataset) == 1 else split
        if split not in dataset:
            raise ValueError(f"{name}: split must be one of {', '.join(map(repr, dataset))}, got {split!r}")
        dataset = dataset[split]
    suffix = f"/{split}" if split else ""
    return Source(name + suffix, name.rsplit("/", 1)[-1] + suffix, dataset)


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"loading these tasks needs {module.partition('.')[0]}: pip install 'arpo[data]'") from error


def load(sources: Iterable[Source], columns: Mapping[str, str] | None, repair: bool, ability: str | None) -> tuple[list[Task], LoadReport]:
    """The tasks of all sources, and the report. ValueError if a source has no row, or no row that fits."""
    # Cached: the system prompt of all rows is mostly one text, which is then also kept once.
    repairer = lru_cache(maxsize=64)(repair_latex if repair else as_it_is)
    make = partial(task_from_row, columns=resolve(columns), repair=repairer, ability=ability)
    read: list[tuple[Task, list[Repair]]] = []
    problems: list[RowProblem] = []
    for source in sources:
        outcomes = list(_outcomes(source, make))
        problems_here = [outcome for outcome in outcomes if isinstance(outcome, RowProblem)]
        if len(problems_here) == len(outcomes):
            raise ValueError(_nothing_fits(source.file, problems_here))
        read += [outcome for outcome in outcomes if not isinstance(outcome, RowProblem)]
        problems += problems_here
    tasks = [task for task, _ in read]
    report = LoadReport(
        rows=len(read) + len(problems),
        loaded=len(read),
        repaired_rows=sum(any(text.commands for text in texts) for _, texts in read),
        repaired=Counter(command for _, texts in read for text in texts for command in text.commands),
        left=Counter(character for _, texts in read for text in texts for character in text.left),
        problems=tuple(problems),
        notes=notes_on(tasks),
    )
    return tasks, report


def _outcomes(source: Source, make: Callable[..., tuple[Task, list[Repair]]]) -> Iterator[tuple[Task, list[Repair]] | RowProblem]:
    for number, row in enumerate(source.rows):
        try:
            if isinstance(row, BadRow):
                raise row
            yield (row, []) if isinstance(row, Task) else make(row, default_id=f"{source.stem}/{number}")
        except BadRow as error:
            yield RowProblem(source.file, number, str(error))


def _nothing_fits(file: str, problems: Sequence[RowProblem]) -> str:
    if not problems:
        return f"{file}: expected at least one row, got none"
    first: dict[str, int] = {}
    for problem in problems:
        first.setdefault(problem.reason, problem.row)
    reasons = [f"row {row}: {reason}" for reason, row in list(first.items())[:3]]
    hint = 'name your own columns with columns={"question": ..., "answer": ...}; "a.b" is the field b of column a'
    return "\n  ".join([f"{file}: none of its {len(problems)} rows could be read as a task", *reasons, hint])
