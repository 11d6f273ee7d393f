"""What every vLLM engine of :class:`~arpo_algo.policies.vllm.VLLMPolicy` needs before its first request, wherever it runs: the arguments that the policy
relies on, the environment, and the check of the entropy column.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from arpo_algo.policies.vllm_worker import COLUMNS

_log = logging.getLogger(__name__)
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Defaults for vLLM's environment. It would log every start on fifty lines, report its use to its authors, and pin this process to the first core; with
multiprocessing on, an engine on the CPU puts its one worker into yet another process, which imports everything once more."""
_FIXED = {
    "worker_extension_cls": "arpo_algo.policies.vllm_shared_memory.WeightReceiver",
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


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises ``ImportError`` without vLLM and ``ValueError`` for an engine argument that the policy sets itself; loads nothing heavy."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("VLLMPolicy needs vLLM: pip install 'arpo[vllm]' for GPUs, or the CPU build with what constraints-vllm.txt lists")
    if taken := sorted((_FIXED.keys() | {"enable_sleep_mode", "weight_transfer_config"}) & arguments.keys()):
        raise ValueError(f"the policy sets these engine arguments itself: {', '.join(taken)}")


def set_environment() -> None:
    """Sets the defaults of vLLM's environment variables in this process."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` for ``EngineArgs``, with what the policy relies on and what the platform needs."""
    if not on_cpu():
        return {**arguments, **_FIXED}
    if arguments["enable_sleep_mode"]:
        _log.warning("vLLM has no sleep mode on the CPU: a sleeping engine keeps its memory")
    return {**_cpu_defaults(arguments), **arguments, **_FIXED, "enable_sleep_mode": False}


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@contextmanager
def arguments_explained() -> Iterator[None]:
    """Adds to a ``ValueError`` of vLLM's what its arguments are called in the policy."""
    try:
        yield
    except ValueError as error:
        error.add_note("In VLLMPolicy max_model_len is context_length, max_num_seqs is max_batch, and cache_bytes is the memory for the cache blocks.")
        raise


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
        "kv_cache_memory_bytes": 1 << 30,  # not a share of the machine's memory
    }


@contextmanager
def own_random_state() -> Iterator[None]:
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


@contextmanager
def own_environment() -> Iterator[None]:
    """Keeps the environment variables of this process as they are; those that start meanwhile inherit what vLLM sets."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


# --- the probe of the entropy column ------------------------------------------------------------------------------------------------------------------


def probe_prompts(vocab_size: int) -> list[tuple[list[int], float]]:
    """A few prompts, with the temperatures at which the entropy column is asked for. Shorter than a block: never from the cache."""
    return [([(7 * number + 3 * position) % vocab_size for position in range(1 + 2 * number)], t) for number, t in enumerate((0.0, 1.0, 0.5))]


def probe_params(*, logprobs: int, temperature: float) -> Any:
    """vLLM's parameters for one token with ``logprobs`` log-probabilities beside its own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,
        logprobs=logprobs,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


COLUMN = COLUMNS - 1
"""``logprobs`` of a request that wants the entropy column."""


def check_column(vocab_size: int, with_column: Sequence[float], with_all: Sequence[float]) -> None:
    """Raises ``RuntimeError`` where the entropy column differs from the entropy of all log-probabilities.

    Both are what vLLM returned for one token after the same prompt: the sampled id's log-probability first, then the column, or those of all ids.
    """
    logp = np.array(with_all[1:], np.float64)
    logp -= np.log(np.sum(np.exp(logp)))  # float32 leaves up to 1e-4 of a large vocabulary's mass out
    expected = -float(np.sum(np.exp(logp) * np.maximum(logp, -750.0)))
    column = with_column[-1]
    if len(logp) != vocab_size or not abs(column - expected) < _PROBE_TOLERANCE:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} reports the entropy {column:.6f} where its {len(logp)} log-probabilities of a vocabulary of {vocab_size} give"
            f" {expected:.6f}: this version's sampler does not fit arpo_algo/policies/vllm_worker.py; 0.32 is known to"
        )
