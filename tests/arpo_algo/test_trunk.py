"""A tree cut at its trunk: the parts hold every token once, and the update is that of padded rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.learner import Learner, LearnerConfig
from arpo_algo.packing import Rows, token_mean, unique_tokens
from arpo_algo.token_tree import build_tree, cut, partition

VOCABULARY = 24
rows_of_ids = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=9)


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return ids, lengths


@settings(max_examples=150, derandomize=True, deadline=None)
@given(rows=rows_of_ids, max_tokens=st.integers(1, 14), most=st.sampled_from([0, 3, 6, 100]))
def test_every_token_sees_its_own_path_and_is_in_one_part_where_the_trunk_may_be_large(rows, max_tokens, most):
    ids, lengths = padded(rows)
    tree, bins = build_tree(ids, lengths), partition(ids, lengths, max_tokens)
    trunk, parts = cut(tree, bins, lengths, most)
    assert len(trunk) <= most
    if most >= len(tree):
        assert len(trunk) + sum(len(part.tree) for part in parts) == len(tree)
    size = len(trunk)
    for index, part in zip(bins, parts, strict=True):
        tokens = np.concatenate((trunk.token_ids, part.tree.token_ids))
        depths = np.concatenate((trunk.depths, part.tree.depths))
        for row in index:
            path = part.tree.where[row, : lengths[row]]
            assert tokens[path].tolist() == ids[row, : lengths[row]].tolist() and depths[path].tolist() == list(range(lengths[row]))
            for column, token in enumerate(path):
                if token < size:
                    seen = [key for key in range(size) if key <= token < trunk.ends[key]]
                else:
                    own = token - size
                    assert part.sources[own] == (path[column - 1] if column else -1)
                    seen = [key for start, stop, first, last in part.rectangles if first <= own < last for key in range(start, stop)]
                    seen += [size + key for key in range(len(part.tree)) if key <= own < part.tree.ends[key]]
                assert seen == sorted(path[: column + 1])


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    )
    return LlamaForCausalLM(config).double()


def batch(seed: int = 0) -> Rows:
    """One group of 9 rows: three branches of a prompt of 6 tokens after 4 more, of which each has three of its own ends; and a group of two short rows."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return rng.integers(1, VOCABULARY, n).tolist()

    prompt = draw(6)
    rows = [prompt + middle + draw(int(n)) for middle in (draw(4) for _ in range(3)) for n in rng.integers(2, 7, 3)]
    rows += [draw(3), draw(4)]
    ids, lengths = padded(rows)
    attention = np.arange(ids.shape[1]) < lengths[:, None]
    mask = attention & (rng.random(ids.shape) < 0.7)
    mask[:, 0] = False
    mask[:9, 6] = True  # the first tokens of the branches, predicted from the last of the prompt
    return Rows(
        token_ids=ids,
        attention=attention,
        mask=mask,
        old_logprobs=np.where(mask, -3.2 + rng.normal(0, 0.3, ids.shape), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=(len(rows), 1)), 0).astype(np.float32),
        weights=token_mean(mask).astype(np.float32),
        groups=np.array([0] * 9 + [1] * 2),
    )


def gradient(rows: Rows, **values) -> tuple[torch.Tensor, dict[str, float], list[int]]:
    """The gradient of one update, its metrics, and how many positions each forward of the update computed, that of the reference included."""
    chosen, positions = model(), list[int]()
    learner = Learner(chosen, LearnerConfig(max_grad_norm=float("inf"), kl_coef=0.1, entropy_coef=0.05, **values))
    with torch.no_grad():  # away from the reference, so that the KL has a gradient
        for weight in learner.trainable:
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    found: list[torch.Tensor] = []
    learner.optimizer.step = lambda: found.append(torch.cat([weight.grad.flatten() for weight in learner.trainable]))
    chosen.model.register_forward_pre_hook(lambda _, args, kwargs: positions.append(kwargs["input_ids"].numel()), with_kwargs=True)
    metrics = learner.update(rows)
    return found[0], metrics, positions


@pytest.mark.parametrize("most", [24, 30])
def test_a_cut_tree_computes_each_token_once_and_its_gradient_is_that_of_padded_rows(most):
    rows = batch()
    unique = sum(unique_tokens(rows.select(np.flatnonzero(rows.groups == group))) for group in (0, 1))
    expected, numbers, _ = gradient(rows, layout="padded")
    got, metrics, positions = gradient(rows, layout="tree", micro_batch_tokens=most)
    assert numbers["clip_fraction_low"] > 0.05 and numbers["clip_fraction_high"] > 0.05 and numbers["kl"] > 0
    assert len(positions) > 4 and sum(positions) == 2 * unique  # once for the reference, once for the update, in several pieces
    assert (got - expected).norm() <= 1e-7 * expected.norm()  # the norm layers compute in float32
    for name in ("loss", "kl", "entropy", "ratio_max", "clip_fraction_low", "clip_fraction_high"):
        assert metrics[name] == pytest.approx(numbers[name], rel=1e-6), name


def test_of_a_trunk_that_is_too_large_only_what_most_bins_share_is_computed_once():
    """Of 12 tokens a micro-batch, or 17 as the longest row: 6 of the prompt fit, which all bins share, and not the three branches of 4 too."""
    rows = batch()
    expected, *_ = gradient(rows, layout="padded")
    got, _, positions = gradient(rows, layout="tree", micro_batch_tokens=12)
    apart = 2 * sum(unique_tokens(rows.select([row])) for row in range(len(rows)))
    assert 2 * unique_tokens(rows) < sum(positions) < 0.8 * apart
    assert (got - expected).norm() <= 1e-7 * expected.norm()


def test_a_tree_is_cut_under_gradient_checkpointing_too():
    rows = batch()
    expected, *_ = gradient(rows, layout="padded")
    got, _, positions = gradient(rows, layout="tree", micro_batch_tokens=24, gradient_checkpointing=True)
    assert len(positions) > 4 and sum(positions) <= 2 * unique_tokens(rows) + 2
    assert (got - expected).norm() <= 1e-7 * expected.norm()


def test_the_comparison_sees_a_trunk_without_its_gradient(monkeypatch):
    rows = batch()
    expected, *_ = gradient(rows, layout="padded")
    monkeypatch.setattr("arpo_algo.trunk.Trunk.backward", lambda self: None)
    got, *_ = gradient(rows, layout="tree", micro_batch_tokens=24)
    assert (got - expected).norm() > 1e-2 * expected.norm()


def test_copies_of_one_row_in_several_bins_are_not_cut():
    rows = batch()
    twins = replace(rows, **{name: np.repeat(getattr(rows, name)[:1], 3, axis=0) for name in ("token_ids", "attention", "mask", "old_logprobs", "weights")})
    twins = replace(twins, advantages=rows.advantages[:3] * 0 + np.array([[1.0], [2.0], [-1.0]], np.float32) * twins.mask, groups=np.zeros(3, dtype=np.int64))
    expected, *_ = gradient(twins, layout="padded")
    got, *_ = gradient(twins, layout="tree", micro_batch_tokens=1)
    assert (got - expected).norm() <= 1e-7 * expected.norm()
