"""A vLLM engine of two data-parallel ranks in processes of their own: where turns go, that new weights reach both, and what happens when one dies.

Needs vLLM (``make test-vllm`` installs its CPU build). The last test ends the engine that serves the module.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm_fakes import Pieces, counted, hear_of_a_death, llama, noisy, prompt, right, together

from arpo_algo.policies.base import SamplingParams
from arpo_algo.policies.vllm import VLLMPolicy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # a start takes a minute on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return llama(folder, tied=True)


@pytest.fixture(scope="module")
def policy(model: Any, folder: Path) -> Iterator[VLLMPolicy]:
    options = {"separate_process": True, "data_parallel_size": 2}
    with VLLMPolicy(folder, tokenizer=Pieces(), eos_ids=(), cache_bytes=1 << 25, max_batch=32, **options) as policy:
        yield policy


def test_the_turns_of_one_tree_share_the_cache_of_one_rank(policy: VLLMPolicy) -> None:
    """Four trees of four branches: each prefix is computed once, though each rank takes two trees."""
    trees = {tree: prompt(256 + 1, 100 + tree) for tree in range(4)}
    requests = [(ids, SamplingParams(max_new_tokens=2, seed=seed, tree=tree)) for seed in range(4) for tree, ids in trees.items()]
    assert counted(policy, lambda: together(policy, requests)) == (4 * (257 + 3), 4 * 3 * 256)
    again = [(ids + prompt(31, tree), SamplingParams(max_new_tokens=2, tree=tree)) for tree, ids in trees.items()]
    assert counted(policy, lambda: [together(policy, [request]) for request in again]) == (4 * 32, 4 * 256)
    other = SamplingParams(max_new_tokens=2, tree=4)  # alone, it goes to the first rank; the prefix of tree 1 is on the second
    assert counted(policy, lambda: together(policy, [(trees[1], other)])) == (257, 0)


def test_new_weights_reach_both_ranks(policy: VLLMPolicy, model: Any) -> None:
    new = noisy(model, seed=1)
    policy.update_weights(new.state_dict().items())
    params = [SamplingParams(max_new_tokens=10, seed=tree, tree=100 + tree) for tree in range(4)]
    for got, given in zip(together(policy, [(prompt(9), one) for one in params]), params, strict=True):
        assert got.version == 1
        right(new, prompt(9), given, got)


def test_everybody_hears_of_the_death_of_a_rank(policy: VLLMPolicy) -> None:
    hear_of_a_death(policy)
