"""A whole GRPO step beside TRL's ``GRPOTrainer`` on the CPU: sampling, update, all of it, and the rewards that both reach.

::

    python benchmarks/performance/grpo_step.py --short     # under three minutes of an idle machine
    python benchmarks/performance/grpo_step.py             # a quarter of an hour

Each trainer runs its own ``train()`` in a process of its own and waits after every step until it is asked for the next, so that steps alternate and a pair of
steps has met the same machine; the first step is not counted. ``grpo_task.py`` says what is made equal. *Sampling* is everything up to the scored batch
with its advantages, *update* the rest of the step, in CPU seconds of the process.

Without branching, one turn: the same groups. In World, several turns: ours as GRPO and as ARPO (branched by entropy, half of the group started at the
question) beside TRL's own tool-calling loop, at equal numbers of trajectories; and TRL's update of our branched rollouts beside our own of them. Groups whose
rewards are all equal, which have no gradient, are left out by ours and computed by TRL. The limit beside padded rows counts tokens, not the padding that early
ends leave.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import itertools
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from comparison import Comparison, Part, compared, show, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the children
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import grpo_task as task
import torch

from arpo_algo import EntropyBranching
from arpo_algo.learner import Learner

WARM_UP = 1
"""Steps of each race that are not counted."""
PADDED_TOKENS = 2048
"""Of a micro-batch of padded rows: the fastest on this machine."""
PRELOAD = ["trl.trainer.grpo_trainer", "trl.trainer.grpo_config", "arpo_algo.train", "datasets"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a trainer's process says of one step. Times are (CPU seconds, wall seconds)."""

    whole: tuple[float, float]
    parts: Mapping[str, tuple[float, float]]
    facts: Mapping[str, float]

    @property
    def cpu(self) -> dict[str, float]:
        """CPU seconds of sampling, update and the whole step, and of what else was timed."""
        sampling = self.parts["sampling"][0]
        return {"sampling": sampling, "update": self.whole[0] - sampling, "whole": self.whole[0]} | {
            name: seconds for name, (seconds, _) in self.parts.items() if name != "sampling"
        }


class Meter:
    """In a trainer's process: times the parts of a step, reports it, and waits for the next."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.begin()

    def begin(self) -> None:
        """Wait until asked for a step. The process ends when nobody will ask any more."""
        try:
            self.connection.recv()
        except EOFError:
            raise SystemExit(0) from None
        self.parts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self.aside, self.facts = np.zeros(2), dict[str, float]()
        self.start = _clocks()

    def end(self, **facts: float) -> None:
        """Report the step."""
        whole = _clocks() - self.start - self.aside
        parts = {name: (float(seconds[0]), float(seconds[1])) for name, seconds in self.parts.items()}
        self.connection.send(Step(whole=(float(whole[0]), float(whole[1])), parts=parts, facts=self.facts | facts))
        self.begin()

    def timed(self, name: str, function: Callable[..., Any], *, aside: bool = False) -> Callable[..., Any]:
        """``function``, its time added to the part ``name``; ``aside``: and taken off the whole."""

        def measured(*args: Any, **keywords: Any) -> Any:
            start = _clocks()
            result = function(*args, **keywords)
            self.parts[name] += _clocks() - start
            if aside:
                self.aside += _clocks() - start
            return result

        return measured

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Our trainer's tracker: called when a step is done."""
        self.end(reward=metrics["reward/mean"], tokens=metrics["tokens_trained"], sharing=metrics["sharing"], tree=metrics["tree_layout"])

    def close(self) -> None:
        """Nothing to close."""


def _clocks() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def run_ours(setting: task.Setting, folder: Path, meter: Meter, *, branching: Any = None, padded: bool = False) -> None:
    """Train until nobody asks; ``padded``: a twin that is never sampled from makes every update in padded rows as well, aside."""
    trainer = task.make_ours(setting, folder, branching=branching, trackers=[meter])
    timed: Any = trainer
    timed.sample, timed.assemble = meter.timed("sampling", trainer.sample), meter.timed("sampling", trainer.assemble)
    update = meter.timed("learner", trainer.learner.update)
    if padded:
        twin = Learner(copy.deepcopy(trainer.model), replace(trainer.config, layout="padded", micro_batch_tokens=PADDED_TOKENS))
        again = meter.timed("padded", twin.update, aside=True)

        ours_first = itertools.cycle((False, True))

        def both(rows: Any) -> Any:
            if next(ours_first):
                metrics = update(rows)
                again(rows)
                return metrics
            again(rows)
            return update(rows)

        timed.learner.update = both
    else:
        timed.learner.update = update
    trainer.train()


def run_trl(setting: task.Setting, folder: Path, meter: Meter, *, branching: Any = None) -> None:
    """Train until nobody asks."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **keywords: Any) -> None:
            meter.end()

    trainer = task.make_trl(setting, folder, branching=branching, callbacks=[Turns()])
    generate = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        batch = generate(inputs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        meter.facts.update(tokens=float(mask.sum()), reward=float(np.mean(trainer._metrics["train"]["reward"][-1:])))
        return batch

    trainer._generate_and_score_completions = meter.timed("sampling", noted)
    trainer.train()


Run = Callable[[task.Setting, Path, Meter], None]


def child(connection: Connection, run: Run, setting: task.Setting, folder: Path) -> None:
    """One trainer's process."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - both trainers print every step
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(setting.threads)
    run(setting, folder, Meter(connection))


def race(setting: task.Setting, sides: Mapping[str, Run], steps: int) -> dict[str, list[Step]]:
    """The steps of every side, ``WARM_UP`` more than ``steps``, taken in turn; who begins alternates. Raises ``RuntimeError`` where a process ends early."""
    context = multiprocessing.get_context("forkserver")
    taken: dict[str, list[Step]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = {}, []
        for name, run in sides.items():
            here, there = context.Pipe()
            processes.append(context.Process(target=child, args=(there, run, setting, Path(folder) / name), daemon=True))
            processes[-1].start()
            there.close()
            ends[name] = here
        try:
            for number in range(WARM_UP + steps):
                for name in list(sides) if number % 2 else reversed(list(sides)):
                    ends[name].send("go")
                    taken[name].append(ends[name].recv())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"{setting.name}: the process of {name} ended at step {number}; what it said stands above") from error
        finally:
            for end in ends.values():
                end.close()
            for process in processes:
                process.join(30)
                process.kill()
    return taken


# -- what is compared ----------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What the races add up to."""

    rows: list[Comparison] = field(default_factory=list)
    work: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, ours: Sequence[Step], theirs: Sequence[Step], *parts: str, note: str = "") -> None:
        """A row for each part of a step."""
        counts = [statistics.mean(step.facts["tokens"] for step in steps) for steps in (ours, theirs)]
        note = f"{note}; trained tokens a step {counts[0]:,.0f} / {counts[1]:,.0f}".lstrip("; ")
        for part in parts:
            mine, other = ([step.cpu[part] for step in steps] for steps in (ours, theirs))
            self.rows.append(compared(f"{name}: {part}", mine, other, peer=peer(), unit="CPU s", note=note))

    def add_padded(self, name: str, steps: Sequence[Step]) -> None:
        """What the layout gives: our update as it chose beside the same rows padded; the ratio of all to unique tokens is the limit."""
        sharing, trees = ([step.facts[name] for step in steps] for name in ("sharing", "tree"))
        chosen, padded = ([step.cpu[part] for step in steps] for part in ("learner", "padded"))
        note = f"tree in {statistics.mean(trees):.0%} of the steps"
        limit = statistics.median(sharing)
        self.rows.append(compared(f"{name}: update by layout", chosen, padded, peer="ours, padded rows", unit="CPU s", limit=limit, note=note))

    def add_work(self, case: str, taken: Mapping[str, Sequence[Step]]) -> None:
        """Tokens and seconds of every side: how much each trained."""
        for side, steps in taken.items():
            line: dict[str, Any] = {"case": case, "side": side, "steps": len(steps)}
            line |= {"trained tokens a step": statistics.mean(step.facts["tokens"] for step in steps)}
            line |= {f"{part}, CPU s": statistics.median(step.cpu[part] for step in steps) for part in ("sampling", "update", "whole")}
            line |= {"whole, wall s": statistics.median(step.whole[1] for step in steps)}
            self.work.append(line | {"mean reward": statistics.mean(step.facts["reward"] for step in steps)})

    def add_rewards(self, name: str, races: Sequence[Mapping[str, Sequence[Step]]], last: int) -> None:
        """A pair for each seed: the mean reward of the last steps."""
        ours, theirs = ([[step.facts["reward"] for step in taken[side]] for taken in races] for side in ("ours", "TRL"))
        first = " / ".join(f"{statistics.mean(curve[0] for curve in curves):.3f}" for curves in (ours, theirs))
        note = f"mean of the last {last} of {len(ours[0])} steps, a pair a seed; first step {first}"
        reached = [[statistics.mean(curve[-last:]) for curve in curves] for curves in (ours, theirs)]
        self.rows.append(compared(f"{name}: final reward", *reached, peer=peer(), unit="reward", more_is_better=True, bar=0.9, note=note))
        for side, curves in (("ours", ours), ("TRL", theirs)):
            self.rewards += [{"seed": seed, "side": side, "reward by step": " ".join(f"{value:.3f}" for value in curve)} for seed, curve in enumerate(curves)]


def peer() -> str:
    return f"TRL {importlib.metadata.version('trl')} GRPOTrainer"


def single_turn(report: Report, setting: task.Setting, steps: int, seeds: int) -> None:
    """No branching, one turn; the steps of all seeds are pairs. With several seeds the rewards of the last quarter of the steps are compared too."""
    sides = {"ours": partial(run_ours, padded=True), "TRL": run_trl}
    races = [race(replace(setting, seed=seed), sides, steps) for seed in range(seeds)]
    taken = {side: [step for one in races for step in one[side][WARM_UP:]] for side in sides}
    report.add(setting.name, taken["ours"], taken["TRL"], "sampling", "update", "whole")
    report.add_padded(setting.name, taken["ours"])
    report.add_work(setting.name, taken)
    if seeds > 1:
        report.add_rewards(setting.name, races, max(1, (steps + WARM_UP) // 4))


def world(report: Report, setting: task.Setting, steps: int) -> None:
    """Several turns with tools, without and with branching."""
    branching = EntropyBranching()
    sides = {
        "ours, GRPO": run_ours,
        "TRL, its own tool loop": run_trl,
        "ours, ARPO": partial(run_ours, branching=branching, padded=True),
        "TRL, our ARPO rollouts": partial(run_trl, branching=branching),
    }
    taken = {side: steps_[WARM_UP:] for side, steps_ in race(setting, sides, steps).items()}
    grpo, loop, arpo, rollouts = taken.values()
    report.add(f"{setting.name}, GRPO", grpo, loop, "sampling", "update", "whole", note="TRL's own tool-calling loop")
    report.add(f"{setting.name}, ARPO beside GRPO", arpo, loop, "sampling", "update", "whole", note="TRL cannot branch; equal numbers of trajectories")
    report.add(f"{setting.name}, ARPO rollouts in both", arpo, rollouts, "update", "whole", note="TRL given our branched rollouts")
    report.add_padded(f"{setting.name}, ARPO", arpo)
    report.add_work(setting.name, taken)


def cold_start(folder: Path, steps: int, batch_size: int) -> None:
    """The quickstart's policy, trained on ``steps`` batches of demonstrations, written to ``folder``."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    import quickstart

    torch.set_num_threads(1)
    settings = quickstart.Settings()
    settings = replace(settings, sft=replace(settings.sft, steps=steps, batch_size=batch_size))
    model, _ = quickstart.cold_start(settings, task.WorldTasks(task.WorldConfig(split="train")), task.world_vocabulary(task.WorldConfig()))
    model.save_pretrained(folder)


SMALL = task.Setting(name="1M, one turn", hidden=128, layers=4)
LARGE = task.Setting(name="20M, one turn", hidden=512, layers=6, prompts=2, lr=1e-4)
WORLD = task.Setting(name="World", new_tokens=24, lr=5e-4, prompts=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="under three minutes")
    parser.add_argument("--out", type=Path, help="write the part as JSON")
    options = parser.parse_args()
    report, missing = Report(), []
    if importlib.util.find_spec("trl") is None:
        missing.append("all of it: TRL is not installed (pip install 'arpo[trl]')")
    else:
        run_all(report, short=options.short)
    settings = [{name: str(value) for name, value in asdict(setting).items()} for setting in (SMALL, LARGE, WORLD)]
    part = Part(
        title="A whole GRPO step beside TRL's GRPOTrainer, CPU, one thread",
        command=f"python benchmarks/performance/grpo_step.py{' --short' if options.short else ''}",
        about={"settings": settings, "made equal": task.__doc__, "measured": __doc__},
        rows=report.rows,
        figures={"What each side did": report.work, "Rewards": report.rewards},
        missing=missing,
    )
    show(part)
    write(options.out, part)


def run_all(report: Report, *, short: bool) -> None:
    """Every race, in the short or the long form."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOAD)
    single_turn(report, replace(SMALL, prompts=2) if short else SMALL, steps=9 if short else 24, seeds=2 if short else 3)
    single_turn(report, LARGE, steps=1 if short else 5, seeds=1)
    with tempfile.TemporaryDirectory() as folder:
        start = processes.Process(target=cold_start, args=(Path(folder), *((200, 16) if short else (400, 48))))
        start.start()
        start.join()
        world(report, replace(WORLD, world=Path(folder), prompts=4 if short else 8), steps=5 if short else 16)


if __name__ == "__main__":
    main()
