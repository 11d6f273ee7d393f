"""Search over one's own documents, and the cache of tool results: what they cost on this machine, in one command.

::

    python benchmarks/performance/search.py                       # 200,000 passages: some minutes, most of them for the baseline
    python benchmarks/performance/search.py --documents 10000     # seconds

Synthetic passages of 40 to 120 words, which follow Zipf's law; queries of five words of one passage, any of which may match. ``TantivyIndex`` beside SQLite's
FTS5 over the same passages. Each part runs in a process of its own, so that its memory is its own. ``mrr`` (mean of 1 / rank of the passage that the words
come from, within 10) says that both find what they should. Then operations of ``ToolCache`` a second, 30 % of them writes of 6 kB, in 1 and in 4 processes.
Processor time (``cpu``; in a build with the making of the texts) says what an idle machine would take. ``--out`` writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import apart, machine

from arpo_env.tools.cache import CacheKey, ToolCache
from arpo_env.tools.search import TantivyIndex

VOCABULARY, BLOCK, TOP = 50_000, 1000, 10
VALUE = "x" * 6000


def passages(count: int) -> Iterator[str]:
    """``count`` passages, the same every time."""
    rng = np.random.default_rng(0)
    cumulative = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    words = np.array([f"w{n}" for n in range(VOCABULARY)], dtype=object)
    for start in range(0, count, BLOCK):
        lengths = rng.integers(40, 121, min(BLOCK, count - start))
        drawn = words[np.searchsorted(cumulative, rng.random(lengths.sum()) * cumulative[-1])]
        yield from (" ".join(part) for part in np.split(drawn, np.cumsum(lengths)[:-1]))


def queries(documents: int, count: int) -> list[tuple[int, str]]:
    """Positions of passages and five words of each."""
    rng = random.Random(1)
    wanted = set(rng.sample(range(documents), min(count, documents)))
    return [(n, " ".join(rng.sample(text.split(), 5))) for n, text in enumerate(passages(documents)) if n in wanted]


def megabytes(path: Path) -> float:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir())) / 2**20


def private_mb() -> float:
    """Memory that this process shares with no other, in MiB; pages of a mapped file belong to the system and do not count. NaN where it is not to be had."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        return math.nan
    return sum(int(line.split()[1]) for line in rollup.read_text().splitlines() if line.startswith(("Private_Dirty", "Private_Hugetlb"))) / 2**10


def peak_mb() -> float:
    """The most resident memory that this process had, mapped files included, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class Timed:
    """An iterator that knows how long it took itself."""

    def __init__(self, items: Iterator[str]):
        self.items, self.seconds = items, 0.0

    def __iter__(self) -> Iterator[str]:
        while True:
            start = time.perf_counter()
            item = next(self.items, None)
            self.seconds += time.perf_counter() - start
            if item is None:
                return
            yield item


def build_tantivy(path: Path, documents: int) -> dict[str, float]:
    return _build(lambda texts: TantivyIndex.build(({"text": text, "url": str(n)} for n, text in enumerate(texts)), path), path, documents)


def build_fts5(path: Path, documents: int) -> dict[str, float]:
    def build(texts: Timed) -> None:
        connection = sqlite3.connect(path)
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5 (text)")
        connection.executemany("INSERT INTO passages (rowid, text) VALUES (?, ?)", ((n, text) for n, text in enumerate(texts)))
        connection.execute("INSERT INTO passages (passages) VALUES ('optimize')")
        connection.commit()
        connection.close()

    return _build(build, path, documents)


def _build(build: Callable[[Timed], object], path: Path, documents: int) -> dict[str, float]:
    texts = Timed(passages(documents))
    start, work = time.perf_counter(), time.process_time()
    build(texts)
    seconds, work = time.perf_counter() - start - texts.seconds, time.process_time() - work
    return {"build_s": seconds, "cpu_s": work, "disk_mb": megabytes(path), "peak_mb": peak_mb()}


def ask_tantivy(path: Path, asked: list[tuple[int, str]]) -> dict[str, float]:
    before = private_mb()
    index = TantivyIndex.open(path)
    return _ask(before, lambda text: [int(hit.url) for hit in index.search(text, TOP)], asked)


def ask_fts5(path: Path, asked: list[tuple[int, str]]) -> dict[str, float]:
    before = private_mb()
    connection = sqlite3.connect(path)
    statement = "SELECT rowid, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
    return _ask(before, lambda text: [row[0] for row in connection.execute(statement, (" OR ".join(text.split()), TOP))], asked)


def _ask(before: float, search: Callable[[str], list[int]], asked: list[tuple[int, str]]) -> dict[str, float]:
    search(asked[0][1])
    milliseconds, processor, reciprocal = [], [], []
    for position, text in asked:
        start, work = time.perf_counter(), time.process_time()
        found = search(text)
        processor.append(1e3 * (time.process_time() - work))
        milliseconds.append(1e3 * (time.perf_counter() - start))
        reciprocal.append(1 / (found.index(position) + 1) if position in found else 0.0)
    quantiles = statistics.quantiles(milliseconds, n=100, method="inclusive")
    return {
        "queries": len(asked),
        "p50_ms": quantiles[49],
        "p99_ms": quantiles[98],
        "p50_cpu_ms": statistics.median(processor),
        "mrr": statistics.fmean(reciprocal),
        "grown_mb": private_mb() - before,
        "peak_mb": peak_mb(),
    }


def use_cache(path: Path, worker: int, seconds: float, start: Any) -> int:
    """Operations on the cache within ``seconds``."""
    cache, rng, count = ToolCache(path), random.Random(worker), 0
    start.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        key = CacheKey("search", "1", {"k": 5}, {"query": f"query {rng.randrange(5000)}"})
        if rng.random() < 0.3:
            cache.put(key, VALUE)
        else:
            value = cache.get(key)
            assert value is None or value == VALUE
        count += 1
    cache.close()
    return count


def cache_operations(folder: Path, processes: int, seconds: float) -> float:
    """Operations a second of all processes together."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(processes) as pool:
        start = manager.Barrier(processes)
        counts = pool.starmap(use_cache, [(folder / f"cache-{processes}", n, seconds, start) for n in range(processes)], chunksize=1)
    return sum(counts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--baseline-queries", type=int, default=60, help="FTS5 takes most of a second for one at 200,000 passages")
    parser.add_argument("--cache-seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    report: dict[str, Any] = {"documents": options.documents, "machine": machine()}
    asked = queries(options.documents, options.queries)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for engine, build, ask, count in (
            ("tantivy", build_tantivy, ask_tantivy, options.queries),
            ("fts5", build_fts5, ask_fts5, options.baseline_queries),
        ):
            report[engine] = {
                "build": apart(build, folder / engine, options.documents),
                "search": apart(ask, folder / engine, asked[:: math.ceil(len(asked) / count)]),
            }
            for part, figures in report[engine].items():
                print(f"{engine:8} {part:7}", "  ".join(f"{figure} {value:.2f}" for figure, value in figures.items()), flush=True)
        for processes in (1, 4):
            report[f"cache_ops_per_s_{processes}"] = rate = cache_operations(folder, processes, options.cache_seconds)
            print(f"cache    {processes} process{'es' * (processes > 1)}: {rate:.0f} operations/s", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
