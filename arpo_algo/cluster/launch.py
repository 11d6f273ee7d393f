"""A training run on a Ray cluster: engines and rollout actors are started, Ray Train runs the ranks of the learner, and what dies is replaced.

Rank 0 holds the pool of engines and the sampler and does what :class:`~arpo_algo.train.ARPOTrainer` does in one process; the same function makes the trainer.
A learner rank that dies ends all of them; they start again from the last checkpoint in ``run_dir``, whose weights the engines, which live on, are sent first.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from arpo_algo.cluster.engines import MakeEngine, RayEngine, start_engines, store_weights  # raises without Ray
from arpo_algo.cluster.rollouts import ClusterSampler, MakeEnv, start_rollout_actors
from arpo_algo.cluster.settings import RaySettings
from arpo_algo.policies.base import ServedPolicy
from arpo_algo.policies.pool import PolicyPool
from arpo_algo.sampler import Sampler
from arpo_algo.train import ARPOTrainer, TrainResult

import ray  # isort: skip
from ray.exceptions import RayActorError, RayTaskError  # isort: skip

log = logging.getLogger(__name__)

MakeTrainer = Callable[[ServedPolicy | None, Sampler | None], ARPOTrainer]
"""Makes the trainer of a rank; must pickle. ``make_trainer(None, None).train()`` is the same run in one process."""


class NotEnoughResources(ValueError):
    """The cluster does not have what the settings ask for."""


def ray_train(make_trainer: MakeTrainer, settings: RaySettings, *, make_env: MakeEnv, make_engine: MakeEngine) -> TrainResult:
    """Train with engines, environments and learner ranks on a Ray cluster; returns what ``ARPOTrainer.train`` of rank 0 does.

    ``make_env`` and ``make_engine`` are called in the actors; like ``make_trainer`` they must pickle, and paths in them must hold on every machine. On rank 0
    ``make_trainer`` gets the policy and the sampler to pass on, on the others None and None. ``run_dir`` must be a folder that all learner ranks see.

    Raises :class:`NotEnoughResources`, ``TimeoutError`` where an actor does not start in time, what the trainer, environment or engine raised, and
    ``RuntimeError`` where more died than may be replaced. A cluster that is joined is left running.
    """
    with cluster(settings):
        check_resources(settings)
        with actors(settings, make_env, make_engine) as crew:
            return _learn(_Plan(make_trainer=make_trainer, settings=settings, crew=crew))


@contextmanager
def cluster(settings: RaySettings) -> Iterator[None]:
    """A connection to the cluster of the settings, made and ended here unless there is one already."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows every line of the terminal twice
    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {}
    if address == "local":
        store = settings.object_store_mib
        own = {"num_cpus": settings.local_cpus, "object_store_memory": None if store is None else store << 20, "include_dashboard": False}
    ray.init(address=address, logging_level=logging.WARNING, runtime_env={"worker_process_setup_hook": "arpo_algo.cluster.quiet.set_up"}, **own)
    try:
        yield
    finally:
        ray.shutdown()


def check_resources(settings: RaySettings) -> None:
    """Raises :class:`NotEnoughResources` where the cluster could not hold all actors at once, naming what is asked and what is there."""
    requests = [("engines", settings.engines, settings.engine_request), ("rollout actors", settings.rollout_actors, settings.env_request)]
    requests.append(("learner ranks", settings.learners, settings.learner_request))
    total, nodes = ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for what, n, request in requests:
        if not any(all(node.get(name, 0) >= amount for name, amount in request.items()) for node in nodes):
            raise NotEnoughResources(f"no machine has room for one of the {n} {what}: asked {_said(request)}, the machines have {_machines(nodes)}")
    names = dict.fromkeys(name for _, _, request in requests for name in request)
    asked = {name: sum(n * request.get(name, 0) for _, n, request in requests) for name in names}
    if any(total.get(name, 0) < amount for name, amount in asked.items()):
        parts = ", ".join(f"{n} {what} with {_said(request)} each" for what, n, request in requests)
        have = _said({name: total.get(name, 0) for name in asked})
        raise NotEnoughResources(f"the run asks for {_said(asked)} ({parts}), the cluster has {have}")


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The actors of a run besides the learner."""

    engines: list[RayEngine]
    rollouts: list[Any]
    start_engine: Callable[[int], RayEngine]
    start_rollouts: Callable[[], Any]


@contextmanager
def actors(settings: RaySettings, make_env: MakeEnv, make_engine: MakeEngine) -> Iterator[Crew]:
    """Engines and rollout actors, ended when the block is left."""
    new_engines = functools.partial(start_engines, make_engine, request=settings.engine_request, timeout=settings.start_timeout)
    new_rollouts = functools.partial(start_rollout_actors, make_env, request=settings.env_request, patience=settings.start_timeout)
    engines = new_engines(n=settings.engines)
    rollouts: list[Any] = []
    try:
        rollouts = new_rollouts(n=settings.rollout_actors)
        yield Crew(
            engines=engines,
            rollouts=rollouts,
            start_engine=functools.partial(_one_engine, new_engines),
            start_rollouts=functools.partial(_one, new_rollouts),
        )
    finally:
        for actor in rollouts:
            ray.kill(actor)
        for engine in engines:
            engine.close()


def sampling(crew: Crew, settings: RaySettings) -> tuple[PolicyPool, ClusterSampler]:
    """The policy and the sampler of a run, over its actors."""
    keep = functools.partial(store_weights, piece_bytes=settings.chunk_mib << 20)
    pool = PolicyPool(crew.engines, replace=crew.start_engine, max_replacements=settings.max_replacements, keep=keep)
    return pool, ClusterSampler(pool, crew.rollouts, start=crew.start_rollouts, max_replacements=settings.max_replacements)


def give_up(crew: Crew, *, timeout: float) -> None:
    """Ends what the actors still do for a trainer that is gone; engines refuse new weights before. Waits at most ``timeout`` seconds for either kind."""
    groups = [actor.give_up.remote() for actor in crew.rollouts]
    ray.wait(groups, num_returns=len(groups), timeout=timeout)  # nothing is raised for a dead one: who uses it finds out
    turns = [engine.give_up() for engine in crew.engines]  # not before: a group that goes on asks for turns
    ray.wait(turns, num_returns=len(turns), timeout=timeout)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a learner rank needs to know."""

    make_trainer: MakeTrainer
    settings: RaySettings
    crew: Crew


def _learn(plan: _Plan) -> TrainResult:
    """Runs the ranks, again where one died, and returns the result of rank 0."""
    from ray.train import TrainingFailedError

    for attempt in range(plan.settings.max_replacements + 1):
        try:
            return _fit(plan)
        except TrainingFailedError as error:
            failures = [*getattr(error, "worker_failures", {}).values()] or [getattr(error, "controller_failure", error)]
            died = [failure for failure in failures if _died(failure)]
            if type(failures[0]).__name__ == "WorkerGroupStartupTimeoutError":  # of a module of Ray's own
                raise TimeoutError(_unplaced(plan.settings)) from error
            if not died:
                raise failures[0] from error
            if attempt == plan.settings.max_replacements:
                raise RuntimeError(f"a learner rank died after max_replacements={attempt} restarts: {died[0]}") from error
            log.warning("a learner rank died; all ranks start again (%d of at most %d): %s", attempt + 1, plan.settings.max_replacements, died[0])
    raise AssertionError("the loop returns or raises")


def _died(failure: Any) -> bool:
    """Whether Ray lost a rank, where otherwise its code raised. The others then fail as well, at the next thing that they do together."""
    lost = getattr(failure, "health_check_failure", failure)
    if type(lost).__name__ == "WorkerGroupStartupFailedError":  # a rank died before it began
        return True
    return isinstance(lost, RayActorError) and not isinstance(lost, RayTaskError)


def _unplaced(settings: RaySettings) -> str:
    each, free = _said(settings.learner_request), ray.available_resources()
    return f"{settings.learners} learner ranks with {each} each were not there after {settings.start_timeout:g} s (start_timeout); the cluster has free: {free}"


def _fit(plan: _Plan) -> TrainResult:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    settings = plan.settings
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(settings.start_timeout)  # read where the trainer is made
    gpu = settings.learner_gpus > 0
    with tempfile.TemporaryDirectory(prefix="arpo-ray-") as folder:
        trainer = TorchTrainer(
            _rank,
            train_loop_config={"plan": plan},
            torch_config=TorchConfig(backend=None if gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=settings.learners, use_gpu=gpu, resources_per_worker=settings.learner_request),
            run_config=RunConfig(
                name="learner",
                storage_path=str(settings.storage or folder),
                failure_config=FailureConfig(controller_failure_limit=0),  # otherwise ranks without room are tried again for ever
            ),
        )
        result: TrainResult = trainer.fit().return_value
    return result


def _rank(config: dict[str, Any]) -> TrainResult:
    """One rank of the learner."""
    from ray.train import get_context

    plan: _Plan = config["plan"]
    if get_context().get_world_rank() > 0:
        return plan.make_trainer(None, None).train()
    give_up(plan.crew, timeout=plan.settings.start_timeout)
    pool, sampler = sampling(plan.crew, plan.settings)
    return plan.make_trainer(pool, sampler).train()


def _one_engine(start: Callable[..., list[RayEngine]], index: int) -> RayEngine:
    (engine,) = start(n=1)
    return engine


def _one(start: Callable[..., list[Any]]) -> Any:
    (actor,) = start(n=1)
    return actor


def _said(request: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in request.items()) or "nothing"


def _machines(nodes: list[dict[str, float]]) -> str:
    kept = [{name: n for name, n in node.items() if "memory" not in name and not name.startswith("node:")} for node in nodes]
    return "; ".join(_said(node) for node in kept)
