"""Two ranks of a sharded learner and a vLLM engine under Ray, the engine killed in the middle of a step: the run goes on and its numbers stay right."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if (missing := [name for name in ("vllm", "ray") if importlib.util.find_spec(name) is None]) and not os.environ.get("ARPO_REQUIRE_VLLM"):
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)  # where it is set, a missing package is a failure

import gymnasium
import ray
from ray import cloudpickle
from tiny_policy import build_model, build_tokenizer

from arpo_algo import ARPOConfig, ARPOTrainer, RolloutConfig, UniformBranching
from arpo_algo.cluster.launch import ray_train
from arpo_algo.cluster.settings import RaySettings
from arpo_algo.policies.base import Generation, SamplingParams, ServedPolicy
from arpo_algo.policies.vllm import VLLMPolicy
from arpo_algo.sampler import Sampler
from arpo_algo.tracking import read_jsonl
from arpo_env import Episode, Task
from arpo_env.envs.world import WorldConfig, world_vocabulary

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # two starts of an engine and one of Ray Train: two minutes on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and Ray, of each other and of themselves
]

CONFIG = ARPOConfig(
    steps=3,
    tasks_per_step=6,
    lr=1e-2,
    save_every=1,
    branching=UniformBranching(),
    rollout=RolloutConfig(group_size=6, initial=3, window=2, max_turn_tokens=12, max_context=96, reserve_tokens=4),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
    ray.init(num_cpus=8, num_gpus=0, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


class Mortal:
    """A vLLM engine whose process dies at its first turn after an observation by the weights of ``version``, once."""

    def __init__(self, model: Path, died: Path, version: int) -> None:
        self.policy = VLLMPolicy(model, cache_bytes=1 << 26, max_batch=16)
        self.died, self.dies_at = died, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        generation = await self.policy.generate(prompt_ids, params)
        if self.policy.version == self.dies_at and not self.died.exists():
            self.died.touch()
            os._exit(1)
        return generation


def make_engine(model: Path, died: Path) -> ServedPolicy:
    engine: Any = Mortal(model, died, 2)
    return engine


def reward(task: Task, episode: Episode) -> float:
    """Something that varies under a random policy."""
    return float(sum(map(len, episode.turns)) % 7)


def world() -> gymnasium.Env[str, str]:
    return gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=reward, max_turns=2)


def make_trainer(model: Path, run_dir: Path, policy: ServedPolicy | None, sampler: Sampler | None) -> ARPOTrainer:
    return ARPOTrainer(str(model), world(), CONFIG, policy=policy, sampler=sampler, run_dir=run_dir)


def test_an_engine_killed_in_the_middle_of_a_run_is_replaced_with_the_present_weights(cluster: None, tmp_path: Path) -> None:
    model, died, run_dir = tmp_path / "model", tmp_path / "died", tmp_path / "run"
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    build_model(tokenizer, hidden=64, layers=2, heads=2, context=128).save_pretrained(model)  # heads of 32, which vLLM has on the CPU
    tokenizer.save_pretrained(model)
    result = ray_train(partial(make_trainer, model, run_dir), RaySettings(learners=2), make_env=world, make_engine=partial(make_engine, model, died))
    assert died.exists() and result.step == 3 and not result.interrupted
    lines = read_jsonl(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3], "no step counts twice"
    for line in lines:
        assert line["mismatch/max_abs"] < 1e-4, "the replacement samples by other weights than the learner's"
        assert line["groups/skipped"] == 0 and line["staleness/max"] == 0
    assert lines[0]["grad_norm"] > 0, "the engine died with the weights that it started with"
    assert sum(line["branch/branched"] for line in lines) > 0
