"""Training over a Ray cluster equals training in one process, with one rank of the learner and with two, one of which dies."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

import gymnasium
import ray
from ray import cloudpickle
from tiny_policy import build_model, build_tokenizer

from arpo_algo import ARPOConfig, ARPOTrainer, RolloutConfig, TrainResult, UniformBranching
from arpo_algo.cluster.launch import Crew, _learn, _Plan, ray_train
from arpo_algo.cluster.settings import RaySettings
from arpo_algo.policies.base import ServedPolicy
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.sampler import Sampler
from arpo_algo.tracking import read_jsonl
from arpo_env import Episode, Task
from arpo_env.envs.world import WorldConfig, world_vocabulary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Ray Train alone takes half a minute on an idle machine of two cores
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # by Ray, of its own settings
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

CONFIG = ARPOConfig(
    steps=3,
    tasks_per_step=2,
    lr=1e-2,
    save_every=1,
    branching=UniformBranching(),
    rollout=RolloutConfig(group_size=4, initial=2, window=2, max_turn_tokens=6, max_context=64, reserve_tokens=4, env_workers=0),
)
FOLLOWS_TIME = ("seconds/", "memory/")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
    ray.init(num_cpus=8, num_gpus=0, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    build_model(tokenizer, hidden=16, layers=2, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    make_trainer(model, folder, (), None, None).train()
    return folder


def reward(task: Task, episode: Episode) -> float:
    """Something that varies under a random policy."""
    return float(sum(map(len, episode.turns)) % 3)


def world() -> gymnasium.Env[str, str]:
    return gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=reward, max_turns=2)


def make_trainer(model: Path, run_dir: Path, trackers: tuple[Any, ...], policy: ServedPolicy | None, sampler: Sampler | None) -> ARPOTrainer:
    return ARPOTrainer(str(model), world(), CONFIG, policy=policy, sampler=sampler, trackers=trackers, run_dir=run_dir)


def make_engine(model: Path) -> ServedPolicy:
    return TransformersPolicy.from_pretrained(model)


class DiesOnce:
    """A tracker that ends its process in the middle of a step, once."""

    def __init__(self, file: Path, step: int) -> None:
        self.file, self.step = file, step

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step and not self.file.exists():
            self.file.touch()
            os._exit(1)

    def close(self) -> None: ...


def numbers(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(FOLLOWS_TIME)} for line in read_jsonl(run / "metrics.jsonl")]


def agree(run: Path, alone: Path) -> None:
    """Every number of every step, as far as it does not follow the clock."""
    got, want = (
        [{k: v for k, v in line.items() if not k.startswith(FOLLOWS_TIME)} for line in read_jsonl(folder / "metrics.jsonl")] for folder in (run, alone)
    )
    assert [line["step"] for line in got] == [1, 2, 3]
    for mine, theirs in zip(got, want, strict=True):
        shared = mine.keys() & theirs.keys()
        assert {"reward/mean", "grad_norm", "entropy/mean", "branch/points"} <= shared
        given = {k for k in shared if theirs[k] is not None and k not in ("sharing", "padded_share")}  # of micro-batches, which are other ones on two ranks
        assert {k: mine[k] for k in given} == pytest.approx({k: theirs[k] for k in given}, rel=1e-3, abs=1e-5)
        assert mine["mismatch/max_abs"] < 1e-4, "an engine samples by other weights than the learner's"


def train(model: Path, run_dir: Path, settings: RaySettings, *trackers: Any) -> TrainResult:
    return ray_train(partial(make_trainer, model, run_dir, trackers), settings, make_env=world, make_engine=partial(make_engine, model))


def test_a_run_over_a_cluster_equals_one_in_this_process(cluster: None, model: Path, alone: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, RaySettings(engines=2, rollout_actors=2))
    assert (result.step, result.interrupted, result.checkpoint) == (3, False, tmp_path / "checkpoints" / "step-000003")
    agree(tmp_path, alone)


def test_two_ranks_one_of_which_dies_in_the_middle(cluster: None, model: Path, alone: Path, tmp_path: Path) -> None:
    """Rank 0 goes with step 2; both ranks start again from the checkpoint of step 1, whose weights the engines are sent."""
    result = train(model, tmp_path, RaySettings(learners=2), DiesOnce(tmp_path / "died", 2))
    assert (tmp_path / "died").exists() and result.step == 3
    agree(tmp_path, alone)


def refuses(policy: ServedPolicy | None, sampler: Sampler | None) -> ARPOTrainer:
    raise LookupError("no such model")


def test_an_error_of_the_trainer_is_raised_as_it_is_and_not_tried_again(cluster: None, model: Path) -> None:
    with pytest.raises(LookupError, match="no such model"):
        ray_train(refuses, replace(RaySettings(), max_replacements=5), make_env=world, make_engine=partial(make_engine, model))


def nobody(*index: int) -> Any:
    raise AssertionError("nothing to replace")


def test_learners_for_which_there_is_no_room_end_the_run_after_the_time_that_was_set(cluster: None) -> None:
    """``check_resources`` lets them pass where the room that there is goes to others later."""
    settings = RaySettings(learners=2, learner_cpus=100, start_timeout=1)
    crew = Crew(engines=[], rollouts=[], start_engine=nobody, start_rollouts=nobody)
    with pytest.raises(TimeoutError, match=r"2 learner ranks with 100 CPU, 0 GPU each were not there after 1 s \(start_timeout\); the cluster has free: .*CPU"):
        _learn(_Plan(make_trainer=refuses, settings=settings, crew=crew))
