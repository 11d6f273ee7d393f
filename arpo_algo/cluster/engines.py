"""Engines as Ray actors: a policy in a process and on a machine of its own, the policy that stands for it elsewhere, and the way of new weights to it.

vLLM's own Ray executor is about one engine over several machines and refuses the CPU; here each engine is whole in its actor, and there are several.

Weights go into Ray's object store once, in pieces, and every engine reads them there: one copy a machine, whatever the number of its engines. The pieces stay
until the next version is in place everywhere, for an engine that is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from os import PathLike
from typing import Any, NoReturn

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError as error:
    raise ImportError("training on a cluster needs Ray: pip install 'arpo[ray]'") from error
import torch

from arpo_algo.policies.base import Generation, SamplingParams, ServedPolicy
from arpo_algo.policies.pool import EngineLost, Weights

log = logging.getLogger(__name__)

MakeEngine = Callable[[], ServedPolicy]
"""Makes a policy in the process of its actor; must pickle."""

_CONCURRENCY = 10_000
"""Calls that an engine's actor takes at once: turns under way or waiting for a place in the engine's batch."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The weights of one version in the object store, or in a folder that all machines see. Iterating reads pairs of name and tensor, a piece at a time."""

    version: int
    pieces: tuple[Any, ...] = ()
    """References to lists of (name, type, shape, bytes)."""
    folder: str | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in self.pieces:
            # Through a future: ``ray.get`` complains in an asynchronous actor, in its threads too, which block nobody.
            for name, dtype, shape, data in piece.future().result():
                # A copy: the store's memory is shared and must not be written to, nor held longer than the piece.
                tensor = torch.empty(shape, dtype=dtype)
                tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
                yield name, tensor


def store_weights(weights: Weights, version: int, *, piece_bytes: int = 256 << 20) -> StoredWeights:
    """Puts weights into the object store, in pieces of about ``piece_bytes``; this process holds one piece at a time."""
    if isinstance(weights, str | PathLike):
        return StoredWeights(version=version, folder=os.fspath(weights))
    pieces, piece, size = [], [], 0
    for name, tensor in weights:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        piece.append((name, tensor.dtype, tuple(tensor.shape), data))
        size += data.nbytes
        if size >= piece_bytes:
            pieces.append(ray.put(piece))
            piece, size = [], 0
    if piece:
        pieces.append(ray.put(piece))
    return StoredWeights(version=version, pieces=tuple(pieces))


class EngineActor:
    """The actor: a policy, its turns, its weights. ``make`` is called in its process."""

    def __init__(self, make: MakeEngine) -> None:
        self._version = 0
        self._open = asyncio.Event()
        self._open.set()
        self._updating = asyncio.Lock()  # one that a dead trainer began may still be at work
        self._turns: set[asyncio.Future[Generation]] = set()
        self._failure: asyncio.Future[str] | None = None
        self._error: Exception | None = None
        try:
            self.policy = make()
        except Exception as error:  # raised by the first call: out of a constructor it would arrive as the death of the actor
            self._error = error

    async def facts(self) -> tuple[int, int, int]:
        """Context length, size of the vocabulary, version. Raises what ``make`` raised."""
        if self._error is not None:
            raise self._error
        return self.policy.context_length, self.policy.vocab_size, self._version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        turn = asyncio.ensure_future(self._turn(prompt_ids, params))
        self._turns.add(turn)
        try:
            return await turn
        finally:
            self._turns.discard(turn)

    async def give_up(self) -> None:
        """Ends the turns under way: whoever asked for them is gone."""
        turns = list(self._turns)
        for turn in turns:
            turn.cancel()
        if turns:
            await asyncio.wait(turns)

    async def _turn(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        await self._open.wait()  # turns that have not begun wait for new weights; for those under way the policy itself decides
        shift = self._version - self.policy.version
        try:
            generation = await self.policy.generate(prompt_ids, params)
        except EngineLost as error:
            self._fail(error)
        if not shift:
            return generation
        return replace(generation, version=generation.version + shift, versions=[version + shift for version in generation.versions])

    async def update(self, weights: StoredWeights, how: dict[str, Any]) -> None:
        """Takes over weights, in a thread: turns under way go on where the policy lets them."""
        async with self._updating:
            self._open.clear()
            try:
                source: Weights = weights if weights.folder is None else weights.folder
                await asyncio.to_thread(self.policy.update_weights, source, **how)
                self._version = weights.version
            except EngineLost as error:
                self._fail(error)
            finally:
                self._open.set()

    async def stats(self) -> dict[str, float]:
        """What the policy counts, where it counts."""
        stats = getattr(self.policy, "stats", None)
        return dict(asdict(stats)) if is_dataclass(stats) and not isinstance(stats, type) else {}

    async def watch(self) -> str:
        """Returns, with the reason, when the engine has failed; the death of the actor ends the call as well."""
        return await asyncio.shield(self._fate())

    def _fate(self) -> asyncio.Future[str]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    def _fail(self, error: Exception) -> NoReturn:
        """The engine is of no use any more; whoever watches has it replaced."""
        fate = self._fate()
        if not fate.done():
            fate.set_result(str(error))
        raise EngineLost(str(error)) from error


class RayEngine:
    """A :class:`~arpo_algo.policies.base.ServedPolicy` that stands for an engine in an actor; pickles, and works in any process of the cluster.

    Every method raises :class:`~arpo_algo.policies.pool.EngineLost` where the actor has died, cannot be reached, or has lost its engine.
    """

    def __init__(self, actor: Any, *, context_length: int, vocab_size: int, version: int) -> None:
        self.context_length, self.vocab_size = context_length, vocab_size
        self._actor, self._version = actor, version

    @property
    def version(self) -> int:
        """Of the weights that this object sent last; a turn carries its own."""
        return self._version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        generation: Generation = await call(self._actor.generate.remote(prompt_ids, params))
        return generation

    def update_weights(self, weights: Weights | StoredWeights, **how: Any) -> None:
        """Takes over weights, which are put into the object store where they are not there yet."""
        stored = weights if isinstance(weights, StoredWeights) else store_weights(weights, self._version + 1)
        _get(self._actor.update.remote(stored, how))
        self._version = stored.version

    def stats(self) -> dict[str, float]:
        """What the engine counts: tokens prefilled, reused, decoded."""
        counts: dict[str, float] = _get(self._actor.stats.remote())
        return counts

    async def loss(self) -> EngineLost:
        """Waits until the engine is lost, and returns why."""
        try:
            return EngineLost(await call(self._actor.watch.remote()))
        except EngineLost as error:
            return error

    def give_up(self) -> Any:
        """Ends the turns under way, of whoever is gone; returns a reference that is there when they have ended."""
        return self._actor.give_up.remote()

    def close(self) -> None:
        """Ends the actor."""
        ray.kill(self._actor)


def start_engines(make: MakeEngine, n: int, request: dict[str, float], *, timeout: float) -> list[RayEngine]:
    """``n`` engines in actors that take the resources of ``request`` each. Raises ``TimeoutError`` when they are not there in time, and what ``make``
    raised."""
    actors = [actor_of(EngineActor, request).options(max_concurrency=_CONCURRENCY).remote(make) for _ in range(n)]
    try:
        facts = started([actor.facts.remote() for actor in actors], f"engines with {request} each", timeout)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return [
        RayEngine(actor, context_length=context_length, vocab_size=vocab_size, version=version)
        for actor, (context_length, vocab_size, version) in zip(actors, facts, strict=True)
    ]


def actor_of(cls: type, request: dict[str, float]) -> Any:
    """A Ray actor class that takes the resources of ``request`` and is never restarted by Ray itself: what it held would be gone without a word."""
    custom = {name: n for name, n in request.items() if name not in ("CPU", "GPU")}
    return ray.remote(num_cpus=request.get("CPU", 0), num_gpus=request.get("GPU", 0), resources=custom, max_restarts=0, max_task_retries=0)(cls)


def started(references: Sequence[Any], what: str, timeout: float) -> list[Any]:
    """The results of first calls to new actors. Raises ``TimeoutError`` after ``timeout`` seconds, and what the calls raised."""
    waiting = list(references)
    _, missing = ray.wait(waiting, num_returns=len(waiting), timeout=timeout)
    if missing:
        raise TimeoutError(
            f"{len(missing)} of {len(waiting)} {what} were not there after {timeout:g} s (start_timeout); the cluster has free: {ray.available_resources()}"
        )
    return [_get(reference) for reference in references]


async def call(reference: Any) -> Any:
    """The result of an actor's method; cancelling the wait cancels the call. Raises what the method raised, and ``EngineLost`` where the actor is gone."""
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except (RayActorError, RayTaskError) as error:
        raise_cause(error)


def raise_cause(error: Exception) -> NoReturn:
    """Raises what user code in an actor raised, whatever its type; where Ray itself lost the actor, ``EngineLost``."""
    if isinstance(error, RayTaskError):  # first: it also is of the type that it carries, which may be one of Ray's own
        cause = error.cause
        raise cause if isinstance(cause, Exception) else error
    raise EngineLost(str(error)) from error


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except (RayActorError, RayTaskError) as error:
        raise_cause(error)
