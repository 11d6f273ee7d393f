"""The ARPO paper's format: one tag a tool, one call or one answer a turn."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from arpo_env.formats.base import UNCLOSED_THOUGHT, ParsedTurn, ToolCall, boxed, listed, read_json
from arpo_env.tools.base import Tool, ToolResult

_CLOSING = re.compile(r"</([A-Za-z_][\w-]{0,63})>")


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
        pieces = _tag(("think", "answer", *tools)).split(text)  # text, tag, text, ..., tag, text
        outside, unclosed_thought = _outside_thoughts(pieces)
        end = next((i for i, place in enumerate(outside) if pieces[place].startswith("</") and pieces[place] != "</think>"), None)
        if end is None:
            return self._without_end(text, [pieces[place] for place in outside], unclosed_thought, tools)
        closing = outside[end]
        name = pieces[closing][2:-1]
        openings = [place for place in outside[:end] if pieces[place] != "</think>"]
        if [pieces[place] for place in openings] != [f"<{name}>"]:
            found = f"the open tags before it are {listed(pieces[place] for place in openings)}"
            return _failed(f"</{name}> must close one <{name}>, but {found}; {_expected(tools)}")
        opening = openings[0]
        content = "".join(pieces[opening + 1 : closing])
        marked = self._holds_mark(text)
        if closing - opening > 2 or (marked and self._holds_mark(content)):
            return _failed(f"the text between <{name}> and </{name}> must hold no tag of the format, got {content.strip()!r:.80}")
        strict = outside == [opening, closing] and not unclosed_thought and not marked and (not self.needs_thought or pieces[1] == "<think>")
        if name != "answer":
            return _tag_call(tools[name], content, strict)
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
        prefix, suffix = self.result_prefix.strip(), self.result_suffix.strip()
        return (prefix != "" and prefix in text) or (suffix != "" and suffix in text)

    def _without_end(self, text: str, outside: Sequence[str], unclosed_thought: bool, tools: Mapping[str, Tool]) -> ParsedTurn:
        """What a turn without any closing tag of the format says: nothing, or a call of a tool that is not there."""
        if unclosed_thought:
            return _failed(f"{UNCLOSED_THOUGHT}; {_expected(tools)}")
        opened = next((tag for tag in outside if tag != "</think>"), None)
        if opened is not None:
            return _failed(f"{opened} was not closed: expected </{opened[1:]} after it")
        spoken = text.rpartition("</think>")[2]
        closed = next((name for name in _CLOSING.findall(spoken) if f"<{name}>" in spoken), None)
        if closed is not None and not self._holds_mark(f"<{closed}>"):
            hint = f"there is no tool {closed!r}; {_expected(tools)}"
            return ParsedTurn(calls=(ToolCall(closed, {}, hint),), well_formed=False)
        return _failed(f"neither a call nor an answer was found; {_expected(tools)}")


def _failed(*errors: str) -> ParsedTurn:
    return ParsedTurn(errors=errors, well_formed=False)


def _expected(tools: Mapping[str, Tool]) -> str:
    return f"expected {listed([*(f'<{name}>...</{name}>' for name in tools), '<answer>...</answer>'])}"


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
    expected = f"expected a JSON object with the keys {listed(map(str, tool.parameters['required']))} between <{tool.name}> and </{tool.name}>"
    if not content.startswith("{"):
        return _failed(f"{expected}, got {content!r:.80}")
    try:
        arguments = read_json(content)
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
    if "string" in kinds:
        return value
    types = tuple(t for kind, t in _SCALARS if kind in kinds)
    try:
        parsed = read_json(value.lower() if "boolean" in kinds else value)
    except ValueError:
        return value
    return parsed if type(parsed) in types else value


_SCALARS: tuple[tuple[str, type], ...] = (("integer", int), ("number", int), ("number", float), ("boolean", bool))


@functools.lru_cache(maxsize=256)
def _tag(names: tuple[str, ...]) -> re.Pattern[str]:
    """Matches an opening or closing tag of any of ``names``; its one group is all of it, so that ``split`` keeps the tags."""
    return re.compile(f"(</?(?:{'|'.join(map(re.escape, names))})>)")


def _outside_thoughts(pieces: Sequence[str]) -> tuple[list[int], bool]:
    """The places of the tags that stand in no thought, and whether the last thought was left open. A ``</think>`` that closes nothing is kept."""
    outside: list[int] = []
    thinking = False
    for place in range(1, len(pieces), 2):
        if thinking:
            thinking = pieces[place] != "</think>"
        elif pieces[place] == "<think>":
            thinking = True
        else:
            outside.append(place)
    return outside, thinking
