"""What the trainer asks for groups: a sampler, in this process or on a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from arpo_algo.codec import Codec
from arpo_algo.config import ARPOConfig
from arpo_algo.env_source import EnvSource
from arpo_algo.policies.base import Policy
from arpo_algo.rollout import sample_groups
from arpo_algo.tree import RolloutTree

T = TypeVar("T")


class Sampler(Protocol):
    """A source of groups."""

    def sample(self, codec: Codec, config: ARPOConfig, options: Sequence[Mapping[str, Any] | None], *, seed: int) -> list[RolloutTree]:
        """One group for each of ``options`` (what ``env.reset`` takes), sampled and branched as ``config.rollout`` and ``config.branching`` say.

        The same arguments, weights and policy give the same trees. Tasks whose prompts leave no room are skipped; raises
        :class:`~arpo_algo.rollout.PromptTooLong` when none is left.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LocalSampler:
    """Samples in this process: all groups at once in one event loop, environments in its threads."""

    env: EnvSource
    policy: Policy

    def sample(self, codec: Codec, config: ARPOConfig, options: Sequence[Mapping[str, Any] | None], *, seed: int) -> list[RolloutTree]:
        return run_async(sample_groups(self.env, self.policy, codec, config.branching, config.rollout, options, seed=seed))


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, also inside a notebook whose loop is running."""
    if not _in_loop():
        return asyncio.run(coroutine)
    result: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
