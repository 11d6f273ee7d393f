"""Several policies as one: each rollout tree stays on one of them, and one that is lost costs the turns that it was writing, which are sampled again.

A turn depends on its prompt, its parameters and the weights alone, so another member gives the same turn (up to the last bits of an engine's logits). What a
member had finished lies in the trees, not in the member.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import Any

from arpo_algo.policies.base import Generation, SamplingParams, ServedPolicy

__all__ = ["EngineLost", "PolicyPool"]

log = logging.getLogger(__name__)

Weights = str | PathLike[str] | Iterable[tuple[str, Any]]

_TREES = 10_000
"""Trees whose member is remembered; an older one that goes on may go on elsewhere."""


class EngineLost(RuntimeError):
    """An engine is gone: its process or machine died, or it failed and ended itself. The turns that it was writing may be asked of another."""


def copied(weights: Weights, version: int) -> Weights:
    """``weights`` in a form that can be read again later: a folder, or copies in memory, for the learner goes on to change its own."""
    return weights if isinstance(weights, str | PathLike) else [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights]


def listed(weights: Weights, version: int) -> Weights:
    """``weights`` in a form that several members can read, on the CPU: a GPU that trains has no room for them."""
    return weights if isinstance(weights, str | PathLike) else [(name, tensor.detach().cpu()) for name, tensor in weights]


@dataclass(slots=True, eq=False)
class _Member:
    policy: ServedPolicy | None
    """None while it is lost."""
    shift: int = 0
    """What is added to the version that the policy says, which counts from its own start."""
    live: int = 0
    """Turns under way."""


class PolicyPool:
    """A :class:`~arpo_algo.policies.base.ServedPolicy` over ``policies``, which hold the same weights.

    The turns of one tree (``SamplingParams.tree``) go to one member, whose cache holds the prefix; a new tree to the member with the fewest turns under way.
    A member that raises :class:`EngineLost` is taken out, and its trees go on at the others. ``replace(index)`` makes another for its place, which gets the
    present weights before it serves; the others serve meanwhile. After ``max_replacements`` of them the next loss is an error. Without ``replace`` the pool
    shrinks, and it is an error when nobody is left.

    ``keep(weights, version)``: puts new weights where each member, and later a replacement, can read them; by default in this process's memory.
    """

    def __init__(
        self,
        policies: Sequence[ServedPolicy],
        *,
        replace: Callable[[int], ServedPolicy] | None = None,
        max_replacements: int = 3,
        keep: Callable[[Weights, int], Weights] | None = None,
    ) -> None:
        if not policies:
            raise ValueError("expected at least one policy, got none")
        if max_replacements < 0:
            raise ValueError(f"max_replacements must be at least 0, got {max_replacements}")
        sizes = {(policy.context_length, policy.vocab_size) for policy in policies}
        if len(sizes) > 1:
            raise ValueError(f"expected policies of one model, got different (context_length, vocab_size): {sorted(sizes)}")
        ((self.context_length, self.vocab_size),) = sizes
        self.replacements = 0
        """Members replaced so far."""
        self.losses = 0
        """Members lost so far."""
        self._version = max(policy.version for policy in policies)
        self._members = [_Member(policy, self._version - policy.version) for policy in policies]
        self._replace, self._max_replacements = replace, max_replacements
        self._keep = keep if keep is not None else copied if replace is not None else listed
        self._weights: Weights | None = None
        self._homes: OrderedDict[int, _Member] = OrderedDict()
        self._coming: set[Future[None]] = set()
        self._failure: Exception | None = None
        self._closed = False
        self._lock = threading.RLock()  # replacements come in from threads
        self._updating = threading.Lock()  # a replacement must not miss an update
        self._threads = ThreadPoolExecutor(2 * len(policies), thread_name_prefix="arpo-pool")  # a replacement waits in one for an update that needs another

    @property
    def version(self) -> int:
        return self._version

    @property
    def policies(self) -> list[ServedPolicy | None]:
        """The members by index, None for one that is lost."""
        return [member.policy for member in self._members]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """A turn of the tree's member; of another where that one is lost. Raises :class:`EngineLost` when none is left or too many were."""
        while True:
            member = await self._member_for(params.tree)
            with self._lock:
                policy, shift = member.policy, member.shift
            if policy is None:
                continue
            member.live += 1
            try:
                generation = await policy.generate(prompt_ids, params)
            except EngineLost as error:
                self.lose(self._members.index(member), policy, error)
            else:
                return _shifted(generation, shift)
            finally:
                member.live -= 1

    def assign(self, tree: int, index: int) -> None:
        """Sends the turns of a tree to the member ``index`` from now on, as long as it lives."""
        with self._lock:
            self._remember(tree, self._members[index])

    def put(self, index: int, policy: ServedPolicy) -> None:
        """Puts a policy that holds the present weights, and says their version, in a member's place."""
        with self._lock:
            self._members[index].policy, self._members[index].shift = policy, 0

    def lose(self, index: int, policy: ServedPolicy, error: Exception) -> None:
        """Takes ``policy`` out of place ``index``, where it still stands there, and has it replaced in the background."""
        with self._lock:
            member = self._members[index]
            if member.policy is not policy or self._closed:
                return
            member.policy = None
            self.losses += 1
            if self._replace is None:
                left = sum(policy is not None for policy in self.policies)
                log.warning("engine %d is lost, %d are left: %s", index, left, error)
                return
            if self.replacements >= self._max_replacements:
                self._failure = EngineLost(f"engine {index} is lost after max_replacements={self._max_replacements} were replaced: {error}")
                self._failure.__cause__ = error
                return
            self.replacements += 1
            log.warning("engine %d is lost and replaced (%d of at most %d): %s", index, self.replacements, self._max_replacements, error)
            coming = self._threads.submit(self._bring, index, policy)
            self._coming.add(coming)
            coming.add_done_callback(self._coming.discard)

    async def replaced(self) -> None:
        """Returns when no replacement is under way. Raises :class:`EngineLost` where one failed, or too many engines were lost."""
        while coming := list(self._coming):
            await _one_done(coming)
        self._check()

    def update_weights(self, weights: Weights, **how: Any) -> None:
        """Gives the weights to all members at once; those lost before or on the way are replaced. Where all refuse, the pool stays as it was; where only some
        do, it is of no further use, and every call raises. ``how``: what else the members' ``update_weights`` takes."""
        with self._updating:  # a replacement under way waits, and gets these weights
            self._check()
            kept = self._keep(weights, self._version + 1)
            members = [(index, member.policy) for index, member in enumerate(self._members) if member.policy is not None]
            futures = [self._threads.submit(policy.update_weights, kept, **how) for _, policy in members]
            errors = [future.exception() for future in futures]
            refused = [error for error in errors if error is not None and not isinstance(error, EngineLost)]
            if refused and len(refused) == len(errors):
                raise refused[0]
            if refused:
                self._failure = RuntimeError(f"{len(refused)} of {len(errors)} engines did not take the weights of version {self._version + 1}: {refused[0]}")
                self._failure.__cause__ = refused[0]
                self._check()
            with self._lock:
                self._weights, self._version = kept if self._replace is not None else None, self._version + 1
                for index, policy in members:
                    self._members[index].shift = self._version - policy.version
        for (index, policy), error in zip(members, errors, strict=True):
            if isinstance(error, EngineLost):
                self.lose(index, policy, error)
        self._check()

    def close(self) -> None:
        """Closes all members."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for member in self._members:
            policy, member.policy = member.policy, None
            if policy is not None:
                policy.close()

    async def _member_for(self, tree: int | None) -> _Member:
        while True:
            self._check()
            with self._lock:
                alive = [member for member in self._members if member.policy is not None]
                home = self._homes.get(tree) if tree is not None else None
                if alive and (home is None or home.policy is None):
                    home = min(alive, key=lambda member: member.live)
                    if tree is not None:
                        self._remember(tree, home)
                coming = list(self._coming)
            if home is not None and home.policy is not None:
                return home
            if coming:
                await _one_done(coming)
            elif not any(member.policy is not None for member in self._members):
                self._check()
                raise EngineLost(f"all {len(self._members)} engines are lost")

    def _remember(self, tree: int, home: _Member) -> None:
        self._homes[tree] = home
        self._homes.move_to_end(tree)
        while len(self._homes) > _TREES:
            self._homes.popitem(last=False)

    def _bring(self, index: int, lost: ServedPolicy) -> None:
        """Makes a replacement for one that is lost, gives it the present weights and puts it in place."""
        assert self._replace is not None
        try:
            lost.close()  # what is left of it
        except Exception as error:
            log.debug("closing what is left of engine %d: %s", index, error)
        policy: ServedPolicy | None = None
        try:
            policy = self._replace(index)
            with self._updating:
                if self._weights is not None:
                    policy.update_weights(self._weights)
                with self._lock:
                    if not self._closed:
                        self._members[index].policy, self._members[index].shift = policy, self._version - policy.version
                        return
            policy.close()
        except EngineLost as error:
            if policy is None:
                self._fail(index, error)
            else:  # it died while it took the weights: as one that died later
                with self._lock:
                    self._members[index].policy = policy
                    self.lose(index, policy, error)
        except Exception as error:
            self._fail(index, error)

    def _fail(self, index: int, error: Exception) -> None:
        self._failure = EngineLost(f"engine {index} could not be replaced: {type(error).__name__}: {error}")
        self._failure.__cause__ = error

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the pool is closed")
        if self._failure is not None:
            raise self._failure


async def _one_done(futures: Sequence[Future[None]]) -> None:
    """Returns when one of the futures is done. A wait that is cancelled leaves them alone, which ``asyncio.wrap_future`` would not."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: Future[None]) -> None:
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:  # the loop is closed; nobody waits
            log.debug("a replacement came after the run that waited for it")

    for future in futures:
        future.add_done_callback(notify)
    await done.wait()


def _shifted(generation: Generation, shift: int) -> Generation:
    if not shift:
        return generation
    return dataclasses.replace(generation, version=generation.version + shift, versions=[version + shift for version in generation.versions])
