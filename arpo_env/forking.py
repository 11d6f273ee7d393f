"""Forking: an independent copy of an environment in the middle of an episode, through any chain of wrappers.

``fork(env)`` picks the strongest way that holds for every layer, and never weakens it silently:

``native``  the environment copies itself (:class:`ForkableEnv`; its tools fork with it);
``copy``    ``copy.deepcopy`` of an environment whose state is plain Python objects;
``replay``  the actions so far are replayed into a fresh environment and every observation is compared (:class:`arpo_env.ReplayFork`);
``none``    nothing of the above is right: :class:`ForkError` says which layer refuses and what to do.

Wrappers are copied by ``copy.deepcopy``, which reaches the environment inside through ``__deepcopy__``. That is why ``TimeLimit(env)`` forks with its
step count, while ``get_wrapper_attr("fork")()`` would silently drop the wrapper.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, TypeVar, cast, overload

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.ezpickle import EzPickle
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import HumanRendering, RecordVideo

from arpo_env._together import all_or_none
from arpo_env.tools.base import ForkSupport

EnvT = TypeVar("EnvT", bound="gymnasium.Env[Any, Any] | SyncVectorEnv")

STRENGTH: tuple[ForkSupport, ...] = ("none", "replay", "copy", "shared", "native")
"""Ways to fork from weakest to strongest; a whole is as strong as its weakest part."""


class ForkError(RuntimeError):
    """An environment cannot be forked, or a fork turned out different from its parent."""


class TextSpace(gymnasium.spaces.Text):
    """Any Unicode text up to ``max_length`` characters. ``sample`` draws short printable ASCII.

    ``gymnasium.spaces.Text`` checks a character set, which for all of Unicode costs seconds to build and to copy; here only type and length count.
    """

    def __init__(self, max_length: int = 1_000_000):
        super().__init__(max_length=24, min_length=0)
        self.limit = max_length

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.limit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.limit == self.limit

    def __repr__(self) -> str:
        return f"TextSpace({self.limit})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TextSpace:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)  # the character tables are never written to
        if self._np_random is not None:
            twin._np_random = copy.deepcopy(self._np_random, memo)
        return twin


_IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes})


def _frozen(generator: np.random.Generator) -> Callable[[], np.random.Generator]:
    """Makes independent generators in the state that ``generator`` has now: later, as most forks never draw and making one costs half of a fork."""
    bits = generator.bit_generator
    if type(generator) is not np.random.Generator or type(bits) is not np.random.PCG64 or type(bits.seed_seq) is not np.random.SeedSequence:
        return functools.partial(copy.deepcopy, copy.deepcopy(generator))
    seeds = bits.seed_seq
    return functools.partial(_pcg64, bits.state, seeds.entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned)


def _pcg64(state: Any, entropy: Any, spawn_key: Any, pool_size: int, spawned: int) -> np.random.Generator:
    """The kind of generator that Gymnasium makes, in a third of the time that ``deepcopy`` takes."""
    bits = np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned))
    bits.state = state
    return np.random.Generator(bits)


class ForkableEnv(gymnasium.Env[str, str]):
    """A text environment that forks. Subclass it and write ``reset`` and ``step``; call ``super().reset(seed=seed)`` first.

    ``fork`` deep-copies every attribute except those named in ``shared``: name there what is immutable or meant to be common (tasks, indexes, formats).
    What owns a process or a connection overrides :meth:`_fork_into`.
    """

    metadata: dict[str, Any] = {"render_modes": [], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own convention
    shared: ClassVar[frozenset[str]] = frozenset({"spec", "metadata", "render_mode", "_at_fork"})
    fork_support: ForkSupport = "native"

    _closed = False
    _running = False
    _at_fork: Callable[[], np.random.Generator] | None = None

    def __init__(self) -> None:
        self.action_space = TextSpace()
        self.observation_space = TextSpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self._closed:
            raise ClosedEnvironmentError(f"{type(self).__name__}.reset() after close(): make a new environment")
        super().reset(seed=seed)
        self._running = True
        return "", {}

    @property
    def np_random(self) -> np.random.Generator:
        """As in Gymnasium. That of a fork is made when it is first asked for, in the state that its parent's had."""
        if self._np_random is None and self._at_fork is not None:
            self._np_random = self._at_fork()
        return super().np_random

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self._np_random, self._np_random_seed = value, -1  # Gymnasium's mark of a generator whose seed is not known

    def close(self) -> None:
        """Free what this copy holds; forks and parents go on. Idempotent."""
        self._closed = True

    def fork(self) -> Self:
        """An independent copy in the present state: the same actions give the same observations, rewards and infos in both."""
        return self.fork_many(1)[0]

    def fork_many(self, n: int) -> list[Self]:
        """``n`` independent copies, all or none. Override it where making them at once is cheaper; otherwise :meth:`_fork_into` is the place."""
        if self._closed:
            raise ForkError(f"cannot fork a closed {type(self).__name__}")
        if not self._running:
            raise ForkError(f"cannot fork {type(self).__name__} before reset()")
        return all_or_none(n, self._fork_one, lambda twin: twin.close())

    def _fork_one(self) -> Self:
        twin = self._copied()
        self._fork_into(twin)
        return twin

    def _copied(self) -> Self:
        twin = object.__new__(type(self))
        memo: dict[int, Any] = {id(self): twin}
        own = {name: value for name, value in vars(self).items() if name not in self.shared and type(value) not in _IMMUTABLE}
        generator = own.pop("_np_random", None)
        twin.__dict__.update(vars(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in own.items()})
        if generator is not None:
            twin._np_random = memo.get(id(generator))  # where it is an attribute under another name too
            twin._at_fork = _frozen(generator)
        return twin

    def _fork_into(self, twin: Self) -> None:
        """Give ``twin`` its own external resources. It must raise :class:`ForkError` and leave nothing behind where it cannot."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin


def layers(env: gymnasium.Env[Any, Any]) -> list[gymnasium.Env[Any, Any]]:
    """The chain of wrappers from the outermost to the environment inside."""
    chain = [env]
    while isinstance(chain[-1], gymnasium.Wrapper):
        chain.append(chain[-1].env)
    return chain


def fork_support(env: gymnasium.Env[Any, Any] | SyncVectorEnv) -> ForkSupport:
    """How ``fork(env)`` will copy it: ``native``, ``copy``, ``replay`` or ``none``. What a deepcopy really holds is known only after trying."""
    if isinstance(env, SyncVectorEnv):
        return min((fork_support(member) for member in env.envs), key=STRENGTH.index)
    if not isinstance(env, gymnasium.Env):
        return "none"
    chain = layers(env)
    if any(_refusal(layer) for layer in _copied_layers(chain)):
        return "none"
    forking = _self_forking_layer(chain)
    return "copy" if forking is None else cast(ForkSupport, getattr(forking, "fork_support", "native"))


@overload
def fork(env: EnvT, n: None = None) -> EnvT: ...
@overload
def fork(env: EnvT, n: int) -> list[EnvT]: ...
def fork(env: EnvT, n: int | None = None) -> EnvT | list[EnvT]:
    """An independent copy of ``env`` with all its wrappers; with ``n``, a list of ``n``. All or none: a failure closes what was made.

    Raises :class:`ForkError` where no way of copying is right, where ``env`` is closed or was never reset.
    """
    if n is None:
        return _forks(env, 1)[0]
    return _forks(env, n)


def _forks(env: EnvT, n: int) -> list[EnvT]:
    if isinstance(env, AsyncVectorEnv) or not isinstance(env, gymnasium.Env | SyncVectorEnv):
        raise ForkError(f"expected a gymnasium.Env or SyncVectorEnv, got {type(env).__name__}; other processes cannot be forked from here")
    members = [layers(member) for member in env.envs] if isinstance(env, SyncVectorEnv) else [layers(env)]
    copied = [layer for chain in members for layer in _copied_layers(chain)]
    for layer in copied:
        if refusal := _refusal(layer):
            raise ForkError(refusal)
    # A spec holds the constructor's arguments, perhaps 20,000 tasks; it is never written to.
    specs = [vars(holder).get(name) for holder in (env, *copied) for name in ("spec", "_cached_spec")]
    memos: list[dict[int, Any]] = [{id(spec): spec for spec in specs} for _ in range(n)]
    twins: list[gymnasium.Env[Any, Any]] = []
    try:
        for layer in filter(None, map(_self_forking_layer, members)):
            for memo, twin in zip(memos, _own_forks(layer, n), strict=True):
                twins.append(twin)
                memo[id(layer)] = twin
        return [copy.deepcopy(env, memo) for memo in memos]
    except BaseException as error:
        for twin in twins:
            twin.close()
        if isinstance(error, ForkError) or not isinstance(error, Exception):
            raise
        raise ForkError(
            f"{env} cannot be copied: {type(error).__name__}: {error}. Give it a fork() method, or wrap it in arpo_env.ReplayFork if it is deterministic"
        ) from error


def _copied_layers(chain: list[gymnasium.Env[Any, Any]]) -> list[gymnasium.Env[Any, Any]]:
    """The layers that deepcopy has to copy: those around the outermost one that forks itself, which answers for everything inside."""
    return list(itertools.takewhile(lambda layer: not _forks_itself(layer), chain))


def _self_forking_layer(chain: list[gymnasium.Env[Any, Any]]) -> gymnasium.Env[Any, Any] | None:
    return next(filter(_forks_itself, chain), None)


def _forks_itself(layer: Any) -> bool:
    return callable(getattr(type(layer), "fork", None))


def _own_forks(layer: Any, n: int) -> Iterator[gymnasium.Env[Any, Any]]:
    """``n`` copies by the layer's own methods: at once, unless a class has a ``fork`` of its own above the ``fork_many`` that it inherits."""
    owner = next(cls for cls in type(layer).__mro__ if "fork" in vars(cls) or "fork_many" in vars(cls))
    if "fork_many" in vars(owner):
        yield from layer.fork_many(n)
    else:
        for _ in range(n):
            yield layer.fork()


def _refusal(layer: Any) -> str | None:
    if isinstance(layer, EzPickle):
        return (
            f"{type(layer).__name__} derives from EzPickle, whose deepcopy is a new environment without the state of the episode;"
            " wrap it in arpo_env.ReplayFork"
        )
    if isinstance(layer, RecordVideo | HumanRendering):
        return f"{type(layer).__name__} draws to one window or file that two copies cannot share; put it around the copies instead"
    return None
