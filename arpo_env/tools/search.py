"""The search tool: a query in, numbered passages out. What is searched is a backend, an object with one method."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from arpo_env.sandbox.text import shorten
from arpo_env.tools.base import Tool, ToolResult
from arpo_env.tools.cache import CachedTool, ToolCache, to_json
from arpo_env.tools.search_index import Document, KeywordIndex, SearchBackend, SearchHit, SearchRefused, SearchUnavailable
from arpo_env.tools.search_recorded import RecordedSearch
from arpo_env.tools.search_tantivy import TantivyIndex

__all__ = [
    "Document",
    "KeywordIndex",
    "RecordedSearch",
    "SearchBackend",
    "SearchHit",
    "SearchRefused",
    "SearchTool",
    "SearchUnavailable",
    "TantivyIndex",
    "clean_query",
    "import_searches",
]


_log = logging.getLogger(__name__)


class SearchTool(Tool):
    """Searches ``backend``. Stateless: all episodes and forks share this instance and its index.

    Nothing found is a success with the text "No results found."; an empty query is ``bad_arguments``; a backend that raises :class:`SearchUnavailable` is
    ``unavailable``, one that raises :class:`SearchRefused` an ``exception`` that is logged as an error. ``ToolResult.data`` holds the hits.
    """

    name = "search"
    description = "Searches for a query and returns the best passages."
    fork_support = "shared"
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for, in a few words or a question"}},
        "required": ["query"],
    }

    def __init__(self, backend: SearchBackend, *, top_k: int = 5, max_chars: int = 4000):
        """Args:
        backend: what is searched.
        top_k: passages in one answer at most.
        max_chars: characters of one answer at most; each passage gets an equal share of them.
        """
        if not callable(getattr(backend, "search", None)):
            raise TypeError(f"backend must have a method search(query, k), got {type(backend).__name__}")
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if max_chars < 100 * top_k:
            raise ValueError(f"max_chars must be at least 100 a passage ({100 * top_k}), got {max_chars}")
        self.backend, self.top_k, self.max_chars = backend, top_k, max_chars
        self.deterministic, self.retries = getattr(backend, "deterministic", self.deterministic), getattr(backend, "retries", self.retries)

    def call(self, **arguments: Any) -> ToolResult:
        """The best passages for ``query`` as numbered lines."""
        query = clean_query(arguments["query"])
        if not query:
            return ToolResult.failure("bad_arguments", "The query is empty: nothing was searched. Write what to search for.")
        try:
            hits = self.backend.search(query, self.top_k)[: self.top_k]
        except SearchUnavailable as error:
            return ToolResult.failure("unavailable", f"Search is not available now: {error}")
        except SearchRefused as error:
            _log.error("search refused: %s", error)
            return ToolResult.failure("exception", f"The search service refused this search: {error}")
        if not all(isinstance(hit, SearchHit) for hit in hits):
            raise TypeError(f"{type(self.backend).__name__}.search must return a list of SearchHit, got {hits!r:.80}")
        return self.result(hits)

    def normalised(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments as they are searched for: queries that differ in spacing or Unicode form alone have one answer in a cache."""
        return {name: clean_query(value) for name, value in arguments.items()}

    def settings(self) -> Mapping[str, Any]:
        """The two limits and the settings of the back end. ``TypeError`` for a back end that does not say what its answers depend on."""
        if not callable(getattr(self.backend, "settings", None)):
            raise TypeError(
                f"{type(self.backend).__name__} needs a method settings() -> Mapping that says what its answers depend on; without it they cannot be cached"
            )
        return {"top_k": self.top_k, "max_chars": self.max_chars, "backend": {"type": type(self.backend).__name__, **self.backend.settings()}}  # type: ignore[attr-defined]

    def result(self, hits: Sequence[SearchHit]) -> ToolResult:
        """What the tool answers when ``hits`` were found."""
        return ToolResult(text=self._render(hits) or "No results found.", data=tuple(hits))

    def _render(self, hits: Sequence[SearchHit]) -> str:
        share = self.max_chars // max(1, len(hits)) - 60  # 60: the number, the separators and the notice of a cut
        return "\n".join(f"{number}. {shorten(_line(hit), share)}" for number, hit in enumerate(hits, 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> SearchTool:
        return self


def clean_query(query: str) -> str:
    """``query`` in Unicode form NFC with control characters, lone surrogates and runs of white space as single spaces, at most 1,000 characters."""
    printable = "".join(c if c.isprintable() else " " for c in unicodedata.normalize("NFC", query[:10_000]))
    return " ".join(printable.split())[:1000]


def import_searches(path: str | os.PathLike[str], cache: ToolCache, tool: SearchTool) -> int:
    """Store the searches recorded in a JSON file (``query -> "Page 1: ...\\nPage 2: ..."``) as answers of ``tool``, and return how many.

    ``CachedTool(tool, cache)`` then answers these queries in the tool's own words. Recorded "no results" are left out: the recorder wrote the same for an
    error. So are the queries that :attr:`RecordedSearch.dropped` names.
    """
    if cache.mode != "record":
        raise ValueError(f"importing needs a cache in mode 'record', got {cache.mode!r}")
    count, cached = 0, CachedTool(tool, cache)
    for query, hits in RecordedSearch.from_json(path).answers():
        if hits:
            cache.put(cached.key({"query": query}), to_json(tool.result(hits[: tool.top_k])))
            count += 1
    return count


def _line(hit: SearchHit) -> str:
    """The hit on one line: title, text, address."""
    text = " ".join(hit.text.split())
    start = f"{hit.title}: " if hit.title and not text.startswith(hit.title) else ""
    end = f" ({hit.url})" if hit.url else ""
    return f"{start}{text}{end}"
