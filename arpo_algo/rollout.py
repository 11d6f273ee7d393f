"""The one sampling loop: from a task to a group of exactly M trajectories, branched where a strategy says so.

Every live trajectory is an asyncio task that alternates between the policy and its environment; nothing waits for a slower neighbour. After each
observation the environment is forked once and the copy kept as a *snapshot*; the trajectory goes on. The first k tokens it then writes (no extra token
is spent) are the window of that branch point. A point is decided when its round is complete (see :mod:`arpo_algo.rounds`); children start from the
snapshot, before those k tokens. What is left of the budget when all have ended is filled by fresh trajectories, started together.

Nothing that decides about the tree depends on the clock: seeds derive from the position in the tree, rounds are complete before they are decided, and
points are ordered by trajectory. The same policy and seed give the same tree whatever the latencies of the tools. (Node ids follow time; the
canonical order of :meth:`RolloutTree.canonical` does not.)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium

from arpo_algo.branching import BranchingStrategy, check_strategy
from arpo_algo.codec import Codec
from arpo_algo.entropy import Window
from arpo_algo.env_source import EnvSource
from arpo_algo.env_worker import Env, EnvWorker, step, timed, truncate
from arpo_algo.fitting import fit_observation
from arpo_algo.group_envs import GroupEnvs
from arpo_algo.policies.base import Generation, Policy, SamplingParams
from arpo_algo.rollout_config import RolloutConfig
from arpo_algo.rounds import Rounds, Snapshot
from arpo_algo.tree import Node, Origin, RolloutTree, Trajectory
from arpo_env.core import ForkError

__all__ = ["EnvSource", "GroupSampler", "PromptTooLong", "RolloutConfig", "derive_seed", "sample_groups"]

log = logging.getLogger(__name__)


class PromptTooLong(ValueError):
    """The prompt of a task leaves no room for a turn."""


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on all ``parts`` and their order."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True, kw_only=True)
class _Live:
    """A trajectory that is being sampled."""

    trajectory: Trajectory
    seed_path: tuple[int, ...]
    """Its place in the tree; every seed of the trajectory derives from it."""
    env: Env | None = None
    """None before it is launched."""
    context: list[int]
    depth: int = 0
    """Observations on its path."""
    reported: int = 0
    """Depth up to which its windows are reported; rounds beyond wait for it."""
    initial_window: Window | None = None
    last_window: Window = field(default_factory=Window)
    snapshot: Snapshot | None = None
    info: Mapping[str, Any]
    reward: float = 0.0
    ended: bool = False


class GroupSampler:
    """Samples one group. Use :func:`sample_groups`."""

    def __init__(
        self, env: EnvSource, policy: Policy, codec: Codec, strategy: BranchingStrategy, config: RolloutConfig, worker: EnvWorker, seed: int, group: int
    ):
        self.env, self.policy, self.codec, self.strategy, self.config, self.worker, self.seed = env, policy, codec, strategy, config, worker, seed
        self.limit = min(policy.context_length, config.max_context or policy.context_length)
        self.tree = RolloutTree(group=group, version=policy.version)
        self.rounds = Rounds(strategy, derive_seed(seed, 2), config.unsettled)
        self.live: list[_Live] = []
        self.roots: list[Env] = []
        self.lost = 0

    @property
    def budget(self) -> int:
        """Trajectories that may still be started."""
        return self.config.group_size - len(self.live)

    async def run(self, options: Mapping[str, Any] | None, env_lock: asyncio.Lock) -> RolloutTree:
        self.envs = GroupEnvs(self.env, options, derive_seed(self.seed, 0) % 2**31, self.worker)
        initial = self.config.group_size if self.strategy.timing == "never" else self.config.initial
        spare = isinstance(self.env, gymnasium.Env) and initial < self.config.group_size  # what fresh trajectories are forked from
        async with env_lock:  # one prototype serves all groups: reset it, fork the roots, let it go
            self.roots = await self.envs.roots(initial + spare)
        try:
            self._open_tree(self.envs.opening)
            async with asyncio.TaskGroup() as self.tasks:
                for live in self._start_roots("initial", initial):
                    live.env = self.roots.pop(0)
                    self.tasks.create_task(self._follow(live))
        finally:
            await self.envs.end()
        self.tree.metadata = {
            "fork_failures": self.rounds.refused + self.lost,
            "isolation": str(self.envs.opening.get("isolation", "")),
            "unsettled": sum(not decision.settled for decision in self.tree.decisions),
        }
        return self.tree

    def _open_tree(self, info: Mapping[str, Any]) -> None:
        prompt = self.codec.prompt(info["messages"])
        if len(prompt) >= self.limit:
            raise PromptTooLong(
                f"the prompt of task {info.get('task_id', '')!r} has {len(prompt)} tokens, the context holds {self.limit}:"
                " raise max_context, shorten the prompt, or filter such tasks"
            )
        self.tree.task_id = str(info.get("task_id", ""))
        self.tree.add(None, "prompt", prompt, text="\n".join(str(m["content"]) for m in info["messages"]))

    # -- starting trajectories -----------------------------------------------------------------------------------------------------------------------

    def _start_roots(self, origin: Origin, n: int) -> list[_Live]:
        """``n`` new trajectories at the question, without environments yet."""
        started = []
        for _ in range(n):
            index = len(self.live)
            trajectory = Trajectory(tree=self.tree, index=index, origin=origin)
            seed_path = (1 if origin == "fresh" else 0, index)
            started.append(self._register(_Live(trajectory=trajectory, seed_path=seed_path, context=self.tree.nodes[0].token_ids, info=self.envs.opening)))
        return started

    def _start_branches(self, snapshot: Snapshot, parent: int, n: int) -> list[_Live]:
        """``n`` new trajectories at a branch point, without environments yet."""
        context = [token for node in self.tree.path(snapshot.node) for token in node.token_ids]
        return [
            self._register(
                _Live(
                    trajectory=Trajectory(
                        tree=self.tree, index=len(self.live), origin="branched", branched_from=snapshot.node, parent=parent, leaf=snapshot.node
                    ),
                    seed_path=(*snapshot.seed_path, snapshot.depth, number + 2),
                    context=context,
                    depth=snapshot.depth,
                    reported=snapshot.depth,
                    initial_window=snapshot.initial_window,
                    info=snapshot.info,
                    reward=snapshot.reward,
                )
            )
            for number in range(n)
        ]

    def _register(self, live: _Live) -> _Live:
        self.live.append(live)
        self.tree.trajectories.append(live.trajectory)
        return live

    async def _launch(self, lives: Sequence[_Live], envs: Sequence[Env], more: Callable[[int], Awaitable[list[Env]]]) -> None:
        """Set trajectories going, the first ones in ``envs``, the others in environments that ``more`` makes; without one they end at once."""
        missing = len(lives) - len(envs)
        try:
            made = await more(missing) if missing else []
        except Exception as error:
            made = []
            self.lost += missing
            warnings.warn(f"{missing} trajectories of task {self.tree.task_id!r} have no environment: {error}", stacklevel=2)
            for live in lives[len(envs) :]:
                self._fail(live, error)
                live.ended = True
        for live, env in zip(lives, [*envs, *made], strict=False):
            live.env = env
            self.tasks.create_task(self._follow(live))
        self._advance()

    # -- one trajectory ------------------------------------------------------------------------------------------------------------------------------

    async def _follow(self, live: _Live) -> None:
        while await self._turn(live):
            pass
        live.ended = True
        self._advance()
        await self.envs.close([live.env])

    async def _turn(self, live: _Live) -> bool:
        """Sample one turn and take the environment's answer. False when the trajectory has ended."""
        generation, node = await self._generate(live)
        self._report_window(live, generation)
        try:
            outcome, seconds = await self.worker(lambda: timed(lambda: step(_env(live), node.text, cut=generation.stop_reason == "length")))
        except Exception as error:
            self._fail(live, error)
            return False
        self.tree.env_seconds += seconds
        observation, reward, terminated, truncated, info = outcome
        live.reward += reward
        node.calls = _calls(info)
        if terminated or truncated:
            self._finish(live, info, "terminated" if terminated else "truncated")
            return False
        room = self.limit - len(live.context) - self.config.reserve_tokens
        fitted = fit_observation(self.codec, observation, info, room, closed=generation.stop_reason == "eos")
        if fitted is None:
            await self._truncate(live, "context_full")
            return False
        await self._observe(live, *fitted, info, seconds)
        return True

    async def _generate(self, live: _Live) -> tuple[Generation, Node]:
        """Sample the next turn and add it to the tree; the trajectory's leaf is then the new node."""
        params = SamplingParams(
            max_new_tokens=min(self.config.max_turn_tokens, self.limit - len(live.context)),
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            stop=tuple(live.info.get("stop_strings", ())),
            seed=derive_seed(self.seed, *live.seed_path, live.depth),
            tree=self.seed,
        )
        start = time.monotonic()
        generation = await self.policy.generate(live.context, params)
        sampled = generation.token_ids
        node = self.tree.add(
            live.trajectory.leaf,
            "policy",
            sampled,
            logprobs=generation.logprobs,
            entropies=generation.entropies,
            bounds=generation.bounds,
            version=generation.version,
            versions=generation.versions,
            text=self.codec.decode(sampled[:-1] if generation.stop_reason == "eos" else sampled),
            stop_reason=generation.stop_reason,
            seconds=time.monotonic() - start,
        )
        live.context = [*live.context, *sampled]  # a new list: the policy may still hold the old one
        live.trajectory.leaf = node.id
        return generation, node

    def _report_window(self, live: _Live, generation: Generation) -> None:
        window = generation.window(self.config.window)
        snapshot, live.snapshot = live.snapshot, None
        if live.initial_window is None:
            live.initial_window = window
        if snapshot is not None:
            live.reported = live.depth
            self.rounds.add(snapshot, snapshot.point(live.trajectory.index, window, self.policy.vocab_size))
            self._advance()
        live.last_window = window

    async def _observe(self, live: _Live, text: str, ids: list[int], info: Mapping[str, Any], seconds: float) -> None:
        """Add the observation to the tree and keep a snapshot of the branch point."""
        # The name of a tool that does not exist is text of the policy; metrics are named after these.
        tools = tuple(str(call["name"]) for call in _calls(info) if call.get("executed", True))
        node = self.tree.add(live.trajectory.leaf, "observation", ids, text=text, tools=tools, seconds=seconds)
        live.context = [*live.context, *ids]
        live.trajectory.leaf = node.id
        live.depth += 1
        live.info = {**live.info, **info}
        assert live.initial_window is not None
        live.snapshot = Snapshot(
            node=node.id,
            depth=live.depth,
            tools=tools,
            before=live.last_window,
            initial_window=live.initial_window,
            seed_path=live.seed_path,
            info=live.info,
            reward=live.reward,
        )
        if self.budget > 0 and self.strategy.timing != "never":
            await self._fork_into(live.snapshot, _env(live))

    async def _fork_into(self, snapshot: Snapshot, env: Env) -> None:
        try:
            (snapshot.env,) = await self.envs.forks(env, 1)
        except (ForkError, TimeoutError) as error:
            snapshot.refused = True
            warnings.warn(f"no branch point after node {snapshot.node}: {type(error).__name__} {error}", stacklevel=2)

    # -- decisions -----------------------------------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Decide every round that is complete; when all have ended, fill the group."""
        while due := self.rounds.due(min((live.reported for live in self.live if not live.ended), default=math.inf)):
            unused = []
            for snapshot, decision in self.rounds.decide(due, self.budget):
                self.tree.decisions.append(decision)
                if decision.children and (env := snapshot.env) is not None:
                    children = self._start_branches(snapshot, decision.trajectory, decision.children)
                    self.tasks.create_task(self._launch(children, [env], partial(self.envs.forks, env)))
                else:
                    unused.append(snapshot.env)
            if any(unused):
                self.tasks.create_task(self.envs.close(unused))
        if self.budget and all(live.ended for live in self.live):
            envs, self.roots = self.roots, []
            more = partial(self.envs.forks, envs[0]) if envs else self.envs.roots
            self.tasks.create_task(self._launch(self._start_roots("fresh", self.budget), envs, more))

    # -- ends ----------------------------------------------------------------------------------------------------------------------------------------

    def _finish(self, live: _Live, info: Mapping[str, Any], otherwise: str) -> None:
        trajectory = live.trajectory
        trajectory.reward = live.reward
        parts = info.get("reward")
        trajectory.reward_parts = {str(k): float(v) for k, v in parts.items()} if isinstance(parts, Mapping) else {}
        trajectory.scored = bool(info.get("scored", True))
        trajectory.stop_reason = str(info.get("stop_reason") or otherwise)
        answer = info.get("answer")
        trajectory.answer = "" if answer is None else str(answer)

    async def _truncate(self, live: _Live, reason: str) -> None:
        try:
            _, reward, _, _, info = await self.worker(lambda: truncate(_env(live), reason))
        except Exception as error:
            self._fail(live, error)
            return
        live.reward += reward
        self._finish(live, {**info, "stop_reason": reason}, reason)

    def _fail(self, live: _Live, error: Exception) -> None:
        """An environment that raises or hangs costs its own trajectory, which is left unscored; the trainer stops when that is not rare."""
        reason = "env_timeout" if isinstance(error, TimeoutError) else "env_error"
        log.warning("task %r, trajectory %d: %s", self.tree.task_id, live.trajectory.index, reason, exc_info=error)
        live.trajectory.scored = False
        live.trajectory.stop_reason = reason
        live.trajectory.answer = f"{type(error).__name__}: {error}"


def _calls(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of a step; a foreign environment may use the key for something else."""
    calls = info.get("tool_calls")
    return [dict(call) for call in calls if isinstance(call, Mapping) and "name" in call] if isinstance(calls, Sequence) else []


def _env(live: _Live) -> Env:
    assert live.env is not None
    return live.env


async def sample_groups(
    env: EnvSource,
    policy: Policy,
    codec: Codec,
    strategy: BranchingStrategy,
    config: RolloutConfig,
    options: Sequence[Mapping[str, Any] | None],
    *,
    seed: int,
) -> list[RolloutTree]:
    """One group for each entry of ``options`` (what ``env.reset`` takes; ``{"task": ...}``), all sampled at once.

    ``env``: one environment, which is reset for each group and forked for each trajectory; or a function that makes environments.
    A task whose prompt leaves no room is skipped with a warning; when none is left, :class:`PromptTooLong` is raised.
    """
    check_strategy(strategy)
    worker = EnvWorker(config.env_workers, config.step_timeout)
    env_lock = asyncio.Lock()
    places = asyncio.Semaphore(config.live_groups)

    async def one(index: int) -> RolloutTree | PromptTooLong:
        sampler = GroupSampler(env, policy, codec, strategy, config, worker, derive_seed(seed, index), index)
        async with places:
            try:
                return await sampler.run(options[index], env_lock)
            except PromptTooLong as error:
                return error

    try:
        async with asyncio.TaskGroup() as tasks:
            groups = [tasks.create_task(one(index)) for index in range(len(options))]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return without_skipped([group.result() for group in groups])


def without_skipped(outcomes: Sequence[RolloutTree | PromptTooLong]) -> list[RolloutTree]:
    """The trees; a warning for each task that was skipped. Raises the first :class:`PromptTooLong` where there is nothing else."""
    skipped = [outcome for outcome in outcomes if isinstance(outcome, PromptTooLong)]
    for error in skipped:
        log.warning("skipped: %s", error)
    trees = [outcome for outcome in outcomes if isinstance(outcome, RolloutTree)]
    if skipped and not trees:
        raise skipped[0]
    return trees


def first_error(error: BaseException) -> BaseException:
    """The first single error in nested groups: what a user wants to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
