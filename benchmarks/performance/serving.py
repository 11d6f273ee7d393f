"""What sampling costs: tokens a second of each policy, what branches recompute, what exact entropies add at a large vocabulary.

Each part runs in a process of its own (one vLLM engine a process), on randomly initialised Llamas with heads of 32 dimensions:

    python benchmarks/performance/serving.py throughput branches entropy
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from measure import machine
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.policies.base import SamplingParams
from arpo_algo.versions import versions

Part = Literal["throughput", "branches", "entropy"]
POLICIES = ("transformers", "vllm in process", "vllm in a process of its own")
CONCURRENCY = (1, 16, 64)
LARGE = 151_936
"""The vocabulary of Qwen2.5."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    parts: tyro.conf.Positional[tuple[Part, ...]] = ("throughput", "branches", "entropy")
    repeats: int = 3
    """Of each figure; medians are shown."""
    out: Path = Path("runs/serving.json")


def checkpoint(folder: Path, *, hidden: int = 128, layers: int = 2, vocabulary: int = 512) -> Path:
    """A randomly initialised model on disk."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def policy_of(name: str, model: Path) -> Any:
    """One of :data:`POLICIES`; nothing ends its turns but their length."""
    if name == "transformers":
        from arpo_algo import TransformersPolicy

        return TransformersPolicy(LlamaForCausalLM.from_pretrained(model), None, eos_ids=())
    from arpo_algo import VLLMPolicy

    return VLLMPolicy(model, tokenizer=object(), eos_ids=(), cache_bytes=1 << 28, separate_process=name != "vllm in process")


def prompts(n: int, length: int, seed: int) -> list[list[int]]:
    return [[int(i) for i in row] for row in np.random.default_rng(seed).integers(0, 512, (n, length))]


def sample(policy: Any, batch: Sequence[list[int]], tokens: int) -> float:
    """Seconds that turns of ``tokens`` tokens take, all begun at once."""

    async def all_at_once() -> None:
        await asyncio.gather(*(policy.generate(ids, SamplingParams(max_new_tokens=tokens, seed=n, tree=n)) for n, ids in enumerate(batch)))

    started = time.perf_counter()
    asyncio.run(all_at_once())
    return time.perf_counter() - started


def throughput(name: str, repeats: int) -> list[dict[str, Any]]:
    """Tokens a second by concurrency, prompts of 32 tokens and turns of 128."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        policy, rows = policy_of(name, checkpoint(Path(folder))), []
        start = time.perf_counter() - started
        sample(policy, prompts(2, 32, 99), 8)
        for concurrency in CONCURRENCY:
            seconds = [sample(policy, prompts(concurrency, 32, r), 128) for r in range(repeats)]
            rows.append({"policy": name, "concurrency": concurrency, "tokens/s": concurrency * 128 / statistics.median(seconds), "start s": start})
        policy.close()
    return rows


def branches(name: str, repeats: int) -> list[dict[str, Any]]:
    """What 8 branches of a 1,024-token prefix compute and reuse, beside 8 unrelated prompts of that length."""
    with tempfile.TemporaryDirectory() as folder:
        policy, rows = policy_of(name, checkpoint(Path(folder), hidden=256, layers=4)), []
        sample(policy, prompts(1, 1024, 99), 1)
        for kind in ("branches", "unrelated"):
            counted = []
            for repeat in range(repeats):
                if kind == "branches":
                    prefix = prompts(1, 1024, 10 + repeat)
                    sample(policy, prefix, 1)
                    batch = prefix * 8
                else:
                    batch = prompts(8, 1024, 100 + repeat)
                before = (policy.stats.prefilled_tokens, policy.stats.reused_tokens)
                seconds = sample(policy, batch, 1)
                counted.append((policy.stats.prefilled_tokens - before[0], policy.stats.reused_tokens - before[1], seconds))
            computed, reused, seconds = (statistics.median(column) for column in zip(*counted, strict=True))
            rows.append({"policy": name, "kind": kind, "computed tokens": computed, "reused tokens": reused, "seconds": seconds})
        policy.close()
    return rows


def entropy(name: str, repeats: int) -> list[dict[str, Any]]:
    """CPU milliseconds a token at a vocabulary of 151,936 and concurrency 8: nothing beside the token, the entropy column, the top 20."""
    from vllm import SamplingParams as EngineParams

    from arpo_algo.policies.vllm_engine import start_engine
    from arpo_algo.policies.vllm_start import engine_arguments, set_environment

    set_environment()
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder), hidden=64, vocabulary=LARGE)
        arguments = {"model": str(model), "max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 26, "enable_sleep_mode": False}
        engine = start_engine(engine_arguments(arguments))
        rows = []
        for kind, logprobs in (("token alone", None), ("its log-probability", 0), ("entropy column", 1), ("top 20", 20)):

            def run(logprobs: int | None = logprobs) -> float:
                params = EngineParams(max_tokens=64, seed=0, logprobs=logprobs, flat_logprobs=True, detokenize=False, ignore_eos=True)
                for number, ids in enumerate(prompts(8, 32, 0)):
                    engine.add_request(str(number), {"type": "token", "prompt_token_ids": ids}, params)
                before = resource.getrusage(resource.RUSAGE_SELF)
                while engine.has_unfinished_requests():
                    engine.step()
                after = resource.getrusage(resource.RUSAGE_SELF)
                return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / (8 * 64)

            run()
            rows.append({"policy": name, "kind": kind, "CPU ms/token": 1000 * statistics.median(run() for _ in range(repeats))})
        engine.engine_core.shutdown()
    return rows


PARTS: dict[Part, tuple[Callable[[str, int], list[dict[str, Any]]], tuple[str, ...]]] = {
    "throughput": (throughput, POLICIES),
    "branches": (branches, POLICIES),
    "entropy": (entropy, ("vllm in process",)),
}


def main(settings: Settings) -> None:
    """Measure, print a line each, write JSON."""
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for part in settings.parts:
        measure, names = PARTS[part]
        for name in names:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as one:
                rows = one.submit(measure, name, settings.repeats).result()
            results.setdefault(part, []).extend(rows)
            for row in rows:
                print(part, "  ".join(f"{key} {value:,.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()), flush=True)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps({"machine": machine(), "versions": versions(), **results}, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
