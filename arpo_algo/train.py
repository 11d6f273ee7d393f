"""The outer loop: sample groups, turn rewards into advantages, update, log. Readable from top to bottom in :meth:`ARPOTrainer.train`."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from arpo_algo.distributed import Ranks
from arpo_algo.env_source import EnvSource, attribute_of, tool_counts
from arpo_algo.evaluate import EvalResult, evaluate
from arpo_algo.health import check_adapters, check_env, check_health, check_mismatch, check_not_empty, check_overlap, check_staleness, warn_of_silence
from arpo_algo.interrupt import Interrupt
from arpo_algo.learner import Learner
from arpo_algo.loading import PolicySource, load_model, make_policy
from arpo_algo.losses import KLEstimator, PolicyLoss, clipped_surrogate, kl_k3
from arpo_algo.metrics import rollout_metrics
from arpo_algo.overlong import shape_overlong
from arpo_algo.packing import Rows, Weigh, pad_groups, trajectory_mean
from arpo_algo.pipeline import Pipeline
from arpo_algo.policies.base import AdapterServer, ServedPolicy, Sleeper
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.recording import write_rollouts
from arpo_algo.rollout import PromptTooLong, derive_seed
from arpo_algo.run_settings import MAY_DIFFER, run_settings
from arpo_algo.sampler import LocalSampler, Sampler, run_async
from arpo_algo.task_order import TaskOrder, first_tasks
from arpo_algo.tracking import Console, JsonLines, Tracker, Trackers
from arpo_algo.tree import RolloutTree
from arpo_algo.versions import versions
from arpo_env.task import TaskSource

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


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one step trains on."""

    rows: Rows
    metrics: dict[str, float]
    """Of the rollouts."""
    cursor: int
    """Tasks drawn up to and with this batch."""


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
        policy: what samples where that is not the model itself: a policy with weights of its own (``VLLMPolicy``), which is sent the new ones after each
            update, or a function that makes one, called on rank 0 alone.
        sampler: what samples the groups with the policy; by default this process.
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
        policy: PolicySource | None = None,
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
        self.order = TaskOrder(tasks if tasks is not None else attribute_of(env, "tasks"), self.config.seed)
        self.eval_tasks = eval_tasks
        check_not_empty(tasks=self.order.tasks, eval_tasks=eval_tasks)
        self.ranks = Ranks.current()
        self.model, self.tokenizer = load_model(model, tokenizer, self.config, self.ranks)
        self.codec: Codec = codec if codec is not None else ChatCodec(self.tokenizer)
        self.policy: ServedPolicy | None = None
        """What samples; None on ranks other than 0."""
        self.ranks.broadcast_from_main(lambda: self._take_policy(policy))
        self._shared = self.policy if isinstance(self.policy, TransformersPolicy) and self.policy.model is self.model else None
        """The policy, where it samples with the learner's own weights."""
        self.sampler = sampler
        self.learner = Learner(self.model, self.config, loss=loss, kl=kl, ref_model=ref_model, ranks=self.ranks)
        self.weigh, self.assign, self.trackers = weigh, assign, list(trackers)
        self.estimate: Estimator = estimate if estimate is not None else partial(group_advantages, scale_by_std=self.config.scale_by_std)
        self.step = 0
        """Steps done."""
        self.cursor = 0
        """Tasks drawn for these steps."""
        self._drawn = 0
        """Tasks drawn so far, those of batches sampled ahead included."""
        self._first_version = 0
        """Version of the policy at step 0."""

    def _take_policy(self, source: PolicySource | None) -> None:
        """On rank 0. A policy that does not fit is closed again where it was made here."""
        self.policy = make_policy(source, self.model, self.tokenizer, self.ranks)
        try:
            check_overlap(self.policy, self.model, self.config)
            check_adapters(self.policy, self.config, self.ranks)
        except BaseException:
            if self.policy is not source:
                self.policy.close()
            raise

    def train(self) -> TrainResult:
        """Run to ``config.steps``, resuming from ``run_dir`` where it holds a checkpoint. Ctrl-C ends it after the step in progress, saved.

        Under several ranks every rank calls it; rank 0 samples and writes. (torchrun kills its processes 30 seconds after a Ctrl-C: give its
        ``--shutdown-timeout`` more than a step takes.)
        """
        self._drawn = self.cursor  # what an earlier call sampled ahead was not trained on
        self._open_run()
        trackers, metrics = self._trackers(), dict[str, float]()
        ahead = self.config.max_staleness if self.ranks.is_main else 0
        try:
            with Interrupt() as interrupt, Pipeline(self._make_batch, first=self.step, last=self.config.steps, ahead=ahead) as pipeline:
                stop = False
                while self.step < self.config.steps and not stop:
                    metrics = self._train_step(pipeline)
                    stop = self.ranks.any(interrupt.asked)
                    if self.step % self.config.save_every == 0 or self.step == self.config.steps or stop:
                        self.save()  # before the evaluation, which may fail or be what a second Ctrl-C ends
                    try:
                        if self.config.eval_every and self.step % self.config.eval_every == 0:
                            metrics |= self.ranks.broadcast_from_main(partial(pipeline.between, self._evaluation))
                    finally:
                        trackers.log(self.step, metrics)
        finally:
            trackers.close()
        folder = self.ranks.broadcast_from_main(lambda: latest_checkpoint(self.run_dir / "checkpoints"))
        assert folder is not None
        return TrainResult(step=self.step, checkpoint=folder, metrics=metrics, interrupted=stop)

    def _train_step(self, pipeline: Pipeline[StepBatch]) -> dict[str, float]:
        """One step of all ranks: a batch, an update, the new weights into the policy; returns its metrics."""
        started = time.monotonic()
        batch = self.ranks.broadcast_from_main(pipeline.get)
        arrived = time.monotonic()
        if isinstance(self.policy, Sleeper) and self.policy.sleeps:
            self.policy.sleep()  # until new weights arrive
        metrics = batch.metrics | self.learner.update(batch.rows)
        self.step, self.cursor = self.step + 1, batch.cursor
        check_mismatch(metrics, self.config)
        updated, sending = time.monotonic(), list[float]()

        def send() -> None:
            sending.append(time.monotonic())
            self._send_weights(in_flight=self.config.update_in_flight)

        pipeline.publish(send, in_flight=self.config.update_in_flight)
        waited = arrived - started + sending[0] - updated
        return metrics | {"seconds/update": metrics.pop("seconds"), "seconds/waited": waited, "seconds/weights": time.monotonic() - sending[0]}

    def _evaluation(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.evaluate().to_dict().items()}

    def _trackers(self) -> Trackers:
        """Where the metrics go; nowhere on ranks other than 0."""
        if not self.ranks.is_main:
            return Trackers([])
        return Trackers([JsonLines(self.run_dir / "metrics.jsonl", resume_step=self.step + 1), Console(self.config.steps), *self.trackers])

    def _send_weights(self, *, in_flight: bool = False) -> None:
        """Put the learner's weights in place in the policy; the ranks take part in gathering them."""
        if self._shared is not None:
            self._shared.weights_updated()
        elif isinstance(self.policy, AdapterServer) and self.policy.serves_adapters:
            self.policy.update_adapter(self.model)
        elif self.policy is not None:
            take: Any = self.policy.update_weights
            self.learner.give_weights(partial(take, keep_requests=True) if in_flight else take)
        else:
            self.learner.give_weights(list)  # gathering them takes all ranks; rank 0 is the one that keeps them

    def _make_batch(self, step: int) -> StepBatch:
        """Sample and assemble the batch of a step; with ``max_staleness`` in the thread of the pipeline."""
        started, before = time.monotonic(), self._telemetry()
        trees = self.sample(step)
        sampled = time.monotonic()
        stale = check_staleness(trees, self._first_version + step, self.config)
        rows, metrics = self.assemble(trees, step)
        metrics |= stale | {"groups/skipped": float(self.config.tasks_per_step - len(trees))}
        metrics |= {"seconds/rollout": sampled - started, "seconds/tools": math.fsum(tree.env_seconds for tree in trees)}
        metrics |= {f"telemetry/{name}": value - before.get(name, 0.0) for name, value in self._telemetry().items()}
        return StepBatch(rows=rows, metrics=metrics, cursor=self._drawn)

    def _telemetry(self) -> dict[str, float]:
        """What the environment's tools have counted, here or where the sampler has its environments: calls, seconds, retries, failures."""
        elsewhere = getattr(self.sampler, "telemetry", None)
        return tool_counts(self.env) if elsewhere is None else dict(elsewhere)

    def sample(self, step: int | None = None) -> list[RolloutTree]:
        """The groups of a step, by default the next; those without a signal replaced as ``config.resample_rounds`` allows."""
        step = self.step if step is None else step
        trees: list[RolloutTree] = []
        for round_ in range(1 + self.config.resample_rounds):
            wanted = self.config.tasks_per_step - sum(tree.has_signal for tree in trees)
            if wanted == 0:
                break
            new = self._sample_groups(step, wanted, round_)
            check_health(new, self.config)
            warn_of_silence(new, self.config, self._has_tools)
            spare = [tree for tree in trees if not tree.has_signal]
            trees = [tree for tree in trees if tree.has_signal] + new
            trees += spare[: self.config.tasks_per_step - len(trees)]
        for group, tree in enumerate(trees):
            tree.group = group
        return trees

    def _sample_groups(self, step: int, n: int, round_: int) -> list[RolloutTree]:
        """``n`` groups, fewer where a prompt does not fit; further tasks are drawn, a bounded number of times, when none does."""
        sampler = LocalSampler(env=self.env, policy=self._sampling_policy()) if self.sampler is None else self.sampler
        for attempt in range(MAX_REDRAWS + 1):
            first, self._drawn = self._drawn, self._drawn + n
            seed = derive_seed(self.config.seed, step, round_, attempt)
            try:
                return sampler.sample(self.codec, self.config, self.order.options(first, n), seed=seed)
            except PromptTooLong:
                if attempt == MAX_REDRAWS or self.order.tasks is None:
                    raise
        raise AssertionError("the loop returns or raises")

    def _sampling_policy(self) -> ServedPolicy:
        if self.policy is None:
            raise RuntimeError(f"rank {self.ranks.rank} of {self.ranks.size} does not sample; rank 0 does")
        return self.policy

    def assemble(self, trees: Sequence[RolloutTree], step: int | None = None) -> tuple[Rows, dict[str, float]]:
        """The rows of a step, by default the next, and the metrics of its rollouts; writes the trees to disk."""
        step = self.step if step is None else step
        for tree in trees:
            shape_overlong(tree, self.config)
        advantages = [self.estimate(tree.rewards_M, tree.scored_M) for tree in trees]
        assigned = [self.assign(tree, values) for tree, values in zip(trees, advantages, strict=True)]
        rows = pad_groups(trees, assigned, pad_id=_pad_id(self.tokenizer), weigh=self.weigh)
        if self.config.record_every and step % self.config.record_every == 0:
            write_rollouts(self.run_dir / "rollouts", step + 1, trees, decode=self.codec.decode, advantages=advantages)
        return rows, rollout_metrics(trees, advantages)

    def evaluate(self, tasks: TaskSource | None = None, n: int | None = None, *, samples: int = 1, temperature: float = 0.0) -> EvalResult:
        """Accuracy on the first ``n`` of ``tasks`` (by default ``eval_tasks``), greedily or with ``samples`` a task at ``temperature``."""
        tasks = tasks if tasks is not None else self.eval_tasks
        if tasks is None:
            raise ValueError("nothing to evaluate on: pass tasks here or eval_tasks to the trainer")
        chosen = first_tasks(tasks, n if n is not None else self.config.eval_tasks)
        policy, rollout = self._sampling_policy(), self.config.rollout
        running = evaluate(self.env, policy, self.codec, chosen, rollout, samples=samples, temperature=temperature, seed=self.config.seed)
        return run_async(running)

    def save(self) -> Path:
        """Write a checkpoint of the present step; every rank takes part."""
        checkpoints = self.run_dir / "checkpoints"
        folder = save_checkpoint(
            checkpoint_folder(checkpoints, self.step),
            model=self.model,
            tokenizer=self.tokenizer,
            learner_state=self.learner.state_dict(),
            trainer_state={"step": self.step, "cursor": self.cursor},
            rng=rng_state(),
            config=self.describe(),
            ranks=self.ranks,
        )
        if self.ranks.is_main:
            prune_checkpoints(checkpoints, keep=self.config.keep_checkpoints)
        return folder

    def close(self) -> None:
        """Free the policy, whether the trainer was given it or made it, and leave the process group where the trainer opened it."""
        if self.policy is not None:
            self.policy.close()
        self.ranks.close()

    # -- the run's folder ----------------------------------------------------------------------------------------------------------------------------

    def _open_run(self) -> None:
        folder = self.ranks.broadcast_from_main(lambda: latest_checkpoint(self.run_dir / "checkpoints"))
        if folder is not None:
            self._resume(folder)
        if self._shared is None:
            self._send_weights()  # the policy may hold others
        if self.policy is not None:
            self._first_version = self.policy.version - self.step
        if self.ranks.is_main:
            self._describe_run(fresh=folder is None)

    def _describe_run(self, *, fresh: bool) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if fresh and (self.run_dir / "metrics.jsonl").exists():
            log.warning("%s holds a run without a checkpoint; it starts again from step 0", self.run_dir)
        isolation = str(attribute_of(self.env, "isolation") or "")
        if isolation:
            log.info("code of the policy runs at isolation level %r", isolation)
        where = {"policy": type(self.policy).__qualname__, "ranks": self.ranks.size}
        manifest = {"config": self.describe(), **where, "versions": versions(), "isolation": isolation}
        (self.run_dir / "run.json").write_text(json.dumps(manifest, indent=2) + "\n")

    def describe(self) -> dict[str, Any]:
        """All that a result depends on besides model and environment, as JSON."""
        estimate = getattr(self.estimate, "func", self.estimate)
        return run_settings(self.config, loss=self.learner.loss, kl=self.learner.kl, weigh=self.weigh, estimate=estimate, assign=self.assign)

    def _resume(self, folder: Path) -> None:
        # A run may be made longer, go on with other limits, and on another machine; what decides about its numbers must be as it was.
        checkpoint = load_checkpoint(folder, config=self.describe(), may_differ=MAY_DIFFER, ranks=self.ranks)
        load_weights(self.model, checkpoint, self.ranks)
        self.learner.load_state_dict(checkpoint.learner_state)
        self.step = checkpoint.trainer_state["step"]
        self.cursor = self._drawn = checkpoint.trainer_state["cursor"]
        if self._shared is not None:
            self._shared.weights_updated()
        restore_rng(checkpoint.rng)
        log.info("resumed %s at step %d", folder, self.step)


def _pad_id(tokenizer: Any) -> int:
    """Any id will do under the attention mask; the pad token, else the end token."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)
