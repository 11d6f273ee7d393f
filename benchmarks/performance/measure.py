"""What all benchmarks of this folder share: medians of a repeated measurement, time and memory of a call, the machine, one table, one JSON file."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    median: float
    """In ``unit``."""
    p90: float
    n: int
    unit: str = "ms"
    note: str = ""


def seconds(function: Callable[[], object]) -> float:
    """Wall seconds that ``function`` takes once."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def row(name: str, samples: Sequence[float], *, note: str = "") -> Row:
    """The row of samples given in seconds, shown in milliseconds."""
    ordered = sorted(1000 * sample for sample in samples)
    return Row(name, statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], len(ordered), note=note)


@dataclass(frozen=True)
class Cost:
    """What one call took."""

    cpu_s: float
    """CPU seconds of the process, all threads: what else the machine does matters less to them than to the clock."""
    peak_mb: float
    """Growth of its resident memory while it ran, at the most."""


def cost(function: Callable[[], object]) -> Cost:
    """CPU seconds and peak memory of one call. Linux with glibc; for memory that is to mean something run it by :func:`alone`."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls left free would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak (VmHWM) starts anew
    before, start = status_bytes("VmRSS"), time.process_time()
    function()
    return Cost(time.process_time() - start, (status_bytes("VmHWM") - before) / 1e6)


def status_bytes(name: str) -> int:
    """A size from this process's status, such as ``VmRSS``, its resident memory."""
    return next(int(line.split()[1]) * 1024 for line in _lines("/proc/self/status") if line.startswith(f"{name}:"))


ALONE = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "8388608"}
"""Environment of a process that is measured: one thread, large blocks of memory given back to the system as soon as they are free."""
RETURNING = ALONE | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "2097152"}
"""Of one whose memory is measured: blocks of 1 MiB too, which costs time. Else what is free between blocks in use counts, up to twice as much."""


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns, called in a process of its own with the environment ``ALONE``."""
    os.environ.update(ALONE)  # the forkserver starts with them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "arpo_algo.learner"])
    return _called(context, function, *arguments)


def apart(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """What a function of a module returns, called in a new process, with ``environment`` besides this one's."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        return _called(multiprocessing.get_context("spawn"), function, *arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _called(context: BaseContext, function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=context) as pool:  # says so where the process dies; a multiprocessing.Pool would wait for ever
        return pool.submit(function, *arguments).result()


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The k of ``value = c * size ** k`` by least squares over logarithms."""
    x, y = ([math.log(value) for value in side] for side in (sizes, values))
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "scheduler": {0: "ordinary", 1: "real time (fifo)", 2: "real time (round robin)"}.get(os.sched_getscheduler(0), "other"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"\n{title}")
    width = max(len(each.name) for each in rows)
    for each in rows:
        print(f"  {each.name:<{width}}  {each.median:>10.3f} {each.unit:<8} p90 {each.p90:>10.3f}  n={each.n:<4} {each.note}".rstrip())


def write(path: Path | None, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write machine, settings and rows as JSON where a path was given."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **about, "rows": [asdict(each) for each in rows]}, indent=2) + "\n")
    print(f"\nwritten: {path}")
