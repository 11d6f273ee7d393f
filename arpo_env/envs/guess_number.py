"""``arpo/GuessNumber-v0``: guess a hidden number; each wrong guess is answered "higher" or "lower". The toy for tests of algorithms."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np

from arpo_env.envs.dialogue import DialogueEnv, Reply

_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w]|\.\d)")


class GuessNumber(DialogueEnv):
    """The policy guesses a whole number from ``low`` to ``high``; the last whole number of a turn is the guess.

    The reward of a hit is ``1 - (guesses - 1) / max_turns``: 1 for the first guess, 1 / max_turns for the last. No hit in ``max_turns`` turns gives 0.
    A turn without a number in the range costs a turn. With binary search ``ceil(log2(high - low + 2))`` guesses always suffice.
    """

    parts: ClassVar[tuple[str, ...]] = ("found", "speed")

    def __init__(self, low: int = 1, high: int = 100, max_turns: int = 10) -> None:
        super().__init__(max_turns)
        if not low < high:
            raise ValueError(f"low must be below high, got low={low}, high={high}")
        self.low, self.high = low, high
        self.number = low

    def begin(self, rng: np.random.Generator) -> tuple[str, str]:
        self.number = int(rng.integers(self.low, self.high + 1))
        return f"guess-number-{self.number}", f"Guess my number from {self.low} to {self.high}. I answer higher or lower."

    def reply(self, heard: str) -> Reply:
        numbers = _INTEGER.findall(heard)
        if not numbers or not self.low <= int(numbers[-1]) <= self.high:
            problem = f"say one number from {self.low} to {self.high}"
            return Reply(problem, error=problem)
        guess = int(numbers[-1])
        if guess != self.number:
            return Reply("higher" if self.number > guess else "lower")
        speed = 1.0 - (self.turn - 1) / self.max_turns
        return Reply(reward=speed, parts={"found": 1.0, "speed": speed}, answer=str(guess))
