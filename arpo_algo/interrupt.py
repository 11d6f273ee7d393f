"""Ctrl-C that ends a run in good order."""

from __future__ import annotations

import signal
import threading
from types import TracebackType


class Interrupt:
    """While entered, the first Ctrl-C only sets ``asked``; a second one raises ``KeyboardInterrupt`` at once. Without effect outside the main thread."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: object = None
        self._entered = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous, self._entered = signal.signal(signal.SIGINT, self._handle), True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: object) -> None:
        self.asked = True
        self._restore()
        print("\ninterrupted: finishing this step, then saving; press Ctrl-C again to stop at once", flush=True)

    def _restore(self) -> None:
        if self._entered:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]
            self._entered = False
