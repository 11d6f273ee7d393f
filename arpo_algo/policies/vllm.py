"""A policy whose tokens come from a vLLM engine in this process, on the CPU or on GPUs.

Requests join the running batch as they come and leave it when they end; nobody waits for a batch. Turns end by the same code as those of
:class:`~arpo_algo.policies.transformers.TransformersPolicy`, on the ids alone; vLLM neither encodes nor decodes. Keys and values of every block of tokens
stay in the engine's prefix cache, so a branch computes only what it does not share. Entropies are exact, see :mod:`arpo_algo.policies.vllm_worker`.

What a token depends on: its prompt, its parameters, the weights, up to the last bits of the logits, which change with the neighbours in the batch: a draw
that falls within that of a boundary may go the other way. The random numbers of a seed are vLLM's, not those of ``TransformersPolicy``, and differ between
the CPU and a GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from os import PathLike, fspath
from types import SimpleNamespace
from typing import Any, Literal

import torch

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.decoding import DecodingStats
from arpo_algo.policies.model_info import model_context_length, model_eos_ids
from arpo_algo.policies.sampling import seed_key
from arpo_algo.policies.stops import Endings, StopDetector
from arpo_algo.policies.vllm_engine import EngineThread, check_arguments, replace_weights
from arpo_algo.policies.vllm_worker import COLUMNS

_MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, and greedy decoding is asked for with 0."""


@dataclass(slots=True)
class _Request:
    """One turn under way."""

    prompt: list[int]
    params: SamplingParams
    detector: StopDetector | None
    future: Future[Generation] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    joined: bool = False
    """Whether its prompt has been counted."""


class VLLMPolicy:
    """A :class:`~arpo_algo.policies.base.Policy` over a vLLM engine that it starts from a checkpoint.

    A turn ends with an end-of-sequence id, else with the token that completes a stop string, else after ``max_new_tokens``; where several hold for one
    token, in this order. ``stats`` counts what was computed and what the prefix cache held.

    ``path``: a folder or a name on the Hugging Face hub. ``context_length``: tokens of prompt and turn together, from the configuration where not given.
    ``max_batch``: sequences decoded at once; further requests wait their turn. ``eos_ids``: ids that end a turn; None takes those of the generation
    configuration and of the tokenizer. ``dtype``: of weights and cache; None is float32 on the CPU, elsewhere the checkpoint's. ``cache_bytes``: memory for
    keys and values, which must hold one sequence of ``context_length``; None leaves it to vLLM (a share of a GPU's memory). Further arguments go to
    vLLM's ``EngineArgs`` (``tensor_parallel_size``, ``block_size``, ``gpu_memory_utilization``).

    The engine opens a process group of its own in this process where none is open. Call :meth:`close`, or use the policy in a ``with`` statement.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        tokenizer: Any = None,
        context_length: int | None = None,
        max_batch: int = 64,
        eos_ids: Iterable[int] | None = None,
        dtype: str | None = None,
        cache_bytes: int | None = 1 << 30,
        **engine_args: Any,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        check_arguments(engine_args)
        checkpoint = _checkpoint(fspath(path), trust_remote_code=bool(engine_args.get("trust_remote_code", False)))
        self.tokenizer = _tokenizer(fspath(path)) if tokenizer is None else tokenizer
        self.stats = DecodingStats()
        self._context_length = model_context_length(checkpoint) if context_length is None else context_length
        self._eos_ids = frozenset(model_eos_ids(checkpoint, self.tokenizer) if eos_ids is None else eos_ids)
        self._stop_ids = sorted(self._eos_ids)
        self._version = 0
        self._names = itertools.count()
        self._requests: dict[str, _Request] = {}  # touched by the engine's thread alone
        self._endings = Endings(self.tokenizer, self._eos_ids)
        given = {"dtype": dtype, "kv_cache_memory_bytes": cache_bytes}
        arguments = {"model": fspath(path), "max_model_len": self._context_length, "max_num_seqs": max_batch, **engine_args}
        self._engine = EngineThread(arguments | {name: value for name, value in given.items() if value is not None}, self)

    @property
    def version(self) -> int:
        return self._version

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Width of the logits; it may exceed the tokenizer's vocabulary."""
        return self._engine.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continues ``prompt_ids``. Cancelling it takes the request out of the batch.

        Raises ``ValueError`` for an empty prompt, an id outside the vocabulary, an empty stop string, a temperature between 0 and 0.01, and where prompt and
        ``max_new_tokens`` exceed the context; ``EngineStopped`` when the engine fails or is closed.
        """
        request = _Request(self._checked(prompt_ids, params), params, self._endings.detector(params.stop))
        name = str(next(self._names))
        joined = self._engine.call(lambda engine: self._join(engine, name, request))
        joined.add_done_callback(lambda done: _pass_on(done, request.future))
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            self._engine.call(lambda engine: self._cancel(engine, name))
            raise

    def update_weights(self, weights: str | PathLike[str] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes over the learner's weights, bumps ``version`` and drops everything computed with the old ones.

        ``weights``: a checkpoint folder, or the named tensors of a transformers model in this process (``model.state_dict().items()``), whole and not
        sharded. Raises ``RuntimeError`` while requests are under way, whose turns would otherwise be sampled by two versions, and ``EngineStopped`` where
        loading fails.
        """
        if isinstance(weights, str | PathLike):
            path, tensors = fspath(weights), None
            if not os.path.isdir(path):
                raise ValueError(f"expected the folder of a checkpoint, got {path!r}")
        else:
            path, tensors = None, weights
        self._engine.call(lambda engine: self._replace(engine, path, tensors)).result()

    def close(self) -> None:
        """Ends the engine and frees its memory; turns under way fail with ``EngineStopped``."""
        self._engine.close()

    def __enter__(self) -> VLLMPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- in the engine's thread -------------------------------------------------------------------------------------------------------------------

    def _join(self, engine: Any, name: str, request: _Request) -> None:
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        if request.future.cancelled():
            return
        params = request.params
        engine.add_request(
            name,
            {"type": "token", "prompt_token_ids": request.prompt},
            EngineParams(
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=seed_key(params.seed) >> 1,  # 63 bits, which every generator takes
                stop_token_ids=self._stop_ids,
                ignore_eos=True,  # the ids above are all that end a turn
                logprobs=COLUMNS - 1,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        self._requests[name] = request

    def _cancel(self, engine: Any, name: str) -> None:
        if self._requests.pop(name, None) is not None:
            engine.abort_request([name])

    def _replace(self, engine: Any, path: str | None, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        if self._requests:
            raise RuntimeError(f"the weights changed while {len(self._requests)} requests were under way; wait for them first")
        replace_weights(engine, path, tensors)
        self._version += 1

    def receive(self, output: Any) -> bool:
        """Adds the new tokens of a request; True when it has ended."""
        request = self._requests.get(output.request_id)
        if request is None:
            return False
        if not request.joined:
            request.joined = True
            self.stats.reused_tokens += output.num_cached_tokens
            self.stats.prefilled_tokens += len(request.prompt) - output.num_cached_tokens
        completion = output.outputs[0]
        for token, (logprob, entropy) in zip(completion.token_ids, _pairs(completion.logprobs), strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            self.stats.decoded_tokens += 1
            if not math.isfinite(logprob + entropy):
                error = FloatingPointError(f"expected logits that make a distribution, got log-probability {logprob} and entropy {entropy} from vLLM")
                return self._end(output.request_id, error)
            reason, stop = self._endings.of(request.ids, request.detector, request.params.max_new_tokens)
            if reason is not None:
                return self._end(output.request_id, self._generation(request, reason, stop))
        if output.finished:
            return self._end(output.request_id, RuntimeError(f"vLLM ended a turn of {len(request.ids)} tokens for the reason {completion.finish_reason!r}"))
        return False

    def stepped(self, seconds: float) -> None:
        self.stats.forward_calls += 1
        self.stats.forward_seconds += seconds

    def stopped(self, error: Exception) -> None:
        for name in list(self._requests):
            self._end(name, error)

    def _generation(self, request: _Request, reason: Literal["eos", "stop", "length"], stop: str | None) -> Generation:
        return Generation(
            token_ids=request.ids,
            logprobs=request.logprobs,
            entropies=request.entropies,
            stop_reason=reason,
            stop_string=stop,
            version=self._version,
        )

    def _end(self, name: str, outcome: Generation | Exception) -> bool:
        future = self._requests.pop(name).future
        if future.set_running_or_notify_cancel():
            if isinstance(outcome, Generation):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        return True

    # --- construction and checks ------------------------------------------------------------------------------------------------------------------

    def _checked(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        prompt = [int(i) for i in prompt_ids]
        if not prompt:
            raise ValueError("expected a prompt of at least 1 token, got none")
        if len(prompt) + params.max_new_tokens > self._context_length:
            raise ValueError(f"prompt ({len(prompt)} tokens) and max_new_tokens ({params.max_new_tokens}) exceed the context of {self._context_length}")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(f"expected ids in [0, {self.vocab_size}), got {min(prompt)} to {max(prompt)}")
        if 0 < params.temperature < _MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {_MIN_TEMPERATURE} with vLLM, got {params.temperature}")
        return prompt


def _pass_on(joined: Future[None], turn: Future[Generation]) -> None:
    """Gives the error of a request that could not join to whoever waits for its turn."""
    error = joined.exception()
    if error is not None and turn.set_running_or_notify_cancel():
        turn.set_exception(error)


def _pairs(logprobs: Any) -> list[tuple[float, float]]:
    """(log-probability of the sampled token, entropy) for each position of vLLM's flat log-probabilities."""
    return [(logprobs.logprobs[start], logprobs.logprobs[end - 1]) for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)]


def _checkpoint(path: str, *, trust_remote_code: bool) -> Any:
    """The configurations of a checkpoint, under the names that a transformers model has for them."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # none is saved: transformers' models then take it from the configuration
        generation = GenerationConfig.from_model_config(config)
    return SimpleNamespace(config=config, generation_config=generation)


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
