r"""Rewards: (task, finished episode) -> :class:`Score`. Pure scoring; what counts is the policy's own text and the calls that were executed.

A reward is an object: a leaf (:class:`TokenF1`, :class:`ExactMatch`, :class:`MathEquality`, :class:`Accuracy`, :class:`Format`), a composition of
others (:class:`HierarchicalReward`, :class:`WeightedSum`), or a plain function ``(task, episode) -> float`` wrapped by :func:`as_reward`.

*Unscored* (``Score.value is None``) is not 0: the task has no reference answer, or the answer that was given cannot be graded. A policy that gives no
answer is scored: 0.

Departures from the reward code published with the paper (arXiv:2507.19849): mathematics is graded by equality, not by token F1 (which holds 5 = -5 and
3.14 = 314); the tool bonus is paid for executed calls, not for tags in the text; the format is judged turn by turn on the policy's own text.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from arpo_env.math_grading import math_equal, require_math_verify
from arpo_env.task import Task

if TYPE_CHECKING:
    from arpo_env.episode import Episode


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its breakdown. ``value`` None: unscored; parts that could not be scored are then absent."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@runtime_checkable
class Reward(Protocol):
    """What an environment calls at the end of an episode."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names that ``Score.parts`` may hold, the same for every episode."""
        ...

    def __call__(self, task: Task, episode: Episode, /) -> Score: ...


# --- comparing two answers --------------------------------------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(?:a|an|the)\b(?![-./])")
# Not a sign before a number, nor a point, slash or hyphen in one; a hyphen or point after a letter ("COVID-19", "No.5") is punctuation.
_PUNCTUATION = re.compile(
    rf"(?!(?<!\w)-(?=[$]?[.]?\d)|(?<=\d)[-.](?=\d)|(?<![\w.])[.](?=\d)|/(?=\d))[{re.escape(string.punctuation)}]",
)
_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def normalize_answer(text: str) -> str:
    """``text`` in lower case without punctuation, articles and extra white space, as SQuAD does; where nothing would be left ("A", "+"), those stay.

    Unlike there, the marks of numbers stay: a minus sign, and a point, slash or hyphen between digits or before one ("-5 m", "3.14 m", "1/2 cup").
    """
    lowered = text.lower()
    words = _ARTICLES.sub(" ", _PUNCTUATION.sub("", lowered)).split()
    return " ".join(words or lowered.split())


def _number(text: str) -> Fraction | None:
    """The value of a text that is a plain number or fraction (``-5``, ``1,000``, ``3.14``, ``1/2``), else None."""
    if not _NUMBER.fullmatch(text.strip()):
        return None
    try:
        return Fraction(text.strip().replace(",", ""))
    except (ValueError, ZeroDivisionError):  # too many digits; 1/0
        return None


_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def _f1(prediction: str, answer: str) -> float:
    numbers = _number(prediction), _number(answer)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    left, right = normalize_answer(prediction), normalize_answer(answer)
    if left != right and _CLOSED_ANSWERS & {left, right}:
        return 0.0
    left_words, right_words = left.split(), right.split()
    common = sum((Counter(left_words) & Counter(right_words)).values())
    return 2.0 * common / (len(left_words) + len(right_words)) if common else 0.0


def token_f1(prediction: str, answers: Iterable[str]) -> float:
    """Best F1 of the words of ``prediction`` against any of ``answers``, in [0, 1]; 0 for none.

    F1 = 2 * common / (words of one + words of the other), on normalised texts, as bags. "yes", "no" and "noanswer" match themselves alone. Two plain
    numbers are compared as numbers: 2.50 is 2.5.
    """
    return max((_f1(prediction, answer) for answer in answers), default=0.0)


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1.0 if the normalised ``prediction`` equals any of ``answers``, else 0.0. Two plain numbers are compared as numbers."""
    return max((_same(prediction, answer) for answer in answers), default=0.0)


def _same(prediction: str, answer: str) -> float:
    numbers = _number(prediction), _number(answer)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return float(normalize_answer(prediction) == normalize_answer(answer))


# --- leaves -----------------------------------------------------------------------------------------------------------------------------------------


def _answer_score(part: str, task: Task, answer: str | None, grade: Callable[[str, tuple[str, ...]], float | None]) -> Score:
    """0 without an answer; unscored without a truth or where ``grade`` gives None."""
    truths = tuple(truth for truth in task.answers if truth.strip())
    if not truths:
        return Score(None)
    value = 0.0 if answer is None else grade(answer, truths)
    return Score(None) if value is None else Score(value, {part: value})


def _any_equal(answer: str, truths: tuple[str, ...]) -> float | None:
    """1.0 if the answer equals a truth; else None if a comparison failed, else 0.0."""
    undecided = False
    for truth in truths:
        equal = math_equal(answer, truth)
        if equal:
            return 1.0
        undecided = undecided or equal is None
    return None if undecided else 0.0


@dataclass(frozen=True, slots=True)
class TokenF1:
    """Token F1 of the final answer: for question answering."""

    parts: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        return _answer_score("accuracy", task, episode.answer, token_f1)


@dataclass(frozen=True, slots=True)
class MathEquality:
    """1 where the final answer equals the truth as mathematics, else 0. Raises ``ImportError`` at construction without ``pip install 'arpo[math]'``."""

    parts: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        require_math_verify()

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        return _answer_score("accuracy", task, episode.answer, _any_equal)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """:class:`MathEquality` for tasks of the ability ``"math"``, :class:`TokenF1` for ``"qa"`` and None."""

    parts: ClassVar[tuple[str, ...]] = ("accuracy",)

    def check(self, task: Task) -> None:
        """Raise before the first turn where the task could not be graded: ``ValueError`` (ability), ``ImportError`` (mathematics without its extra)."""
        if task.ability not in ("math", "qa", None):
            raise ValueError(f"task {task.id!r}: ability must be 'math', 'qa' or None, got {task.ability!r}")
        if task.ability == "math":
            require_math_verify()

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        self.check(task)
        return _answer_score("accuracy", task, episode.answer, _any_equal if task.ability == "math" else token_f1)


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """1 where the final answer equals an accepted one after normalisation, else 0."""

    parts: ClassVar[tuple[str, ...]] = ("exact_match",)

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        return _answer_score("exact_match", task, episode.answer, exact_match)


@dataclass(frozen=True, slots=True)
class Format:
    """1 where the episode ended with an answer and every turn kept the call format, else 0. Tool text plays no part."""

    parts: ClassVar[tuple[str, ...]] = ("format",)

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        value = float(episode.stop_reason == "answer" and all(turn.well_formed for turn in episode.parsed))
        return Score(value, {"format": value})


# --- compositions -----------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HierarchicalReward:
    """The paper's reward (arXiv:2507.19849, equation 8): -1 if the format is bad; 0 if it is good and the accuracy is 0; else accuracy + r_M.

    r_M = ``bonus`` if every tool of ``bonus_tools`` was executed, else 0. A call that raised was executed; one that was refused (unknown tool, bad
    arguments, budget spent) or that the infrastructure could not serve (``unavailable``) was not. Parts: accuracy, format, and the r_M that was paid.
    """

    accuracy: Reward = field(default_factory=Accuracy)
    """Gives a value in [0, 1] or unscored."""
    bonus: float = 0.1
    bonus_tools: tuple[str, ...] = ("search", "python")
    parts: ClassVar[tuple[str, ...]] = ("accuracy", "format", "tool_bonus")

    def __post_init__(self) -> None:
        if isinstance(self.bonus_tools, str) or not self.bonus_tools:
            raise ValueError(f"bonus_tools must be a tuple of at least one tool name (bonus=0.0 pays none), got {self.bonus_tools!r}")

    def check(self, task: Task) -> None:
        check_task(self.accuracy, task)

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        accuracy = self.accuracy(task, episode).value
        well_formed = Format()(task, episode).value == 1.0
        known = {"format": float(well_formed), "tool_bonus": 0.0}
        if accuracy is None:
            return Score(None if well_formed else -1.0, known)
        executed = {call.name for call in episode.calls if call.error != "unavailable"}
        if well_formed and accuracy > 0 and executed.issuperset(self.bonus_tools):
            known["tool_bonus"] = max(self.bonus, 0.0)  # max(accuracy + r_M, accuracy)
        return Score(accuracy + known["tool_bonus"] if well_formed else -1.0, {"accuracy": accuracy, **known})


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of weight times value over ``terms`` ((weight, reward), ...); unscored where any term is. Parts: those of all terms, unweighted."""

    terms: tuple[tuple[float, Reward], ...]

    def __post_init__(self) -> None:
        for term in self.terms:
            if not (isinstance(term, tuple) and len(term) == 2 and math.isfinite(term[0]) and isinstance(term[1], Reward) and not isinstance(term[1], type)):
                raise TypeError(f"a term must be (finite weight, reward object; as_reward makes one from a function), got {term!r}")
        if not self.terms:
            raise ValueError("expected at least one term, got none")
        if len(set(self.parts)) < len(self.parts):
            raise ValueError(f"the terms' parts must have different names, got {self.parts}")

    def check(self, task: Task) -> None:
        for _, reward in self.terms:
            check_task(reward, task)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(name for _, reward in self.terms for name in reward.parts)

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        scores = [(weight, reward(task, episode)) for weight, reward in self.terms]
        parts = {name: value for _, score in scores for name, value in score.parts.items()}
        total = 0.0
        for weight, score in scores:
            if score.value is None:
                return Score(None, parts)
            total += weight * score.value
        return Score(total, parts)


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function ``(task, episode) -> float | None`` as a reward; its name is the part's name, None is unscored. See :func:`as_reward`."""

    function: Callable[[Task, Episode], float | None]

    @property
    def parts(self) -> tuple[str, ...]:
        return (getattr(self.function, "__name__", type(self.function).__name__),)

    def __call__(self, task: Task, episode: Episode, /) -> Score:
        value = self.function(task, episode)
        if value is None:
            return Score(None)
        if not isinstance(value, Real) or not math.isfinite(value):  # numpy's numbers too
            raise TypeError(f"reward function {self.parts[0]!r} must return a finite number or None, got {value!r}")
        return Score(float(value), {self.parts[0]: float(value)})


def check_task(reward: Reward, task: Task) -> None:
    """Let a reward that has a ``check`` method raise where it could not grade ``task``. Environments call it at ``reset``, before a token is spent."""
    check = getattr(reward, "check", None)
    if check is not None:
        check(task)


def as_reward(reward: Reward | Callable[[Task, Episode], float | None], /) -> Reward:
    """``reward`` itself where it is one, else the plain function as one. Raises ``TypeError`` for anything else, a reward's class included."""
    if isinstance(reward, type) or not callable(reward):
        raise TypeError(f"expected a reward object or a function (task, episode) -> float, got {reward!r}; a class must be called: ExactMatch()")
    return reward if isinstance(reward, Reward) else FunctionReward(reward)
