"""The process that reads HTML: main text by trafilatura where that is wanted, else all visible text.

This file is run as a script (``python -P browse_worker.py MEMORY_MB main|plain``), speaks the protocol of ``arpo_env/_workers.py``
and imports nothing of the package.
A request is ``{"html", "url", "main", "seconds"}``, its answer ``{"title", "text", "links", "reader"}``; a link is ``[position in the text, label, URL]``.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sys
from typing import Any
from urllib.parse import urljoin

_MAX_TEXT = 2_000_000
_MAX_LINKS = 1000
_SHORT = 1500
"""A page whose whole text has no more characters is shown whole: there is too little of it to tell the main part from the rest."""

Reading = tuple[str, list[list[Any]]]
"""Text and links."""

_TOKEN = re.compile(
    r"""(?:[^<]++|<(?![A-Za-z/!?]))++              # text
    | <!--.*?(?:-->|\Z)                           # a comment; one without an end hides the rest, as in browsers
    | <[!?][^>]*+(?:>|\Z)
    | <(?P<end>/?)(?P<tag>[A-Za-z][^\s/>]*+)(?P<attributes>(?:[^>"']++|"[^"]{0,1000}+"|'[^']{0,1000}+'|["'])*+)(?:>|\Z)
    | </[^>]*+(?:>|\Z)""",
    re.X | re.S,
)
"""Every alternative runs to the end of the page rather than fail there, so that reading takes time linear in the page (``html.parser`` is quadratic in tags
and comments that are not closed)."""
_HREF = re.compile(r"""(?<![\w-])href\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>]++))""", re.I)
_RAW = ("script", "style", "title", "textarea", "xmp")
_HIDDEN = {*_RAW, "template", "svg", "noscript", "select", "iframe", "object", "canvas"}
_CLOSING = {tag: re.compile(f"</{tag}", re.I | re.A) for tag in _HIDDEN}
_BLOCKS = {
    "p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "ul", "ol", "dl", "table", "blockquote", "figure", "form", "pre", "hr",
    "h1", "h2", "h3", "h4", "h5", "h6",
}  # fmt: skip
_LINES = {"br", "li", "tr", "dt", "dd", "figcaption", "caption", "option", "address"}
_MARKS = {"li": "- ", "td": " | ", "th": " | ", **{f"h{level}": "#" * level + " " for level in range(1, 7)}}


class _Page:
    """Collects the visible text of a page, with line breaks at blocks, marks of headings, list items and cells, and links."""

    def __init__(self, source: str, url: str):
        self.url = url
        self.links: list[list[Any]] = []
        self._pieces: list[str] = []
        self._size = 0
        self._gap = ""
        """White space that is due before the next text."""
        self._preformatted = 0
        self._link: tuple[int, str] | None = None
        self._read(source)
        self.text = "".join(self._pieces)

    def _read(self, source: str) -> None:
        position, missing = 0, set[str]()
        while position < len(source) and self._size < _MAX_TEXT and (token := _TOKEN.match(source, position)):
            position = token.end()
            tag = (token["tag"] or "").lower()
            if not tag:
                if not token.group().startswith(("<!", "<?", "</")):
                    self._data(token.group())
            elif tag in _HIDDEN and not token["end"] and tag not in missing:
                closing = _CLOSING[tag].search(source, position)
                if closing is not None:
                    position = closing.start()
                elif tag in _RAW:
                    break
                else:
                    missing.add(tag)
            else:
                self._tag(tag, bool(token["end"]), token["attributes"])
        self._end_link()

    def _tag(self, tag: str, end: bool, attributes: str) -> None:
        if tag == "a":
            self._end_link()
            if not end:
                self._link = (len(self._pieces), attributes)
        if tag == "pre":
            self._preformatted = max(0, self._preformatted + (-1 if end else 1))
        self._space("\n\n" if tag in _BLOCKS else "\n" if tag in _LINES else "")
        if not end and tag in _MARKS:
            first = not self._pieces or "\n" in self._gap
            self._write(_MARKS[tag].lstrip() if first else _MARKS[tag])

    def _data(self, raw: str) -> None:
        data = _unescape(raw)
        if self._preformatted:
            self._write(data)
            return
        words = data.split()
        self._space(" " if data[:1].isspace() else "")
        if words:
            self._write(" ".join(words))
            self._space(" " if data[-1:].isspace() else "")

    def _space(self, gap: str) -> None:
        self._gap = max(self._gap, gap, key=lambda text: (text.count("\n"), len(text)))

    def _write(self, text: str) -> None:
        piece = (self._gap if self._pieces else "") + text
        self._gap = ""
        self._pieces.append(piece)
        self._size += len(piece)

    def _end_link(self) -> None:
        if self._link is not None and len(self.links) < _MAX_LINKS:
            first, attributes = self._link
            label = "".join(self._pieces[first:])
            if label.strip() and (target := _absolute(self.url, _href(attributes))):
                self.links.append([self._size - len(label.lstrip()), _one_line(label), target])
        self._link = None


def plain(source: str, url: str) -> Reading:
    """All visible text."""
    page = _Page(source, url)
    return page.text, page.links


def _href(attributes: str) -> str:
    match = _HREF.search(attributes)
    return _unescape(next(filter(None, match.groups()), "")) if match else ""


def _unescape(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character reference of thousands of digits
        return text


def main_text(source: str, url: str) -> Reading:
    """Text and links of the main part of the page; "" where trafilatura finds none."""
    import trafilatura

    marked = trafilatura.extract(
        source, url=url, fast=True, output_format="markdown", include_links=True, include_comments=False, include_images=False, with_metadata=False
    )
    return _take_links((marked or "")[:_MAX_TEXT], url)


_MARKDOWN_LINK = re.compile(r"(?<!!)\[([^\[\]]*+)\]\((?:<([^<>\n]*+)>|((?:[^()\s]|\([^()\s]*+\))*+))\)")


def _take_links(marked: str, url: str) -> Reading:
    """The text in which a markdown link is its label alone, and the links."""
    pieces: list[str] = []
    links: list[list[Any]] = []
    size = end = 0
    for match in _MARKDOWN_LINK.finditer(marked):
        label, target = match.group(1), _absolute(url, match.group(2) or match.group(3) or "")
        before = marked[end : match.start()]
        if target and label.strip() and len(links) < _MAX_LINKS:
            links.append([size + len(before), _one_line(label), target])
        pieces += (before, label)
        size += len(before) + len(label)
        end = match.end()
    pieces.append(marked[end:])
    return "".join(pieces), links


def _absolute(base: str, target: str) -> str:
    """The URL that a link leads to; "" for one within the page or of another kind than http."""
    target = target.strip()
    if not target or target.startswith("#") or len(target) > 2000:
        return ""
    try:
        found = urljoin(base, target)
    except ValueError:
        return ""
    return found if found.startswith(("http://", "https://")) else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]


def title_of(source: str) -> str:
    """The text of the first ``<title>``, on one line, at most 200 characters."""
    start = re.search(r"<title\b[^>]{0,200}>", source[:100_000], re.I)
    if start is None:
        return ""
    raw = source[start.end() : start.end() + 2000]
    end = re.search("</title", raw, re.I)
    return " ".join(_unescape(raw[: end.start()] if end else raw[:200]).split())[:200]


def read(source: str, url: str, main: bool) -> dict[str, Any]:
    """The answer to a request."""
    reader, (text, links) = "plain", plain(source, url)
    if main and len(text) > _SHORT:
        with contextlib.suppress(Exception):  # any fault of the library's on this page: all of its text
            found = main_text(source, url)
            if found[0].strip():
                reader, (text, links) = "trafilatura", found
    return {"title": title_of(source), "text": text, "links": links, "reader": reader}


def _serve(memory_mb: int, main: bool) -> None:
    """Answer requests until standard input closes. Whatever a library prints goes nowhere."""
    import logging
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    hello = {}
    if main:
        try:
            main_text("<html><body><article><p>This sentence loads what is loaded late.</p></article></body></html>", "https://example.org/")
        except Exception as error:
            hello = {"error": f"trafilatura does not work here: {type(error).__name__}: {error}"}
    print(json.dumps(hello), file=out, flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.alarm(int(request["seconds"]) + 10)
        answer = read(request["html"], request["url"], request["main"])  # out of memory ends the process, as it should
        signal.alarm(0)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2] == "main")
