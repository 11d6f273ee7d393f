"""Demonstrations: how a careless worker answers a world's questions. Imitating them teaches the language and the tools, and leaves the decisions to be learned.

Every tool result in a trace is what the environment answers to the turn before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from arpo_env.envs.world import world_format
from arpo_env.envs.world_text import CARD_FACTS, TEXTS
from arpo_env.envs.world_tools import WorldCalculator, WorldSearch
from arpo_env.task import Task
from arpo_env.tools.base import Tool, ToolResult

Trace = list[tuple[str, str]]
"""Turns in order: what the policy writes, and the observation that follows ("" after the last)."""


@dataclass(frozen=True, kw_only=True)
class DemonstrationNoise:
    """Chance of each kind of mistake."""

    first_candidate: float = 0.55
    """At a decision: the first namesake of the list is taken, whoever it is."""
    random_candidate: float = 0.10
    """At a decision: any namesake is taken."""
    skip_hop: float = 0.5
    """Before another hop: the answer is given from the card at hand instead."""
    skip_calculation: float = 0.5
    """Before a calculation that the answer needs: the uncalculated number is answered."""
    wrong_attribute: float = 0.12
    """Another fact of the card is answered."""
    bad_format: float = 0.05
    """The answer lacks its opening tag at the first try."""
    guess: float = 0.06
    """An answer is guessed without any search."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(f"{field.name} must be in [0, 1], got {getattr(self, field.name)}")
        if self.first_candidate + self.random_candidate > 1:
            raise ValueError(f"first_candidate + random_candidate must be at most 1, got {self.first_candidate} + {self.random_candidate}")


FLAWLESS = DemonstrationNoise(first_candidate=0, random_candidate=0, skip_hop=0, skip_calculation=0, wrong_attribute=0, bad_format=0, guess=0)


def demonstration(task: Task, rng: np.random.Generator, noise: DemonstrationNoise = DemonstrationNoise()) -> Trace:
    """A trace for a task of ``WorldTasks``: ``[("<search> smith </search>", " <result> ... </result> "), ..., ("<answer> cat </answer>", "")]``."""
    return _Worker(task, rng, noise).work()


class _Worker:
    """One trace in the making."""

    def __init__(self, task: Task, rng: np.random.Generator, noise: DemonstrationNoise) -> None:
        self.world, self.rng, self.noise = task.metadata, rng, noise
        self.cards, self.lists = self.world["cards"], self.world["lists"]
        self.style = self.world["style"]
        self.text, self.format = TEXTS[self.style], world_format(self.style)
        self.search, self.python = WorldSearch(), WorldCalculator(spaced=self.style == "compact")
        self.search.start_episode(task)
        self.trace: Trace = []

    def work(self) -> Trace:
        if self._slips(self.noise.guess):
            stranger = self._pick(list(self.cards))
            return self._answer(self.cards[stranger])
        card: dict[str, Any] = {}
        for depth, hop in enumerate(self.world["hops"]):
            if depth and self._slips(self.noise.skip_hop):
                break
            card = self.cards[self._person(hop, card)]
        plus = self.world["plus"]
        if plus and not self._slips(self.noise.skip_calculation):
            self._call(self.python, self.text.sum(card["age"], plus))
            card = card | {"age": card["age"] + plus}
        return self._answer(card)

    def _person(self, hop: dict[str, Any], before: dict[str, Any]) -> str:
        """The person of this hop, looked up: the one named in the question or on the card before, or one of the namesakes."""
        known = str(before["boss"] if before else hop["person"])
        if not hop["given"]:
            self._call(self.search, self.text.name(known))
            return known
        last = known.split()[-1]
        self._call(self.search, self.text.name(last))
        known = self._decide(hop, before, self.lists[last]["people"])
        told_by = [self.text.value(attribute, self.cards[known][attribute]) for attribute in hop["given"]]
        self._call(self.search, " ".join([*told_by, self.text.name(known)]))  # "baker mia smith": first what decides, then who it is
        return known

    def _decide(self, hop: dict[str, Any], before: dict[str, Any], people: list[str]) -> str:
        given, right = hop["given"], self.cards[hop["person"]]
        wanted = [right[attribute] for attribute in given]
        if given == ["age"]:
            base = before["age"] if before else right["age"] - hop["plus"]
            self._call(self.python, self.text.sum(base, hop["plus"]))
            wanted = [base + hop["plus"]]
        chance = self.rng.random()
        if chance < self.noise.first_candidate:
            return people[0]
        fitting = [name for name in people if [self.cards[name][a] for a in given] == wanted]
        careless = chance < self.noise.first_candidate + self.noise.random_candidate
        return self._pick(people if careless or not fitting else fitting)

    def _answer(self, card: dict[str, Any]) -> Trace:
        ask = self.world["ask"]
        if self._slips(self.noise.wrong_attribute):
            ask = self._pick([fact for fact in CARD_FACTS if fact != ask])
        answer = self.text.value(ask, card[ask])
        if self._slips(self.noise.bad_format):
            self.trace.append((f"{answer} </answer>", self._complaint(f"{answer} </answer>")))
        self.trace.append((f"<answer> {answer} </answer>", ""))
        return self.trace

    def _call(self, tool: Tool, argument: str) -> None:
        result = tool.call(**{str(tool.main_argument): argument})
        result = result if isinstance(result, ToolResult) else ToolResult(result)
        self.trace.append((f"<{tool.name}> {argument} </{tool.name}>", self.format.render_results([(tool.name, result)])))

    def _complaint(self, turn: str) -> str:
        """What the environment says to a turn that breaks the format."""
        errors = self.format.parse(turn, {tool.name: tool for tool in (self.search, self.python)}).errors
        return "".join(map(self.format.render_error, errors))

    def _slips(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def _pick(self, options: Sequence[str]) -> str:
        return options[int(self.rng.integers(len(options)))]
