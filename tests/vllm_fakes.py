"""What the tests of vLLM share: a small model whose checkpoint it reads, and plain forwards to compare with."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.vllm_turns import EngineStopped

VOCAB, BLOCK, CONTEXT = 61, 32, 2048
TOLERANCE = 2e-4
"""Of log-probabilities and entropies, in nats, in float32. A plain forward of these models is off from the one in float64 by up to 4e-5 (12 models, 1,000
tokens), and which way depends on the machine's kernels; stale weights, keys or temperatures are off by whole nats."""
ENDLESS = CONTEXT - 3
"""Tokens of a turn that is still under way when it is ended, of a policy without end tokens."""
LONG = 600
"""Tokens of one during which something else happens."""
PIECES = [chr(97 + i % 26) * (1 + i // 26) for i in range(VOCAB)]
SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 24,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
"""Arguments of an engine that a test starts without the policy."""
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Pieces:
    """Id i is one to three equal letters."""

    eos_token_id: int | None = None

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(PIECES[i] for i in ids)


def llama(path: Path, *, tied: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,  # ten times the usual: sharp distributions that depend on the context
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [7, 60]
    model.save_pretrained(path)
    return model


def noisy(model: Any, *, seed: int) -> Any:
    """A copy of the model whose weights are a step away."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, n)]


def together(policy: Any, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Generation]:
    async def main() -> list[Generation]:
        return await asyncio.gather(*(policy.generate(ids, params) for ids, params in requests))

    return asyncio.run(main())


def alone(policy: Any, ids: list[int], **params: Any) -> Generation:
    return together(policy, [(ids, SamplingParams(**params))])[0]


def close(got: Generation, want: Generation) -> None:
    assert (got.token_ids, got.stop_reason, got.stop_string) == (want.token_ids, want.stop_reason, want.stop_string)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=TOLERANCE)
    np.testing.assert_allclose(got.entropies, want.entropies, atol=TOLERANCE)


def right(model: Any, ids: list[int], params: SamplingParams, got: Generation) -> None:
    """A plain forward gives the log-probabilities of the distribution that was sampled from and the entropies at temperature 1."""
    right_by_version({got.version: model}, ids, params, got)


def right_by_version(models: Mapping[int, Any], ids: list[int], params: SamplingParams, got: Generation) -> None:
    """As ``right``, where the weights changed under way: each token is the one that the model of its version gives after all tokens before it."""
    versions = got.versions or [got.version] * len(got.token_ids)
    for version in sorted(set(versions)):
        with torch.no_grad():
            logits = models[version](input_ids=torch.tensor([ids + got.token_ids])).logits[0, len(ids) - 1 : -1].double()
        mine = [i for i, sampled_by in enumerate(versions) if sampled_by == version]
        entropies = torch.special.entr(logits.softmax(-1)).sum(-1)
        np.testing.assert_allclose([got.entropies[i] for i in mine], entropies[mine], atol=TOLERANCE)
        tempered = (logits / (params.temperature or 1.0)).softmax(-1)
        expected = []
        for i in mine:
            ranked, order = tempered[i].sort(descending=True)
            kept = order[ranked.cumsum(0) - ranked < (params.top_p if params.temperature else 1.0)]
            assert got.token_ids[i] in kept
            expected.append(math.log(tempered[i][got.token_ids[i]] / tempered[i][kept].sum()))
        np.testing.assert_allclose([got.logprobs[i] for i in mine], expected, atol=TOLERANCE)


def logprobs_of(model: Any) -> Callable[[list[int], int], list[float]]:
    """``logprobs(ids, start)``: log-probabilities of ``ids[start:]``, each after all ids before it, from one plain forward."""

    def logprobs(ids: list[int], start: int) -> list[float]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].float()  # (new tokens, vocabulary)
        return [float(value) for value in logits.log_softmax(-1).gather(-1, torch.tensor(ids[start:]).unsqueeze(-1))]

    return logprobs


def counted(policy: Any, call: Callable[[], Any]) -> tuple[int, int]:
    """Prompt tokens that ``call`` computed and reused, by the engine's own count."""
    before = policy.stats.prefilled_tokens, policy.stats.reused_tokens
    call()
    return policy.stats.prefilled_tokens - before[0], policy.stats.reused_tokens - before[1]


def processes_below(pid: int) -> set[int]:
    """The process, its children, theirs and so on."""
    found = {pid}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it has ended meanwhile
        if int(text.rsplit(")", 1)[1].split()[1]) == pid:
            found |= processes_below(int(stat.parent.name))
    return found


def shared_memory(pids: set[int]) -> set[Path]:
    """Files in shared memory that the processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/psm_" in line]
    return {Path(line[line.index("/dev/shm/") :].removesuffix(" (deleted)")) for line in lines}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def hear_of_a_death(policy: Any) -> None:
    """Kills one of the policy's processes: all turns fail, also later ones, and closing it leaves no process and no shared memory."""
    tops = [process.pid for process in policy._engine._llm.engine_core.resources.engine_manager.processes]
    pids = {pid for pid in processes_below(os.getpid()) - {os.getpid()} if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}
    assert pids >= set(tops)
    memory = shared_memory(pids)

    async def main() -> list[Any]:
        requests = [policy.generate(prompt(5, i), SamplingParams(max_new_tokens=ENDLESS - 2, tree=200 + i)) for i in range(8)]
        turns = [asyncio.create_task(request) for request in requests]
        while policy.stats.decoded_tokens < before + 20:
            await asyncio.sleep(0.01)
        os.kill(tops[-1], signal.SIGKILL)
        return await asyncio.gather(*turns, return_exceptions=True)

    before = policy.stats.decoded_tokens
    outcomes = asyncio.run(main())
    assert [(type(error), str(error)) for error in outcomes] == [(EngineStopped, "a process of the vLLM engine died")] * 8
    with pytest.raises(EngineStopped, match="died"):
        alone(policy, [1], max_new_tokens=1)
    with pytest.raises(EngineStopped, match="died"):
        policy.update_weights([])
    policy.close()
    policy.close()
    assert not [pid for pid in pids if alive(pid)]
    assert not [path for path in memory if path.exists()]
