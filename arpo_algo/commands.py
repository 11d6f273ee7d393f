"""What each ``arpo`` command takes and does: a dataclass a command, whose fields are its settings."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from arpo_algo.backends import VLLM, AnyBackend, ClosingPolicy, Server, Transformers
from arpo_algo.branching import AnyBranching, EntropyBranching
from arpo_algo.cluster.settings import RaySettings
from arpo_algo.codec import ChatCodec, Codec, PlainCodec
from arpo_algo.config import ARPOConfig
from arpo_algo.doctor import report
from arpo_algo.env_settings import Env, EnvSettings
from arpo_algo.env_source import attribute_of
from arpo_algo.evaluate import evaluate
from arpo_algo.loading import PolicySource
from arpo_algo.metrics import rollout_metrics
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.recording import write_rollouts
from arpo_algo.rollout import sample_groups
from arpo_algo.rollout_config import RolloutConfig
from arpo_algo.sampler import Sampler, run_async
from arpo_algo.settings import SettingsError
from arpo_algo.sft import SFTConfig, SFTLearner, sft
from arpo_algo.task_order import first_tasks
from arpo_algo.traces import read_traces
from arpo_algo.tracking import TensorBoard, Tracker, Trackio, Wandb
from arpo_algo.train import ARPOTrainer
from arpo_algo.tree_text import print_tree
from arpo_algo.versions import versions
from arpo_env.core import fork_support
from arpo_env.task import TaskSet, TaskSource
from arpo_env.testing import HOSTILE, EnvConformance


@dataclass(frozen=True, kw_only=True)
class ModelCommand:
    """What every command with a model takes."""

    model: str
    """Path or name of a causal language model."""
    codec: Literal["chat", "plain"] = "chat"
    """Text to ids by the tokenizer's chat template, or as plain text (base models)."""

    def codec_of(self, tokenizer: Any) -> Codec:
        return ChatCodec(tokenizer) if self.codec == "chat" else PlainCodec(tokenizer)


@dataclass(frozen=True, kw_only=True)
class SamplingCommand(ModelCommand):
    """What every command has that samples."""

    policy: AnyBackend = field(default_factory=Transformers)
    """Where tokens are sampled."""
    env: EnvSettings = field(default_factory=EnvSettings)

    @contextmanager
    def sampling(self) -> Iterator[tuple[ClosingPolicy, Codec]]:
        """The policy, closed at the end, and the codec."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        policy = self.policy.make(self.model, tokenizer)
        try:
            yield policy, self.codec_of(tokenizer)
        finally:
            policy.close()


@dataclass(frozen=True, kw_only=True)
class Train(SamplingCommand):
    """Train a policy by ARPO."""

    trainer: ARPOConfig = field(default_factory=ARPOConfig)
    eval_tasks: Path | None = None
    """Tasks for ``trainer.eval_every`` (.jsonl, .parquet); by default the environment's ``held_out_tasks`` where it has any, as arpo/World-v0 does."""
    run_dir: Path = Path("runs/arpo")
    """Metrics, rollouts, checkpoints; an interrupted run there is resumed."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where metrics go besides metrics.jsonl and the terminal."""

    ray: bool = False
    """Run on a Ray cluster, or start Ray on this machine; what runs where is said by ``cluster``. Needs ``arpo[ray]``."""
    cluster: RaySettings = field(default_factory=RaySettings)

    def run(self) -> None:
        if isinstance(self.policy, Server):
            raise SettingsError("policy Server cannot train: it takes no weights; use Transformers or VLLM")
        if not self.ray and isinstance(self.policy, Transformers) and self.policy != Transformers():
            raise SettingsError("the trained model samples itself here: policy.max_batch and policy.cache_mib are for eval, rollout and --ray")
        if not self.ray and self.cluster != RaySettings():
            raise SettingsError("settings of [cluster] need --ray")
        if self.ray and isinstance(self.policy, VLLM) and (self.policy.lora_rank is not None or self.policy.sleeps):
            raise SettingsError("with ray, engines have GPUs of their own and take whole weights, LoRA merged: leave policy.lora_rank and policy.sleeps out")
        if self.ray:
            from arpo_algo.cluster.launch import ray_train

            result = ray_train(self.trained, self.cluster, make_env=self.env.make, make_engine=partial(_engine, self.policy, self.model))
        else:
            served = isinstance(self.policy, VLLM)
            trainer = self.trained(partial(_engine, self.policy, self.model) if served else None, None)
            try:
                result = trainer.train()
            finally:
                trainer.close()
            if not trainer.ranks.is_main:
                return
        print(f"{'interrupted' if result.interrupted else 'done'} at step {result.step}; model in {result.checkpoint / 'model'}")

    def trained(self, policy: PolicySource | None, sampler: Sampler | None) -> ARPOTrainer:
        """The trainer of one rank."""
        env, tokenizer = self.env.make(), AutoTokenizer.from_pretrained(self.model)
        held_out = TaskSet.load(self.eval_tasks) if self.eval_tasks is not None else attribute_of(env, "held_out_tasks")
        return ARPOTrainer(
            self.model,
            env,
            self.trainer,
            tokenizer=tokenizer,
            eval_tasks=held_out,
            codec=self.codec_of(tokenizer),
            policy=policy,
            sampler=sampler,
            trackers=[_tracker(name, self.run_dir) for name in self.track] if int(os.environ.get("RANK", 0)) == 0 else [],  # of torchrun, Ray Train
            run_dir=self.run_dir,
        )


@dataclass(frozen=True, kw_only=True)
class SFT(ModelCommand):
    """Cold start: supervised fine-tuning on recorded traces."""

    traces: Path
    """JSON lines, one trace each: {"messages": [{"role": ..., "content": ...}, ...]}; the assistant's text is what is learned."""
    out: Path = Path("runs/sft")
    """Folder of the trained model."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(steps=100))

    def run(self) -> None:
        policy = TransformersPolicy.from_pretrained(self.model)
        examples = read_traces(self.traces, self.codec_of(policy.tokenizer), end_id=policy.tokenizer.eos_token_id)
        print(f"{len(examples)} traces, {sum(map(sum, (e.mask for e in examples)))} tokens to learn")
        every = max(1, self.sft.steps // 20)

        def show(learner: SFTLearner, metrics: Mapping[str, float]) -> None:
            if learner.steps % every == 0 or learner.steps == self.sft.steps:
                print(f"step {learner.steps}/{self.sft.steps}  loss {metrics['loss']:.4f}", flush=True)

        sft(policy.model, examples, self.sft, pad_id=policy.tokenizer.pad_token_id or 0, on_step=show)
        model: Any = policy.model
        model.save_pretrained(self.out)
        policy.tokenizer.save_pretrained(self.out)
        print(f"model in {self.out}")


@dataclass(frozen=True, kw_only=True)
class Eval(SamplingCommand):
    """Measure a policy on the tasks of an environment."""

    n: int = 200
    """Tasks, the first ones of the environment's."""
    samples: int = 1
    """Trajectories a task; pass@k is reported up to this k."""
    temperature: float = 0.0
    """0: greedy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    out: Path | None = None
    """Write the numbers to this JSON file."""
    seed: int = 0

    def run(self) -> None:
        env = self.env.make()
        tasks = first_tasks(_tasks(env), self.n)
        with self.sampling() as (policy, codec):
            measured = evaluate(env, policy, codec, tasks, self.rollout, samples=self.samples, temperature=self.temperature, seed=self.seed)
            result = run_async(measured)
        print(result)
        if self.out is not None:
            _write_json(self.out, result.to_dict() | {"model": self.model, "versions": versions()})


@dataclass(frozen=True, kw_only=True)
class Rollout(SamplingCommand):
    """Sample groups and print their trees: who branched where, why, with which entropies and rewards."""

    groups: int = 1
    """Groups to sample, one a task."""
    first: int = 0
    """Index of the first task."""
    branching: AnyBranching = field(default_factory=EntropyBranching)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    out: Path | None = None
    """Write the trees as Parquet and metrics.json below this folder."""
    width: int = 160
    """Columns of the printed tree."""
    seed: int = 0

    def run(self) -> None:
        env = self.env.make()
        options = self._options(env)
        with self.sampling() as (policy, codec):
            started = time.perf_counter()
            trees = [tree.canonical() for tree in run_async(sample_groups(env, policy, codec, self.branching, self.rollout, options, seed=self.seed))]
            seconds = time.perf_counter() - started
        for tree in trees:
            print(print_tree(tree, width=self.width))
        tokens, counts = sum(tree.sampled_tokens for tree in trees), getattr(policy, "stats", None)
        reuse = "" if counts is None else f"; {counts.prefilled_tokens} context tokens computed, {counts.reused_tokens} reused"
        print(f"{tokens} tokens sampled in {seconds:.1f} s ({tokens / seconds:.1f} a second){reuse}")
        if self.out is not None:
            print(f"trees in {write_rollouts(self.out, 0, trees, decode=codec.decode)}")
            counted = {} if counts is None else {f"policy/{name}": n for name, n in asdict(counts).items()}
            _write_json(self.out / "metrics.json", rollout_metrics(trees) | counted | {"seconds/rollout": seconds})

    def _options(self, env: Env) -> list[dict[str, Any] | None]:
        """Reset options of the groups. An environment without tasks is reset with a seed of its own for each group."""
        tasks = attribute_of(env, "tasks")
        if tasks is None:
            return [None] * self.groups
        chosen = first_tasks(tasks, self.first + self.groups)[self.first :]
        if len(chosen) < self.groups:
            raise SettingsError(f"expected {self.groups} tasks from number {self.first} on, the environment has {len(chosen)} there")
        return [{"task": task} for task in chosen]


class ContractBroken(ValueError):
    """An environment breaks the contract; the message names the rule."""


@dataclass(frozen=True, kw_only=True)
class CheckEnv:
    """Check an environment against the reset, step and fork contract."""

    env: str
    """A Gymnasium id, or MODULE:NAME of a function or class that makes an environment."""
    actions: tuple[str, ...] = ()
    """Turns of an episode that does something. Without them: texts that any text environment must survive, or five random actions of another space."""

    def run(self) -> None:
        settings = EnvSettings(id=self.env)
        env = settings.make()
        kit = EnvConformance()
        kit.make_env = settings.make  # type: ignore[method-assign]
        kit.actions = self._actions(env)
        print(f"{self.env}: forks by {fork_support(env)}")
        for name in (name for name in dir(kit) if name.startswith("test_")):
            if name == "test_any_text_is_answered" and not isinstance(kit.actions[0], str):
                continue
            rule = name[5:].replace("_", " ")
            try:
                getattr(kit, name)()
            except AssertionError as error:
                raise ContractBroken(f"{rule}: {error}") from error
            except Warning as warning:  # the kit is strict with our own environments; others are told
                print(f"note  {rule}: {warning}")
            else:
                print(f"ok    {rule}")
        env.close()

    def _actions(self, env: Env) -> list[Any]:
        if self.actions:
            return list(self.actions)
        env.action_space.seed(0)
        sampled = [env.action_space.sample() for _ in range(5)]
        return [text for text in HOSTILE if text.isprintable()] if isinstance(sampled[0], str) else sampled


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Print versions, devices, extras and how model-written code is isolated here."""

    def run(self) -> None:
        print(report())


def _engine(backend: AnyBackend, model: str) -> Any:
    """A policy with weights of its own, made where it is to run."""
    return backend.make(model, AutoTokenizer.from_pretrained(model))


def _tracker(name: Literal["tensorboard", "wandb", "trackio"], run_dir: Path) -> Tracker:
    makers: Mapping[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run_dir / "tensorboard"),
        "wandb": lambda: Wandb(project=run_dir.name),
        "trackio": lambda: Trackio(project=run_dir.name),
    }
    return makers[name]()


def _write_json(path: Path, numbers: Mapping[str, Any]) -> None:
    """A mean over nothing (NaN) becomes null, which JSON has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in numbers.items()}
    path.write_text(json.dumps(finite, indent=2, allow_nan=False) + "\n")


def _tasks(env: Env) -> TaskSource:
    tasks = attribute_of(env, "tasks")
    if tasks is None:
        raise SettingsError(f"{env} has no tasks to go through; give it an attribute `tasks`")
    return tasks  # type: ignore[no-any-return]
