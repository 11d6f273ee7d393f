"""Indexes over one's own documents: ``KeywordIndex`` (pure Python, for small corpora and tests) and ``TantivyIndex`` (extra ``search``)."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One found document."""

    title: str
    text: str
    url: str
    score: float
    """Larger is better; comparable within one answer only."""
    rank: int
    """1 for the best."""


class SearchBackend(Protocol):
    """What can be searched. Implementations are immutable once built: threads, episodes and forks share one."""

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` hits or fewer, best first, the same ones in the same order for the same query. No query raises."""
        ...


class SearchUnavailable(RuntimeError):
    """A backend over a network could not be asked (down, rate limit, deadline): not the same as having found nothing. The environment tries again."""


@dataclass(frozen=True, slots=True)
class Document:
    """What an index holds."""

    text: str
    title: str = ""
    url: str = ""


def read_documents(documents: Iterable[Mapping[str, Any] | Document]) -> list[Document]:
    """The documents, checked: mappings with ``text`` and optional ``title`` and ``url``, all strings. ``ValueError`` names the first that does not fit."""
    found: list[Document] = []
    for position, item in enumerate(documents):
        fields = {"text": item.text, "title": item.title, "url": item.url} if isinstance(item, Document) else item
        if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str):
            raise ValueError(f"document {position}: expected a mapping with a string 'text' and optional 'title' and 'url', got {item!r:.200}")
        values = {name: fields.get(name) or "" for name in ("text", "title", "url")}
        for name, value in values.items():
            if not isinstance(value, str):
                raise ValueError(f"document {position}: {name!r} must be a string, got {type(value).__name__} {value!r:.80}")
        found.append(Document(**values))
    if not found:
        raise ValueError("an index needs at least one document, got none")
    return found


def words_of(text: str) -> list[str]:
    """The words of a text, lower case: runs of letters, digits and underscores in any script."""
    return re.findall(r"\w+", text.lower())


class KeywordIndex:
    """BM25 over titles and texts in memory. ``score = sum over query words of idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))``
    with ``idf = ln(1 + (N - n + 0.5) / (n + 0.5))`` (Robertson and Zaragoza 2009, in the form that Lucene uses, so that no idf is negative).
    Equal scores: in the order of the documents.
    """

    def __init__(self, documents: Iterable[Mapping[str, Any] | Document], *, k1: float = 1.2, b: float = 0.75):
        self._documents = read_documents(documents)
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
        return [_hit(self._documents[position], score, rank) for rank, (position, score) in enumerate(best, 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> KeywordIndex:
        return self


class TantivyIndex:
    """BM25 by tantivy (``pip install 'arpo[search]'``): 200,000 documents in milliseconds a query. Make one with :meth:`build` or :meth:`open`.

    Queries are read as words, any of which may match; quotes, colons, signs and ``AND``/``OR``/``NOT`` have no meaning, so no query is malformed.
    Equal scores: in the order of the documents. Safe in threads and after ``os.fork``.
    """

    def __init__(self, index: Any, path: str | None):
        self._index, self._path = index, path
        self._searcher = index.searcher()

    @classmethod
    def build(cls, documents: Iterable[Mapping[str, Any] | Document], path: str | os.PathLike[str] | None = None) -> TantivyIndex:
        """An index of ``documents``, in memory, or on disk in the directory ``path``, which must be new or empty (``FileExistsError``)."""
        tantivy = _tantivy()
        found = read_documents(documents)
        builder = tantivy.SchemaBuilder()
        for name in ("title", "text"):
            builder.add_text_field(name, stored=True)
        builder.add_text_field("url", stored=True, tokenizer_name="raw")
        builder.add_unsigned_field("position", stored=True)
        where = None if path is None else os.fspath(path)
        if where is not None:
            os.makedirs(where, exist_ok=True)
            if os.listdir(where):
                raise FileExistsError(f"{where!r} is not empty: an index is built into a new directory; use TantivyIndex.open to read one")
        index = tantivy.Index(builder.build(), path=where)
        writer = index.writer(num_threads=1)  # with two threads, equal scores come in another order in every build
        for position, document in enumerate(found):
            writer.add_document(tantivy.Document(title=document.title, text=document.text, url=document.url, position=position))
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        return cls(index, where)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TantivyIndex:
        """The index that :meth:`build` wrote to ``path``. ``FileNotFoundError`` when there is none."""
        tantivy = _tantivy()
        where = os.fspath(path)
        if not os.path.isdir(where) or not tantivy.Index.exists(where):
            raise FileNotFoundError(f"no tantivy index in {where!r}; make one with TantivyIndex.build(documents, path)")
        return cls(tantivy.Index.open(where), where)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` documents that share a word with ``query``."""
        plain = " ".join(words_of(query))
        if not plain or k < 1:
            return []
        parsed, _ = self._index.parse_query_lenient(plain, ["title", "text"])
        found = []
        for score, address in self._searcher.search(parsed, limit=2 * k + 10).hits:  # more than k: ties at the edge are settled below
            fields = self._searcher.doc(address).to_dict()
            found.append((-score, fields["position"][0], fields))
        found.sort(key=lambda item: item[:2])
        documents = ((Document(*(fields[name][0] for name in ("text", "title", "url"))), -minus) for minus, _, fields in found[:k])
        return [_hit(document, score, rank) for rank, (document, score) in enumerate(documents, 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> TantivyIndex:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        if self._path is None:
            raise TypeError("an index in memory cannot be pickled; build it into a directory, then it is opened anew on the other side")
        return TantivyIndex.open, (self._path,)


def _hit(document: Document, score: float, rank: int) -> SearchHit:
    return SearchHit(title=document.title, text=document.text, url=document.url, score=score, rank=rank)


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise ImportError("TantivyIndex needs tantivy: pip install 'arpo[search]' (KeywordIndex needs nothing)") from error
    return tantivy
