"""VLLMPolicy on a vLLM engine in processes of its own: the same turns, and what is different about it. One engine serves the module.

Needs vLLM (``make test-vllm`` installs its CPU build).
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from vllm_fakes import BLOCK, ENDLESS, LONG, Pieces, alone, close, counted, hear_of_a_death, llama, noisy, prompt, right, right_by_version, together

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.policies.vllm import VLLMPolicy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # a start takes 30 s on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[int, Any]:
    """The model of each version, as the tests update it. Tied: vLLM's CPU build leaves such a head as it was."""
    return {0: llama(folder, tied=True)}


@pytest.fixture(scope="module")
def policy(models: dict[int, Any], folder: Path) -> Iterator[VLLMPolicy]:
    before = dict(os.environ), torch.get_rng_state(), torch.get_num_threads()
    options = {"separate_process": True, "sleeps": True}
    with VLLMPolicy(folder, tokenizer=Pieces(), eos_ids=(), cache_bytes=1 << 26, max_batch=32, **options) as policy:
        assert dict(os.environ) == before[0], "the start of the engine changed this process's environment"
        assert torch.equal(torch.get_rng_state(), before[1]), "the start of the engine moved the global random state"
        assert torch.get_num_threads() == before[2]
        yield policy


def current(policy: VLLMPolicy, models: dict[int, Any]) -> Any:
    return models[policy.version]


# --- the same turns -------------------------------------------------------------------------------------------------------------------------------------


def test_turns_are_those_of_the_transformers_policy(policy: VLLMPolicy, models: dict[int, Any]) -> None:
    reference = TransformersPolicy(current(policy, models), Pieces(), eos_ids=())
    assert (policy.vocab_size, policy.context_length, policy.eos_ids) == (reference.vocab_size, reference.context_length, reference.eos_ids)
    stops = [(), ("a",), ("bb", "zz"), ("cd", "e"), (), ("ff",), ("g",), ("hh", "i")]
    lengths = (1, 2, 31, 32, 33, 64, 100, 200)
    requests = [(prompt(n, n), SamplingParams(max_new_tokens=40, temperature=0.0, stop=stop)) for n, stop in zip(lengths, stops, strict=True)]
    got = together(policy, requests)
    for one, other in zip(got, together(reference, requests), strict=True):
        close(one, other)
    assert {one.stop_reason for one in got} >= {"stop", "length"}


def test_numbers_are_those_of_the_distribution_sampled_from(policy: VLLMPolicy, models: dict[int, Any]) -> None:
    kinds = [(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (1.3, 0.8), (1.0, 0.5)]
    requests = [(prompt(5 + 9 * i, i), SamplingParams(max_new_tokens=8 + i % 5, temperature=kinds[i % 5][0], top_p=kinds[i % 5][1], seed=i)) for i in range(40)]
    got = together(policy, requests)
    for one, (ids, params) in zip(got, requests, strict=True):
        right(current(policy, models), ids, params, one)
    assert [one.token_ids for one in together(policy, requests[::-1])[::-1]] == [one.token_ids for one in got]


def test_a_branch_computes_only_what_it_does_not_share(policy: VLLMPolicy) -> None:
    ids = prompt(1024 + 1, 2000)
    siblings = [(ids, SamplingParams(max_new_tokens=1, seed=seed)) for seed in range(8)]
    assert counted(policy, lambda: together(policy, siblings)) == (1025 + 7, 7 * 1024)
    longer = ids + prompt(40, 2001)
    known = len(ids) // BLOCK * BLOCK
    assert counted(policy, lambda: alone(policy, longer, max_new_tokens=1)) == (len(longer) - known, known)


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [([], {}, "at least 1 token"), ([0] * 2040, {"max_new_tokens": 9}, "exceed the context"), ([0, 61], {}, r"expected ids in \[0, 61\), got 0 to 61")],
)
def test_bad_requests_are_refused(policy: VLLMPolicy, ids: list[int], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone(policy, ids, **{"max_new_tokens": 1, **kwargs})


# --- requests come and go -------------------------------------------------------------------------------------------------------------------------------


def wait_until_idle(policy: VLLMPolicy) -> None:
    """A request that is cancelled leaves the engine a moment later."""
    while unfinished(policy):
        pass


def unfinished(policy: VLLMPolicy) -> int:
    async def count(llm: Any) -> int:
        return llm.get_num_unfinished_requests() + len(policy._engine._turns)

    return policy._engine.call(count).result()


def test_requests_join_a_running_batch_and_leave_it_when_cancelled(policy: VLLMPolicy) -> None:
    async def main() -> None:
        long = asyncio.create_task(policy.generate(prompt(3), SamplingParams(max_new_tokens=ENDLESS)))
        for _ in range(3):  # each waits for its own tokens alone
            await policy.generate(prompt(5), SamplingParams(max_new_tokens=2))
        assert not long.done() and unfinished(policy) > 0
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long

    asyncio.run(main())
    wait_until_idle(policy)


def test_event_loops_come_and_go(policy: VLLMPolicy) -> None:
    async def abandoned() -> None:
        task = asyncio.create_task(policy.generate(prompt(3), SamplingParams(max_new_tokens=ENDLESS)))
        await policy.generate(prompt(5), SamplingParams(max_new_tokens=2))
        assert not task.done()  # and the loop closes under it

    asyncio.run(abandoned())
    assert alone(policy, prompt(5), max_new_tokens=2, temperature=0.0).token_ids
    wait_until_idle(policy)


def test_a_process_group_can_be_open_beside_it(policy: VLLMPolicy, tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        total = torch.ones(3)
        torch.distributed.all_reduce(total)
        assert total.tolist() == [1, 1, 1] and alone(policy, prompt(5), max_new_tokens=2).token_ids
    finally:
        torch.distributed.destroy_process_group()


def test_ctrl_c_in_the_terminal_is_left_to_this_process(policy: VLLMPolicy) -> None:
    engine: Any = policy._engine
    for process in engine._llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGINT)
    assert alone(policy, prompt(5), max_new_tokens=20).token_ids


# --- weights --------------------------------------------------------------------------------------------------------------------------------------------


def test_an_update_under_requests_is_refused(policy: VLLMPolicy, models: dict[int, Any]) -> None:
    async def main() -> None:
        task = asyncio.create_task(policy.generate(prompt(3), SamplingParams(max_new_tokens=ENDLESS)))
        await policy.generate(prompt(5), SamplingParams(max_new_tokens=2))
        with pytest.raises(RuntimeError, match="while 1 requests were under way"):
            policy.update_weights(current(policy, models).state_dict().items())
        task.cancel()

    version = policy.version
    asyncio.run(main())
    wait_until_idle(policy)
    assert policy.version == version


@pytest.mark.parametrize("way", ["folder", "tensors"])
def test_new_weights_are_the_ones_served(policy: VLLMPolicy, models: dict[int, Any], tmp_path: Path, way: str) -> None:
    ids, params = prompt(70), SamplingParams(max_new_tokens=20, temperature=0.0)
    version = policy.version + 1
    models[version] = model = noisy(current(policy, models), seed=version)
    stale = alone(policy, ids, max_new_tokens=20, temperature=0.0)
    with pytest.raises(AssertionError):
        right(model, ids, params, stale)
    if way == "folder":
        model.save_pretrained(tmp_path)
        policy.update_weights(tmp_path)
    else:
        policy.update_weights(model.state_dict().items())
    fresh: list[Generation] = []
    assert counted(policy, lambda: fresh.extend(together(policy, [(ids, params)]))) == (70, 0), "keys and values of the old weights are in use"
    right(model, ids, params, fresh[0])
    assert (stale.version, fresh[0].version, fresh[0].versions, policy.version) == (version - 1, version, [], version)


def test_turns_under_way_go_on_with_new_weights(policy: VLLMPolicy, models: dict[int, Any]) -> None:
    old, new = policy.version, policy.version + 1
    models[new] = noisy(current(policy, models), seed=new)
    requests = [(prompt(3, seed), SamplingParams(max_new_tokens=LONG, seed=seed)) for seed in range(3)]

    async def main() -> list[Generation]:
        turns = [asyncio.create_task(policy.generate(*request)) for request in requests]
        await policy.generate(prompt(5), SamplingParams(max_new_tokens=20))
        assert not any(turn.done() for turn in turns)
        await asyncio.to_thread(policy.update_weights, models[new].state_dict().items(), keep_requests=True)
        return await asyncio.gather(*turns)

    for (ids, params), got in zip(requests, asyncio.run(main()), strict=True):
        assert set(got.versions) == {old, new} and got.versions == sorted(got.versions) and got.version == old
        right_by_version(models, ids, params, got)
    assert policy.version == new and unfinished(policy) == 0


def test_an_update_that_finds_nothing_changes_nothing(policy: VLLMPolicy, models: dict[int, Any]) -> None:
    version = policy.version
    with pytest.raises(ValueError, match="expected the folder of a checkpoint, got 'nowhere'"):
        policy.update_weights("nowhere")
    with pytest.raises(ValueError, match="got none"):
        policy.update_weights([])
    right(current(policy, models), prompt(5), SamplingParams(max_new_tokens=3), alone(policy, prompt(5), max_new_tokens=3))
    assert policy.version == version


def test_it_sleeps_until_new_weights_come(policy: VLLMPolicy, models: dict[int, Any]) -> None:
    policy.sleep()
    policy.sleep()
    with pytest.raises(RuntimeError, match=r"sleeps: call wake\(\)"):
        alone(policy, prompt(5), max_new_tokens=2)
    policy.wake()
    assert alone(policy, prompt(5), max_new_tokens=2).token_ids
    policy.sleep()
    models[policy.version + 1] = copy.deepcopy(current(policy, models))
    policy.update_weights(current(policy, models).state_dict().items())
    assert alone(policy, prompt(5), max_new_tokens=2).version == policy.version


def test_everybody_hears_of_the_death_of_the_process(policy: VLLMPolicy) -> None:
    """The last: it ends the engine of the module."""
    hear_of_a_death(policy)
