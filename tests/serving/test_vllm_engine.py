"""The life of a vLLM engine in this process: refusals, new weights, failure. Every test starts one of its own."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from vllm_fakes import LONG, Pieces, alone, counted, llama, noisy, prompt, right, right_by_version, together

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.vllm import VLLMPolicy
from arpo_algo.policies.vllm_engine import EngineStopped

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),  # a start takes 15 s on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports, in its thread
]


def test_new_weights_are_the_ones_served(tmp_path: Path) -> None:
    """A tied output head: the one that vLLM's CPU build leaves as it was."""
    model = llama(tmp_path / "0", tied=True)
    ids, params = prompt(70), SamplingParams(max_new_tokens=20, temperature=0.0)
    with VLLMPolicy(tmp_path / "0", tokenizer=Pieces(), eos_ids=(), cache_bytes=1 << 24) as policy:
        right(model, ids, params, alone(policy, ids, max_new_tokens=20, temperature=0.0))
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            stale = alone(policy, ids, max_new_tokens=20, temperature=0.0)
            with pytest.raises(AssertionError):
                right(model, ids, params, stale)
            if version == 1:
                policy.update_weights(model.state_dict().items())
            else:
                model.save_pretrained(tmp_path / "2")
                policy.update_weights(tmp_path / "2")
            fresh: list[Generation] = []
            assert counted(policy, lambda: fresh.extend(together(policy, [(ids, params)]))) == (70, 0), "keys and values of the old weights are in use"  # noqa: B023
            right(model, ids, params, fresh[0])
            assert (stale.version, fresh[0].version, policy.version) == (version - 1, version, version)
        go_on_with_new_weights(policy, model)
        with pytest.raises(ValueError, match="expected the folder of a checkpoint, got 'nowhere'"):
            policy.update_weights("nowhere")
        with pytest.raises(EngineStopped, match=r"could not load new weights: ValueError: missing parameters of 2 layers: model\.layers\.1\.mlp"):
            policy.update_weights([(name, tensor) for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name])
        with pytest.raises(EngineStopped, match="could not load new weights"):
            alone(policy, ids, max_new_tokens=1)


def go_on_with_new_weights(policy: VLLMPolicy, old: Any) -> None:
    """Turns under way, with random generators of their own."""
    requests = [(prompt(3, seed), SamplingParams(max_new_tokens=LONG, seed=seed)) for seed in range(3)]
    version, new = policy.version, noisy(old, seed=3)

    async def main() -> list[Generation]:
        turns = [asyncio.create_task(policy.generate(*request)) for request in requests]
        await policy.generate(prompt(5), SamplingParams(max_new_tokens=20))
        assert not any(turn.done() for turn in turns)
        await asyncio.to_thread(policy.update_weights, new.state_dict().items(), keep_requests=True)
        return await asyncio.gather(*turns)

    for (ids, params), got in zip(requests, asyncio.run(main()), strict=True):
        assert set(got.versions) == {version, version + 1} and got.versions == sorted(got.versions) and got.version == version
        right_by_version({version: old, version + 1: new}, ids, params, got)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"logprobs_mode": "raw_logprobs", "speculative_config": {}}, "sets these engine arguments itself: logprobs_mode, speculative_config"),
        ({"data_parallel_size": 2}, "pass separate_process=True"),
        ({"context_length": 4096}, "4096"),
        ({"enable_chunked_prefill": True}, "cannot prefill in chunks"),
        ({"cache_bytes": 1 << 12}, "No available memory for the cache blocks"),
    ],
)
def test_a_wrong_configuration_is_refused_before_the_first_token(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    llama(tmp_path)
    with pytest.raises(ValueError, match=message):
        VLLMPolicy(tmp_path, tokenizer=Pieces(), **{"cache_bytes": 1 << 26, **kwargs})
    assert not torch.distributed.is_initialized()


def test_an_engine_that_fails_answers_everybody(tmp_path: Path) -> None:
    llama(tmp_path)
    policy = VLLMPolicy(tmp_path, tokenizer=Pieces(), cache_bytes=1 << 24)
    with pytest.raises(RuntimeError, match="this process runs a vLLM engine already"):
        VLLMPolicy(tmp_path, tokenizer=Pieces())

    def fail() -> Any:
        raise OSError("out of memory, says the test")

    async def main() -> list[Any]:
        policy._engine.call(lambda engine: setattr(engine, "step", fail))
        return await asyncio.gather(*(policy.generate([1], SamplingParams(max_new_tokens=5)) for _ in range(3)), return_exceptions=True)

    try:
        assert [(type(got), str(got)) for got in asyncio.run(main())] == [(EngineStopped, "the vLLM engine failed: OSError: out of memory, says the test")] * 3
        with pytest.raises(EngineStopped, match="out of memory"):
            alone(policy, [1], max_new_tokens=1)
    finally:
        policy.close()
        policy.close()
    assert not torch.distributed.is_initialized(), "a learner could not open its process group"


VERY_LONG = 2000
"""Tokens of a turn that is still under way when an adapter has been loaded, which takes as long as a few dozen."""


def test_adapters_are_served_beside_the_weights(tmp_path: Path) -> None:
    """A turn under way ends with the adapter it began with."""
    from peft import LoraConfig, get_peft_model

    base = llama(tmp_path)
    models: dict[int, Any] = {}
    with VLLMPolicy(tmp_path, tokenizer=Pieces(), cache_bytes=1 << 24, eos_ids=(), lora_rank=4) as policy:
        ids, params = prompt(70), SamplingParams(max_new_tokens=20, seed=1)
        right(base, ids, params, together(policy, [(ids, params)])[0])

        for version in (1, 2, 3):
            torch.manual_seed(version)
            config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            models[version] = get_peft_model(copy.deepcopy(base), config).eval()

        async def main() -> list[Generation]:
            long = asyncio.create_task(policy.generate(prompt(3), SamplingParams(max_new_tokens=VERY_LONG)))
            await policy.generate(ids, params)
            await asyncio.to_thread(policy.update_adapter, models[2])
            assert not long.done()
            return [await policy.generate(ids, params), await long]

        policy.update_adapter(models[1])
        fresh, long = asyncio.run(main())
        assert (fresh.version, fresh.versions, long.version, long.versions) == (2, [], 1, [])
        right(models[2], ids, params, fresh)
        right_by_version(models, prompt(3), SamplingParams(max_new_tokens=VERY_LONG), long)
        with pytest.raises(AssertionError):
            right(base, ids, params, fresh)
        policy.update_adapter(models[3])
        with pytest.raises(RuntimeError, match="call update_adapter"):
            policy.update_weights(base.state_dict().items())
        right(models[3], ids, params, together(policy, [(ids, params)])[0])
        folder = policy._adapters._folder
        assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    assert not folder.exists()
