"""Whether the weights that serve are those that were trained: log-probabilities of the served policy beside the learner's, for the same tokens.

Weights that did not arrive, a cache of old keys and values, an output head left as it was, an adapter that is not applied: each goes unnoticed, since the
policy goes on writing sensible text. Each shows here, in a few dozen tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from arpo_algo.policies.base import Generation, Policy, SamplingParams

Logprobs: TypeAlias = Callable[[list[int], int], list[float]]
"""``logprobs(ids, start)``: log-probabilities of ``ids[start:]``, each after all ids before it, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two sets of log-probabilities lie apart, over the same tokens."""

    max_abs: float
    """Largest absolute difference, in nats. In float32 about 1e-5; in bfloat16 a few tenths."""
    mean_abs: float
    """Mean absolute difference, in nats."""
    tokens: int
    """How many tokens were compared."""
    version: int
    """Version of the weights that sampled them."""

    def check(self, tolerance: float) -> None:
        """Raises ``RuntimeError`` where the largest difference exceeds ``tolerance`` nats."""
        if not self.max_abs <= tolerance:
            raise RuntimeError(
                f"the served policy does not agree with the learner: over {self.tokens} tokens of version {self.version} their log-probabilities differ by"
                f" up to {self.max_abs:.3g} nats (mean {self.mean_abs:.3g}), expected at most {tolerance:.3g}: weights that did not arrive, or other numerics"
            )


async def agreement(policy: Policy, logprobs: Logprobs, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 8) -> Agreement:
    """The agreement of ``policy`` with ``logprobs`` on one short turn for each prompt, sampled at temperature 1, all at once.

    Raises ``ValueError`` without prompts and where ``logprobs`` gives another number of values than there are tokens, and ``RuntimeError`` where the weights
    change meanwhile.
    """
    if not prompts:
        raise ValueError("expected at least one prompt to compare log-probabilities on, got none")
    params = [SamplingParams(max_new_tokens=max_new_tokens, seed=seed) for seed in range(len(prompts))]
    turns = await asyncio.gather(*(policy.generate(list(prompt), p) for prompt, p in zip(prompts, params, strict=True)))
    versions = sorted({version for turn in turns for version in (turn.version, *turn.versions)})
    if len(versions) > 1:
        raise RuntimeError(f"the weights changed while they were compared: tokens of versions {', '.join(map(str, versions))}")
    gaps = [gap for prompt, turn in zip(prompts, turns, strict=True) for gap in _gaps(list(prompt), turn, logprobs)]
    return Agreement(max_abs=max(gaps), mean_abs=math.fsum(gaps) / len(gaps), tokens=len(gaps), version=versions[0])


def logprobs_of(model: torch.nn.Module) -> Logprobs:
    """The log-probabilities of a transformers model in this process, from one plain forward of the whole sequence."""
    language_model: Any = model

    def logprobs(ids: list[int], start: int) -> list[float]:
        device = next(model.parameters()).device
        training = model.training
        model.eval()  # without dropout
        try:
            with torch.no_grad():
                logits = language_model(input_ids=torch.tensor([ids], device=device)).logits[0, start - 1 : -1].float()  # (new tokens, vocabulary)
        finally:
            model.train(training)
        new = torch.tensor(ids[start:], device=device).unsqueeze(-1)
        return [float(value) for value in logits.log_softmax(-1).gather(-1, new)]

    return logprobs


def differences(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Absolute differences, infinite where there is no number: a comparison with NaN passes unseen."""
    gaps = [abs(a - b) for a, b in zip(some, others, strict=True)]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]


def _gaps(prompt: list[int], turn: Generation, logprobs: Logprobs) -> list[float]:
    """Differences for the tokens of one turn."""
    learned = logprobs(prompt + turn.token_ids, len(prompt))
    if len(learned) != len(turn.token_ids):
        raise ValueError(f"expected {len(turn.token_ids)} log-probabilities from the learner, one for each token of the turn, got {len(learned)}")
    return differences(turn.logprobs, learned)
