"""Conversations without tools: the environment answers each turn of the policy as the other speaker.

:class:`DialogueEnv` keeps the turns, the limit and the ``info`` of :class:`arpo_env.ToolEnv`, so that a rollout reads both alike. A subclass says how a
conversation begins (:meth:`DialogueEnv.begin`) and how it goes on (:meth:`DialogueEnv.reply`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from arpo_env.forking import ForkableEnv

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)


def spoken(turn: str) -> str:
    """The part of ``turn`` that the other speaker hears: without thoughts, also where the thought was opened in the prompt or never closed."""
    heard = _THOUGHT.sub(" ", turn)
    return heard.rpartition("</think>")[2].strip()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the other speaker makes of a turn."""

    text: str = ""
    """What it says. Nobody reads the text of the last reply."""
    reward: float | None = None
    """None while the conversation goes on; a number ends it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward."""
    answer: str = ""
    """What was agreed or found at the end."""
    stop_reason: str = "answer"
    """Why it ended, where it did."""
    error: str = ""
    """What was wrong with the turn, where it could not be understood."""


class DialogueEnv(ForkableEnv):
    """A conversation of at most ``max_turns`` turns of the policy, as a ``gymnasium.Env[str, str]`` that forks.

    ``reset(seed=s)`` draws the conversation from the seed alone, ``options={"task": i}`` from the number ``i`` alone. Attributes that a subclass sets
    in :meth:`begin` and :meth:`reply` are deep-copied by ``fork``.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    """Names of the parts of the reward."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns
        self.turn = 0
        self._task_id = ""
        self._stop_reason = "not begun"

    def begin(self, rng: np.random.Generator) -> tuple[str, str]:
        """Draw a new conversation with ``rng`` and nothing else. Returns the id of the task and what the policy reads first."""
        raise NotImplementedError

    def reply(self, heard: str) -> Reply:
        """The answer to what the policy said (its thoughts left out). Total: any text has a reply."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._stop_reason = "not begun"  # until all below has succeeded
        wanted = (options or {}).get("task")
        rng = self.np_random if wanted is None else np.random.default_rng(operator.index(wanted))
        self._task_id, opening = self.begin(rng)
        self.turn, self._stop_reason = 0, ""
        return opening, self._info(opening)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take what the policy says; give what the other speaker answers ("" when the conversation ended)."""
        if not isinstance(action, str):
            raise TypeError(f"an action is the text of one turn, a str, got {type(action).__name__}")
        self._check_running()
        self.turn += 1
        reply = self.reply(spoken(action))
        if reply.reward is not None:
            return self._end(reply.stop_reason, reply)
        if self.turn >= self.max_turns:
            return self._end("max_turns", reply)
        return reply.text, 0.0, False, False, self._info(reply.text, reply)

    def truncate(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the conversation from outside, without a result. Returns what ``step`` returns."""
        self._check_running()
        return self._end(reason, Reply())

    def _check_running(self) -> None:
        if self._closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed: make a new environment")
        if self._stop_reason:
            raise ResetNeeded(f"{type(self).__name__}: no conversation is going on ({self._stop_reason}); call reset()")

    def _end(self, reason: str, reply: Reply) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._stop_reason = reason
        terminated = reply.reward is not None
        return "", float(reply.reward or 0.0), terminated, not terminated, self._info("", reply)

    def _info(self, message: str, reply: Reply | None = None) -> dict[str, Any]:
        """The keys of :class:`arpo_env.ToolEnv`; those about tools are empty."""
        reply = reply or Reply()
        return {
            "turn": self.turn,
            "messages": [{"role": "user", "content": message}] if message else [],
            "observation_role": "user",
            "stop_strings": (),
            "tools": [],
            "tool_calls": [],
            "n_tool_calls": 0,
            "errors": [reply.error] if reply.error else [],
            "answer": reply.answer,
            "reward": dict.fromkeys(self.parts, 0.0) | dict(reply.parts),
            "scored": True,
            "stop_reason": self._stop_reason,
            "task_id": self._task_id,
            "isolation": "",
        }
