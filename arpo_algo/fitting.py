"""An observation cut to the room that the context has left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arpo_algo.codec import Codec

_LEAST = 80
"""Characters below which a cut observation says nothing and the trajectory ends instead."""


def fit_observation(codec: Codec, observation: str, info: Mapping[str, Any], room: int, *, closed: bool) -> tuple[str, list[int]] | None:
    """The text and ids of an observation in at most ``room`` tokens, its middle replaced by a notice where needed. None when not even that fits.

    ``info`` is what the environment's step gave; without ``messages`` the observation is a user message.
    """
    messages = info.get("messages") or [{"role": "user", "content": observation}]
    role = str(info.get("observation_role", "user"))
    keep = max([len(observation), *(len(m["content"]) for m in messages)])
    while True:
        text = cut_middle(observation, keep)
        ids = codec.observation(text, [{**m, "content": cut_middle(m["content"], keep)} for m in messages], role, closed=closed)
        if len(ids) <= room:
            return text, ids
        keep = min(keep * max(room, 0) // len(ids), keep * 3 // 4)
        if keep < _LEAST:
            return None


def cut_middle(text: str, keep: int) -> str:
    """``text`` with its middle left out, so that ``keep`` characters of it remain, and a notice that says how many are missing."""
    if len(text) <= keep:
        return text
    head, tail = keep * 2 // 3, keep // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[len(text) - tail :]}"
