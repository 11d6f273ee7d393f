"""The same 20 ARPO steps with vLLM as the sampler and with transformers: rewards, tokens a second, seconds of weight transfer.

A policy is cold-started as in the quickstart, with heads of 32 dimensions, which vLLM's CPU build supports (24 it does not). Each seed is then trained twice
from the same checkpoint: once sampling with the trained model itself (:class:`TransformersPolicy`), once with a vLLM engine in a process of its own. vLLM
draws other tokens from the same seed, so that the curves can agree within noise and no better.

    python benchmarks/performance/served_training.py --seeds 0 1 2
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import torch
import tyro
from measure import machine

from arpo_algo import ARPOConfig, ARPOTrainer
from arpo_algo.tracking import read_jsonl
from arpo_algo.versions import versions
from arpo_env.envs.world import WorldConfig, WorldTasks, world_vocabulary

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from quickstart import Settings as Quickstart
from quickstart import cold_start

Backend = Literal["transformers", "vllm"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared."""

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 20
    eval_tasks: int = 200
    """Held-out tasks, greedy, before and after."""
    backends: tuple[Backend, ...] = ("transformers", "vllm")
    max_staleness: int = 0
    """Of the vLLM runs."""
    out: Path = Path("runs/served-training")


def checkpoint(out: Path, seed: int) -> Path:
    """The cold-started policy of a seed."""
    folder = out / f"cold-{seed}"
    if not folder.exists():
        quickstart = Quickstart(seed=seed, hidden=128)
        model, tokenizer = cold_start(quickstart, WorldTasks(WorldConfig(split="train")), world_vocabulary(WorldConfig()))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def policy(backend: Backend, model: Path) -> Any:
    """What samples; None: the trained model itself."""
    if backend == "transformers":
        return None
    from arpo_algo import VLLMPolicy

    return lambda: VLLMPolicy(model, separate_process=True, cache_bytes=1 << 28, max_batch=128)


def run(settings: Settings, seed: int, backend: Backend) -> dict[str, Any]:
    """One training run and what it cost."""
    model, run_dir = checkpoint(settings.out, seed), settings.out / f"{backend}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    config: ARPOConfig = replace(
        Quickstart().arpo, seed=seed, steps=settings.steps, record_every=0, max_staleness=settings.max_staleness if backend == "vllm" else 0
    )
    held_out = WorldTasks(WorldConfig(split="test"))
    env = gymnasium.make("arpo/World-v0", split="train", disable_env_checker=True)
    trainer = ARPOTrainer(str(model), env, config, policy=policy(backend, model), eval_tasks=held_out, run_dir=run_dir)
    try:
        before = trainer.evaluate(n=settings.eval_tasks)
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
        after = trainer.evaluate(n=settings.eval_tasks)
    finally:
        trainer.close()
    steps = read_jsonl(run_dir / "metrics.jsonl")
    late = steps[-5:]
    return {
        "seed": seed,
        "policy": backend,
        "reward_first_5": statistics.fmean(step["reward/mean"] for step in steps[:5]),
        "reward_last_5": statistics.fmean(step["reward/mean"] for step in late),
        "eval_before": before.accuracy.mean,
        "eval_after": after.accuracy.mean,
        "tokens_per_second": sum(step["tokens/generated"] for step in steps) / sum(step["seconds/rollout"] for step in steps),
        "seconds_weights": statistics.median(step["seconds/weights"] for step in steps),
        "seconds_rollout": statistics.median(step["seconds/rollout"] for step in steps),
        "seconds_update": statistics.median(step["seconds/update"] for step in steps),
        "mismatch_mean": max(step["mismatch/mean_abs"] for step in steps),
        "mismatch_max": max(step["mismatch/max_abs"] for step in steps),
        "seconds": seconds,
    }


def main(settings: Settings) -> None:
    """Run all, print a line each, write results.json."""
    torch.set_num_threads(1)
    results = []
    for seed in settings.seeds:
        for backend in settings.backends:
            results.append(run(settings, seed, backend))
            print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in results[-1].items()), flush=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "results.json").write_text(json.dumps({"machine": machine(), "versions": versions(), "runs": results}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
