"""From what a server sent to the text that a model reads.

HTML is read in a worker process (``browse_worker.py``), because trafilatura holds the GIL, takes half a minute on some pages of a few megabytes, and stands on
a C library that parses whatever the internet holds. A worker that is late or dies is killed; the page is then read by the plain reader, which takes time linear
in its size.
"""

from __future__ import annotations

import codecs
import importlib.util
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_env._workers import WorkerDied, WorkerFailed, WorkerLate, WorkerPool
from arpo_env.tools.browse_fetch import Fetched
from arpo_env.tools.browse_url import BrowseError

__all__ = ["Extractor", "Link", "WebDocument", "decode"]

_START_DEADLINE = 10.0


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a document."""

    position: int
    """Where its label begins in the document's text."""
    label: str
    url: str


@dataclass(frozen=True, slots=True)
class WebDocument:
    """The text of a web page. Immutable: episodes and forks share it."""

    url: str
    """Where it was found, after redirects."""
    title: str
    text: str
    links: tuple[Link, ...]
    reader: str
    """``trafilatura`` (main text), ``plain`` (all visible text) or ``text`` (it was text already)."""
    cut: bool
    """The page was larger than the size limit; its end is missing."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object, from which :meth:`from_json` makes it again."""
        links = [[link.position, link.label, link.url] for link in self.links]
        return {"url": self.url, "title": self.title, "text": self.text, "links": links, "reader": self.reader, "cut": self.cut}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WebDocument:
        return cls(**{**fields, "links": tuple(Link(*link) for link in fields["links"])})


class Extractor:
    """Reads pages. Owns the worker processes, which start with the first page that needs one.

    Args:
        main_text: True leaves menus, advertisements and comments away (trafilatura, ``pip install 'arpo[browse]'``); False shows all visible text; None is True
            where trafilatura is installed.
        max_html: characters of HTML up to which the main text is looked for; of a longer page all visible text is shown.
        timeout: seconds for one page and one reader.
        workers: processes, that is pages read at once.
        memory_mb: MiB of address space of one worker.

    Raises ``ImportError`` where trafilatura is asked for and absent.
    """

    def __init__(self, *, main_text: bool | None = None, max_html: int = 300_000, timeout: float = 5.0, workers: int = 2, memory_mb: int = 1024):
        if max_html < 1 or not timeout > 0 or memory_mb < 128:
            raise ValueError(f"max_html must be at least 1, timeout positive, memory_mb at least 128; got {max_html!r}, {timeout!r}, {memory_mb!r}")
        installed = importlib.util.find_spec("trafilatura") is not None
        if main_text and not installed:
            raise ImportError("reading the main text of pages needs trafilatura: pip install 'arpo[browse]' (main_text=False shows all visible text)")
        self.main_text = installed if main_text is None else main_text
        self.max_html, self.timeout, self.memory_mb = max_html, float(timeout), memory_mb
        script = str(Path(__file__).with_name("browse_worker.py"))
        command = [sys.executable, "-P", script, str(memory_mb), "main" if self.main_text else "plain"]
        self._pool = WorkerPool(command, size=workers, start_deadline=_START_DEADLINE)

    @property
    def longest(self) -> float:
        """Seconds that :meth:`extract` takes at most: two readers, each with the start of a worker."""
        return 2 * (self.timeout + _START_DEADLINE)

    def settings(self) -> Mapping[str, Any]:
        """What the text depends on beside the page."""
        return {"main_text": self.main_text, "max_html": self.max_html}

    def start(self) -> None:
        """Have a worker ready. ``RuntimeError`` where none starts, with the reason."""
        self._pool.start()

    def extract(self, page: Fetched) -> tuple[WebDocument, bool]:
        """The document, and whether the same page always gives this text (False where a reader was too slow this time).

        :class:`BrowseError`: ``limit`` where no reader could read the page in time, ``unavailable`` where no worker could be had.
        """
        source = _printable(decode(page.body, page.charset))
        if page.kind != "html":
            return WebDocument(page.url, "", source.strip(), (), "text", page.cut), True
        main, steady = self.main_text and len(source) <= self.max_html, True
        answer = self._ask(source, page.url, main)
        if answer is None and main:
            steady, answer = False, self._ask(source, page.url, False)
        if answer is None:
            raise BrowseError("limit", f"{page.url:.200} could not be read within {self.timeout:g} s and {self.memory_mb} MiB.")
        links = tuple(Link(position, _printable(label), url) for position, label, url in answer["links"])
        return WebDocument(page.url, _printable(answer["title"]), _printable(answer["text"]).rstrip(), links, answer["reader"], page.cut), steady

    def _ask(self, source: str, url: str, main: bool) -> dict[str, Any] | None:
        """A worker's answer; None where it was late or died."""
        try:
            answer: dict[str, Any] = self._pool.ask({"html": source, "url": url, "main": main}, self.timeout, patience=_START_DEADLINE)
        except (WorkerLate, WorkerDied):
            return None
        except WorkerFailed as error:
            raise BrowseError("unavailable", f"Pages cannot be read now: {error}.") from None
        return answer

    def close(self) -> None:
        """End the worker processes. Idempotent; a later page starts new ones."""
        self._pool.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Extractor:
        return self

    def __getstate__(self) -> dict[str, Any]:
        pool = self._pool
        return {**self.__dict__, "_pool": (pool.command, pool.size, pool.start_deadline)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        command, size, start_deadline = state["_pool"]
        self.__dict__.update({**state, "_pool": WorkerPool(command, size=size, start_deadline=start_deadline)})


# --- bytes to characters ----------------------------------------------------------------------------------------------------------------------------

_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_META = re.compile(rb"""<meta\b[^>]{0,300}?charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)
_NAMES = (
    "utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "latin-1", "iso2022_jp", "shift_jis", "euc_jp", "cp932", "gb2312", "gbk", "gb18030", "big5",
    "euc_kr", "cp949", "koi8-r", "koi8-u", "mac-roman", "cp866", "cp874", *(f"cp125{part}" for part in range(9)),
    *(f"iso8859-{part}" for part in range(2, 17) if part != 12),
)  # fmt: skip
_CHARSETS = frozenset(codecs.lookup(name).name for name in _NAMES)
_SEVEN_BIT = frozenset(codecs.lookup(name).name for name in ("iso2022_jp", "utf-16", "utf-16-le", "utf-16-be"))


def decode(body: bytes, declared: str = "") -> str:
    """``body`` as text: by its byte order mark, else as UTF-8 where it is valid UTF-8, else as the headers or a ``<meta>`` say, else as windows-1252.

    UTF-8 comes before what is declared, since text of another encoding is hardly ever valid UTF-8, and wrong declarations are common.
    """
    for bom, charset in _BOMS:
        if body.startswith(bom):
            return body.decode(charset, "replace")
    for charset in _candidates(body, declared):
        decoder = codecs.getincrementaldecoder(charset)()
        try:
            return decoder.decode(body)  # a last character that the size limit cut in half is left away
        except UnicodeError:
            continue
    return body.decode("utf-8" if _known(declared) == "utf-8" else "cp1252", "replace")


def _candidates(body: bytes, declared: str) -> Iterator[str]:
    meta = _META.search(body[:4096])
    said = [name for name in (_known(declared), _known(meta.group(1).decode("ascii", "replace")) if meta else "") if name]
    if said and said[0] in _SEVEN_BIT:  # such text is valid UTF-8 too
        yield said[0]
    yield "utf-8"
    yield from said


def _known(charset: str) -> str:
    """The codec for a charset's name as the web uses it; "" for none. Python's other codecs (``zlib``, ``unicode_escape``, ``idna``) are not for strangers."""
    try:
        name = codecs.lookup(charset).name if charset else ""
    except (LookupError, ValueError):
        return ""
    if name in ("iso8859-1", "ascii"):  # as browsers read them
        return "cp1252"
    return name if name in _CHARSETS else ""


_CONTROLS = {code: None for code in range(0xA0) if unicodedata.category(chr(code)) == "Cc" and chr(code) not in "\n\t"} | {0xFEFF: None}


def _printable(text: str) -> str:
    """``text`` with line ends as ``\\n``, without control characters and lone surrogates."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)
    return text.encode("utf-8", "replace").decode()
