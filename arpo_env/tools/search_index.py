"""What a search back end is, what it finds, and ``KeywordIndex``: one's own documents searched in pure Python, for small corpora and tests."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One found document."""

    title: str
    text: str
    url: str = ""
    score: float = 0.0
    """Larger is better; comparable within one answer only."""
    rank: int = 0
    """1 for the best."""
    source: str = ""
    """Who found it: the back end, with the engine behind it where it says so ("searxng: google"). For people and logs; the policy does not read it."""


class SearchBackend(Protocol):
    """What can be searched. Implementations are immutable once built: threads, episodes and forks share one.

    To be cached it also needs ``settings() -> Mapping[str, Any]``: what its answers depend on beside the query and ``k``, as JSON values, without secrets.
    One whose answers change by themselves has ``deterministic = False``; one that tries again itself, under a deadline of its own, has ``retries = 0``.
    """

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` hits or fewer, best first, the same ones in the same order for the same query. No query raises."""
        ...


class SearchUnavailable(RuntimeError):
    """A backend over a network could not be asked (down, rate limit, deadline): not the same as having found nothing. The environment tries again."""


class SearchRefused(RuntimeError):
    """A backend over a network said no (API key, credits, address, the form of the query): trying again changes nothing, somebody has to look."""


@dataclass(frozen=True, slots=True)
class Document:
    """What an index holds."""

    text: str
    title: str = ""
    url: str = ""


def read_documents(documents: Iterable[Mapping[str, Any] | Document]) -> Iterator[Document]:
    """The documents one by one, checked: mappings with ``text`` and optional ``title`` and ``url``, all strings. ``ValueError`` names the first that does
    not fit, or says that there was none."""
    position = -1
    for position, item in enumerate(documents):
        fields = {"text": item.text, "title": item.title, "url": item.url} if isinstance(item, Document) else item
        if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str):
            raise ValueError(f"document {position}: expected a mapping with a string 'text' and optional 'title' and 'url', got {item!r:.200}")
        values = {name: fields.get(name) or "" for name in ("text", "title", "url")}
        for name, value in values.items():
            if not isinstance(value, str):
                raise ValueError(f"document {position}: {name!r} must be a string, got {type(value).__name__} {value!r:.80}")
        yield Document(**values)
    if position < 0:
        raise ValueError("an index needs at least one document, got none")


class Fingerprint:
    """SHA-256 of texts in their order, where they begin and end included: the same for the same documents alone."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *texts: str) -> None:
        for text in texts:
            raw = text.encode("utf-8", "surrogatepass")
            self._hash.update(len(raw).to_bytes(8, "big") + raw)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def fingerprint_of(documents: Iterable[Document]) -> str:
    """The fingerprint of documents in their order."""
    fingerprint = Fingerprint()
    for document in documents:
        fingerprint.add(document.title, document.text, document.url)
    return str(fingerprint)


def hit_of(document: Document, score: float, rank: int, source: str) -> SearchHit:
    """``document`` as a hit."""
    return SearchHit(title=document.title, text=document.text, url=document.url, score=score, rank=rank, source=source)


def words_of(text: str) -> list[str]:
    """The words of a text, lower case: runs of letters, digits and underscores in any script."""
    return re.findall(r"\w+", text.lower())


class KeywordIndex:
    """BM25 over titles and texts in memory. ``score = sum over query words of idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))``
    with ``idf = ln(1 + (N - n + 0.5) / (n + 0.5))`` (Robertson and Zaragoza 2009, in the form that Lucene uses, so that no idf is negative).
    Equal scores: in the order of the documents.
    """

    def __init__(self, documents: Iterable[Mapping[str, Any] | Document], *, k1: float = 1.2, b: float = 0.75):
        self._documents = list(read_documents(documents))
        self._postings: dict[str, list[tuple[int, int]]] = {}
        lengths = []
        for position, document in enumerate(self._documents):
            counts = Counter(words_of(f"{document.title} {document.text}"))
            lengths.append(counts.total())
            for word, count in counts.items():
                self._postings.setdefault(word, []).append((position, count))
        mean = sum(lengths) / len(lengths) or 1.0
        self._k1 = k1
        self._norms = [k1 * (1 - b + b * length / mean) for length in lengths]
        self._settings = {"backend": "keyword index", "documents": fingerprint_of(self._documents), "k1": k1, "b": b}

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` documents that share a word with ``query``."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words_of(query)):
            postings = self._postings.get(word, [])
            idf = math.log(1 + (len(self._documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for position, count in postings:
                scores[position] = scores.get(position, 0.0) + idf * count * (self._k1 + 1) / (count + self._norms[position])
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: max(0, k)]
        return [hit_of(self._documents[position], score, rank, "keyword index") for rank, (position, score) in enumerate(best, 1)]

    def settings(self) -> Mapping[str, Any]:
        """The kind of index, a fingerprint of the documents, and the two constants."""
        return self._settings

    def __deepcopy__(self, memo: dict[int, Any]) -> KeywordIndex:
        return self
