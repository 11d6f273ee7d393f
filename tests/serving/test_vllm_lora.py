"""LoRA adapters in a running vLLM engine, in this process and in another: the one that is asked for is the one that is served, whole.

Needs vLLM (``make test-vllm`` installs its CPU build) and peft. One engine at a time; tests follow each other in it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

import numpy as np
import torch
from vllm_fakes import ENVIRONMENT, llama, logprobs_of, prompt
from vllm_fakes import SETTINGS as ENGINE

from arpo_algo.learner import add_lora
from arpo_algo.policies.vllm_lora import (
    drop_adapter,
    load_adapter,
    lora_arguments,
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
SETTINGS = ENGINE | {"worker_extension_cls": "arpo_algo.policies.vllm_shared_memory.WeightReceiver"}
TOLERANCE = 1e-4
"""Nats. The prompts are random ids, down to -20 nats each; another adapter is off by 1."""
OTHER = 0.1
"""Nats, by which the log-probabilities of different adapters differ at least somewhere."""
PROMPTS = [prompt(40, seed=5), prompt(9, seed=6)]


@dataclass
class Served:
    """An engine for adapters, the peft model that learns them, and the folder where they lie."""

    llm: Any
    run: Callable[[Awaitable[Any]], Any]
    model: Any
    folder: Path
    names: Iterator[int] = field(default_factory=itertools.count)

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

    def scores(self, request: Any) -> np.ndarray:
        """The engine's log-probability of each id of the prompts after their first, with an adapter or, of None, without."""
        return np.concatenate([self.run(score(self.llm, ids, request, f"score-{next(self.names)}")) for ids in PROMPTS])

    def gap(self, request: Any) -> float:
        """Largest difference between the engine with the adapter and the model that learns; NaN where one has no number."""
        return apart(self.scores(request), np.concatenate([logprobs_of(self.model)(ids, 1) for ids in PROMPTS]))

    def loaded(self) -> set[int]:
        async def main() -> set[int]:
            found = self.llm.list_loras()
            return set(await found if asyncio.iscoroutine(found) else found)

        return set(self.run(main()))


def apart(some: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(some - others).max())


async def score(llm: Any, ids: list[int], request: Any, name: str) -> list[float]:
    """The engine's log-probability of each id after the first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    prompt = {"type": "token", "prompt_token_ids": ids}
    outputs: list[Any] = []
    if inspect.iscoroutinefunction(llm.add_lora):
        outputs = [output async for output in llm.generate(prompt, params, name, lora_request=request)]
    else:
        llm.add_request(name, prompt, params, lora_request=request)
        while llm.has_unfinished_requests():
            outputs += llm.step()
    return [float(entry[token].logprob) for token, entry in zip(ids[1:], outputs[-1].prompt_logprobs[1:], strict=True)]


def in_this_process(arguments: dict[str, Any]) -> Iterator[tuple[Any, Callable[[Awaitable[Any]], Any]]]:
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**arguments).create_engine_config()
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
    assert served.gap(request) < TOLERANCE and apart(served.scores(request), served.scores(None)) == 0
    for version in (2, 3):
        served.learn()
        old, request = request, served.load(version)
        assert served.loaded() == {version - 1, version}
        assert served.gap(request) < TOLERANCE and apart(served.scores(request), served.scores(None)) > OTHER
        assert served.gap(old) > OTHER, "the one before serves its own turns"
        served.run(drop_adapter(served.llm, old))
        assert served.loaded() == {version}
        assert [entry.name for entry in served.folder.iterdir()] == [str(version)]
    with served.model.disable_adapter():
        assert served.gap(None) < TOLERANCE, "the base model stays as it was"
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
        assert served.gap(good) < TOLERANCE, "the engine goes on with what it had"
    finally:
        served.run(drop_adapter(served.llm, good))


def test_a_version_that_is_there_is_not_taken_for_the_new_one(served: Served) -> None:
    served.learn()
    good = served.load(6)
    served.learn()
    with pytest.raises(ValueError, match="has an adapter version-6 already"):
        served.load(6)
    served.run(drop_adapter(served.llm, good))
    assert served.gap(served.load(6)) < TOLERANCE


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
