"""Groups sampled over a Ray cluster: the same trees as in one process, whatever dies on the way. One cluster on this machine serves all tests."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

import ray
import torch
from fakes import CharCodec, Talk, Writer, check_tree, echo, wanderer
from ray import cloudpickle

from arpo_algo import ARPOConfig, RolloutConfig, UniformBranching
from arpo_algo.cluster.engines import StoredWeights, start_engines, store_weights
from arpo_algo.cluster.launch import Crew, NotEnoughResources, actors, check_resources, give_up, sampling
from arpo_algo.cluster.rollouts import ClusterSampler, RolloutActor, RolloutActorLost, Step
from arpo_algo.cluster.settings import RaySettings
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.pool import EngineLost, PolicyPool
from arpo_algo.rollout import PromptTooLong
from arpo_algo.sampler import LocalSampler
from arpo_algo.tree import RolloutTree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a process takes seconds to start, many times that on a busy machine

CONFIG = ARPOConfig(branching=UniformBranching(), rollout=RolloutConfig(group_size=4, initial=2, window=2, env_workers=0, max_live=12))
SETTINGS = RaySettings(engines=2, rollout_actors=2, max_replacements=20)
OPTIONS: list[dict[str, Any] | None] = [{"task": f"{n}:"} for n in range(6)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    for name in (__name__, "fakes"):  # the workers cannot import them
        cloudpickle.register_pickle_by_value(sys.modules[name])
    ray.init(num_cpus=8, num_gpus=0, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Trap:
    """A file whose existence ends the first process that steps on it, and that goes with it."""

    file: Path

    def arm(self) -> None:
        self.file.touch()

    def step_on(self) -> None:
        try:
            self.file.unlink()
        except FileNotFoundError:
            return
        os._exit(1)


class Engine(Writer):
    """A scripted engine with weights, which dies of a turn after an observation where the trap is armed, and refuses some prompts."""

    def __init__(self, trap: Trap | None = None) -> None:
        super().__init__(wanderer())
        self.trap, self.weights = trap, dict[str, torch.Tensor]()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        await asyncio.sleep(0)
        if prompt_ids[0] == ord("?"):
            raise ray.exceptions.RayActorError(error_msg="of an engine's own making")
        if self.trap is not None and ord("<") in prompt_ids:
            self.trap.step_on()
        return await super().generate(prompt_ids, params)

    def update_weights(self, weights: Any) -> None:
        self.weights = dict(weights)
        self.version += 1

    def close(self) -> None: ...


class Steps:
    """Counts the steps of an environment and its forks."""

    def __init__(self) -> None:
        self.steps = 0

    def snapshot(self) -> dict[str, float]:
        return {"talk.steps": float(self.steps)}


class Room(Talk):
    """Dies of a second turn where the trap is armed, and cannot open some tasks."""

    shared: ClassVar[frozenset[str]] = Talk.shared | {"telemetry"}

    def __init__(self, trap: Trap | None = None) -> None:
        self.telemetry = telemetry = Steps()

        def before(turns: list[str]) -> None:
            telemetry.steps += 1
            if trap is not None and len(turns) == 2:
                trap.step_on()

        super().__init__(echo, before=before)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if options is not None and options["task"] == "!":
            raise ray.exceptions.RayActorError(error_msg="of an environment's own making")
        return super().reset(seed=seed, options=options)


@dataclass
class Turns:
    """What :class:`Patient` counts."""

    under_way: int = 0


class Patient(Engine):
    """Never answers a prompt that begins with ``~``, and refuses weights while it owes an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = Turns()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.stats.under_way += 1
        try:
            if prompt_ids[0] == ord("~"):
                await asyncio.Event().wait()
            return await super().generate(prompt_ids, params)
        finally:
            self.stats.under_way -= 1

    def update_weights(self, weights: Any) -> None:
        if self.stats.under_way:
            raise RuntimeError(f"the weights changed while {self.stats.under_way} requests were under way")
        super().update_weights(weights)


@dataclass
class Run:
    """What the tests share. ``engine`` and ``room``: traps for an engine and for a rollout actor."""

    pool: PolicyPool
    sampler: ClusterSampler
    crew: Crew
    engine: Trap
    room: Trap

    def sample(self, seed: int = 3, options: Sequence[dict[str, Any] | None] = OPTIONS) -> list[RolloutTree]:
        return self.sampler.sample(CharCodec(), CONFIG, options, seed=seed)


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("traps")
    engine, room = Trap(folder / "engine"), Trap(folder / "room")
    with actors(SETTINGS, partial(Room, room), partial(Engine, engine)) as crew:
        pool, sampler = sampling(crew, SETTINGS)
        yield Run(pool, sampler, crew, engine, room)


@dataclass
class Counted:
    """What was lost and done again in a ``with`` block."""

    run: Run
    engines: int = 0
    rollouts: int = 0
    groups: int = 0

    def __enter__(self) -> Counted:
        self.before = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        self.engines, self.rollouts, self.groups = (now - then for now, then in zip(self._now(), self.before, strict=True))

    def _now(self) -> tuple[int, int, int]:
        return self.run.pool.losses, self.run.sampler.replacements, self.run.sampler.resampled


def local(options: Sequence[dict[str, Any] | None] = OPTIONS, *, seed: int = 3) -> list[RolloutTree]:
    return LocalSampler(env=Room(), policy=Engine()).sample(CharCodec(), CONFIG, options, seed=seed)


def same(trees: Sequence[RolloutTree], wanted: Sequence[RolloutTree], *, version: int) -> None:
    """Equal, sampled by the weights of ``version`` throughout, each group once."""
    assert [tree.group for tree in trees] == [tree.group for tree in wanted]
    for tree, want in zip(trees, wanted, strict=True):
        check_tree(tree, size=4, initial=2)
        want.version = version
        for node in want.nodes:
            node.version = version if node.sampled else 0
        assert tree.canonical().nodes == want.canonical().nodes
        assert tree.canonical() == want.canonical()


def test_trees_are_those_of_one_process_and_long_prompts_are_skipped(run: Run) -> None:
    with Counted(run) as lost:
        for seed in (3, 4):  # the actors serve one step after another
            trees, before = run.sample(seed), run.sampler.telemetry["talk.steps"]
            same(trees, local(seed=seed), version=run.pool.version)
        run.sample(seed)
        assert run.sampler.telemetry["talk.steps"] - before == sum(node.sampled for tree in trees for node in tree.nodes), "a step a turn"
        long = {"task": "x" * 20_000}
        got = run.sample(options=[OPTIONS[0], long, OPTIONS[2]])
        same(got, local([OPTIONS[0], long, OPTIONS[2]]), version=run.pool.version)
        assert [tree.group for tree in got] == [0, 2]
        with pytest.raises(PromptTooLong, match="has 20000 tokens"):
            run.sample(options=[long])
        turn = asyncio.run(run.pool.generate([65], SamplingParams(max_new_tokens=5)))
        assert turn.version == run.pool.version
    assert (lost.engines, lost.rollouts, lost.groups) == (0, 0, 0)


def test_an_engine_that_dies_in_the_middle_changes_no_tree(run: Run) -> None:
    run.pool.update_weights(iter([("a", torch.arange(3.0)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))]))
    run.engine.arm()
    with Counted(run) as lost:
        same(run.sample(), local(), version=run.pool.version)
    assert (lost.engines, lost.rollouts, lost.groups) == (1, 0, 0), "a turn is sampled again, not a group"
    asyncio.run(run.pool.replaced())
    assert None not in run.pool.policies
    same(run.sample(4), local(seed=4), version=run.pool.version)


def test_the_only_engine_is_waited_for(run: Run) -> None:
    asyncio.run(run.pool.replaced())
    one = PolicyPool(run.pool.policies[:1], replace=run.crew.start_engine, keep=store_weights)  # type: ignore[arg-type]
    sampler = ClusterSampler(one, run.sampler.actors, start=run.crew.start_rollouts)
    one.update_weights([("a", torch.zeros(1))])
    run.engine.arm()
    same(sampler.sample(CharCodec(), CONFIG, OPTIONS, seed=3), local(), version=one.version)
    assert (one.losses, one.replacements, sampler.resampled) == (1, 1, 0)


def test_a_rollout_actor_that_dies_in_the_middle_changes_no_tree(run: Run) -> None:
    run.room.arm()
    with Counted(run) as lost:
        same(run.sample(), local(), version=run.pool.version)
    assert lost.rollouts == 1 and 1 <= lost.groups <= len(OPTIONS)
    with Counted(run) as lost:
        same(run.sample(4), local(seed=4), version=run.pool.version)
    assert (lost.rollouts, lost.groups) == (0, 0), "the next step begins with the new actor"


def test_what_died_between_two_steps_is_replaced(run: Run) -> None:
    asyncio.run(run.pool.replaced())
    engines = run.pool.policies
    with Counted(run) as lost:
        assert engines[1] is not None
        engines[1].close()
        ray.kill(run.sampler.actors[0])
        same(run.sample(), local(), version=run.pool.version)
    assert (lost.engines, lost.rollouts) == (1, 1)
    with Counted(run) as lost:
        assert engines[0] is not None
        engines[0].close()
        run.pool.update_weights([("a", torch.zeros(1))])
    assert lost.engines == 1
    asyncio.run(run.pool.replaced())
    assert None not in run.pool.policies
    same(run.sample(), local(), version=run.pool.version)


def test_replacing_has_an_end(run: Run) -> None:
    sampler = ClusterSampler(run.pool, run.sampler.actors, start=run.crew.start_rollouts, max_replacements=0)
    run.room.arm()
    with pytest.raises(RolloutActorLost, match="died after max_replacements=0 were replaced"):
        sampler.sample(CharCodec(), CONFIG, OPTIONS, seed=3)
    pool = PolicyPool([policy for policy in run.pool.policies if policy is not None], replace=run.crew.start_engine, max_replacements=0)
    sampler = ClusterSampler(pool, sampler.actors, start=run.crew.start_rollouts)
    run.engine.arm()
    with pytest.raises(EngineLost, match="is lost after max_replacements=0 were replaced"):
        sampler.sample(CharCodec(), CONFIG, OPTIONS, seed=3)


def test_a_replacement_that_dies_at_once_is_replaced(run: Run) -> None:
    dead, start = run.sampler.actors[0], run.crew.start_rollouts
    ray.kill(dead)
    sampler = ClusterSampler(run.pool, run.sampler.actors, start=lambda: dead, max_replacements=2)
    with pytest.raises(RolloutActorLost, match="died after max_replacements=2 were replaced"):
        sampler.sample(CharCodec(), CONFIG, OPTIONS, seed=3)
    starts = [lambda: dead, start, start]  # the last for what another test killed
    sampler = ClusterSampler(run.pool, run.sampler.actors, start=lambda: starts.pop(0)())
    same(sampler.sample(CharCodec(), CONFIG, OPTIONS, seed=3), local(), version=run.pool.version)
    assert sampler.replacements >= 2
    for actor in sampler.actors:
        if actor not in run.sampler.actors:
            ray.kill(actor)


def test_errors_of_user_code_are_raised_as_they_are_and_nothing_is_replaced(run: Run) -> None:
    same(run.sample(), local(), version=run.pool.version)  # what the test before killed
    with Counted(run) as lost:
        for task, message in (("!", "of an environment's own making"), ("?", "of an engine's own making")):
            with pytest.raises(ray.exceptions.RayActorError, match=message):
                run.sample(options=[OPTIONS[0], {"task": task}])
        same(run.sample(), local(), version=run.pool.version)
    assert (lost.engines, lost.rollouts, lost.groups) == (0, 0, 0)


def test_actors_outlive_a_trainer_that_dies_in_the_middle_and_serve_the_next(cluster: None) -> None:
    settings = RaySettings()
    with actors(settings, Room, Patient) as crew:
        (actor,), (engine,) = crew.rollouts, crew.engines
        step = Step(codec=CharCodec(), config=CONFIG, engines=crew.engines, version=0, seed=0)
        ray.get(actor.open.remote(step))
        lost = [actor.sample.remote(0, {"task": "~"}, 0), engine._actor.generate.remote([ord("~")], SamplingParams(max_new_tokens=1))]
        while engine.stats()["under_way"] < CONFIG.rollout.initial + 1:  # a trainer died here
            pass
        give_up(crew, timeout=60)
        assert len(ray.wait(lost, num_returns=2, timeout=60)[0]) == 2
        pool, sampler = sampling(crew, settings)
        pool.update_weights([("a", torch.zeros(1))])
        same(sampler.sample(CharCodec(), CONFIG, OPTIONS[:2], seed=3), local(OPTIONS[:2]), version=1)
        assert (pool.losses, sampler.replacements, sampler.resampled) == (0, 0, 0), "nobody died of it"


def test_what_a_new_environment_counts_begins_at_zero() -> None:
    async def main() -> None:
        actor = RolloutActor(Room, patience=60)
        step = Step(codec=CharCodec(), config=CONFIG, engines=[Engine()], version=0, seed=0)  # type: ignore[list-item]
        await actor.open(step)
        counters = actor.env.telemetry  # type: ignore[union-attr]
        counters.steps = 100
        assert await actor.counts() == {"talk.steps": 100}
        actor.groups.add(group := asyncio.ensure_future(asyncio.Event().wait()))
        await actor.open(step)  # by the next trainer
        assert group.cancelled() and actor.env.telemetry is not counters  # type: ignore[union-attr]
        actor.env.telemetry.steps = 10  # type: ignore[union-attr]
        assert await actor.counts() == {"talk.steps": 10}

    asyncio.run(main())


def broken() -> Any:
    raise FileNotFoundError("no index here")


@pytest.mark.parametrize(("make_env", "make_engine"), [(broken, Engine), (Room, broken)])
def test_what_cannot_be_made_is_an_error_at_once(cluster: None, make_env: Any, make_engine: Any) -> None:
    with pytest.raises(FileNotFoundError, match="no index here"), actors(RaySettings(), make_env, make_engine):
        pass


def test_resources_that_the_cluster_lacks_are_an_error_at_once(cluster: None) -> None:
    check_resources(SETTINGS)
    with pytest.raises(NotEnoughResources, match=r"no machine has room for one of the 1 engines: asked 1 CPU, 1 GPU, the machines have .*8 CPU"):
        check_resources(RaySettings(engine_gpus=1))
    with pytest.raises(NotEnoughResources, match=r"the run asks for 10 CPU.* \(6 engines with 1 CPU, 0 GPU each, .*, the cluster has 8 CPU"):
        check_resources(RaySettings(engines=6, rollout_actors=3))
    with pytest.raises(NotEnoughResources, match="asked 1 CPU, 0 GPU, 1 tpu"):
        check_resources(RaySettings(engine_resources={"tpu": 1}))
    with pytest.raises(TimeoutError, match=r"1 of 1 engines with .* were not there after 0.5 s \(start_timeout\)"):
        start_engines(Engine, 1, {"CPU": 100}, timeout=0.5)


def test_weights_pass_through_the_store_in_pieces(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(40, 30, generator=generator),
        "sliced": torch.randn(8, 6, generator=generator).T[::2],
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }
    stored = store_weights(iter(tensors.items()), 7, piece_bytes=4000)
    tensors["matrix"] += 0  # the store has a copy
    assert (stored.version, len(stored.pieces)) == (7, 2)
    monkeypatch.setattr(ray, "get", None)  # warns in an asynchronous actor such as an engine's
    read = list(stored)
    assert [name for name, _ in read] == list(tensors), "order and names are kept"
    for name, tensor in read:
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
        tensor.fill_(1)  # a copy of one's own
    assert torch.equal(next(iter(stored))[1], tensors["matrix"])
    assert store_weights("folder", 2) == StoredWeights(version=2, folder="folder")


def test_a_sampler_needs_engines_of_the_cluster() -> None:
    with pytest.raises(ValueError, match="expected a pool of RayEngine"):
        ClusterSampler(PolicyPool([Engine()]), [], start=lambda: None)
