"""The browse tool: a URL in, the text of the page out, a page of the text at a time.

::

    fetcher (who may be asked, how much, how long) -> extractor (HTML to text, in a worker process) -> pages -> the model

The state of an instance is which document is open and at which page: two references, copied when the environment forks. Documents themselves are immutable
and shared. What a page says changes from day to day; give the tool a cache for runs that can be repeated.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from arpo_env._deadline import call_with_deadline
from arpo_env.tools.base import ErrorKind, Tool, ToolResult
from arpo_env.tools.browse_extract import Extractor, Link, WebDocument
from arpo_env.tools.browse_fetch import Fetched, Fetcher, HttpFetcher
from arpo_env.tools.browse_pages import header, page_starts, show_page
from arpo_env.tools.browse_summary import ChatEndpoint, Summarize, settings_of
from arpo_env.tools.browse_url import BrowseError, read_url
from arpo_env.tools.cache import CacheError, CacheKey, CacheMiss, ToolCache

__all__ = ["BrowseError", "BrowseTool", "ChatEndpoint", "Extractor", "Fetched", "Fetcher", "HttpFetcher", "Link", "WebDocument"]

_log = logging.getLogger(__name__)
_MARGIN = 5.0
"""Seconds by which the environment's deadline lies beyond the sum of ours."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The open document and the page shown last."""

    asked: str
    """The URL as it was asked for, in its normal form."""
    document: WebDocument
    page: int


class BrowseTool(Tool):
    """Opens web pages and turns their pages.

    The main argument is a URL, or ``next``, ``previous``, ``page 3`` (of the document opened last) or ``link 3`` (its third link), so that a format with one
    argument a call can do everything; ``page`` as a second argument does the same for JSON formats. Failures leave the open document as it is:

    * ``bad_arguments``: not a URL, not a public host, no such page (HTTP 4xx), neither HTML nor text, no page 9;
    * ``unavailable``: the server or the name lookup is down, slow or overloaded (HTTP 429, 5xx); the environment tries again;
    * ``limit``: no reader could read the page in time and memory; ``exception``: a server that cannot be understood, a replayed cache without this page.

    ``ToolResult.data`` holds ``url``, ``title``, ``page``, ``pages``, ``reader`` and ``links`` (URLs of the links on this page).

    Args:
        fetcher: where pages come from. The default opens public hosts only; ``HttpFetcher(allow_private=...)`` for others.
        extractor: how HTML is read.
        page_chars: characters of text in one page.
        links: links listed under a page, 0 for none. ``link 3`` works either way.
        summarize: a second policy ``(question, text) -> answer``. With it calls take a ``question`` (or one on the lines after the URL) and give its answer
            in place of the text; where it fails, the text with a note. See ``browse_summary.py`` for a model behind an HTTP interface.
        summarize_timeout: seconds for one answer.
        summarize_chars: characters of the document that it is shown, from the page asked for.
        cache: keeps documents and answers by URL, settings and version. Failures are not kept.
    """

    name = "browse"
    stateful = True
    fork_support = "copy"
    retries = 1
    max_concurrency = 16

    def __init__(
        self,
        fetcher: Fetcher | None = None,
        extractor: Extractor | None = None,
        *,
        page_chars: int = 4000,
        links: int = 0,
        summarize: Summarize | None = None,
        summarize_timeout: float = 30.0,
        summarize_chars: int = 30_000,
        cache: ToolCache | None = None,
    ):
        if page_chars < 200 or links < 0 or summarize_chars < 200:
            raise ValueError(f"page_chars and summarize_chars must be at least 200 and links at least 0, got {page_chars!r}, {summarize_chars!r}, {links!r}")
        if not summarize_timeout > 0:
            raise ValueError(f"summarize_timeout must be positive, got {summarize_timeout!r}")
        if summarize is not None and not callable(summarize):
            raise TypeError(f"summarize must be a callable (question, text) -> str, got {type(summarize).__name__}")
        self.fetcher: Fetcher = fetcher if fetcher is not None else HttpFetcher()
        self.extractor = extractor if extractor is not None else Extractor()
        self.page_chars, self.links = page_chars, links
        self.summarize, self.summarize_timeout, self.summarize_chars = summarize, summarize_timeout, summarize_chars
        self.cache = cache
        self.deterministic = cache is not None
        answering = summarize_timeout if summarize is not None else 0.0
        self.timeout = (self.retries + 1) * self.fetcher.timeout + self.extractor.longest + answering + _MARGIN
        self.description, self.parameters = _description(links, summarize is not None), _parameters(summarize is not None)
        self._place: _Place | None = None
        self._prototype = True

    def settings(self) -> Mapping[str, Any]:
        shown = {"page_chars": self.page_chars, "links": self.links, "summarize_chars": self.summarize_chars}
        return {**self._document_settings(), **shown, "summarize": settings_of(self.summarize) if self.summarize else None}

    def _document_settings(self) -> dict[str, Any]:
        return {"fetcher": dict(self.fetcher.settings()), "extractor": dict(self.extractor.settings())}

    def bind(self) -> Self:
        """An instance for one episode, with no document open.

        The first one starts a worker process (half a second of imports), so that no call pays for it; ``RuntimeError`` where it does not start.
        """
        if self.cache is None or self.cache.mode != "replay":
            self.extractor.start()
        return self._sibling(None)

    def fork(self) -> Self:
        """An independent copy with the same document open at the same page."""
        return self._sibling(self._place)

    def _sibling(self, place: _Place | None) -> Self:
        new = copy.copy(self)
        new._place, new._prototype = place, False
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def close(self) -> None:
        """Close the document. On the prototype: end the worker processes too; a later call of one of its instances starts new ones."""
        self._place = None
        if self._prototype:
            self.extractor.close()

    def call(self, **arguments: Any) -> ToolResult:
        """The page (see the class). Raises nothing of the network's."""
        try:
            command, question = self._read_main(arguments["url"], arguments.get("question") or "")
            url, page = self._target(command, arguments.get("page"))
            place = self._open(url, page)
            answer = self._answer(place, question) if question else None
        except BrowseError as error:
            return ToolResult.failure(error.kind, error.text, state="none" if self._place is None else "kept")
        self._place = place
        return self._result(place, answer)

    # -- what is asked for ---------------------------------------------------------------------------------------------------------------------------

    def _read_main(self, main: str, question: str) -> tuple[str, str]:
        """The command and the question in the main argument and ``question``."""
        first, _, rest = main.strip().partition("\n")
        if self.summarize is None and rest.strip():
            raise _refused(f"expected one URL on one line, got {main!r:.120}")
        return first.strip().strip("<>\"'`"), " ".join((question or rest).split())

    def _target(self, command: str, page: int | None) -> tuple[str, int]:
        """The URL to open and its page."""
        for pattern, find in self._commands():
            if match := pattern.fullmatch(command):
                url, number = find(match)
                break
        else:
            url, number = command, 1
        number = number if page is None else page
        if number < 1:
            raise _refused(f"pages are numbered from 1, got {number}")
        return url, number

    def _commands(self) -> tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[str, int]]], ...]:
        return (
            (_STEP, lambda match: self._step(-1 if match.group(1).lower() in ("previous", "prev", "back") else 1)),
            (_PAGE, lambda match: (self._opened().asked, int(match.group(1)))),
            (_LINK, lambda match: (self._link(int(match.group(1))), 1)),
            (_URL_PAGE, lambda match: (match.group(1), int(match.group(2)))),
        )

    def _opened(self) -> _Place:
        if self._place is None:
            raise _refused("no document is open yet; give a URL first")
        return self._place

    def _step(self, step: int) -> tuple[str, int]:
        place = self._opened()
        count = len(page_starts(place.document.text, self.page_chars))
        if not 1 <= place.page + step <= count:
            raise _refused(f"page {place.page} of {count} is the {'last' if step > 0 else 'first'} page of {place.document.url:.200}")
        return place.asked, place.page + step

    def _link(self, number: int) -> str:
        links = self._opened().document.links
        if not 1 <= number <= len(links):
            raise _refused(f"the open document has {len(links)} links, got link {number}")
        return links[number - 1].url

    # -- documents -----------------------------------------------------------------------------------------------------------------------------------

    def _open(self, url: str, page: int) -> _Place:
        asked = read_url(url, ports=None).url
        place = self._place
        document = place.document if place is not None and asked in (place.asked, place.document.url) else self._document(asked)
        count = len(page_starts(document.text, self.page_chars))
        if page > count:
            raise _refused(f"{document.url:.200} has {count} page{'s' * (count > 1)}, got page {page}")
        return _Place(asked, document, page)

    def _document(self, url: str) -> WebDocument:
        """The document at ``url``, from the cache where it is there."""
        found = self._cached({"url": url}, self._document_settings(), lambda: self._load(url))
        return WebDocument.from_json(found["value"])

    def _load(self, url: str) -> dict[str, Any]:
        document, steady = self.extractor.extract(self.fetcher.fetch(url))
        return {"value": document.to_json(), "keep": steady}

    def _cached(self, arguments: Mapping[str, Any], settings: Mapping[str, Any], call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """``call()``, or what it gave before. Raises the :class:`BrowseError` that it raises; that is not kept."""
        if self.cache is None:
            return call()

        def guarded() -> dict[str, Any]:  # several threads may share this call: they get a value each, not one exception for all
            try:
                return call()
            except BrowseError as error:
                return {"keep": False, "kind": error.kind, "text": error.text}

        try:
            found = self.cache.get_or_call(CacheKey(self.name, self.version, settings, arguments), guarded, keep=lambda value: bool(value["keep"]))
        except CacheMiss as miss:
            _log.warning("%s", miss)
            raise BrowseError("exception", "This page was not recorded, and only recorded pages are served in this run.") from None
        except CacheError as error:
            raise BrowseError("unavailable", f"The cache of pages cannot be read: {error}") from None
        if "kind" in found:
            raise BrowseError(found["kind"], found["text"])
        return found

    # -- answers -------------------------------------------------------------------------------------------------------------------------------------

    def _answer(self, place: _Place, question: str) -> str | BrowseError:
        """The second policy's answer to ``question`` from the document, or why there is none."""
        start = page_starts(place.document.text, self.page_chars)[place.page - 1]
        text = place.document.text[start : start + self.summarize_chars]
        asked = {"question": question, "title": place.document.title, "text": hashlib.sha256(text.encode()).hexdigest()}
        assert self.summarize is not None
        try:
            found = self._cached(asked, {"summarize": settings_of(self.summarize)}, lambda: self._ask(question, text))
        except BrowseError as error:
            return error
        return str(found["value"])

    def _ask(self, question: str, text: str) -> dict[str, Any]:
        summarize = self.summarize
        assert summarize is not None
        try:
            answer = call_with_deadline(lambda: summarize(question, text), self.summarize_timeout)
        except Exception as error:  # whatever a user's function or a server does, the page itself is there
            _log.warning("the second policy of the browse tool failed: %s: %s", type(error).__name__, error)
            raise BrowseError("unavailable", f"{type(error).__name__}") from None
        if not isinstance(answer, str) or not answer.strip():
            raise BrowseError("unavailable", f"it gave {'nothing' if isinstance(answer, str) else type(answer).__name__}")
        return {"value": answer.strip(), "keep": True}

    def _result(self, place: _Place, answer: str | BrowseError | None) -> ToolResult:
        document, starts = place.document, page_starts(place.document.text, self.page_chars)
        end = starts[place.page] if place.page < len(starts) else len(document.text)
        here = [link.url for link in document.links if starts[place.page - 1] <= link.position < end]
        data = {"url": document.url, "title": document.title, "page": place.page, "pages": len(starts), "reader": document.reader, "links": here}
        if isinstance(answer, str):
            shown = min(self.summarize_chars, len(document.text) - starts[place.page - 1])
            part = "" if shown == len(document.text) else f" (from {shown:,} of {len(document.text):,} characters, beginning at page {place.page})"
            note = f"[Another model's answer from this document{part}. Call without a question to read the document itself.]"
            return ToolResult(f"{header(document)}\n\n{answer[: 4 * self.page_chars]}\n\n{note}", data=data, state="kept")
        text = show_page(document, place.page, self.page_chars, self.links)
        if answer is not None:
            text = f"[The question could not be answered ({answer.text}); this is the document itself.]\n{text}"
        return ToolResult(text, data=data, state="kept")


_STEP = re.compile(r"(next|previous|prev|back)(?: page)?", re.I)
_PAGE = re.compile(r"(?:page\s*)?(\d{1,6})", re.I)
_LINK = re.compile(r"link\s*(\d{1,6})", re.I)
_URL_PAGE = re.compile(r"(\S+)\s+page\s*(\d{1,6})", re.I)


def _refused(text: str) -> BrowseError:
    kind: ErrorKind = "bad_arguments"
    return BrowseError(kind, f"Nothing was opened: {text}.")


def _description(links: int, answers: bool) -> str:
    sentences = [
        "Opens a web page and returns its text, one page at a time.",
        "Give a URL; or, for the document opened last: next, previous, or a page number such as: page 3.",
    ]
    if links:
        sentences.append("To follow a listed link, give its number, such as: link 3.")
    if answers:
        sentences.append("With a question on a second line, an answer from the document is returned in place of its text.")
    return " ".join(sentences)


def _parameters(answers: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "url": {"type": "string", "description": "the URL of a page; or next, previous, page 3, link 3 for the document opened last"},
        "page": {"type": "integer", "description": "which page of the document to show, from 1; the first when left out"},
    }
    if answers:
        properties["question"] = {"type": "string", "description": "what to find out from the document; its text is returned when left out"}
    return {"type": "object", "properties": properties, "required": ["url"]}
