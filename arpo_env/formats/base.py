"""What the call formats share: their protocol, what a parsed turn holds, tags, boxes, and JSON that a policy wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from arpo_env.tools.base import Tool, ToolResult


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy asked for. Neither is ``name`` known to be a tool's, nor are ``arguments`` checked against its schema."""

    name: str
    arguments: Mapping[str, Any]
    hint: str = ""
    """Where no tool has the name: what the format would have the model told. Empty: the environment's own words."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What one turn of the policy says. At least one of ``calls``, ``answer`` and ``errors`` is present."""

    calls: tuple[ToolCall, ...] = ()
    """Calls in the order in which they were written."""
    answer: str | None = None
    """The final answer; never beside calls."""
    errors: tuple[str, ...] = ()
    """What was wrong and what was expected, in words for the model."""
    well_formed: bool = True
    """The turn keeps every rule of the format. Judged on the policy's own text."""


class CallFormat(Protocol):
    """How calls, answers and results are written."""

    @property
    def role(self) -> str:
        """How observations enter the context: ``"inline"`` (raw text that continues the assistant's) or ``"tool"`` / ``"user"`` (a chat message)."""
        ...

    def stop_strings(self, tools: Sequence[Tool], /) -> tuple[str, ...]:
        """Where sampling of a turn ends, the string included; empty where the turn ends at the end-of-turn token alone."""
        ...

    def parse(self, text: str, tools: Mapping[str, Tool], /) -> ParsedTurn:
        """What the turn ``text`` says, given the tools by name. Total: never raises."""
        ...

    def system_prompt(self, tools: Sequence[Tool], /) -> str:
        """Instructions for the model: how to think, call each tool and answer."""
        ...

    def render_results(self, results: Sequence[tuple[str, ToolResult]], /) -> str:
        """The observation text of one turn's results, given as (tool name, result) in call order."""
        ...

    def render_error(self, message: str, /) -> str:
        """The observation text that tells the model what was wrong."""
        ...


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{..}`` of ``text``, stripped; nested braces are matched, ``\{`` and ``\}`` are not counted."""
    content: str | None = None
    last_start = -1
    open_braces: list[tuple[int, bool]] = []  # (start of the content, opened by \boxed)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != "\\{":
            open_braces.append((match.end(), len(token) > 1))
        elif token == "}" and open_braces:
            start, is_boxed = open_braces.pop()
            if is_boxed and start > last_start:
                content, last_start = text[start : match.start()].strip(), start
    return content


_BRACES = re.compile(r"\\{1,2}boxed\s*\{|\\\\|\\[{}]|[{}]")


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


UNCLOSED_THOUGHT = "<think> was not closed: write </think> before a call or the answer"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json(text: str) -> Any:
    """The JSON value that all of ``text`` is. Raises ``ValueError`` alone, also where the text nests too deeply or escapes half a character."""
    value, end = read_json_prefix(text, 0)
    if rest := text[end:].strip():
        raise ValueError(f"expected nothing after the JSON value, got {rest!r:.40}")
    return value


def after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


_SPACE = re.compile(r"\s*")


def read_json_prefix(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` after white space, and where it ends. Raises ``ValueError`` alone."""
    try:
        value, end = _DECODER.raw_decode(text, after_space(text, start))
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate ("\ud800") could reach no process and no tokenizer
    except RecursionError:
        raise ValueError("the JSON nests too deeply") from None
    return value, end
