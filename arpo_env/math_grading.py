r"""Mathematical equality of two short answers: a text comparison first, then math-verify in worker processes that can be killed.

Why processes: sympy never returns on some answers (towers of powers, nested factorials), and math-verify's own deadline is a SIGALRM, which works on
the main thread only. Here its deadlines are off; a worker that is late is killed, the pair is ungradable (None), and the next pair gets a new worker.
A worker is this file run as a script: it imports the standard library and math-verify alone, and needs no ``if __name__ == "__main__"`` in the
user's program. It ends when its standard input closes, and ends itself by an alarm should the parent be gone.

Departures from plain math-verify 0.9, each because it gives a wrong verdict there:

1. both sides are read as one LaTeX formula, never searched for a number (``3*x-1*y+13=0`` against ``3x+4y+14=0`` is True by search);
2. numbers that differ by more than 1 in 10,000 are different however small they are (1/2004! and 1/2006! both round to 0.000000);
3. words are compared as words (``\text{Evelyn}`` is no product of six symbols); prose around a number is ungradable, not searched;
4. a percentage equals its value and the number before the sign: ``10\%`` is 0.1, 1/10 and 10, since answers often leave the unit out.
   Other units may be left out too; two different ones (5 m, 5 km) are ungradable.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any, Final


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
    except (_Late, _Dead):
        return None
    return None if equal and _other_unit(left, right) else equal


@functools.lru_cache(maxsize=1 << 16)
def _remembered(prediction: str, truth: str) -> bool | None:
    """The default pool's verdict. Raises :class:`_Late` or :class:`_Dead`, which are not remembered: they say nothing about the pair."""
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
    from arpo_env.formats import boxed  # here, since a worker runs this file without the package

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


class _Late(Exception):
    """The worker did not answer in time."""


class _Dead(Exception):
    """The worker's process has ended."""


class _Worker:
    """One process and its two pipes. Used by one thread at a time."""

    def __init__(self, start_deadline: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        try:
            self._read(start_deadline)
        except (_Late, _Dead) as error:
            self.kill()
            raise RuntimeError(f"the mathematics grader did not start within {start_deadline} s; see what `{sys.executable} -P {__file__}` prints") from error

    def ask(self, prediction: str, truth: str, deadline: float) -> bool | None:
        """The verdict. Raises :class:`_Late` or :class:`_Dead`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([prediction, truth, deadline]).encode() + b"\n")
        except OSError as error:
            raise _Dead from error
        verdict = json.loads(self._read(deadline))
        return None if verdict is None else bool(verdict)

    def _read(self, deadline: float) -> bytes:
        """One line of the worker's, without its end."""
        assert self.process.stdout is not None
        end, line, poll = time.monotonic() + deadline, b"", select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise _Late
            piece = os.read(self.process.stdout.fileno(), 4096)
            if not piece:
                raise _Dead
            line += piece
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class GraderPool:
    """At most ``size`` workers, started when first needed; ``deadline`` is the seconds that one pair may take."""

    def __init__(self, *, size: int = min(4, os.cpu_count() or 1), deadline: float = 5.0, start_deadline: float = 120.0) -> None:
        if size < 1 or not deadline > 0:
            raise ValueError(f"size must be at least 1 and deadline positive, got {size} and {deadline}")
        self.deadline = deadline
        self._start_deadline = start_deadline
        self._slots = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._counts: Counter[str] = Counter()
        self._pid = os.getpid()

    def verdict(self, prediction: str, truth: str) -> bool | None:
        """math-verify's verdict on two LaTeX formulas; None where one is unreadable, or the pair ran out of time or memory."""
        try:
            return self.grade(prediction, truth)
        except (_Late, _Dead):
            return None

    def grade(self, prediction: str, truth: str) -> bool | None:
        """As :meth:`verdict`, but raises :class:`_Late` where the pair ran out of time and :class:`_Dead` where its worker died."""
        with self._slots:
            worker = self._take()
            try:
                verdict = worker.ask(prediction, truth, self.deadline)
            except BaseException as error:
                self._drop(worker)
                if isinstance(error, _Late | _Dead):
                    self.count("timeouts" if isinstance(error, _Late) else "died")
                raise
            with self._lock:
                self._idle.append(worker)
        self.count("unreadable" if verdict is None else "graded")
        return verdict

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Pairs so far: ``graded``, and the ungradable ones ``unreadable``, ``refused`` (hostile or prose), ``timeouts``, ``died``."""
        with self._lock:
            return {what: self._counts[what] for what in ("graded", "unreadable", "refused", "timeouts", "died")}

    def close(self) -> None:
        """Kill all workers. Idempotent; a later pair starts new ones. Does nothing in a forked child, whose parent owns them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            workers = list(self._all)
            self._all.clear()
            self._idle.clear()
        for worker in workers:
            worker.kill()

    def _take(self) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.process.poll() is None:
            return worker
        if worker is not None:
            self._drop(worker)
        worker = _Worker(self._start_deadline)
        with self._lock:
            self._all.add(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()


_POOLS: dict[int, GraderPool] = {}


def default_pool() -> GraderPool:
    """The pool of this process. A forked child gets its own: the parent's pipes are not its to use."""
    pool = _POOLS.get(os.getpid())
    if pool is None:
        pool = _POOLS.setdefault(os.getpid(), GraderPool())
        atexit.register(pool.close)
    return pool


# --- what a worker runs -----------------------------------------------------------------------------------------------------------------------------


def _compare(prediction: str, truth: str) -> bool | None:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig()]
    unlimited: Any = None  # math-verify's annotation forgets that None is allowed
    gold, guess = (parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=unlimited) for text in (truth, prediction))
    if not gold or not guess:
        return None
    equal = verify(gold, guess, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)
    return bool(equal) and ("%" in prediction + truth or not _far_apart(gold[0], guess[0]))


def _far_apart(a: Any, b: Any) -> bool:
    """Two numbers that differ by more than 1 in 10,000: math-verify rounds to six decimals, which makes all tiny numbers equal."""
    from sympy import Expr

    if not all(isinstance(x, Expr) and x.is_number and x.is_finite for x in (a, b)):
        return False
    x, y = a.evalf(30), b.evalf(30)
    return bool(abs(x - y) > 1e-4 * max(abs(x), abs(y)))


def _serve() -> None:
    """Answer pairs until standard input closes. Whatever a library prints goes nowhere."""
    import logging
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _compare("1", "1")  # imports, and builds the parser's tables
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        prediction, truth, deadline = json.loads(line)
        signal.alarm(int(deadline) + 10)
        try:
            verdict = _compare(prediction, truth)
        except MemoryError:
            os._exit(1)
        except Exception:  # any fault of the libraries' on this pair: the pair is unreadable
            verdict = None
        signal.alarm(0)
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    _serve()
