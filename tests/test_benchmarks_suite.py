"""The performance suite: its groups have the sharing they are asked for, its arithmetic, and what becomes of parts that end well and badly."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_modules import load

from arpo_algo.token_tree import sharing

update, growth, suite = load("update"), load("growth"), load("suite")
shapes, comparison, measure, suite_page = (sys.modules[name] for name in ("shapes", "comparison", "measure", "suite_page"))


# -- groups ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_group_shares_what_it_was_asked_to(rows: int, ratio: float, seed: int) -> None:
    made = shapes.group(shapes.Shape(rows=rows, ratio=ratio), vocabulary=2048, seed=seed)
    shared = sharing(made.token_ids, made.lengths, made.mask)
    assert shared.tokens == pytest.approx(ratio, rel=0.04)
    assert made.weights.sum() == pytest.approx(1.0)
    assert made.lengths.mean() == pytest.approx(800, rel=0.1)


def test_a_trajectory_is_trained_on_turns_and_answer_alone() -> None:
    # prompt 10, two turns of 20 sampled and 5 from a tool, answer 3 x 2; each part up to a fifth shorter or longer
    made = shapes.group(shapes.Shape(rows=2, prompt=10, turns=3, sampled=20, result=5, answer=6, ratio=1.0), vocabulary=50)
    for mask, length in zip(made.mask, made.lengths, strict=True):
        runs = [len(run) for run in "".join("x" if trained else "." for trained in mask[:length]).replace(".x", ". x").replace("x.", "x .").split()]
        assert len(runs) == 6
        for run, expected in zip(runs, (10, 20, 5, 20, 5, 6), strict=True):
            assert 0.79 * expected - 1 <= run <= 1.21 * expected + 1
        assert not mask[length:].any() and not mask[0]


def test_the_same_seed_gives_the_same_group_and_another_one_another() -> None:
    shape = shapes.Shape(rows=4, ratio=2.0)
    first, again, other = (shapes.group(shape, vocabulary=100, seed=seed).token_ids for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first[:, :50], other[:, :50])


def test_a_ratio_that_no_group_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="less than the number of rows, 4, got 4"):
        shapes.group(shapes.Shape(rows=4, ratio=4.0), vocabulary=100)


# -- arithmetic ------------------------------------------------------------------------------------------------------------------------------------------


def test_exponent_of_a_power_and_of_points_beside_it() -> None:
    assert measure.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2.0)
    # logarithms to base 2: x 0, 1, 2 and y 0, 3, 3: slope sum((x - 1)(y - 2)) / sum((x - 1)^2) = (2 + 1) / 2
    assert measure.exponent([1, 2, 4], [1, 8, 8]) == pytest.approx(1.5)


def test_break_even_lies_between_the_points_that_cross_one() -> None:
    # from (1.2, 0.9) to (1.6, 1.3): a quarter of the way
    assert update.break_even([(2.0, 1.9), (1.2, 0.9), (1.6, 1.3), (1.0, 0.7)]) == pytest.approx(1.3)
    assert update.break_even([(1.0, 1.1), (2.0, 1.9)]) is None


def test_growth_fits_against_tokens_or_against_the_vocabulary() -> None:
    lines = [{"vocabulary": v, "unique tokens": 7, "CPU s": 3.0 * v, "GFLOP": v**0.5, "peak MB": 5.0} for v in (10, 100)]
    found = growth.fitted("vocabulary", lines)
    assert (found["from"], found["to"], found["against"]) == (10, 100, "vocabulary")
    assert [found[name] for name in ("time", "operations", "memory")] == pytest.approx([1.0, 0.5, 0.0])
    lines = [{"turns": t, "unique tokens": 10 * t * t, "CPU s": 1.0 * t, "GFLOP": t**4.0, "peak MB": 1.0 * t} for t in (2, 4, 8)]
    assert [growth.fitted("turns", lines)[name] for name in ("time", "operations", "memory")] == pytest.approx([0.5, 2.0, 0.5])


def measured(**costs: Any) -> Any:
    kinds = {kind.replace("_", ", ").replace("one", "one batch"): [measure.Cost(*pair) for pair in pairs] for kind, pairs in costs.items()}
    totals = {"tree": (100, 40), "padded": (300, 90)}
    return update.Measured(ratio=3.0, costs=kinds, tokens=2.9, predicted=2.5, totals=totals, flops=1.0, auto_layout="tree")


def test_the_lines_of_an_update() -> None:
    setting = update.Setting(size="20M", rows=16, repeats=2, ratios=(3.0,))
    one = measured(tree=[(2.0, 70), (2.0, 70)], padded=[(4.0, 20), (3.0, 20)], auto=[(2.5, 50), (2.0, 50)])
    padded, auto = update.comparisons(setting, one, 1700)
    assert (padded.ratio, padded.low, padded.high, padded.limit, padded.bar, padded.met) == (1.75, 1.5, 2.0, 2.9, 1.8, False)
    assert (auto.ratio, auto.met) == (0.9, False)  # beside the tree, the fastest: 2 / 2.5 and 2 / 2
    once = {"tree": (2.2, 50), "tree, one piece": (2.5, 30), "padded": (4.0, 20), "padded, one batch": (5.5, 90)}
    once = {kind: measure.Cost(*pair) for kind, pair in once.items()}
    _, whole, memory, piece, beside, _ = update.comparisons(setting, dataclasses.replace(one, returning=once), 1700)
    assert (whole.ratio, whole.bar) == (2.5, None)
    assert (memory.ratio, memory.unit, memory.met) == (1.8, "MB", True)  # 90 / 50, of which it asks 1 / 0.65
    assert (piece.ratio, piece.bar) == (3.0, None)
    assert (beside.ratio, beside.bar) == (0.4, None)
    apart = dataclasses.replace(one, ratio=1.0, costs={**one.costs, "packed": [measure.Cost(1.0, 0)] * 2})
    assert update.comparisons(setting, apart, 1700)[-1].ratio == (1 / 2.5 + 1 / 2) / 2, "packed rows may be the fastest"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"short": True}, [("1M", 16, 2, 5), ("20M", 16, 1, 4)]),
        ({"short": False}, [("1M", 16, 3, 5), ("20M", 16, 3, 5), ("135M", 8, 1, 5)]),
        ({"short": True, "device": "cuda", "sizes": ["135M"]}, [("135M", 16, 2, 5)]),
        ({"short": False, "sizes": ["135M"], "ratios": [3.0]}, [("135M", 8, 1, 1)]),
    ],
)
def test_what_a_run_of_the_update_measures(options: dict[str, Any], expected: list[tuple[str, int, int, int]]) -> None:
    planned = update.planned(argparse.Namespace(**{"device": "cpu", "sizes": None, "ratios": None} | options))
    assert [(each.size, each.rows, each.repeats, len(each.ratios)) for each in planned] == expected


def test_where_the_seconds_go() -> None:
    setting = update.Setting(size="20M", rows=16, repeats=1, ratios=(3.0,))
    line = update.gain_line(setting, measured(tree=[(2.0, 0)], padded=[(5.0, 0)], auto=[(2.0, 0)]), body=0.01, head=0.02)
    assert line["measured gain"] == 2.5
    assert (line["tree body"], line["tree head"], line["tree rest"]) == pytest.approx((1.0, 0.8, 0.2))
    assert (line["padded body"], line["padded head"], line["padded rest"]) == pytest.approx((3.0, 1.8, 0.2))


# -- parts and pages -------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def part() -> Any:
    rows = (
        comparison.compared("fork | copy", [2.0, 2.0], [3.0, 5.0], peer="Peer <x>", unit="ms", limit=3.0, bar=1.5),
        comparison.compared("steps", [10.0], [20.0], peer="Peer", unit="steps/s", more_is_better=True, bar=0.95, note="as it is"),
    )
    figures = {"growth": [{"M": 8, "s": 0.12345}, {"M": 1234, "s": 5678.9, "more": True}]}
    return comparison.Part(title="4. Things & forks", command="python x.py", about={"seed": 0}, rows=rows, figures=figures, missing=["gem: not installed"])


@pytest.fixture
def runs(part: Any) -> list[Any]:
    done = {"command": "python benchmarks/performance/x.py --short", "date": "2026-11-30 12:00", "seconds": 61.4}
    good = suite.Run(name="environments", part=part, machine={"cpu": "A", "cpus": 2, "load": 0.1}, **done)
    return [good, suite.Run(name="cache", part=None, machine={}, error="ended with status 1\nKeyError: '<b>'", **done)]


def test_a_part_is_read_as_it_was_written_whatever_stands_beside_it(part: Any, tmp_path: Path) -> None:
    comparison.write(tmp_path / "deep" / "part.json", part, {"versions": {"gem": "0.1"}})
    again, machine = comparison.read(tmp_path / "deep" / "part.json")
    assert list(again.rows) == list(part.rows)
    assert replace(again, rows=()) == replace(part, rows=())
    assert machine["cpus"] >= 1


def test_markdown_has_every_ratio_once_with_its_bar(runs: list[Any]) -> None:
    text = suite_page.markdown(runs, ["overhead"])
    assert "1 of 2 bars met; cache failed; overhead was not run." in text
    assert r"| environments | fork \| copy | Peer <x> | 2.00 | 1.50 to 2.50 | 2 | 2 ms | 4 ms | 3.00 | 1.50 met |  |" in text
    assert "| environments | steps | Peer | 0.50 | 0.50 to 0.50 | 1 | 10 steps/s | 20 steps/s |  | 0.95 MISSED | as it is |" in text
    assert "| M | s | more |\n| --- | --- | --- |\n| 8 | 0.123 |  |\n| 1,234 | 5,679 | True |" in text
    assert "- environments: cpu A, cpus 2; load 0.1" in text
    assert "- left out: gem: not installed" in text
    assert "## cache: failed\n\n```\nended with status 1\nKeyError: '<b>'\n```" in text


class Reader(HTMLParser):
    """Tags that are open at the end, addresses of other files, and texts by the class of what holds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elsewhere: list[str] = []
        self.classes: list[tuple[str, str]] = []
        self._class = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag == "meta" else [tag]
        self.elsewhere += [value or "" for name, value in attrs if name in ("src", "href")]
        self._class = dict(attrs).get("class") or ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.classes.append((self._class, data))


def test_the_page_stands_alone_and_shows_bars_and_failures(runs: list[Any]) -> None:
    reader = Reader(suite_page.page(runs, ["overhead"]))
    assert reader.open == [] and reader.elsewhere == []
    assert ("met", "1.50 met") in reader.classes and ("missed", "0.95 MISSED") in reader.classes
    assert ("missed", "failed") in reader.classes
    texts = [text for _, text in reader.classes]
    assert "Peer <x>" in texts and "4. Things & forks" in texts and "ended with status 1\nKeyError: '<b>'" in texts


def test_plain_table_is_aligned(runs: list[Any]) -> None:
    lines = suite_page.table(runs).splitlines()
    assert len(lines) == 3
    assert len({line.index(text) for line, text in zip(lines, ("ratio", "2.00", "0.50"), strict=True)}) == 1


GOOD = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--short", action="store_true")
parser.add_argument("--out")
settings = parser.parse_args()
part = {"title": "t", "command": "c", "about": {"short": settings.short}, "rows": [], "figures": {}, "missing": []}
open(settings.out, "w").write(json.dumps({"machine": {"cpu": "A"}, **part}))
"""
BAD = "print('\\n'.join(f'line {n}' for n in range(20)))\nraise KeyError('gone')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for name, text in (("good", GOOD), ("bad", BAD), ("silent", "")):
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path


def test_a_part_that_ends_well_and_ones_that_do_not(folder: Path) -> None:
    good = suite.run("good", full=False, out=folder, folder=folder)
    assert good.error == "" and good.part.about == {"short": True} and good.machine == {"cpu": "A"}
    assert good.command == "python benchmarks/performance/good.py --short"
    assert suite.run("good", full=True, out=folder, folder=folder).part.about == {"short": False}
    (folder / "silent.json").write_text((folder / "good.json").read_text())  # of an earlier run: not to be taken for the result of this one
    bad, silent = (suite.run(name, full=False, out=folder, folder=folder) for name in ("bad", "silent"))
    assert bad.part is None and bad.error.startswith("ended with status 1\n") and bad.error.endswith("KeyError: 'gone'")
    assert "line 0" not in bad.error
    assert silent.part is None and silent.error == "ended with status 0\n"


def test_earlier_runs_are_kept_beside_new_ones(runs: list[Any], tmp_path: Path) -> None:
    assert suite.earlier(tmp_path / "suite.json") == {}
    suite.write(runs, tmp_path, tmp_path / "RESULTS.md")
    kept = suite.earlier(tmp_path / "suite.json")
    assert list(kept) == ["environments", "cache"]
    assert [list(kept["environments"].part.rows), kept["cache"].error] == [list(runs[0].part.rows), runs[1].error]
    assert "update was not run" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "suite.html").read_text().startswith("<!doctype html>")
