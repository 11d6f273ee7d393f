"""What the little world is written in: its words, and two ways to phrase questions and tool results.

``CompactText`` is a closed language of about 150 words separated by single spaces, digits one by one: a word-level tokenizer covers it and a policy of a few
hundred thousand parameters learns it. ``ProseText`` says the same things in English, for pretrained models.

People and places are *pairs* of words ("mia smith", "north haven"). The pairs are divided between the splits, the words are not: a policy meets every word in
training, yet no person and no place of a test task, and so no fact about one, occurs in a training task. Jobs, pets and ages are kinds, not entities.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

Style = Literal["compact", "prose"]

# fmt: off
FIRST_NAMES = (
    "ada", "ben", "cleo", "dan", "eva", "finn", "gina", "hugo", "iris", "jack", "kira", "leo", "mia", "nils", "olga", "paul", "rosa", "sam", "tina",
    "uma", "vera", "will", "yara", "zoe", "abel", "bella", "carl", "dora", "emil", "fay", "gus", "hana",
)
LAST_NAMES = (
    "smith", "jones", "weber", "novak", "silva", "rossi", "moreau", "larsen", "tanaka", "kumar", "okoye", "petrov", "garcia", "dubois", "keller",
    "brandt", "lindqvist", "costa", "haddad", "murphy",
)
PLACE_HEADS = (
    "north", "south", "east", "west", "upper", "lower", "old", "new",
)
PLACE_TAILS = (
    "haven", "brook", "ford", "ridge", "vale", "mill", "harbor", "field", "grove", "hill", "bridge", "wood", "cross", "bay", "spring", "moor",
)
JOBS = (
    "baker", "nurse", "pilot", "judge", "farmer", "tailor", "dancer", "miner", "painter", "doctor", "sailor", "cook",
)
PETS = (
    "cat", "dog", "parrot", "rabbit", "turtle", "hamster", "pony", "goat", "snake", "ferret", "gecko", "canary",
)
# fmt: on

CARD_FACTS = ("city", "age", "pet", "boss")
"""The facts that a person's card shows. The job is shown by lists alone: a card does not confirm the choice that led to it."""

TEST_SHARE = 5
"""One pair in five, (i + j) divisible by 5, belongs to the test split."""


def pairs(heads: Sequence[str], tails: Sequence[str], split: str) -> dict[str, tuple[str, ...]]:
    """The heads that go with each tail in ``split``: ``{"smith": ("ada", ...), ...}``. Train and test share no (head, tail) pair."""
    return {tail: tuple(head for i, head in enumerate(heads) if ((i + j) % TEST_SHARE == 0) == (split == "test")) for j, tail in enumerate(tails)}


Card = Mapping[str, Any]
"""A person: ``job``, ``age``, ``city``, ``pet``, and ``boss``, which is a full name or, where the name is ambiguous, a last name."""
Hop = Mapping[str, Any]
"""One person on the way: ``person`` (the right one), ``given`` (what tells the namesakes apart: attributes; empty where the full name is known), ``plus``."""


class WorldText(Protocol):
    """How a world speaks. Queries and answers are compared in lower case, see :func:`normalize`."""

    nothing: str
    """What the search tool answers to a query that names nobody."""

    def question(self, ask: str, plus: int, hops: Sequence[Hop], cards: Mapping[str, Card]) -> str:
        """The question for attribute ``ask`` (plus a number) of the last of ``hops``."""
        ...

    def people(self, last: str, shows: Sequence[str], cards: Mapping[str, Card]) -> str:
        """The search result for a last name: its people with the attributes ``shows``."""
        ...

    def card(self, name: str, facts: Sequence[str], card: Card) -> str:
        """The search result for a full name: the ``facts`` in the order given."""
        ...

    def value(self, attribute: str, value: str | int) -> str:
        """A value as an answer: what ``Task.answer`` holds."""
        ...

    def name(self, name: str) -> str:
        """A person's name as queries spell it."""
        ...

    def sum(self, left: int, right: int) -> str:
        """The argument of a Python call that adds two numbers."""
        ...

    def number(self, value: int) -> str:
        """The result of a calculation."""
        ...


def normalize(query: str) -> str:
    """``query`` in lower case, ASCII letters, digits and single spaces only."""
    return " ".join(re.findall(r"[a-z]+|[0-9]+", query.lower()))


class CompactText:
    """The closed word-level language; see :data:`COMPACT_WORDS`."""

    nothing = "none"

    def question(self, ask: str, plus: int, hops: Sequence[Hop], cards: Mapping[str, Card]) -> str:
        words = ["ask", ask, *(["plus", self.number(plus)] if plus else [])]
        for depth in range(len(hops) - 1, 0, -1):
            words += ["of", *self._selector(hops[depth], cards), "boss"]
        person, last = hops[0]["person"], hops[0]["person"].split()[1]
        first = self._selector(hops[0], cards, cards[person]["age"] - hops[0]["plus"])
        words += ["of", *first, last] if hops[0]["given"] else ["of", person]
        return " ".join(words)

    def _selector(self, hop: Hop, cards: Mapping[str, Card], base: int | None = None) -> list[str]:
        words = [cards[hop["person"]][attribute] for attribute in hop["given"] if attribute != "age"]
        if "age" in hop["given"]:
            words += [*([] if base is None else ["age", self.number(base)]), "plus", self.number(hop["plus"])]
        return words

    def people(self, last: str, shows: Sequence[str], cards: Mapping[str, Card]) -> str:
        return " , ".join(" ".join([*(self.value(a, card[a]) for a in shows), name.split()[0]]) for name, card in cards.items())

    def card(self, name: str, facts: Sequence[str], card: Card) -> str:
        return " ".join(f"{fact} {self.value(fact, card[fact])}" for fact in facts)

    def value(self, attribute: str, value: str | int) -> str:
        return self.number(value) if isinstance(value, int) else value

    def name(self, name: str) -> str:
        return name

    def sum(self, left: int, right: int) -> str:
        return f"{self.number(left)} + {self.number(right)}"

    def number(self, value: int) -> str:
        return " ".join(str(value))


class ProseText:
    """Plain English sentences."""

    nothing = "No results. Search for a last name, or for a full name."

    _ASK: Mapping[str, str] = MappingProxyType({"city": "Where does {} live?", "pet": "Which pet does {} have?", "age": "How old is {}?"})
    _FACT: Mapping[str, str] = MappingProxyType({"city": "Lives in {}.", "pet": "Pet: {}.", "age": "Age: {}.", "boss": "Boss: {}."})

    def question(self, ask: str, plus: int, hops: Sequence[Hop], cards: Mapping[str, Card]) -> str:
        person = cards[hops[0]["person"]]
        last = self.name(hops[0]["person"].split()[1])
        who = self.name(hops[0]["person"])
        if hops[0]["given"] == ["age"]:
            who = f"the person named {last} whose age is {person['age'] - hops[0]['plus']} + {hops[0]['plus']}"
        elif hops[0]["given"]:
            who = f"the {person['job']} named {last}" + (f" who has a {person['pet']}" if "pet" in hops[0]["given"] else "")
        lead = ""
        if len(hops) > 1:
            lead = " ".join([f"Start from {who}.", *(f"Go to that person's boss{self._which(hop, cards[hop['person']])}." for hop in hops[1:])]) + " "
            who = "the person you come to"
        return lead + (f"How old will {who} be in {plus} years?" if plus else self._ASK[ask].format(who))

    def _which(self, hop: Hop, card: Card) -> str:
        if hop["given"] == ["age"]:
            return f", the one who is {hop['plus']} years older"
        return f", the {card['job']}" + (f" who has a {card['pet']}" if "pet" in hop["given"] else "") if hop["given"] else ""

    def people(self, last: str, shows: Sequence[str], cards: Mapping[str, Card]) -> str:
        lines = [f"- {self.name(name)} ({', '.join(f'{a} {card[a]}' for a in shows)})" for name, card in cards.items()]
        return "\n".join([f"{len(lines)} people are named {self.name(last)}:", *lines])

    def card(self, name: str, facts: Sequence[str], card: Card) -> str:
        values = {fact: card[fact] if fact == "pet" else self.value(fact, card[fact]) for fact in facts}
        if "boss" in values and " " not in values["boss"]:
            values["boss"] += " (there are several)"
        return " ".join([f"{self.name(name)}.", *(self._FACT[fact].format(values[fact]) for fact in facts)])

    def value(self, attribute: str, value: str | int) -> str:
        return str(value).title() if attribute in ("city", "boss") else str(value)

    def name(self, name: str) -> str:
        return name.title()

    def sum(self, left: int, right: int) -> str:
        return f"{left} + {right}"

    def number(self, value: int) -> str:
        return str(value)


TEXTS: Mapping[Style, WorldText] = MappingProxyType({"compact": CompactText(), "prose": ProseText()})

TAG_WORDS = tuple(f"<{slash}{tag}>" for tag in ("search", "python", "result", "answer") for slash in ("", "/"))
COMPACT_WORDS = (
    *TAG_WORDS,
    *("ask", "of", "plus", "boss", "age", "city", "pet", ",", "none", "error", "+", "-", "*", "//"),
    *"0123456789",
    *(*FIRST_NAMES, *LAST_NAMES, *JOBS, *PETS, *PLACE_HEADS, *PLACE_TAILS),
)
"""Every word that a compact world and the tags around it use."""
