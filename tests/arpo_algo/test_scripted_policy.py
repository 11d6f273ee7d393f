"""The scripted policy plays its script, cuts it at the limit and counts."""

from __future__ import annotations

import asyncio

import pytest

from arpo_algo.policies.base import SamplingParams
from arpo_algo.policies.scripted import ScriptedPolicy, ScriptedTurn


class Letters:
    def __len__(self) -> int:
        return 26

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) - 97 for c in text]


def test_plays_the_script_of_prompt_and_seed() -> None:
    policy = ScriptedPolicy(Letters(), lambda prompt, seed: ScriptedTurn("abc" if seed else [7], entropies=float(len(prompt))))
    first = asyncio.run(policy.generate([1, 2], SamplingParams(max_new_tokens=5, seed=1)))
    assert (first.token_ids, first.entropies, first.logprobs, first.stop_reason) == ([0, 1, 2], [2.0] * 3, [-2.0] * 3, "eos")
    policy.weights_updated()
    second = asyncio.run(policy.generate([3], SamplingParams(max_new_tokens=5, seed=0)))
    assert (second.token_ids, second.version, first.version) == ([7], 1, 0)
    assert (policy.calls, policy.prompt_tokens, policy.sampled_tokens, policy.vocab_size) == (2, 3, 4, 26)


def test_cuts_at_max_new_tokens() -> None:
    turn = ScriptedTurn("abcd", entropies=[1, 2, 3, 4], logprobs=-0.5, stop_reason="stop", stop_string="d")
    policy = ScriptedPolicy(Letters(), lambda prompt, seed: turn)
    cut = asyncio.run(policy.generate([0], SamplingParams(max_new_tokens=3)))
    assert (cut.token_ids, cut.entropies, cut.logprobs, cut.stop_reason, cut.stop_string) == ([0, 1, 2], [1, 2, 3], [-0.5] * 3, "length", None)
    whole = asyncio.run(policy.generate([0], SamplingParams(max_new_tokens=4)))
    assert (whole.stop_reason, whole.stop_string) == ("stop", "d")


def test_refuses_what_a_model_would_refuse() -> None:
    policy = ScriptedPolicy(Letters(), lambda prompt, seed: ScriptedTurn("ab", entropies=[1.0]), context_length=4)
    with pytest.raises(ValueError, match=r"prompt \(3 tokens\) and max_new_tokens \(2\) exceed the context of 4"):
        asyncio.run(policy.generate([0, 0, 0], SamplingParams(max_new_tokens=2)))
    with pytest.raises(ValueError, match="each of the 2 tokens, got 1"):
        asyncio.run(policy.generate([0], SamplingParams(max_new_tokens=2)))
