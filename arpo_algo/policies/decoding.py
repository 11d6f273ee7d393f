"""Next-token logits for a changing set of sequences: with the shared KV cache, or by recomputing everything where a model cannot use that.

Both decoders keep sequences in slots 0 .. n-1. ``join`` appends, ``leave(i)`` moves the last slot into i, ``step`` returns the logits after each
sequence and ``append`` adds the sampled ids. The last known token of a sequence is always fed by ``step``, also the last token of a prompt: a prefill
therefore needs no logits, and a sequence whose prompt is cached joins without a forward of its own.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from arpo_algo.policies.base_attention import base_attention
from arpo_algo.policies.kv_buffers import Ids
from arpo_algo.policies.kv_cache import NO_BASE, KVCache, common_prefix

MIN_BASE = 256
"""Fewest tokens of a prompt that the trajectories of a tree share as a base; see :mod:`arpo_algo.policies.base_attention`. Below, a second attention call for
each tree and layer costs more than it saves: 16 trees of 8 rows in a model of 0.2M parameters break even here, 16 rows of one tree in one of 135M at 200."""
_MIN_SHARED = 16
"""Prompts that join together and share at least this many uncached tokens are prefilled one after the other, so that the second reuses the first; sharing
less does not pay for another forward call."""
_PREFILL_TOKENS = 4096
"""Most tokens of one prefill call, padding included; bounds its activations."""
_MIN_ROWS = 4
"""A decode step computes at least this many rows where the cache has them: CPU matrix kernels treat one to three rows apart, and a sequence should get the
same numbers alone as in company."""


@dataclass(slots=True)
class DecodingStats:
    """Counters since construction. Every prompt token is either prefilled or reused."""

    prefilled_tokens: int = 0
    """Prompt tokens computed."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were in the cache."""
    decoded_tokens: int = 0
    """Tokens sampled."""
    computed_tokens: int = 0
    """Tokens that went through the model, each time one did: with nothing computed twice, at most the unique tokens of the trees. The last token of a
    trajectory never does."""
    padding_tokens: int = 0
    """What went through it beside them, to fill rows and lengths of a batch."""
    forward_calls: int = 0
    forward_seconds: float = 0.0


class Decoder(Protocol):
    def join(self, prompts: Sequence[Ids], trees: Sequence[int | None]) -> list[int]:
        """Adds sequences, which may belong to trees; returns the order (indices into ``prompts``) in which they took the new slots."""
        ...

    def step(self) -> torch.Tensor:
        """Logits after each sequence, (slots, vocabulary)."""
        ...

    def append(self, ids: Ids) -> None:
        """Adds one sampled id to each sequence."""
        ...

    def leave(self, slot: int) -> None:
        """Removes a sequence; the last slot moves into its place."""
        ...

    def clear(self) -> None:
        """Removes all sequences and forgets everything that depends on the weights."""
        ...


class CachedDecoder:
    """Decoding with a :class:`KVCache`: a step feeds one token a sequence, a prefill the tokens that no row holds yet.

    ``min_base``: where the first prompt of a tree has more tokens than this, all but its last are a base that the sequences of the tree share; None: never.
    So where a sequence is cut depends on its own tree alone, and its numbers do not depend on whether the others are there.
    """

    def __init__(self, model: torch.nn.Module, stats: DecodingStats, *, max_bytes: int, min_base: int | None = None) -> None:
        self._model = _Forward(model, stats)
        self._stats = stats
        self._min_base = min_base
        self._openings: dict[int, tuple[int, int]] = {}  # length and hash of the first prompt of each tree, without its last token
        self.cache = KVCache(max_bytes=max_bytes, shares=min_base is not None)

    def join(self, prompts: Sequence[Ids], trees: Sequence[int | None]) -> list[int]:
        bases = self._bases(prompts, trees)
        own = [prompt if base == NO_BASE else prompt[len(self.cache.bases[base].ids) :] for prompt, base in zip(prompts, bases, strict=True)]
        order: list[int] = []
        waiting = list(range(len(prompts)))
        while waiting:
            found = {i: self.cache.find(own[i], bases[i]) for i in waiting}
            wave, waiting = self._wave(own, bases, {i: held.tokens for i, held in found.items()})
            first = self.cache.active
            for i in wave:
                reused = self.cache.claim(own[i], bases[i], found[i])
                self._stats.reused_tokens += reused
                self._stats.prefilled_tokens += len(own[i]) - reused
            self._prefill(np.array(self.cache.in_use[first:]), np.array([len(own[i]) - 1 for i in wave]))
            order += wave
        return order

    def step(self) -> torch.Tensor:
        cache, active = self.cache, self.cache.active
        cache.reserve(int(cache.lengths[cache.in_use].max()) + 1)
        cache.compact()
        counts = np.zeros(min(max(active, _MIN_ROWS), cache.rows), np.int64)
        counts[:active] = 1
        logits = self._feed(cache, np.arange(len(counts)), counts)[:, -1]
        slots = np.array(cache.in_use)
        return logits[:active] if (slots == np.arange(active)).all() else logits[torch.from_numpy(slots).to(logits.device)]

    def append(self, ids: Ids) -> None:
        cache = self.cache
        cache.reserve(int(cache.lengths[cache.in_use].max()) + 1)
        cache.tokens[cache.in_use, cache.lengths[cache.in_use]] = ids

    def leave(self, slot: int) -> None:
        self.cache.release(slot)

    def clear(self) -> None:
        self.cache.clear()
        self._openings.clear()

    def _bases(self, prompts: Sequence[Ids], trees: Sequence[int | None]) -> list[int]:
        """The number of each prompt's base; those that are not there yet are computed."""
        openings = [self._opening(prompt, tree) for prompt, tree in zip(prompts, trees, strict=True)]
        found = [NO_BASE if opening is None else self.cache.find_base(opening) for opening in openings]
        self.cache.trim_bases(keep={number for number in found if number is not None})
        return [self._base(opening) if opening is not None else NO_BASE for opening in openings]

    def _opening(self, prompt: Ids, tree: int | None) -> Ids | None:
        """What the prompt shares with the other sequences of its tree as a base, if anything."""
        if tree is None or self._min_base is None:
            return None
        length, known = self._openings.get(tree, (len(prompt), 0))
        if length >= len(prompt) or hash(prompt[:length].tobytes()) != known:  # the first of its tree, or of another with the same number
            length = len(prompt) - 1
            self._openings[tree] = length, hash(prompt[:length].tobytes())
        return prompt[:length] if length >= self._min_base else None

    def _base(self, opening: Ids) -> int:
        """The number of the base of these tokens, computed where it is new."""
        number = self.cache.find_base(opening)
        if number is None:
            number = self.cache.add_base(opening)
        cache = self.cache.bases[number].cache
        if computed := len(opening) - int(cache.lengths[0]):  # new, or its forward raised
            self._feed(cache, np.zeros(1, np.int64), np.array([computed]))
        self._stats.prefilled_tokens += computed
        self._stats.reused_tokens += len(opening) - computed
        return number

    def _wave(self, prompts: Sequence[Ids], bases: Sequence[int], cached: dict[int, int]) -> tuple[list[int], list[int]]:
        """Splits the prompts of which ``cached`` tokens are known into those to prefill now, longest remainder first, and those that reuse one of them
        afterwards."""
        wave: list[int] = []
        later: list[int] = []
        for i, known in cached.items():
            alike = (prompts[j] for j in wave if bases[i] == bases[j] and known < len(prompts[j]) and prompts[i][known] == prompts[j][known])
            shared = max((common_prefix(prompts[i], prompt) for prompt in alike), default=0)
            rest = len(prompts[i]) - 1
            if shared - known >= _MIN_SHARED or (shared >= rest > known):
                later.append(i)
            else:
                wave.append(i)
        return sorted(wave, key=lambda i: cached[i] - len(prompts[i])), later

    def _prefill(self, rows: Ids, targets: Ids) -> None:
        """Computes rows up to ``targets`` tokens, neighbours of similar remainders in one padded call."""
        counts = np.trim_zeros(targets - self.cache.lengths[rows], "b")
        done = 0
        while done < len(counts):
            some = counts[done : done + max(1, _PREFILL_TOKENS // max(1, int(counts[done])))]
            if some.any():
                self._feed(self.cache, rows[done : done + len(some)], some)
            done += len(some)

    def _feed(self, cache: KVCache, rows: Ids, counts: Ids) -> torch.Tensor:
        """Feeds the next ``counts[i]`` known tokens of ``rows[i]``; the logits after the last of them."""
        inputs = cache.inputs(rows, counts, dtype=self._model.dtype, device=self._model.device)
        with base_attention(self._model.module) if cache.shares else nullcontext():
            logits = self._model(keep=1, past_key_values=cache, use_cache=True, **inputs)
        cache.computed(rows, counts)
        tokens = int(counts.sum())
        self._stats.computed_tokens += tokens
        self._stats.padding_tokens += inputs["input_ids"].numel() - tokens
        return logits


class RecomputingDecoder:
    """Decoding by a full forward over the right-padded sequences for every token: right for every causal model, and slow."""

    def __init__(self, model: torch.nn.Module, stats: DecodingStats) -> None:
        self._model = _Forward(model, stats)
        self._stats = stats
        self._sequences: list[list[int]] = []

    def join(self, prompts: Sequence[Ids], trees: Sequence[int | None]) -> list[int]:
        self._sequences += [prompt.tolist() for prompt in prompts]
        self._stats.prefilled_tokens += sum(map(len, prompts))
        return list(range(len(prompts)))

    def step(self) -> torch.Tensor:
        ends = np.array([len(sequence) - 1 for sequence in self._sequences])
        ids = np.zeros((len(ends), ends.max() + 1), np.int64)
        for row, sequence in enumerate(self._sequences):
            ids[row, : len(sequence)] = sequence
        self._stats.computed_tokens += sum(map(len, self._sequences))
        self._stats.padding_tokens += ids.size - sum(map(len, self._sequences))
        # No mask: nothing to the right of a token changes it in a causal model, recurrent layers included.
        kept, column = np.unique(ends, return_inverse=True)
        device = self._model.device
        logits = self._model(keep=torch.from_numpy(kept).to(device), input_ids=torch.from_numpy(ids).to(device), use_cache=False)
        return logits[np.arange(len(ends)), column if self._model.keeps else ends]

    def append(self, ids: Ids) -> None:
        for sequence, token in zip(self._sequences, ids.tolist(), strict=True):
            sequence.append(token)

    def leave(self, slot: int) -> None:
        self._sequences[slot] = self._sequences[-1]
        self._sequences.pop()

    def clear(self) -> None:
        self._sequences.clear()


def why_not_cached(model: torch.nn.Module, context_length: int, vocab_size: int, *, bases: bool) -> str | None:
    """The reason why this model cannot decode with the shared cache, or None where it can; ``bases``: with shared openings besides, which need a CPU kernel.

    A window of attention shorter than the context is refused, since a short trial cannot see it. Everything else is tried: random sequences (a padded
    batch, a twin, a continuation and a branch) are decoded with the cache and compared with plain forwards of each sequence alone. The tolerance is 1e-4
    of the largest logit in float32 and 8 rounding steps in narrower types.
    """
    window = _attention_window(model)
    if window is not None and window < context_length:
        return f"its attention window of {window} tokens is shorter than the context of {context_length} (a context_length up to the window would do)"
    if bases and (device := _Forward(model, DecodingStats()).device.type) != "cpu":
        return f"it is on {device}"
    if context_length < 8:
        return f"a context of {context_length} tokens is too short to try it"
    try:
        error, scale = _trial(model, min(context_length, 40), vocab_size, 1 if bases else None)
    except Exception as exc:  # whatever a model does with a cache it does not know, recomputing still works
        return f"its forward raised {type(exc).__name__} with it: {exc}"
    allowed = max(1e-4, 8 * torch.finfo(_Forward(model, DecodingStats()).dtype).eps) * scale
    return None if error <= allowed else f"its logits are off by {error:.2g} with it, more than {allowed:.2g}"


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode restored after: frozen parts of a training model may be in evaluation mode on purpose."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Forward:
    """Calls a model, counts and times it, and asks for the logits of some positions only where it can be asked."""

    def __init__(self, model: torch.nn.Module, stats: DecodingStats) -> None:
        self.module = model
        self._stats = stats
        wrapped: Any = model
        base = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped  # peft wraps forward(*args, **kwargs)
        self.keeps = "logits_to_keep" in inspect.signature(base.forward).parameters

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.module.parameters() if p.dtype.is_floating_point)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def __call__(self, *, keep: int | torch.Tensor, **inputs: Any) -> torch.Tensor:
        started = time.perf_counter()
        logits: torch.Tensor = self.module(**inputs, **({"logits_to_keep": keep} if self.keeps else {})).logits
        self._stats.forward_calls += 1
        self._stats.forward_seconds += time.perf_counter() - started
        return logits


def _attention_window(model: torch.nn.Module) -> int | None:
    """The shortest limit on how far back a layer attends, where the configuration names one."""
    config: Any = model.config
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ())
    limits = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention", "window_size": "local"}
    sizes = [getattr(config, name, None) for name, kind in limits.items() if kind in kinds or (name == "sliding_window" and not kinds)]
    return min((size for size in sizes if size), default=None)


def _trial(model: torch.nn.Module, length: int, vocab_size: int, min_base: int | None) -> tuple[float, float]:
    """Largest difference between cached and plain logits over a short script of joins, steps and leaves, and the largest plain logit."""
    rng = np.random.default_rng(0)
    decoder = CachedDecoder(model, DecodingStats(), max_bytes=1 << 30, min_base=min_base)
    plain = _Forward(model, DecodingStats())
    a, b, c = (rng.integers(0, vocab_size, n) for n in (length // 2, length // 4, length // 2))
    slots: list[NDArray[np.int64]] = []
    error = scale = 0.0

    def join(*prompts: Ids, trees: Sequence[int | None]) -> None:
        slots.extend(prompts[i] for i in decoder.join(prompts, trees))

    def step() -> None:
        nonlocal error, scale
        logits = decoder.step().float()
        ids = rng.integers(0, vocab_size, len(slots))
        for slot, sequence in enumerate(slots):
            row = torch.from_numpy(sequence)[None].to(plain.device)
            expected = plain(keep=1, input_ids=row, use_cache=False)[0, -1].float()
            differences = torch.where(logits[slot] == expected, 0.0, logits[slot] - expected)  # logits may be -inf
            error = max(error, float(differences.abs().nan_to_num(torch.inf).max()))
            scale = max(scale, float(expected[expected.isfinite()].abs().max()))
            slots[slot] = np.append(sequence, ids[slot])
        decoder.append(ids)

    with torch.inference_mode(), evaluating(model):
        join(a, b, a, trees=(0, 1, 0))
        step()
        step()
        ended = slots[0]
        decoder.leave(0)
        slots[0] = slots[-1]
        slots.pop()
        tail = c[: length // 4]
        join(np.concatenate((ended, tail)), np.concatenate((ended, tail)), np.concatenate((ended[: length // 4], tail)), trees=(0, 0, None))
        step()
        step()
    return error, scale
