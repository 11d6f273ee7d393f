"""Finds stop strings in the text of a turn while it is sampled, decoding a short tail of its ids now and then instead of all of them always.

Decoding is not a concatenation of the texts of single tokens: a character can be spread over several tokens, a token can end in the middle of a stop
string, some decoders put spaces between tokens or drop the first one. So a tail long enough to hold any stop string is decoded, and what it shows is
confirmed on the text of the whole turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from arpo_algo.tokenizing import decode

_SLACK = 8
"""Characters of a decoded tail that may differ from the whole text: up to three replacement characters of a split UTF-8 sequence at each end, a leading
space that some decoders drop."""


class StopStrings:
    """A set of stop strings under one decoder, shared by all turns that use it. ``decode`` gives the text of sampled ids."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        if "" in stops or not stops:
            raise ValueError(f"expected stop strings that are not empty, got {tuple(stops)}")
        self.decode = decode
        self.stops = tuple(stops)
        self.reach = max(map(len, stops)) + _SLACK
        self._last = {stop[-1] for stop in stops}
        self._may_end: dict[int, bool] = {}

    def may_end(self, token: int) -> bool:
        """Whether the token can be the one that completes a stop string: its text has the last character of one, or may have.

        It may where its text alone is part of a character, and where a stop string ends in white space, which decoders add and drop between tokens.
        """
        if token not in self._may_end:
            text = self.decode([token])
            self._may_end[token] = "�" in text or any(last in text or last.isspace() for last in self._last)
        return self._may_end[token]

    def found(self, ids: list[int]) -> str | None:
        """The stop string in the text of ``ids`` that ends first, then the one listed first."""
        text = self.decode(ids)
        ends = [(text.index(stop) + len(stop), rank) for rank, stop in enumerate(self.stops) if stop in text]
        return self.stops[min(ends)[1]] if ends else None


class StopDetector:
    """Watches one turn. ``check`` is called after each sampled id."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._start = 0
        self._limit = 2 * strings.reach

    def check(self, ids: list[int]) -> str | None:
        """The stop string that the last of the turn's sampled ``ids`` completed, if any."""
        strings = self._strings
        if not strings.may_end(ids[-1]):
            return None
        stop = strings.found(ids[self._start :])
        if stop is not None and self._start:
            stop = strings.found(ids)
        if stop is not None:
            return stop
        if len(ids) - self._start >= self._limit:
            self._advance(ids)
        return None

    def _advance(self, ids: list[int]) -> None:
        """Moves the start of the tail forward if what is left reaches back far enough; where tokens have little text of their own, tries again later."""
        start = len(ids) - self._strings.reach
        if len(self._strings.decode(ids[start:])) >= self._strings.reach:
            self._start = start
            self._limit = 2 * self._strings.reach
        else:
            self._limit *= 2


class Endings:
    """Why turns end, the same for every policy: an end-of-sequence id, else a stop string that the last token completes, else the limit."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int]) -> None:
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._strings: dict[tuple[str, ...], StopStrings] = {}

    def detector(self, stop: tuple[str, ...]) -> StopDetector | None:
        """What watches one turn for ``stop``; None where there is nothing to look for."""
        if not stop:
            return None
        if stop not in self._strings:
            self._strings[stop] = StopStrings(self._decode, stop)
        return StopDetector(self._strings[stop])

    def of(self, ids: list[int], detector: StopDetector | None, max_new_tokens: int) -> tuple[Literal["eos", "stop", "length"] | None, str | None]:
        """Why the turn of the sampled ``ids`` ends with the last of them, and the stop string where one does; None where it goes on."""
        if ids[-1] in self._eos_ids:
            return "eos", None
        if detector is not None and (stop := detector.check(ids)) is not None:
            return "stop", stop
        return ("length" if len(ids) >= max_new_tokens else None), None

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)
