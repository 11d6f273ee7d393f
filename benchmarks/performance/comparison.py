"""What every part of the performance suite reports: ours beside a peer as a ratio, from paired repetitions in one run.

A part is a script ``python benchmarks/performance/PART.py [--short] [--out part.json]`` that prints its table and writes one :class:`Part`; ``suite.py`` runs
them all and makes one page of them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from measure import machine


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line: medians of both sides and of the ratios of the pairs."""

    name: str
    """What was done, such as ``20M, sharing 3``."""
    peer: str
    """What ours stands beside, such as ``padded rows, best micro-batch``."""
    unit: str
    """Of both sides, such as ``CPU s``."""
    ours: float
    theirs: float
    ratio: float
    """Median over pairs of theirs / ours where less is better, ours / theirs where more is: above 1 ours is better."""
    low: float
    """Least ratio of a pair."""
    high: float
    pairs: int
    limit: float | None = None
    """The most that the ratio can be, where theory says so."""
    bar: float | None = None
    """The least that the project asks of the ratio."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the bar; None where there is none."""
        return None if self.bar is None else self.ratio >= self.bar


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of the suite."""

    title: str
    command: str
    about: Mapping[str, Any]
    """Settings: seeds, sizes, threads, what was measured and how."""
    rows: Sequence[Comparison]
    figures: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Further tables by title, a mapping of column to value for each line: what has no peer."""
    missing: Sequence[str] = ()
    """What was left out, and why."""


def compared(name: str, ours: Sequence[float], theirs: Sequence[float], *, peer: str, unit: str, more_is_better: bool = False, **values: Any) -> Comparison:
    """The comparison of paired repetitions; ``values`` are ``limit``, ``bar`` and ``note``."""
    ratios = [mine / other if more_is_better else other / mine for mine, other in zip(ours, theirs, strict=True)]
    return Comparison(
        name=name,
        peer=peer,
        unit=unit,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        pairs=len(ratios),
        **values,
    )


def show(part: Part) -> None:
    """Print the part as a table."""
    print(f"\n{part.title}")
    width = max((len(row.name) for row in part.rows), default=0)
    for row in part.rows:
        limit = "" if row.limit is None else f"  limit {row.limit:.2f}"
        bar = "" if row.bar is None else f"  bar {row.bar:.2f} {'met' if row.met else 'MISSED'}"
        sides = f"{row.ours:.4g} / {row.theirs:.4g} {row.unit}"
        print(f"  {row.name:<{width}}  {row.ratio:6.2f} x [{row.low:.2f}, {row.high:.2f}] n={row.pairs}  {sides}  {row.peer}{limit}{bar}  {row.note}".rstrip())
    for title, lines in part.figures.items():
        print(f"\n  {title}")
        for line in lines:
            print("    " + "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in line.items()))
    for line in part.missing:
        print(f"  left out: {line}")


def write(path: Path | None, part: Part, more: Mapping[str, Any] | None = None) -> None:
    """Write the part with the machine as JSON, where a path was given; ``more`` stands beside its fields and is read by others."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **(more or {}), **asdict(part)}, indent=2) + "\n")


def read(path: Path) -> tuple[Part, dict[str, Any]]:
    """The part of a file, and the machine that it ran on."""
    values = json.loads(path.read_text())
    return parsed(values), values["machine"]


def parsed(values: Mapping[str, Any]) -> Part:
    """The part of a mapping as :func:`write` makes it, whatever else it has."""
    chosen = {each.name: values[each.name] for each in fields(Part) if each.name in values}
    return Part(**chosen | {"rows": [Comparison(**row) for row in values["rows"]]})
