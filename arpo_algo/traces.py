"""Recorded conversations -> examples for a cold start, in exactly the ids that a rollout of the same conversation would have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arpo_algo.codec import Codec, Message
from arpo_algo.sft import SFTExample


def encode_trace(
    codec: Codec, messages: Sequence[Message], turns: Sequence[tuple[str, str | Sequence[Message]]], *, role: str = "inline", end_id: int | None = None
) -> SFTExample:
    """The example of a trace: ``messages`` before the first turn, then pairs of the policy's text and the observation after it ("" after the last).

    An observation is a text, or the messages that it consists of: all results of a turn are rendered as one, as in a rollout.

    ``role`` is the observation role (``inline``, ``tool``, ``user``). ``end_id`` is appended to each turn and learned; None where a stop string ends turns.
    """
    ids = codec.prompt(messages)
    mask = [False] * len(ids)
    for text, observation in turns:
        sampled = [*codec.encode(text, plain=False), *([] if end_id is None else [end_id])]
        ids += sampled
        mask += [True] * len(sampled)
        if observation:
            if isinstance(observation, str):
                observation = [{"role": "tool" if role == "tool" else "user", "content": observation}]
            text = "".join(str(message["content"]) for message in observation)
            added = codec.observation(text, observation, role, closed=end_id is not None)
            ids += added
            mask += [False] * len(added)
    return SFTExample(ids, mask)


def read_traces(path: str | Path, codec: Codec, *, end_id: int | None) -> list[SFTExample]:
    """Examples of a JSON lines file: ``{"messages": [{"role", "content"}, ...], "observation_role": "inline"}`` a line.

    Assistant messages are learned; what comes between them are observations. With ``observation_role`` ``tool`` or ``user`` (default: the role of the first
    message after the assistant's) turns end with ``end_id``; ``inline`` turns end with their stop string. Raises ``ValueError`` naming file and line.
    """
    examples = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    examples.append(_example(json.loads(line), codec, end_id))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}; expected {EXPECTED}") from error
    if not examples:
        raise ValueError(f"{path} holds no trace; expected {EXPECTED} a line")
    return examples


EXPECTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}'


def _example(row: Any, codec: Codec, end_id: int | None) -> SFTExample:
    messages = _messages(row)
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if first == 0:
        raise ValueError("no assistant message after a prompt")
    turns: list[tuple[str, list[Message]]] = []
    for message in messages[first:]:
        if message["role"] == "assistant":
            turns.append((message["content"], []))
        else:
            turns[-1][1].append(message)
    given = [message["role"] for message in messages[first:] if message["role"] != "assistant"]
    role = row.get("observation_role", given[0] if given else "user")
    if role not in ("inline", "tool", "user"):
        raise ValueError(f"observation_role must be one of inline, tool, user, got {role!r}")
    return encode_trace(codec, messages[:first], turns, role=role, end_id=None if role == "inline" else end_id)


def _messages(row: Any) -> list[dict[str, str]]:
    if not isinstance(row, Mapping):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    if not isinstance(row.get("messages"), list):
        raise ValueError("no key 'messages' with a list")
    for index, message in enumerate(row["messages"]):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {index} must have a role and a text as content, got {message!r:.80}")
    return [dict(message) for message in row["messages"]]
