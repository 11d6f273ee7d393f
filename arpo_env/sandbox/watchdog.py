"""Counts the processes and threads of each session where the kernel does not do it for us, and ends the branch that has too many. Host side.

RLIMIT_NPROC needs a user namespace to count a session alone, and does not bind the root user at all. A fork bomb makes a few hundred processes between two
looks, no more: it shares its processors with this thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING

from . import proctree

if TYPE_CHECKING:
    from .branch import Branch
    from .lineage import Lineage
    from .pool import Pool

_SECONDS = 0.1
_MAX_SECONDS = 1.0
_SHARE = 20
"""Looking takes one part in this many of the time, unless that would make the pauses too long."""


class Watchdog:
    """A thread that looks at all sessions of a pool ten times a second."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="arpo-sandbox-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end."""
        self._stop.set()

    def _run(self) -> None:
        pause = _SECONDS
        while not self._stop.wait(pause):
            began = monotonic()
            with contextlib.suppress(OSError):  # no descriptor is left: at the next look perhaps
                for lineage, branches in self._families():
                    if (count := self._count(lineage)) > self._pool.limits.processes:
                        self._reduce(lineage, branches, count)
            pause = min(_MAX_SECONDS, max(_SECONDS, _SHARE * (monotonic() - began)))

    def _families(self) -> Iterable[tuple[Lineage, list[Branch]]]:
        families: defaultdict[Lineage, list[Branch]] = defaultdict(list)
        for branch in list(self._pool.branches):
            if branch.alive:
                families[branch.lineage].append(branch)
        return families.items()

    def _count(self, lineage: Lineage) -> int:
        return proctree.count_threads(proctree.descendants(lineage.keeper_pid))

    def _reduce(self, lineage: Lineage, branches: list[Branch], total: int) -> None:
        """End the branch that has most processes, or those that no living branch has."""
        living = frozenset(self._pool.living)
        sizes = {branch: proctree.count_threads([branch.pid, *proctree.descendants(branch.pid, living - {branch.pid})]) for branch in branches}
        largest = max(branches, key=sizes.__getitem__)
        if total - sum(sizes.values()) > sizes[largest]:  # left by a branch that is gone
            proctree.kill_descendants(lineage.keeper_pid, living)
        else:
            largest.kill(f"the session had {total} processes and threads, more than the {self._pool.limits.processes} that it may have, and was ended")
