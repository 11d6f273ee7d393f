"""A vLLM engine inside this process, with a thread of its own.

vLLM's in-process engine is synchronous: somebody has to call ``step``, and nobody else may touch it meanwhile. Everything that happens to the engine
therefore happens in one thread, between two steps; requests join the running batch there and leave it there.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from arpo_algo.policies.vllm_worker import COLUMNS

T = TypeVar("T")

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Defaults for vLLM's environment. It would log every start on fifty lines, report its use to its authors, and pin this process to the first core."""
_FIXED = {
    "worker_extension_cls": "arpo_algo.policies.vllm_worker.EntropyColumn",
    "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from: temperature and top_p included
    "max_logprobs": -1,  # the probe asks for all
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "speculative_config": None,  # its rejection sampler has no entropy column
}
"""Engine arguments on which the policy relies."""
_PROBE_TOLERANCE = 1e-4
"""Nats. The probe compares numbers of one computation in float32; a column that holds something else is off by far more."""
_one = threading.Lock()
"""Held while an engine runs. vLLM keeps an engine's process groups in globals of its module: closing a second engine would break the first."""


class EngineStopped(RuntimeError):
    """The engine failed or was closed; nothing more can be sampled with it."""


class Listener(Protocol):
    """What the engine's thread calls."""

    def receive(self, output: Any) -> bool:
        """Takes the new tokens of a request; True when the request has ended and can leave the batch."""
        ...

    def stepped(self, seconds: float) -> None:
        """A step is over; it took the engine ``seconds``."""
        ...

    def stopped(self, error: Exception) -> None:
        """No request will be answered any more."""
        ...


class EngineThread:
    """Starts an engine with ``arguments`` and steps it for as long as it has requests. Raises here what the start raises.

    Raises ``RuntimeError`` where this process runs another engine.
    """

    def __init__(self, arguments: dict[str, Any], listener: Listener) -> None:
        if not _one.acquire(blocking=False):
            raise RuntimeError("this process runs a vLLM engine already: close its policy first, or start this one in a process of its own")
        self._commands: queue.SimpleQueue[Callable[[Any], object] | None] = queue.SimpleQueue()
        self._listener = listener
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

    def close(self) -> None:
        """Ends the thread and frees the engine's memory; requests under way fail. Can be called twice."""
        atexit.unregister(self.close)
        self._commands.put(None)
        self._thread.join()

    def _run(self, arguments: dict[str, Any], started: Future[Any]) -> None:
        engine, alone = None, not torch.distributed.is_initialized()
        try:
            with _own_random_state():
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
        self._listener.stepped(time.perf_counter() - started)
        ended = [output.request_id for output in outputs if self._listener.receive(output) and not output.finished]
        if ended:
            engine.abort_request(ended)

    def _stop(self, error: EngineStopped) -> None:
        with self._lock:
            self._stopped = error
        self._listener.stopped(error)
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command(None)


def start_engine(arguments: dict[str, Any]) -> Any:
    """An engine that runs in this process; its workers do too where there is one."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    defaults = _cpu_defaults(arguments) if current_platform.is_cpu() else {}
    try:
        config = EngineArgs(**{**defaults, **arguments, **_FIXED}).create_engine_config()
        engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    except ValueError as error:
        error.add_note("In VLLMPolicy max_model_len is context_length, max_num_seqs is max_batch, and cache_bytes is the memory for the cache blocks.")
        raise
    engine.collective_rpc("add_entropy_column")
    return engine


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises ``ImportError`` without vLLM and ``ValueError`` for an engine argument that the policy sets itself; loads nothing heavy."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("VLLMPolicy needs vLLM: pip install 'arpo[vllm]' for GPUs, or the CPU build with what constraints-vllm.txt lists")
    if taken := sorted(_FIXED.keys() & arguments.keys()):
        raise ValueError(f"the policy sets these engine arguments itself: {', '.join(taken)}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _cpu_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """What an engine on the CPU needs and ``arguments`` may not say."""
    if arguments.get("enable_chunked_prefill"):
        # A prompt cut in two rewinds its request's random generator, which PyTorch's CPU generator cannot do: the engine dies of the first one.
        raise ValueError("vLLM on the CPU cannot prefill in chunks when requests have seeds: leave enable_chunked_prefill out")
    return {
        "dtype": "float32",  # 16-bit arithmetic is emulated on most processors
        "enforce_eager": True,  # compiling takes a C++ compiler and a minute, and gains nothing for small models
        "block_size": 32,  # the least there is; what a branch shares is rounded down to it
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(arguments["max_model_len"], 4096),
    }


def replace_weights(engine: Any, path: str | None, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
    """Loads weights from a checkpoint or from named tensors and forgets all keys and values. Raises ``EngineStopped`` where that fails: it leaves the engine
    with weights of neither version."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if tensors is not None and not isinstance(engine.model_executor, UniProcExecutor):
        raise ValueError("named tensors reach a worker in this process alone: with more workers, update from a checkpoint folder")
    try:
        engine.collective_rpc("replace_weights", args=(path, tensors))
        if not engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")
    except Exception as error:
        raise EngineStopped(f"the vLLM engine could not load new weights: {type(error).__name__}: {error}") from error


def probe_entropy_column(engine: Any) -> None:
    """Compares the entropy column with entropies from all log-probabilities, for a few prompts. Raises ``RuntimeError`` where they differ."""
    size = engine.model_config.get_vocab_size()
    for number, temperature in enumerate((0.0, 1.0, 0.5)):
        prompt = [(7 * number + 3 * position) % size for position in range(1 + 2 * number)]  # shorter than a block: never from the cache
        column = _first_token(engine, prompt, logprobs=COLUMNS - 1, temperature=temperature)[-1]
        logp = np.array(_first_token(engine, prompt, logprobs=-1, temperature=1.0)[1:], np.float64)
        logp -= np.log(np.sum(np.exp(logp)))  # float32 leaves up to 1e-4 of a large vocabulary's mass out
        expected = -float(np.sum(np.exp(logp) * np.maximum(logp, -750.0)))
        if len(logp) != size or not abs(column - expected) < _PROBE_TOLERANCE:
            import vllm

            raise RuntimeError(
                f"vLLM {vllm.__version__} reports the entropy {column:.6f} where its {len(logp)} log-probabilities of a vocabulary of {size} give"
                f" {expected:.6f}: this version's sampler does not fit arpo_algo/policies/vllm_worker.py; 0.32 is known to"
            )


def _first_token(engine: Any, prompt: list[int], *, logprobs: int, temperature: float) -> list[float]:
    """The log-probabilities that come with one sampled token."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=temperature, seed=0, logprobs=logprobs, flat_logprobs=True, detokenize=False, ignore_eos=True)
    engine.add_request("probe", {"type": "token", "prompt_token_ids": prompt}, params)
    while True:
        for output in engine.step():
            if output.finished:
                return list(output.outputs[0].logprobs.logprobs)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Keeps the global random generators as they are: an engine seeds them all when it starts."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


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
