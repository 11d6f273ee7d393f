"""Environments over a task set of one's own with the two tools of the paper: ``search`` and ``python``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from arpo_env.core import Episode, ToolEnv
from arpo_env.formats import CallFormat
from arpo_env.rewards import Reward
from arpo_env.task import Task, TaskSet, TaskSource
from arpo_env.tools.base import Tool
from arpo_env.tools.python import PythonTool
from arpo_env.tools.search import KeywordIndex, RecordedSearch, SearchTool, TantivyIndex

Tasks = TaskSource | Sequence[Mapping[str, Any] | Task] | str | PathLike[str]


class SearchPythonEnv(ToolEnv):
    """Questions, a search tool and a Python tool. A subclass brings a few invented questions and documents for a first try.

    Args:
        tasks: a :class:`TaskSet`, a path (``.jsonl``, ``.parquet``), the name of a data set, or rows. Without any, the built-in ones.
        search: the search tool, named "search"; or a file to search: recorded searches (``.json``, one object of query -> text) or documents
            (``.jsonl``, each line with ``text`` and, if known, ``title`` and ``url``). Needed with ``tasks``: the built-in documents know nothing of them.
        python: the Python tool, named "python"; by default ``PythonTool()``.

    The other arguments are those of :class:`ToolEnv`.
    """

    rows: ClassVar[Sequence[Mapping[str, Any]]]
    documents: ClassVar[Sequence[Mapping[str, Any]]]

    def __init__(
        self,
        tasks: Tasks | None = None,
        search: Tool | str | PathLike[str] | None = None,
        python: Tool | None = None,
        *,
        call_format: CallFormat | None = None,
        reward: Reward | Callable[[Task, Episode], float] | None = None,
        max_turns: int = 8,
        max_tool_calls: int | None = None,
        max_observation_chars: int = 16_384,
        system_prompt: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if tasks is not None and search is None:
            raise ValueError("tasks of your own need search=, for example SearchTool(TantivyIndex.build(documents)) or a file; without search use ToolEnv")
        if isinstance(search, str | PathLike):
            search = search_from_file(search)
        search = search if search is not None else SearchTool(KeywordIndex(self.documents))
        python = python if python is not None else PythonTool()
        for given, name in ((search, "search"), (python, "python")):
            if given.name != name:
                raise ValueError(f"the {name} tool must be named {name!r}, got {given.name!r}")
        super().__init__(
            _task_source(tasks if tasks is not None else self.rows),
            [search, python],
            call_format=call_format,
            reward=reward,
            max_turns=max_turns,
            max_tool_calls=max_tool_calls,
            max_observation_chars=max_observation_chars,
            system_prompt=system_prompt,
            render_mode=render_mode,
        )


def _task_source(tasks: Tasks) -> TaskSource | Sequence[Mapping[str, Any] | Task]:
    return TaskSet.load(tasks) if isinstance(tasks, str | PathLike) else tasks


def search_from_file(path: str | PathLike[str]) -> SearchTool:
    """A search tool over a file: recorded searches (``.json``), or documents (``.jsonl``) in a tantivy index where tantivy is installed.

    Raises ``ValueError`` for another kind of file and for one that does not hold what its name promises.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        return SearchTool(RecordedSearch.from_json(path))
    if suffix != ".jsonl":
        raise ValueError(f"search must be a tool, a .json file of recorded searches or a .jsonl file of documents, got {path}")
    with open(path, encoding="utf-8") as file:
        try:
            documents = [json.loads(line) for line in file if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path}: expected one JSON object a line: {error}") from error
    return SearchTool(TantivyIndex.build(documents) if find_spec("tantivy") else KeywordIndex(documents))
