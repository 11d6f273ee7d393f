"""A policy that runs any ``AutoModelForCausalLM`` in this process, on the CPU or one GPU, and shares the module with the learner.

Continuous batching without threads: one task in the caller's event loop runs a decode step for all requests at once and then yields, so requests join at
any step and leave when they are done. The task ends when no request is left.

What a token depends on: its prompt, its parameters, the weights. Its random number is a function of the seed and its index in the turn (see
:mod:`arpo_algo.policies.sampling`), and the shapes of a step are chosen so that on the CPU a row's numbers do not change with its neighbours. That holds for
small models such as the quickstart's; for wide ones, and on GPUs, matrix kernels add in another order from one batch size to another. Logits may then differ
in the last bits, and a draw that falls within that of a boundary between two ids may go the other way.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import torch

from arpo_algo.checkpoint import copy_weights, read_weights
from arpo_algo.policies.base import Generation, SamplingParams, check_prompt
from arpo_algo.policies.decoding import MIN_BASE, CachedDecoder, Decoder, DecodingStats, RecomputingDecoder, evaluating, why_not_cached
from arpo_algo.policies.kv_buffers import Ids
from arpo_algo.policies.model_info import model_context_length, model_eos_ids, model_vocab_size
from arpo_algo.policies.sampling import sample, seed_key, uniforms
from arpo_algo.policies.stops import Endings, StopDetector

_SHARED_LOADING = ("gguf_file", "revision", "subfolder", "trust_remote_code", "token", "cache_dir", "local_files_only")
"""Arguments of ``from_pretrained`` that say where the files are, and so concern the tokenizer as well as the model."""


@dataclass(slots=True)
class _Request:
    """One turn under way."""

    prompt: Ids
    params: SamplingParams
    future: asyncio.Future[Generation]
    key: int
    detector: StopDetector | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


class TransformersPolicy:
    """A :class:`~arpo_algo.policies.base.Policy` over a transformers causal language model.

    A turn ends with an end-of-sequence id, else with the token that completes a stop string, else after ``max_new_tokens``; where several hold for one
    token, in this order. ``stats`` counts what was computed and what was reused.

    ``max_batch``: sequences decoded at once; further requests wait their turn. ``context_length``: tokens of prompt and turn together, from the
    configuration where not given. ``eos_ids``: ids that end a turn; None takes those of the generation configuration and of the tokenizer. ``device``:
    where to move the model; None leaves it. ``cache_bytes``: memory for keys and values; finished turns are kept for their continuations and branches
    as long as they fit, sequences under way always are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        max_batch: int = 64,
        context_length: int | None = None,
        eos_ids: Iterable[int] | None = None,
        device: torch.device | str | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.model = model if device is None else model.to(device)  # a model object stays where it is
        self.tokenizer = tokenizer
        self.stats = DecodingStats()
        self._max_batch = max_batch
        self._context_length = model_context_length(model) if context_length is None else context_length
        self._vocab_size = model_vocab_size(model)
        self._eos_ids = frozenset(model_eos_ids(model, tokenizer) if eos_ids is None else eos_ids)
        self._version = 0
        self._waiting: deque[_Request] = deque()
        self._active: list[_Request] = []  # a request's place here is its slot in the decoder
        self._endings = Endings(self.tokenizer, self._eos_ids)
        self._loop_task: asyncio.Task[None] | None = None
        self._decoder = self._choose_decoder(cache_bytes)
        self._refresh()

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        *,
        tokenizer: Any = None,
        max_batch: int = 64,
        context_length: int | None = None,
        eos_ids: Iterable[int] | None = None,
        device: torch.device | str | None = None,
        cache_bytes: int = 1 << 30,
        **model_kwargs: Any,
    ) -> TransformersPolicy:
        """The policy of a checkpoint, in float32 unless ``dtype`` says otherwise, on the first GPU where there is one unless ``device`` does.

        Further arguments go to ``AutoModelForCausalLM.from_pretrained`` (``gguf_file``, ``attn_implementation``).
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # transformers keeps the checkpoint's type; 16-bit weights lose most of an update at the learning rates of fine-tuning.
        model = AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32} | model_kwargs)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(path, **{name: model_kwargs[name] for name in _SHARED_LOADING if name in model_kwargs})
        return cls(model, tokenizer, max_batch=max_batch, context_length=context_length, eos_ids=eos_ids, device=device, cache_bytes=cache_bytes)

    @property
    def version(self) -> int:
        return self._version

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Width of the logits; it may exceed the tokenizer's vocabulary."""
        return self._vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def cached(self) -> bool:
        """Whether the model decodes with the shared cache; otherwise every token recomputes its sequence."""
        return isinstance(self._decoder, CachedDecoder)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continues ``prompt_ids``.

        Raises ``ValueError`` for an empty prompt, an id outside the vocabulary, an empty stop string, and where prompt and ``max_new_tokens`` exceed the
        context. An exception inside a decode step reaches every request under way.
        """
        loop = asyncio.get_running_loop()
        prompt = self._checked(prompt_ids, params)
        request = _Request(prompt, params, loop.create_future(), seed_key(params.seed), self._endings.detector(params.stop))
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = loop.create_task(self._run())
        elif self._loop_task.get_loop() is not loop:
            raise RuntimeError("generate was called from a second event loop while requests of the first are under way")
        self._waiting.append(request)
        return await request.future

    def weights_updated(self) -> None:
        """Says that the parameters have changed: bumps ``version`` and drops everything computed with the old ones. Raises ``RuntimeError`` while requests
        are under way, whose turns would otherwise be sampled by two versions."""
        self._check_idle()
        self._forget()
        self._version += 1

    def _check_idle(self) -> None:
        under_way = sum(not request.future.done() for request in (*self._active, *self._waiting))
        if under_way:
            raise RuntimeError(f"the weights changed while {under_way} requests were under way; wait for them first")

    def update_weights(self, weights: str | PathLike[str] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights into the model: those of a checkpoint folder, or named tensors, under the names of the checkpoint. For a policy with a model of
        its own; one that shares the learner's is told by :meth:`weights_updated`.

        Raises ``RuntimeError`` while requests are under way, and where names or shapes differ: nothing is copied then.
        """
        self._check_idle()
        copy_weights(self.model, read_weights(weights) if isinstance(weights, str | PathLike) else dict(weights))
        self.weights_updated()

    def close(self) -> None:
        """Frees the cache."""
        self._decoder.clear()

    # --- the loop -------------------------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._active or self._waiting:
                self._step()
                await asyncio.sleep(0)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):  # the event loop is closing, or a second Ctrl-C came in the middle of a forward
            for request in (*self._active, *self._waiting):
                request.future.cancel()
            self._forget()
            raise
        except Exception as exc:
            failed = [request for request in (*self._active, *self._waiting) if not request.future.done()]
            self._forget()
            for request in failed:
                request.future.set_exception(exc)

    def _step(self) -> None:
        """One token for every request under way."""
        with torch.inference_mode(), evaluating(self.model):
            self._drop_cancelled()
            self._admit()
            if not self._active:
                return
            logits = self._decoder.step()
            ids, logprobs, entropies = sample(logits, uniforms(self._keys, self._index), self._temperature, self._top_p)
            self._decoder.append(ids)
            self._index += np.uint64(1)
            self.stats.decoded_tokens += len(ids)
            self._collect(ids.tolist(), logprobs.tolist(), entropies.tolist())

    def _drop_cancelled(self) -> None:
        if any(request.future.cancelled() for request in self._active):
            for slot in reversed(range(len(self._active))):
                if self._active[slot].future.cancelled():
                    self._leave(slot)
            self._refresh()

    def _admit(self) -> None:
        joining: list[_Request] = []
        while self._waiting and len(self._active) + len(joining) < self._max_batch:
            request = self._waiting.popleft()
            if not request.future.cancelled():
                joining.append(request)
        if joining:
            # In _active before the prefill: if that raises, the requests must still be known.
            known = len(self._active)
            self._active += joining
            order = self._decoder.join([request.prompt for request in joining], [request.params.tree for request in joining])
            self._active[known:] = [joining[i] for i in order]
            self._refresh()

    def _collect(self, ids: list[int], logprobs: list[float], entropies: list[float]) -> None:
        """Adds a token to every request and answers those that end with it."""
        for slot in reversed(range(len(ids))):  # from the end: what moves into a slot that falls free has been looked at
            request = self._active[slot]
            request.ids.append(ids[slot])
            request.logprobs.append(logprobs[slot])
            request.entropies.append(entropies[slot])
            reason, stop = self._endings.of(request.ids, request.detector, request.params.max_new_tokens)
            if reason is not None:
                self._leave(slot)
                if not request.future.done():
                    request.future.set_result(
                        Generation(
                            token_ids=request.ids,
                            logprobs=request.logprobs,
                            entropies=request.entropies,
                            stop_reason=reason,
                            stop_string=stop,
                            version=self._version,
                        )
                    )
        if len(self._active) != len(ids):
            self._refresh()

    def _leave(self, slot: int) -> None:
        self._decoder.leave(slot)
        self._active[slot] = self._active[-1]
        self._active.pop()

    def _forget(self) -> None:
        self._active.clear()
        self._waiting.clear()
        self._decoder.clear()
        self._refresh()

    def _refresh(self) -> None:
        """Sampling parameters of the slots as arrays, rebuilt when the set of requests changes."""
        self._keys = np.array([request.key for request in self._active], np.uint64)
        self._index = np.array([len(request.ids) for request in self._active], np.uint64)
        self._temperature = np.array([request.params.temperature for request in self._active], np.float64)
        self._top_p = np.array([request.params.top_p for request in self._active], np.float64)

    # --- construction and checks ------------------------------------------------------------------------------------------------------------------

    def _choose_decoder(self, cache_bytes: int) -> Decoder:
        for min_base in (MIN_BASE, None):
            reason = why_not_cached(self.model, self._context_length, self._vocab_size, bases=min_base is not None)
            if reason is None:
                return CachedDecoder(self.model, self.stats, max_bytes=cache_bytes, min_base=min_base)
        warnings.warn(f"{type(self.model).__name__} cannot share a KV cache between trajectories, every token recomputes its sequence: {reason}", stacklevel=3)
        return RecomputingDecoder(self.model, self.stats)

    def _checked(self, prompt_ids: Sequence[int], params: SamplingParams) -> Ids:
        if len(prompt_ids) > self._context_length:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens, the context holds {self._context_length}")
        check_prompt(prompt_ids, params, context_length=self._context_length, vocab_size=self._vocab_size)
        return np.array(prompt_ids, np.int64)
