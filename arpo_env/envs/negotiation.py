"""``arpo/Negotiation-v0``: buy from a seller whose lowest price is hidden. A dialogue: the policy decides after another speaker's words, not after a tool.

The seller is a script that the seed decides. It asks a price, comes down by its pace at each serious offer, not at all at an insulting one, and leaves
when its patience is at its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arpo_env.envs.dialogue import DialogueEnv, Reply

_ITEMS = ("oak table", "brass lamp", "road bicycle", "wool rug", "film camera", "garden bench", "record player", "copper kettle")

_PRICE = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d{1,9})(?:\.(\d{1,2}))?(?!\d|[.,]\d|\s?%|(?!usd|dollars?|bucks)[a-z])", re.I | re.A)
_CLAUSES = re.compile(r"[.,](?!\d)|[;:!?\n]|\b(?:but|so|then)\b|(?=\b(?:not|instead of|rather than)\b)", re.I)
_AT_MOST = re.compile(r"\b(?:no|not|never|cannot|\w+n't)\b[^.,;:!?\d]{0,20}?\b(?:more than|above|over|beyond|higher than)\b", re.I)
_OFFERING = re.compile(r"\b(?:offers?|offering|pay|paying|propose|bid|give|spend|how about|what about|take it for|sell it for|buy it for)\b", re.I)
_REFUSING = re.compile(r"\b(?:not|no|never|cannot|can't|won't|wouldn't|don't|isn't|refuse|instead of|rather than|too (?:much|high)|more than)\b", re.I)
_ACCEPTING = re.compile(r"\b(?:accept(?:ed)?|deal|agreed?|i(?:'ll| will) take it|it's a deal|sold)\b", re.I)
_LEAVING = re.compile(r"\b(?:walk(?:ing)? away|goodbye|good bye|no deal|forget it|leave|leaving)\b", re.I)


def read_offer(text: str, ask: float) -> float | None:
    """The price that ``text`` offers to a seller who asks ``ask``, or None.

    Of the numbers that stand in no refusing clause ("80 is too much", "not 80"): the last one after a word of offering, else the last one that does not
    repeat the seller's price, else, where nothing is refused, the seller's price.
    """
    text = _AT_MOST.sub(" offer ", text.replace("\u2019", "'"))
    found = [
        (float(match.group(1).replace(",", "") + "." + (match.group(2) or "0")), bool(_OFFERING.search(clause[: match.start()])))
        for clause in _CLAUSES.split(text)
        if not _REFUSING.search(clause)
        for match in _PRICE.finditer(clause)
    ]
    ranked = [price for price, offered in found if offered] or [price for price, _ in found if price != ask]
    if not ranked and found and not _REFUSING.search(text):
        return ask
    return ranked[-1] if ranked else None


def accepts(text: str) -> bool:
    """Whether ``text``, which names no price, agrees to the seller's."""
    return any(_ACCEPTING.search(clause) and not _REFUSING.search(clause) for clause in _CLAUSES.split(text.replace("\u2019", "'")))


@dataclass(frozen=True, slots=True)
class Seller:
    """A seller in the middle of a talk. Immutable: each offer makes a new one."""

    ask: float
    """What it asks now, in whole dollars."""
    limit: float
    """The lowest price at which it sells."""
    pace: float
    """The share of the way to its limit that it comes down at a serious offer, in (0, 1)."""
    patience: int
    """Offers that it still listens to."""

    def hears(self, offer: float) -> Seller:
        """The seller after an offer below its price. An offer under half of its limit insults it: it does not move and loses patience twice as fast."""
        if offer < self.limit / 2:
            return replace(self, patience=self.patience - 2)
        lowered = max(self.limit, float(np.floor(self.ask - self.pace * (self.ask - self.limit))))
        return replace(self, ask=lowered, patience=self.patience - 1)


class Negotiation(DialogueEnv):
    """The policy buys one thing that is worth a known sum to it, for as little as it can.

    The reward is its share of the surplus, ``(worth - price) / (worth - limit)``: 1 at the seller's hidden limit, 0 where nothing is bought, below 0
    (but not below -1) where it pays more than the thing is worth. An offer at or above the asked price buys at the asked price; one that meets what the
    seller would ask next buys at the offer.

    Args:
        low, high: the range of the hidden limit in dollars.
        max_turns: turns of the policy before the talk is broken off.
    """

    parts: ClassVar[tuple[str, ...]] = ("bought", "surplus_share")

    def __init__(self, low: int = 40, high: int = 160, max_turns: int = 8) -> None:
        super().__init__(max_turns)
        if not 10 <= low <= high:
            raise ValueError(f"expected 10 <= low <= high, got low={low}, high={high}")
        self.low, self.high = low, high
        self.seller = Seller(0.0, 0.0, 0.0, 0)
        self.worth = 0.0

    def begin(self, rng: np.random.Generator) -> tuple[str, str]:
        item = _ITEMS[int(rng.integers(len(_ITEMS)))]
        limit = int(rng.integers(self.low, self.high + 1))
        self.worth = float(round(limit * rng.uniform(1.3, 1.6)))
        ask = round(self.worth * rng.uniform(1.05, 1.3))
        self.seller = Seller(float(ask), float(limit), pace=round(float(rng.uniform(0.2, 0.5)), 2), patience=int(rng.integers(4, 8)))
        task_id = f"negotiation-{item.replace(' ', '-')}-{limit}-{self.worth:.0f}-{ask}-{self.seller.pace}-{self.seller.patience}"
        return task_id, (
            f"You want to buy this {item}. It is worth {self.worth:.0f} dollars to you; never tell me so. I am the seller and ask {ask} dollars. "
            "Make an offer, accept my price, or walk away."
        )

    def reply(self, heard: str) -> Reply:
        offer = read_offer(heard, self.seller.ask)
        if offer is None and _LEAVING.search(heard):
            return self._no_deal("left")
        if offer is None and accepts(heard):
            offer = self.seller.ask
        if offer is None:
            problem = f"I ask {self.seller.ask:.0f} dollars. What do you offer?"
            return Reply(problem, error=problem)
        if offer >= self.seller.ask:
            return self._deal(self.seller.ask)
        return self._haggle(offer)

    def _haggle(self, offer: float) -> Reply:
        before, self.seller = self.seller, self.seller.hears(offer)
        if offer >= self.seller.ask:
            return self._deal(offer)
        if self.seller.patience <= 0:
            return self._no_deal("seller_left")
        price = f"{self.seller.ask:.0f} dollars"
        if self.seller.ask == before.ask:
            insulted = offer < self.seller.limit / 2
            return Reply(f"{offer:g} is an insult. I still ask {price}." if insulted else f"I cannot go lower than {price}.")
        if self.seller.patience == 1:
            return Reply(f"My last word: {price}.")
        return Reply(f"{offer:g} is too little. I could take {price}.")

    def _deal(self, price: float) -> Reply:
        share = max(-1.0, (self.worth - price) / (self.worth - self.seller.limit))
        return Reply(reward=share, parts={"bought": 1.0, "surplus_share": share}, answer=f"{price:g}")

    def _no_deal(self, reason: str) -> Reply:
        return Reply(reward=0.0, stop_reason=reason)
