"""Wrappers that fork. Gymnasium's own (``TimeLimit``, ``RecordEpisodeStatistics``, ...) need nothing from here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import data_equivalence

from arpo_env.forking import ForkError, layers
from arpo_env.tools.base import ForkSupport

ObsT = TypeVar("ObsT")
ActT = TypeVar("ActT")


class ReplayFork(gymnasium.Wrapper[ObsT, ActT, ObsT, ActT], Generic[ObsT, ActT]):
    """Makes any deterministic environment forkable: a fork is a fresh environment into which the episode's actions are replayed.

    Every observation, reward, flag and info of the replay is compared with the recorded one (see :func:`without_clock`); a difference is a
    :class:`ForkError` that names the step. A fork costs a reset and all steps so far. ``make`` builds a fresh environment equal to ``env``; by default
    ``gymnasium.make(env.spec)``. The fork of a subclass is of that class: what it added is copied, not replayed.

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
        self._actions, self._record = [], [copy.deepcopy((observation, without_clock(info)))]
        return observation, info

    def step(self, action: ActT) -> tuple[ObsT, Any, bool, bool, dict[str, Any]]:
        taken = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._actions.append(taken)
        self._record.append(copy.deepcopy((observation, reward, terminated, truncated, without_clock(info))))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        self._closed = True
        super().close()

    def fork(self) -> Self:
        """A fresh environment brought to the present state by replay."""
        if self._closed:
            raise ForkError(f"cannot fork the closed {self}")
        if self._start is None:
            raise ForkError(f"cannot fork {self} before reset()")
        env = self._make()
        try:
            twin = self._around(env)
            # Not the methods of a subclass: what they would count or change is in the copy already.
            ReplayFork.reset(twin, **copy.deepcopy(self._start))
            self._compare(twin)
            for action in self._actions:
                ReplayFork.step(twin, copy.deepcopy(action))
                self._compare(twin)
        except BaseException:
            env.close()
            raise
        twin._seeds = copy.deepcopy(self._seeds)
        return twin

    def _around(self, env: gymnasium.Env[ObsT, ActT]) -> Self:
        """A copy of this wrapper around ``env``. The record, which the replay makes anew, and the spec, never written to, are not copied."""
        twin = object.__new__(type(self))
        memo: dict[int, Any] = {id(kept): kept for kept in (self._make, self._start, self._actions, self._record, self._cached_spec)}
        memo |= {id(self): twin} | {id(old): new for old, new in zip(layers(self.env), layers(env), strict=False)}
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin

    def _compare(self, twin: ReplayFork[ObsT, ActT]) -> None:
        step = len(twin._record) - 1
        recorded, replayed = self._record[step], twin._record[step]
        if not data_equivalence(recorded, replayed):
            where = f"step {step}" if step else "reset"
            raise ForkError(f"replay differs at {where}: recorded {_short(recorded)}, replayed {_short(replayed)}; the environment is not deterministic")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin


def without_clock(info: dict[str, Any]) -> dict[str, Any]:
    """``info`` without the seconds that ``RecordEpisodeStatistics`` adds at the end of an episode: no two episodes share them."""
    if not isinstance(info.get("episode"), dict):
        return info
    return {**info, "episode": {name: value for name, value in info["episode"].items() if name != "t"}}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
