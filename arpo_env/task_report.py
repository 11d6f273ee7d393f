"""What was met while loading tasks: rows that do not fit, repairs, and notes on the tasks together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from arpo_env.task import Task


@dataclass(frozen=True, slots=True)
class RowProblem:
    """A row that could not be read. ``row`` counts from 0."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What was met while loading; ``str(report)`` says it in a few lines."""

    rows: int
    loaded: int
    repaired_rows: int = 0
    repaired: Mapping[str, int] = field(default_factory=dict)
    r"""LaTeX command (``\boxed``) -> how many times it was restored from a control character."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Control character (``0x0C``) -> how many of them are still in the tasks' texts."""
    problems: tuple[RowProblem, ...] = ()
    notes: tuple[str, ...] = ()

    def joined(self, other: LoadReport, tasks: Sequence[Task]) -> LoadReport:
        """The report of ``tasks``, which come from both. Parts of one loaded set have one report, and it is counted once."""
        if other is self:
            return replace(self, notes=notes_on(tasks))
        return LoadReport(
            rows=self.rows + other.rows,
            loaded=self.loaded + other.loaded,
            repaired_rows=self.repaired_rows + other.repaired_rows,
            repaired=Counter(self.repaired) + Counter(other.repaired),
            left=Counter(self.left) + Counter(other.left),
            problems=self.problems + other.problems,
            notes=notes_on(tasks),
        )

    def __str__(self) -> str:
        lines = [f"{self.rows} rows read, {self.loaded} loaded, {len(self.problems)} left out"]
        if self.repaired:
            lines.append(f"LaTeX repaired in {self.repaired_rows} rows: " + _counts(self.repaired))
        if self.left:
            lines.append("control characters left as they are: " + _counts(self.left))
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"left out: {problem}" for problem in self.problems[:5]]
        if len(self.problems) > 5:
            lines.append(f"left out: {len(self.problems) - 5} more (see .problems)")
        return "\n".join(lines)


def notes_on(tasks: Sequence[Task]) -> tuple[str, ...]:
    """What a user of ``tasks`` should know, in words: no answer or ability, dropped turns, repeated questions and ids."""
    same_question: dict[str, list[Task]] = {}
    for task in tasks:
        same_question.setdefault(task.question, []).append(task)
    repeated = [same for same in same_question.values() if len(same) > 1]
    contradicting = [same for same in repeated if len({frozenset(task.answers) for task in same if task.answers}) > 1]
    unanswered = [task.id for task in tasks if not task.answers]
    unnamed = sum(task.ability is None for task in tasks)
    repeated_ids = [name for name, n in Counter(task.id for task in tasks if task.id).items() if n > 1]
    dropped = sum("dropped_turns" in task.metadata for task in tasks)
    notes = []
    if unanswered:
        notes.append(f"{len(unanswered)} without an answer, which cannot be scored: {_some(unanswered)}")
    if repeated:
        notes.append(f"{len(repeated)} questions occur more than once: {_pairs(repeated)}")
    if contradicting:
        notes.append(f"{len(contradicting)} of these have answers that differ as written: {_pairs(contradicting)}")
    if dropped:
        notes.append(f"{dropped} chat prompts have other turns, which were dropped: the last user message is the question")
    if unnamed:
        notes.append(f"{unnamed} name no ability: graded as the environment says, else as qa; ability= says otherwise")
    if repeated_ids:
        notes.append(f"{len(repeated_ids)} ids occur more than once: {_some(repeated_ids)}")
    return tuple(notes)


def _pairs(repeated: Sequence[Sequence[Task]]) -> str:
    return _some([" = ".join(task.id for task in same[:3]) for same in repeated])


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (", ..." if len(items) > 3 else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}x" for name, n in sorted(counts.items(), key=lambda item: -item[1]))
