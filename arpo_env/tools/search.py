"""The search tool: a query in, numbered passages out. What is searched is a backend, an object with one method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arpo_env.sandbox.text import shorten
from arpo_env.tools.base import Tool, ToolResult
from arpo_env.tools.search_index import Document, KeywordIndex, SearchBackend, SearchHit, SearchUnavailable, TantivyIndex
from arpo_env.tools.search_recorded import RecordedSearch

__all__ = ["Document", "KeywordIndex", "RecordedSearch", "SearchBackend", "SearchHit", "SearchTool", "SearchUnavailable", "TantivyIndex", "clean_query"]


class SearchTool(Tool):
    """Searches ``backend``. Stateless: all episodes and forks share this instance and its index.

    Nothing found is a success with the text "No results found."; an empty query is ``bad_arguments``; a backend that raises :class:`SearchUnavailable` is
    ``unavailable``. ``ToolResult.data`` holds the hits.
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

    def call(self, **arguments: Any) -> ToolResult:
        """The best passages for ``query`` as numbered lines."""
        query = clean_query(arguments["query"])
        if not query:
            return ToolResult.failure("bad_arguments", "The query is empty: nothing was searched. Write what to search for.")
        try:
            hits = self.backend.search(query, self.top_k)[: self.top_k]
        except SearchUnavailable as error:
            return ToolResult.failure("unavailable", f"Search is not available now: {error}")
        return ToolResult(text=self._render(hits) or "No results found.", data=tuple(hits))

    def _render(self, hits: Sequence[SearchHit]) -> str:
        share = self.max_chars // max(1, len(hits)) - 60  # 60: the number, the separators and the notice of a cut
        return "\n".join(f"{number}. {shorten(_line(hit), share)}" for number, hit in enumerate(hits, 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> SearchTool:
        return self


def clean_query(query: str) -> str:
    """``query`` with control characters, lone surrogates and runs of white space as single spaces, at most 1,000 characters."""
    printable = "".join(c if c.isprintable() else " " for c in query[:10_000])
    return " ".join(printable.split())[:1000]


def _line(hit: SearchHit) -> str:
    """The hit on one line: title, text, address."""
    text = " ".join(hit.text.split())
    start = f"{hit.title}: " if hit.title and not text.startswith(hit.title) else ""
    end = f" ({hit.url})" if hit.url else ""
    return f"{start}{text}{end}"
