"""Messages and observations -> token ids that are appended to a context and never rewritten.

The context of turn n + 1 is the context of turn n, plus the ids that the policy sampled, plus the ids that a codec gives for the observation. Nothing
sampled is decoded and encoded again, and no earlier turn is rendered anew. Where the chat template would rewrite earlier turns (some drop old
``<think>`` blocks), the context stays append-only and a warning says so once.

Text from outside (questions, tool results) is plain text: if it spells a special token, it is encoded in ordinary tokens.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from arpo_algo.tokenizing import decode, encode

Message = Mapping[str, Any]


class Codec(Protocol):
    """Turns text into ids for one tokenizer. ``role`` and ``messages`` are those of ``info`` (see ``arpo_env.core``)."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The context before the first turn."""
        ...

    def observation(self, text: str, messages: Sequence[Message], role: str, *, closed: bool) -> list[int]:
        """What follows a turn. ``closed``: the policy ended its turn with an end token, so a new turn has to be opened."""
        ...

    def encode(self, text: str, *, plain: bool) -> list[int]:
        """Ids of a text alone, nothing added. ``plain``: special tokens spelled in it are text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, for the environment to read."""
        ...


class _Tokens:
    """What both codecs need of a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.specials = sorted({t for t in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if t}, key=lambda t: (-len(t), t))
        controls = [str(added) for added in tokenizer.added_tokens_decoder.values() if added.special]
        self._control_ids = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i != tokenizer.unk_token_id}
        self._inside_controls = re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in controls if len(t) > 1) or "(?!)", re.I)

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(self.tokenizer, token_ids)

    def encode(self, text: str, *, plain: bool) -> list[int]:
        """Ids without BOS or EOS; ``plain``: special tokens spelled in ``text`` are text."""
        ids = encode(self.tokenizer, text, plain=plain)
        if not plain or self._control_ids.isdisjoint(ids):
            return ids
        # Word-level and unigram vocabularies hold special tokens as words of their own, which splitting leaves whole: cut in two, none is one.
        parts = self._inside_controls.split(text)
        return [i for part in parts for i in encode(self.tokenizer, part, plain=True) if i not in self._control_ids]


class PlainCodec(_Tokens):
    """For models without a chat template: message texts joined by ``separator``, observations appended as they are.

    The prompt begins with whatever the tokenizer puts before a text (BOS for Llama); nothing else is added anywhere.
    """

    def __init__(self, tokenizer: Any, *, separator: str = "\n"):
        super().__init__(tokenizer)
        self.separator = separator

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(message["content"] + self.separator for message in messages)
        return [*self._before_a_text(), *self.encode(text, plain=True)]

    def observation(self, text: str, messages: Sequence[Message], role: str, *, closed: bool) -> list[int]:
        return self.encode(text if role == "inline" else self.separator + text + self.separator, plain=True)

    def _before_a_text(self) -> list[int]:
        whole, bare = [int(i) for i in self.tokenizer.encode("a")], self.encode("a", plain=True)
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]  # what comes after it (EOS) is left out
        return whole[: starts[0]] if starts else []


_MARK = "\u2063{}\u2063"  # invisible separators: survive templates, occur in no text that anybody writes
_QUESTION: Message = {"role": "user", "content": "?"}


class ChatCodec(_Tokens):
    """For chat models: prompts and observations as the tokenizer's chat template writes them.

    Inline observations continue the assistant's open turn as raw text. If the policy closed its turn, they come as a user message, as a chat model
    expects. Tool and user observations are all messages of the turn rendered together, with the header of the next assistant turn. Where the template
    knows no system role, its text goes into the first user message; where it knows no tool role, results come as one user message.

    Raises ``ValueError`` when the tokenizer has no chat template, or one that leaves out what the assistant wrote.
    """

    def __init__(self, tokenizer: Any, *, template: str | None = None):
        super().__init__(tokenizer)
        self.template = template
        if template is None and not tokenizer.chat_template:
            raise ValueError(
                f"{type(tokenizer).__name__} ({tokenizer.name_or_path or 'unnamed'}) has no chat template."
                " Pass codec=PlainCodec(tokenizer) for a base model (on the command line: --codec plain), or ChatCodec(tokenizer, template=...)"
            )
        if not self._shows([_QUESTION, {"role": "assistant", "content": _MARK.format("seen")}, _QUESTION]):
            raise ValueError("the chat template does not show what the assistant wrote; pass ChatCodec(tokenizer, template=...)")
        self._knows_system = self._shows([{"role": "system", "content": _MARK.format("seen")}, _QUESTION])
        self._knows_tool = self._shows([_QUESTION, {"role": "assistant", "content": "!"}, {"role": "tool", "name": "tool", "content": _MARK.format("seen")}])
        self._warn_if_rewritten()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._encode(self._prompt, messages)

    def observation(self, text: str, messages: Sequence[Message], role: str, *, closed: bool) -> list[int]:
        if role == "inline":
            if not closed:
                return self.encode(text, plain=True)
            messages = [{"role": "user", "content": text}]
        return self._encode(lambda given: self._suffix(given, closed), messages)

    def _prompt(self, messages: Sequence[Message]) -> str:
        system = [m["content"] for m in messages if m["role"] == "system"]
        if not system or self._knows_system:
            return self._render(messages)
        first, *rest = [m for m in messages if m["role"] != "system"] or [{"role": "user", "content": ""}]
        return self._render([{**first, "content": "\n\n".join([*system, first["content"]])}, *rest])

    def _suffix(self, messages: Sequence[Message], closed: bool) -> str:
        """What the template writes between the assistant's text and its next turn."""
        if not self._knows_tool and any(m["role"] == "tool" for m in messages):
            messages = [{"role": "user", "content": "\n".join(m["content"] for m in messages)}]
        rendered = self._render([_QUESTION, {"role": "assistant", "content": _MARK.format("turn")}, *messages])
        suffix = rendered.partition(_MARK.format("turn"))[2]
        if closed:  # the sampled end token already stands there
            bare = suffix.lstrip("\n")
            for special in self.specials:
                if bare.startswith(special):
                    return bare[len(special) :]
        return suffix

    def _shows(self, messages: Sequence[Message]) -> bool:
        """Whether the template takes such messages and writes the marked text: some refuse a role, some leave it out without a word."""
        try:
            return _MARK.format("seen") in self._render(messages)
        except (TemplateError, TypeError):
            return False

    def _render(self, messages: Sequence[Message]) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=True))

    def _encode(self, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> list[int]:
        """Ids of the rendered messages, encoded whole as the template would be. A content that spells a special token is encoded apart, as text."""
        contents = [str(message["content"]) for message in messages]
        if not any(special in content for content in contents for special in self.specials):
            return self.encode(render(messages), plain=False)
        marks = [_MARK.format(index) for index in range(len(messages))]
        rendered = render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
        ids: list[int] = []
        for mark, content in zip(marks, contents, strict=True):
            frame, _, rendered = rendered.partition(mark)
            ids += self.encode(frame, plain=False) + self.encode(content, plain=True)
        return ids + self.encode(rendered, plain=False)

    def _warn_if_rewritten(self) -> None:
        turn = "<think>\nold thought\n</think>\nearlier turn"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": turn}, {"role": "user", "content": "!"}]
        if turn not in self._render(messages):
            warnings.warn(
                "the chat template rewrites earlier turns (it drops their thoughts); contexts here are append-only and keep what was sampled",
                stacklevel=3,
            )
