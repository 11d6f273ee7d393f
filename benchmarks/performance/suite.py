"""Runs the performance suite: every part beside its peers, one table, one page.

    python benchmarks/performance/suite.py [--full] [--only update cache] [--out runs/bench]

Parts run one after another, each in a process of its own, so that they do not disturb each other; what a part prints goes to ``OUT/NAME.log``. A part that
fails is listed with its last lines. With ``--only`` the other parts are those of an earlier run in the same folder, each with its own date. Written are
``OUT/suite.json``, ``OUT/suite.html`` and ``benchmarks/RESULTS.md``. The short form takes less than 15 minutes on two idle cores; the full one takes hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import suite_page
from comparison import Part, parsed, read

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PARTS = ("update", "grpo_step", "schedules", "environments", "growth", "budget", "cache", "overhead", "head_memory")
"""Scripts of this folder, each with ``--short`` and ``--out``, in the order in which they run and are shown."""
LAST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One part as it was run."""

    name: str
    command: str
    date: str
    """When it ended, UTC."""
    seconds: float
    part: Part | None
    machine: Mapping[str, Any]
    error: str = ""
    """The last lines of a part that failed."""


def run(name: str, *, full: bool, out: Path, folder: Path = FOLDER) -> Run:
    """Run one part to its end, whatever that is."""
    written, log = out / f"{name}.json", out / f"{name}.log"
    written.unlink(missing_ok=True)
    options = [] if full else ["--short"]
    start = time.perf_counter()
    with log.open("w") as output:
        command = [sys.executable, str(folder / f"{name}.py"), *options, "--out", str(written)]
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    failed = status != 0 or not written.exists()
    part, machine = (None, {}) if failed else read(written)
    error = f"ended with status {status}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if failed else ""
    return Run(
        name=name,
        command=" ".join(["python", f"benchmarks/performance/{name}.py", *options]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        seconds=time.perf_counter() - start,
        part=part,
        machine=machine,
        error=error,
    )


def earlier(path: Path) -> dict[str, Run]:
    """The runs of a ``suite.json`` by name; none where there is no such file."""
    if not path.exists():
        return {}
    runs = (Run(**line | {"part": None if line["part"] is None else parsed(line["part"])}) for line in json.loads(path.read_text())["runs"])
    return {each.name: each for each in runs}


def write(runs: Sequence[Run], out: Path, results: Path) -> None:
    """The three files."""
    missing = [name for name in PARTS if name not in {each.name for each in runs}]
    (out / "suite.json").write_text(json.dumps({"runs": [asdict(each) for each in runs]}, indent=2) + "\n")
    (out / "suite.html").write_text(suite_page.page(runs, missing))
    results.write_text(suite_page.markdown(runs, missing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all sizes and repetitions; the short form is the default")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=f"parts to run: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench", help="folder of logs, JSON and page")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "RESULTS.md", help="the results as Markdown")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = earlier(arguments.out / "suite.json") if set(arguments.only) != set(PARTS) else {}
    for name in (name for name in PARTS if name in arguments.only):
        print(f"{name} ...", end=" ", flush=True)
        runs[name] = run(name, full=arguments.full, out=arguments.out)
        print(f"{runs[name].seconds:.0f} s" + (", FAILED" if runs[name].error else ""), flush=True)
        write([runs[name] for name in PARTS if name in runs], arguments.out, arguments.results)  # what is there survives an interruption
    print("\n" + suite_page.table([runs[name] for name in PARTS if name in runs]))
    print(f"\nwritten: {arguments.out / 'suite.html'}, {arguments.results}")
    return 1 if any(runs[name].error for name in arguments.only) else 0


if __name__ == "__main__":
    sys.exit(main())
