"""The rollout tree: views, owners, counts and the canonical order, by hand and over random trees."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_algo.entropy import EntropyBounds
from arpo_algo.tree import Decision, RolloutTree, Trajectory


def drawing() -> RolloutTree:
    """The tree drawn at the top of ``arpo_algo.tree``."""
    tree = RolloutTree(task_id="t", group=3, version=7)
    tree.add(None, "prompt", [1, 2, 3])
    tree.add(0, "policy", [4, 5], logprobs=[-0.1, -0.2], entropies=[0.3, 0.4], version=7)
    tree.add(1, "observation", [6], tools=("search",))
    tree.add(2, "policy", [7, 8], logprobs=[-0.5, -0.6], entropies=[0.7, 0.8], version=7)
    tree.add(2, "policy", [9], logprobs=[-0.9], entropies=[1.0], version=8)
    tree.add(0, "policy", [10], logprobs=[-1.1], entropies=[1.2], version=7)
    tree.add(5, "observation", [11, 12])
    tree.add(6, "policy", [13], logprobs=[-1.4], entropies=[1.5], version=7)
    tree.trajectories = [
        Trajectory(tree=tree, index=0, origin="initial", leaf=3, reward=1.0),
        Trajectory(tree=tree, index=1, origin="initial", leaf=7, scored=False),
        Trajectory(tree=tree, index=2, origin="branched", branched_from=2, parent=0, leaf=4, reward=0.5),
    ]
    tree.decisions = [Decision(node=6, trajectory=1, depth=1, initial_entropy=1.2, entropy=1.5, score=0.56), Decision(
        node=2, trajectory=0, depth=1, initial_entropy=0.35, entropy=0.75, score=0.58, children=1)]  # fmt: skip
    return tree


def test_a_trajectory_is_its_path() -> None:
    child = drawing().trajectories[2]
    assert [node.id for node in child.nodes()] == [0, 1, 2, 4]
    assert child.token_ids == [1, 2, 3, 4, 5, 6, 9]
    assert child.mask == [False, False, False, True, True, False, True]
    assert child.logprobs == [0, 0, 0, -0.1, -0.2, 0, -0.9]
    assert child.entropies == [0, 0, 0, 0.3, 0.4, 0, 1.0]
    assert child.sampled_tokens == 3


def test_counts() -> None:
    tree = drawing()
    # 3 + 2 + 1 + 2 + 1 + 1 + 2 + 1; the prompt has three owners, nodes 1 and 2 have two: 3*3 + 2*2 + 1*2 + 2 + 1 + 1 + 2 + 1
    assert (tree.unique_tokens, tree.total_tokens, tree.sampled_tokens) == (13, 22, 7)
    assert tree.owners() == [[0, 1, 2], [0, 2], [0, 2], [0], [2], [1], [1], [1]]
    assert dict(tree.children()) == {0: [1, 5], 1: [2], 2: [3, 4], 3: [], 4: [], 5: [6], 6: [7], 7: []}
    np.testing.assert_array_equal(tree.rewards_M, [1.0, 0.0, 0.5])
    np.testing.assert_array_equal(tree.scored_M, [True, False, True])


def test_calls_of_a_trajectory_include_the_shared_ones() -> None:
    tree = drawing()
    tree.nodes[1].calls = [{"name": "search"}]
    tree.nodes[4].calls = [{"name": "python"}, {"name": "search"}]
    assert [call["name"] for call in tree.trajectories[2].calls] == ["search", "python", "search"]
    assert [call["name"] for call in tree.trajectories[0].calls] == ["search"]


def test_decision_delta() -> None:
    assert Decision(node=0, trajectory=0, depth=1, initial_entropy=0.2, entropy=0.6, score=0.5).delta == pytest.approx(0.4)


def test_a_policy_node_needs_a_logprob_and_an_entropy_for_each_token() -> None:
    tree = drawing()
    with pytest.raises(ValueError, match="got 2, 2, 1"):
        tree.add(2, "policy", [1, 2], logprobs=[0.0, 0.0], entropies=[0.0])
    with pytest.raises(ValueError, match="got 1, 0, 1"):
        tree.add(2, "policy", [1], entropies=[0.0])
    with pytest.raises(ValueError, match="only the first node has no parent"):
        tree.add(None, "prompt", [1])
    with pytest.raises(ValueError, match="only the first node has no parent"):
        RolloutTree().add(0, "prompt", [1])
    with pytest.raises(ValueError, match="bounds need one entry for each of 1 tokens, or none, got 0"):
        tree.add(2, "policy", [1], logprobs=[0.0], entropies=[0.0], bounds=EntropyBounds(lower=(), upper=(), covered=()))
    with pytest.raises(ValueError, match="versions need one entry for each of 1 tokens, or none, got 2"):
        tree.add(2, "policy", [1], logprobs=[0.0], entropies=[0.0], versions=[1, 2])
    assert len(tree.nodes) == 8


def test_a_node_keeps_its_ids_when_the_given_list_changes() -> None:
    tree, given_ids = RolloutTree(), [1, 2]
    tree.add(None, "prompt", given_ids)
    given_ids.append(3)
    assert tree.nodes[0].token_ids == [1, 2]


def test_canonical_numbers_nodes_depth_first_by_trajectory() -> None:
    tree = drawing()
    twin = tree.canonical()
    assert [[n.id for n in t.nodes()] for t in twin.trajectories] == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 7]]
    assert [t.token_ids for t in twin.trajectories] == [t.token_ids for t in tree.trajectories]
    assert twin.trajectories[2].branched_from == 2
    assert [(d.node, d.trajectory) for d in twin.decisions] == [(2, 0), (5, 1)]
    assert [n.version for n in twin.nodes] == [0, 7, 0, 7, 7, 0, 7, 8]
    assert (twin.task_id, twin.group, twin.version) == ("t", 3, 7)


def test_canonical_trees_differ_where_anything_but_time_differs() -> None:
    def changed(change: object) -> RolloutTree:
        tree = drawing()
        change(tree)  # type: ignore[operator]
        return tree.canonical()

    same = drawing().canonical()
    assert changed(lambda tree: setattr(tree.nodes[1], "seconds", 5.0)) == same
    assert changed(lambda tree: tree.decisions.reverse()) == same
    for change in (
        lambda tree: tree.nodes[4].token_ids.__setitem__(0, 99),
        lambda tree: tree.nodes[1].logprobs.__setitem__(0, -9.0),
        lambda tree: setattr(tree.nodes[1], "version", 9),
        lambda tree: setattr(tree.nodes[2], "tools", ("python",)),
        lambda tree: setattr(tree.trajectories[0], "reward", 0.25),
        lambda tree: setattr(tree.trajectories[2], "parent", 1),
        lambda tree: setattr(tree.decisions[0], "score", 0.0),
    ):
        assert changed(change) != same


@st.composite
def random_trees(draw: st.DrawFn) -> tuple[RolloutTree, random.Random]:
    """Trees whose nodes were added in a random order of time."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    tree = RolloutTree()
    tree.add(None, "prompt", [rng.randrange(9) for _ in range(rng.randrange(1, 4))])
    for _ in range(rng.randrange(1, 20)):
        parent = rng.choice(tree.nodes)
        ids = [rng.randrange(9) for _ in range(rng.randrange(0, 4))]
        if parent.role == "policy":
            tree.add(parent.id, "observation", ids)
        else:
            tree.add(parent.id, "policy", ids, logprobs=[-1.0] * len(ids), entropies=[1.0] * len(ids), seconds=rng.random())
    leaves = [i for i, children in tree.children() if not children]
    for index, leaf in enumerate(rng.sample(leaves, len(leaves))):
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=leaf))
    return tree, rng


@given(random_trees())
def test_views_agree_with_the_nodes(drawn: tuple[RolloutTree, random.Random]) -> None:
    tree, _ = drawn
    for trajectory in tree.trajectories:
        ids: list[int] = []
        node = tree.nodes[trajectory.leaf]
        while True:
            ids = node.token_ids + ids
            if node.parent is None:
                break
            node = tree.nodes[node.parent]
        assert trajectory.token_ids == ids
        assert len(trajectory.mask) == len(trajectory.logprobs) == len(trajectory.entropies) == len(ids)
        assert sum(trajectory.mask) == trajectory.sampled_tokens
    assert tree.total_tokens == sum(len(t.token_ids) for t in tree.trajectories)
    assert tree.sampled_tokens <= tree.unique_tokens <= tree.total_tokens
    for node, owners in zip(tree.nodes, tree.owners(), strict=True):
        assert owners == [t.index for t in tree.trajectories if node in t.nodes()]


@given(random_trees())
def test_canonical_forgets_the_order_of_time_alone(drawn: tuple[RolloutTree, random.Random]) -> None:
    tree, rng = drawn
    later = RolloutTree()
    place: dict[int, int] = {}
    waiting = [tree.nodes[0]]
    children = dict(tree.children())
    while waiting:
        node = waiting.pop(rng.randrange(len(waiting)))
        parent = None if node.parent is None else place[node.parent]
        added = later.add(parent, node.role, node.token_ids, logprobs=node.logprobs, entropies=node.entropies, seconds=rng.random())
        place[node.id] = added.id
        waiting += [tree.nodes[child] for child in children[node.id]]
    later.trajectories = [Trajectory(tree=later, index=t.index, origin=t.origin, leaf=place[t.leaf]) for t in tree.trajectories]
    assert later.canonical() == tree.canonical()
    assert tree.canonical().canonical() == tree.canonical()
