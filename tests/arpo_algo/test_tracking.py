"""Trackers: the file survives crashes and resumes, the line fits a terminal, a dead network costs no run."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arpo_algo.tracking import CONSOLE_COLUMNS, Console, JsonLines, TensorBoard, Tracker, Trackers, Trackio, Wandb, read_jsonl


class Recorder:
    def __init__(self, fail: Callable[[int], bool] = lambda step: False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fail, self.closed = fail, 0

    def log(self, step: int, metrics: Any) -> None:
        if self.fail(step):
            raise ConnectionError("no route to host")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def write(path: Path, steps: range, **options: Any) -> None:
    tracker = JsonLines(path, **options)
    for step in steps:
        tracker.log(step, {"loss": step / 10})
    tracker.close()


# -- JsonLines -----------------------------------------------------------------------------------------------------------------------------------------


def test_each_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path / "run" / "metrics.jsonl")
    tracker.log(1, {"reward/mean": 0.1, "count": 3})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.1, "count": 3.0}\n'
    tracker.close()
    tracker.close()


def test_not_finite_is_null_so_that_the_file_stays_json(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path / "m.jsonl")
    tracker.log(1, {"a": math.nan, "b": math.inf, "step": 99.0})
    tracker.close()
    refuse = lambda text: pytest.fail(f"{text} is not JSON")  # noqa: E731
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse) == {"step": 1, "a": None, "b": None}


def test_resume_drops_the_steps_that_come_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 6))
    write(path, range(4, 7), resume_step=4)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4, 5, 6]
    write(path, range(7, 8))  # without resume_step it only appends
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step": 4, "a": "\xc3', b"{", b'{"step"'])
@pytest.mark.parametrize("resume_step", [None, 4, 9])
def test_a_torn_last_line_goes(tmp_path: Path, torn: bytes, resume_step: int | None) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes() + torn)
    write(path, range(4, 5), resume_step=resume_step)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4]


def test_a_last_line_that_lost_only_its_newline_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-1])
    write(path, range(4, 5))
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for broken in ("[1]", '{"loss": 1}', "?"):
        path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 2}}\n')
        with pytest.raises(ValueError, match="line 2"):
            JsonLines(path, resume_step=2)
        assert path.read_text().count("\n") == 3  # untouched


# -- Console -------------------------------------------------------------------------------------------------------------------------------------------


def clock(*seconds: float) -> Callable[[], float]:
    return iter(seconds).__next__


def test_a_plain_line_a_step_with_the_time_left() -> None:
    stream = io.StringIO()
    console = Console(10, stream=stream, clock=clock(0.0, 60.0, 80.0))
    console.log(1, {"reward/mean": 0.5, "accuracy": 0.25, "tool_calls/total": 12.0, "hidden": 1.0})
    console.log(2, {"reward/mean": -0.125, "kl": 0.0012})
    console.close()
    assert stream.getvalue().splitlines() == [
        "step  1/10  eta 9:00  reward +0.500  acc 0.250  calls 12",  # 60 s a step, 9 left
        "step  2/10  eta 5:20  reward -0.125  kl 0.0012",  # 40 s a step, 8 left
    ]


def test_time_left_of_a_resumed_run_counts_its_own_steps() -> None:
    console = Console(100, stream=(stream := io.StringIO()), clock=clock(0.0, 10.0))
    console.log(91, {"accuracy": 1.0})
    assert stream.getvalue() == "step  91/100  eta 1:30  acc 1.000\n"


def test_the_longest_line_fits() -> None:
    values = {"reward/mean": -1.0, "tool_calls/total": 4096.0, "branch/children": 256.0, "entropy/mean": 10.8, "kl": 10.0, "grad_norm": 100.0}
    times = {"seconds/rollout": 1234.5, "seconds/tools": 123.4, "seconds/update": 123.4}
    line = Console(1000, stream=io.StringIO(), clock=clock(0.0, 36_000.0)).line(999, values | times | {"accuracy": 0.5, "eval/accuracy": 0.5})
    assert len(line) <= 160
    assert all(f"  {label} " in line for label, _, _ in CONSOLE_COLUMNS)


def test_other_metrics_are_shown_as_they_are() -> None:
    console = Console(5, stream=(stream := io.StringIO()))
    console.log(5, {"loss": 0.61234, "tokens": math.nan})
    assert stream.getvalue() == "step 5/5  loss=0.6123  tokens=nan\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_lives_below_the_lines() -> None:
    pytest.importorskip("rich")
    console = Console(4, stream=(stream := Terminal()), clock=clock(0.0, 1.0, 2.0))
    console.log(1, {"reward/mean": 0.5, "accuracy": 0.25})
    console.log(2, {"reward/mean": 0.75})
    console.close()
    console.close()
    text = stream.getvalue()
    assert "reward +0.500  acc 0.250" in text and "reward +0.750" in text
    assert "2/4" in text and "━" in text


# -- other trackers ------------------------------------------------------------------------------------------------------------------------------------


def fake_tracker_module() -> Any:
    run = SimpleNamespace(rows=[], finished=0)
    run.log = lambda metrics, step: run.rows.append((step, metrics))
    run.finish = lambda: setattr(run, "finished", run.finished + 1)
    module = SimpleNamespace(run=run, settings=None)

    def init(**settings: Any) -> Any:
        module.settings = settings
        return run

    module.init = init
    return module


@pytest.mark.parametrize(("name", "kind"), [("wandb", Wandb), ("trackio", Trackio)])
def test_run_trackers_pass_settings_steps_and_finite_numbers(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Wandb | Trackio]) -> None:
    module = fake_tracker_module()
    monkeypatch.setitem(sys.modules, name, module)
    tracker = kind(project="arpo", config={"lr": 1e-5})
    tracker.log(3, {"a": 1, "b": math.nan})
    tracker.close()
    assert module.settings == {"project": "arpo", "config": {"lr": 1e-5}}
    assert module.run.rows == [(3, {"a": 1.0})]
    assert module.run.finished == 1


@pytest.mark.parametrize(("name", "make"), [("wandb", Wandb), ("trackio", Trackio), ("tensorboard", lambda: TensorBoard("unused"))])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[], Tracker]) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'arpo\[{name}\]'"):
        make()


def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        tracker = TensorBoard(tmp_path)
        tracker.log(7, {"reward/mean": 0.5, "nothing": math.nan})
        tracker.close()
        events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(7, 0.5)]


# -- Trackers ------------------------------------------------------------------------------------------------------------------------------------------


def test_a_failing_tracker_warns_once_and_the_rest_go_on() -> None:
    broken, sound = Recorder(fail=lambda step: step in (2, 3)), Recorder()
    trackers = Trackers([broken, sound])
    trackers.log(1, {"a": 1.0})
    with pytest.warns(RuntimeWarning, match="Recorder failed.*no route to host"):
        trackers.log(2, {"a": 2.0})
    trackers.log(3, {"a": 3.0})  # no second warning: pytest turns one into an error
    trackers.log(4, {"a": 4.0})
    trackers.close()
    assert [step for step, _ in sound.rows] == [1, 2, 3, 4]
    assert [step for step, _ in broken.rows] == [1, 4]  # tried again at each step
    assert (broken.closed, sound.closed) == (1, 1)


def test_the_file_raises_after_the_others_have_their_metrics(tmp_path: Path) -> None:
    file, after = JsonLines(tmp_path / "m.jsonl"), Recorder()
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        Trackers([file, after]).log(1, {"a": 1.0})
    assert after.rows == [(1, {"a": 1.0})]


def test_ctrl_c_is_not_swallowed() -> None:
    class Interrupted(Recorder):
        def log(self, step: int, metrics: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers([Interrupted()]).log(1, {})
