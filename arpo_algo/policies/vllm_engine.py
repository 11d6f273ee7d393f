"""A vLLM engine inside this process, with a thread of its own.

vLLM's in-process engine is synchronous: somebody has to call ``step``, and nobody else may touch it meanwhile. Everything that happens to the engine
therefore happens in one thread, between two steps; requests join the running batch there and leave it there.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import torch

from arpo_algo.policies.vllm_start import (
    COLUMN,
    arguments_explained,
    check_column,
    engine_arguments,
    own_random_state,
    probe_params,
    probe_prompts,
    set_environment,
)
from arpo_algo.policies.vllm_turns import EngineStopped, Turn, Turns, Weights

T = TypeVar("T")
_one = threading.Lock()
"""Held while an engine runs. vLLM keeps an engine's process groups in globals of its module: closing a second engine would break the first."""


class EngineThread:
    """Starts an engine with ``arguments`` and steps it for as long as it has requests. Raises here what the start raises.

    Raises ``RuntimeError`` where this process runs another engine.
    """

    def __init__(self, arguments: dict[str, Any], turns: Turns) -> None:
        if arguments.get("data_parallel_size", 1) > 1:
            raise ValueError("several data-parallel engines run in processes of their own: pass separate_process=True")
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("an engine in this process would join the process group of the learner's ranks: pass separate_process=True")
        if not _one.acquire(blocking=False):
            raise RuntimeError("this process runs a vLLM engine already: close its policy first, or pass separate_process=True")
        self._commands: queue.SimpleQueue[Callable[[Any], object] | None] = queue.SimpleQueue()
        self._turns = turns
        self._stopped: EngineStopped | None = None
        self._lock = threading.Lock()  # between call and the end of the thread: no command is left behind unanswered
        started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, started), name="vllm-engine", daemon=True)
        self._thread.start()
        self.vocab_size = int(started.result())
        atexit.register(self.close)  # a process that ends under a running engine aborts

    def call(self, action: Callable[[Any], T]) -> Future[T]:
        """The result of ``action(engine)``, which the engine's thread calls between two steps; :class:`EngineStopped` once that is over.

        An action that raises ``EngineStopped`` ends the engine; any other error is the caller's alone.
        """
        future: Future[T] = Future()

        def run(engine: Any) -> None:
            if engine is None:
                future.set_exception(self._stopped)
                return
            try:
                future.set_result(action(engine))
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, EngineStopped):
                    raise

        with self._lock:
            if self._stopped is None:
                self._commands.put(run)
                return future
        run(None)
        return future

    def join(self, name: str, turn: Turn) -> None:
        def joined(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                turn.end(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self.call(lambda engine: self._join(engine, name, turn)).add_done_callback(joined)

    def leave(self, name: str) -> None:
        self.call(lambda engine: self._leave(engine, name))

    def update(self, weights: Weights, version: int, *, keep_requests: bool) -> None:
        self.call(lambda engine: self._update(engine, weights, version, keep_requests)).result()

    def run(self, action: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return self.call(lambda engine: asyncio.run(action(engine))).result()

    def sleep(self) -> None:
        self.call(self._sleep).result()

    def wake(self, memory: Literal["weights", "kv_cache"]) -> None:
        self.call(lambda engine: self._wake(engine, memory)).result()

    def close(self) -> None:
        """Ends the thread and frees the engine's memory; requests under way fail. Can be called twice."""
        atexit.unregister(self.close)
        self._commands.put(None)
        self._thread.join()

    # --- in the engine's thread -------------------------------------------------------------------------------------------------------------------

    def _join(self, engine: Any, name: str, turn: Turn) -> None:
        if turn.future.cancelled():
            return
        prompt = {"type": "token", "prompt_token_ids": turn.prompt}
        self._turns.add(name, turn)
        try:
            engine.add_request(name, prompt, self._turns.params(turn), lora_request=turn.lora)
        except Exception:
            self._turns.discard(name)
            raise

    def _leave(self, engine: Any, name: str) -> None:
        if self._turns.discard(name):
            engine.abort_request([name])

    def _update(self, engine: Any, weights: Weights, version: int, keep_requests: bool) -> None:
        if not keep_requests:
            self._turns.require_none("the weights changed")
        replace_weights(engine, weights, version)

    def _sleep(self, engine: Any) -> None:
        self._turns.require_none("sleep() was called")
        self._turns.asleep = True
        if engine.model_config.enable_sleep_mode:
            engine.sleep(level=1)

    def _wake(self, engine: Any, memory: Literal["weights", "kv_cache"]) -> None:
        if engine.model_config.enable_sleep_mode:
            engine.wake_up([memory])
        if memory == "kv_cache":
            self._turns.asleep = False

    def _run(self, arguments: dict[str, Any], started: Future[Any]) -> None:
        engine, alone = None, not torch.distributed.is_initialized()
        try:
            with own_random_state():
                engine = start_engine(arguments)
                probe_entropy_column(engine)
        except BaseException as error:
            self._stopped = EngineStopped("the vLLM engine did not start")
            try:
                _release(engine, alone)
            finally:  # whoever waits for the start hears of it whatever happens
                started.set_exception(error)
            return
        started.set_result(engine.model_config.get_vocab_size())
        self._stop(self._serve(engine))
        _release(engine, alone)

    def _serve(self, engine: Any) -> EngineStopped:
        """Steps the engine until it is to end; returns why it did."""
        try:
            while self._obey(engine):
                self._step(engine)
        except EngineStopped as error:
            return error
        except Exception as error:
            failed = EngineStopped(f"the vLLM engine failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return failed
        return EngineStopped("the vLLM engine was closed")

    def _obey(self, engine: Any) -> bool:
        """Carries out the commands that are waiting; with nothing to step, waits for one. False when told to end."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _step(self, engine: Any) -> None:
        started = time.perf_counter()
        outputs = engine.step()
        self._turns.stepped(time.perf_counter() - started)
        ended = [output.request_id for output in outputs if self._turns.receive(output) and not output.finished]
        if ended:
            engine.abort_request(ended)

    def _stop(self, error: EngineStopped) -> None:
        with self._lock:
            self._stopped = error
        self._turns.stopped(error)
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command(None)


def start_engine(arguments: dict[str, Any]) -> Any:
    """An engine that runs in this process; its workers do too where there is one."""
    set_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    with arguments_explained():
        config = EngineArgs(**engine_arguments(arguments)).create_engine_config()
        engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    engine.collective_rpc("add_entropy_column")
    return engine


def replace_weights(engine: Any, weights: Weights, version: int) -> None:
    """Loads weights and forgets all keys and values; those of turns under way are computed anew. Raises ``EngineStopped`` where that fails: it leaves the
    engine with weights of neither version."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    path, tensors = (weights, None) if isinstance(weights, str) else (None, weights)
    if tensors is not None and not isinstance(engine.model_executor, UniProcExecutor):
        raise ValueError("named tensors reach a worker in this process alone: with more workers pass separate_process=True, or update from a checkpoint folder")
    try:
        engine.collective_rpc("replace_weights", args=(path, tensors))
        engine.collective_rpc("adopt_version", args=(version,))
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the prefix cache is in use")
    except Exception as error:
        raise EngineStopped(f"the vLLM engine could not load new weights: {type(error).__name__}: {error}") from error


def probe_entropy_column(engine: Any) -> None:
    """Compares the entropy column with entropies from all log-probabilities, for a few prompts. Raises ``RuntimeError`` where they differ."""
    size = engine.model_config.get_vocab_size()
    for prompt, temperature in probe_prompts(size):
        column = _first_token(engine, prompt, logprobs=COLUMN, temperature=temperature)
        check_column(size, column, _first_token(engine, prompt, logprobs=-1, temperature=1.0))


def _first_token(engine: Any, prompt: list[int], *, logprobs: int, temperature: float) -> list[float]:
    """The log-probabilities that come with one sampled token."""
    engine.add_request("probe", {"type": "token", "prompt_token_ids": prompt}, probe_params(logprobs=logprobs, temperature=temperature))
    while True:
        for output in engine.step():
            if output.finished:
                return list(output.outputs[0].logprobs.logprobs)


def _release(engine: Any, alone: bool) -> None:
    """Frees what a start took. ``alone``: the process group is the engine's own, and goes too, so that the process can open another."""
    try:
        if engine is not None:
            engine.engine_core.shutdown()
        if alone and torch.distributed.is_initialized():
            from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

            destroy_model_parallel()
            destroy_distributed_environment()
    finally:
        _one.release()
