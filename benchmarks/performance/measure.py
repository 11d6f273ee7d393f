"""What all benchmarks of this folder share: medians of a repeated measurement, the machine they ran on, one table and one JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
