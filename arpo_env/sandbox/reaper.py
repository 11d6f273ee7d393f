"""Reaping processes that ended, and telling the host how. Guest side, standard library only."""

from __future__ import annotations

import contextlib
import os

EXITS_FD = 1001
"""The pipe on which keeper and workers tell the host how a worker ended."""


def reap_all(*_: object) -> None:
    """Reap every child that has ended."""
    while reap(-1):
        pass


def reap(pid: int) -> bool:
    """Reap the child ``pid`` (any for -1) if it has ended, and report how. Whether one was reaped."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return False
    if ended:
        with contextlib.suppress(OSError):  # nobody reads the reports, or a cell closed the descriptor: a report is only a courtesy
            os.write(EXITS_FD, f"{ended} {status}\n".encode())
    return bool(ended)
