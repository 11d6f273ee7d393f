"""``Negotiation``: reading offers from free text, the seller's rules, rewards worked by hand."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_env.envs.negotiation import Negotiation, Seller, accepts, read_offer
from arpo_env.testing import EnvConformance


class TestConformance(EnvConformance):
    actions = ("I offer $30.", "What about 60?", "hm", "Could you do 70 dollars instead of 90?", "Deal!")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return Negotiation()


@pytest.mark.parametrize(
    ("text", "offer"),
    [
        ("I offer $62.50", 62.5),
        ("60", 60.0),
        ("60.", 60.0),
        ("60usd", 60.0),
        ("$1,250 for both", 1250.0),
        ("60, not 80", 60.0),
        ("60 instead of 80", 60.0),
        ("not 80, so 60", 60.0),
        ("Your 80 is too much, would you take 60?", 60.0),
        ("I value it at 100 but my offer: 55", 55.0),
        ("I'd pay 55, it looks like a 40 year old piece", 55.0),
        ("I will not pay more than 60", 60.0),
        ("I can\u2019t go above 55 dollars.", 55.0),
        ("somewhere between 50 and 60", 60.0),
        ("80 it is", 80.0),
        ("I accept your 80", 80.0),
        ("I can't pay 80", None),
        ("80 is not okay", None),
        ("10% off, please", None),
        ("10 % off, please", None),
        ("", None),
        ("what is your price?", None),
        ("9" * 50, None),
        ("model X200", None),
    ],
)
def test_reading_an_offer_to_a_seller_who_asks_80(text: str, offer: float | None) -> None:
    assert read_offer(text, 80.0) == offer


@pytest.mark.parametrize(
    ("text", "yes"),
    [("I accept.", True), ("Deal!", True), ("OK, agreed", True), ("I\u2019ll take it", True), ("no deal", False), ("I do not accept", False), ("hm", False)],
)
def test_accepting_without_a_number(text: str, yes: bool) -> None:
    assert accepts(text) is yes


SELLER = Seller(ask=100.0, limit=60.0, pace=0.5, patience=4)


def test_the_seller_comes_down_at_a_serious_offer() -> None:
    """Half of the way from 100 to 60 is 80, then 70, then 65, then 62 (62.5 rounded down); it never goes below 60."""
    seller, asks = SELLER, []
    for _ in range(9):
        seller = seller.hears(40.0)
        asks.append(seller.ask)
    assert asks[:4] == [80.0, 70.0, 65.0, 62.0]
    assert asks[-1] == 60.0
    assert SELLER.hears(40.0).patience == 3


def test_an_insult_moves_nothing_and_costs_two() -> None:
    assert SELLER.hears(29.99) == Seller(ask=100.0, limit=60.0, pace=0.5, patience=2)
    assert SELLER.hears(30.0).ask == 80.0


def facing(seller: Seller = SELLER, worth: float = 90.0, **keywords: int) -> Negotiation:
    env = Negotiation(**keywords)
    env.reset(seed=0)
    env.seller, env.worth = seller, worth
    return env


def test_a_deal_at_the_sellers_next_price() -> None:
    """40 brings 80; the next price would be 70, so an offer of 72 buys at 72: (90 - 72) / (90 - 60) = 0.6."""
    env = facing()
    observation, reward, terminated, truncated, info = env.step("I offer 40")
    assert observation == "40 is too little. I could take 80 dollars."
    assert (reward, terminated, truncated, info["observation_role"]) == (0.0, False, False, "user")
    assert info["messages"] == [{"role": "user", "content": observation}]
    observation, reward, terminated, truncated, info = env.step("<think>its limit may be 60</think>Would you do 72?")
    assert (observation, reward, terminated, truncated) == ("", pytest.approx(0.6), True, False)
    assert info["reward"] == {"bought": 1.0, "surplus_share": pytest.approx(0.6)}
    assert (info["answer"], info["stop_reason"]) == ("72", "answer")


def test_accepting_and_overpaying() -> None:
    """At 100 what is worth 90 loses 10 of 30; nobody pays more than was asked; the loss is at most -1."""
    assert facing().step("I accept.")[1] == pytest.approx(-1 / 3)
    assert facing().step("I offer 500")[1] == pytest.approx(-1 / 3)
    assert facing(worth=61.0).step("Deal")[1] == -1.0


def test_walking_away_and_being_left() -> None:
    observation, reward, terminated, _, info = facing().step("No deal, goodbye.")
    assert (observation, reward, terminated, info["stop_reason"], info["reward"]["bought"]) == ("", 0.0, True, "left", 0.0)
    env = facing()
    assert env.step("I offer 5")[0] == "5 is an insult. I still ask 100 dollars."
    *_, terminated, _, info = env.step("I offer 6")
    assert (terminated, info["stop_reason"]) == (True, "seller_left")
    assert facing().step("Before I leave: I offer 40")[2] is False, "an offer counts even where leaving is mentioned"


def test_words_near_the_end() -> None:
    assert facing(Seller(80.0, 60.0, 0.5, 2)).step("50")[0] == "My last word: 70 dollars."
    assert facing(Seller(60.0, 60.0, 0.5, 3)).step("50")[0] == "I cannot go lower than 60 dollars."


def test_a_turn_that_says_no_price() -> None:
    env = facing()
    observation, *_, info = env.step("Nice table.")
    assert observation == "I ask 100 dollars. What do you offer?"
    assert info["errors"] == [observation]
    assert env.seller == SELLER


def test_the_talk_is_broken_off_after_max_turns() -> None:
    env = facing(max_turns=2)
    env.step("hm")
    assert env.step("hm")[1:4] == (0.0, False, True)


def test_the_opening_tells_worth_and_price_but_not_the_limit() -> None:
    """For 200 seeds: limit < worth < ask, as the text says; and the limit is in none of its numbers."""
    env = Negotiation()
    openings = set()
    for seed in range(200):
        text, info = env.reset(seed=seed)
        openings.add(text)
        assert env.seller.limit < env.worth < env.seller.ask
        assert [float(n) for n in re.findall(r"\d+", text)] == [env.worth, env.seller.ask]
        assert 40 <= env.seller.limit <= 160
        assert info["task_id"].startswith("negotiation-")
    assert len(openings) > 150


@settings(max_examples=80, deadline=None)
@given(st.text() | st.lists(st.sampled_from(["80", "no", " offer ", "not", "$", ".", ",", "%", "deal", "1,000", "\u2019", "leave"]), max_size=12).map("".join))
def test_any_text_has_a_reply(text: str) -> None:
    env = facing()
    observation, reward, terminated, truncated, _ = env.step(text)
    assert -1.0 <= reward <= 1.0
    assert bool(observation) is not (terminated or truncated)


def test_a_range_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="low=50, high=40"):
        Negotiation(50, 40)
