"""What the rollout loop asks of a policy: token ids in, token ids out, with the numbers that branching and training need.

A policy never sees text on the way in and never re-encodes its own output. Whatever runs behind it (transformers, vLLM, a script), two calls with the
same ids, parameters and weights give the same tokens, whatever else is running beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, Protocol, runtime_checkable

from arpo_algo.entropy import EntropyBounds, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one turn is sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy decoding. Log-probabilities are those of the distribution that was sampled from, temperature included."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """The turn ends with the token that completes one of these strings in the decoded text; that token is kept whole."""
    seed: int = 0
    """Seed of this turn alone."""
    tree: int | None = None
    """The rollout tree that the turn belongs to. Changes no token: several engines keep the turns of one tree on one of them, whose cache holds the prefix."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def check_prompt(prompt_ids: Sequence[int], params: SamplingParams, *, context_length: int, vocab_size: int) -> None:
    """Raises ``ValueError`` for an empty prompt, an id outside the vocabulary, and where prompt and ``max_new_tokens`` exceed the context."""
    if not len(prompt_ids):
        raise ValueError("expected a prompt of at least 1 token, got none")
    if len(prompt_ids) + params.max_new_tokens > context_length:
        raise ValueError(f"prompt ({len(prompt_ids)} tokens) and max_new_tokens ({params.max_new_tokens}) exceed the context of {context_length}")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise ValueError(f"expected ids in [0, {vocab_size}), got {min(prompt_ids)} to {max(prompt_ids)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled turn. The three lists have one entry for each sampled token."""

    token_ids: list[int]
    """Sampled ids, the end token included where one was sampled."""
    logprobs: list[float]
    """Natural log of the probability of each id under the distribution it was sampled from. Greedy: of the untempered distribution."""
    entropies: list[float]
    """Entropy of the next-token distribution before each id: nats, full vocabulary, temperature 1. Estimates where there are ``bounds``."""
    bounds: EntropyBounds | None = None
    """Where the entropies lie, for each id, when the policy could only estimate them; None: they are exact."""
    stop_reason: Literal["eos", "stop", "length"]
    stop_string: str | None = None
    version: int = 0
    """Version of the weights that sampled the turn; of its first token where they changed under way."""
    versions: list[int] = field(default_factory=list)
    """Version that sampled each token; empty where all are ``version``."""

    def window(self, size: int) -> Window:
        """The entropies of the first ``size`` tokens."""
        return Window(values=tuple(self.entropies[:size]), bounds=None if self.bounds is None else self.bounds.head(size))


class Policy(Protocol):
    """A source of turns. ``generate`` may be awaited many times at once; the policy batches as it likes."""

    @property
    def version(self) -> int:
        """Counts weight updates; every :class:`Generation` carries the one it was sampled with."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and turn may have together."""
        ...

    @property
    def vocab_size(self) -> int: ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids``. Raises ``ValueError`` when prompt and ``max_new_tokens`` exceed ``context_length``."""
        ...


@runtime_checkable
class ServedPolicy(Policy, Protocol):
    """A policy with weights of its own, which a learner elsewhere sends it anew after each update."""

    def update_weights(self, weights: str | PathLike[str] | Iterable[tuple[str, Any]]) -> None:
        """Take over weights, bump ``version`` and drop everything computed with the old ones; returns when they are in place.

        ``weights``: a checkpoint folder, or pairs of name and tensor under the names of the checkpoint, whole and not sharded. Raises ``RuntimeError`` while
        requests are under way, whose turns would otherwise be sampled by two versions.
        """
        ...

    def close(self) -> None:
        """Free what the policy holds. Can be called twice."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """What a policy on the learner's own GPU has beside the rest: it gives its memory back while the learner works."""

    @property
    def sleeps(self) -> bool:
        """Whether it was set up to."""
        ...

    def sleep(self) -> None:
        """Give up weights and cache; ``update_weights`` wakes it. No request may be under way."""
        ...


@runtime_checkable
class AdapterServer(Protocol):
    """What a policy has beside the rest that can serve LoRA adapters on top of weights that stay."""

    @property
    def serves_adapters(self) -> bool:
        """Whether it was set up to; ``update_weights`` is then refused."""
        ...

    def update_adapter(self, model: Any) -> None:
        """Serve the adapter of a peft model from the next turn on, and bump ``version``."""
        ...
