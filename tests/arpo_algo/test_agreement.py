"""Agreement of a served policy with the learner, on a policy that plays back turns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
import torch

from arpo_algo.policies.agreement import Agreement, Logprobs, agreement, logprobs_of
from arpo_algo.policies.base import Generation, SamplingParams


class Played:
    """Answers a prompt with one token for each of ``logprobs``: the ids 10, 11, ..."""

    version, context_length, vocab_size = 3, 100, 50

    def __init__(self, logprobs: dict[int, list[float]], versions: dict[int, list[int]] | None = None) -> None:
        self.logprobs, self.versions = logprobs, versions or {}
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.asked.append((list(prompt_ids), params))
        await asyncio.sleep(0)
        logprobs = self.logprobs[prompt_ids[0]]
        ids = [10 + i for i in range(len(logprobs))]
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            entropies=[0.0] * len(ids),
            stop_reason="length",
            version=self.version,
            versions=self.versions.get(prompt_ids[0], []),
        )


def always(value: float) -> Logprobs:
    return lambda ids, start: [value] * (len(ids) - start)


def compared(policy: Played, logprobs: Logprobs, prompts: Sequence[Sequence[int]]) -> Agreement:
    return asyncio.run(agreement(policy, logprobs, prompts, max_new_tokens=4))


def test_differences_over_all_tokens_of_all_turns() -> None:
    policy = Played({1: [-1.0, -1.5], 2: [-0.25]})
    seen: list[tuple[list[int], int]] = []

    def logprobs(ids: list[int], start: int) -> list[float]:
        seen.append((ids, start))
        return [-1.0] * (len(ids) - start)

    got = compared(policy, logprobs, [(1, 1, 1), [2]])
    # |-1 + 1| = 0, |-1.5 + 1| = 0.5, |-0.25 + 1| = 0.75; mean 1.25 / 3
    assert got == Agreement(max_abs=0.75, mean_abs=pytest.approx(1.25 / 3), tokens=3, version=3)
    assert seen == [([1, 1, 1, 10, 11], 3), ([2, 10], 1)]
    assert [(params.max_new_tokens, params.temperature, params.top_p, params.seed) for _, params in policy.asked] == [(4, 1.0, 1.0, 0), (4, 1.0, 1.0, 1)]


def test_the_check_says_how_far_apart() -> None:
    got = compared(Played({1: [-1.0, -1.5]}), always(-1.0), [[1]])
    got.check(0.5)
    with pytest.raises(RuntimeError, match=r"over 2 tokens of version 3 .* up to 0\.5 nats \(mean 0\.25\), expected at most 0\.4"):
        got.check(0.4)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_never_agrees(value: float) -> None:
    with pytest.raises(RuntimeError, match="up to inf nats"):
        compared(Played({1: [-1.0, value]}), always(-1.0), [[1]]).check(1e9)
    with pytest.raises(RuntimeError, match="up to inf nats"):
        compared(Played({1: [-1.0]}), always(value), [[1]]).check(1e9)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        compared(Played({}), always(0.0), [])
    with pytest.raises(ValueError, match="expected 2 log-probabilities from the learner, one for each token of the turn, got 3"):
        compared(Played({1: [-1.0, -1.0]}), lambda ids, start: [0.0] * len(ids), [[1]])
    with pytest.raises(RuntimeError, match="the weights changed while they were compared: tokens of versions 3, 4"):
        compared(Played({1: [-1.0, -1.0]}, {1: [3, 4]}), always(0.0), [[1]])


class TwoTokens(torch.nn.Module):
    """A language model of two ids: the next is the last one with log-odds of its parameter. Dropout of everything where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.odds = torch.nn.Parameter(torch.tensor(math.log(3.0)))

    def forward(self, input_ids: torch.Tensor) -> object:
        logits = torch.nn.functional.one_hot(input_ids, 2) * self.odds * (0.0 if self.training else 1.0)
        return type("Output", (), {"logits": logits})


def test_logprobs_of_a_model() -> None:
    model = TwoTokens().train()
    # After 0: P(0) = 3/4, P(1) = 1/4; after 1 the other way round.
    assert logprobs_of(model)([0, 0, 1, 1], 2) == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    assert logprobs_of(model)([0, 0, 1, 1], 1) == pytest.approx([math.log(3 / 4), math.log(1 / 4), math.log(3 / 4)])
    assert model.training
