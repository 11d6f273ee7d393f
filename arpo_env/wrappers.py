"""Wrappers that fork. Gymnasium's own (``TimeLimit``, ``RecordEpisodeStatistics``, ...) need nothing from here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import data_equivalence

from arpo_env.forking import ForkError
from arpo_env.tools.base import ForkSupport

ObsT = TypeVar("ObsT")
ActT = TypeVar("ActT")


class ReplayFork(gymnasium.Wrapper[ObsT, ActT, ObsT, ActT], Generic[ObsT, ActT]):
    """Makes any deterministic environment forkable: a fork is a fresh environment into which the episode's actions are replayed.

    Every observation, reward and flag of the replay is compared with the recorded one; a difference is a :class:`ForkError` that names the step.
    A fork costs a reset and all steps so far. ``make`` builds a fresh environment equal to ``env``; by default ``gymnasium.make(env.spec)``.

    ``reset`` without a seed draws one (from the wrapper's own generator), because an episode that began from an unknown state cannot be replayed.
    """

    fork_support: ForkSupport = "replay"

    def __init__(self, env: gymnasium.Env[ObsT, ActT], make: Callable[[], gymnasium.Env[ObsT, ActT]] | None = None):
        super().__init__(env)
        if make is None:
            if env.spec is None:
                raise ValueError(f"{env} has no spec to make another one from; pass make=, a function that builds a fresh one")
            spec = env.spec
            make = lambda: gymnasium.make(spec)  # noqa: E731
        self._make: Callable[[], gymnasium.Env[ObsT, ActT]] = make
        self._seeds = np.random.default_rng()
        self._start: dict[str, Any] | None = None
        self._actions: list[ActT] = []
        self._record: list[tuple[Any, ...]] = []
        self._closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[ObsT, dict[str, Any]]:
        if self._closed:
            raise ClosedEnvironmentError(f"{self}.reset() after close(): make a new environment")
        if seed is None:
            seed = int(self._seeds.integers(2**31))
        else:
            self._seeds = np.random.default_rng(seed)
        self._start = {"seed": seed, "options": copy.deepcopy(options)}
        observation, info = self.env.reset(seed=seed, options=options)
        self._actions, self._record = [], [(copy.deepcopy(observation),)]
        return observation, info

    def step(self, action: ActT) -> tuple[ObsT, Any, bool, bool, dict[str, Any]]:
        taken = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._actions.append(taken)
        self._record.append((copy.deepcopy(observation), reward, terminated, truncated))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        self._closed = True
        super().close()

    def fork(self) -> ReplayFork[ObsT, ActT]:
        """A fresh environment brought to the present state by replay."""
        if self._closed:
            raise ForkError(f"cannot fork the closed {self}")
        if self._start is None:
            raise ForkError(f"cannot fork {self} before reset()")
        twin = ReplayFork(self._make(), self._make)
        twin._cached_spec = self._cached_spec
        try:
            twin.reset(**copy.deepcopy(self._start))
            self._compare(twin)
            for action in self._actions:
                twin.step(copy.deepcopy(action))
                self._compare(twin)
        except BaseException:
            twin.close()
            raise
        twin._seeds = copy.deepcopy(self._seeds)
        return twin

    def _compare(self, twin: ReplayFork[ObsT, ActT]) -> None:
        step = len(twin._record) - 1
        recorded, replayed = self._record[step], twin._record[step]
        if not data_equivalence(recorded, replayed):
            where = f"step {step}" if step else "reset"
            raise ForkError(f"replay differs at {where}: recorded {_short(recorded)}, replayed {_short(replayed)}; the environment is not deterministic")

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayFork[ObsT, ActT]:
        twin = self.fork()
        memo[id(self)] = twin
        return twin


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
