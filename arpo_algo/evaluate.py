"""Evaluation: how often the policy is right, and how sure that number is.

The unit is the task. A task's accuracy is the mean over its scored trajectories, the accuracy of a set is the mean over its tasks, and the interval comes from
drawing tasks anew (the samples of one task are one cluster: ten samples of one task are not ten tasks). An unscored trajectory is left out and counted; it is
never a wrong answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from arpo_algo.branching import NoBranching
from arpo_algo.codec import Codec
from arpo_algo.env_source import EnvSource
from arpo_algo.metrics import correctness, count_calls, count_failures, mean_or_nan
from arpo_algo.policies.base import Policy
from arpo_algo.rollout import sample_groups
from arpo_algo.rollout_config import RolloutConfig
from arpo_algo.tree import RolloutTree, Trajectory
from arpo_env.task import Task

_CHUNK = 1 << 20
"""Most drawn indices held in memory at once (8 MB)."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples is right, when ``c`` of ``n`` were.

    ``1 - C(n - c, k) / C(n, k)``, as a product so that nothing overflows: Chen et al. 2021, arXiv:2107.03374, section 2.1.
    Raises ``ValueError`` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"expected 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))  # a factor is 0 when fewer than k are wrong


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds of its confidence interval. All NaN when there was nothing to average."""

    mean: float
    low: float
    high: float
    tasks: int
    """Number of tasks behind it."""
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_interval(values: Sequence[float | Sequence[float]], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean over tasks and its percentile bootstrap interval; the same seed gives the same bounds.

    ``values`` holds a number for each task, or the numbers of its samples (not empty), whose mean then is the task's. Tasks are what is drawn, with
    replacement. Memory is bounded whatever the number of tasks. When all tasks agree the interval has width 0: no bootstrap sees what it never drew.
    Raises ``ValueError`` for no tasks, a task without samples, a value that is not finite, or confidence outside (0, 1).
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"confidence must be in (0, 1) and resamples at least 1, got {confidence} and {resamples}")
    means = np.array([_task_mean(samples, index) for index, samples in enumerate(values)])  # (tasks,)
    if not len(means):
        raise ValueError("expected the values of at least one task, got none")
    random, rows = np.random.default_rng(seed), max(1, _CHUNK // len(means))
    drawn = [
        means[random.integers(len(means), size=(min(rows, resamples - start), len(means)))].mean(1)  # (rows,)
        for start in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(drawn), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(means.mean()), float(low), float(high), len(means), confidence)


def _task_mean(value: float | Sequence[float], index: int) -> float:
    samples = np.atleast_1d(np.asarray(value, dtype=np.float64))
    if not samples.size or not np.isfinite(samples).all():
        raise ValueError(f"task {index} must have at least one value, all finite, got {value}")
    return float(samples.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What :func:`summarize` found. ``str()`` gives a few lines to read, :meth:`to_dict` flat numbers for JSON and trackers."""

    tasks: int
    trajectories: int
    unscored: int
    """Trajectories without a meaning in their reward; in no accuracy, in every count below."""
    accuracy: Interval
    pass_at: dict[int, Interval]
    """By k; over the tasks with at least k scored trajectories. A trajectory passes when its correctness is 1."""
    reward: float
    """Mean over tasks of the mean over their scored trajectories."""
    tool_calls: dict[str, float]
    """Executed calls a trajectory, by tool."""
    tool_failures: dict[str, int]
    """Failed calls in all, by ``tool/error``."""
    turns: float
    """Turns of the policy a trajectory."""
    tokens: float
    """Sampled tokens a trajectory."""
    stop_reasons: dict[str, int]
    trees: Sequence[RolloutTree] = field(repr=False, compare=False)
    """What was summarized, to look into."""

    def to_dict(self) -> dict[str, float]:
        """Flat floats, named as the metrics of training are."""
        intervals = {"accuracy": self.accuracy} | {f"pass@{k}": interval for k, interval in self.pass_at.items()}
        bounds = {f"{name}{end}": value for name, i in intervals.items() for end, value in (("", i.mean), ("/low", i.low), ("/high", i.high))}
        return {
            **bounds,
            "reward/mean": self.reward,
            "tasks": float(self.tasks),
            "trajectories": float(self.trajectories),
            "unscored": float(self.unscored),
            "turns/mean": self.turns,
            "tokens/mean": self.tokens,
            "tool_calls/mean": sum(self.tool_calls.values()),
            **{f"tool_calls/{name}": count for name, count in self.tool_calls.items()},
            **{f"tool_failures/{name}": float(count) for name, count in self.tool_failures.items()},
            **{f"stop/{name}": count / self.trajectories for name, count in self.stop_reasons.items()},
        }

    def __str__(self) -> str:
        calls = ", ".join(f"{name} {count:.2f}" for name, count in self.tool_calls.items())
        failures = ", ".join(f"{name} {count}" for name, count in self.tool_failures.items())
        stops = ", ".join(f"{name} {count}" for name, count in self.stop_reasons.items())
        passes = ", ".join(f"pass@{k} {interval} ({interval.tasks} tasks)" for k, interval in self.pass_at.items())
        return "\n".join(
            [
                f"accuracy {self.accuracy} at {self.accuracy.confidence:.0%}: {self.tasks} tasks, {self.trajectories} trajectories, {self.unscored} unscored",
                passes or "pass@k: nothing scored",
                f"a trajectory: reward {self.reward:.3f}, turns {self.turns:.2f}, tokens {self.tokens:.1f}, tool calls {sum(self.tool_calls.values()):.2f}"
                + (f" ({calls})" if calls else ""),
                f"stopped: {stops or 'none'}; failed calls: {failures or 'none'}",
            ]
        )


def summarize(
    trees: Sequence[RolloutTree],
    *,
    correct: Callable[[Trajectory], float] = correctness,
    ks: Sequence[int] | None = None,
    seed: int = 0,
) -> EvalResult:
    """Accuracy with its interval, pass@k and what it took, from trees that hold one task each.

    ``ks``: None for 1 and the largest k that every task with a scored trajectory allows. pass@k is unbiased for trajectories sampled independently of one
    another, that is without branching. ``correct`` says how right a trajectory is, from 0 to 1.
    """
    scored = [[trajectory for trajectory in tree.trajectories if trajectory.scored] for tree in trees]
    correct_by_task = [[correct(trajectory) for trajectory in task] for task in scored if task]
    if ks is None:
        ks = sorted({1, min(map(len, correct_by_task))}) if correct_by_task else ()

    def interval(values: Sequence[float]) -> Interval:
        if not values:
            return Interval(math.nan, math.nan, math.nan, 0)
        return bootstrap_interval(values, seed=seed)

    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    return EvalResult(
        tasks=len(trees),
        trajectories=len(trajectories),
        unscored=sum(not trajectory.scored for trajectory in trajectories),
        accuracy=interval([float(np.mean(values)) for values in correct_by_task]),
        pass_at={k: interval([pass_at_k(len(v), _passes(v), k) for v in correct_by_task if len(v) >= k]) for k in ks},
        reward=mean_or_nan([float(np.mean([trajectory.reward for trajectory in task])) for task in scored if task]),
        tool_calls=_calls_per_trajectory(trajectories),
        tool_failures=dict(sorted(count_failures(call for trajectory in trajectories for call in trajectory.calls).items())),
        turns=mean_or_nan([sum(node.sampled for node in trajectory.nodes()) for trajectory in trajectories]),
        tokens=mean_or_nan([trajectory.sampled_tokens for trajectory in trajectories]),
        stop_reasons=dict(Counter(trajectory.stop_reason or "none" for trajectory in trajectories).most_common()),
        trees=trees,
    )


async def evaluate(
    env: EnvSource,
    policy: Policy,
    codec: Codec,
    tasks: Sequence[Task],
    config: RolloutConfig,
    *,
    samples: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> EvalResult:
    """Sample ``samples`` independent trajectories a task, without branching, and summarize them. ``temperature`` 0 is greedy."""
    config = replace(config, group_size=samples, initial=samples, temperature=temperature)
    options = [{"task": task} for task in tasks]
    trees = await sample_groups(env, policy, codec, NoBranching(), config, options, seed=seed)
    return summarize(trees, seed=seed)


def _passes(values: Sequence[float]) -> int:
    return sum(value >= 1 - 1e-9 for value in values)  # a weighted sum of parts may miss 1 by a rounding


def _calls_per_trajectory(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = count_calls(call for trajectory in trajectories for call in trajectory.calls)
    return {name: count / len(trajectories) for name, count in sorted(counts.items())}
