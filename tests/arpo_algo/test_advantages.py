"""Advantages: numbers worked by hand, and the two ways to give them to shared tokens."""

from __future__ import annotations

import numpy as np
import pytest

from arpo_algo.advantages import group_advantages, hard, leave_one_out, soft
from arpo_algo.packing import pad_groups, token_mean, trajectory_mean
from arpo_algo.tree import RolloutTree, Trajectory


def scored(*flags: int) -> np.ndarray:
    return np.array(flags, dtype=bool)


def tree_with_shared_turn(lengths: list[int], rewards: list[float], *, unscored: tuple[int, ...] = ()) -> RolloutTree:
    """Trajectories 0, 1, 2 share a turn of one token; the fourth starts on its own. ``lengths``: sampled tokens of each."""
    tree = RolloutTree()

    def turn(parent: int, length: int) -> int:
        return tree.add(parent, "policy", range(length), logprobs=[-1.0] * length, entropies=[0.5] * length).id

    prompt = tree.add(None, "prompt", [7, 7]).id
    shared = turn(prompt, 1)
    result = tree.add(shared, "observation", [8]).id
    leaves = [turn(result, length - 1) for length in lengths[:3]] + [turn(prompt, lengths[3])]
    for index, leaf in enumerate(leaves):
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=leaf, reward=rewards[index], scored=index not in unscored))
    return tree


def shared_coefficient(tree: RolloutTree, assign, weigh) -> float:
    """Sum over the rows that hold the shared token (column 2) of weight * advantage: its gradient coefficient at ratio 1."""
    advantages = group_advantages(tree.rewards_M, tree.scored_M)
    rows = pad_groups([tree], [assign(tree, advantages)], pad_id=0, weigh=weigh)
    return float((rows.weights * rows.advantages)[:3, 2].sum())


def test_group_advantages_use_the_population_std():
    # mean 1/2, population std 1/2: (1 - 1/2) / (1/2) = 1. The sample std, .577, would give .866.
    np.testing.assert_allclose(group_advantages(np.array([1.0, 1, 0, 0]), scored(1, 1, 1, 1)), [1, 1, -1, -1], atol=3e-6)
    # 0, 0, 0, 4: mean 1, population std sqrt((1+1+1+9)/4) = sqrt 3.
    np.testing.assert_allclose(group_advantages(np.array([0.0, 0, 0, 4]), scored(1, 1, 1, 1)), np.array([-1, -1, -1, 3]) / 3**0.5, atol=3e-6)


def test_delta_is_added_to_the_std():
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0]), scored(1, 1), delta=0.5), [0.5, -0.5])


@pytest.mark.parametrize("estimate", [group_advantages, leave_one_out])
@pytest.mark.parametrize("rewards", [np.full(16, 0.7), np.full(16, 0.7, dtype=np.float32), np.full(3, 0.1)])
def test_equal_rewards_give_exactly_zero(estimate, rewards):
    assert (estimate(rewards, np.ones(len(rewards), dtype=bool)) == 0).all()


def test_the_mean_of_equal_rewards_may_be_another_number():
    """Why equal rewards are told by max == min: three times 0.1 have mean 0.10000000000000002, and the residue over delta is not 0."""
    assert np.full(3, 0.1).mean() != 0.1


@pytest.mark.parametrize("estimate", [group_advantages, leave_one_out])
def test_unscored_trajectories_stay_out_of_the_statistics(estimate):
    with_unscored = estimate(np.array([1.0, np.nan, 0, -9]), scored(1, 0, 1, 0))
    np.testing.assert_array_equal(with_unscored[[1, 3]], 0)
    np.testing.assert_array_equal(with_unscored[[0, 2]], estimate(np.array([1.0, 0]), scored(1, 1)))


@pytest.mark.parametrize("flags", [(0, 0), (1, 0)])
def test_fewer_than_two_scored_give_zero(flags):
    assert (group_advantages(np.array([1.0, 0]), scored(*flags)) == 0).all()


def test_mean_only_and_leave_one_out():
    rewards = np.array([1.0, 0, 0, 0])
    np.testing.assert_allclose(group_advantages(rewards, scored(1, 1, 1, 1), scale_by_std=False), [0.75, -0.25, -0.25, -0.25])
    # The first against the mean of the others, 0; each other against (1 + 0 + 0) / 3.
    np.testing.assert_allclose(leave_one_out(rewards, scored(1, 1, 1, 1)), [1, -1 / 3, -1 / 3, -1 / 3])


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([1.0, np.nan]), scored(1, 1))
    with pytest.raises(ValueError, match="bool"):
        group_advantages(np.array([1.0, 0]), np.array([0, 1]))
    with pytest.raises(ValueError, match="4 trajectories, got 3"):
        soft(tree_with_shared_turn([4, 4, 4, 4], [1, 1, 0, 0]), np.zeros(3))


@pytest.mark.parametrize("assign", [soft, hard])
def test_equal_lengths_give_one_sixteenth(assign):
    # Four tokens each, A = 1, 1, -1, -1, token shared by the first three. Weight of each copy 1/4 * 1/4.
    # soft: (1 + 1 - 1) / 16. hard: the mean is 1/3, three times 1/16 * 1/3.
    tree = tree_with_shared_turn([4, 4, 4, 4], [1, 1, 0, 0])
    assert shared_coefficient(tree, assign, trajectory_mean) == pytest.approx(1 / 16, abs=1e-6)


@pytest.mark.parametrize(
    ("assign", "weigh", "expected"),
    [
        (soft, trajectory_mean, (1 / 4 + 1 / 8 - 1 / 16) / 4),  # .0781
        (hard, trajectory_mean, (1 / 4 + 1 / 8 + 1 / 16) / 4 / 3),  # .0365
        (soft, token_mean, (1 + 1 - 1) / (4 + 8 + 16 + 4)),  # .0313
        (hard, token_mean, 3 * (1 / 3) / 32),  # equal weights: the same
    ],
)
def test_unequal_lengths_tell_soft_from_hard(assign, weigh, expected):
    tree = tree_with_shared_turn([4, 8, 16, 4], [1, 1, 0, 0])
    assert shared_coefficient(tree, assign, weigh) == pytest.approx(expected, abs=1e-6)


def test_tokens_get_advantages_where_sampled_and_only_there():
    tree = tree_with_shared_turn([2, 2, 3, 2], [1, 1, 0, 0])
    advantages = np.array([1.0, 1.0, -1.0, -1.0])
    # prompt 2, shared turn 1, observation 1, own turn
    assert [values.tolist() for values in soft(tree, advantages)] == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, -1, 0, -1, -1], [0, 0, -1, -1]]
    third = pytest.approx(1 / 3)
    assert [values.tolist() for values in hard(tree, advantages)] == [[0, 0, third, 0, 1], [0, 0, third, 0, 1], [0, 0, third, 0, -1, -1], [0, 0, -1, -1]]


def test_hard_averages_over_scored_owners_only():
    tree = tree_with_shared_turn([2, 2, 2, 2], [1, 1, 0, 0], unscored=(1,))
    values = hard(tree, np.array([1.0, 0.0, -0.5, -0.5]))
    assert values[0][2] == values[2][2] == pytest.approx((1 - 0.5) / 2)
    assert values[1].tolist() == [0.0] * 5
