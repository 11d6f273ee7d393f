"""pass@k, bootstrap intervals and summaries of evaluation trees."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numpy as np
import pytest

import arpo_algo.evaluate as evaluate
from arpo_algo.evaluate import EvalResult, bootstrap_interval, pass_at_k, summarize
from arpo_algo.tree import RolloutTree, Trajectory


def task(values: list[float | None], *, part: bool = True) -> RolloutTree:
    """One trajectory of two sampled tokens and one search call for each value; None is unscored."""
    tree = RolloutTree()
    tree.add(None, "prompt", [1])
    for index, value in enumerate(values):
        calls = [{"name": "search", "arguments": {}, "ok": index > 0, "error": "" if index else "timeout", "executed": True}]
        leaf = tree.add(0, "policy", [2, 3], logprobs=[0.0, 0.0], entropies=[0.0, 0.0], calls=calls).id
        parts = {"accuracy": value} if part and value is not None else {}
        trajectory = Trajectory(tree=tree, index=index, origin="initial", leaf=leaf, reward=value or 0.0, reward_parts=parts, scored=value is not None)
        trajectory.stop_reason = "answered" if value is not None else "env_error"
        tree.trajectories.append(trajectory)
    return tree


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_equals_the_count_over_all_subsets(n: int) -> None:
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand_and_at_sizes_that_overflow_binomials() -> None:
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)  # 1 - C(2,2) / C(4,2); with replacement it would be 3/4
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    n, c, k = 100_000, 3, 1_000
    exact = 1 - math.prod((n - k - i) / (n - i) for i in range(c))  # C(n-c, k) / C(n, k) with the roles of c and k exchanged
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-9)
    for wrong in [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), (0, 0, 1)]:
        with pytest.raises(ValueError, match="1 <= k <= n"):
            pass_at_k(*wrong)


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = [1.0] * 120 + [0.0] * 280  # p = 0.3, n = 400, standard error sqrt(.21/400) = 0.0229
    interval = bootstrap_interval(values)
    assert interval.mean == 0.3 and interval.tasks == 400
    assert interval.low == pytest.approx(0.3 - 1.96 * 0.0229, abs=0.004)
    assert interval.high == pytest.approx(0.3 + 1.96 * 0.0229, abs=0.004)
    narrow = bootstrap_interval(values, confidence=0.5)  # 0.674 standard errors
    assert narrow.high - narrow.low == pytest.approx(2 * 0.674 * 0.0229, abs=0.004)
    assert bootstrap_interval(values) == interval
    uneven = list(np.random.default_rng(0).random(50))
    assert bootstrap_interval(uneven, seed=1) != bootstrap_interval(uneven, seed=2)


def test_samples_of_a_task_are_one_cluster() -> None:
    clustered = [[1.0] * 10] * 6 + [[0.0] * 10] * 14  # 20 tasks whose ten samples agree carry the information of 20 numbers
    assert bootstrap_interval(clustered) == bootstrap_interval([1.0] * 6 + [0.0] * 14)
    flat = bootstrap_interval([1.0] * 60 + [0.0] * 140)
    wide = bootstrap_interval(clustered)
    assert wide.high - wide.low > 2.5 * (flat.high - flat.low)  # sqrt(10) = 3.2


def test_tasks_weigh_the_same_whatever_their_number_of_samples() -> None:
    assert bootstrap_interval([[1.0], [0.0] * 9]).mean == 0.5


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watched:
        def __init__(self, seed: int) -> None:
            self.inner = np.random.Generator(np.random.PCG64(seed))

        def integers(self, high: int, size: tuple[int, int]) -> np.ndarray:
            sizes.append(size[0] * size[1])
            return self.inner.integers(high, size=size)

    monkeypatch.setattr(evaluate, "_CHUNK", 1000)
    monkeypatch.setattr(evaluate.np.random, "default_rng", Watched)
    bootstrap_interval(list(np.linspace(0, 1, 300)), resamples=50)
    assert max(sizes) == 900 and sum(sizes) == 50 * 300  # three rows of 300 at a time, the last two


def test_interval_refuses_what_has_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="task 1 must have at least one value"):
        bootstrap_interval([[1.0], []])
    with pytest.raises(ValueError, match="all finite"):
        bootstrap_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_interval([1.0], confidence=95)


def test_unscored_is_left_out_and_counted() -> None:
    result = summarize([task([1.0, None]), task([0.0, 0.0]), task([None, None])])
    assert result.accuracy.mean == 0.5  # 0 for the unscored would give 1/6
    assert (result.accuracy.tasks, result.tasks, result.trajectories, result.unscored) == (2, 3, 6, 3)
    assert result.reward == 0.5
    assert result.tool_calls == {"search": 1.0}  # a trajectory without an answer has made its calls all the same
    assert result.tool_failures == {"search/timeout": 3}
    assert result.stop_reasons == {"answered": 3, "env_error": 3}
    assert (result.turns, result.tokens) == (1.0, 2.0)


def test_pass_at_k_averages_tasks_and_drops_those_with_too_few_samples() -> None:
    trees = [task([1.0, 1.0, 0.0, 0.0]), task([0.0] * 4), task([1.0, None, None, None])]
    result = summarize(trees, ks=(1, 2))
    assert result.pass_at[1].mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert result.pass_at[2].mean == pytest.approx((5 / 6 + 0) / 2)
    assert (result.pass_at[1].tasks, result.pass_at[2].tasks) == (3, 2)
    assert list(summarize(trees).pass_at) == [1]  # the third task allows no more
    assert list(summarize(trees[:2]).pass_at) == [1, 4]


def test_graded_answers_count_in_accuracy_and_pass_only_when_whole() -> None:
    result = summarize([task([0.6, 1.0, 0.7 + 0.2 + 0.1])])
    assert result.accuracy.mean == pytest.approx(2.6 / 3)
    assert result.pass_at[1].mean == pytest.approx(2 / 3)


def test_what_is_right_is_an_argument() -> None:
    tree = task([0.4, 0.2], part=False)
    assert summarize([tree]).accuracy.mean == 1.0  # positive rewards
    assert summarize([tree], correct=lambda t: float(t.reward > 0.3)).accuracy.mean == 0.5


def test_nothing_scored_is_not_zero() -> None:
    for trees in ([task([None])], []):
        result = summarize(trees)
        assert math.isnan(result.accuracy.mean) and result.pass_at == {}
        assert "nothing scored" in str(result)


def test_text_and_dictionary() -> None:
    result: EvalResult = summarize([task([1.0, 0.0]), task([1.0, 1.0])])
    lines = str(result).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 120
    assert lines[0] == "accuracy 0.750 [0.500, 1.000] at 95%: 2 tasks, 4 trajectories, 0 unscored"
    assert lines[1] == "pass@1 0.750 [0.500, 1.000] (2 tasks), pass@2 1.000 [1.000, 1.000] (2 tasks)"
    assert lines[2] == "a trajectory: reward 0.750, turns 1.00, tokens 2.0, tool calls 1.00 (search 1.00)"
    assert lines[3] == "stopped: answered 4; failed calls: search/timeout 2"
    numbers = result.to_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["accuracy"] == 0.75 and numbers["accuracy/low"] == 0.5 and numbers["pass@2"] == 1.0 and numbers["stop/answered"] == 1.0
