"""A policy whose tokens come from a vLLM engine, in this process or in others, on the CPU or on GPUs.

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
from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import Any, Literal

import torch

from arpo_algo.policies.base import Generation, SamplingParams, check_prompt
from arpo_algo.policies.decoding import DecodingStats
from arpo_algo.policies.model_info import checkpoint_info, model_context_length, model_eos_ids
from arpo_algo.policies.stops import Endings
from arpo_algo.policies.vllm_adapters import Adapters
from arpo_algo.policies.vllm_async import AsyncEngine
from arpo_algo.policies.vllm_engine import EngineThread
from arpo_algo.policies.vllm_lora import lora_arguments
from arpo_algo.policies.vllm_start import check_arguments
from arpo_algo.policies.vllm_transfer import Transport
from arpo_algo.policies.vllm_turns import Engine, Turn, Turns, folder_or_tensors

_MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, and greedy decoding is asked for with 0."""


class VLLMPolicy:
    """A :class:`~arpo_algo.policies.base.Policy` over a vLLM engine that it starts from a checkpoint.

    A turn ends with an end-of-sequence id, else with the token that completes a stop string, else after ``max_new_tokens``; where several hold for one
    token, in this order. ``stats`` counts what was computed and what the prefix cache held; steps and their seconds only of an engine in this process.

    ``path``: a folder or a name on the Hugging Face hub. ``context_length``: tokens of prompt and turn together, from the configuration where not given.
    ``max_batch``: sequences decoded at once; further requests wait their turn. ``eos_ids``: ids that end a turn; None takes those of the generation
    configuration and of the tokenizer. ``dtype``: of weights and cache; None is float32 on the CPU, elsewhere the checkpoint's. ``cache_bytes``: memory for
    keys and values, which must hold one sequence of ``context_length``; None is 1 GiB on the CPU, on a GPU the share of its memory that vLLM takes. Further
    arguments go to vLLM's ``EngineArgs`` (``tensor_parallel_size``, ``data_parallel_size``, ``block_size``, ``gpu_memory_utilization``).

    ``separate_process``: the engine runs in processes of its own, several where it is parallel, and leaves this one as it is: other engines and a learner
    with process groups can live here. They are started by spawning, so a script has its entry under ``if __name__ == "__main__":``. With
    ``data_parallel_size`` the turns of one tree (``SamplingParams.tree``) go to one engine, whose cache holds their prefix. ``transport``: the way of tensors
    into those processes; None chooses (:func:`~arpo_algo.policies.vllm_transfer.default_transport`). Without ``separate_process`` the engine opens a process
    group in this process where none is open, and is the only one here.

    ``sleeps``: :meth:`sleep` can be called. ``lora_rank``: the engine serves LoRA adapters of up to this rank, see :meth:`update_adapter`.

    Call :meth:`close`, or use the policy in a ``with`` statement.
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
        cache_bytes: int | None = None,
        separate_process: bool = False,
        sleeps: bool = False,
        transport: Transport | None = None,
        lora_rank: int | None = None,
        **engine_args: Any,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        check_arguments(engine_args)
        checkpoint = checkpoint_info(fspath(path), trust_remote_code=bool(engine_args.get("trust_remote_code", False)))
        self.tokenizer = _tokenizer(fspath(path)) if tokenizer is None else tokenizer
        self.stats = DecodingStats()
        self._context_length = model_context_length(checkpoint) if context_length is None else context_length
        self._eos_ids = frozenset(model_eos_ids(checkpoint, self.tokenizer) if eos_ids is None else eos_ids)
        self._version = 0
        self._names = itertools.count()
        self._endings = Endings(self.tokenizer, self._eos_ids)
        self.sleeps = sleeps
        self._asleep: list[Literal["weights", "kv_cache"]] = []
        given = {"dtype": dtype, "kv_cache_memory_bytes": cache_bytes, **({} if lora_rank is None else lora_arguments(lora_rank))}
        arguments = {"model": fspath(path), "max_model_len": self._context_length, "max_num_seqs": max_batch, "enable_sleep_mode": sleeps, **engine_args}
        arguments |= {name: value for name, value in given.items() if value is not None}
        turns = Turns(self._endings, self._eos_ids, self.stats)
        self._engine: Engine = AsyncEngine(arguments, turns, transport) if separate_process else EngineThread(arguments, turns)
        self._adapters = None if lora_rank is None else Adapters(self._engine, turns)

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
        turn = Turn(self._checked(prompt_ids, params), params, self._endings.detector(params.stop))
        name = str(next(self._names))
        self._engine.join(name, turn)
        try:
            return await asyncio.wrap_future(turn.future)
        except asyncio.CancelledError:
            self._engine.leave(name)
            raise

    def update_weights(self, weights: str | PathLike[str] | Iterable[tuple[str, torch.Tensor]], *, keep_requests: bool = False) -> None:
        """Takes over the learner's weights, bumps ``version`` and drops everything computed with the old ones.

        ``weights``: a checkpoint folder, or the named tensors of a transformers model (``model.state_dict().items()``), whole and not sharded. A policy that
        sleeps wakes up for them, the memory of the weights first and that of the cache when they are in place.
        ``keep_requests``: turns under way go on with the new weights, for which their keys and values are computed anew; ``Generation.versions`` says which
        tokens are whose. Without it, raises ``RuntimeError`` while requests are under way. Raises ``EngineStopped`` where loading fails.
        """
        if self._adapters is not None:
            raise RuntimeError("a policy with lora_rank serves adapters beside weights that stay: call update_adapter")
        source = folder_or_tensors(weights)
        self._wake("weights")
        self._engine.update(source, self._version + 1, keep_requests=keep_requests)
        self._version += 1
        self._wake("kv_cache")

    @property
    def serves_adapters(self) -> bool:
        """Whether new weights come as LoRA adapters, by :meth:`update_adapter`."""
        return self._adapters is not None

    def update_adapter(self, model: Any) -> None:
        """Serves the LoRA adapter of a peft model from the next turn on, beside the weights of ``path``, and bumps ``version``.

        Turns under way end with the adapter they began with. Raises ``ValueError`` where vLLM cannot serve all of the adapter; the one before goes on then.
        """
        if self._adapters is None:
            raise RuntimeError("the engine was started without room for adapters: pass lora_rank to VLLMPolicy")
        self.wake()
        self._adapters.serve(model, self._version + 1)
        self._version += 1

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache until new weights come or :meth:`wake` is called; on the CPU, where vLLM has no such mode, it stays.

        Raises ``RuntimeError`` while requests are under way, and where the policy was made without ``sleeps``. ``generate`` raises one until it is awake.
        """
        if not self.sleeps:
            raise RuntimeError("the engine was started without sleep mode: pass sleeps=True to VLLMPolicy")
        if not self._asleep:
            self._engine.sleep()
            self._asleep = ["weights", "kv_cache"]

    def wake(self) -> None:
        """Takes the memory back, with the weights as they were; turns can be sampled again."""
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, memory: Literal["weights", "kv_cache"]) -> None:
        if memory in self._asleep:
            self._engine.wake(memory)
            self._asleep.remove(memory)

    def close(self) -> None:
        """Ends the engine and frees its memory; turns under way fail with ``EngineStopped``."""
        self._engine.close()
        if self._adapters is not None:
            self._adapters.close()

    def __enter__(self) -> VLLMPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- construction and checks ------------------------------------------------------------------------------------------------------------------

    def _checked(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        prompt = [int(i) for i in prompt_ids]
        check_prompt(prompt, params, context_length=self._context_length, vocab_size=self.vocab_size)
        if 0 < params.temperature < _MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {_MIN_TEMPERATURE} with vLLM, got {params.temperature}")
        return prompt


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
