"""A policy that plays a script, for tests and benchmarks of everything around a policy: no model, no randomness of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arpo_algo.policies.base import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """What to answer. ``tokens`` as ids or as text, which the policy's tokenizer encodes without special tokens; single numbers count for every token."""

    tokens: Sequence[int] | str
    entropies: Sequence[float] | float = 0.0
    logprobs: Sequence[float] | float | None = None
    """None: minus the entropy of the token, which is its expected value."""
    stop_reason: Literal["eos", "stop", "length"] = "eos"
    stop_string: str | None = None


class ScriptedPolicy:
    """A :class:`~arpo_algo.policies.base.Policy` that answers ``turn(prompt_ids, seed)``; a turn longer than ``max_new_tokens`` is cut.

    ``tokenizer`` needs ``encode(text, add_special_tokens=False)`` for turns given as text, and its length is the vocabulary size. ``calls`` counts
    turns, ``prompt_tokens`` and ``sampled_tokens`` what went in and came out.
    """

    def __init__(self, tokenizer: Any, turn: Callable[[tuple[int, ...], int], ScriptedTurn], *, context_length: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.turn = turn
        self.context_length = context_length
        self.vocab_size = len(tokenizer)
        self.version = 0
        self.calls = self.prompt_tokens = self.sampled_tokens = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        if len(prompt_ids) + params.max_new_tokens > self.context_length:
            raise ValueError(f"prompt ({len(prompt_ids)} tokens) and max_new_tokens ({params.max_new_tokens}) exceed the context of {self.context_length}")
        self.calls += 1
        self.prompt_tokens += len(prompt_ids)
        turn = self.turn(tuple(prompt_ids), params.seed)
        ids = self.tokenizer.encode(turn.tokens, add_special_tokens=False) if isinstance(turn.tokens, str) else list(turn.tokens)
        entropies = _spread(turn.entropies, len(ids))
        logprobs = [-h for h in entropies] if turn.logprobs is None else _spread(turn.logprobs, len(ids))
        cut, kept = len(ids) > params.max_new_tokens, slice(params.max_new_tokens)
        self.sampled_tokens += len(ids[kept])
        return Generation(
            token_ids=ids[kept],
            logprobs=logprobs[kept],
            entropies=entropies[kept],
            stop_reason="length" if cut else turn.stop_reason,
            stop_string=None if cut else turn.stop_string,
            version=self.version,
        )

    def weights_updated(self) -> None:
        self.version += 1


def _spread(values: Sequence[float] | float, n: int) -> list[float]:
    """One value a token."""
    if isinstance(values, (int, float)):
        return [float(values)] * n
    if len(values) != n:
        raise ValueError(f"expected one value for each of the {n} tokens, got {len(values)}")
    return list(values)
