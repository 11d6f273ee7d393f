"""Running one cell as a notebook does: names persist, the value of a last expression is the result. Guest side, standard library only."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import traceback
from types import CodeType, TracebackType
from typing import Any

from .text import shorten

_PREFIX = "<cell "
_OURS = os.path.dirname(__file__) + os.sep
_KEPT_SOURCES = 200
_MAX_LINES = 400
"""Entries of a traceback that are formatted at all (an ExceptionGroup may have thousands)."""


class Cells:
    """The cells of one session: compiles each under its own file name, so that tracebacks show its source lines."""

    def __init__(self, namespace: dict[str, Any]):
        self.namespace = namespace
        self.count = 0

    def run(self, code: str, limit: int) -> str | None:
        """Run ``code`` in the namespace. Gives the ``repr`` of the last expression, bounded by ``limit``, or None. Whatever the cell raises goes through."""
        self.count += 1
        name = f"{_PREFIX}{self.count}>"
        body, last = _compile(code, name)
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        linecache.cache.pop(f"{_PREFIX}{self.count - _KEPT_SOURCES}>", None)
        exec(body, self.namespace)
        if last is None:
            return None
        value = eval(last, self.namespace)
        return None if value is None else shorten(repr(value), limit)


def _compile(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    """The statements, and the last expression by itself if the cell ends in one."""
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = tree.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), name, "eval")
    return compile(tree, name, "exec"), last


def format_error(error: BaseException, limit: int) -> str:
    """The traceback of ``error`` from the first frame of a cell on, at most ``limit`` characters and a notice. Runs the ``__str__`` of the user's classes."""
    shown = traceback.TracebackException(type(error), error, _from_cell(error.__traceback__), compact=True)
    shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(_OURS)]  # the interrupt is raised in a handler of ours
    return shorten("".join(itertools.islice(shown.format(), _MAX_LINES)).rstrip("\n"), limit)


def _from_cell(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_PREFIX):
        trace = trace.tb_next
    return trace
