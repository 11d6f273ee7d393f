"""Recorded web searches as a backend: what a search engine once answered, found again by the query. Reproducible, offline."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from arpo_env.tools.search_index import Fingerprint, SearchHit, words_of

_PREFIX = re.compile(r"\s*search query:\s*", re.IGNORECASE)
_TAG = re.compile(r"</?(search|python|result|think|answer)>")
_PAGE = re.compile(r"^Page \d+:[ \t]*", re.MULTILINE)
_NOTHING = "No search results found."

_log = logging.getLogger(__name__)


class RecordedSearch:
    """Answers from a record ``query -> "Page 1: ...\\nPage 2: ..."``; each page is a hit.

    A query is looked up by its words (case, punctuation and spacing do not count); failing that, the nearest recorded query answers, if it is near enough: the
    similarity is the idf-weighted Jaccard index of the two sets of words, ``sum of idf over the words of both / sum of idf over the words of either``, with
    ``idf(word) = ln(1 + N / n)`` over the ``N`` recorded queries, ``n`` of which hold the word (a word that none holds counts as ``n = 1``). 1 means the same
    words, 0 none in common. Of equally near ones the first in the record answers. Below ``min_similarity`` there is no result: the record does not know,
    and a wrong page would teach the policy that it does.

    Args:
        record: query -> recorded text.
        min_similarity: in (0, 1]; 1 takes the same words only. The default lets a rephrased question through and keeps another subject out.
    """

    def __init__(self, record: Mapping[str, str], *, min_similarity: float = 0.4):
        if not 0 < min_similarity <= 1:
            raise ValueError(f"min_similarity must be in (0, 1], got {min_similarity!r}")
        self.min_similarity = min_similarity
        self.dropped: list[str] = []
        """Recorded queries that were left out: empty ones, those that hold tags of a transcript (an example of a prompt was once executed), and later
        ones with the same words as an earlier one."""
        self._queries: list[str] = []
        self._pages: list[list[str]] = []
        self._exact: dict[tuple[str, ...], int] = {}
        self._holders: dict[str, list[int]] = {}
        for query, text in record.items():
            self._add(query, text)
        fingerprint = Fingerprint()
        for query, pages in zip(self._queries, self._pages, strict=True):
            fingerprint.add(query, *pages)
        self._settings = {"backend": "recorded", "record": str(fingerprint), "min_similarity": min_similarity}
        if not self._queries:
            raise ValueError(f"a record needs at least one usable query, got {len(record)} entries")
        count = len(self._queries)
        self._idf = {word: math.log(1 + count / len(holders)) for word, holders in self._holders.items()}
        self._unknown_idf = math.log(1 + count)
        self._weights = [sum(self._idf[word] for word in set(words_of(query))) for query in self._queries]
        if self.dropped:
            _log.info("left out %d of %d recorded queries: %s", len(self.dropped), len(record), [query[:60] for query in self.dropped])

    @classmethod
    def from_json(cls, path: str | os.PathLike[str], *, min_similarity: float = 0.4) -> RecordedSearch:
        """The record in a JSON file: one object, query -> text. A leading "search query:" is not part of a query. ``ValueError`` for another layout."""
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        if not isinstance(record, dict) or not all(isinstance(text, str) for text in record.values()):
            raise ValueError(f"{os.fspath(path)}: expected one JSON object of query -> text, got {type(record).__name__}")
        return cls(record, min_similarity=min_similarity)

    def _add(self, recorded: str, text: str) -> None:
        query = _PREFIX.sub("", recorded, count=1) if _PREFIX.match(recorded) else recorded
        key = tuple(words_of(query))
        if not key or key in self._exact or _TAG.search(query):
            self.dropped.append(recorded)
            return
        position = self._exact[key] = len(self._queries)
        self._queries.append(query)
        self._pages.append(_pages(text))
        for word in set(key):
            self._holders.setdefault(word, []).append(position)

    def __len__(self) -> int:
        return len(self._queries)

    def answers(self) -> Iterator[tuple[str, list[SearchHit]]]:
        """Every recorded query with its pages."""
        for query, pages in zip(self._queries, self._pages, strict=True):
            yield query, _hits(pages, 1.0)

    def nearest(self, query: str) -> tuple[str, float]:
        """The recorded query that would answer ``query``, and its similarity, below ``min_similarity`` too; ``("", 0.0)`` with no word in common."""
        position, similarity = self._nearest(query)
        return (self._queries[position], similarity) if similarity else ("", 0.0)

    def _nearest(self, query: str) -> tuple[int, float]:
        words = words_of(query)
        exact = self._exact.get(tuple(words))
        if exact is not None:
            return exact, 1.0
        common: dict[int, float] = {}
        weight = 0.0
        for word in sorted(set(words)):  # a stated order: sums of floats depend on it
            weight += self._idf.get(word, self._unknown_idf)
            for position in self._holders.get(word, ()):
                common[position] = common.get(position, 0.0) + self._idf[word]
        scored = ((shared / (weight + self._weights[position] - shared), -position) for position, shared in common.items())
        similarity, minus = max(scored, default=(0.0, 0))
        return -minus, similarity

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The first ``k`` pages recorded for ``query`` or for the nearest recorded query; none when nothing is near enough or nothing was found then."""
        position, similarity = self._nearest(query)
        if similarity < self.min_similarity:
            return []
        return _hits(self._pages[position][: max(0, k)], similarity)

    def settings(self) -> Mapping[str, Any]:
        """The kind of back end, a fingerprint of the record, and the threshold."""
        return self._settings

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedSearch:
        return self


def _hits(pages: list[str], score: float) -> list[SearchHit]:
    return [SearchHit(title="", text=page, url="", score=score, rank=rank, source="recorded") for rank, page in enumerate(pages, 1)]


def _pages(text: str) -> list[str]:
    """The pages of a recorded answer without their numbers."""
    if text.strip() == _NOTHING:
        return []
    return [page.strip() for page in _PAGE.split(text) if page.strip()]
