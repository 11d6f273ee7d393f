"""What the tests of vLLM share: a small model whose checkpoint it reads, and plain forwards to compare with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.policies.base import Generation, SamplingParams

VOCAB, BLOCK, CONTEXT = 61, 32, 2048
TOLERANCE = 1e-5
"""Of log-probabilities and entropies, in nats, in float32."""
PIECES = [chr(97 + i % 26) * (1 + i // 26) for i in range(VOCAB)]


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
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + got.token_ids])).logits[0, len(ids) - 1 : -1].double()
    p = logits.softmax(-1)
    np.testing.assert_allclose(got.entropies, torch.special.entr(p).sum(-1), atol=TOLERANCE)
    tempered = (logits / (params.temperature or 1.0)).softmax(-1)
    for row, token, logprob in zip(tempered, got.token_ids, got.logprobs, strict=True):
        ranked, order = row.sort(descending=True)
        kept = order[ranked.cumsum(0) - ranked < (params.top_p if params.temperature else 1.0)]
        assert token in kept
        assert logprob == pytest.approx(math.log(row[token] / row[kept].sum()), abs=TOLERANCE)


def counted(policy: Any, call: Callable[[], Any]) -> tuple[int, int]:
    """Prompt tokens that ``call`` computed and reused, by the engine's own count."""
    before = policy.stats.prefilled_tokens, policy.stats.reused_tokens
    call()
    return policy.stats.prefilled_tokens - before[0], policy.stats.reused_tokens - before[1]
