"""Metrics of a step, on one small tree whose numbers are worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from arpo_algo.entropy import EntropyBounds
from arpo_algo.metrics import correctness, effective_size, rollout_metrics
from arpo_algo.tree import Decision, RolloutTree, Trajectory


def call(name: str, error: str = "", executed: bool = True) -> dict[str, object]:
    return {"name": name, "arguments": {}, "ok": not error, "error": error, "executed": executed}


def policy(tree: RolloutTree, parent: int, entropies: list[float], **values: object) -> int:
    n = len(entropies)
    return tree.add(parent, "policy", [1] * n, logprobs=[-0.5] * n, entropies=entropies, **values).id


def branched_tree(group: int = 0) -> RolloutTree:
    """0 prompt (4) - 1 policy (3) - 2 search (2) - { 3 policy (5): t0 | 4 policy (2): t2, branched }; 0 - 5 policy (1) - 6 python (3) - 7 policy (4): t1."""
    tree = RolloutTree(task_id="w-1", group=group, metadata={"fork_failures": 2})
    tree.add(None, "prompt", [9, 9, 9, 9])
    policy(tree, 0, [0.2, 0.2, 0.2], calls=[call("search")])
    tree.add(1, "observation", [7, 7], tools=("search",))
    policy(tree, 2, [0.6] * 5)
    policy(tree, 2, [1.0, 1.0])
    policy(tree, 0, [0.4], calls=[call("python", "exception"), call("serach\n", "unknown_tool", executed=False)])
    tree.add(5, "observation", [7, 7, 7], tools=("python", "serach\n"))
    policy(tree, 6, [0.1] * 4)
    tree.trajectories = [
        Trajectory(tree=tree, index=0, origin="initial", leaf=3, reward=1.1, reward_parts={"accuracy": 1.0, "tool_bonus": 0.1}, stop_reason="answered"),
        Trajectory(tree=tree, index=1, origin="initial", leaf=7, reward=0.0, reward_parts={"accuracy": 0.0, "tool_bonus": 0.0}, stop_reason="max_turns"),
        Trajectory(
            tree=tree, index=2, origin="branched", branched_from=2, parent=0, leaf=4, reward=0.4, reward_parts={"accuracy": 0.4}, stop_reason="answered"
        ),
    ]
    tree.decisions = [
        Decision(node=2, trajectory=0, depth=1, initial_entropy=0.2, entropy=0.6, score=0.5, children=1),
        Decision(node=6, trajectory=1, depth=1, initial_entropy=0.4, entropy=0.1, score=-0.2),
    ]
    return tree


def independent_tree(rewards: list[float], scored: list[bool] | None = None) -> RolloutTree:
    tree = RolloutTree()
    tree.add(None, "prompt", [9])
    for index, reward in enumerate(rewards):
        leaf = policy(tree, 0, [0.5, 0.5])
        ok = scored is None or scored[index]
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=leaf, reward=reward, scored=ok))
    return tree


def test_every_number_of_the_small_tree() -> None:
    expected = {
        "reward/mean": 0.5,  # (1.1 + 0 + 0.4) / 3
        "reward/std": math.sqrt((0.6**2 + 0.5**2 + 0.1**2) / 3),
        "reward/accuracy": 1.4 / 3,
        "reward/tool_bonus": 0.05,  # only two trajectories have the part
        "accuracy": 1.4 / 3,
        "unscored": 0.0,
        "tool_calls/total": 2.0,  # the search that two trajectories share was made once; the unknown tool never ran
        "tool_calls/search": 1.0,
        "tool_calls/python": 1.0,
        "tool_failures/python/exception": 1.0,
        "tool_failures/unknown/unknown_tool": 1.0,
        "tokens/generated": 15.0,  # 3 + 5 + 2 + 1 + 4
        "tokens/unique": 24.0,  # 15 + prompt 4 + results 2 + 3
        "tokens/total": 37.0,  # t0 14 + t1 12 + t2 11
        "tokens/share_ratio": 37 / 24,
        "entropy/mean": (0.6 + 3.0 + 2.0 + 0.4 + 0.4) / 15,
        "turns/mean": 2.0,
        "trajectories/initial": 2.0,
        "trajectories/branched": 1.0,
        "trajectories/fresh": 0.0,
        "stop/answered": 2 / 3,
        "stop/max_turns": 1 / 3,
        "branch/points": 2.0,
        "branch/branched": 1.0,
        "branch/children": 1.0,
        "branch/delta_mean": 0.05,  # (0.4 - 0.3) / 2
        "branch/depth_mean": 1.0,
        "branch/by_tool/search": 1.0,
        "branch/fork_failures": 2.0,
        "branch/unsettled": 0.0,
        "entropy/mass_covered": 1.0,
        "entropy/initial": 0.3,
        "entropy/after_observation": 0.35,
        "groups/zero_variance": 0.0,
        "groups/effective_size": 9 / (3 + 2 * 3 / math.sqrt(8 * 5)),  # t0 and t2 share 3 of 8 and 5 sampled tokens
    }
    metrics = rollout_metrics([branched_tree()])
    assert metrics == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values())


def test_estimated_entropies_and_open_decisions_are_told() -> None:
    tree = branched_tree()
    tree.nodes[3].bounds = EntropyBounds(lower=(0.5,) * 5, upper=(0.7,) * 5, covered=(0.7, 0.8, 0.9, 1.0, 0.6))
    tree.decisions[1].settled = False
    metrics = rollout_metrics([tree, branched_tree(1)])
    assert metrics["branch/unsettled"] == 1.0
    assert metrics["entropy/mass_covered"] == pytest.approx((4.0 + 10 + 15) / 30)  # node 3: five tokens with 4.0 together


def test_unscored_trajectories_are_counted_and_left_out_never_zero() -> None:
    metrics = rollout_metrics([independent_tree([1.0, 1.0, 0.0], scored=[True, True, False])])
    assert metrics["accuracy"] == metrics["reward/mean"] == 1.0
    assert metrics["reward/std"] == 0.0
    assert metrics["unscored"] == 1.0
    assert metrics["groups/zero_variance"] == 1.0  # the two that count are equal
    assert metrics["groups/effective_size"] == pytest.approx(2.0)


def test_zero_variance_is_exact_and_counts_groups_too_small_to_have_any() -> None:
    trees = [independent_tree([0.7] * 16), independent_tree([1.0, 0.0]), independent_tree([1.0, 0.0], scored=[True, False])]
    assert rollout_metrics(trees)["groups/zero_variance"] == pytest.approx(2 / 3)
    trees.append(independent_tree([1.0, 0.0], scored=[False, False]))
    assert rollout_metrics(trees)["groups/zero_variance"] == pytest.approx(3 / 4)


def test_effective_size_of_independent_identical_and_unsampled_trajectories() -> None:
    assert effective_size(independent_tree([0.0] * 4)) == pytest.approx(4.0)
    assert effective_size(independent_tree([0.0], scored=[False])) == 0.0
    twins = independent_tree([0.0])
    twins.trajectories.append(Trajectory(tree=twins, index=1, origin="branched", leaf=1))
    assert effective_size(twins) == pytest.approx(1.0)
    empty = RolloutTree()
    empty.add(None, "prompt", [9])
    empty.trajectories = [Trajectory(tree=empty, index=i, origin="initial", leaf=0) for i in range(2)]  # a prompt longer than the context
    assert effective_size(empty) == pytest.approx(2.0)


def test_shared_prompt_and_observation_tokens_do_not_correlate_trajectories() -> None:
    tree = branched_tree()
    tree.nodes[0].token_ids = [9] * 1000
    tree.nodes[2].token_ids = [7] * 1000
    assert effective_size(tree) == pytest.approx(effective_size(branched_tree()))


def test_correctness_reads_the_accuracy_part_before_the_reward() -> None:
    tree = branched_tree()
    assert [correctness(t) for t in tree.trajectories] == [1.0, 0.0, 0.4]
    tree.trajectories[0].reward_parts, tree.trajectories[1].reward_parts = {}, {"accuracy": 0.0, "bonus": 0.1}
    tree.trajectories[1].reward = 0.1
    assert [correctness(t) for t in tree.trajectories][:2] == [1.0, 0.0]
    assert correctness(Trajectory(tree=tree, index=0, origin="fresh", reward=-1.0)) == 0.0


def test_depth_is_weighted_by_children_and_dialogue_branches_have_a_key() -> None:
    tree = branched_tree()
    tree.nodes[6].tools = ()
    tree.decisions[0].children, tree.decisions[1].children, tree.decisions[1].depth = 3, 1, 5
    metrics = rollout_metrics([tree])
    assert metrics["branch/depth_mean"] == 2.0  # (1 + 1 + 1 + 5) / 4
    assert metrics["branch/by_tool/none"] == 1.0


def test_keys_stay_without_data() -> None:
    nothing, something = rollout_metrics([]), rollout_metrics([independent_tree([1.0])])
    assert set(nothing) <= set(something)
    assert set(something) - set(nothing) == {"stop/none"}
    assert math.isnan(nothing["reward/mean"]) and math.isnan(something["branch/delta_mean"])
    assert nothing["tool_calls/total"] == 0.0


def test_advantages_are_summarised_over_scored_trajectories() -> None:
    trees = [independent_tree([1.0, 0.0, 5.0], scored=[True, True, False]), independent_tree([1.0, 1.0])]
    metrics = rollout_metrics(trees, [np.array([2.0, -1.0, 0.0]), np.array([0.0, 0.0])])
    assert metrics["advantage/mean_abs"] == 0.75  # (2 + 1 + 0 + 0) / 4
    assert metrics["advantage/zero"] == 0.5
    with pytest.raises(ValueError, match=r"\(3,\), \(2,\)"):
        rollout_metrics(trees, [np.zeros(3), np.zeros(3)])


def test_a_reward_part_cannot_hide_the_mean() -> None:
    tree = independent_tree([1.0])
    tree.trajectories[0].reward_parts = {"mean": 7.0}
    with pytest.raises(ValueError, match="must not be called"):
        rollout_metrics([tree])
