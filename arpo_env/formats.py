"""Call formats: the text of one turn -> tool calls, a final answer, or what was wrong; and how results are shown to the policy.

Two formats stand side by side:

* :class:`Tags`, the ARPO paper's: ``<think>..</think>``, one tag a tool (``<search>..</search>``), ``<result>..</result>`` around what the tool gave,
  ``<answer>..</answer>`` around the final answer. A turn ends at the first closing tag, so it holds one call or one answer.
* :class:`Hermes`, the JSON format of Hermes and Qwen models: ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, several in a turn.

Only the text that the policy wrote in this turn is parsed, never the prompt and never a tool's text. Parsing is total: every string gives calls, an
answer, or errors in words for the model; it never raises. Thoughts are not searched for calls or answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol

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


_CLOSING = re.compile(r"</([A-Za-z_][\w-]{0,63})>")
_BRACES = re.compile(r"\\{1,2}boxed\s*\{|\\\\|\\[{}]|[{}]")


class _Tag(NamedTuple):
    name: str
    closing: bool
    start: int
    end: int

    def __str__(self) -> str:
        return f"</{self.name}>" if self.closing else f"<{self.name}>"


def _find_tags(text: str, names: Iterable[str]) -> list[_Tag]:
    pattern = "|".join(re.escape(name) for name in names)
    return [_Tag(m.group(2), bool(m.group(1)), m.start(), m.end()) for m in re.finditer(f"<(/?)({pattern})>", text)]


def _outside_thoughts(tags: Iterable[_Tag]) -> tuple[list[_Tag], bool]:
    """The tags that stand in no thought, and whether the last thought was left open. A ``</think>`` that closes nothing is kept."""
    outside: list[_Tag] = []
    thinking = False
    for tag in tags:
        if thinking:
            thinking = (tag.name, tag.closing) != ("think", True)
        elif (tag.name, tag.closing) == ("think", False):
            thinking = True
        else:
            outside.append(tag)
    return outside, thinking


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


_UNCLOSED_THOUGHT = "<think> was not closed: write </think> before a call or the answer"


@dataclass(frozen=True, slots=True)
class Tags:
    r"""The paper's format. One call or one answer a turn; the answer is the content of ``\boxed{}`` in ``<answer>``, else all text between the tags.

    The text of a call is the tool's main argument; for a tool that requires several arguments it is a JSON object of them.
    ``result_prefix`` and ``result_suffix`` stand around what a tool gave; choose others where the vocabulary is small. The policy must never write them.
    ``needs_thought`` and ``needs_boxed`` make ``well_formed`` as strict as the reward of the paper's published code: a thought in each turn and a
    ``\boxed{}`` in the answer. They change no call and no answer.
    """

    result_prefix: str = "\n<result>\n"
    result_suffix: str = "\n</result>\n"
    needs_thought: bool = False
    needs_boxed: bool = False
    role: ClassVar[Literal["inline"]] = "inline"

    def stop_strings(self, tools: Sequence[Tool], /) -> tuple[str, ...]:
        """The closing tags of the tools and ``</answer>``. Raises ``ValueError`` for a tool that bears the name of one of the format's own tags."""
        reserved = {"think", "answer", *re.findall(r"</?([\w-]+)>", self.result_prefix + self.result_suffix)}
        taken = [tool.name for tool in tools if tool.name in reserved]
        if taken:
            raise ValueError(f"tools must not be named like the tags of the format {sorted(reserved)}, got {taken}")
        return (*(f"</{tool.name}>" for tool in tools), "</answer>")

    def parse(self, text: str, tools: Mapping[str, Tool], /) -> ParsedTurn:
        """What the turn says up to the first closing tag of a tool or of ``<answer>``, outside thoughts. What follows cannot change it."""
        tags = _find_tags(text, dict.fromkeys(["think", "answer", *tools]))
        outside, unclosed_thought = _outside_thoughts(tags)
        end = next((i for i, tag in enumerate(outside) if tag.closing and tag.name != "think"), None)
        if end is None:
            return self._without_end(text, outside, unclosed_thought, tools)
        closing = outside[end]
        openings = [tag for tag in outside[:end] if not tag.closing]
        if [tag.name for tag in openings] != [closing.name]:
            found = f"the open tags before it are {_listed(map(str, openings))}"
            return _failed(f"{closing} must close one <{closing.name}>, but {found}; {_expected(tools)}")
        opening = openings[0]
        content = text[opening.end : closing.start]
        if self._holds_mark(content) or any(opening.end <= tag.start < closing.start for tag in tags):
            return _failed(f"the text between <{closing.name}> and {closing} must hold no tag of the format, got {content.strip()!r:.80}")
        alone = outside == [opening, closing] and not unclosed_thought and not self._holds_mark(text)
        strict = alone and (not self.needs_thought or tags[0].name == "think")
        if closing.name != "answer":
            return _tag_call(tools[closing.name], content, strict)
        in_box = boxed(content)
        answer = content.strip() if in_box is None else in_box
        if not answer:
            return _failed(f"the answer is empty; {_expected(tools)}")
        return ParsedTurn(answer=answer, well_formed=strict and (not self.needs_boxed or in_box is not None))

    def system_prompt(self, tools: Sequence[Tool], /) -> str:
        """Instructions that name each tool's tag, its description and what goes between the tags."""
        self.stop_strings(tools)
        calls = "\n".join(f"- <{tool.name}> {_shown_argument(tool)} </{tool.name}>: {tool.description}" for tool in tools)
        if any(_takes_object(tool) for tool in tools):
            calls += "\nWhere braces are shown, write one JSON object with these keys and values of your own."
        shown = f"{self.result_prefix.strip()} ... {self.result_suffix.strip()}".strip()
        using = (
            f"\nYou may use these tools, one call at a time, by writing their tags:\n{calls}\n"
            f"Stop after a call. What the tool gives is then shown to you as {shown}; never write that part yourself.\n"
        )
        return (
            "Solve the question step by step. Put your reasoning between <think> and </think>."
            + (using if tools else "\n")
            + "When you know the final answer, write it as <answer> \\boxed{final answer} </answer> and stop."
        )

    def render_results(self, results: Sequence[tuple[str, ToolResult]], /) -> str:
        """Each result's text between the affixes, in call order."""
        return "".join(f"{self.result_prefix}{result.text}{self.result_suffix}" for _, result in results)

    def render_error(self, message: str, /) -> str:
        """The message between the affixes."""
        return f"{self.result_prefix}Error: {message}{self.result_suffix}"

    def _holds_mark(self, text: str) -> bool:
        return any(mark in text for mark in (self.result_prefix.strip(), self.result_suffix.strip()) if mark)

    def _without_end(self, text: str, outside: Sequence[_Tag], unclosed_thought: bool, tools: Mapping[str, Tool]) -> ParsedTurn:
        """What a turn without any closing tag of the format says: nothing, or a call of a tool that is not there."""
        if unclosed_thought:
            return _failed(f"{_UNCLOSED_THOUGHT}; {_expected(tools)}")
        opened = next((tag.name for tag in outside if not tag.closing), None)
        if opened is not None:
            return _failed(f"<{opened}> was not closed: expected </{opened}> after it")
        spoken = text.rpartition("</think>")[2]
        closed = next((name for name in _CLOSING.findall(spoken) if f"<{name}>" in spoken), None)
        if closed is not None and not self._holds_mark(f"<{closed}>"):
            hint = f"there is no tool {closed!r}; {_expected(tools)}"
            return ParsedTurn(calls=(ToolCall(closed, {}, hint),), well_formed=False)
        return _failed(f"neither a call nor an answer was found; {_expected(tools)}")


def _failed(*errors: str) -> ParsedTurn:
    return ParsedTurn(errors=errors, well_formed=False)


def _expected(tools: Mapping[str, Tool]) -> str:
    return f"expected {_listed([*(f'<{name}>...</{name}>' for name in tools), '<answer>...</answer>'])}"


def _takes_object(tool: Tool) -> bool:
    """Whether a call needs more arguments than the text between two tags could be."""
    return len(tool.parameters.get("required", ())) > 1


def _shown_argument(tool: Tool) -> str:
    """What stands between the tags of a call, for the model: ``query``, or ``{"table": ..., "key": ...}``."""
    if not _takes_object(tool):
        return tool.main_argument or ""
    return "{" + ", ".join(f'"{name}": ...' for name in tool.parameters["properties"]) + "}"


def _object_call(tool: Tool, content: str, strict: bool) -> ParsedTurn:
    """The call whose arguments are the JSON object ``content``."""
    expected = f"expected a JSON object with the keys {_listed(map(str, tool.parameters['required']))} between <{tool.name}> and </{tool.name}>"
    if not content.startswith("{"):
        return _failed(f"{expected}, got {content!r:.80}")
    try:
        arguments = _read_json(content)
    except ValueError as error:
        return _failed(f"{expected}, got {content!r:.80}: {error}")
    return ParsedTurn(calls=(ToolCall(tool.name, arguments),), well_formed=strict)


def _tag_call(tool: Tool, content: str, strict: bool) -> ParsedTurn:
    """The call whose main argument is ``content``; where the tool requires several, ``content`` holds them as a JSON object."""
    name, value = tool.main_argument, content.strip()
    if _takes_object(tool):
        return _object_call(tool, value, strict)
    if name is None:
        if value:
            return _failed(f"{tool.name} takes no argument: expected <{tool.name}></{tool.name}>, got {value!r:.80}")
        return ParsedTurn(calls=(ToolCall(tool.name, {}),), well_formed=strict)
    if value:
        return ParsedTurn(calls=(ToolCall(tool.name, {name: _typed(value, tool, name)}),), well_formed=strict)
    if name in tool.parameters.get("required", ()):
        return _failed(f"the call is empty: expected the {name} between <{tool.name}> and </{tool.name}>")
    return ParsedTurn(calls=(ToolCall(tool.name, {}),), well_formed=strict)


def _typed(value: str, tool: Tool, name: str) -> Any:
    """``value`` as the JSON type that the schema gives ``name``, where it reads as one; else unchanged, for ``check_arguments`` to judge."""
    schema = tool.parameters.get("properties", {}).get(name, {})
    kinds = [option.get("type") for option in schema.get("anyOf", [schema])]
    types = tuple(t for kind, t in _SCALARS if kind in kinds)
    if not types or "string" in kinds:
        return value
    try:
        parsed = _read_json(value.lower() if "boolean" in kinds else value)
    except ValueError:
        return value
    return parsed if type(parsed) in types else value


_SCALARS: tuple[tuple[str, type], ...] = (("integer", int), ("number", int), ("number", float), ("boolean", bool))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_json(text: str) -> Any:
    """The JSON value that all of ``text`` is. Raises ``ValueError`` alone, also where the text nests too deeply or escapes half a character."""
    value, end = _read_json_prefix(text, 0)
    if rest := text[end:].strip():
        raise ValueError(f"expected nothing after the JSON value, got {rest!r:.40}")
    return value


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


_SPACE = re.compile(r"\s*")


def _read_json_prefix(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` after white space, and where it ends. Raises ``ValueError`` alone."""
    try:
        value, end = _DECODER.raw_decode(text, _after_space(text, start))
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate ("\ud800") could reach no process and no tokenizer
    except RecursionError:
        raise ValueError("the JSON nests too deeply") from None
    return value, end


@dataclass(frozen=True, slots=True)
class Hermes:
    r"""JSON calls in ``<tool_call>`` tags, several in a turn; results are messages of the role ``tool``. A turn ends at the end-of-turn token.

    The final answer is what stands in ``<answer>`` (the content of ``\boxed{}`` where there is one), else, in a turn without a call, the content of
    ``\boxed{}``, else the text after the thought. Where a chat template opens the thought in the prompt, the turn begins inside it: text up to a
    leading ``</think>`` is thought.
    """

    role: ClassVar[Literal["tool"]] = "tool"

    def stop_strings(self, tools: Sequence[Tool], /) -> tuple[str, ...]:
        """None: calls may follow one another."""
        return ()

    def parse(self, text: str, tools: Mapping[str, Tool], /) -> ParsedTurn:
        """All good calls in order, with an error for each bad one; or the answer. Calls win over an answer."""
        reader = _HermesReader(text, tools)
        reader.read()
        errors, answers = reader.errors, reader.answers
        if reader.called and answers:
            errors.append("an answer beside a tool call is ignored: give the final answer in a turn of its own, after the results")
        if not reader.called and not answers and not errors:
            rest = "".join(reader.plain)
            answers.append(boxed(rest) or rest.strip())
        answer = answers[-1] if answers and not reader.called else None
        if answer == "":
            errors.append(f"the turn holds neither a call nor an answer; available tools: {_listed(tools)}")
            answer = None
        well_formed = not errors and not reader.violated and len(answers) <= 1
        return ParsedTurn(tuple(reader.calls), answer, tuple(errors), well_formed)

    def system_prompt(self, tools: Sequence[Tool], /) -> str:
        """Instructions that list the tools' JSON schemas, one a line, in ``<tools>``."""
        schemas = "\n".join(json.dumps(tool.schema(), ensure_ascii=False) for tool in tools)
        using = (
            f"\nYou may call these functions; their signatures are between <tools> and </tools>:\n<tools>\n{schemas}\n</tools>\n"
            "Write each call as a JSON object with the function's name and its arguments:\n"
            '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>\n'
            "You may write several calls in a turn; then end the turn and wait for the results.\n"
        )
        return (
            "Solve the question step by step. Put your reasoning between <think> and </think>."
            + (using if tools else "\n")
            + "When you know the final answer, call nothing and write <answer>\\boxed{final answer}</answer>."
        )

    def render_results(self, results: Sequence[tuple[str, ToolResult]], /) -> str:
        """The text of the result; several are numbered and named, in call order."""
        if len(results) == 1:
            return results[0][1].text
        return "\n\n".join(f"[{i}] {name}\n{result.text}" for i, (name, result) in enumerate(results, 1))

    def render_error(self, message: str, /) -> str:
        """The message, marked as an error."""
        return f"Error: {message}"


_HERMES_TAG = re.compile(r"<(/?)(think|tool_call|answer)>")


class _HermesReader:
    """Reads a turn from left to right and collects what it finds. A call's JSON is read as JSON, so that tags inside its strings are just text."""

    def __init__(self, text: str, tools: Mapping[str, Tool]) -> None:
        self.text, self.tools = text, tools
        self.calls: list[ToolCall] = []
        self.answers: list[str] = []
        self.errors: list[str] = []
        self.plain: list[str] = []
        """The text outside thoughts and blocks."""
        self.called = False
        """A call was tried, good or bad."""
        self.violated = "<tool_response>" in text or "</tool_response>" in text

    def read(self) -> None:
        first = next((tag for tag in _find_tags(self.text, ["think"])), None)
        position = first.end if first is not None and first.closing else 0
        while match := _HERMES_TAG.search(self.text, position):
            self.plain.append(self.text[position : match.start()])
            closing, name = bool(match.group(1)), match.group(2)
            if closing:
                self._stray(match.group())
                position = match.end()
            else:
                position = {"think": self._thought, "tool_call": self._call, "answer": self._answer}[name](match.end())
        self.plain.append(self.text[position:])

    def _stray(self, tag: str) -> None:
        """A closing tag that closes nothing. After ``</think>`` the text begins anew; the others are errors."""
        self.violated = True
        if tag == "</think>":
            self.plain.clear()
            return
        self.called = self.called or tag == "</tool_call>"
        self.errors.append(f"{tag} closes nothing: expected {tag.replace('/', '')} before it")

    def _close(self, name: str, start: int) -> tuple[str | None, int]:
        """The text up to the closing tag and where to read on; (None, end of the turn) where there is none."""
        end = self.text.find(f"</{name}>", start)
        return (None, len(self.text)) if end < 0 else (self.text[start:end], end + len(name) + 3)

    def _thought(self, start: int) -> int:
        thought, position = self._close("think", start)
        if thought is None:
            self.errors.append(_UNCLOSED_THOUGHT)
        return position

    def _answer(self, start: int) -> int:
        content, position = self._close("answer", start)
        if content is None:
            self.errors.append("<answer> was not closed: expected </answer> after it")
        else:
            in_box = boxed(content)
            self.answers.append(content.strip() if in_box is None else in_box)
        return position

    def _call(self, start: int) -> int:
        self.called = True
        content, position = self._close("tool_call", start)
        if content is None:
            self.errors.append("<tool_call> was not closed: expected </tool_call> after the JSON object")
            return position
        try:
            value, end = _read_json_prefix(self.text, start)
            end = _after_space(self.text, end)
            if not self.text.startswith("</tool_call>", end):
                raise ValueError(f"expected </tool_call> after the JSON object, got {self.text[end : end + 40]!r}")
            position = end + len("</tool_call>")
            call = _json_call(value, self.tools)
            self.calls.append(call)
            self.violated = self.violated or call.name not in self.tools
        except ValueError as error:
            self.errors.append(f"bad tool call {content.strip()!r:.80}: {error}; available tools: {_listed(self.tools)}")
        return position


def _json_call(value: Any, tools: Mapping[str, Tool]) -> ToolCall:
    """The call that a JSON value describes. ``parameters`` is read as ``arguments``; arguments given as a JSON string are decoded.

    The name need not be a tool's, but is one line of 1 to 64 characters, as it is shown and counted.
    """
    if not isinstance(value, dict):
        raise ValueError(f'expected a JSON object {{"name": ..., "arguments": {{...}}}}, got {type(value).__name__}')
    name = value.get("name")
    if not isinstance(name, str):
        raise ValueError(f'expected "name" to be the name of a tool, got {name!r:.40}')
    if name not in tools and not (name.strip() and name.isprintable() and len(name) <= 64):
        raise ValueError(f"unknown tool {name!r:.60}")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _read_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f'expected "arguments" to be a JSON object, got {type(arguments).__name__}')
    return ToolCall(name, arguments)
