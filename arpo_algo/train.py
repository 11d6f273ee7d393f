"""The outer loop: sample groups, turn rewards into advantages, update, log. Readable from top to bottom in :meth:`ARPOTrainer.train`."""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from torch import nn

from arpo_algo.advantages import Assignment, Estimator, group_advantages, soft
from arpo_algo.checkpoint import (
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    prune_checkpoints,
    restore_rng,
    rng_state,
    save_checkpoint,
)  # fmt: skip
from arpo_algo.codec import ChatCodec, Codec
from arpo_algo.config import ARPOConfig
from arpo_algo.evaluate import EvalResult, evaluate
from arpo_algo.health import TOKEN_LIMITS, check_env, check_health, check_not_empty, warn_of_silence
from arpo_algo.learner import Learner, add_lora
from arpo_algo.losses import KLEstimator, PolicyLoss, clipped_surrogate, kl_k3
from arpo_algo.metrics import rollout_metrics
from arpo_algo.packing import Rows, Weigh, pad_groups, trajectory_mean
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.recording import write_rollouts
from arpo_algo.rollout import EnvSource, PromptTooLong, derive_seed
from arpo_algo.sampler import LocalSampler, Sampler, run_async
from arpo_algo.tracking import Console, JsonLines, Tracker, Trackers
from arpo_algo.tree import RolloutTree
from arpo_algo.versions import versions
from arpo_env.task import Task, TaskSource

log = logging.getLogger(__name__)

MAX_REDRAWS = 3
"""How often further tasks are drawn for a step whose prompts are all too long."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What :meth:`ARPOTrainer.train` leaves behind."""

    step: int
    checkpoint: Path
    """Folder of the last checkpoint; ``checkpoint / "model"`` opens with ``AutoModelForCausalLM.from_pretrained``."""
    metrics: dict[str, float]
    """Metrics of the last step."""
    interrupted: bool


class ARPOTrainer:
    """Trains a policy by ARPO on an environment.

    Args:
        model: a causal language model, or the path of one.
        env: an environment that forks, or a function that makes environments.
        config: everything that is a number or a switch.
        tokenizer: the model's; loaded beside it when ``model`` is a path.
        tasks: where training tasks come from; the environment's own by default. An environment without tasks is reset with a new seed for each group.
        eval_tasks: tasks to evaluate on.
        codec: how text becomes ids; the tokenizer's chat template by default.
        loss, kl, weigh: the objective: see ``arpo_algo.losses`` and ``arpo_algo.packing``.
        estimate, assign: rewards of a group -> a number for each trajectory -> one for each of its tokens: see ``arpo_algo.advantages``.
        ref_model: another reference for the KL term than the model as it is now.
        sampler: what samples the groups; by default this process.
        trackers: where metrics go besides ``run_dir/metrics.jsonl`` and the terminal.
        run_dir: metrics, rollouts and checkpoints; must be new, or hold a run with the same settings to resume.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        env: EnvSource,
        config: ARPOConfig | None = None,
        *,
        tokenizer: Any = None,
        tasks: TaskSource | None = None,
        eval_tasks: TaskSource | None = None,
        codec: Codec | None = None,
        loss: PolicyLoss = clipped_surrogate,
        kl: KLEstimator = kl_k3,
        weigh: Weigh = trajectory_mean,
        estimate: Estimator | None = None,
        assign: Assignment = soft,
        ref_model: nn.Module | None = None,
        sampler: Sampler | None = None,
        trackers: Sequence[Tracker] = (),
        run_dir: str | Path = "runs/arpo",
    ):
        self.config = config if config is not None else ARPOConfig()
        self.env = env
        self.run_dir = Path(run_dir)
        self._has_tools = check_env(env, self.config)
        if self.config.eval_every and eval_tasks is None:
            raise ValueError(f"eval_every={self.config.eval_every} needs eval_tasks, the tasks to evaluate on")
        self.policy = _policy(model, tokenizer, self.config)
        self.model, self.tokenizer = self.policy.model, self.policy.tokenizer
        self.sampler: Sampler = sampler if sampler is not None else LocalSampler(env=env, policy=self.policy)
        self.codec: Codec = codec if codec is not None else ChatCodec(self.tokenizer)
        self.learner = Learner(self.model, self.config, loss=loss, kl=kl, ref_model=ref_model)
        self.tasks: TaskSource | None = tasks if tasks is not None else _own_tasks(env)
        self.eval_tasks = eval_tasks
        check_not_empty(tasks=self.tasks, eval_tasks=eval_tasks)
        self.weigh, self.assign, self.trackers = weigh, assign, list(trackers)
        self.estimate: Estimator = estimate if estimate is not None else partial(group_advantages, scale_by_std=self.config.scale_by_std)
        self.step = 0
        """Steps done."""
        self.cursor = 0
        """Tasks drawn so far."""
        self._interrupted = False
        self._counted: dict[str, float] = {}

    def train(self) -> TrainResult:
        """Run to ``config.steps``, resuming from ``run_dir`` where it holds a checkpoint. Ctrl-C ends it after the step in progress, saved."""
        self._open_run()
        trackers = Trackers([JsonLines(self.run_dir / "metrics.jsonl", resume_step=self.step + 1), Console(self.config.steps), *self.trackers])
        metrics: dict[str, float] = {}
        try:
            with self._interruptible():
                while self.step < self.config.steps and not self._interrupted:
                    started = time.monotonic()
                    trees = self.sample()
                    rolled_out = time.monotonic()
                    rows, metrics = self.assemble(trees)
                    updated = self.learner.update(rows)
                    self.policy.weights_updated()
                    self.step += 1
                    metrics["groups/skipped"] = float(self.config.tasks_per_step - len(trees))
                    metrics |= self._telemetry()
                    metrics |= updated | _seconds(trees, rollout=rolled_out - started, update=updated.pop("seconds"))
                    if self.config.eval_every and self.step % self.config.eval_every == 0:
                        metrics |= {f"eval/{name}": value for name, value in self.evaluate().to_dict().items()}
                    trackers.log(self.step, metrics)
                    if self.step % self.config.save_every == 0 or self.step == self.config.steps or self._interrupted:
                        self.save()
        finally:
            trackers.close()
        folder = latest_checkpoint(self.run_dir / "checkpoints")
        assert folder is not None
        return TrainResult(step=self.step, checkpoint=folder, metrics=metrics, interrupted=self._interrupted)

    def _telemetry(self) -> dict[str, float]:
        """What the environment's tools counted since the last step: calls, seconds, retries, failures, as ``telemetry/<tool>.<count>``."""
        counters = getattr(self.env.unwrapped, "telemetry", None) if isinstance(self.env, gymnasium.Env) else None
        now: dict[str, float] = counters.snapshot() if counters is not None else {}
        before, self._counted = self._counted, now
        return {f"telemetry/{name}": value - before.get(name, 0.0) for name, value in now.items()}

    def sample(self) -> list[RolloutTree]:
        """The groups of the next step; those without a signal replaced as ``config.resample_rounds`` allows."""
        trees: list[RolloutTree] = []
        for round_ in range(1 + self.config.resample_rounds):
            wanted = self.config.tasks_per_step - sum(tree.has_signal for tree in trees)
            if wanted == 0:
                break
            new = self._sample_groups(wanted, round_)
            check_health(new, self.config)
            warn_of_silence(new, self.config, self._has_tools)
            spare = [tree for tree in trees if not tree.has_signal]
            trees = [tree for tree in trees if tree.has_signal] + new
            trees += spare[: self.config.tasks_per_step - len(trees)]
        for group, tree in enumerate(trees):
            tree.group = group
        return trees

    def _sample_groups(self, n: int, round_: int) -> list[RolloutTree]:
        """``n`` groups, fewer where a prompt does not fit; further tasks are drawn, a bounded number of times, when none does."""
        for attempt in range(MAX_REDRAWS + 1):
            seed = derive_seed(self.config.seed, self.step, round_, attempt)
            try:
                return self.sampler.sample(self.codec, self.config, self._draw(n), seed=seed)
            except PromptTooLong:
                if attempt == MAX_REDRAWS or self.tasks is None:
                    raise
        raise AssertionError("the loop returns or raises")

    def assemble(self, trees: Sequence[RolloutTree]) -> tuple[Rows, dict[str, float]]:
        """The batch of a step and the metrics of its rollouts; writes the trees to disk."""
        for tree in trees:
            _shape_overlong(tree, self.config)
        advantages = [self.estimate(tree.rewards_M, tree.scored_M) for tree in trees]
        assigned = [self.assign(tree, values) for tree, values in zip(trees, advantages, strict=True)]
        rows = pad_groups(trees, assigned, pad_id=_pad_id(self.tokenizer), weigh=self.weigh)
        if self.config.record_every and self.step % self.config.record_every == 0:
            write_rollouts(self.run_dir / "rollouts", self.step + 1, trees, decode=self.codec.decode, advantages=advantages)
        return rows, rollout_metrics(trees, advantages)

    def evaluate(self, tasks: TaskSource | None = None, n: int | None = None, *, samples: int = 1, temperature: float = 0.0) -> EvalResult:
        """Accuracy on the first ``n`` of ``tasks`` (by default ``eval_tasks``), greedily or with ``samples`` a task at ``temperature``."""
        tasks = tasks if tasks is not None else self.eval_tasks
        if tasks is None:
            raise ValueError("nothing to evaluate on: pass tasks here or eval_tasks to the trainer")
        chosen = first_tasks(tasks, n if n is not None else self.config.eval_tasks)
        running = evaluate(self.env, self.policy, self.codec, chosen, self.config.rollout, samples=samples, temperature=temperature, seed=self.config.seed)
        return run_async(running)

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        checkpoints = self.run_dir / "checkpoints"
        folder = save_checkpoint(
            checkpoint_folder(checkpoints, self.step),
            model=self.model,
            tokenizer=self.tokenizer,
            learner_state=self.learner.state_dict(),
            trainer_state={"step": self.step, "cursor": self.cursor},
            rng=rng_state(),
            config=self.describe(),
        )
        prune_checkpoints(checkpoints, keep=self.config.keep_checkpoints)
        return folder

    # -- the run's folder, tasks, interruption -------------------------------------------------------------------------------------------------------

    def _open_run(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        folder = latest_checkpoint(self.run_dir / "checkpoints")
        if folder is not None:
            self._resume(folder)
        elif (self.run_dir / "metrics.jsonl").exists():
            log.warning("%s holds a run without a checkpoint; it starts again from step 0", self.run_dir)
        isolation = str(getattr(self.env.unwrapped, "isolation", "")) if isinstance(self.env, gymnasium.Env) else ""
        if isolation:
            log.info("code of the policy runs at isolation level %r", isolation)
        manifest = {"config": self.describe(), "versions": versions(), "isolation": isolation}
        (self.run_dir / "run.json").write_text(json.dumps(manifest, indent=2) + "\n")

    def describe(self) -> dict[str, Any]:
        """All that a result depends on besides model and environment, as JSON: settings, the strategy with its type, the objective's functions by name."""
        strategy = self.config.branching
        values = asdict(strategy) if is_dataclass(strategy) and not isinstance(strategy, type) else {k: repr(v) for k, v in vars(strategy).items()}
        settings = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        functions = {
            "loss": self.learner.loss,
            "kl": self.learner.kl,
            "weigh": self.weigh,
            "estimate": getattr(self.estimate, "func", self.estimate),
            "assign": self.assign,
        }
        described = settings | {
            "rollout": asdict(self.config.rollout),
            "branching": {"type": type(strategy).__qualname__, **values},
            "objective": {name: getattr(function, "__qualname__", repr(function)) for name, function in functions.items()},
        }
        return dict(json.loads(json.dumps(described, default=repr)))

    def _resume(self, folder: Path) -> None:
        # A finished or interrupted run may be made longer; everything else must be as it was.
        checkpoint = load_checkpoint(folder, config=self.describe(), may_differ=("steps", "total_steps"))
        load_weights(self.model, checkpoint)
        self.learner.load_state_dict(checkpoint.learner_state)
        self.step, self.cursor = checkpoint.trainer_state["step"], checkpoint.trainer_state["cursor"]
        self.policy.weights_updated()
        restore_rng(checkpoint.rng)
        log.info("resumed %s at step %d", folder, self.step)

    def _draw(self, n: int) -> list[dict[str, Any] | None]:
        """Reset options of the next ``n`` groups. A task set is gone through in a new random order in each epoch, an unlimited source in its own."""
        numbers = range(self.cursor, self.cursor + n)
        self.cursor += n
        if self.tasks is None:
            return [None] * n
        if not isinstance(self.tasks, Sized):
            return [{"task": self.tasks[number]} for number in numbers]
        size = len(self.tasks)
        orders = {epoch: np.random.default_rng([self.config.seed, epoch]).permutation(size) for epoch in {number // size for number in numbers}}
        return [{"task": self.tasks[int(orders[number // size][number % size])]} for number in numbers]

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends the run after this step; a second one at once."""
        self._interrupted = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: object) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, previous)
            print("\ninterrupted: finishing this step, then saving; press Ctrl-C again to stop at once", flush=True)

        previous = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def first_tasks(tasks: TaskSource, n: int) -> list[Task]:
    """The first ``n`` tasks, or all where there are fewer."""
    size = len(tasks) if isinstance(tasks, Sized) else n
    return [tasks[index] for index in range(min(n, size))]


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then linearly down to -1 at ``limit``. DAPO (arXiv:2503.14476), eq. 13."""
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _shape_overlong(tree: RolloutTree, config: ARPOConfig) -> None:
    for trajectory in tree.trajectories:
        if config.drop_truncated and trajectory.stop_reason in TOKEN_LIMITS:
            trajectory.scored = False
        if penalty := overlong_penalty(trajectory.sampled_tokens, limit=config.overlong_limit, buffer=config.overlong_buffer):
            trajectory.reward += penalty
            trajectory.reward_parts["overlong"] = penalty


def _policy(model: nn.Module | str | Path, tokenizer: Any, config: ARPOConfig) -> TransformersPolicy:
    """The policy that samples, with fresh LoRA adapters where the config asks for them."""
    if isinstance(model, str | Path):
        loaded = TransformersPolicy.from_pretrained(model, tokenizer=tokenizer)
        if not config.lora_rank:
            return loaded
        model, tokenizer = loaded.model, loaded.tokenizer
    if tokenizer is None:
        raise ValueError("a model object needs its tokenizer: ARPOTrainer(model, env, tokenizer=...)")
    if config.lora_rank:
        model = add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha)
    return TransformersPolicy(model, tokenizer)


def _own_tasks(env: EnvSource) -> TaskSource | None:
    return getattr(env.unwrapped, "tasks", None) if isinstance(env, gymnasium.Env) else None


def _seconds(trees: Sequence[RolloutTree], *, rollout: float, update: float) -> dict[str, float]:
    tools = math.fsum(tree.env_seconds for tree in trees)
    return {"seconds/rollout": rollout, "seconds/tools": tools, "seconds/update": update}


def _pad_id(tokenizer: Any) -> int:
    """Any id will do under the attention mask; the pad token, else the end token."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)
