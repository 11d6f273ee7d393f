"""Where the metrics of a run go: a file, the terminal, an experiment tracker. A tracker is anything with ``log(step, metrics)`` and ``close()``."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Takes the metrics of each step."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None:
        """Write what is left and free what is held; may be called twice."""
        ...


class JsonLines:
    """One JSON object a line, written through at once: ``{"step": 3, "reward/mean": 0.5, ...}``; NaN and infinities are null.

    ``resume_step=s`` drops the lines of step s and later, which a resumed run writes again. A last line that a crash tore is dropped in any case; a broken line
    before it raises ``ValueError``.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in read_jsonl(self.path) if resume_step is None or row["step"] < resume_step]
            replacement = self.path.with_name(self.path.name + ".tmp")
            replacement.write_text("".join(kept), encoding="utf-8")
            os.replace(replacement, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        row = {"step": step} | {name: value if math.isfinite(value) else None for name, value in numbers.items()} | {"step": step}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics file without a torn last line. Raises ``ValueError`` naming the line when an earlier one is broken."""
    lines, rows = Path(path).read_bytes().split(b"\n"), []
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f'{path}, line {number}: expected a JSON object with "step", got {line[:80]!r}') from error
        else:
            rows.append(row)
    return rows


CONSOLE_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", "{:+.3f}"),
    ("acc", "accuracy", "{:.3f}"),
    ("eval", "eval/accuracy", "{:.3f}"),
    ("calls", "tool_calls/total", "{:.0f}"),
    ("branch", "branch/children", "{:.0f}"),
    ("H", "entropy/mean", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("roll", "seconds/rollout", "{:.1f}s"),
    ("tools", "seconds/tools", "{:.1f}s"),
    ("upd", "seconds/update", "{:.1f}s"),
)
"""Label, metric and format of what the terminal shows of a step."""


class Console:
    """One line a step; on a terminal with a live progress bar below.

    ``total`` is the number of steps, counted from 1. A line shows those of :data:`CONSOLE_COLUMNS` that the metrics hold, at most 160 characters, or
    ``name=value`` pairs when they hold none of them. ``clock`` gives seconds.
    """

    def __init__(self, total: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._stream = sys.stdout if stream is None else stream
        self._clock, self._start, self._first = clock, clock(), 0
        self._bar = _Bar(total, self._stream) if self._stream.isatty() else None

    def log(self, step: int, metrics: Metrics) -> None:
        self._first = self._first or step  # a resumed run does not start at 1
        line = self.line(step, metrics)
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.show(step, line)

    def line(self, step: int, metrics: Metrics) -> str:
        """What is printed for a step."""
        head = f"step {step:>{len(str(self.total))}}/{self.total}"
        shown = [(label, form.format(metrics[name])) for label, name, form in CONSOLE_COLUMNS if name in metrics]
        if not shown:
            return f"{head}  " + "  ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        per_step = (self._clock() - self._start) / max(step - self._first + 1, 1)
        return f"{head}  eta {_duration(per_step * max(self.total - step, 0))}  " + "  ".join(f"{label} {text}" for label, text in shown)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """A rich progress bar with the lines of past steps above it."""

    def __init__(self, total: int, stream: TextIO) -> None:
        console = _require("rich.console", "train").Console(file=stream)
        progress = _require("rich.progress", "train")
        times = (progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn())
        self._progress = progress.Progress(progress.TextColumn("train"), progress.BarColumn(), progress.MofNCompleteColumn(), *times, console=console)
        self._task = self._progress.add_task("train", total=total)
        self._progress.start()

    def show(self, step: int, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._progress.stop()


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TensorBoard:
    """Scalars in ``folder`` for ``tensorboard --logdir``. Values that are not finite are left out, here and in the trackers below: there is nothing to plot."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _require("tensorboard", "tensorboard")  # before torch, whose own message does not say how to install it
        self._writer = _require("torch.utils.tensorboard", "train").SummaryWriter(str(folder))

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in _finite(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; ``settings`` go to ``wandb.init`` (project, name, config, id and resume, mode...)."""

    def __init__(self, **settings: Any) -> None:
        self._run = _require("wandb", "wandb").init(**settings)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio; ``settings`` go to ``trackio.init`` (project, name, config, space_id...)."""

    def __init__(self, **settings: Any) -> None:
        self._run = _require("trackio", "trackio").init(**settings)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Sends everything to several trackers.

    One that fails (a network, a full quota) warns once and is tried again at the next step: a run does not die of its plots. The file does raise, because a run
    that loses its record should stop: an error of a :class:`JsonLines` goes through, after the others have got their metrics.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)
        self._failed: set[int] = set()

    def log(self, step: int, metrics: Metrics) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, action: Callable[[Tracker], None]) -> None:
        fatal: Exception | None = None
        for index, tracker in enumerate(self.trackers):
            try:
                action(tracker)
            except Exception as error:
                if isinstance(tracker, JsonLines):
                    fatal = error
                elif index not in self._failed:
                    self._failed.add(index)
                    message = f"{type(tracker).__name__} failed and may miss steps; training goes on: {type(error).__name__}: {error}"
                    warnings.warn(message, RuntimeWarning, stacklevel=3)
        if fatal is not None:
            raise fatal


def _finite(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this tracker needs {module}: pip install 'arpo[{extra}]' ({error})") from error
