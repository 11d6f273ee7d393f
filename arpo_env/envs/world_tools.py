"""The tools of the little world: a search over the task's own people, and a calculator."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

from arpo_env.envs.world_text import TEXTS, normalize
from arpo_env.task import Task
from arpo_env.tools.base import Tool, ToolResult


class WorldSearch(Tool):
    """Looks people up in the world of the episode's task. A last name lists its people; a full name gives the person's card, also with what the list says of
    them in front ("baker mia smith"). Anything else finds nothing.
    """

    name = "search"
    description = "Looks people up. A last name gives the list of people of that name; a full name gives what is known about that person."
    parameters: Mapping[str, Any] = MappingProxyType(
        {"type": "object", "properties": {"query": {"type": "string", "description": "a last name or a full name"}}, "required": ["query"]}
    )
    timeout = None

    def __init__(self) -> None:
        self._world: Mapping[str, Any] | None = None

    def bind(self) -> Self:
        return type(self)()

    def start_episode(self, task: Task) -> None:
        """Answer from ``task`` from now on. Its world never changes, so forks share this instance."""
        missing = {"style", "cards", "lists"} - set(task.metadata)
        if missing:
            raise ValueError(f"WorldSearch needs a task of WorldTasks; metadata of task {task.id!r} lacks {sorted(missing)}")
        self._world = task.metadata

    def call(self, query: str) -> str:  # type: ignore[override]
        if self._world is None:
            raise RuntimeError("WorldSearch was called before start_episode(task)")
        cards, lists, text = self._world["cards"], self._world["lists"], TEXTS[self._world["style"]]
        words = normalize(query).split()
        name, before = " ".join(words[-2:]), "".join(words[:-2])
        if name in lists:
            return text.people(name, lists[name]["shows"], {person: cards[person] for person in lists[name]["people"]})
        if name in cards and before in ("", "".join(str(cards[name][a]) for a in lists[words[-1]]["shows"])):
            return text.card(name, cards[name]["facts"], cards[name])
        return text.nothing


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
)
MAX_EXPRESSION = 200


class WorldCalculator(Tool):
    """Integer arithmetic with + - * // and parentheses under the name ``python``: what the world's questions need, without an interpreter process.

    Digits may stand apart ("3 4 + 7" is 34 + 7); with ``spaced`` the result's do too.
    """

    name = "python"
    description = "Evaluates an expression over integers, such as 34 + 7."
    parameters: Mapping[str, Any] = MappingProxyType(
        {"type": "object", "properties": {"code": {"type": "string", "description": "an expression over integers with + - * //"}}, "required": ["code"]}
    )
    timeout = None

    def __init__(self, *, spaced: bool = False) -> None:
        self.spaced = spaced

    def call(self, code: str) -> ToolResult:  # type: ignore[override]
        try:
            value = str(evaluate(code))
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            return ToolResult.failure("exception", f"{type(error).__name__}: {error}")
        return ToolResult(" ".join(value) if self.spaced else value)


def evaluate(code: str) -> int:
    """The integer that ``code`` comes to; ``print(...)`` around it is allowed. Raises SyntaxError, ValueError or ZeroDivisionError."""
    if len(code) > MAX_EXPRESSION:  # bounds the depth of the syntax tree and the size of the numbers
        raise ValueError(f"expected at most {MAX_EXPRESSION} characters, got {len(code)}")
    node = ast.parse(re.sub(r"(?<=\d)\s+(?=\d)", "", code.strip()), mode="eval").body
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and len(node.args) == 1:
        node = node.args[0]
    return _evaluate(node)


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(f"expected integers with + - * //, got {type(node).__name__}")
