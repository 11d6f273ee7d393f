"""The processes of a vLLM engine, and that nothing of them stays. When one of them dies vLLM ends the others in a thread that nobody can wait for."""

from __future__ import annotations

import asyncio
import importlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PATIENCE = 10.0
"""Seconds that processes have to end by themselves: vLLM asks them to first, and forces them after five."""
_SEGMENTS = "/dev/shm/psm_"
"""Where Python keeps named shared memory on Linux."""


def identity() -> tuple[int, str]:
    """This process, for :func:`end_with`: its number, and the system that counts it so (of another host or container the same number is another process)."""
    return os.getpid(), _system()


def _system() -> str:
    """Empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def end_with(pid: int, system: str, others: Sequence[int] = ()) -> None:
    """Ends ``others`` and this process when that one has died, of whatever. Does nothing where it cannot be seen from here; raises ``ProcessLookupError`` where
    a process is dead already."""
    if not system or system != _system():
        return
    owner, rest = os.pidfd_open(pid), [os.pidfd_open(other) for other in others if other != os.getpid()]

    def wait() -> None:
        select.select([owner], [], [])
        for other in rest:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(other, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="owner", daemon=True).start()


class Processes:
    """Those of an ``AsyncLLM``, the processes that they have started included, and the shared memory that they have open. To be made when it has started."""

    def __init__(self, llm: Any) -> None:
        resources = llm.engine_core.resources
        tops = [*resources.engine_manager.processes, *([resources.coordinator.proc] if resources.coordinator else [])]
        self._psutil: Any = importlib.import_module("psutil")  # vLLM depends on it
        self.started = [int(top.pid) for top in tops]
        """Numbers of those that this process has started."""
        found = [self._psutil.Process(pid) for pid in self.started]
        self._all = found + [child for process in found for child in process.children(recursive=True)]
        self._segments = {segment for process in self._all for segment in _segments(process.pid)}

    async def ended(self) -> None:
        """Returns when all have ended, which they are made to after ten seconds, and removes the shared memory that one of them left behind."""
        deadline = time.monotonic() + _PATIENCE
        while (alive := [process for process in self._all if self._runs(process)]) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._kill(alive)
        while any(map(self._runs, alive)):
            await asyncio.sleep(0.02)
        for segment in self._segments:
            segment.unlink(missing_ok=True)

    def _runs(self, process: Any) -> bool:
        try:
            return bool(process.is_running() and process.status() != self._psutil.STATUS_ZOMBIE)
        except self._psutil.NoSuchProcess:
            return False

    def _kill(self, processes: Iterable[Any]) -> None:
        for process in processes:
            with suppress(self._psutil.NoSuchProcess):
                process.kill()


def _segments(pid: int) -> set[Path]:
    """The named shared memory that a process has mapped; none where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line[line.index(_SEGMENTS) :]) for line in lines if _SEGMENTS in line and not line.endswith(" (deleted)")}
