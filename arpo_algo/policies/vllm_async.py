"""A vLLM engine in processes of its own, with an event loop of its own in a thread of this one.

vLLM's ``AsyncLLM`` belongs to one event loop for life, while turns are asked for from loops that come and go. Everything that happens to it therefore
happens in the loop of one thread. The model, its cache and vLLM's process groups are in the other processes: this one keeps its environment, its random
state and the freedom to open process groups, and may hold several engines.

The processes are started by spawning: a script that makes a policy guards its entry with ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from multiprocessing import resource_tracker
from typing import Any, Literal, TypeVar

from arpo_algo.policies.vllm_processes import Processes, identity
from arpo_algo.policies.vllm_start import (
    COLUMN,
    arguments_explained,
    check_column,
    engine_arguments,
    on_cpu,
    own_environment,
    own_random_state,
    probe_params,
    probe_prompts,
    set_environment,
)
from arpo_algo.policies.vllm_transfer import Transport, default_transport, send_checkpoint, send_weights
from arpo_algo.policies.vllm_transfer import engine_arguments as transfer_arguments
from arpo_algo.policies.vllm_turns import EngineStopped, Turn, Turns, Weights

T = TypeVar("T")
_DIED = "a process of the vLLM engine died"
_REMEMBERED_TREES = 65_536


class AsyncEngine:
    """Starts an engine with ``arguments`` in other processes. Raises here what the start raises.

    With ``data_parallel_size`` above 1 each rank has a cache of its own: the turns of one tree go to one rank.
    """

    def __init__(self, arguments: dict[str, Any], turns: Turns, transport: Transport | None = None) -> None:
        self._turns = turns
        self._ranks = TreeRanks(arguments.get("data_parallel_size", 1))
        self._following: dict[str, asyncio.Task[None]] = {}
        self._acting: set[asyncio.Task[Any]] = set()
        self._stopped: EngineStopped | None = None
        self._lock = threading.Lock()  # between call and the end of the loop: no action is left behind unanswered
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, transport, started), name="vllm-loop", daemon=True)
        self._thread.start()
        self.vocab_size = started.result()
        atexit.register(self.close)

    def call(self, action: Callable[[Any], Coroutine[Any, Any, T]]) -> Future[T]:
        """The result of ``await action(llm)`` in the engine's loop; :class:`EngineStopped` once that is over, also where it ends under the action.

        An action that raises ``EngineStopped`` ends the engine; any other error is the caller's alone.
        """
        with self._lock:
            if self._stopped is None:
                return asyncio.run_coroutine_threadsafe(self._act(action), self._loop)
        future: Future[T] = Future()
        future.set_exception(self._stopped)
        return future

    def join(self, name: str, turn: Turn) -> None:
        async def join(llm: Any) -> None:
            task = self._following[name] = asyncio.create_task(self._follow(llm, name, turn))
            task.add_done_callback(lambda done: self._followed(name, turn))

        def joined(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                turn.end(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self.call(join).add_done_callback(joined)

    def leave(self, name: str) -> None:
        async def leave(llm: Any) -> None:
            self._turns.discard(name)
            if name in self._following:
                self._following[name].cancel()

        self.call(leave)

    def update(self, weights: Weights, version: int, *, keep_requests: bool) -> None:
        self.call(lambda llm: self._update(llm, weights, version, keep_requests)).result()

    def run(self, action: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return self.call(lambda llm: self._alone(llm, action)).result()

    def sleep(self) -> None:
        self.call(self._sleep).result()

    def wake(self, memory: Literal["weights", "kv_cache"]) -> None:
        self.call(lambda llm: self._wake(llm, memory)).result()

    def close(self) -> None:
        """Ends the engine's processes and the thread; requests under way fail. Can be called twice."""
        atexit.unregister(self.close)
        self._end_with(EngineStopped("the vLLM engine was closed"))
        self._thread.join()

    def _end_with(self, error: EngineStopped) -> None:
        """Ends the engine, unless it has ended. From any thread."""
        with self._lock:
            if self._stopped is None:
                self._stopped = error
                self._loop.call_soon_threadsafe(self._ended.set_result, None)

    # --- in the engine's thread -------------------------------------------------------------------------------------------------------------------

    def _run(self, arguments: dict[str, Any], transport: Transport | None, started: Future[int]) -> None:
        resource_tracker.ensure_running()  # when the first process starts it, it lets the signals of the thread through again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the processes inherit it: what Ctrl-C means is decided here, not in all of them
        try:
            asyncio.run(self._main(arguments, transport, started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _main(self, arguments: dict[str, Any], transport: Transport | None, started: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._changing = asyncio.Lock()  # one change of weights or memory at a time
        self._open = asyncio.Event()  # not while the weights change: a new turn waits
        self._open.set()
        llm, self._transport = start_engine(arguments, transport)
        self._llm, processes = llm, None
        try:
            processes = Processes(llm)
            await llm.collective_rpc("end_with", args=(*identity(), processes.started))
            await self._probe(llm)
            started.set_result(llm.model_config.get_vocab_size())
            llm.output_handler.add_done_callback(lambda done: self._end_with(EngineStopped(_DIED)))
            await self._ended
        finally:
            self._turns.stopped(self._stopped or EngineStopped("the vLLM engine did not start"))
            following = list(self._following.values())
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            while self._acting:
                await asyncio.wait(self._acting)
            llm.shutdown()
            if processes is not None:
                await processes.ended()
            self._llm = None  # at the interpreter's end its finalizer would find its modules gone

    async def _probe(self, llm: Any) -> None:
        await llm.collective_rpc("add_entropy_column")
        for rank in range(self._ranks.size):
            await probe_entropy_column(llm, rank)

    async def _act(self, action: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        me, work = asyncio.current_task(), asyncio.create_task(action(self._llm))
        assert me is not None
        self._acting.add(me)
        try:
            either: set[asyncio.Future[Any]] = {work, self._ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # vLLM leaves calls into a dead process unanswered
                work.cancel()
                assert self._stopped is not None
                raise self._stopped
            return work.result()
        except EngineStopped as error:
            self._end_with(error)
            raise
        finally:
            self._acting.discard(me)

    async def _follow(self, llm: Any, name: str, turn: Turn) -> None:
        """Carries the tokens of a turn from vLLM to ``turns``."""
        try:
            while not self._open.is_set():
                await self._open.wait()
            if not turn.future.cancelled():
                await self._sample(llm, name, turn)
        except Exception as error:
            self._turns.discard(name)
            turn.end(EngineStopped(_DIED) if llm.errored else error)

    def _followed(self, name: str, turn: Turn) -> None:
        """After ``_follow``, and not at its end: a task that is cancelled before its first step runs none of its code."""
        del self._following[name]
        if self._stopped is not None:
            turn.end(self._stopped)

    async def _sample(self, llm: Any, name: str, turn: Turn) -> None:
        self._turns.add(name, turn)
        rank = self._ranks.enter(turn.params.tree)
        prompt = {"type": "token", "prompt_token_ids": turn.prompt}
        try:
            outputs = llm.generate(prompt, self._turns.params(turn), name, data_parallel_rank=rank, lora_request=turn.lora)
            async with aclosing(outputs):  # closed before its end, it takes the request out of the batch
                async for output in outputs:
                    if output.outputs[0].finish_reason == "abort":  # not at our wish: a rank ends its requests so when another one dies
                        self._end_with(EngineStopped(_DIED))
                        return
                    if self._turns.receive(output) and not output.finished:
                        return
        finally:
            self._ranks.leave(rank)

    async def _alone(self, llm: Any, action: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        async with self._changing:
            self._open.clear()
            try:
                return await action(llm)
            finally:
                self._open.set()

    async def _update(self, llm: Any, weights: Weights, version: int, keep_requests: bool) -> None:
        async with self._changing:
            if not keep_requests:
                self._turns.require_none("the weights changed")
            self._open.clear()
            try:
                async with _paused(llm):
                    await self._replace(llm, weights, version)
            finally:
                self._open.set()

    async def _replace(self, llm: Any, weights: Weights, version: int) -> None:
        if isinstance(weights, str):
            await send_checkpoint(llm, weights, version)
        else:
            await send_weights(llm, weights, version, self._transport)
        try:
            await llm.collective_rpc("adopt_version", args=(version,))
        except Exception as error:
            raise EngineStopped(f"the vLLM engine did not take over version {version}: {type(error).__name__}: {error}") from error

    async def _sleep(self, llm: Any) -> None:
        async with self._changing:
            self._turns.require_none("sleep() was called")
            self._turns.asleep = True
            if llm.model_config.enable_sleep_mode:
                await llm.sleep(level=1)

    async def _wake(self, llm: Any, memory: Literal["weights", "kv_cache"]) -> None:
        async with self._changing:
            if llm.model_config.enable_sleep_mode:
                await llm.wake_up([memory])
            if memory == "kv_cache":
                self._turns.asleep = False


class TreeRanks:
    """Which of ``size`` data-parallel ranks samples a turn: that of its tree; of a new tree, or none, the one with the fewest turns under way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._live = [0] * size
        self._of_tree: OrderedDict[int, int] = OrderedDict()

    def enter(self, tree: int | None) -> int:
        """The rank of a turn that begins."""
        rank = None if tree is None else self._of_tree.get(tree)
        if rank is None:
            rank = min(range(self.size), key=self._live.__getitem__)
        if tree is not None:
            self._of_tree[tree] = rank
            self._of_tree.move_to_end(tree)
            if len(self._of_tree) > _REMEMBERED_TREES:
                self._of_tree.popitem(last=False)
        self._live[rank] += 1
        return rank

    def leave(self, rank: int) -> None:
        """A turn has ended there."""
        self._live[rank] -= 1


@asynccontextmanager
async def _paused(llm: Any) -> AsyncIterator[None]:
    """No step begins meanwhile: one under way would find the model without weights. An engine that sleeps is paused already, and stays so."""
    asleep = await llm.is_paused()
    if not asleep:
        await llm.pause_generation(mode="keep", clear_cache=False)
    try:
        yield
    except EngineStopped:
        raise  # it may hold no weights: nothing is sampled with it any more
    except BaseException:
        if not asleep:
            await llm.resume_generation()
        raise
    if not asleep:
        await llm.resume_generation()


def start_engine(arguments: dict[str, Any], transport: Transport | None) -> tuple[Any, Transport]:
    """An ``AsyncLLM`` in the running loop, its processes started, and what moves weights into it: ``transport``, or one that suits the platform.

    This process's environment and random state stay as they are.
    """
    with own_environment(), own_random_state(), arguments_explained():
        set_environment()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if transport is None:
            transport = default_transport(same_gpu=arguments["enable_sleep_mode"] and one_worker(arguments) and not on_cpu())
        if transport.backend == "ipc":
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the processes alone: its handles travel pickled
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**{**engine_arguments(arguments), **transfer_arguments(transport)})), transport


def one_worker(arguments: dict[str, Any]) -> bool:
    """Whether the engine computes on one device."""
    return all(arguments.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "pipeline", "data"))


async def probe_entropy_column(llm: Any, rank: int) -> None:
    """Compares the entropy column of a data-parallel rank with entropies from all log-probabilities. Raises ``RuntimeError`` where they differ."""
    size = llm.model_config.get_vocab_size()
    for prompt, temperature in probe_prompts(size):
        column = await _first_token(llm, rank, prompt, logprobs=COLUMN, temperature=temperature)
        check_column(size, column, await _first_token(llm, rank, prompt, logprobs=-1, temperature=1.0))


async def _first_token(llm: Any, rank: int, prompt: list[int], *, logprobs: int, temperature: float) -> list[float]:
    """The log-probabilities that come with one sampled token."""
    params = probe_params(logprobs=logprobs, temperature=temperature)
    outputs = [o async for o in llm.generate({"type": "token", "prompt_token_ids": prompt}, params, "probe", data_parallel_rank=rank)]
    return list(outputs[-1].outputs[0].logprobs.logprobs)
