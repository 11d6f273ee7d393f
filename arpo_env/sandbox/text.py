"""Bounded text: the beginning and the end are kept, a notice stands for the middle. Standard library only (the guest loads this file too)."""

from __future__ import annotations

NOTICE_CHARS = 64
"""More than a notice has."""


def shorten(text: str, limit: int) -> str:
    """``text`` when it has at most ``limit`` characters, else its first three quarters and its last quarter of ``limit`` with a notice between."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 4, limit // 4
    return text[:head] + notice(len(text) - limit, "characters") + text[len(text) - tail :]


def notice(count: int, unit: str) -> str:
    """The line that stands for ``count`` units left out."""
    return f"\n[... {count:,} {unit} left out ...]\n"


class HeadTail:
    """Collects bytes in constant memory: the first ``4 * limit`` and the last ``4 * limit`` of them (a character of UTF-8 has at most 4 bytes)."""

    def __init__(self, limit: int):
        self.limit = limit
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Append ``data``."""
        self.total += len(data)
        room = 4 * self.limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 8 * self.limit:  # trimmed rarely, so that adding stays linear
            del self._tail[: -4 * self.limit]

    def text(self) -> str:
        """What was collected as text of at most ``limit`` characters and one notice. Bytes that are not UTF-8 become U+FFFD."""
        tail = self._tail[-4 * self.limit :]
        left_out = self.total - len(self._head) - len(tail)
        if left_out <= 0:
            return shorten((self._head + tail).decode("utf-8", "replace"), self.limit)
        keep = self.limit // 4
        head_text = self._head.decode("utf-8", "replace")[: self.limit - keep]
        tail_text = tail.decode("utf-8", "replace")[-keep:] if keep else ""
        shown = len(head_text.encode()) + len(tail_text.encode())
        return head_text + notice(self.total - shown, "bytes") + tail_text
