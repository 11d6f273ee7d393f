"""The ``arpo`` command: one dataclass a subcommand, a TOML file plus ``--flag`` overrides over the same fields as in Python."""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import tyro
from transformers import AutoTokenizer

import arpo_algo.train as training
from arpo_algo.backends import VLLM, AnyBackend, ClosingPolicy, Server, Transformers
from arpo_algo.branching import AnyBranching, EntropyBranching
from arpo_algo.cluster.settings import RaySettings
from arpo_algo.codec import ChatCodec, Codec, PlainCodec
from arpo_algo.config import ARPOConfig
from arpo_algo.doctor import report
from arpo_algo.evaluate import evaluate
from arpo_algo.health import RunStopped
from arpo_algo.loading import PolicySource
from arpo_algo.metrics import rollout_metrics
from arpo_algo.policies.pool import EngineLost
from arpo_algo.policies.server_http import ServerError
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.recording import write_rollouts
from arpo_algo.rollout import sample_groups
from arpo_algo.rollout_config import RolloutConfig
from arpo_algo.sampler import Sampler, run_async
from arpo_algo.settings import SettingsError, build, flags, read_toml
from arpo_algo.sft import SFTConfig, SFTLearner, sft
from arpo_algo.traces import read_traces
from arpo_algo.tracking import TensorBoard, Tracker, Trackio, Wandb
from arpo_algo.tree_text import print_tree
from arpo_algo.versions import versions
from arpo_env.core import ForkError, fork_support
from arpo_env.task import TaskSet, TaskSource
from arpo_env.testing import HOSTILE, EnvConformance

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """Which environment, over which tasks."""

    id: str = "arpo/World-v0"
    """A Gymnasium id, or MODULE:NAME of a function or class that makes an environment."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, for example ``{"hops_max": 3}``; from the configuration file."""
    tasks: Path | None = None
    """Task set to load (.jsonl, .parquet); goes to the environment as ``tasks``. With it, ``id`` is arpo/SearchQA-v0 unless given."""
    search_cache: Path | None = None
    """Recorded searches (.json: query -> text) that answer the search tool; goes to the environment as ``search``."""

    def make(self) -> Env:
        """The environment. Raises before anything is sampled when it cannot be made or does not fork."""
        name = "arpo/SearchQA-v0" if self.tasks is not None and self.id == EnvSettings.id else self.id
        args = dict(self.args)
        if self.tasks is not None:
            args["tasks"] = str(self.tasks)
        if self.search_cache is not None:
            args["search"] = str(self.search_cache)
        try:
            made = _maker(name)(**args)
        except TypeError as error:  # mostly an argument that it does not have
            raise SettingsError(f"{name} cannot be made with {', '.join(sorted(args)) or 'no arguments'}: {error}") from error
        if not isinstance(made, gymnasium.Env):
            raise SettingsError(f"{name} must make a gymnasium.Env, got {type(made).__name__}")
        return made


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

    def trained(self, policy: PolicySource | None, sampler: Sampler | None) -> training.ARPOTrainer:
        """The trainer of one rank."""
        env, tokenizer = self.env.make(), AutoTokenizer.from_pretrained(self.model)
        held_out = TaskSet.load(self.eval_tasks) if self.eval_tasks is not None else getattr(env.unwrapped, "held_out_tasks", None)
        return training.ARPOTrainer(
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
        tasks = training.first_tasks(_tasks(env), self.n)
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
        tasks = getattr(env.unwrapped, "tasks", None)
        if tasks is None:
            return [None] * self.groups
        chosen = training.first_tasks(tasks, self.first + self.groups)[self.first :]
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


COMMANDS: Mapping[str, type[Any]] = {"train": Train, "sft": SFT, "eval": Eval, "rollout": Rollout, "check-env": CheckEnv, "doctor": Doctor}

USER_ERRORS = (ValueError, OSError, ImportError, ForkError, RunStopped, EngineLost, ServerError, gymnasium.error.Error)
"""What a wrong setting, a wrong environment or a lost engine raises: shown as one message. ARPO_DEBUG=1 shows the traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0 if args else 2
    name, *rest = args
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        print(f"arpo: unknown command {name!r}{f', did you mean {close[0]}?' if close else ''}\n\n{_overview()}", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(message)s")
    logging.getLogger("arpo_algo").setLevel(logging.INFO)  # a resumed run says so
    try:
        parse(name, rest).run()
    except USER_ERRORS as error:
        if os.environ.get("ARPO_DEBUG"):
            raise
        print(f"arpo {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def parse(name: str, args: Sequence[str]) -> Any:
    """The settings of a command: defaults, then its TOML file (a first argument that ends in .toml), then flags."""
    command, args = COMMANDS[name], list(args)
    values = read_toml(args.pop(0)) if args and args[0].endswith(".toml") else {}
    if name == "check-env" and args and not args[0].startswith("-"):
        values["env"] = args.pop(0)
    args = [_spelled(arg, {} if name == "check-env" else SHORTHANDS) for arg in args]
    _choose_type(values, ("trainer", "branching") if name == "train" else ("branching",), args)
    _choose_type(values, ("policy",), args)
    if name == "train":
        args = [arg for given in args for arg in ((given, "True") if given == "--ray" else (given,))]
    required = {f.name: tyro.MISSING for f in fields(command) if f.default is MISSING and f.default_factory is MISSING}
    blank = command(**required)
    # The file is checked by itself, then put before the flags as flags: an object built from the file alone would hold what follows from its values
    # (the length of a schedule from the number of steps), and keep it when a flag changes them.
    said, unsaid = flags(build(command, values, base=blank), values)
    settings = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    return tyro.cli(command, default=build(command, unsaid, base=blank), args=[*said, *args], prog=f"arpo {name}", config=settings)


SHORTHANDS = {"--tasks": "--env.tasks", "--search-cache": "--env.search-cache", "--env": "--env.id"}


def _spelled(arg: str, shorthands: Mapping[str, str]) -> str:
    flag, equals, value = arg.partition("=")
    return shorthands.get(flag, flag) + equals + value


def _choose_type(values: dict[str, Any], path: tuple[str, ...], args: list[str]) -> None:
    """Move ``--branching NAME`` (or ``--trainer.branching NAME``, ``--policy NAME``) from ``args`` to ``values``; the fields of what is chosen stay flags."""
    chosen = None
    for at in reversed([at for at, arg in enumerate(args) if arg.partition("=")[0] in ("--" + path[-1], "--" + ".".join(path))]):
        chosen = args[at].partition("=")[2] or "".join(args[at + 1 : at + 2])
        del args[at : at + (1 if "=" in args[at] else 2)]
    if chosen is None:
        return
    for key in path[:-1]:
        values = values.setdefault(key, {})
    table = values.get(path[-1], {})
    values[path[-1]] = {**(table if table.get("type") == chosen else {}), "type": chosen}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  arpo {name:<{width}}  {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: arpo COMMAND [CONFIG.toml] [--flag value ...]",
            "",
            *lines,
            "",
            "Flags override the file. `arpo COMMAND --help` lists them; --branching NAME picks a strategy:",
            "  EntropyBranching, TopEntropyBranching, UniformBranching, RandomBranching, LowEntropyBranching, AuthorsBranching, NoBranching",
            "--policy NAME says where tokens are sampled: Transformers, VLLM, Server (train takes the first two).",
        ]
    )


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
    tasks = getattr(env.unwrapped, "tasks", None)
    if tasks is None:
        raise SettingsError(f"{env} has no tasks to go through; give it an attribute `tasks`")
    return tasks  # type: ignore[no-any-return]


def _maker(name: str) -> Callable[..., Any]:
    """What makes the environment of a Gymnasium id or of MODULE:NAME."""
    module, colon, attribute = name.partition(":")
    if not colon or re.search(r"-v\d+$", name):  # Gymnasium knows ids with a module as well
        importlib.import_module("arpo_env")  # registers the ids
        return partial(gymnasium.make, name, disable_env_checker=True)
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise SettingsError(f"{name} must name a function or class that makes an environment, got {found!r}")
    return found  # type: ignore[no-any-return]
