r"""Mathematical equality of two short answers: a text comparison first, then math-verify in worker processes that can be killed.

Why processes: sympy never returns on some answers (towers of powers, nested factorials), and math-verify's own deadline is a SIGALRM, which works on
the main thread only. Here its deadlines are off; a worker that is late is killed, the pair is ungradable (None), and the next pair gets a new worker.
What a worker runs is ``math_worker.py``; the user's program needs no ``if __name__ == "__main__"`` for it.

Departures from plain math-verify 0.9, each because it gives a wrong verdict there:

1. both sides are read as one LaTeX formula, never searched for a number (``3*x-1*y+13=0`` against ``3x+4y+14=0`` is True by search);
2. numbers that differ by more than 1 in 10,000 are different however small they are (1/2004! and 1/2006! both round to 0.000000);
3. words are compared as words (``\text{Evelyn}`` is no product of six symbols); prose around a number is ungradable, not searched;
4. a percentage equals its value and the number before the sign: ``10\%`` is 0.1, 1/10 and 10, since answers often leave the unit out.
   Other units may be left out too; two different ones (5 m, 5 km) are ungradable.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Final

from arpo_env._workers import WorkerDied, WorkerLate, WorkerPool
from arpo_env.formats import boxed


def require_math_verify() -> None:
    """Raise ``ImportError`` with the command that installs the grader, where it is absent."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("grading mathematics needs math-verify: pip install 'arpo[math]'")


def math_equal(prediction: str, truth: str) -> bool | None:
    r"""Whether the two answers are equal; None where that cannot be told: no truth, hostile or unreadable text, or out of time.

    Both may be LaTeX or plain (``\frac{1}{2}``, ``1/2``, ``0.5``), in ``\boxed{}`` or ``$`` or bare. An empty prediction is wrong. Works on any thread.
    Verdicts are remembered, but not that time ran out or a worker died: the same pair may be graded the next time. Raises ``ImportError`` where
    math-verify is needed and absent.
    """
    left, right = clean(prediction), clean(truth)
    if not right:
        return None
    if left and _key(left) == _key(right):
        return True
    if not left or _is_words(left) or _is_words(right):
        return False
    if any(hostile(side) or _is_prose(side) for side in (left, right)):
        default_pool().count("refused")
        return None
    try:
        equal = _remembered(left, right)
    except (WorkerLate, WorkerDied):
        return None
    return None if equal and _other_unit(left, right) else equal


@functools.lru_cache(maxsize=1 << 16)
def _remembered(prediction: str, truth: str) -> bool | None:
    """The default pool's verdict. Raises :class:`WorkerLate` or :class:`WorkerDied`, which are not remembered: they say nothing about the pair."""
    require_math_verify()
    return default_pool().grade(prediction, truth)


# --- the text in front of the grader ----------------------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge "}
)
_REWRITES: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)(?:\$|\\[()\[\]])", " "),  # $..$, \(..\), \[..\]
        (r"\\(?:left|right)(?![A-Za-z])|\\(?:displaystyle|limits)(?![A-Za-z])", ""),
        (r"(?<=\d)\\[,!](?=\d)", ""),  # 10\,000
        (r"\\[,!;:]|\\ |~|\\q?quad(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:mathrm|text|mathit|operatorname)\s*\{\s*([A-Za-z])\s*\}", r"\1"),  # \mathrm{e}: math-verify reads only what stands before it
        (r"^\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}$", r"\1"),
        (r"^\(([A-Z])\)$", r"\1"),  # the choice (A)
        (r"(?<!\\)%", r"\\%"),  # bare, it begins a LaTeX comment
        (r"\*\*", "^"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])oo(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\d.A-Za-z])", r"\1 \\times 10^{\2}"),
        (r"\s+", " "),
        (r"(?<![\d.])(\d+) (\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),  # a mixed number
    )
)


def clean(text: str) -> str:
    r"""``text`` as one LaTeX formula without decoration: ``$``, ``\boxed``, sizes, spacing, the final full stop."""
    in_box = boxed(text)
    text = (text if in_box is None else in_box).translate(_CHARACTERS).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text).strip()
    return text.rstrip(" .,;")


def _key(text: str) -> str:
    """What equal texts have in common: no white space but between digits; words in lower case."""
    return " ".join(text.casefold().split()) if _is_words(text) or (len(text) > 1 and text.isalpha()) else _SPACE.sub("", text)


_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sinh|cosh|tanh|arcsin|arccos|arctan|frac|infty)(?![a-z]))[^\W\d_]{4,}")
_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")


def _is_words(text: str) -> bool:
    """Letters and the marks of prose alone, with one word of four letters or more: ``Evelyn``, ``no solution``."""
    return _WORD.search(text) is not None and not re.search(r"[^\w\s,.'’-]|[\d_]", text)


def _is_prose(text: str) -> bool:
    """A formula with words beside it, which math-verify would read as products of letters."""
    return _WORD.search(_COMMAND.sub(" ", text)) is not None


def _other_unit(left: str, right: str) -> bool:
    units = [match.group(1) for side in (left, right) if (match := _UNIT.search(_TEXT.sub(r"\1", side)))]
    return len(units) == 2 and units[0] != units[1]


_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"^[-+]?[\d.,/]+\s*([A-Za-z]+)$")
_HOSTILE = re.compile(
    r"\\(?:i{0,3}int|oint|sum|prod|lim|limsup|liminf|bigcup|bigcap)(?![A-Za-z])"
    r"|\^\s*-?(?:\d+|[A-Za-z])\s*\^|\^\s*\{[^{}]*\^|\^\s*\{[^{}]*\}\s*\^"  # towers of powers
    r"|\^\s*\{?\s*-?\d{5}|\d{5}\s*!|!\s*!|!\s*\)\s*!|!\s*\}?\s*\^|\^\s*\{?\d*!"
    r"|\d{300}"
)


def hostile(text: str) -> bool:
    """Whether sympy might not end on ``text``: too long, too deep, too many parts, towers, huge factorials, sums and integrals. Errs on the safe side."""
    if len(text) > 500 or text.count(",") > 60 or _HOSTILE.search(text):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest > 12


# --- the workers ------------------------------------------------------------------------------------------------------------------------------------


class GraderPool:
    """At most ``size`` workers, started when first needed; ``deadline`` is the seconds that one pair may take."""

    def __init__(self, *, size: int = min(4, os.cpu_count() or 1), deadline: float = 5.0, start_deadline: float = 120.0) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline must be positive, got {deadline}")
        self.deadline = deadline
        self.workers = WorkerPool([sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))], size=size, start_deadline=start_deadline)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def grade(self, prediction: str, truth: str) -> bool | None:
        """math-verify's verdict on two LaTeX formulas; None where one is unreadable.

        Raises :class:`WorkerLate` where the pair ran out of time, :class:`WorkerDied` where its worker died, as one that runs out of memory does.
        """
        try:
            verdict = self.workers.ask({"pair": [prediction, truth]}, self.deadline)
        except (WorkerLate, WorkerDied) as error:
            self.count("timeouts" if isinstance(error, WorkerLate) else "died")
            raise
        self.count("unreadable" if verdict is None else "graded")
        return None if verdict is None else bool(verdict)

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Pairs so far: ``graded``, and the ungradable ones ``unreadable``, ``refused`` (hostile or prose), ``timeouts``, ``died``."""
        with self._lock:
            return {what: self._counts[what] for what in ("graded", "unreadable", "refused", "timeouts", "died")}

    def close(self) -> None:
        """Kill all workers. Idempotent; a later pair starts new ones."""
        self.workers.close()


@functools.cache
def default_pool() -> GraderPool:
    """The pool of this process. In a forked child it starts workers of its own: the parent's pipes are not its to use."""
    return GraderPool()
