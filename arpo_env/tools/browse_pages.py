"""Long documents in pages: where they are cut, and how a page is shown."""

from __future__ import annotations

import bisect

from arpo_env.tools.browse_extract import WebDocument

__all__ = ["page_starts", "show_page"]


def page_starts(text: str, size: int) -> list[int]:
    """Where the pages of ``text`` begin, each of at most ``size`` characters. They are cut at the end of a paragraph, else of a line, else of a word, where one
    lies in the page's last quarter. Together the pages are the text."""
    starts = [0]
    while len(text) - starts[-1] > size:
        start = starts[-1]
        low, high = start + size - size // 4, start + size
        cuts = (text.rfind(mark, low, high) + len(mark) for mark in ("\n\n", "\n", " ") if text.rfind(mark, low, high) >= 0)
        starts.append(next(cuts, high))
    return starts


def show_page(document: WebDocument, number: int, size: int, max_links: int) -> str:
    """Page ``number`` (from 1) as the model reads it: title and URL, the text, its links, and how to read on."""
    starts = page_starts(document.text, size)
    start, end = starts[number - 1], starts[number] if number < len(starts) else len(document.text)
    parts = [header(document), document.text[start:end].strip("\n") or _EMPTY]
    if max_links and (links := _links(document, start, end, max_links)):
        parts.append(links)
    if notice := _notice(document, number, len(starts)):
        parts.append(notice)
    return "\n\n".join(parts)


_EMPTY = "(This page has no text. It may show its content by JavaScript, which is not run.)"


def header(document: WebDocument) -> str:
    """Title and URL, a line each."""
    return (f"Title: {document.title}\n" if document.title else "") + f"URL: {document.url:.500}"


def _links(document: WebDocument, start: int, end: int, most: int) -> str:
    """The links whose labels begin on this page, numbered as in the whole document."""
    first, last = (bisect.bisect_left(document.links, place, key=lambda link: link.position) for place in (start, end))
    lines = [f"[{number}] {link.label}: {link.url:.300}" for number, link in enumerate(document.links[first:last][:most], first + 1)]
    if last - first > most:
        lines.append(f"({last - first - most} more links on this page)")
    return "\n".join([f"Links (follow one by its number, for example: link {first + 1}):", *lines]) if lines else ""


def _notice(document: WebDocument, number: int, count: int) -> str:
    """The last line: which page this is, and what comes next."""
    more = f"[Page {number} of {count}. For the next one, call with: next. For any other, for example: page {count}.]" if number < count else ""
    last = f"[Page {number} of {count}, the last one.]" if count > 1 and not more else ""
    cut = "[The document was too large: its end is missing.]" if document.cut and not more else ""
    return "\n".join(line for line in (more, last, cut) if line)
