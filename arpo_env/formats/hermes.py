"""The JSON format of Hermes and Qwen models: several calls a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from arpo_env.formats.base import UNCLOSED_THOUGHT, ParsedTurn, ToolCall, after_space, boxed, listed, read_json, read_json_prefix
from arpo_env.tools.base import Tool, ToolResult


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
            errors.append(f"the turn holds neither a call nor an answer; available tools: {listed(tools)}")
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
_THINK = re.compile(r"</?think>")


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
        first = _THINK.search(self.text)
        position = first.end() if first is not None and first.group() == "</think>" else 0
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
            self.errors.append(UNCLOSED_THOUGHT)
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
            value, end = read_json_prefix(self.text, start)
            end = after_space(self.text, end)
            if not self.text.startswith("</tool_call>", end):
                raise ValueError(f"expected </tool_call> after the JSON object, got {self.text[end : end + 40]!r}")
            position = end + len("</tool_call>")
            call = _json_call(value, self.tools)
            self.calls.append(call)
            self.violated = self.violated or call.name not in self.tools
        except ValueError as error:
            self.errors.append(f"bad tool call {content.strip()!r:.80}: {error}; available tools: {listed(self.tools)}")
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
        arguments = read_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f'expected "arguments" to be a JSON object, got {type(arguments).__name__}')
    return ToolCall(name, arguments)
