"""Groups sampled by actors that hold environments, against engines in other actors; what dies is replaced and what it left unfinished is sampled again.

One group is sampled whole by one rollout actor, with the seed that its place in the step gives it: the same tree as in one process, whoever samples it and
however often. A group is handed in when it is complete, so that nothing counts twice:

    a rollout actor dies     its unfinished groups are sampled again from their start, by others
    an engine dies           the turns that it was writing are sampled again, by another or by its replacement; the groups go on
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from arpo_algo.cluster.engines import RayEngine, actor_of, raise_cause, started
from arpo_algo.codec import Codec
from arpo_algo.config import ARPOConfig
from arpo_algo.env_source import EnvSource, tool_counts
from arpo_algo.env_worker import EnvWorker
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.pool import EngineLost, PolicyPool
from arpo_algo.rollout import GroupSampler, PromptTooLong, derive_seed, first_error, without_skipped
from arpo_algo.sampler import run_async
from arpo_algo.tree import RolloutTree

log = logging.getLogger(__name__)

MakeEnv = Callable[[], EnvSource]
"""Makes the environment of a rollout actor in its process; must pickle."""


class RolloutActorLost(RuntimeError):
    """More rollout actors died than may be replaced."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the groups of one call of :meth:`ClusterSampler.sample` share."""

    codec: Codec
    config: ARPOConfig
    engines: list[RayEngine]
    version: int
    """Of the weights that the engines have at its start."""
    seed: int


class RolloutActor:
    """The actor: an environment, and the groups that are sampled in it. ``patience``: seconds to wait for an engine when all are lost."""

    def __init__(self, make_env: MakeEnv, patience: float) -> None:
        self.make_env, self.patience = make_env, patience
        self.groups: set[asyncio.Task[Any]] = set()
        self._told: dict[str, float] = {}
        self._error: Exception | None = None
        try:
            self.env = make_env()
        except Exception as error:  # raised by the first call, see EngineActor
            self._error = error

    async def ready(self) -> None:
        """Returns when the actor is there. Raises what ``make_env`` raised."""
        if self._error is not None:
            raise self._error

    async def open(self, step: Step) -> None:
        """Begins a step; groups of an earlier one, whose trainer is gone, are given up."""
        await self.give_up()
        self.step, self.env_lock = step, asyncio.Lock()
        self.engines = Engines(step.engines, step.version, self.patience)
        rollout = step.config.rollout
        self.worker = EnvWorker(rollout.env_workers, rollout.step_timeout)

    async def give_up(self) -> None:
        """Ends the groups under way: whoever asked for them is gone."""
        groups = list(self.groups)
        for group in groups:
            group.cancel()
        if groups:
            await asyncio.wait(groups)
            self.env, self._told = self.make_env(), {}  # a thread of theirs may still be at work in the old one

    async def counts(self) -> dict[str, float]:
        """What the environment's tools counted since the last call, see ``telemetry`` of :class:`arpo_env.ToolEnv`; empty where it does not count."""
        now = tool_counts(self.env)
        told, self._told = self._told, now
        return {name: n - told.get(name, 0.0) for name, n in now.items()}

    async def put_engine(self, index: int, engine: RayEngine) -> None:
        """Puts a new engine in the place of a lost one."""
        self.engines.put(index, engine)

    async def sample(self, group: int, options: Mapping[str, Any] | None, engine: int) -> RolloutTree | PromptTooLong:
        """The tree of a group, its turns at the engine of that index; ``PromptTooLong``, as a value, for a task without room for a turn."""
        step, config, seed = self.step, self.step.config, derive_seed(self.step.seed, group)
        self.engines.pool.assign(seed, engine)  # the rollout numbers its tree by its seed
        sampler = GroupSampler(self.env, self.engines, step.codec, config.branching, config.rollout, self.worker, seed, group)
        task = asyncio.ensure_future(sampler.run(options, self.env_lock))
        self.groups.add(task)
        try:
            return await task
        except PromptTooLong as error:
            return error
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.groups.discard(task)


class Engines:
    """A policy for the groups of one actor: a pool that, with all engines lost, waits for one to be put in place."""

    def __init__(self, engines: Sequence[RayEngine], version: int, patience: float) -> None:
        self.pool, self.version, self.patience = PolicyPool(engines), version, patience
        self.context_length, self.vocab_size = self.pool.context_length, self.pool.vocab_size
        self._changed = asyncio.Event()
        for index, engine in enumerate(engines):
            self.pool.put(index, engine)  # turns come with the version of the run

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        while True:
            changed = self._changed
            try:
                return await self.pool.generate(prompt_ids, params)
            except EngineLost as error:
                try:
                    await asyncio.wait_for(changed.wait(), self.patience)
                except TimeoutError:
                    raise error from None

    def put(self, index: int, engine: RayEngine) -> None:
        self.pool.put(index, engine)
        self._changed.set()
        self._changed = asyncio.Event()


def start_rollout_actors(make_env: MakeEnv, n: int, request: dict[str, float], *, patience: float) -> list[Any]:
    """``n`` rollout actors that take the resources of ``request`` each. Raises ``TimeoutError`` when they are not there in time, and what ``make_env``
    raised."""
    actors = [actor_of(RolloutActor, request).options(max_concurrency=10_000).remote(make_env, patience) for _ in range(n)]
    try:
        started([actor.ready.remote() for actor in actors], f"rollout actors with {request} each", patience)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return actors


@dataclass(eq=False)
class _Place:
    """Where a rollout actor stands."""

    actor: Any
    groups: int = 0
    """Under way there."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is replaced."""


class ClusterSampler:
    """A :class:`~arpo_algo.sampler.Sampler` over rollout actors and a pool of :class:`~arpo_algo.cluster.engines.RayEngine` that keeps weights by
    :func:`~arpo_algo.cluster.engines.store_weights`, with their version.

    ``start``: makes a rollout actor, for one that died; after ``max_replacements`` of them :class:`RolloutActorLost` is raised. The pool has its own limit.
    ``config.rollout.max_live`` counts trajectories over all actors, ``env_workers`` threads in each.
    """

    def __init__(self, pool: PolicyPool, actors: Sequence[Any], *, start: Callable[[], Any], max_replacements: int = 3) -> None:
        self.pool, self.start, self.max_replacements = pool, start, max_replacements
        self.actors = list(actors)
        self.replacements = 0
        """Rollout actors replaced so far."""
        self.resampled = 0
        """Groups begun again so far."""
        self.telemetry: defaultdict[str, float] = defaultdict(float)
        """What the environments' tools counted in the steps so far: calls, seconds, retries, failures; of an actor that died, up to its last whole step."""
        self._engines = [policy for policy in pool.policies if isinstance(policy, RayEngine)]
        if len(self._engines) != len(pool.policies):
            raise ValueError(f"expected a pool of RayEngine, got {pool.policies}")

    def sample(self, codec: Codec, config: ARPOConfig, options: Sequence[Mapping[str, Any] | None], *, seed: int) -> list[RolloutTree]:
        """See :class:`~arpo_algo.sampler.Sampler`. Raises what the environment's or the policy's code raised, :class:`RolloutActorLost` and
        :class:`~arpo_algo.policies.pool.EngineLost` where too many died."""
        return without_skipped(run_async(self._sample(codec, config, options, seed)))

    def close(self) -> None:
        """Ends the rollout actors."""
        for actor in self.actors:
            ray.kill(actor)

    async def _sample(self, codec: Codec, config: ARPOConfig, options: Sequence[Mapping[str, Any] | None], seed: int) -> list[RolloutTree | PromptTooLong]:
        run = _Run(self, Step(codec=codec, config=config, engines=self._present_engines(), version=self.pool.version, seed=seed))
        try:
            return await run.sample(options, config.rollout.live_groups)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.actors = [place.actor for place in run.places]

    def _present_engines(self) -> list[RayEngine]:
        """The engines; in a place where one is lost, that one, which costs one turn to find out."""
        for index, policy in enumerate(self.pool.policies):
            if isinstance(policy, RayEngine):
                self._engines[index] = policy
        return list(self._engines)


class _Run:
    """One call of :meth:`ClusterSampler.sample`."""

    def __init__(self, sampler: ClusterSampler, step: Step) -> None:
        self.sampler, self.pool, self.step = sampler, sampler.pool, step
        self.stored = ray.put(step)  # once for all actors
        self.engines = list(step.engines)
        """The engines as they are now."""
        self.places = [_Place(actor) for actor in sampler.actors]
        self.groups_at: Counter[int] = Counter()
        """Groups under way by engine."""

    async def sample(self, options: Sequence[Mapping[str, Any] | None], live: int) -> list[RolloutTree | PromptTooLong]:
        """The outcome of each group, in order; at most ``live`` groups at once."""
        limit = asyncio.Semaphore(live)
        async with asyncio.TaskGroup() as tasks:
            await asyncio.gather(*(self._open(place) for place in self.places))
            watchers = [tasks.create_task(self._watch(index)) for index in range(len(self.engines))]
            groups = [tasks.create_task(self._group(number, task, limit)) for number, task in enumerate(options)]
            outcomes = await asyncio.gather(*groups)
            for watcher in watchers:
                watcher.cancel()
            for place in self.places:
                with suppress(_Died):  # the next step finds out
                    for name, n in (await _call(place.actor.counts.remote())).items():
                        self.sampler.telemetry[name] += n
        return outcomes

    async def _group(self, number: int, options: Mapping[str, Any] | None, limit: asyncio.Semaphore) -> RolloutTree | PromptTooLong:
        async with limit:
            without_engine = 0
            while True:
                place, engine = min(self.places, key=lambda place: place.groups), self._engine()
                actor = place.actor
                place.groups += 1
                self.groups_at[engine] += 1
                try:
                    outcome: RolloutTree | PromptTooLong = await _call(actor.sample.remote(number, options, engine))
                    return outcome
                except _Died as death:
                    await self._replace(place, actor, death.reason)
                except EngineLost as error:  # all engines, for longer than an actor has patience, or out of the actor's reach
                    without_engine += 1
                    if without_engine > self.sampler.max_replacements:
                        raise
                    log.warning("group %d has no engine: %s", number, error)
                    await self.pool.replaced()
                    with suppress(_Died):
                        await self._equip(actor, [None] * len(self.engines))
                finally:
                    place.groups -= 1
                    self.groups_at[engine] -= 1
                self.sampler.resampled += 1

    def _engine(self) -> int:
        """The engine with the fewest groups, of those that live where any do."""
        alive = [index for index, policy in enumerate(self.pool.policies) if policy is not None]
        return min(alive or range(len(self.engines)), key=lambda index: self.groups_at[index])

    async def _watch(self, index: int) -> None:
        """Has the engine of a place replaced when it is lost, whoever uses it, and tells the rollout actors."""
        engine: Any = self.engines[index]
        while True:
            self.pool.lose(index, engine, await engine.loss())
            await self.pool.replaced()
            engine = self.pool.policies[index]
            if engine is None:
                return  # the pool goes on with those that are left
            self.engines[index] = engine
            for place in self.places:
                with suppress(_Died):  # whoever uses it finds out
                    await _call(place.actor.put_engine.remote(index, engine))

    async def _open(self, place: _Place) -> None:
        """Tells a rollout actor of the step; one that is dead is replaced."""
        actor = place.actor
        try:
            await _call(actor.open.remote(self.stored))
        except _Died as death:
            await self._replace(place, actor, death.reason)

    async def _equip(self, actor: Any, known: Sequence[RayEngine | None]) -> None:
        """Gives a rollout actor the present engines where those that it knows are others."""
        known = list(known)
        while known != self.engines:
            for index, engine in enumerate(self.engines):
                if known[index] is not engine:
                    known[index] = engine
                    await _call(actor.put_engine.remote(index, engine))

    async def _replace(self, place: _Place, actor: Any, reason: str) -> None:
        """Puts another in the place of a dead actor, once, however many groups find it dead."""
        async with place.lock:
            if place.actor is not actor:
                return
            sampler = self.sampler
            while True:
                if sampler.replacements >= sampler.max_replacements:
                    raise RolloutActorLost(f"a rollout actor died after max_replacements={sampler.max_replacements} were replaced: {reason}")
                sampler.replacements += 1
                log.warning("a rollout actor is replaced (%d of at most %d): %s", sampler.replacements, sampler.max_replacements, reason)
                try:
                    new = await asyncio.to_thread(sampler.start)
                    await _call(new.open.remote(self.stored))
                    await self._equip(new, self.step.engines)
                except (_Died, EngineLost) as death:  # the new one, as it started or right after
                    reason = str(death)
                    continue
                place.actor = new
                return


async def _call(reference: Any) -> Any:
    """The result of a rollout actor's method. ``_Died`` where the actor is gone; what the method raised otherwise, ``EngineLost`` among it."""
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayTaskError as error:  # before the next: it also is of the type that it carries
        raise_cause(error)
    except RayActorError as error:
        raise _Died(str(error)) from error


class _Died(Exception):
    """A rollout actor is gone."""

    @property
    def reason(self) -> str:
        return str(self)
