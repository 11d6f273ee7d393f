"""Search services over HTTP: ``SearxNG``, ``Serper``, ``Tavily``, and ``RetrieverServer`` for a retriever of one's own (the protocol of Search-R1).

Each is a back end of ``SearchTool``. What they find changes from day to day: for results that can be repeated, put a ``CachedTool`` around the tool.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from arpo_env.tools._http import HttpClient, JsonRequest
from arpo_env.tools.search_index import SearchHit, SearchUnavailable

__all__ = ["HttpClient", "RetrieverServer", "SearxNG", "Serper", "Tavily"]


class SearxNG:
    """A SearXNG instance, which asks many engines at once. It must offer JSON: ``search.formats`` in its ``settings.yml`` (most public ones do not).

    No results while engines failed is :class:`SearchUnavailable`: nobody knows whether there were any.

    Args:
        url: of the instance, such as ``http://localhost:8080``.
        engines: names of engines to ask; empty: those that the instance is set to.
        language: such as ``en``; ``auto``: the instance guesses it from the query.
        http: limits; shared by the back ends that it is given to.
    """

    deterministic, retries = False, 0

    def __init__(self, url: str, *, engines: tuple[str, ...] = (), language: str = "auto", http: HttpClient | None = None):
        self.url, self.engines, self.language = f"{check_url(url).rstrip('/')}/search", tuple(engines), language
        self.http = http or HttpClient()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The first ``k`` results of the first page."""
        fields = {"q": query, "format": "json", "language": self.language, **({"engines": ",".join(self.engines)} if self.engines else {})}
        hint = "an instance that does not offer JSON answers 403: add json to search.formats in its settings.yml"
        answer = self.http.json(JsonRequest("SearXNG", f"{self.url}?{urllib.parse.urlencode(fields, errors='replace')}", hint=hint))
        rows = rows_of(answer, "results", "SearXNG")
        if not rows and answer.get("unresponsive_engines"):
            raise SearchUnavailable(f"SearXNG: nothing found, but engines failed: {answer['unresponsive_engines']!r:.200}")
        return web_hits(rows, k, ("title", "url", "content"), "searxng", engine="engine")

    def settings(self) -> Mapping[str, Any]:
        """The address and the two choices."""
        return {"backend": "searxng", "url": self.url, "engines": list(self.engines), "language": self.language}


class Serper:
    """Google results by serper.dev.

    Args:
        api_key: by default from the environment variable ``SERPER_API_KEY``. It appears in no message, setting or key of a cache.
        country: two letters, such as ``us``.
        language: such as ``en``.
        url: of the service.
        http: limits.
    """

    deterministic, retries = False, 0

    def __init__(
        self,
        api_key: str | None = None,
        *,
        country: str = "us",
        language: str = "en",
        url: str = "https://google.serper.dev/search",
        http: HttpClient | None = None,
    ):
        self._key = api_key_of("Serper", api_key, "SERPER_API_KEY")
        self.url, self.country, self.language = check_url(url), country, language
        self.http = http or HttpClient()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The first ``k`` organic results."""
        body = {"q": query, "num": k, "gl": self.country, "hl": self.language}
        request = JsonRequest("Serper", self.url, body, {"X-API-KEY": self._key}, self._key, "look at SERPER_API_KEY and the account's credits")
        answer = self.http.json(request)
        if isinstance(answer, dict) and "searchParameters" in answer:
            answer.setdefault("organic", [])  # it is left out where Google found nothing
        return web_hits(rows_of(answer, "organic", "Serper"), k, ("title", "link", "snippet"), "serper")

    def settings(self) -> Mapping[str, Any]:
        """The address and the two choices, without the key."""
        return {"backend": "serper", "url": self.url, "country": self.country, "language": self.language}


class Tavily:
    """Results of tavily.com, whose texts are extracts rather than snippets. It takes 400 characters of a query and gives 20 results at most.

    Args:
        api_key: by default from the environment variable ``TAVILY_API_KEY``. It appears in no message, setting or key of a cache.
        depth: ``basic`` or ``advanced``, which costs twice the credits.
        url: of the service.
        http: limits.
    """

    deterministic, retries = False, 0

    def __init__(self, api_key: str | None = None, *, depth: str = "basic", url: str = "https://api.tavily.com/search", http: HttpClient | None = None):
        self._key = api_key_of("Tavily", api_key, "TAVILY_API_KEY")
        self.url, self.depth = check_url(url), depth
        self.http = http or HttpClient()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` results, or 20."""
        body = {"query": query[:400], "max_results": min(k, 20), "search_depth": self.depth}  # more of either is answered 400
        request = JsonRequest("Tavily", self.url, body, {"Authorization": f"Bearer {self._key}"}, self._key, "look at TAVILY_API_KEY and the account's plan")
        return web_hits(rows_of(self.http.json(request), "results", "Tavily"), k, ("title", "url", "content"), "tavily")

    def settings(self) -> Mapping[str, Any]:
        """The address and the depth, without the key."""
        return {"backend": "tavily", "url": self.url, "depth": self.depth}


class RetrieverServer:
    """A retriever that speaks the protocol of Search-R1: ``POST {"queries": [q], "topk": k, "return_scores": true}`` is answered by
    ``{"result": [[{"document": {"contents": "title\\ntext"}, "score": 0.5}, ...]]}``.

    Args:
        url: of the endpoint, such as ``http://127.0.0.1:8000/retrieve``.
        corpus: what the server searches, a name of your choice. It tells caches apart when the server gets other documents.
        http: limits.
    """

    deterministic, retries = False, 0

    def __init__(self, url: str, *, corpus: str = "", http: HttpClient | None = None):
        self.url, self.corpus = check_url(url), corpus
        self.http = http or HttpClient()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The best ``k`` documents."""
        answer = self.http.json(JsonRequest("retriever", self.url, {"queries": [query], "topk": k, "return_scores": True}))
        lists = rows_of(answer, "result", "retriever", of=list)
        if len(lists) != 1:
            raise SearchUnavailable(f"retriever: expected one list of documents for one query, got {len(lists)}")
        return [self._hit(item, rank) for rank, item in enumerate(lists[0][:k], 1)]

    def _hit(self, item: Any, rank: int) -> SearchHit:
        document = item.get("document", item) if isinstance(item, dict) else None
        contents = document.get("contents") if isinstance(document, dict) else None
        if not isinstance(document, dict) or not isinstance(contents, str):
            raise SearchUnavailable(f"retriever: expected documents with a string 'contents', got {item!r:.200}")
        title, _, text = contents.partition("\n")
        title, text = (title.strip().strip('"'), text) if text.strip() else ("", contents)
        return SearchHit(title=title, text=text.strip(), url=_string(document, "url"), score=_number(item, "score", rank), rank=rank, source="retriever")

    def settings(self) -> Mapping[str, Any]:
        """The address and the name of the corpus."""
        return {"backend": "retriever", "url": self.url, "corpus": self.corpus}


def check_url(url: str) -> str:
    """``url``, which must be an http(s) address without user and password: addresses appear in messages and settings."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected an address such as http://localhost:8080, got {url!r}")
    if "@" in parts.netloc:
        raise ValueError(f"user and password in an address would appear in messages; got one for {parts.hostname!r}")
    return url


def api_key_of(service: str, given: str | None, variable: str) -> str:
    """The key given or in the environment. ``ValueError`` when there is none, or when it cannot stand in a header."""
    key = (given if given is not None else os.environ.get(variable, "")).strip()
    if not key:
        raise ValueError(f"{service} needs an API key: pass api_key= or set {variable}")
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"the API key of {service} holds characters that no key has (it is not shown)")
    return key


def rows_of(answer: Any, name: str, service: str, *, of: type = dict) -> list[Any]:
    """The list ``answer[name]``, whose items are of type ``of``. :class:`SearchUnavailable` for another shape."""
    rows = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, of) for row in rows):
        raise SearchUnavailable(f"{service}: expected a JSON object with a list {name!r} of {of.__name__}s, got {answer!r:.200}")
    return rows


def web_hits(rows: Iterable[Mapping[str, Any]], k: int, names: tuple[str, str, str], source: str, *, engine: str = "") -> list[SearchHit]:
    """The first ``k`` rows as hits; ``names`` are those of title, address and text. What an engine gives no score gets one over its rank."""
    hits = []
    for rank, row in zip(range(1, k + 1), rows, strict=False):
        title, url, text = (_string(row, name) for name in names)
        found_by = f"{source}: {row[engine]}" if engine and row.get(engine) else source
        hits.append(SearchHit(title=title, text=text, url=url, score=_number(row, "score", rank), rank=rank, source=found_by))
    return hits


def _string(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def _number(row: Mapping[str, Any], name: str, rank: int) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 1 / rank
