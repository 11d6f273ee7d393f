"""The forkable Python interpreter beside the other ways to branch one: replay of the cells, dill of the namespace, a fresh interpreter for every call.

    python benchmarks/performance/sandbox.py [--repeats 100] [--level namespaces] [--out figures.json]

Everything is measured in one run, one thing after another in each repetition. On a loaded machine put ``chrt -f 5`` in front (as root) for figures of the
work itself rather than of the waiting. ``--check`` ends with status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from measure import Row, machine, row, seconds, show, write

from arpo_env.sandbox import Limits, Pool, Session, proctree
from arpo_env.sandbox.isolation import LOCAL_LEVELS

CELLS = (
    "import numpy as np, sympy as sp\nx = sp.symbols('x')",
    "roots = sp.solve(x**2 - 5*x + 6, x)",
    "data = np.random.default_rng(0).normal(size=(200, 200))",
    "def score(values):\n    return float(np.linalg.norm(values))",
    "history = [score(data[i]) for i in range(200)]",
)
"""A short history as an episode has it."""
BIG = "big = np.ones(200 * 2**20 // 8)"
MANY = "many = [{'i': i} for i in range(500_000)]"
BARS = {"exec 1+1": 1.0, "fork, five cells": 15.0, "fork, and 200 MB of numpy": 30.0}
"""Milliseconds that the median may take on an idle two-core machine."""
E2B = "E2B, fork of a remote sandbox: its documentation says that the parent pauses, that connections drop, and that pausing takes about 4 s a GiB of memory"


def prepared(pool: Pool, *more: str) -> Session:
    """A session after the five cells and ``more``."""
    session = pool.session()
    for cell in (*CELLS, *more):
        run(session, cell)
    return session


def run(session: Session, code: str) -> None:
    result = session.exec(code, timeout=60)
    if result.status != "ok":
        raise RuntimeError(f"{code!r}: {result.status}: {result.error}")


def fork_and_close(session: Session) -> float:
    made: list[Session] = []
    taken = seconds(lambda: made.append(session.fork()))
    made[0].close()
    return taken


def forks(pool: Pool, repeats: int) -> list[Row]:
    """Costs of the sandbox itself."""
    small, big, many = prepared(pool), prepared(pool, BIG), prepared(pool, MANY)
    rows = [
        row("exec 1+1", [seconds(lambda: run(small, "1+1")) for _ in range(repeats)]),
        row("new session", [new_session(pool) for _ in range(repeats)]),
        row("fork, five cells", [fork_and_close(small) for _ in range(repeats)]),
        row("fork, and 200 MB of numpy", [fork_and_close(big) for _ in range(repeats)]),
        row("fork, and 500,000 dicts", [fork_and_close(many) for _ in range(repeats)]),
    ]
    for session in (small, big, many):
        session.close()
    return rows


def new_session(pool: Pool) -> float:
    made: list[Session] = []
    taken = seconds(lambda: made.append(pool.session()))
    made[0].close()
    return taken


def others(pool: Pool, repeats: int) -> list[Row]:
    """The same five-cell state reached without a fork."""
    few = max(3, repeats // 20)
    rows = [row("replay of the five cells in a new session", [replay(pool) for _ in range(few)])]
    if importlib.util.find_spec("dill"):
        lost = "generators, sqlite, views: lost or wrong"
        rows.append(row("dill dump and load of the namespace", [dill_round_trip() for _ in range(few)], note=lost))
        rows.append(row("the same, and 200 MB of numpy", [dill_round_trip(BIG) for _ in range(few)], note=lost))
    else:
        print("dill is not installed: left out")
    script = "\n".join(CELLS)
    fresh = [seconds(lambda: subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)) for _ in range(few)]
    rows.append(row("fresh interpreter that runs the five cells", fresh, note="what one process a call costs, state rebuilt"))
    bare = [seconds(lambda: subprocess.run([sys.executable, "-c", "print(1+1)"], check=True, capture_output=True)) for _ in range(few)]
    rows.append(row("fresh interpreter, print(1+1)", bare, note="no state at all"))
    return rows


def replay(pool: Pool) -> float:
    made: list[Session] = []
    taken = seconds(lambda: made.append(prepared(pool)))
    made[0].close()
    return taken


def dill_round_trip(*more: str) -> float:
    """Seconds of dump and load of the namespace in an interpreter of its own."""
    timed = ("import dill, time", "start = time.perf_counter()", "dill.loads(dill.dumps({k: v for k, v in globals().items() if k[0] != '_'}))")
    script = "\n".join((*CELLS, *more, *timed, "print(time.perf_counter() - start)"))
    return float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


def leaks(pool: Pool, n: int) -> dict[str, int]:
    """What ``n`` forks leave behind: descriptors and threads of the host, sessions, processes of the sandbox, KiB of the host's memory."""
    session = prepared(pool)
    fork_and_close(session)
    before = resources(pool)
    for _ in range(n):
        fork_and_close(session)
    for _ in range(100):  # the last copies may still be on their way out
        if resources(pool)["processes"] <= before["processes"]:
            break
        time.sleep(0.02)
    grown = {name: value - before[name] for name, value in resources(pool).items()}
    session.close()
    return grown


def resources(pool: Pool) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "sessions": pool.open_sessions,
        "processes": len(proctree.descendants(pool.pid)),
        "host memory KiB": int(status["VmRSS"].split()[0]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--level", choices=LOCAL_LEVELS, default=None, help="a weaker isolation level than the strongest that this machine gives")
    parser.add_argument("--forks", type=int, default=1000, help="forks of the leak check")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    started: list[Pool] = []
    start = seconds(lambda: started.append(Pool(("numpy", "sympy"), Limits(), level=args.level)))
    with started[0] as pool:
        print(f"{machine()}\n{pool.report}")
        rows = [row("pool start, numpy and sympy imported", [start]), *forks(pool, args.repeats), *others(pool, args.repeats)]
        show(f"level {pool.report.level}", rows)
        by_name = {each.name: each.median for each in rows}
        fork = by_name["fork, five cells"]
        ratios = {name: round(value / fork, 1) for name, value in by_name.items() if "fresh" in name or "replay" in name or "dill" in name or "same" in name}
        print("\ntimes the cost of a fork:", ratios, f"\n{E2B}")
        grown = leaks(pool, args.forks)
        print(f"after {args.forks} forks more:", grown)
        write(args.out, {"level": pool.report.level, "ratios_to_fork": ratios, "grown": grown, "forks": args.forks}, rows)
    missed = {name: (by_name[name], bar) for name, bar in BARS.items() if by_name[name] > bar}
    print(f"bars missed, as (median ms, bar ms): {missed}" if missed else f"all bars kept: {BARS}")
    return int(args.check and bool(missed or any(grown[name] for name in ("descriptors", "threads", "sessions", "processes"))))


if __name__ == "__main__":
    sys.exit(main())
