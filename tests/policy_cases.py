"""Tiny models for tests of policies that run one, and the slow reference that says what such a policy must sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.decoding import CachedDecoder
from arpo_algo.policies.kv_cache import KVCache
from arpo_algo.policies.sampling import sample, seed_key, uniforms
from arpo_algo.policies.transformers import TransformersPolicy

VOCAB = 61
# initializer_range far above the usual 0.02: the distributions are sharp and context-dependent, so a fault in the cache changes tokens.
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**COMMON, **SMALL, max_position_embeddings=256, **kwargs)).eval()


class Letters:
    """Id i is a letter; no end token of its own."""

    eos_token_id: int | None = None

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


def same(got: Generation, want: Generation) -> None:
    assert got.token_ids == want.token_ids
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    np.testing.assert_allclose(got.entropies, want.entropies, atol=1e-5)


def right(model: Any, prompt: Sequence[int], params: SamplingParams, got: Generation) -> None:
    """Plain decoding without cache or batch samples the same turn.

    One forward over the prompt and the sampled ids gives the logits of every step: the first id that plain decoding would sample otherwise shows.
    """
    n = len(got.token_ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *got.token_ids]])).logits[0, len(prompt) - 1 : -1]
    draws = uniforms(np.full(n, seed_key(params.seed), np.uint64), np.arange(n, dtype=np.uint64))
    ids, logprobs, entropies = sample(logits, draws, np.full(n, params.temperature), np.full(n, params.top_p))
    same(got, Generation(token_ids=ids.tolist(), logprobs=logprobs.tolist(), entropies=entropies.tolist(), stop_reason="length"))


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, n)]


def cache_of(policy: TransformersPolicy) -> KVCache:
    assert isinstance(policy._decoder, CachedDecoder)
    return policy._decoder.cache
