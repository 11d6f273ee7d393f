"""``make real-model``: ARPO trees and one training step with a pretrained model on the public ARPO tasks, on two CPU cores.

1. SmolLM2-135M-Instruct is fetched and converted, once (fetch.py).
2. ``arpo rollout`` as it comes: the public tasks with their own system prompt. A model of this size does not call tools for being told of their tags.
3. ``arpo sft``: a cold start of a few steps on traces made of recorded searches (tasks.py).
4. ``arpo rollout`` with the cold-started model on tasks that no trace holds: a tree with real calls and branch points.
5. ``arpo train``, one step on such tasks; the checkpoint is opened with transformers and compared with what it started from.

Every command is printed as it would be typed. Numbers go to summary.json.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from fetch import Settings as FetchSettings
from fetch import fetch
from safetensors.torch import load_file
from tasks import split_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

from arpo_algo.cli import main as arpo
from arpo_algo.settings import read_toml
from arpo_algo.versions import versions

CONFIG = Path(os.path.relpath(Path(__file__).parent / "search.toml"))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    data: Path = Path("../shared/data")
    """Folder with train_10k.parquet and search_cache.json of the ARPO authors' repository (github.com/RUC-NLPIR/ARPO)."""
    model: Path = FetchSettings.out
    """Folder of the model; fetched when it is not there."""
    out: Path = Path("runs/real-model")
    """Folder of tasks, trees, checkpoint and summary.json; must not hold a run."""
    first: int = 4
    """Which of the tasks the tree is shown for."""
    group_size: int = 8
    initial: int = 4
    turn_tokens: int = 64
    """Most tokens of a turn."""
    sft_steps: int = 5
    """Steps of the cold start, four traces each."""
    train_groups: int = 2
    """Groups of the training step."""
    lr: float = 1e-5
    """Of the training step."""
    threads: int = 2
    """Threads of torch."""


def command(*args: object) -> None:
    """Run an ``arpo`` command in this process, shown as it would be typed. Raises ``SystemExit`` when it fails."""
    words = [str(arg) for arg in args]
    print(f"\n$ arpo {shlex.join(words)}", flush=True)
    if status := arpo(words):
        raise SystemExit(status)


def flags(table: str, values: dict[str, object]) -> list[object]:
    """The values as flags of ``table``."""
    return [word for name, value in values.items() for word in (f"--{table}.{name}", value)]


def compare(before: Path, after: Path) -> tuple[int, int, float]:
    """Changed weights, all weights, and the largest change between two model folders."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    if old.keys() != new.keys():
        raise RuntimeError(f"{after} must hold the tensors of {before}, the difference is {sorted(old.keys() ^ new.keys())}")
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    largest = max(float((old[name] - new[name]).abs().max()) for name in old)
    return changed, sum(tensor.numel() for tensor in old.values()), largest


def says(folder: Path, system: str, question: str) -> str:
    """What the model in ``folder`` writes first, greedily: the checkpoint opens with transformers alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def named(metrics: dict[str, Any], prefix: str) -> str:
    """The counts under a prefix, as text."""
    return ", ".join(f"{name.removeprefix(prefix)} {value:g}" for name, value in metrics.items() if name.startswith(prefix) and value is not None) or "none"


def describe(title: str, metrics: dict[str, Any]) -> str:
    """Calls, branches and speed of sampling."""
    seconds, tokens = metrics["seconds/rollout"], metrics["tokens/generated"]
    lines = [
        f"calls: {named(metrics, 'tool_calls/')}; failures: {named(metrics, 'tool_failures/')}",
        f"branch points {metrics['branch/points']:g}, branched {metrics['branch/branched']:g}; trajectories: {named(metrics, 'trajectories/')}",
        f"sampled {tokens:g} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s",
    ]
    if "policy/forward_seconds" in metrics:
        share = metrics["policy/forward_seconds"] / seconds
        computed, reused = metrics["policy/prefilled_tokens"], metrics["policy/reused_tokens"]
        lines.append(f"context tokens computed {computed}, reused {reused}; {share:.0%} of the time in the forward of the model")
    if "seconds/update" in metrics:
        update, trained = metrics["seconds/update"], metrics["tokens_trained"]
        lines.append(
            f"seconds of the step: rollout {seconds:.1f} (tools {metrics['seconds/tools']:.2f}, summed over trajectories), update {update:.1f}"
            f" ({trained:g} tokens trained, {trained / update:.1f} of them a second)"
        )
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def main(settings: Settings) -> None:
    """Run it all."""
    if (settings.out / "train").exists():
        raise SystemExit(f"{settings.out} holds a run, whose training would be resumed instead of done: delete it or choose another folder with --out")
    torch.set_num_threads(settings.threads)
    settings.out.mkdir(parents=True, exist_ok=True)
    fetch(FetchSettings(out=settings.model))
    started = time.monotonic()
    env_args = read_toml(CONFIG)["env"]["args"]
    split = split_tasks(settings.data, settings.out, env_args)
    print(f"{split.n_tasks + split.n_traces} questions of train_10k.parquet have a recorded answer: {split.n_traces} traces, {split.n_tasks} tasks")

    public, cache = settings.data / "train_10k.parquet", settings.data / "search_cache.json"
    zero, cold, warm, run = (settings.out / name for name in ("zero-shot", "sft", "rollout", "train"))
    group = {"group-size": settings.group_size, "initial": settings.initial, "max-turn-tokens": settings.turn_tokens}
    own = ["--tasks", public, "--search-cache", cache, "--first", 1]
    command("rollout", "--model", settings.model, *own, *flags("rollout", group), "--out", zero)
    sft = {"steps": settings.sft_steps, "batch-size": 4, "lr": 1e-4, "warmup-steps": 2}
    command("sft", "--model", settings.model, "--traces", split.traces, *flags("sft", sft), "--out", cold)
    recorded = ["--model", cold, "--tasks", split.tasks, "--search-cache", cache]
    command("rollout", CONFIG, *recorded, "--first", settings.first, *flags("rollout", group), "--out", warm)
    # A group whose rewards are all equal teaches nothing; such groups are replaced twice at most.
    step = {"steps": 1, "tasks-per-step": settings.train_groups, "lr": settings.lr, "resample-rounds": 2}
    command("train", CONFIG, *recorded, *flags("trainer.rollout", group), *flags("trainer", step), "--run-dir", run)
    seconds = time.monotonic() - started

    model = run / "checkpoints" / "step-000001" / "model"
    changed, total, largest = compare(cold, model)
    if not changed:
        raise RuntimeError(f"one step must change the weights, {model} holds the same ones: were all rewards of each group equal?")
    parts = {
        "zero_shot": json.loads((zero / "metrics.json").read_text()),
        "rollout": json.loads((warm / "metrics.json").read_text()),
        "train": json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]),
    }
    print()
    for title, name in (("rollout as it comes", "zero_shot"), ("rollout after the cold start", "rollout"), ("one training step", "train")):
        print(describe(title, parts[name]))
    print(f"weights: {changed:,} of {total:,} changed, by {largest:.2g} at most; {model} opens with AutoModelForCausalLM")
    question = "Who founded the city of Vienna?"
    print(f"  and answers {question!r} with {says(model, env_args['system_prompt'], question)!r}")
    weights = {"changed": changed, "total": total, "largest": largest}
    summary = parts | {"weights": weights, "seconds": seconds, "threads": settings.threads, "versions": versions()}
    (settings.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"everything after the download {seconds:.0f} s on {settings.threads} threads; {settings.out / 'summary.json'}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__, config=(tyro.conf.AvoidSubcommands,)))
