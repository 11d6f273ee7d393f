"""Padded rows, weights and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_algo.packing import Rows, constant_length, micro_batches, pad_groups, token_mean, trajectory_mean
from arpo_algo.tree import RolloutTree, Trajectory


def chain(*sampled: int, scored: bool = True) -> RolloutTree:
    """One trajectory: a prompt of two tokens, then turns of the given lengths with an observation of one token between them."""
    tree = RolloutTree()
    node = tree.add(None, "prompt", [1, 2])
    for number, length in enumerate(sampled):
        if number:
            node = tree.add(node.id, "observation", [9])
        node = tree.add(node.id, "policy", range(10, 10 + length), logprobs=[-0.5 - i for i in range(length)], entropies=[0.1] * length)
    tree.trajectories.append(Trajectory(tree=tree, index=0, origin="initial", leaf=node.id, scored=scored))
    return tree


def pad(*trees: RolloutTree, weigh=trajectory_mean) -> Rows:
    return pad_groups(trees, [[np.arange(len(t.trajectories[0].token_ids)) + 1.0] for t in trees], pad_id=99, weigh=weigh)


def test_rows_hold_each_trajectory_as_it_was_sampled():
    rows = pad(chain(2, 1), chain(1))
    assert rows.token_ids.tolist() == [[1, 2, 10, 11, 9, 10], [1, 2, 10, 99, 99, 99]]
    assert rows.attention.astype(int).tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert rows.mask.astype(int).tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert rows.old_logprobs.tolist() == [[0, 0, -0.5, -1.5, 0, -0.5], [0, 0, -0.5, 0, 0, 0]]
    assert rows.advantages.tolist() == [[0, 0, 3, 4, 0, 6], [0, 0, 3, 0, 0, 0]]
    # trajectory_mean, G = 2: 1/2 * 1/3 and 1/2 * 1/1
    np.testing.assert_allclose(rows.weights, [[0, 0, 1 / 6, 1 / 6, 0, 1 / 6], [0, 0, 1 / 2, 0, 0, 0]], rtol=1e-6)


def test_an_unscored_trajectory_counts_in_no_denominator():
    # One unscored row of 100 sampled tokens, one scored row of 10: the denominator is 10.
    for weigh in (trajectory_mean, token_mean, constant_length(10)):
        rows = pad(chain(100, scored=False), chain(10), weigh=weigh)
        assert not rows.mask[0].any() and not rows.weights[0].any() and not rows.old_logprobs[0].any() and not rows.advantages[0].any()
        np.testing.assert_allclose(rows.weights[1][rows.mask[1]], [0.1] * 10, rtol=1e-6)


def test_weights_of_rows_of_one_and_nine_tokens():
    mask = np.zeros((2, 12), dtype=bool)
    mask[0, 1], mask[1, 1:10] = True, True
    assert trajectory_mean(mask)[[0, 1], 1].tolist() == pytest.approx([1 / 2, 1 / 18])
    assert token_mean(mask)[[0, 1], 1].tolist() == pytest.approx([1 / 10, 1 / 10])
    assert constant_length(20)(mask)[[0, 1], 1].tolist() == pytest.approx([1 / 40, 1 / 40])


@pytest.mark.parametrize("weigh", [trajectory_mean, token_mean, constant_length(5)])
def test_a_fully_masked_batch_has_weight_zero_and_no_nan(weigh):
    assert (weigh(np.zeros((3, 4), dtype=bool)) == 0).all()


def test_what_cannot_be_a_row_is_refused():
    with pytest.raises(ValueError, match=r"lengths \[3\], got \[2\]"):
        pad_groups([chain(1)], [[np.zeros(2)]], pad_id=0, weigh=token_mean)
    tree = RolloutTree()
    tree.add(None, "policy", [5], logprobs=[-1.0], entropies=[0.1])
    tree.trajectories.append(Trajectory(tree=tree, index=0, origin="initial", leaf=0))
    with pytest.raises(ValueError, match="nothing predicts"):
        pad_groups([tree], [[np.zeros(1)]], pad_id=0, weigh=token_mean)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        constant_length(0)


def test_select_cuts_to_the_longest_of_the_chosen():
    rows = pad(chain(2, 1), chain(1), chain(3))
    part = rows.select([1, 2])
    assert part.token_ids.tolist() == [[1, 2, 10, 99, 99], [1, 2, 10, 11, 12]]
    assert part.weights.shape == part.mask.shape == (2, 5)
    assert len(rows.select([])) == 0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_cover_every_row_once_within_the_limit(lengths, max_tokens):
    rows = pad(*(chain(length) for length in lengths))
    batches = micro_batches(rows, max_tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    total = np.array(lengths) + 2
    for batch in batches:
        assert len(batch) == 1 or len(batch) * total[batch].max() <= max_tokens
    ordered = total[np.concatenate(batches)]
    assert (np.diff(ordered) <= 0).all()


def test_micro_batches_of_nothing():
    assert micro_batches(pad(chain(1)).select([]), 10) == []
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        micro_batches(pad(chain(1)), 0)
