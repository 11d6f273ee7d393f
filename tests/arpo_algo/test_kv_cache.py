"""Openings that a tree's sequences share: computed once, held once, and without a trace in anyone's numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import End, Talk, sample_one
from policy_cases import COMMON, Letters, cache_of, llama, prompt, right
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from arpo_algo.branching import EntropyBranching
from arpo_algo.policies import base_attention
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.base_attention import BasePlan, BaseRows
from arpo_algo.policies.decoding import MIN_BASE, CachedDecoder, DecodingStats, RecomputingDecoder
from arpo_algo.policies.kv_cache import KVCache
from arpo_algo.policies.transformers import TransformersPolicy


def deep(kv_heads: int = 2, vocab: int = 61, **kwargs: Any) -> Any:
    """Room for long prompts. Sizes for which this machine's matrix products give a row the same bits in every batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    return LlamaForCausalLM(LlamaConfig(**{**COMMON, "vocab_size": vocab}, **sizes, max_position_embeddings=1024, **kwargs)).eval()


def deep_gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=1024)).eval()


Turns = list[tuple[list[int], SamplingParams, Generation]]
Work = tuple[int | None, list[int], int]
"""Tree, opening, and the number that makes the trajectory's turns."""


async def trajectory(policy: TransformersPolicy, work: Work, turns: int = 3) -> Turns:
    tree, opening, i = work
    context, out = list(opening), []
    for turn in range(turns):
        params = SamplingParams(max_new_tokens=3 + (7 * i + turn) % 9, seed=100 * i + turn, tree=tree)
        got = await policy.generate(context, params)
        out.append((context, params, got))
        context = context + got.token_ids + prompt(3 + (i + turn) % 11, 1000 * i + turn)
    return out


def run(policy: TransformersPolicy, work: Sequence[Work]) -> list[Turns]:
    async def main() -> list[Turns]:
        return await asyncio.gather(*(trajectory(policy, each) for each in work))

    return asyncio.run(main())


def forest(*sizes: tuple[int, int]) -> list[Work]:
    """Trees of (tokens of the opening, trajectories)."""
    return [(tree, prompt(tokens, tree), 10 * tree + i) for tree, (tokens, rows) in enumerate(sizes) for i in range(rows)]


# --- numbers ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [deep, lambda: deep(4), lambda: deep(1), lambda: deep(attn_implementation="eager"), deep_gpt2])
def test_turns_on_a_base_equal_plain_decoding(make: Any) -> None:
    model = make()
    policy = TransformersPolicy(model, Letters())
    for turns in run(policy, forest((290, 3), (MIN_BASE + 1, 2), (20, 2))):
        for context, params, got in turns:
            right(model, context, params, got)
    assert sorted(len(base.ids) for base in cache_of(policy).bases.values()) == [MIN_BASE, 289]


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_row_has_the_same_bits_in_company_shuffled_and_alone(kv_heads: int) -> None:
    model = deep(kv_heads)
    # Two have more own tokens than a call of the kernel takes, one of them much more, and ten on one base more queries than one of its tiles.
    work = [*forest((260, 2), (20, 1), (300, 10)), (None, prompt(290, 7), 77), (None, prompt(450, 8), 78)]
    crowd = run(TransformersPolicy(model, Letters()), work)
    order = np.random.default_rng(0).permutation(len(work)).tolist()
    assert [crowd[i] for i in order] == run(TransformersPolicy(model, Letters(), max_batch=6), [work[i] for i in order])
    for i in (2, 3, 13):
        assert run(TransformersPolicy(model, Letters()), [work[i]]) == [crowd[i]]


def test_attention_over_bases_and_own_tokens_is_one_softmax() -> None:
    torch.manual_seed(0)
    rows, heads, kv_heads, queries, own, width = 3, 6, 2, 4, 300, 8  # 300: two runs of own keys, of which row 0 has none in the second
    query, key, value = torch.randn(rows, heads, queries, width), torch.randn(rows, kv_heads, own, width), torch.randn(rows, kv_heads, own, width)
    base_key, base_value = torch.randn(1, kv_heads, 32, width), torch.randn(1, kv_heads, 32, width)
    ends = torch.tensor([200, 270, 290])[:, None] + torch.arange(queries)
    mask = torch.zeros(rows, 1, queries, own).masked_fill(torch.arange(own) > ends[:, None, :, None], torch.finfo(torch.float32).min)
    hidden = torch.zeros(1, 1, 1, 32)
    hidden[..., 27:] = -torch.inf
    plan = BasePlan(bases=[BaseRows(keys=[base_key], values=[base_value], hidden=hidden, rows=torch.tensor([0, 2]))])
    layer: Any = SimpleNamespace(layer_idx=0)
    got, _ = base_attention._attend(layer, query, key, value, mask, scaling=0.4, base_plan=plan)
    for row in range(rows):
        for head in range(heads):
            for q in range(queries):
                k, v = (x[row, head // 3, : int(ends[row, q]) + 1] for x in (key, value))
                if row != 1:
                    k, v = torch.cat((base_key[0, head // 3, :27], k)), torch.cat((base_value[0, head // 3, :27], v))
                want = torch.softmax(k.double() @ query[row, head, q].double() * 0.4, 0) @ v.double()
                assert torch.allclose(got[row, q, head].double(), want, atol=1e-5)


def test_attention_that_is_more_than_a_softmax_is_left_to_the_model() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**COMMON, **sizes, max_position_embeddings=512)).eval()  # caps its scores
    policy = TransformersPolicy(model, Letters(), context_length=512)
    assert policy.cached
    for turns in run(policy, forest((290, 2))):
        for context, params, got in turns:
            right(model, context, params, got)
    assert not cache_of(policy).bases


# --- what is computed and what is held -----------------------------------------------------------------------------------------------------------------


def test_a_long_opening_is_computed_and_held_once() -> None:
    policy = TransformersPolicy(deep(), Letters())
    opening = prompt(500)
    run(policy, [(0, opening, i) for i in range(16)])
    cache = cache_of(policy)
    assert [len(base.ids) for base in cache.bases.values()] == [499]
    assert cache.capacity == 64, "the rows hold what comes after it"
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, float32
    assert cache.bytes == token_bytes * (512 + 16 * 64)
    # A forward each for the opening and one token of every trajectory before its first turn; the last token of a trajectory goes through none.
    turns = sum(3 + (7 * i + turn) % 9 for i in range(16) for turn in range(3))
    between = sum(3 + (i + turn) % 11 for i in range(16) for turn in range(2))
    assert policy.stats.computed_tokens == 499 + 16 + turns + between - 16


def test_openings_that_begin_alike_share_what_they_can() -> None:
    model = deep()
    policy = TransformersPolicy(model, Letters())
    system = prompt(280, 9)
    run(policy, [(0, system + prompt(10, 1), 1), (1, system + prompt(20, 2), 2), (2, system + prompt(10, 1), 3)])
    cache = cache_of(policy)
    assert [len(base.ids) for base in cache.bases.values()] == [289, 299], "two groups of one question stand on one base"
    (turns,) = run(policy, [(1, system + prompt(20, 2), 4)])
    for context, params, got in turns:
        right(model, context, params, got)
    before = policy.stats.computed_tokens
    asyncio.run(policy.generate(system + prompt(30, 5), SamplingParams(max_new_tokens=1, tree=3)))
    assert policy.stats.computed_tokens - before == 30


def test_what_follows_one_base_is_not_reused_on_another() -> None:
    model = deep()
    policy = TransformersPolicy(model, Letters())
    params = [SamplingParams(max_new_tokens=4, tree=tree) for tree in (0, 1)]
    openings = [[*prompt(300, tree), 5] for tree in (0, 1)]
    for rest in ([], prompt(12, 3)):  # the same ids behind both
        for opening, each in zip(openings, params, strict=True):
            right(model, opening + rest, each, asyncio.run(policy.generate(opening + rest, each)))


def test_a_number_that_comes_back_with_another_prompt_is_another_tree() -> None:
    model = deep()
    policy = TransformersPolicy(model, Letters())
    for seed, n in ((0, 290), (1, 400), (2, 280), (3, 30), (4, 340)):
        (turns,) = run(policy, [(5, prompt(n, seed), seed)])
        for context, params, got in turns:
            right(model, context, params, got)
    assert [len(base.ids) for base in cache_of(policy).bases.values()] == [289, 399, 279, 339]


def test_bases_give_way_to_others_but_never_under_a_row_in_use() -> None:
    cache = KVCache(max_bytes=2 * 4 * 40, shares=True)  # 40 tokens of one key and one value of 4 bytes; half of it for bases
    feed = {"dtype": torch.float32, "device": torch.device("cpu")}

    def add(ids: list[int]) -> int:
        number = cache.add_base(np.array(ids))
        row = cache.bases[number].cache
        counts = np.array([len(ids)]) - row.lengths
        states = row.inputs(np.zeros(1, np.int64), counts, **feed)["input_ids"][:, None, :, None].float()
        row.update(states, -states, 0)
        row.computed(np.zeros(1, np.int64), counts)
        return number

    first, second, third = add([1, 2, 3]), add([4, 5]), add([6])
    for number in (second, first, third):
        cache.claim(np.array([9]), number)
    cache.release(0)  # of the second
    cache.trim_bases(keep=())
    assert sorted(cache.bases) == [first, third], "16 tokens a base: one fits, two are in use"
    cache.release(0)
    cache.release(0)
    cache.trim_bases(keep={first})
    assert sorted(cache.bases) == [first]
    cache.add_base(np.array([7]))
    assert cache.claim(np.array([9, 9]), first) == 0
    cache.clear()
    assert not cache.bases and cache.bytes == 0


def test_the_idle_row_used_longest_ago_goes() -> None:
    cache = KVCache(max_bytes=2 * 4 * 64 * 3, rows=3)  # three rows of 64 tokens of one key and one value of 4 bytes
    for first in (10, 20, 30, 40):
        cache.claim(np.array([first, first + 1]))
        rows, counts = np.array(cache.in_use), np.array([2])
        states = cache.inputs(rows, counts, dtype=torch.float32, device=torch.device("cpu"))["input_ids"][:, None, :, None].float()
        cache.update(states, -states, 0)
        cache.computed(rows, counts)
        cache.release(0)
    assert sorted(cache.tokens[:, 0]) == [20, 30, 40]


def test_a_base_whose_forward_raised_gives_nothing_to_another() -> None:
    model = deep()
    decoder = CachedDecoder(model, DecodingStats(), max_bytes=1 << 20, min_base=4)
    first, second = (np.array(prompt(20, 1) + prompt(5, seed)) for seed in (2, 3))

    def interrupt(*_: Any) -> None:
        raise MemoryError

    with torch.inference_mode():
        hook = model.model.layers[0].register_forward_hook(interrupt)
        with pytest.raises(MemoryError):
            decoder.join([first], [0])
        hook.remove()
        decoder.join([second], [1])
        torch.testing.assert_close(decoder.step()[0], model(torch.from_numpy(second)[None]).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_bases_that_went_are_computed_again() -> None:
    model = deep()
    policy = TransformersPolicy(model, Letters(), cache_bytes=1)
    for work in forest((290, 1), (340, 2), (290, 1)):
        (turns,) = run(policy, [work])
        for context, params, got in turns:
            right(model, context, params, got)
        assert len(cache_of(policy).bases) == 1


# --- a whole rollout -----------------------------------------------------------------------------------------------------------------------------------


class Characters:
    """One id a character."""

    eos_token_id = None

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("opening", [40, 300])
def test_a_rollout_computes_each_token_of_its_tree_once(opening: int) -> None:
    policy = TransformersPolicy(deep(vocab=128), Characters(), eos_ids=range(16))

    def reply(turns: list[str]) -> str | End:
        return End(1.0) if len(turns) == 4 else f"<result {len(turns)} of {turns[-1][:3]!r}>"

    strategy = EntropyBranching(alpha=1.0, beta=0.0)
    tree = sample_one(policy, Talk(reply, opening="q" * opening), strategy, group_size=12, initial=4, max_turn_tokens=24)
    assert sum(t.origin == "branched" for t in tree.trajectories) >= 4
    assert tree.total_tokens > 1.5 * tree.unique_tokens
    assert 0.98 < policy.stats.computed_tokens / tree.unique_tokens <= 1.02
    assert policy.stats.decoded_tokens == tree.sampled_tokens


def test_recomputing_counts_what_it_computes() -> None:
    stats = DecodingStats()
    decoder = RecomputingDecoder(llama(), stats)
    with torch.inference_mode():
        decoder.join([np.arange(5), np.arange(3)], [None, None])
        decoder.step()
        decoder.append(np.array([1, 2]))
        decoder.step()
    assert (stats.computed_tokens, stats.padding_tokens) == (5 + 3 + 6 + 4, 2 + 2)


def test_padding_is_counted_apart() -> None:
    stats = DecodingStats()
    decoder = CachedDecoder(llama(), stats, max_bytes=1 << 20)
    with torch.inference_mode():
        decoder.join([np.arange(6), np.arange(20, 23)], [None, None])
        assert (stats.computed_tokens, stats.padding_tokens) == (5 + 2, 2 * 8 - 7)  # 5 queries are 8
        decoder.step()
    assert (stats.computed_tokens, stats.padding_tokens) == (7 + 2, 9 + 2)  # 2 rows are 4
