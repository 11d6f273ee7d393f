"""Traces become the ids of a rollout of the same conversation; what is no trace is refused with file and line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import build_tokenizer

from arpo_algo.codec import ChatCodec
from arpo_algo.sft import SFTExample
from arpo_algo.traces import encode_trace, read_traces

WORDS = ("who", "is", "it", "<search>", "</search>", "<result>", "</result>", "ann", "bob", "<answer>", "</answer>", "[user]", "[tool]", "[assistant]")
EOS = 1


def chat_codec() -> ChatCodec:
    """Turns end with the end token; a header stands before each message."""
    tokenizer = build_tokenizer(WORDS)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}[assistant] {{ m['content'] }}<eos> {% else %}[{{ m['role'] }}] {{ m['content'] }} {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return ChatCodec(tokenizer)


def inline_codec() -> ChatCodec:
    return ChatCodec(build_tokenizer(WORDS))


def shown(codec: ChatCodec, example: SFTExample) -> list[tuple[str, bool]]:
    """Runs of equal mask as text."""
    runs: list[tuple[list[int], bool]] = []
    for token, sampled in zip(example.token_ids, example.mask, strict=True):
        if not runs or runs[-1][1] != sampled:
            runs.append(([], sampled))
        runs[-1][0].append(token)
    return [(codec.decode(ids), sampled) for ids, sampled in runs]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def messages(*texts: str, between: str = "user") -> list[dict[str, str]]:
    roles = ["user", *("assistant" if i % 2 == 0 else between for i in range(len(texts) - 1))]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def test_inline_turns_end_with_their_stop_string(tmp_path: Path) -> None:
    """The observation continues the same message, and no end token is learned: a rollout never sees one there."""
    row = {"messages": messages("who is it", "<search> ann </search>", "<result> bob </result>", "<answer> bob </answer>"), "observation_role": "inline"}
    (example,) = read_traces(write(tmp_path / "t.jsonl", row), codec := inline_codec(), end_id=EOS)
    assert shown(codec, example) == [
        ("who is it", False),
        ("<search> ann </search>", True),
        ("<result> bob </result>", False),
        ("<answer> bob </answer>", True),
    ]
    assert EOS not in example.token_ids


@pytest.mark.parametrize("between", ["user", "tool"])
def test_messages_end_with_the_end_token_which_is_learned(tmp_path: Path, between: str) -> None:
    row = {"messages": messages("who is it", "<search> ann </search>", "bob", "<answer> bob </answer>", between=between)}
    (example,) = read_traces(write(tmp_path / "t.jsonl", row), codec := chat_codec(), end_id=EOS)
    assert shown(codec, example) == [
        ("[user] who is it [assistant]", False),
        ("<search> ann </search> <eos>", True),
        (f"[{between}] bob [assistant]", False),
        ("<answer> bob </answer> <eos>", True),
    ]


def test_the_ids_are_those_of_the_whole_conversation_rendered_by_the_template(tmp_path: Path) -> None:
    row = {"messages": messages("who is it", "<search> ann </search>", "bob", "<answer> bob </answer>")}
    (example,) = read_traces(write(tmp_path / "t.jsonl", row), codec := chat_codec(), end_id=EOS)
    whole = codec.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert list(example.token_ids) == codec.encode(whole, plain=False)


def test_encode_trace_without_an_observation_after_the_last_turn() -> None:
    codec = inline_codec()
    turns: Sequence[tuple[str, str]] = [("<search> ann </search>", "<result> bob </result>"), ("<answer> bob </answer>", "")]
    example = encode_trace(codec, [{"role": "user", "content": "who"}], turns)
    assert sum(example.mask) == 6
    assert len(example.token_ids) == 1 + 3 + 3 + 3


GOOD = {"messages": messages("who", "ann")}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{\n", "line 2"),
        ("[]\n", "expected a JSON object, got list"),
        ({"text": "a"}, "no key 'messages'"),
        ({"messages": []}, "no assistant message after a prompt"),
        ({"messages": [{"role": "assistant", "content": "ann"}]}, "no assistant message after a prompt"),
        ({"messages": messages("who")}, "no assistant message after a prompt"),
        ({"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": None}]}, "message 1 must have a role and a text"),
        ({"messages": ["who"]}, "message 0 must have a role and a text"),
        ({"messages": messages("who", "ann"), "observation_role": "aside"}, "observation_role must be one of inline, tool, user, got 'aside'"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, bad: Any, problem: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, bad)
    with pytest.raises(ValueError, match="line 2") as caught:
        read_traces(path, inline_codec(), end_id=EOS)
    assert problem in str(caught.value) and "t.jsonl" in str(caught.value)


def test_a_file_without_traces(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no trace"):
        read_traces(write(tmp_path / "t.jsonl", "\n"), inline_codec(), end_id=EOS)
