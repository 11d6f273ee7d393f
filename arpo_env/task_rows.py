"""One row (a mapping of column names to values) -> one task. A row that does not fit is a :class:`BadRow` that says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from arpo_env.latex_repair import Repair
from arpo_env.task import Task

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "Question", "problem", "Problem", "prompt", "query", "extra_info.question"),
    # Search-R1's layout keeps a list under reward_model.ground_truth.target, the layout of verl and ARPO a text under reward_model.ground_truth.
    "answer": (
        *("reward_model.ground_truth.target", "reward_model.ground_truth", "answer", "Answer", "answers"),
        *("golden_answers", "ground_truth", "final_answer", "Final answer", "target"),
    ),
    "id": ("id", "task_id", "unique_id", "_id", "uid", "qid"),
    "system_prompt": ("system_prompt",),
    "ability": ("ability",),
    "data_source": ("data_source",),
}
"""Where the parts of a task are looked for, in this order; ``a.b`` is the field b of the column a."""

LONGEST_METADATA = 256
"""Characters: longer texts of other columns (solutions, encoded images) are not kept in ``Task.metadata``."""

_GSM8K_ANSWER = re.compile(r"####\s*([-+]?)\$?([\d.,]*\d)\s*\Z")
_MISSING = object()

Columns = Mapping[str, tuple[str, ...]]
Repairer = Callable[[str], Repair]


class BadRow(ValueError):
    """Why a row cannot be a task."""


def resolve(columns: Mapping[str, str] | None) -> Columns:
    """:data:`COLUMNS` with the user's own names in place of the usual ones. ValueError for a part that tasks do not have."""
    if unknown := set(columns or ()) - set(COLUMNS):
        raise ValueError(f"columns: expected keys among {', '.join(COLUMNS)}, got {', '.join(sorted(unknown))}")
    return {**COLUMNS, **{part: (path,) for part, path in (columns or {}).items()}}


def task_from_row(row: Any, columns: Columns, repair: Repairer, *, default_id: str, ability: str | None) -> tuple[Task, list[Repair]]:
    """The task of a row and what was repaired in its texts.

    The question of a chat prompt is its last user message; its system message is the task's system prompt. An answer that is there but empty
    is None: the task can be rolled out, not scored. Small scalars of other columns go to the metadata, as does the number of other messages of
    the chat (``dropped_turns``).
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"expected a mapping of column names to values, got {_kind(row)}")
    paths, found = _look_up(row, columns)
    from_chat = _is_chat(found["question"])
    chat = found["question"] if from_chat else _plain(row.get("prompt"))
    question = _user_message(chat) if from_chat else found["question"]
    if not isinstance(question, str):
        raise BadRow(f"question in {paths['question']!r}: expected text or chat messages, got {_kind(question)}")
    system = _text(found["system_prompt"]) or (_system_message(chat) if _is_chat(chat) else None)
    clean_question = repair(_encodable(question))
    clean_answers = [repair(_encodable(answer)) for answer in _answers(found["answer"], paths["answer"])]
    clean_system = repair(_encodable(system)) if system else None
    ability = _text(found["ability"]) or ability
    answers = tuple(answer.text for answer in clean_answers)
    several = isinstance(found["answer"], list) and bool(answers)
    used = set(paths.values())
    metadata = {name: value for name, value in _scalars(row, "") if name not in used and value != question}
    if from_chat and (dropped := sum(message["role"] != "system" for message in chat) - 1):
        metadata["dropped_turns"] = dropped
    task = Task(
        question=clean_question.text,
        answer=answers if several else next(iter(answers), None),
        id=_text(found["id"]) or default_id,
        system_prompt=clean_system.text if clean_system else None,
        ability=ability.lower() if ability else None,
        data_source=_text(found["data_source"]),
        metadata=MappingProxyType(metadata),
    )
    return task, [clean_question, *clean_answers, *([clean_system] if clean_system else [])]


def _look_up(row: Mapping[str, Any], columns: Columns) -> tuple[dict[str, str], dict[str, Any]]:
    """Part of a task -> the path where it was found, and its value (None where it is empty)."""
    paths: dict[str, str] = {}
    found: dict[str, Any] = {}
    for part, candidates in columns.items():
        paths[part], found[part] = _first(row, candidates)
        if found[part] is _MISSING:
            if part in ("question", "answer"):
                raise BadRow(f"no column for the {part}: looked for {', '.join(candidates)}; found {', '.join(_leaves(row, '')) or 'no column'}")
            found[part] = None
    if found["question"] is None:
        raise BadRow(f"the question in {paths['question']!r} is empty")
    return paths, found


def _first(row: Mapping[str, Any], candidates: Iterable[str]) -> tuple[str, Any]:
    """The first candidate that holds something, else the first that is there (value None), else _MISSING."""
    there: tuple[str, Any] = ("", _MISSING)
    for path in candidates:
        value = _get(row, path)
        if value is _MISSING:
            continue
        value = _plain(value)
        if not _is_empty(value):
            return path, value
        if there[1] is _MISSING:
            there = (path, None)
    return there


def _get(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    if "." not in path:
        return _MISSING
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _plain(value: Any) -> Any:
    """Lists and numbers of Python's own for those of numpy (rows that came through pandas)."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list):
        return all(_is_empty(_plain(item)) for item in value)
    return value is None or value != value  # NaN: how pandas writes "nothing"


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) and "role" in message for message in value)


def _user_message(chat: list[Mapping[str, Any]]) -> str:
    for message in reversed(chat):
        if message["role"] == "user":
            content = message.get("content")
            if not isinstance(content, str) or not content.strip():
                raise BadRow(f"content of the user message: expected text, got {_kind(content)}")
            return content
    raise BadRow(f"chat prompt without a user message: roles {', '.join(str(message['role']) for message in chat)}")


def _system_message(chat: list[Mapping[str, Any]]) -> str | None:
    return next((message["content"] for message in chat if message["role"] == "system" and isinstance(message.get("content"), str)), None)


def _answers(value: Any, path: str) -> list[str]:
    """All accepted answers as texts, empty ones left out. BadRow for what is no answer (a mapping, true or false)."""
    answers = []
    for item in value if isinstance(value, list) else [value]:
        item = _plain(item)
        if _is_empty(item):
            continue
        if not isinstance(item, str | int | float) or isinstance(item, bool):
            raise BadRow(f"answer in {path!r}: expected text, a number or a list of them, got {_kind(item)}")
        # GSM8K's answers are a worked solution, then "#### 2,125".
        final = _GSM8K_ANSWER.search(item) if isinstance(item, str) else None
        answers.append(final[1] + final[2].replace(",", "") if final else str(item))
    return answers


def _encodable(text: str) -> str:
    """``text``; half of a surrogate pair (JSON can write one) would stop the first file or tokenizer that it reaches."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"text with half of a surrogate pair (U+{ord(text[error.start]):04X}), which UTF-8 cannot hold") from None
    return text


def _text(value: Any) -> str | None:
    return str(value).strip() if isinstance(value, str | int) else None


def _scalars(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        value = _plain(value)
        if isinstance(value, str):
            if 0 < len(value) <= LONGEST_METADATA:
                yield prefix + str(name), value
        elif isinstance(value, int | float):
            yield prefix + str(name), value
        elif isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}.")


def _leaves(row: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    return f"{type(value).__name__} {value!r:.40}"
