"""TransformersPolicy against a slow reference: a plain full forward for every token, with the same sampling function."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from policy_cases import COMMON, SMALL, VOCAB, Letters, cache_of, llama, prompt, right, same
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.kv_cache import KVCache
from arpo_algo.policies.transformers import TransformersPolicy


def qwen2() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, **SMALL, max_position_embeddings=256)).eval()


def gpt2(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=96, **kwargs)).eval()


def mamba() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**COMMON, hidden_size=32, state_size=8, num_hidden_layers=2)).eval()


def mistral() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**COMMON, **SMALL, max_position_embeddings=64, sliding_window=16)).eval()


class TableModel(torch.nn.Module):
    """The next token is ``table[last token]``, near-certainly. ``fail_at``: the forward call that raises."""

    def __init__(self, table: Sequence[int], *, eos: Any = None) -> None:
        super().__init__()
        self.head = torch.nn.Parameter(torch.full((len(table), len(table)), -40.0))
        with torch.no_grad():
            self.head[torch.arange(len(table)), torch.tensor(table)] = 40.0
        self.config = SimpleNamespace(max_position_embeddings=128, vocab_size=len(table), get_text_config=lambda: self.config)
        self.generation_config = SimpleNamespace(eos_token_id=eos)
        self.calls = 0
        self.fail_at = -1

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of memory, says the test")
        return SimpleNamespace(logits=self.head[input_ids])


async def after(steps: int, call: Coroutine[Any, Any, Generation]) -> Generation:
    for _ in range(steps):
        await asyncio.sleep(0)
    return await call


def together(policy: TransformersPolicy, requests: Sequence[tuple[list[int], SamplingParams]], stagger: int = 0) -> list[Generation]:
    async def main() -> list[Generation]:
        calls = (after(stagger * (i * 5 % 7), policy.generate(ids, params)) for i, (ids, params) in enumerate(requests))
        return await asyncio.gather(*calls)

    return asyncio.run(main())


def mixed(n: int, longest: int = 60) -> list[tuple[list[int], SamplingParams]]:
    """Requests of unlike lengths and parameters; every third shares a prefix with the one before it."""
    rng = np.random.default_rng(1)
    out: list[tuple[list[int], SamplingParams]] = []
    for i in range(n):
        ids = prompt(int(rng.integers(1, longest)), i)
        if i % 3 == 2:
            shared = out[-1][0]
            ids = (shared[: len(shared) * 2 // 3] + ids)[:longest]
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 24)), temperature=(1.0, 0.7, 0.0, 1.3)[i % 4], top_p=(1.0, 0.8, 1.0)[i % 3], seed=i)
        out.append((ids, params))
    return out


# --- the same tokens as the reference --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, qwen2, gpt2, lambda: llama(attn_implementation="eager")])
@pytest.mark.parametrize("stagger", [0, 1])
def test_many_requests_equal_the_reference(make: Callable[[], Any], stagger: int) -> None:
    model = make()
    policy = TransformersPolicy(model, Letters(), max_batch=7)
    assert policy.cached and policy.vocab_size == VOCAB
    requests = mixed(24)
    for got, (ids, params) in zip(together(policy, requests, stagger), requests, strict=True):
        right(model, ids, params, got)
    assert policy.stats.prefilled_tokens + policy.stats.reused_tokens == sum(len(ids) for ids, _ in requests)
    assert policy.stats.decoded_tokens == sum(params.max_new_tokens for _, params in requests)
    assert policy.stats.reused_tokens > 0 and policy.stats.forward_seconds > 0


def test_a_request_depends_on_itself_alone() -> None:
    model = llama()
    requests = mixed(16)
    crowd = together(TransformersPolicy(model, Letters()), requests)
    policy = TransformersPolicy(model, Letters(), max_batch=3)
    for i in (15, 3, 8, 0):
        same(asyncio.run(policy.generate(*requests[i])), crowd[i])
    again = asyncio.run(policy.generate(requests[4][0], SamplingParams(max_new_tokens=20, seed=77)))
    other = asyncio.run(policy.generate(requests[4][0], SamplingParams(max_new_tokens=20, seed=78)))
    assert again.token_ids != other.token_ids


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_a_learner_computes(temperature: float) -> None:
    model = llama()
    ids, params = prompt(20), SamplingParams(max_new_tokens=30, temperature=temperature, seed=3)
    got = asyncio.run(TransformersPolicy(model, Letters()).generate(ids, params))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + got.token_ids])).logits[0, len(ids) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    ratio = (logp.gather(-1, torch.tensor(got.token_ids)[:, None])[:, 0] - torch.tensor(got.logprobs)).exp()
    assert float((ratio - 1).abs().max()) < 1e-5
    p = torch.softmax(logits, -1)
    np.testing.assert_allclose(got.entropies, -(p * p.log()).sum(-1), atol=1e-5)  # temperature 1 whatever was sampled


# --- what is reused ---------------------------------------------------------------------------------------------------------------------------------


def test_a_prompt_asked_for_many_times_is_computed_once() -> None:
    policy = TransformersPolicy(llama(), Letters())
    together(policy, [(prompt(30), SamplingParams(max_new_tokens=4, seed=i)) for i in range(8)])
    # 29 tokens in one prefill; the last token of a prompt is fed by the first decode step in each of the 8 rows
    assert (policy.stats.prefilled_tokens, policy.stats.reused_tokens, policy.stats.decoded_tokens) == (29 + 8, 7 * 29, 32)
    assert policy.stats.forward_calls == 1 + 4


def test_a_shared_system_prompt_is_computed_once() -> None:
    model = llama()
    policy = TransformersPolicy(model, Letters())
    system = prompt(40, 99)
    requests = [([*system, i, *prompt(5 + i, i)], SamplingParams(max_new_tokens=6, seed=i)) for i in range(6)]
    for got, (ids, params) in zip(together(policy, requests), requests, strict=True):
        right(model, ids, params, got)
    assert policy.stats.reused_tokens == 5 * 40
    assert policy.stats.forward_calls == 2 + 6  # one prefill for the first, one for the other five


def test_continuation_and_branches_compute_only_what_is_new() -> None:
    model = gpt2()
    policy = TransformersPolicy(model, Letters())
    start = prompt(20)
    turn = asyncio.run(policy.generate(start, SamplingParams(max_new_tokens=10)))
    branch_point = start + turn.token_ids + prompt(6, 5)  # 36 tokens, of which the row holds 20 + 10 - 1: the last sampled one was never fed
    before = policy.stats.prefilled_tokens, policy.stats.reused_tokens
    requests = [(branch_point, SamplingParams(max_new_tokens=12, seed=i)) for i in range(4)]
    for got, (ids, params) in zip(together(policy, requests), requests, strict=True):
        right(model, ids, params, got)
    assert policy.stats.prefilled_tokens - before[0] == 7 + 3 * 1
    assert policy.stats.reused_tokens - before[1] == 29 + 3 * 35
    # A branch from the middle of the tree, later: the first turn of the parent again.
    late = start + turn.token_ids[:5] + prompt(3, 6)
    params = SamplingParams(max_new_tokens=8)
    right(model, late, params, asyncio.run(policy.generate(late, params)))
    assert policy.stats.reused_tokens - before[1] == 29 + 3 * 35 + 25


def test_idle_rows_give_way_and_results_stay() -> None:
    model = llama()
    row_bytes = 2 * 2 * 2 * 8 * 4 * 64  # layers, keys and values, heads, head_dim, float32, capacity
    policy = TransformersPolicy(model, Letters(), max_batch=4, cache_bytes=10 * row_bytes)

    async def trajectory(i: int) -> None:
        context = prompt(6 + i, i)
        for turn in range(3):
            params = SamplingParams(max_new_tokens=4 + i % 3, seed=10 * i + turn)
            got = await policy.generate(context, params)
            right(model, context, params, got)
            context = context + got.token_ids + prompt(3, turn)

    async def main() -> None:
        await asyncio.gather(*(trajectory(i) for i in range(25)))

    asyncio.run(main())
    assert cache_of(policy).rows <= 10 and cache_of(policy).active == 0
    assert policy.stats.reused_tokens > 0


def test_rows_in_use_are_never_refused() -> None:
    model = llama()
    policy = TransformersPolicy(model, Letters(), max_batch=12, cache_bytes=1)
    requests = [(prompt(50, i), SamplingParams(max_new_tokens=30, seed=i)) for i in range(14)]  # past a capacity of 64
    for got, (ids, params) in zip(together(policy, requests, stagger=1), requests, strict=True):
        right(model, ids, params, got)


# --- the cache itself -------------------------------------------------------------------------------------------------------------------------------


def filled(cache: KVCache, *rows: Sequence[int]) -> None:
    """Rows whose keys are their ids and whose values are the negated ids."""
    for ids in rows:
        cache.claim(np.array([*ids, 0]))
        row = np.array(cache.in_use[-1:])
        counts = len(ids) - cache.lengths[row]
        if not counts.any():
            continue
        inputs = cache.inputs(row, counts, dtype=torch.float32, device=torch.device("cpu"))
        states = inputs["input_ids"][:, None, :, None].float()
        cache.update(states, -states, 0)
        cache.computed(row, counts)


def held(cache: KVCache, row: int) -> list[float]:
    """What a row holds, whether in use or idle."""
    keys, values = (layers[0][row, 0, : cache.lengths[row], 0] for layers in (cache.buffers.keys, cache.buffers.values))
    assert torch.equal(keys, -values)
    return [float(k) for k in keys]


def test_rows_follow_their_tokens_through_claims_releases_and_growth() -> None:
    cache = KVCache(max_bytes=10**6, rows=2, capacity=4)
    filled(cache, [1, 2, 3], [4, 5], [1, 2, 9, 8, 7])  # the third grows rows and capacity and copies [1, 2]
    assert cache.rows == 4 and cache.capacity == 8
    assert [held(cache, i) for i in range(3)] == [[1, 2, 3], [4, 5], [1, 2, 9, 8, 7]]
    cache.release(0)
    assert cache.in_use == [2, 1], "the last slot took the place of the first, and no row moved"
    assert cache.find(np.array([1, 2, 3, 6])).tokens == 3 and cache.find(np.array([1, 2, 3])).tokens == 2
    assert cache.claim(np.array([1, 2, 3, 6])) == 3  # taken over where it is
    assert cache.in_use == [2, 1, 0] and held(cache, 0) == [1, 2, 3]
    assert cache.claim(np.array([4, 5, 6])) == 2  # the row that has it is in use: copied
    assert cache.in_use[3] == 3 and held(cache, 3) == [4, 5] and held(cache, 1) == [4, 5]


def test_before_a_step_the_rows_in_use_are_the_first_ones() -> None:
    cache = KVCache(max_bytes=10**6, rows=6, capacity=4)
    filled(cache, [1], [2, 2], [3, 3, 3], [4, 4], [5])
    cache.claim(np.array([6]))  # a slot that has nothing yet
    for slot in (0, 1, 0):  # rows 0, 1 and 5, the last slot of the time
        cache.release(slot)
    assert cache.in_use == [3, 4, 2]
    cache.compact()
    assert cache.in_use == [0, 1, 2], "the gaps used longest ago are filled first"
    assert [held(cache, row) for row in cache.in_use] == [[4, 4], [5], [3, 3, 3]]
    assert [held(cache, row) for row in (3, 4)] == [[1], [2, 2]] and cache.lengths[5] == 0
    assert [cache.find(np.array([i, i, i, 0])).tokens for i in range(1, 7)] == [1, 2, 3, 2, 1, 0]
    cache.compact()
    assert cache.in_use == [0, 1, 2]


def test_rows_apart_are_written_and_read_as_neighbours_are() -> None:
    cache = KVCache(max_bytes=10**6, rows=6, capacity=8)
    filled(cache, [1, 2], [3], [4, 5, 6], [7])
    for row, ids in ((3, [7, 8, 9]), (1, [3, 1])):
        cache.tokens[row, : len(ids)] = ids
    rows, counts = np.array([3, 1]), np.array([2, 1])
    inputs = cache.inputs(rows, counts, dtype=torch.float32, device=torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [[8, 9, 9, 9], [1, 1, 1, 1]] and inputs["position_ids"].tolist() == [[1, 2, 2, 2], [1, 1, 1, 1]]
    states = inputs["input_ids"][:, None, :, None].float()
    keys, values = cache.update(states, -states, 0)
    cache.computed(rows, counts)
    assert keys[:, 0, :3, 0].tolist() == [[7, 8, 9], [3, 1, 0]] and torch.equal(keys, -values)
    assert [held(cache, row) for row in range(4)] == [[1, 2], [3, 1], [4, 5, 6], [7, 8, 9]]


def test_the_row_used_longest_ago_goes_first() -> None:
    cache = KVCache(max_bytes=3 * 4 * 8, rows=3, capacity=4)  # three rows
    filled(cache, [1, 1], [2, 2], [3, 3])
    for slot in (1, 0, 0):  # released in the order [2, 2], [1, 1], [3, 3]
        cache.release(slot)
    filled(cache, [5, 5])
    assert cache.rows == 3
    assert [cache.find(np.array([i, i, 0])).tokens for i in (1, 2, 3, 5)] == [2, 0, 2, 2]
    cache.release(0)
    filled(cache, [1, 1])
    assert cache.find(np.array([5, 5, 0])).tokens == 2  # taken over, not evicted


def test_a_longer_capacity_keeps_the_rows_used_last() -> None:
    cache = KVCache(max_bytes=3 * 8 * 8, rows=4, capacity=4)  # three rows once the capacity is 8
    filled(cache, [1, 1], [2, 2], [3, 3], [4, 4])
    for slot in (2, 0, 1):  # released in the order [3, 3], [1, 1], [2, 2]; [4, 4] stays in use
        cache.release(slot)
    cache.claim(np.array([3, 3, 0]))
    assert cache.in_use == [3, 2]
    cache.reserve(5)
    assert (cache.rows, cache.capacity, cache.active) == (3, 8, 2)
    assert [held(cache, i) for i in range(3)] == [[2, 2], [3, 3], [4, 4]] and cache.in_use == [2, 1]


def test_the_source_of_a_copy_is_not_the_row_that_goes() -> None:
    cache = KVCache(max_bytes=2 * 4 * 8, rows=2, capacity=4)
    filled(cache, [1, 2, 3], [5, 6])
    cache.release(0)  # used longest ago, and the source
    cache.release(0)
    assert cache.claim(np.array([1, 2, 9])) == 2
    assert cache.find(np.array([1, 2, 3, 0])).tokens == 3 and cache.find(np.array([5, 6, 0])).tokens == 0


def test_the_only_idle_row_is_shortened_when_it_is_the_source() -> None:
    cache = KVCache(max_bytes=1, rows=1, capacity=4)
    filled(cache, [1, 2, 3])
    cache.release(0)
    assert cache.claim(np.array([1, 2, 7])) == 2
    assert cache.rows == 1 and held(cache, 0) == [1, 2]


# --- models that cannot share a cache -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "reason"), [(mamba, "MambaForCausalLM .* with it"), (mistral, "window of 16 tokens is shorter than the context of 40")])
def test_other_models_recompute_and_say_why(make: Callable[[], Any], reason: str) -> None:
    model = make()
    with pytest.warns(UserWarning, match=reason):
        policy = TransformersPolicy(model, Letters(), max_batch=3, context_length=40)
    assert not policy.cached
    requests = [(ids[:30], SamplingParams(max_new_tokens=min(params.max_new_tokens, 10), seed=i)) for i, (ids, params) in enumerate(mixed(7))]
    for got, (ids, params) in zip(together(policy, requests, stagger=1), requests, strict=True):
        right(model, ids, params, got)
    assert policy.stats.reused_tokens == 0


def test_a_window_as_long_as_the_context_is_no_obstacle() -> None:
    assert TransformersPolicy(mistral(), Letters(), context_length=16).cached


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_the_trial_sees_a_model_that_ignores_mask_or_positions(ignored: str) -> None:
    class Careless(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop(ignored, None)
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    model = Careless(LlamaConfig(**COMMON, **SMALL, max_position_embeddings=256))
    with pytest.warns(UserWarning, match="cannot share a KV cache"):
        assert not TransformersPolicy(model, Letters()).cached


# --- how turns end ----------------------------------------------------------------------------------------------------------------------------------

CHAIN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]  # 0 1 2 3 ... and 9 for ever


def chained(prompt_ids: list[int], *, eos: Any = None, tokenizer: Any = None, **kwargs: Any) -> Generation:
    policy = TransformersPolicy(TableModel(CHAIN, eos=eos), tokenizer or Letters())
    return asyncio.run(policy.generate(prompt_ids, SamplingParams(**{"max_new_tokens": 6, **kwargs})))


def test_end_of_turn() -> None:
    def ending(**kwargs: Any) -> tuple[list[int], str, str | None]:
        got = chained([0], **kwargs)
        assert len(got.logprobs) == len(got.entropies) == len(got.token_ids)
        return got.token_ids, got.stop_reason, got.stop_string

    assert ending() == ([1, 2, 3, 4, 5, 6], "length", None)
    assert ending(eos=4) == ([1, 2, 3, 4], "eos", None)
    assert ending(eos=[8, 3]) == ([1, 2, 3], "eos", None)
    assert ending(stop=("de",)) == ([1, 2, 3, 4], "stop", "de")
    assert ending(stop=("abc", "c")) == ([1, 2], "stop", "c")  # the prompt's "a" takes no part
    assert ending(eos=4, stop=("de",)) == ([1, 2, 3, 4], "eos", None)  # eos before stop
    assert ending(stop=("fg",)) == ([1, 2, 3, 4, 5, 6], "stop", "fg")  # stop before length
    tokenizer = Letters()
    tokenizer.eos_token_id = 5
    assert ending(eos=[8], tokenizer=tokenizer) == ([1, 2, 3, 4, 5], "eos", None)


def test_ids_are_not_encoded_again() -> None:
    # [he, llo] and [hello] are the same text: the ids that were sampled count, and the continuation reuses them.
    vocab = {"h": 0, "e": 1, "l": 2, "o": 3, "he": 4, "ll": 5, "llo": 6, "hello": 7, "!": 8}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.encode("hello") == [7]
    policy = TransformersPolicy(TableModel([4, 4, 4, 4, 6, 4, 8, 8, 4]), fast)
    got = asyncio.run(policy.generate([8], SamplingParams(max_new_tokens=9, stop=("hello",))))
    assert (got.token_ids, got.stop_reason) == ([4, 6], "stop")
    asyncio.run(policy.generate([8, *got.token_ids, 3], SamplingParams(max_new_tokens=1)))
    assert policy.stats.reused_tokens == 2  # [8, 4]; 6 was sampled last and never fed


# --- the loop -----------------------------------------------------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_reaches_everyone_and_the_policy_lives_on() -> None:
    model = TableModel(CHAIN)
    policy = TransformersPolicy(model, Letters(), max_batch=2)
    model.fail_at = model.calls + 3

    async def main() -> list[Any]:
        calls = [policy.generate([i], SamplingParams(max_new_tokens=9)) for i in range(4)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    assert [str(result) for result in asyncio.run(main())] == ["out of memory, says the test"] * 4
    assert chained_again(policy) == [1, 2, 3]


def chained_again(policy: TransformersPolicy) -> list[int]:
    return asyncio.run(policy.generate([0], SamplingParams(max_new_tokens=3))).token_ids


def test_logits_that_are_no_distribution_raise() -> None:
    model = TableModel(CHAIN)
    policy = TransformersPolicy(model, Letters())
    with torch.no_grad():
        model.head[2] = torch.nan
    with pytest.raises(FloatingPointError, match=r"rows \[0\] of 1"):
        chained_again(policy)


def test_cancelled_requests_free_their_rows() -> None:
    model = llama()
    policy = TransformersPolicy(model, Letters(), max_batch=3)
    params = SamplingParams(max_new_tokens=40)

    async def main() -> list[Generation]:
        tasks = [asyncio.create_task(policy.generate(prompt(9, i), params)) for i in range(5)]
        for _ in range(6):
            await asyncio.sleep(0)
        assert cache_of(policy).active == 3
        tasks[0].cancel()  # decoding
        tasks[3].cancel()  # waiting
        return [await tasks[i] for i in (1, 2, 4)]

    for got, i in zip(asyncio.run(main()), (1, 2, 4), strict=True):
        right(model, prompt(9, i), params, got)
    assert cache_of(policy).active == 0
    assert policy.stats.decoded_tokens < 4 * 40
    assert policy.stats.prefilled_tokens + policy.stats.reused_tokens == 4 * 9  # the one cancelled in the queue was never computed


def test_event_loops_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    policy = TransformersPolicy(TableModel(CHAIN), Letters())

    async def abandoned() -> None:
        task = asyncio.create_task(policy.generate([0], SamplingParams(max_new_tokens=100)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()  # and the loop closes under it

    async def pending() -> int:
        await policy.generate([0], SamplingParams(max_new_tokens=3))
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    with caplog.at_level(logging.DEBUG):
        assert chained_again(policy) == [1, 2, 3]
        asyncio.run(abandoned())
        assert chained_again(policy) == [1, 2, 3]
        assert asyncio.run(pending()) == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_nobody_waits_for_a_loop_task_that_was_cancelled() -> None:
    policy = TransformersPolicy(TableModel(CHAIN), Letters(), max_batch=1)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(policy.generate([0], SamplingParams(max_new_tokens=100))) for _ in range(2)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert policy._loop_task is not None
        policy._loop_task.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    assert [type(result) for result in asyncio.run(main())] == [asyncio.CancelledError] * 2
    assert chained_again(policy) == [1, 2, 3]


def test_a_second_loop_at_the_same_time_is_refused() -> None:
    policy = TransformersPolicy(TableModel(CHAIN), Letters())
    other = asyncio.new_event_loop()
    policy._loop_task = other.create_task(asyncio.sleep(0))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="second event loop"):
        chained_again(policy)
    other.run_until_complete(policy._loop_task)
    other.close()


def test_no_more_rows_than_max_batch() -> None:
    policy = TransformersPolicy(TableModel(CHAIN), Letters(), max_batch=3)
    rows: list[int] = []
    plain_step = policy._decoder.step

    def step() -> torch.Tensor:
        logits = plain_step()
        rows.append(len(logits))
        return logits

    policy._decoder.step = step  # type: ignore[method-assign]
    together(policy, [([i % 5], SamplingParams(max_new_tokens=2 + i % 3)) for i in range(10)])
    assert max(rows) == 3 and sum(rows) == policy.stats.decoded_tokens == sum(2 + i % 3 for i in range(10))


# --- weights and modes ----------------------------------------------------------------------------------------------------------------------------------


def test_nothing_computed_with_old_weights_is_used_after_an_update() -> None:
    model = llama()
    policy = TransformersPolicy(model, Letters())
    ids, params = prompt(40), SamplingParams(max_new_tokens=20)
    old = asyncio.run(policy.generate(ids, params))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    fresh = asyncio.run(TransformersPolicy(model, Letters()).generate(ids, params))
    stale = asyncio.run(policy.generate(ids, params))  # nobody told the policy: the cached prompt is the old one
    assert not np.allclose(stale.entropies, fresh.entropies, atol=1e-4)
    policy.weights_updated()
    got = asyncio.run(policy.generate(ids, params))
    same(got, fresh)
    assert (old.version, got.version, policy.version) == (0, 1, 1)


def test_an_update_under_requests_is_refused() -> None:
    policy = TransformersPolicy(TableModel(CHAIN), Letters())

    async def main() -> None:
        task = asyncio.create_task(policy.generate([0], SamplingParams(max_new_tokens=9)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while 1 requests were under way"):
            policy.weights_updated()
        await task
        policy.weights_updated()

    asyncio.run(main())
    assert policy.version == 1


def test_generation_runs_in_evaluation_mode_and_restores_every_mode() -> None:
    model = gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    ids, params = prompt(12), SamplingParams(max_new_tokens=8)
    model.train()
    model.transformer.h[0].eval()  # frozen on purpose
    modes = [module.training for module in model.modules()]
    policy = TransformersPolicy(model, Letters())
    assert policy.cached
    got = asyncio.run(policy.generate(ids, params))
    assert [module.training for module in model.modules()] == modes
    right(model.eval(), ids, params, got)


def test_a_learner_can_still_take_gradients() -> None:
    model = llama()
    policy = TransformersPolicy(model, Letters())
    got = asyncio.run(policy.generate(prompt(9), SamplingParams(max_new_tokens=4)))
    model.train()(input_ids=torch.tensor([prompt(9) + got.token_ids])).logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- refusals and loading -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        ([], {}, "at least 1 token"),
        ([0] * 129, {}, "the prompt has 129 tokens, the context holds 128"),
        ([0] * 120, {"max_new_tokens": 9}, r"prompt \(120 tokens\) and max_new_tokens \(9\) exceed the context of 128"),
        ([0, 10], {}, r"expected ids in \[0, 10\), got 0 to 10"),
        ([-1], {}, r"expected ids in \[0, 10\), got -1"),
        ([0], {"stop": ("",)}, "not empty"),
    ],
)
def test_bad_requests_are_refused(ids: list[int], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chained(ids, **kwargs)


def test_the_context_can_be_filled_to_the_last_token() -> None:
    model = gpt2()  # 96 learned positions: one too many would be an index error
    policy = TransformersPolicy(model, Letters())
    requests = [(prompt(n, n), SamplingParams(max_new_tokens=96 - n)) for n in (95, 3, 94)]
    for got, (ids, params) in zip(together(policy, requests), requests, strict=True):
        right(model, ids, params, got)


def test_a_short_remainder_late_in_the_context_prefills_beside_a_long_one() -> None:
    model = gpt2()
    policy = TransformersPolicy(model, Letters())
    start = prompt(88)
    asyncio.run(policy.generate(start, SamplingParams(max_new_tokens=1)))
    # Row 0 feeds 2 tokens from position 87 on, padded to the 59 of its neighbour: the padding must not reach position 96.
    requests = [([*start, 1, 2], SamplingParams(max_new_tokens=3)), (prompt(60, 1), SamplingParams(max_new_tokens=3))]
    for got, (ids, params) in zip(together(policy, requests), requests, strict=True):
        right(model, ids, params, got)


def test_bad_construction_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        TransformersPolicy(TableModel(CHAIN), Letters(), max_batch=0)
    with pytest.raises(ValueError, match="names no context length"):
        TransformersPolicy(mamba(), Letters())


def test_from_pretrained(tmp_path: Path) -> None:
    model = llama()
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w11").save_pretrained(tmp_path)
    policy = TransformersPolicy.from_pretrained(tmp_path, max_batch=2, context_length=100, dtype=torch.float32)
    assert policy.eos_ids == {7, 9, 11} and policy.context_length == 100
    params = SamplingParams(max_new_tokens=30, seed=1)
    got = asyncio.run(policy.generate(prompt(12), params))
    right(model, prompt(12), params, got)
    assert got.stop_reason == "eos" and got.token_ids[-1] in policy.eos_ids and not policy.eos_ids & set(got.token_ids[:-1])


def seeded(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama().config)


def test_weights_of_its_own_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    mine, learners = seeded(1), seeded(2)
    policy = TransformersPolicy(mine, None, context_length=64)
    policy.update_weights(learners.state_dict().items())
    assert policy.version == 1
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), learners.state_dict().values(), strict=True))
    broken = dict(seeded(3).state_dict())
    broken.pop(next(iter(broken)))
    with pytest.raises(RuntimeError, match="missing"):
        policy.update_weights(broken)
    assert policy.version == 1
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), learners.state_dict().values(), strict=True))
    seeded(4).save_pretrained(tmp_path)
    policy.update_weights(tmp_path)
    assert policy.version == 2
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), seeded(4).state_dict().values(), strict=True))
