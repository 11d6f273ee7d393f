"""``make quickstart``: from nothing to a tool-using policy improved by ARPO, on two CPU cores.

1. A world of invented people is generated; training and held-out tasks share no person, place or fact.
2. A policy of about 235,000 parameters is cold-started on noisy demonstrations: it learns the format and the tools, and mostly picks the first namesake.
3. ARPO improves it: groups of trajectories, branched where entropy rises after a tool result, and GRPO updates.
4. Accuracy on held-out tasks, greedy, before and after, with 95 % bootstrap intervals.

``--smoke`` runs the same in under a minute, too short to learn much.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import gymnasium
import numpy as np
import torch
import tyro
from tiny_policy import build_model, build_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from arpo_algo import ARPOConfig, ARPOTrainer, ChatCodec, EntropyBranching, RolloutConfig
from arpo_algo.evaluate import EvalResult
from arpo_algo.sft import SFTConfig, SFTExample, SFTLearner, sft
from arpo_algo.traces import encode_trace
from arpo_algo.versions import versions
from arpo_env.envs.world import WorldConfig, WorldTasks, world_vocabulary
from arpo_env.envs.world_traces import DemonstrationNoise, demonstration


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the quickstart runs."""

    seed: int = 0
    """Seed of demonstrations, weights, sampling."""
    out: Path | None = None
    """Folder of metrics, rollouts, checkpoints and summary.json, emptied first; runs/quickstart-SEED by default."""
    smoke: bool = False
    """A run of under a minute."""
    eval_tasks: int = 1000
    """Held-out tasks."""
    hidden: int = 96
    layers: int = 2
    threads: int = 1
    """Threads of torch; more hardly pay for a model of this size."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(steps=400, batch_size=48, lr=4e-3, muon_lr=0.01, warmup_steps=20, micro_batch_tokens=2048))
    arpo: ARPOConfig = field(
        default_factory=lambda: ARPOConfig(
            steps=60,
            tasks_per_step=8,
            lr=5e-4,
            micro_batch_tokens=2048,
            rollout=RolloutConfig(group_size=16, initial=8, window=4, max_turn_tokens=24, max_context=320, max_live=128, env_workers=0),
            branching=EntropyBranching(),
            record_every=10,
        )
    )


def smoke(settings: Settings) -> Settings:
    """The same run with a few steps of everything."""
    short_sft = replace(settings.sft, steps=60, warmup_steps=10)
    return replace(settings, eval_tasks=64, sft=short_sft, arpo=replace(settings.arpo, steps=3, record_every=1))


def demonstrations(tasks: WorldTasks, codec: ChatCodec, seed: int) -> Iterator[SFTExample]:
    """Unlimited demonstrations, one a task, by a teacher who makes mistakes."""
    rng = np.random.default_rng([seed, 1])
    noise, index = DemonstrationNoise(), 0
    while True:
        task = tasks[index]
        yield encode_trace(codec, [{"role": "user", "content": task.question}], demonstration(task, rng, noise))
        index += 1


def cold_start(settings: Settings, tasks: WorldTasks, vocabulary: Sequence[str]) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A policy that knows the format and imitates the demonstrations."""
    tokenizer = build_tokenizer(vocabulary)
    model = build_model(tokenizer, hidden=settings.hidden, layers=settings.layers, seed=settings.seed)
    codec = ChatCodec(tokenizer)
    steps, every = settings.sft.steps, max(1, settings.sft.steps // 10)

    def show(learner: SFTLearner, metrics: dict[str, float]) -> None:
        if learner.steps % every == 0 or learner.steps == steps:
            print(f"  step {learner.steps:>4}/{steps}  loss {metrics['loss']:.3f}", flush=True)

    sft(model, demonstrations(tasks, codec, settings.seed), settings.sft, pad_id=tokenizer.pad_token_id, on_step=show)
    return model, tokenizer


def transcript(result: EvalResult, index: int) -> str:
    """The task and what the policy did with it."""
    trajectory = result.trees[index].trajectories[0]
    lines = [f"  {'policy' if node.sampled else node.role:>11}  {node.text.strip()}" for node in trajectory.nodes()]
    return "\n".join([*lines, f"  {'reward':>11}  {trajectory.reward:g}"])


def example(before: EvalResult, after: EvalResult) -> int:
    """A task whose answer became right, for show; the first one where there is none."""
    gained = [b.trajectories[0].reward < a.trajectories[0].reward >= 1 for b, a in zip(before.trees, after.trees, strict=True)]
    return gained.index(True) if any(gained) else 0


def main(settings: Settings) -> None:
    """Run it all, print the comparison, write summary.json."""
    torch.set_num_threads(settings.threads)
    settings = smoke(settings) if settings.smoke else settings
    out = settings.out or Path(f"runs/quickstart-{settings.seed}")
    shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    train, held_out = WorldTasks(WorldConfig(split="train")), WorldTasks(WorldConfig(split="test"))
    env = gymnasium.make("arpo/World-v0", split="train", disable_env_checker=True)

    print("cold start: supervised fine-tuning on noisy demonstrations", flush=True)
    model, tokenizer = cold_start(settings, train, world_vocabulary(WorldConfig()))
    parameters = sum(p.numel() for p in model.parameters())
    cold = time.monotonic()

    config = replace(settings.arpo, seed=settings.seed)
    trainer = ARPOTrainer(model, env, config, tokenizer=tokenizer, tasks=train, eval_tasks=held_out, run_dir=out)
    before = trainer.evaluate(n=settings.eval_tasks)
    print(f"\nbefore ARPO (greedy, held-out tasks)\n{before}\n")

    print(f"ARPO: {config.steps} steps of {config.tasks_per_step} tasks x {config.rollout.group_size} trajectories", flush=True)
    training = time.monotonic()
    result = trainer.train()
    trained = time.monotonic()
    after = trainer.evaluate(n=settings.eval_tasks)
    print(f"\nafter ARPO\n{after}\n")

    index = example(before, after)
    print(f"one task before\n{transcript(before, index)}\nand after\n{transcript(after, index)}\n")
    summary = {
        "seed": settings.seed,
        "before": before.to_dict(),
        "after": after.to_dict(),
        "parameters": parameters,
        "seconds": {"cold_start": cold - started, "arpo": trained - training, "total": time.monotonic() - started},
        "settings": asdict(settings),
        "versions": versions(),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
    print(f"accuracy {before.accuracy} -> {after.accuracy} on {settings.eval_tasks} held-out tasks, seed {settings.seed}")
    print(f"cold start {cold - started:.0f} s, ARPO {trained - training:.0f} s, everything {summary['seconds']['total']:.0f} s")  # type: ignore[index]
    print(f"model: {result.checkpoint / 'model'} ({parameters:,} parameters)")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__, config=(tyro.conf.AvoidSubcommands,)))
