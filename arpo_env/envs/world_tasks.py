"""The little world: unlimited questions about invented people, each with the cards that the search tool answers from.

A question names a person, perhaps that person's boss and the boss's boss (1 to 3 hops), and asks for a fact about the last one. Where a hop is a
*decision*, only a last name is known: a search for it lists the namesakes, and one of them must be chosen by what the question says:

* ``after_first_search``: the first person of the question is a last name and a job; the decision follows the first result;
* ``after_later_search``: a boss is a last name on a card, the question gives the job; the decision follows a later result;
* ``after_python``: the namesake is told by an age that must be calculated, from a number in the question (first hop) or from the age on the card before
  (later hops); the decision follows the calculator's result.

Every namesake has a card, bosses and an answer of their own, so that a wrong choice leads on to a wrong answer and never to an error message.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from arpo_env.envs.world_text import CARD_FACTS, COMPACT_WORDS, FIRST_NAMES, JOBS, LAST_NAMES, PETS, PLACE_HEADS, PLACE_TAILS, TEXTS, Style, pairs
from arpo_env.task import Task

MAX_CANDIDATES = 6
ASKED = ("city", "pet", "age")


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """A family of tasks. Two configs that differ only in ``split`` share no person, no place and no fact."""

    seed: int = 0
    """Task ``i`` is a pure function of this config and ``i``."""
    split: Literal["train", "test"] = "train"
    style: Style = "compact"
    """Closed word-level language, or English sentences."""
    hops: tuple[int, int] = (1, 2)
    """Least and most number of people on the way from the question to the answer, within 1 to 3."""
    candidates: int = 3
    """Namesakes to choose from at a decision, 2 to 6."""
    decisions: int = 1
    """Decisions in each question; at the other hops the full name is known."""
    after_first_search: float = 1.0
    """Weight of decisions that follow the first search result."""
    after_later_search: float = 0.0
    """Weight of decisions that follow a later search result."""
    after_python: float = 0.0
    """Weight of decisions that follow a Python result."""
    sharpness: float = 1.0
    """Chance that a job alone tells the namesakes apart. Otherwise it takes job and pet, and each wrong one shares one of the two."""
    calculation: float = 1 / 3
    """Share of questions that ask for an age plus a number, which is for Python to add (where that age is not what told the namesakes apart)."""

    def __post_init__(self) -> None:
        if isinstance(self.hops, list):  # from JSON or TOML
            object.__setattr__(self, "hops", tuple(self.hops))
        if self.split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {self.split!r}")
        if self.style not in TEXTS:
            raise ValueError(f"style must be one of {list(TEXTS)}, got {self.style!r}")
        if len(self.hops) != 2 or not 1 <= self.hops[0] <= self.hops[1] <= 3:
            raise ValueError(f"hops must be (least, most) with 1 <= least <= most <= 3, got {self.hops!r}")
        if not 2 <= self.candidates <= MAX_CANDIDATES:
            raise ValueError(f"candidates must be in [2, {MAX_CANDIDATES}], got {self.candidates}")
        for name in ("sharpness", "calculation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        self._check_decisions()

    def _check_decisions(self) -> None:
        if min(self.weights.values()) < 0:
            raise ValueError(f"weights of decisions must not be negative, got {self.weights}")
        room = self.hops[1] if self.after_python else (self.after_first_search > 0) + (self.after_later_search > 0) * (self.hops[1] - 1)
        if not 0 <= self.decisions <= room:
            raise ValueError(f"decisions must be in [0, {room}] with hops {self.hops} and weights {self.weights}, got {self.decisions}")

    @property
    def weights(self) -> dict[str, float]:
        """Where decisions lie: weight by place."""
        return {"first": self.after_first_search, "later": self.after_later_search, "python": self.after_python}


class WorldTasks:
    """The tasks of a config: ``tasks[i]`` for any integer ``i >= 0``; nothing is stored."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self._firsts = pairs(FIRST_NAMES, LAST_NAMES, config.split)
        self._places = tuple(f"{head} {tail}" for tail, heads in pairs(PLACE_HEADS, PLACE_TAILS, config.split).items() for head in heads)

    def __getitem__(self, index: int, /) -> Task:
        if index < 0:
            raise IndexError(f"task index must be >= 0, got {index}")
        rng = random.Random(f"world/{self.config.seed}/{self.config.split}/{index}")
        world = _Builder(self.config, rng, self._firsts, self._places).build()
        text = TEXTS[self.config.style]
        right = world["cards"][world["hops"][-1]["person"]]
        value = right[world["ask"]] + world["plus"] if world["plus"] else right[world["ask"]]
        return Task(
            question=text.question(world["ask"], world["plus"], world["hops"], world["cards"]),
            answer=text.value(world["ask"], value),
            id=f"world-{self.config.split}-{self.config.seed}-{index}",
            ability="qa",
            data_source="arpo/World-v0",
            metadata=world,
        )

    def __iter__(self) -> Iterator[Task]:
        """Tasks 0, 1, 2 ... without end."""
        index = 0
        while True:
            yield self[index]
            index += 1

    def sample(self, rng: np.random.Generator, /) -> Task:
        """One of the tasks 0 to 2**62, by ``rng`` and nothing else."""
        return self[int(rng.integers(2**62))]

    def __deepcopy__(self, memo: dict[int, Any]) -> WorldTasks:
        return self  # immutable: forks share it


def world_vocabulary(config: WorldConfig) -> list[str]:
    """All words of prompts, tool results and well-formed turns, the tags included, each once: what a word-level tokenizer needs. Compact style only."""
    if config.style != "compact":
        raise ValueError(f"only style 'compact' has a closed vocabulary, got {config.style!r}")
    return list(dict.fromkeys(COMPACT_WORDS))


class _Builder:
    """Builds one world (JSON values only) from one random stream.

    The people of a hop are families of namesakes. Each member of the right family has a boss in a family of their own in the next hop, so that different
    choices lead to different people; everyone else's boss is in one extra family. All families of a hop are of one size and hold the same jobs: nothing
    but the question tells a right way from a wrong one.
    """

    def __init__(self, config: WorldConfig, rng: random.Random, firsts: dict[str, tuple[str, ...]], places: tuple[str, ...]) -> None:
        self.config, self.rng, self.firsts, self.places = config, rng, firsts, places
        self.last_names = rng.sample(LAST_NAMES, len(LAST_NAMES))
        self.cards: dict[str, dict[str, Any]] = {}
        self.lists: dict[str, dict[str, Any]] = {}

    def build(self) -> dict[str, Any]:
        rng = self.rng
        givens = self._givens()
        plus = rng.randint(2, 9) if "age" not in givens[-1] and rng.random() < self.config.calculation else 0
        ask = "age" if plus else rng.choice([a for a in ASKED if a not in givens[-1]])
        hops: list[dict[str, Any]] = []
        staff: list[str] = []  # the right family of the hop before, the right person first
        others: list[str] = []  # everyone else of the hop before
        for given in givens:
            add = rng.randint(2, 9) if given == ["age"] else 0
            kinds = list(zip(rng.sample(JOBS, MAX_CANDIDATES), rng.sample(PETS, MAX_CANDIDATES), strict=True))
            families = [self._family(given, kinds, [name], add) for name in staff]
            if others or not staff:
                families.append(self._family(given, kinds, others, 0))
            staff, others = families[0], [name for family in families[1:] for name in family]
            hops.append({"person": staff[0], "given": given, "plus": add})
        self._finish(ask, givens, {*staff, *others}, self.cards[staff[0]])
        return {"style": self.config.style, "cards": self.cards, "lists": self.lists, "hops": hops, "ask": ask, "plus": plus}

    def _givens(self) -> list[list[str]]:
        """What tells the namesakes apart at each hop; an empty list where the full name is known."""
        rng, config = self.rng, self.config
        places: list[str] = []
        while len(places) < config.decisions:
            weights = config.weights | ({"first": 0.0} if "first" in places else {}) | ({"later": 0.0} if places.count("later") == config.hops[1] - 1 else {})
            places += rng.choices(list(weights), list(weights.values()))
        hops = rng.randint(max(config.hops[0], len(places), places.count("later") + 1), config.hops[1])
        free = rng.sample(range(hops), hops)
        at: dict[int, list[str]] = {}
        for place in sorted(places):  # "first" and "later" before "python", which fits anywhere
            hop = next(h for h in free if place == "python" or (place == "first") == (h == 0))
            free.remove(hop)
            at[hop] = ["age"] if place == "python" else ["job"] if rng.random() < config.sharpness else ["job", "pet"]
        return [at.get(h, []) for h in range(hops)]

    def _family(self, given: list[str], kinds: list[tuple[str, str]], reports: list[str], add: int) -> list[str]:
        """Names of a new family of namesakes, one of whom is the boss of ``reports``: that one first, ``add`` years older where ``add`` is not 0."""
        rng = self.rng
        size = self.config.candidates if given else 1
        last = self.last_names.pop()
        names = [f"{first} {last}" for first in rng.sample(self.firsts[last], size)]
        ages = rng.sample(range(20, 70), size)
        if reports and add:
            age = self.cards[reports[0]]["age"] + add
            ages = [age, *(a for a in ages if a != age)]
        for i, name in enumerate(names):
            job, pet = kinds[i][0], rng.choice(PETS)
            if given == ["job", "pet"]:  # each wrong one shares one of the two
                job, pet = (kinds[0][0], kinds[i][1]) if i % 2 else (kinds[i][0], kinds[0][1])
            facts = rng.sample(CARD_FACTS, len(CARD_FACTS))
            self.cards[name] = {"job": job, "age": ages[i % len(ages)], "city": rng.choice(self.places), "pet": pet, "boss": "", "facts": facts}
        self.lists[last] = {"shows": given or ["job"], "people": rng.sample(names, size)}
        for name in reports:
            self.cards[name]["boss"] = last if given else names[0]
        return names

    def _finish(self, ask: str, givens: list[list[str]], final: set[str], right: dict[str, Any]) -> None:
        """Give the people of the last hop bosses too, and take the right answer away from everyone else, unless that would change the way to it."""
        pools: dict[str, Any] = {"city": self.places, "pet": PETS, "age": range(20, 70)}
        counted = ask == "age" and ["age"] in givens
        for name, card in self.cards.items():
            if name in final:
                card["boss"] = self.rng.choice([other for other in self.cards if other != name] or [name])
            free = name in final or not (counted or ask in self.lists[name.split()[1]]["shows"])
            if free and card is not right and card[ask] == right[ask]:
                card[ask] = self.rng.choice([value for value in pools[ask] if value != right[ask]])
