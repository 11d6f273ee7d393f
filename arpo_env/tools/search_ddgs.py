"""``DDGS``: web search without an API key through the package ``ddgs`` (extra ``ddgs``), which reads the result pages of search engines.

Called as its documentation shows, the package says "No results found." for 429, 403, 500 and 202 as well as for a page without results. So its engines are
asked one by one here, and the status of every answer is looked at. What the web answers changes from day to day, and engines block whoever asks often: results
are not reproducible. For runs that are to be repeated, put a ``CachedTool`` around the tool.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from arpo_env.tools._http import HttpClient, TryAgainError, retry_after
from arpo_env.tools.search_http import web_hits
from arpo_env.tools.search_index import SearchHit, SearchUnavailable

_ROBOT_MARKS = ("anomaly-modal", "g-recaptcha", "h-captcha", "unusual traffic", "are you a robot")
"""In a page without results they say that the engine did not search but asks whether a person is there."""

Ask = Callable[[str, str, float], list[Mapping[str, Any]]]
"""engine, query, seconds -> rows with title, href and body. Raises ``TryAgainError`` or ``SearchUnavailable``."""


class DDGS:
    """Search engines of the web through ``ddgs``. The first engine that answers counts, with nothing found too; the next is asked when one fails.

    Args:
        engines: names of engines, in the order in which they are asked: ``duckduckgo``, ``brave``, ``mojeek``, ``startpage``, ``wikipedia``, ``yahoo``...
        region: country and language, such as ``us-en``.
        safesearch: ``on``, ``moderate`` or ``off``.
        proxy: address of an http, https or socks5 proxy.
        http: limits; the deadline covers all engines together. Engines block early: one request in two seconds is a polite rate.
    """

    deterministic, retries = False, 0

    def __init__(
        self,
        *,
        engines: tuple[str, ...] = ("duckduckgo",),
        region: str = "us-en",
        safesearch: str = "moderate",
        proxy: str | None = None,
        http: HttpClient | None = None,
    ):
        if isinstance(engines, str) or not engines:
            raise ValueError(f"engines must be a tuple of at least one name, got {engines!r}")
        if len(region.split("-")) != 2:
            raise ValueError(f"region must be a country and a language such as 'us-en', got {region!r}")
        if safesearch not in ("on", "moderate", "off"):
            raise ValueError(f"safesearch must be 'on', 'moderate' or 'off', got {safesearch!r}")
        self.engines, self.region, self.safesearch, self.proxy = tuple(engines), region, safesearch, proxy
        self.http = http or HttpClient()
        self._ask = self._library()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The first ``k`` results of the first page of the first engine that answers."""
        end, failures = self.http.end(), []
        for engine in self.engines:

            def attempt(seconds: float, engine: str = engine) -> list[Mapping[str, Any]]:
                return self._ask(engine, query, min(seconds, self.http.timeout))

            try:
                rows = self.http.attempts(engine, f"ddgs {engine}", end, attempt)
            except SearchUnavailable as error:
                failures.append(str(error))
            else:
                return web_hits(rows, k, ("title", "href", "body"), f"ddgs: {engine}")
        raise SearchUnavailable("; ".join(failures))

    def settings(self) -> Mapping[str, Any]:
        """The library, the engines and the two choices."""
        return {
            "backend": "ddgs" if self._ask == self._ask_ddgs else "duckduckgo_search",
            "engines": list(self.engines),
            "region": self.region,
            "safesearch": self.safesearch,
        }

    def _library(self) -> Ask:
        try:
            from ddgs.engines import ENGINES
        except ImportError:
            return self._predecessor()
        unknown = [name for name in self.engines if name not in ENGINES["text"]]
        if unknown:
            raise ValueError(f"ddgs has no text engine {', '.join(map(repr, unknown))}; it has {', '.join(sorted(ENGINES['text']))}")
        return self._ask_ddgs

    def _ask_ddgs(self, name: str, query: str, seconds: float) -> list[Mapping[str, Any]]:
        from ddgs.engines import ENGINES
        from ddgs.exceptions import DDGSException

        # One engine for each call: they keep state of their last search. Its client takes fractions of a second, whatever the annotation says.
        kind: Any = ENGINES["text"][name]
        engine = kind(proxy=self.proxy, timeout=seconds)
        answers = _watch(engine.http_client)
        try:
            results = engine.search(query, region=self.region, safesearch=self.safesearch)
        except DDGSException as error:
            raise TryAgainError(f"no answer: {type(error).__name__}: {error}") from None
        except Exception as error:
            _look_at(name, answers)
            raise SearchUnavailable(f"{name}: ddgs cannot read its page: {type(error).__name__}: {error}") from error
        if not results:
            _look_at(name, answers)
        return [{field: getattr(result, field, "") for field in ("title", "href", "body")} for result in results or ()]

    def _predecessor(self) -> Ask:
        try:
            importlib.import_module("duckduckgo_search")
        except ImportError as error:
            raise ImportError("DDGS needs ddgs: pip install 'arpo[ddgs]'") from error
        warnings.warn(
            "ddgs is not installed, so its predecessor duckduckgo_search is used, which is no longer maintained; whatever engines are named, its last version,"
            " 8.1.1, asks Bing alone. Install the successor: pip install 'arpo[ddgs]'",
            stacklevel=4,
        )
        return self._ask_predecessor

    def _ask_predecessor(self, name: str, query: str, seconds: float) -> list[Mapping[str, Any]]:
        library = importlib.import_module("duckduckgo_search")
        try:
            client = library.DDGS(proxy=self.proxy, timeout=max(1, round(seconds)))
            return list(client.text(query, region=self.region, safesearch=self.safesearch))
        except Exception as error:  # the library has one class for everything, and raises others' beside it
            raise TryAgainError(f"no answer: {type(error).__name__}: {error}") from None


def _watch(client: Any) -> list[Any]:
    """The list to which every answer that ``client`` gets from now on is added."""
    answers: list[Any] = []
    request = client.request

    def watched(*args: Any, **kwargs: Any) -> Any:
        answers.append(request(*args, **kwargs))
        return answers[-1]

    client.request = watched
    return answers


def _look_at(name: str, answers: list[Any]) -> None:
    """Raise where a search without results failed rather than found nothing."""
    for answer in answers:
        if answer.status_code != 200:
            _raise_for_status(name, answer)
    if not answers or not answers[-1].text.strip():
        raise TryAgainError("HTTP 200 with an empty body")
    page = answers[-1].text.lower()
    if any(mark in page for mark in _ROBOT_MARKS):
        raise SearchUnavailable(f"{name}: HTTP 200 with a question whether a person is there: blocked for asking too often")


def _raise_for_status(name: str, answer: Any) -> None:
    code = answer.status_code
    if code == 403:
        raise SearchUnavailable(f"{name}: HTTP 403: the engine blocks this address or proxy")
    if code in (202, 429):
        headers = getattr(getattr(answer, "_resp", None), "headers", None) or {}
        raise TryAgainError(f"HTTP {code}: asked too often (rate limit)", retry_after(headers.get("retry-after")))
    if code >= 500:
        raise TryAgainError(f"HTTP {code}: the engine failed")
    raise SearchUnavailable(f"{name}: HTTP {code}, expected 200 with a page of results")
