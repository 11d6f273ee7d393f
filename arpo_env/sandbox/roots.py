"""The directories of pools whose sessions keep files on the host, and those that a killed process left behind. Host side."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time

from .trees import remove_tree

with contextlib.suppress(ImportError):  # not on Windows, where the sandbox is refused before anything here is called
    import fcntl

_PREFIX = "arpo-sandbox-"
_NEW_SECONDS = 60.0
"""A directory younger than this may be between its making and its locking."""


class Root:
    """A directory that is locked as long as this process lives; :func:`sweep` leaves locked ones alone."""

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove directories of this user whose process is gone. Normally the zygote does that; it cannot where it was killed as well."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(OSError):
            if _is_stale(path):
                remove_tree(path)


def _is_stale(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _NEW_SECONDS:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
        return True
    finally:
        os.close(fd)
