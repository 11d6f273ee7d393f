"""LoRA adapters in a running vLLM engine, in this process and in another: the one that is asked for is the one that is served, whole.

Needs vLLM (``make test-vllm`` installs its CPU build) and peft. One engine at a time; tests follow each other in it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from vllm_fakes import CONTEXT, llama, prompt

from arpo_algo.learner import add_lora
from arpo_algo.policies.agreement import logprobs_of
from arpo_algo.policies.vllm_lora import (
    drop_adapter,
    load_adapter,
    lora_arguments,
    probe_adapter,
    request_of,
    save_adapter,
    scratch_folder,
)
from arpo_algo.policies.vllm_transfer import SharedMemory, engine_arguments

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # a start takes 15 to 30 s on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports
]
RANK = 4
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
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
TOLERANCE = 1e-4
"""Nats. The prompts are random ids, down to -20 nats each; another adapter is off by 1."""
PROMPTS = [prompt(40, seed=5), prompt(9, seed=6)]


@dataclass
class Served:
    """An engine for adapters, the peft model that learns them, and the folder where they lie."""

    llm: Any
    run: Callable[[Awaitable[Any]], Any]
    model: Any
    folder: Path

    def learn(self, scale: float = 0.05) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=scale)

    def load(self, version: int) -> Any:
        save_adapter(self.model, self.folder, version)
        request = request_of(version, self.folder)
        self.run(load_adapter(self.llm, request))
        return request

    def probe(self, request: Any) -> Any:
        return self.run(probe_adapter(self.llm, request, logprobs_of(self.model), PROMPTS, tolerance=TOLERANCE))

    def loaded(self) -> set[int]:
        async def main() -> set[int]:
            found = self.llm.list_loras()
            return set(await found if asyncio.iscoroutine(found) else found)

        return set(self.run(main()))


def in_this_process(arguments: dict[str, Any]) -> Iterator[tuple[Any, Callable[[Awaitable[Any]], Any]]]:
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**arguments, worker_extension_cls="arpo_algo.policies.vllm_worker.EntropyColumn").create_engine_config()
    llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    try:
        llm.collective_rpc("add_entropy_column")  # without it vLLM compiles a kernel for its log-probabilities
        yield llm, asyncio.run
    finally:
        llm.engine_core.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()


def in_another_process(arguments: dict[str, Any]) -> Iterator[tuple[Any, Callable[[Awaitable[Any]], Any]]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start() -> Any:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, **engine_arguments(SharedMemory())))
        await llm.collective_rpc("add_entropy_column")
        return llm

    with closing(asyncio.new_event_loop()) as loop:
        llm = loop.run_until_complete(start())
        try:
            yield llm, loop.run_until_complete
        finally:
            llm.shutdown()
            loop.run_until_complete(asyncio.sleep(0.1))  # its tasks end


@pytest.fixture(scope="module", params=[in_this_process, in_another_process], ids=lambda start: start.__name__)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path, folder = tmp_path_factory.mktemp("model"), scratch_folder()
    model = add_lora(llama(path), rank=RANK, alpha=8).eval()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            for llm, run in request.param({"model": str(path), **SETTINGS, **lora_arguments(RANK)}):
                yield Served(llm, run, model, folder)
        finally:
            shutil.rmtree(folder)


def test_each_version_is_the_learners(served: Served) -> None:
    request = served.load(1)  # as it was made: an adapter that changes nothing
    assert served.probe(request).base == 0
    for version in (2, 3):
        served.learn()
        old, request = request, served.load(version)
        assert served.loaded() == {version - 1, version}
        probe = served.probe(request)
        assert probe.learner < TOLERANCE and probe.base > 0.1
        with pytest.raises(RuntimeError, match=r"does not serve the learner's adapter version-\d: log-probabilities differ by .* from the learner's"):
            served.probe(old)
        served.run(drop_adapter(served.llm, old))
        assert served.loaded() == {version}
        assert [entry.name for entry in served.folder.iterdir()] == [str(version)]
    with served.model.disable_adapter():
        learner = logprobs_of(served.model)
        with pytest.raises(RuntimeError, match="does not serve"):
            served.run(probe_adapter(served.llm, request, learner, PROMPTS, tolerance=TOLERANCE))
    served.run(drop_adapter(served.llm, request))


def test_a_probe_needs_numbers(served: Served) -> None:
    served.learn()
    request = served.load(7)
    with pytest.raises(ValueError, match=r"prompts of at least 2 tokens .* lengths \[1\]"):
        served.run(probe_adapter(served.llm, request, lambda ids, start: [], [[3]], tolerance=TOLERANCE))
    with pytest.raises(RuntimeError, match="differ by inf nats"):
        served.run(probe_adapter(served.llm, request, lambda ids, start: [math.nan] * (len(ids) - start), PROMPTS, tolerance=TOLERANCE))
    served.run(drop_adapter(served.llm, request))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {name.replace(".model.layers", ".other.layers"): tensor for name, tensor in tensors.items()},
            r"no place for parts .* other\.layers",
        ),
        (
            lambda tensors: tensors | {name.replace("layers.0", "layers.9"): tensor for name, tensor in tensors.items() if "layers.0.self_attn.q" in name},
            r"no place for parts of the adapter version-5, .*: model\.layers\.9\.self_attn\.q_proj$",
        ),
        (
            lambda tensors: tensors | {name.replace("q_proj", "z_proj"): tensor for name, tensor in tensors.items() if "0.self_attn.q" in name},
            r"cannot serve the adapter version-5: .*z_proj",
        ),
    ],
    ids=["another prefix", "a layer too many", "an unknown module"],
)
def test_what_vllm_would_skip_is_an_error(served: Served, change: Callable[[Any], Any], message: str) -> None:
    served.learn()
    good = served.load(4)
    save_adapter(served.model, served.folder, 5)
    rewritten(served.folder / "5", change)
    try:
        with pytest.raises(ValueError, match=message):
            served.run(load_adapter(served.llm, request_of(5, served.folder)))
        assert served.loaded() == {4}
        assert served.probe(good).learner < TOLERANCE, "the engine goes on with what it had"
    finally:
        served.run(drop_adapter(served.llm, good))


def test_a_version_that_is_there_is_not_taken_for_the_new_one(served: Served) -> None:
    served.learn()
    good = served.load(6)
    served.learn()
    with pytest.raises(ValueError, match="has an adapter version-6 already"):
        served.load(6)
    served.run(drop_adapter(served.llm, good))
    assert served.probe(served.load(6)).learner < TOLERANCE


# --- without an engine --------------------------------------------------------------------------------------------------------------------------------


def test_ranks_are_rounded_up_to_those_of_vllm() -> None:
    assert lora_arguments(16) == {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
    assert [lora_arguments(rank)["max_lora_rank"] for rank in (1, 2, 8, 9, 64)] == [1, 8, 8, 16, 64]
    with pytest.raises(ValueError, match="rank 1 to 512, got 0"):
        lora_arguments(0)
    with pytest.raises(ValueError, match="got 513"):
        lora_arguments(513)


def test_requests_count_from_one(tmp_path: Path) -> None:
    request = request_of(3, tmp_path)
    assert (request.lora_int_id, request.lora_name, request.lora_path) == (3, "version-3", str(tmp_path / "3"))
    with pytest.raises(ValueError, match="count from 1, got 0"):
        request_of(0, tmp_path)


def test_adapters_that_vllm_cannot_serve_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = llama(tmp_path / "model")
    with pytest.raises(ValueError, match="one LoRA adapter, got a LlamaForCausalLM without adapters"):
        save_adapter(model, tmp_path, 1)
    for settings, message in (
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"use_dora": True}, "use_dora"),
    ):
        adapted = get_peft_model(llama(tmp_path / "model"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
        with pytest.raises(ValueError, match=f"{message}.* whole weights instead"):
            save_adapter(adapted, tmp_path, 1)
    assert not (tmp_path / "1").exists()
