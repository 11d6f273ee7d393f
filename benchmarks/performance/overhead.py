"""Where the CPU time of sampling goes beside the model: scheduler, codec, environments, cache, and the whole training step of the quickstart.

    python benchmarks/performance/overhead.py [--short] [--out overhead.json]

Two models sample ARPO groups in ``arpo/World-v0``. The quickstart's, cold-started, in the quickstart's own training loop: 235,000 parameters, so that
everything beside the model shows. And one of SmolLM2-135M's shape with random weights, a byte-level BPE tokenizer and ChatML, in the prose World: each
forward raises the logits of what followed its token in demonstrations, so that turns look like demonstrations (a sentence of thought, a call or an answer)
and tool calls, results and branches come about as usual.

The model's CPU time is measured around each forward that samples, keys and values written included. What is left of the total is divided by a profile: a
timer looks at the stack after every few milliseconds of CPU time, and the innermost of our files says whose time it was. Environments are stepped in the
event loop (``env_workers=0``, as the quickstart does), so that one thread does it all; what threads cost is a figure of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import torch
from comparison import Comparison, Part, compared, show, write
from shapes import SIZES
from shapes import model as shaped_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from quickstart import Settings, cold_start

from arpo_algo import ARPOTrainer, ChatCodec, EntropyBranching, RolloutConfig
from arpo_algo.env_worker import EnvWorker
from arpo_algo.packing import Rows
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.rollout import sample_groups
from arpo_algo.sampler import run_async
from arpo_algo.tree import RolloutTree
from arpo_env.envs.world import WorldConfig, WorldEnv, WorldTasks, world_vocabulary
from arpo_env.envs.world_traces import FLAWLESS, demonstration

ROOT = f"{Path(__file__).resolve().parents[2]}/"
PARTS = {
    "arpo_algo/policies/kv_cache.py": "cache",
    "arpo_algo/policies/kv_buffers.py": "cache",
    "arpo_algo/policies/decoding.py": "cache",
    "arpo_algo/policies/base_attention.py": "cache",
    "arpo_algo/policies/sampling.py": "sampling",
    "arpo_algo/policies/stops.py": "codec",
    "arpo_algo/codec.py": "codec",
    "arpo_algo/tokenizing.py": "codec",
    "arpo_algo/fitting.py": "codec",
    "arpo_algo/env_worker.py": "environments",
    "arpo_env/": "environments",
    "arpo_algo/": "scheduler",
}
"""Whose time a file's is, the first that fits. What no file of ours called (the event loop) is the scheduler's."""
INTERVAL = 0.002
"""CPU seconds between looks at the stack; the kernel rounds them up to its own tick."""
BAR = 1 / 1.1
"""The project's for the 135M model: at most a tenth of the CPU time beside the model's own."""


@dataclass(kw_only=True)
class Run:
    """CPU seconds of one sampling."""

    total: float = 0.0
    forward: float = 0.0
    """In the model."""
    seen: Counter[str] = field(default_factory=Counter)
    """Beside the model, as seen by the timer."""


class Profile:
    """What is sampled in ``with profile.running()`` with ``model``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.runs: list[Run] = []
        self._run: Run | None = None
        self._in_forward = False
        self._since = 0.0
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave)

    @contextmanager
    def running(self) -> Iterator[None]:
        before = signal.signal(signal.SIGPROF, self._look)
        run = self._run = Run()
        started = self._since = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            run.total = time.process_time() - started
            signal.signal(signal.SIGPROF, before)
            self._run = None
            self.runs.append(run)

    def _enter(self, *_: Any) -> None:
        self._in_forward, self._since = True, time.process_time()

    def _leave(self, *_: Any) -> None:
        entered, self._in_forward, self._since = self._since, False, time.process_time()
        if self._run is not None:
            self._run.forward += self._since - entered

    def _look(self, _: int, frame: FrameType | None) -> None:
        if self._run is not None and not self._in_forward:
            now = time.process_time()
            self._run.seen[_part(frame)] += now - self._since  # type: ignore[assignment]  # more than an interval where one call into C took longer
            self._since = now


def _part(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            for file, part in PARTS.items():
                if name.startswith(file, len(ROOT)):
                    return part
        frame = frame.f_back
    return "scheduler"


def shares(runs: Sequence[Run]) -> dict[str, float]:
    """Share of the CPU time of all runs for the model and for each part, the greatest first."""
    total, forward = sum(run.total for run in runs), sum(run.forward for run in runs)
    seen: Counter[str] = sum((run.seen for run in runs), Counter())
    rest = (1 - forward / total) / sum(seen.values())
    return {"model": forward / total} | {part: rest * seconds for part, seconds in seen.most_common()}


def line(name: str, runs: Sequence[Run], trees: Sequence[RolloutTree]) -> dict[str, Any]:
    """A row of the figure: CPU milliseconds for each sampled token, and whose they are in percent. ``trees``: of all runs."""
    total, tokens = sum(run.total for run in runs), sum(tree.sampled_tokens for tree in trees)
    turns = sum(node.sampled for tree in trees for node in tree.nodes)
    sizes = {"tokens": tokens, "turns": turns, "CPU s": total, "CPU ms a token": 1000 * total / tokens}
    return (
        {"model": name, **sizes}
        | {f"{part} %": 100 * share for part, share in shares(runs).items() if part != "model"}
        | {"forward %": 100 * shares(runs)["model"]}
    )


def comparison(name: str, runs: Sequence[Run], **values: Any) -> Comparison:
    """The whole beside its forwards alone: 1 where nothing costs anything but the model."""
    return compared(name, [run.total for run in runs], [run.forward for run in runs], peer="its forwards alone", unit="CPU s", limit=1.0, **values)


# -- the quickstart ----------------------------------------------------------------------------------------------------------------------------------------


class ProfiledTrainer(ARPOTrainer):
    """Notes how much CPU time the process had used at the start and the end of each step's sampling and update, and profiles the sampling."""

    def begin(self, profile: Profile) -> None:
        self.profile = profile
        self.marks: list[list[float]] = []
        """For each step: start and end of the sampling, start and end of the update."""
        self.trees: list[list[RolloutTree]] = []
        update = self.learner.update

        def noted(rows: Rows) -> dict[str, float]:
            started = time.process_time()
            metrics = update(rows)
            self.marks[-1] += [started, time.process_time()]
            return metrics

        self.learner.update = noted  # type: ignore[method-assign]

    def sample(self, step: int | None = None) -> list[RolloutTree]:
        started = time.process_time()
        with self.profile.running():
            self.trees.append(super().sample(step))
        self.marks.append([started, time.process_time()])
        return self.trees[-1]


def quickstart(*, cold_steps: int, steps: int, seed: int) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    """Sampling beside its forwards, whose time it was, and CPU milliseconds of a training step: over ``steps``, between one before and one after."""
    settings = Settings()
    sft, arpo = replace(settings.sft, steps=cold_steps), replace(settings.arpo, steps=steps + 2, save_every=steps + 2, record_every=0, seed=seed)
    tasks = WorldTasks(WorldConfig(split="train"))
    model, tokenizer = cold_start(replace(settings, sft=sft, seed=seed), tasks, world_vocabulary(WorldConfig()))
    profile = Profile(model)
    env = gymnasium.make("arpo/World-v0", split="train", disable_env_checker=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ProfiledTrainer(model, env, arpo, tokenizer=tokenizer, tasks=tasks, run_dir=Path(folder))
        trainer.begin(profile)
        trainer.train()
    marks = np.array(trainer.marks)
    whole, sampling, update = 1000 * np.diff(marks[1:, 0]), 1000 * (marks[1:-1, 1] - marks[1:-1, 0]), 1000 * (marks[1:-1, 3] - marks[1:-1, 2])
    loop = {"sampling ms": sampling.mean(), "update ms": update.mean(), "rest ms": (whole - sampling - update).mean(), "whole ms": whole.mean()}
    runs, trees = profile.runs[1:-1], [tree for step in trainer.trees[1:-1] for tree in step]
    whole = settings.sft.steps
    note = "" if cold_steps == whole else f"cold start of {cold_steps} steps in place of {whole}: longer turns, more time in the model"
    return comparison("quickstart, a step's sampling", runs, note=note), line("quickstart", runs, trees), {name: float(value) for name, value in loop.items()}


# -- the 135M model ----------------------------------------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<|im_start|>", "<|im_end|>")
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "python", "answer", "result") for slash in ("", "/"))
RAISE = 30.0
"""What is added to the logits of ids that follow in demonstrations: far above those of random weights."""


def turns_of(tasks: WorldTasks, n: int) -> list[str]:
    """The turns of ``n`` demonstrations, each with a sentence of thought; written so that what follows a word tells thought and call apart."""
    rng = np.random.default_rng(0)
    return [
        f"<think>{task.question.lower()}</think>{turn.replace('> ', '>').replace(' <', '<')}"
        for task in (tasks[index] for index in range(n))
        for turn, _ in demonstration(task, rng, FLAWLESS)
    ]


def bpe_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of some 2,000 pieces that knows the words of ``texts``, with the tags as tokens, and ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, special_tokens=list(CONTROLS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=CONTROLS[1], pad_token=CONTROLS[1], clean_up_tokenization_spaces=False)  # type: ignore[no-untyped-call]
    wrapped.chat_template = CHATML
    return wrapped


def steer(model: torch.nn.Module, sequences: Sequence[Sequence[int]]) -> None:
    """Let each forward of ``model`` raise the logits of the ids that follow its last token somewhere in ``sequences``."""
    follow: defaultdict[int, set[int]] = defaultdict(set)
    for ids in sequences:
        for before, after in itertools.pairwise(ids):
            follow[before].add(after)
    after = {before: torch.tensor(sorted(ids)) for before, ids in follow.items()}

    def raise_logits(_: torch.nn.Module, args: tuple[Any, ...], given: Mapping[str, Any], output: Any) -> None:
        for row, token in enumerate(given["input_ids"][:, -1].tolist()):
            output.logits[row, -1, after.get(token, [])] += RAISE

    model.register_forward_hook(raise_logits, with_kwargs=True)


def smollm(*, groups: int, seed: int) -> tuple[Comparison, dict[str, Any]]:
    """Sampling beside its forwards, and whose time it was, for ``groups`` of 16, one after the other, after one of 2 to warm up."""
    config = WorldConfig(style="prose", calculation=0)
    tasks = WorldTasks(config)
    turns = turns_of(tasks, 400)
    env = WorldEnv(config=config, max_turns=4)
    tokenizer = bpe_tokenizer([*(message["content"] for message in env.reset(options={"task": 0})[1]["messages"]), *turns])
    codec = ChatCodec(tokenizer)
    model = shaped_model(SIZES["135M"])
    before_a_turn = codec.encode("\n", plain=True)  # the end of a prompt and of a result
    steer(model, [before_a_turn + codec.encode(turn, plain=False) for turn in turns])
    profile = Profile(model)
    policy = TransformersPolicy(model, tokenizer, context_length=2048)
    rollout = RolloutConfig(group_size=16, initial=8, window=8, max_turn_tokens=128, max_context=1024, env_workers=0)

    def sample(config: RolloutConfig, task: int) -> list[RolloutTree]:
        return run_async(sample_groups(env, policy, codec, EntropyBranching(), config, [{"task": tasks[task]}], seed=seed + task))

    sample(replace(rollout, group_size=2, initial=1), 0)
    trees: list[RolloutTree] = []
    for task in range(1, 1 + groups):
        policy.weights_updated()  # as in training: a new step has nothing in the cache
        with profile.running():
            trees += sample(rollout, task)
    return comparison("135M, a group of 16", profile.runs, bar=BAR), line("135M", profile.runs, trees)


# -- threads -----------------------------------------------------------------------------------------------------------------------------------------------


def thread_cost(calls: int) -> dict[str, Any]:
    """CPU microseconds of an environment call that does nothing, inline and in a thread, 32 at once."""

    async def spent(workers: int) -> float:
        worker = EnvWorker(workers, 600.0)
        started = time.process_time()
        for _ in range(calls // 32):
            await asyncio.gather(*(worker(int) for _ in range(32)))
        return 1e6 * (time.process_time() - started) / (calls // 32 * 32)

    return {"inline": asyncio.run(spent(0)), "in a thread": asyncio.run(spent(32))}


def main(short: bool, out: Path | None) -> None:
    torch.set_num_threads(1)
    seed, cold_steps, steps, groups = (0, 100, 6, 1) if short else (0, 400, 20, 4)
    small, small_line, loop = quickstart(cold_steps=cold_steps, steps=steps, seed=seed)
    large, large_line = smollm(groups=groups, seed=seed)
    part = Part(
        title="Sampling: CPU time of everything beside the model's own",
        command="python benchmarks/performance/overhead.py" + (" --short" if short else ""),
        about={
            "seed": seed,
            "threads": torch.get_num_threads(),
            "quickstart": f"{steps} training steps of 8 tasks x 16 trajectories after {cold_steps} steps of cold start",
            "135M": f"{groups} groups of 16, prose World, logits raised towards demonstrations",
            "measured": "CPU seconds of the process; ratio: forwards / whole",
        },
        rows=[large, small],
        figures={
            "Whose CPU time in sampling": [large_line, small_line],
            "A training step of the quickstart": [loop],
            "CPU microseconds of an environment call": [thread_cost(3200)],
        },
    )
    show(part)
    write(out, part)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="in about a minute")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    main(arguments.short, arguments.out)
