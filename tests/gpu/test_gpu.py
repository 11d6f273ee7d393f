"""What only a CUDA device can show: the same numbers as on the CPU, weights into an engine on the same GPU, memory given back, tokens a second.

    python -m pytest tests/gpu -m gpu -s

Needs ``arpo[train]``; the tests of vLLM need ``arpo[vllm]`` (the GPU build) as well. One model serves all, a randomly initialised Llama of about 100 million
parameters, so that nothing is downloaded.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tiny_policy import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import arpo_env
from arpo_algo import ARPOConfig, ARPOTrainer, RolloutConfig, UniformBranching
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.token_tree import TokenTree, build_tree
from arpo_algo.tree_attention import Backend, model_inputs, tree_attention
from arpo_env.envs.world import WorldConfig, world_vocabulary

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    from arpo_algo import VLLMPolicy

    policy = VLLMPolicy(folder, separate_process=True, sleeps=True, dtype="float32", cache_bytes=1 << 30, context_length=1024)
    yield policy
    policy.close()


def sampled(policy: Any, n: int, tokens: int) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        prompts = np.random.default_rng(0).integers(3, 100, (n, 64)).tolist()
        return list(await asyncio.gather(*(policy.generate(ids, SamplingParams(max_new_tokens=tokens, seed=i)) for i, ids in enumerate(prompts))))

    return asyncio.run(all_at_once())


def any_answer(task: arpo_env.Task, episode: arpo_env.Episode) -> float:
    return float(sum(map(len, episode.turns)) % 3)


def train(folder: Path, run_dir: Path, policy: Any, **options: Any) -> dict[str, float]:
    """Metrics of the last of three steps."""
    env = gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=any_answer, max_turns=2)
    rollout = RolloutConfig(group_size=8, initial=4, window=4, max_turn_tokens=32, max_context=256)
    config = ARPOConfig(steps=3, tasks_per_step=4, lr=1e-5, branching=UniformBranching(), rollout=rollout, **options)
    return ARPOTrainer(str(folder), env, config, policy=policy, run_dir=run_dir).train().metrics


def logprobs_of(model: Any, prompt: list[int], turn: Generation) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a turn by a plain forward on the GPU."""
    ids = torch.tensor([prompt + turn.token_ids], device="cuda")
    with torch.inference_mode():
        logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu(), -(logp.exp() * logp).sum(-1).cpu()


def test_training_on_the_gpu_agrees_with_its_own_sampler(folder: Path, tmp_path: Path) -> None:
    metrics = train(folder, tmp_path, None)
    assert metrics["mismatch/max_abs"] < 1e-2
    print(f"\ntransformers: {metrics['tokens/generated'] / metrics['seconds/rollout']:.0f} tokens/s sampled, update {metrics['seconds/update']:.2f} s")


def test_bfloat16_training_measures_and_corrects_the_difference(folder: Path, tmp_path: Path) -> None:
    metrics = train(folder, tmp_path, None, dtype="bfloat16", recompute_old_logprobs=True, importance_cap=2.0)
    assert 0 < metrics["mismatch/mean_abs"] < 0.2 and np.isfinite(metrics["loss"])


@needs_vllm
def test_the_engines_numbers_are_those_of_transformers(folder: Path, engine: Any) -> None:
    engine.update_weights(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    prompts = np.random.default_rng(0).integers(3, 100, (8, 64)).tolist()
    for prompt, turn in zip(prompts, sampled(engine, 8, 32), strict=True):
        logprobs, entropies = logprobs_of(model, prompt, turn)
        assert (torch.tensor(turn.logprobs) - logprobs).abs().max() < 1e-2
        assert (torch.tensor(turn.entropies) - entropies).abs().max() < 1e-2


@needs_vllm
def test_new_weights_reach_the_engine_and_its_memory_is_given_back(folder: Path, engine: Any) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    engine.sleep()
    free, _ = torch.cuda.mem_get_info()
    engine.update_weights(model.state_dict().items())
    assert torch.cuda.mem_get_info()[0] < free, "an engine that wakes takes memory that it had given up"
    prompts = np.random.default_rng(0).integers(3, 100, (8, 64)).tolist()
    for prompt, turn in zip(prompts, sampled(engine, 8, 32), strict=True):
        assert (torch.tensor(turn.logprobs) - logprobs_of(model, prompt, turn)[0]).abs().max() < 1e-2


@needs_vllm
def test_a_run_with_the_engine_on_the_same_gpu(folder: Path, tmp_path: Path, engine: Any) -> None:
    metrics = train(folder, tmp_path, engine)
    assert metrics["mismatch/max_abs"] < 1e-2
    print(f"\nvLLM: {metrics['tokens/generated'] / metrics['seconds/rollout']:.0f} tokens/s sampled, weights {metrics['seconds/weights']:.2f} s")


@needs_vllm
@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_tokens_a_second(folder: Path, engine: Any, name: str) -> None:
    policy = engine if name == "vllm" else TransformersPolicy.from_pretrained(folder, eos_ids=())
    sampled(policy, 4, 16)
    for n in (1, 64):
        started = time.perf_counter()
        tokens = sum(len(turn.token_ids) for turn in sampled(policy, n, 128))
        print(f"\n{name}, {n} at once: {tokens / (time.perf_counter() - started):.0f} tokens/s")


# ---- packed trees


def small_tree() -> TokenTree:
    """About 1,200 tokens: rows that branch off each other at any place, most nodes longer than a block of 128, some of a few tokens."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 100, 500)]
    for fork, length in ((300, 200), (450, 6), (300, 150), (302, 90), (40, 250)):
        rows.append(np.concatenate((rows[-1][:fork], rng.integers(0, 100, length))))
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return build_tree(ids, np.array([len(row) for row in rows]))


def packed_gradient(model: Any, backend: Backend, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Of a fixed random combination of the tree's logits, in float64 on the CPU."""
    tree, model = small_tree(), copy.deepcopy(model).to(device, dtype)
    wanted = torch.randn(len(tree), 100, generator=torch.Generator().manual_seed(1)).to(device)
    with tree_attention(model, backend):
        inputs = model_inputs(tree, backend, device=torch.device(device), dtype=dtype, config=model.config)
        (model(**inputs, use_cache=False).logits[0, : len(tree)].float() * wanted).sum().backward()
    return torch.cat([parameter.grad.double().cpu().flatten() for parameter in model.parameters()])


@pytest.fixture(params=[None, 70])
def windowed(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor]:
    """A model whose three query heads share a key, with and without a window, and its gradient in float64 on the CPU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    model = MistralForCausalLM(MistralConfig(vocab_size=100, **sizes, sliding_window=request.param, initializer_range=0.05, pad_token_id=0)).eval()
    return model, packed_gradient(model, "path", "cpu", torch.float64)


@pytest.mark.parametrize("backend", ["path", "flex", "dense"])
def test_packed_gradients_in_float32_are_those_of_the_cpu(windowed: tuple[Any, torch.Tensor], backend: Backend) -> None:
    model, exact = windowed
    assert (packed_gradient(model, backend, "cuda", torch.float32) - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_packed_gradients_in_bfloat16_lose_no_more_than_the_blocks_do(windowed: tuple[Any, torch.Tensor], backend: Backend) -> None:
    """A causal mask or window aligned otherwise than the paths need is off by the whole gradient."""
    model, exact = windowed
    blocks, ours = (float((packed_gradient(model, name, "cuda", torch.bfloat16) - exact).norm() / exact.norm()) for name in ("path", backend))
    assert blocks < 0.1 and ours < 1.3 * blocks
