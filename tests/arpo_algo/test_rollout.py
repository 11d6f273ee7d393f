"""The sampling loop: budget, windows, where children start, and that nothing depends on the clock."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import CharCodec, End, Talk, Turn, Writer, check_tree, echo, sample, sample_one, text_of, wanderer
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_algo.branching import (
    Allocation,
    AuthorsBranching,
    BranchingStrategy,
    BranchPoint,
    EntropyBranching,
    LowEntropyBranching,
    NoBranching,
    RandomBranching,
    TopEntropyBranching,
    UniformBranching,
)
from arpo_algo.rollout import RolloutConfig, derive_seed, sample_groups
from arpo_algo.tree import RolloutTree

STRATEGIES: list[Callable[[int], BranchingStrategy]] = [
    lambda z: EntropyBranching(children=z),
    lambda z: LowEntropyBranching(children=z),
    lambda z: TopEntropyBranching(children=z),
    lambda z: UniformBranching(children=z),
    lambda z: RandomBranching(rate=0.5, children=z),
    lambda z: AuthorsBranching(children=z),
    lambda z: NoBranching(),
]


class Recorder:
    """Hands a strategy's calls on and keeps them."""

    def __init__(self, inner: BranchingStrategy) -> None:
        self.inner, self.timing = inner, inner.timing
        self.calls: list[tuple[list[BranchPoint], int]] = []

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        self.calls.append((list(points), budget))
        return self.inner.allocate(points, budget, rng)


def by_count(texts: Sequence[str], entropies: Sequence[float]) -> Callable[[str, int], Turn]:
    """The n-th turn of every trajectory is ``texts[n]`` at ``entropies[n]``."""
    return lambda context, seed: Turn(texts[context.count("<")], entropies[context.count("<")])


# -- budget ----------------------------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    strategy=st.integers(0, len(STRATEGIES) - 1),
    z=st.integers(1, 5),
    size=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 10**6),
    p_end=st.sampled_from([0.1, 0.4, 0.9]),
)
def test_a_group_is_exactly_m_trajectories_and_nothing_is_copied_or_lost(strategy: int, z: int, size: int, data: Any, seed: int, p_end: float) -> None:
    initial = data.draw(st.integers(1, size))
    made = STRATEGIES[strategy](z)
    policy, env = Writer(wanderer(p_end)), Talk(echo)
    tree = sample_one(policy, env, made, group_size=size, initial=initial, seed=seed)
    check_tree(tree, size=size, initial=size if made.timing == "never" else initial, calls=policy.calls)
    for trajectory in tree.trajectories:  # each environment saw its own path alone
        replayed: list[str] = []
        for node in trajectory.nodes()[1:]:
            if node.role == "policy":
                replayed.append(node.text)
            else:
                assert node.text == echo(list(replayed))
        assert (trajectory.stop_reason, trajectory.scored, trajectory.reward) == ("answer", True, float(replayed[-1][1:]))
    assert env.events.count("close") == env.events.count("fork"), "an environment was left open or closed twice"


def test_no_branching_starts_the_whole_group_at_once() -> None:
    policy = Writer(wanderer(), yields=lambda: 1)
    started: list[int] = []
    inner = policy.turn
    policy.turn = lambda context, seed: (started.append(len(context)), inner(context, seed))[1]
    tree = sample_one(policy, Talk(echo), NoBranching(), group_size=6, initial=2)
    assert [t.origin for t in tree.trajectories] == ["initial"] * 6
    assert started[:6] == [2] * 6
    assert {d.children for d in tree.decisions} == {0}  # windows are still reported


def test_fresh_trajectories_start_together_when_the_rest_has_ended() -> None:
    order: list[str] = []

    def turn(context: str, seed: int) -> Turn:
        order.append(context)
        return Turn("e1" if "<" in context else "a")

    policy = Writer(turn, yields=lambda: random.Random(len(order)).randint(0, 5))
    tree = sample_one(policy, Talk(echo), EntropyBranching(), group_size=7, initial=2)  # equal entropies: nobody branches
    assert [t.origin for t in tree.trajectories] == ["initial"] * 2 + ["fresh"] * 5
    assert order[:4].count("Q:") == 2 and order[4:9] == ["Q:"] * 5


def test_a_lonely_trajectory() -> None:
    for strategy in STRATEGIES:
        policy = Writer(wanderer())
        check_tree(sample_one(policy, None, strategy(3), group_size=1, initial=1), size=1, initial=1, calls=policy.calls)


def test_more_children_than_budget_are_cut_to_it() -> None:
    tree = sample_one(Writer(by_count(["a", "e1"], [0.1, 0.9])), None, EntropyBranching(children=10), group_size=5, initial=2)
    assert [t.origin for t in tree.trajectories] == ["initial"] * 2 + ["branched"] * 3
    assert [t.parent for t in tree.trajectories] == [None, None, 0, 0, 0]


@pytest.mark.parametrize("given_out", [[3, 0], [-1, 0], [1], [0, 0, 0]])
def test_a_strategy_that_gives_away_what_it_has_not_is_named(given_out: list[int]) -> None:
    class Generous:
        timing: ClassVar[Any] = "each_round"

        def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
            return [Allocation(n, 0.0, "") for n in given_out]

        def __repr__(self) -> str:
            return "Generous()"

    env = Talk(echo)
    with pytest.raises(ValueError, match=r"^Generous\(\) must give one allocation for each of 2 points, at most 2 children in all; got "):
        sample(Writer(by_count(["a", "e1"], [0.1, 0.9])), env, Generous())
    assert env.events.count("close") == env.events.count("fork")


@pytest.mark.parametrize("returned", [None, [1, 0]])
def test_a_strategy_that_returns_no_allocations_is_named(returned: Any) -> None:
    class Bare:
        timing: ClassVar[Any] = "each_round"

        def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="must return a list of Allocation, got"):
        sample(Writer(by_count(["a", "e1"], [0.1, 0.9])), Talk(echo), Bare())


# -- windows ---------------------------------------------------------------------------------------------------------------------------------------------


def test_the_papers_example_in_the_loop() -> None:
    tree = sample_one(Writer(by_count(["aa", "e1"], [0.2, 0.6])), None, EntropyBranching(alpha=0.1, beta=1.0, tau=0.3), group_size=2, initial=1)
    (decision,) = [d for d in tree.decisions if d.trajectory == 0]
    assert (decision.initial_entropy, decision.entropy) == (pytest.approx(0.2), pytest.approx(0.6))
    assert (decision.score, decision.delta) == (pytest.approx(0.5), pytest.approx(0.4))
    assert (decision.children, tree.trajectories[1].origin) == (1, "branched")


def test_the_branch_belongs_to_the_call_after_which_entropy_rose() -> None:
    # four segments, three calls: the rise is in the segment after call 2
    tree = sample_one(Writer(by_count(["a", "b", "c", "e1"], [0.2, 0.2, 1.5, 0.2])), None, EntropyBranching(), group_size=3, initial=1)
    decisions = [(d.depth, d.children) for d in tree.decisions if d.trajectory == 0]
    assert decisions == [(1, 0), (2, 1), (3, 0)]
    child = tree.trajectories[1]
    assert child.branched_from is not None
    assert tree.nodes[child.branched_from].text == "<2:b>"


def test_entropy_after_the_last_call_can_branch() -> None:
    tree = sample_one(Writer(by_count(["a", "b", "e1"], [0.2, 0.2, 1.5])), None, EntropyBranching(), group_size=2, initial=1)
    assert [(d.depth, d.children) for d in tree.decisions if d.trajectory == 0] == [(1, 0), (2, 1)]


def test_windows_are_the_first_k_tokens_and_cost_none() -> None:
    recorder = Recorder(EntropyBranching())

    def turn(context: str, seed: int) -> Turn:
        if "<" not in context:
            return Turn("abcd", [0.1, 0.2, 7.0, 7.0])
        return Turn("wxyz", [0.3, 0.4, 8.0, 8.0]) if context.count("<") == 1 else Turn("e", [0.6])

    policy = Writer(turn)
    tree = sample_one(policy, None, recorder, group_size=1, initial=1, window=2)
    (first,), _ = recorder.calls[0]
    (second,), _ = recorder.calls[1]
    assert (first.initial, first.before, first.after) == ((0.1, 0.2), (0.1, 0.2), (0.3, 0.4))
    assert (second.initial, second.before, second.after) == ((0.1, 0.2), (0.3, 0.4), (0.6,))  # a turn shorter than k
    assert (first.depth, first.vocab_size, second.depth) == (1, 1000, 2)
    assert len(policy.calls) == 3 and tree.sampled_tokens == 4 + 4 + 1


def test_two_groups_share_no_baseline() -> None:
    recorder = Recorder(EntropyBranching())

    def turn(context: str, seed: int) -> Turn:
        return Turn("e1" if "<" in context else "a", 2.0 if context.startswith("P") else 0.1)

    sample(Writer(turn), None, recorder, options=[{"task": "Q"}, {"task": "P"}], group_size=2, initial=2)
    assert len(recorder.calls) == 2
    for points, _ in recorder.calls:
        assert [p.delta() for p in points] == [0.0, 0.0]
        assert len({p.initial for p in points}) == 1


def test_roots_of_one_group_have_their_own_baseline() -> None:
    recorder = Recorder(EntropyBranching())
    roots = iter([0.25, 1.25])

    def turn(context: str, seed: int) -> Turn:
        return Turn("e1", 1.0) if "<" in context else Turn("a", next(roots))

    tree = sample_one(Writer(turn), None, recorder, group_size=3, initial=2)
    assert [p.delta() for p in recorder.calls[0][0]] == [0.75, -0.25]
    assert [t.parent for t in tree.trajectories] == [None, None, 0]


# -- where children start --------------------------------------------------------------------------------------------------------------------------------


def branching_once() -> tuple[Writer, Recorder, RolloutTree]:
    """One root that branches after its first observation; the child writes something else and makes a call more."""
    recorder = Recorder(EntropyBranching())

    def turn(context: str, seed: int) -> Turn:
        if "<" not in context:
            return Turn("aa", 0.2)
        if context.count("<") == 1:
            earlier = sum(call.context.count(ord("<")) == 1 for call in policy.calls)
            return Turn("bbbb", 0.6) if earlier == 0 else Turn("cccc", 0.9)
        return Turn("e1", 0.4)

    policy = Writer(turn)
    return policy, recorder, sample_one(policy, None, recorder, group_size=2, initial=1)


def test_children_start_right_after_the_observation_before_the_window() -> None:
    policy, _, tree = branching_once()
    parent, child = tree.trajectories
    assert text_of(parent) == "Q:aa<1:aa>bbbb<2:bbbb>e1"  # the parent keeps its continuation
    assert text_of(child) == "Q:aa<1:aa>cccc<2:cccc>e1"
    assert child.branched_from == parent.nodes()[2].id == child.nodes()[2].id
    assert [n.id for n in child.nodes()[:3]] == [n.id for n in parent.nodes()[:3]]
    contexts = ["".join(map(chr, call.context)) for call in policy.calls]
    assert contexts.count("Q:aa<1:aa>") == 2
    check_tree(tree, size=2, initial=1, calls=policy.calls)


def test_a_branch_inherits_the_initial_window_of_its_root() -> None:
    _, recorder, _ = branching_once()
    (points, _) = next((points, budget) for points, budget in recorder.calls if any(p.trajectory == 1 for p in points))
    child = next(p for p in points if p.trajectory == 1)
    assert child.initial == (0.2, 0.2)
    assert child.before == (0.9, 0.9)
    assert child.depth == 2


def test_a_child_is_no_point_at_the_place_where_it_was_born() -> None:
    _, recorder, tree = branching_once()
    assert sorted((p.depth, p.trajectory) for points, _ in recorder.calls for p in points) == [(1, 0), (2, 0), (2, 1)]
    assert [(d.depth, d.trajectory) for d in tree.canonical().decisions] == [(1, 0), (2, 0), (2, 1)]


def test_each_child_has_an_environment_of_its_own() -> None:
    seen: list[tuple[str, ...]] = []

    def reply(turns: list[str]) -> str | End:
        seen.append(tuple(turns))
        return echo(turns)

    def turn(context: str, seed: int) -> Turn:
        count = context.count("<")
        return Turn("a", 0.1) if count == 0 else Turn("bcdefgh"[seed % 7], 0.9) if count < 3 else Turn("e1")

    sample_one(Writer(turn), Talk(reply), EntropyBranching(children=4), group_size=5, initial=1)
    assert sorted(map(len, seen)) == [1] + [2] * 5 + [3] * 5 + [4] * 5


def test_rewards_collected_before_the_branch_point_belong_to_the_child_too() -> None:
    class Paying(Talk):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            observation, reward, *rest = super().step(action)
            return observation, reward + 0.25, *rest  # type: ignore[return-value]

    tree = sample_one(Writer(by_count(["a", "b", "e1"], [0.1, 0.9, 0.1])), Paying(echo), None, group_size=2, initial=1)
    assert [t.origin for t in tree.trajectories] == ["initial", "branched"]
    assert [t.reward for t in tree.trajectories] == [1.75, 1.75]


# -- strategies in the loop ------------------------------------------------------------------------------------------------------------------------------


def test_top_entropy_spends_on_the_highest_points_whatever_the_turn() -> None:
    # every trajectory: rises of 0.3, 0.1, 1.0 after its calls; two roots, so the two points at depth 3 are the highest
    tree = sample_one(Writer(by_count(["a", "b", "c", "e1"], [0.2, 0.5, 0.3, 1.2])), None, TopEntropyBranching(), group_size=4, initial=2)
    assert [(d.depth, d.trajectory) for d in tree.decisions if d.children] == [(3, 0), (3, 1)]
    entropy = sample_one(Writer(by_count(["a", "b", "c", "e1"], [0.2, 0.5, 0.3, 1.2])), None, EntropyBranching(), group_size=4, initial=2)
    assert [(d.depth, d.trajectory) for d in entropy.decisions if d.children] == [(1, 0), (1, 1)]


def test_top_entropy_is_asked_once_with_all_points_and_again_for_those_of_the_children() -> None:
    recorder = Recorder(TopEntropyBranching())
    sample_one(Writer(by_count(["a", "b", "c", "e1"], [0.2, 0.5, 0.3, 1.2])), None, recorder, group_size=4, initial=2)
    assert [(p.depth, p.trajectory) for p in recorder.calls[0][0]] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [budget for _, budget in recorder.calls] == [2]  # the children were born at the last point and passed no other
    recorder = Recorder(TopEntropyBranching())
    sample_one(Writer(by_count(["a", "b", "e1"], [0.2, 0.9, 0.1])), None, recorder, group_size=4, initial=1)
    # ranks: 0.7 after call 1, -0.1 after call 2: both get a child; the first child passes a second point, which gets the rest
    assert [([(p.depth, p.trajectory) for p in points], budget) for points, budget in recorder.calls] == [([(1, 0), (2, 0)], 3), ([(2, 1)], 1)]


def test_children_take_part_from_the_next_round_on() -> None:
    recorder = Recorder(UniformBranching())
    sample_one(Writer(by_count(["a", "b", "e1"], [0.1, 0.1, 0.1])), None, recorder, group_size=8, initial=1)
    assert [([(p.depth, p.trajectory) for p in points], budget) for points, budget in recorder.calls] == [
        ([(1, 0)], 7),
        ([(2, 0), (2, 1)], 6),
        ([(1, n) for n in range(4, 8)], 0),  # fresh ones
        ([(2, n) for n in range(4, 8)], 0),
    ]


def test_a_round_waits_for_the_slowest_trajectory() -> None:
    """The fast trajectory alone would spend the budget on its own points; the slow one's first point has the higher score."""
    recorder = Recorder(EntropyBranching())
    roots = iter(["f", "s"])

    def turn(context: str, seed: int) -> Turn:
        if "<" not in context:
            return Turn(next(roots), 0.1)
        if context.count("<") == 4:
            return Turn("e1", 0.1)
        return Turn("ab"[context.startswith("Q:s")], 0.9 if context.startswith("Q:s") else 0.2)

    policy = Writer(turn)
    policy.yields = lambda: 50 if len(policy.calls) % 5 == 2 else 0
    tree = sample_one(policy, None, recorder, group_size=3, initial=2)
    assert next([(p.depth, p.trajectory) for p in points] for points, _ in recorder.calls) == [(1, 0), (1, 1)]
    assert tree.trajectories[2].parent == 1


def test_one_who_ended_early_holds_nobody_up() -> None:
    roots = iter(["e1", "a"])
    tree = sample_one(Writer(lambda context, seed: Turn(next(roots), 0.1) if "<" not in context else Turn("e1", 0.9)), None, None, group_size=3, initial=2)
    assert [(t.origin, t.parent) for t in tree.trajectories] == [("initial", None), ("initial", None), ("branched", 1)]


def test_observations_that_are_no_tool_results_branch_too() -> None:
    def reply(turns: list[str]) -> str | End:
        return End(1.0) if len(turns) == 2 else "<I ask 90 dollars.>"

    tree = sample_one(Writer(by_count(["I offer 50", "deal"], [0.1, 0.9])), Talk(reply), None, group_size=2, initial=1)
    assert [t.origin for t in tree.trajectories] == ["initial", "branched"]
    assert tree.nodes[2].tools == ()


# -- determinism -----------------------------------------------------------------------------------------------------------------------------------------


def tree_in_order(
    strategy: BranchingStrategy, order: int, seed: int, *, forks: Callable[[list[str]], bool] = lambda turns: True, size: int = 7
) -> list[RolloutTree]:
    """Two groups, the policy letting others go first as often as ``order`` says."""
    draw = random.Random(order)
    policy = Writer(wanderer(), yields=lambda: draw.choice([0, 0, 1, 3, 40]) if order else 0)
    trees = sample(policy, Talk(echo, forks=forks), strategy, seed=seed, options=[{"task": "Q"}, {"task": "P"}], group_size=size, initial=3, max_live=14)
    return [tree.canonical() for tree in trees]


@pytest.mark.parametrize("z", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_in_which_turns_end_changes_nothing(strategy: Callable[[int], BranchingStrategy], z: int) -> None:
    for seed in range(4):
        expected = tree_in_order(strategy(z), 0, seed)
        for order in range(1, 4):
            assert tree_in_order(strategy(z), order, seed) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_latency_of_tools_and_threads_change_nothing(strategy: Callable[[int], BranchingStrategy]) -> None:
    draw = random.Random(5)

    def run(workers: int, slowest: float) -> list[RolloutTree]:
        env = Talk(echo, before=lambda turns: time.sleep(draw.uniform(0, slowest)))
        policy = Writer(wanderer(), yields=lambda: draw.randint(0, 3))
        trees = sample(policy, env, strategy(1), seed=3, options=[{"task": "Q"}, {"task": "P"}], group_size=6, initial=3, env_workers=workers)
        return [tree.canonical() for tree in trees]

    expected = run(0, 0.0)
    assert run(8, 0.05) == run(8, 0.002) == run(2, 0.002) == expected


def test_trees_of_another_seed_differ() -> None:
    assert tree_in_order(EntropyBranching(), 0, 1) != tree_in_order(EntropyBranching(), 0, 2)


def test_groups_of_one_run_have_seeds_of_their_own() -> None:
    first, second = sample(Writer(wanderer()), options=[{"task": "Q"}, {"task": "Q"}])
    assert [t.token_ids for t in first.trajectories] != [t.token_ids for t in second.trajectories]
    assert (first.group, second.group) == (0, 1)


@pytest.mark.parametrize("strategy", STRATEGIES[:6])
@pytest.mark.filterwarnings("ignore:no branch point after node")
def test_refused_forks_leave_the_tree_independent_of_the_clock(strategy: Callable[[int], BranchingStrategy]) -> None:
    def forks(turns: list[str]) -> bool:
        return not turns or turns[-1][0] in "abc"

    for seed in range(4):
        expected = tree_in_order(strategy(1), 0, seed, forks=forks)
        for order in range(1, 5):
            assert tree_in_order(strategy(1), order, seed, forks=forks) == expected


@pytest.mark.filterwarnings("ignore:no branch point after node")
def test_with_the_budget_spent_a_fork_that_was_tried_and_refused_changes_nothing() -> None:
    """The budget goes at the first call. Whoever reaches its second call before that is decided tries to fork and is refused; the last one does not try."""

    class Hurried(Writer):
        slow = "a"

        async def generate(self, prompt_ids: Sequence[int], params: Any) -> Any:
            for _ in range(30 if prompt_ids[2:3] == [ord(self.slow)] else 1):
                await asyncio.sleep(0)
            return await super().generate(prompt_ids, params)

    def run(slow: str) -> RolloutTree:
        roots = iter("ab")
        tried: list[str] = []

        def forks(turns: list[str]) -> bool:
            tried.extend(turns[:1] if len(turns) == 2 else [])
            return len(turns) != 2

        policy = Hurried(lambda context, seed: Turn(next(roots) if "<" not in context else "e1" if context.count("<") == 2 else "c", 0.1))
        policy.slow = slow
        tree = sample_one(policy, Talk(echo, forks=forks), UniformBranching(), group_size=3, initial=2)
        assert tried == ["a" if slow == "b" else "b"]
        return tree.canonical()

    assert run("a") == run("b")
    assert [(d.depth, d.trajectory, d.reason) for d in run("a").decisions][2:] == [(2, n, "budget spent") for n in range(3)]


def test_random_branching_is_reproducible_in_the_loop_and_differs_from_group_to_group() -> None:
    def reasons(seed: int) -> list[list[str]]:
        policy = Writer(by_count(["a", "b", "e1"], [0.1, 0.1, 0.1]))
        trees = sample(policy, None, RandomBranching(rate=0.5), seed=seed, options=[None, None], group_size=6, initial=3)
        return [[d.reason for d in tree.canonical().decisions] for tree in trees]

    assert reasons(1) == reasons(1)
    assert reasons(1) != reasons(2)
    first, second = reasons(1)
    assert first != second
    assert len(set(first)) == len(first), "two rounds drew the same numbers"


def test_derived_seeds_depend_on_parts_and_order() -> None:
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), (1, 2, 0), (1,), (2,), (0, 1, 2)]}
    assert len(seeds) == 7 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2)


# -- tokens in the loop ----------------------------------------------------------------------------------------------------------------------------------


class Toy(CharCodec):
    """A toy BPE that always merges: ``he`` + ``llo`` would be encoded as ``hello``."""

    words: ClassVar[dict[int, str]] = {5000: "he", 5001: "llo", 5002: "hello", 5003: "!"}

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.words.get(i) or chr(i) for i in token_ids)

    def observation(self, text: str, messages: Any, role: str, *, closed: bool) -> list[int]:
        return [5002 if text == "<hello>" else ord(c) for c in text]


def test_sampled_ids_are_never_decoded_and_encoded_again() -> None:
    contexts: list[tuple[int, ...]] = []

    class Raw(Writer):
        async def generate(self, prompt_ids: Sequence[int], params: Any) -> Any:
            contexts.append(tuple(prompt_ids))
            depth = len([i for i in prompt_ids if i == ord("<")])
            self.turn = lambda context, seed: Turn((5000, 5001), 0.1 + 0.5 * (depth == 1)) if depth < 3 else Turn((5000, 5001, 5003), 0.1)
            return await super().generate(prompt_ids, params)

    def reply(turns: list[str]) -> str | End:
        return End(1.0) if turns[-1].endswith("!") else "<" + turns[-1][0] + ">"

    policy = Raw(lambda context, seed: Turn(""))
    tree = sample_one(policy, Talk(reply), None, group_size=2, initial=1, codec=Toy())
    assert [t.origin for t in tree.trajectories] == ["initial", "branched"]
    check_tree(tree, size=2, initial=1, calls=policy.calls)
    for trajectory in tree.trajectories:
        sampled = [token for token, mask in zip(trajectory.token_ids, trajectory.mask, strict=True) if mask]
        assert sampled == [5000, 5001] * 4 + [5003]
        assert 5002 not in sampled
        turns = [n for n in trajectory.nodes() if n.role == "policy"]
        assert [n.text for n in turns] == ["hello"] * 3 + ["hello!"]
    for earlier, later in itertools.pairwise(contexts):
        if len(later) > len(earlier):
            assert later[: len(earlier)] == earlier


def test_the_context_only_grows() -> None:
    policy = Writer(by_count(["ab", "cd", "e1"], [0.1, 0.1, 0.1]))
    sample_one(policy, None, None, group_size=1, initial=1)
    contexts = ["".join(map(chr, call.context)) for call in policy.calls]
    assert contexts == ["Q:", "Q:ab<1:ab>", "Q:ab<1:ab>cd<2:cd>"]


def test_the_end_token_is_kept_and_hidden_from_the_environment() -> None:
    seen: list[str] = []

    def reply(turns: list[str]) -> str | End:
        seen.append(turns[-1])
        return echo(turns)

    tree = sample_one(Writer(lambda c, s: Turn("e1\x00" if "<" in c else "a\x00", stop="eos")), Talk(reply), None, group_size=1, initial=1)
    assert seen == ["a", "e1"]
    assert [n.token_ids[-1] for n in tree.nodes if n.sampled] == [0, 0]
    assert [n.stop_reason for n in tree.nodes if n.sampled] == ["eos", "eos"]


def test_a_stop_string_that_ends_inside_a_token_keeps_the_token() -> None:
    seen: list[str] = []

    def reply(turns: list[str]) -> str | End:
        seen.append(turns[-1])
        return End()

    sample_one(Writer(lambda c, s: Turn("a</s>\n", stop="stop")), Talk(reply), None, group_size=1, initial=1)
    assert seen == ["a</s>\n"]


def test_each_turn_keeps_the_version_that_sampled_it() -> None:
    class Updated(Writer):
        async def generate(self, prompt_ids: Sequence[int], params: Any) -> Any:
            generation = await super().generate(prompt_ids, params)
            self.version += 1  # new weights arrive before the turn does
            return generation

    tree = sample_one(Updated(by_count(["a", "b", "e1"], [0.1, 0.1, 0.1])), None, None, group_size=1, initial=1)
    assert tree.version == 0
    assert [n.version for n in tree.nodes if n.sampled] == [0, 1, 2]


def test_what_the_policy_is_asked_for() -> None:
    class Asking(Talk):
        def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
            text, info = super().reset(**kwargs)
            return text, {**info, "stop_strings": ("</s>",)}

    policy = Writer(by_count(["a", "b", "e1"], [0.1, 0.9, 0.0]))
    tree = sample_one(policy, Asking(echo), None, group_size=3, initial=1, temperature=0.7, top_p=0.9, max_turn_tokens=33)
    assert [t.origin for t in tree.trajectories] == ["initial", "branched", "fresh"]
    params = [call.params for call in policy.calls]
    assert [(p.temperature, p.top_p, p.max_new_tokens, p.stop) for p in params] == [(0.7, 0.9, 33, ("</s>",))] * 8  # also of branched and fresh ones
    assert len({p.seed for p in params}) == 8


def test_groups_come_back_in_order() -> None:
    lengths = iter([9, 1, 4])  # yields of a turn: the first group is the last to be done
    policy = Writer(wanderer(), yields=lambda: next(lengths, 1))
    config = RolloutConfig(group_size=2, initial=1, window=2, env_workers=0, max_live=6)
    trees = asyncio.run(sample_groups(Talk(echo), policy, CharCodec(), EntropyBranching(), config, [{"task": c} for c in "UVW"], seed=0))
    assert [tree.task_id for tree in trees] == ["U", "V", "W"]


def test_groups_do_not_mix_the_tasks_of_their_common_prototype() -> None:
    class Slow(Talk):
        def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
            opened = super().reset(**kwargs)
            self.turns = [opened[0]]  # the first observation of every trajectory shows it
            time.sleep(0.01)
            return opened

    def reply(turns: list[str]) -> str | End:
        return End() if len(turns) > 2 else f"<{turns[0]}>"

    trees = sample(Writer(lambda c, s: Turn("a")), Slow(reply), None, options=[{"task": c} for c in "TUVWXY"], env_workers=6)
    assert [{n.text for n in tree.nodes if n.role == "observation"} for tree in trees] == [{f"<{c}>"} for c in "TUVWXY"]


def test_environments_are_closed_as_soon_as_nobody_needs_them() -> None:
    env = Talk(echo)
    open_: list[int] = []

    def turn(context: str, seed: int) -> Turn:
        open_.append(env.events.count("fork") - env.events.count("close"))
        return Turn("e1" if context.startswith("Q:b") or context.count("<") == 3 else next(roots) if "<" not in context else "c", 0.1)

    roots = iter("bab")
    sample_one(Writer(turn, yields=lambda: 1), env, None, group_size=3, initial=2)  # no branch; then one fresh trajectory
    assert open_[0] == 3  # two roots and what the fresh one will start from
    assert open_[-2:] == [1, 1]  # the fresh one; with the budget spent there are no snapshots
    # while the second goes on alone: itself, one snapshot, the spare
    assert open_[4:6] == [3, 3]


def test_max_live_bounds_the_trajectories_alive_at_once() -> None:
    alive, most = 0, 0

    class Counting(Writer):
        async def generate(self, prompt_ids: Sequence[int], params: Any) -> Any:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            await asyncio.sleep(0)
            try:
                return await super().generate(prompt_ids, params)
            finally:
                alive -= 1

    sample(Counting(wanderer()), None, NoBranching(), options=[None] * 6, group_size=3, initial=3, max_live=7)
    assert most == 6


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"group_size": 0, "initial": 1}, "group_size must be at least 1, got 0"),
        ({"group_size": 4, "initial": 5}, r"initial must be in \[1, group_size=4\], got 5"),
        ({"initial": 0}, "initial must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"reserve_tokens": 0}, "reserve_tokens must be at least 1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"env_workers": -1}, "env_workers must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**bad)
