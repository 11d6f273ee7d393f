"""What a step of rollouts was like, as flat floats with one key a quantity. numpy, pure.

======================================  =============================================================================================
``reward/mean``, ``/std``, ``/<part>``  over scored trajectories; population standard deviation; a part: over those that have it
``accuracy``, ``unscored``              mean :func:`correctness` of the scored trajectories; how many are not scored
``tool_calls/total``, ``/<tool>``       calls executed, one that several branches share counted once
``tool_failures/<tool>/<error>``        calls that failed, refused ones included; every name the policy made up is ``unknown``
``tokens/generated``                    sampled by the policy, each once: what generation cost
``tokens/unique``, ``tokens/total``     tokens of the trees, each once; tokens of the trajectories, shared ones once for each owner
``tokens/share_ratio``                  total / unique: 1 when nothing is shared
``turns/mean``                          turns of the policy a trajectory
``branch/points``, ``/branched``        branch points measured; those that got children
``branch/children``                     branches started
``branch/by_tool/<tool>``               branch points that got children, by the tool that had answered; ``none`` where no tool had
``branch/delta_mean``                   mean of entropy after minus initial entropy over all branch points, nats
``branch/depth_mean``                   mean number of observations on the path where branches start
``branch/fork_failures``                forks refused or lost, as the rollout counts them in ``tree.metadata``
``branch/unsettled``                    branch points whose number of children estimated entropies leave open; 0 where entropies are exact
``entropy/mean``                        over all sampled tokens, each once, nats
``entropy/mass_covered``                mean over sampled tokens of the mass that their entropies are computed from; 1 where they are exact
``entropy/initial``                     mean over branch points of the initial window, nats
``entropy/after_observation``           mean over branch points of the window after the observation, nats
``groups/zero_variance``                share of groups whose scored rewards are all equal, or that have fewer than two: no signal
``groups/effective_size``               mean :func:`effective_size`
``trajectories/<origin>``               number of ``initial``, ``branched`` and ``fresh`` ones
``stop/<reason>``                       share of trajectories
``advantage/mean_abs``, ``/zero``       over scored trajectories; share that is exactly 0 (only where advantages are given)
======================================  =============================================================================================

A mean over nothing is NaN and its key is still there. Keys in ``<>`` appear where the thing occurred.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np

from arpo_algo.tree import Decision, Origin, RolloutTree, Trajectory


def correctness(trajectory: Trajectory) -> float:
    """How right the answer is, in [0, 1]: the reward part ``accuracy`` where there is one, else whether the reward is positive."""
    if "accuracy" in trajectory.reward_parts:
        return trajectory.reward_parts["accuracy"]
    return float(trajectory.reward > 0)


def count_calls(calls: Iterable[dict[str, Any]]) -> Counter[str]:
    """Calls that reached a tool, by tool."""
    return Counter(call["name"] for call in calls if call.get("executed", True))


def count_failures(calls: Iterable[dict[str, Any]]) -> Counter[str]:
    """Calls that failed, by ``tool/error``."""
    # The name of a tool that does not exist is text of the policy: as a key it would grow without limit.
    return Counter(f"{'unknown' if call['error'] == 'unknown_tool' else call['name']}/{call['error']}" for call in calls if not call["ok"])


def effective_size(tree: RolloutTree) -> float:
    """Number of independent trajectories that would estimate the mean as well as the scored ones of this group, between 1 and their number; 0 if none.

    ``n_eff = M / deff`` with Kish's design effect ``deff = 1 + (M - 1) rho`` (Survey Sampling, 1965), where rho is the mean correlation of two trajectories.
    The correlation is a model, not an estimate from rewards: were a trajectory's outcome a sum of independent terms of equal variance, one for each token it
    sampled, two trajectories of L_i and L_j sampled tokens that share S of them would correlate by ``S / sqrt(L_i L_j)``.
    """
    paths = [[node.id for node in trajectory.nodes()] for trajectory in tree.trajectories if trajectory.scored]
    if not paths:
        return 0.0
    sampled = np.array([len(node.token_ids) if node.sampled else 0 for node in tree.nodes], dtype=np.float64)
    terms = np.zeros((len(paths), len(tree.nodes)))  # (M, nodes)
    for row, path in zip(terms, paths, strict=True):
        row[path] = np.sqrt(sampled[path])
    lengths = np.sqrt((terms**2).sum(1))
    correlation = (terms @ terms.T) / np.maximum(np.outer(lengths, lengths), 1e-300)  # (M, M)
    np.fill_diagonal(correlation, 1.0)  # also where nothing was sampled
    return float(len(paths) ** 2 / correlation.sum())


def rollout_metrics(trees: Sequence[RolloutTree], advantages: Sequence[np.ndarray] | None = None) -> dict[str, float]:
    """Metrics of the groups of one step, named as in the table above.

    ``advantages``: for each tree a (M,) array. Raises ``ValueError`` when their shapes do not fit, or a reward part is called ``mean`` or ``std``.
    """
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    metrics = _reward_metrics(trajectories) | _call_metrics(trees) | _token_metrics(trees)
    metrics |= _trajectory_metrics(trajectories) | _branch_metrics(trees) | _group_metrics(trees)
    return metrics if advantages is None else metrics | _advantage_metrics(trees, advantages)


def mean_or_nan(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else math.nan


def _reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    scored = [trajectory for trajectory in trajectories if trajectory.scored]
    rewards = [trajectory.reward for trajectory in scored]
    names = sorted({name for trajectory in scored for name in trajectory.reward_parts})
    if taken := {"mean", "std"}.intersection(names):
        raise ValueError(f"a reward part must not be called 'mean' or 'std' (reward/mean and reward/std are taken), got {sorted(taken)}")
    parts = {f"reward/{name}": mean_or_nan([t.reward_parts[name] for t in scored if name in t.reward_parts]) for name in names}
    return {
        "reward/mean": mean_or_nan(rewards),
        "reward/std": float(np.std(rewards)) if rewards else math.nan,
        **parts,
        "accuracy": mean_or_nan([correctness(trajectory) for trajectory in scored]),
        "unscored": float(len(trajectories) - len(scored)),
    }


def _call_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    calls = [call for tree in trees for node in tree.nodes for call in node.calls]
    executed = count_calls(calls)
    return {
        "tool_calls/total": float(executed.total()),
        **{f"tool_calls/{name}": float(count) for name, count in sorted(executed.items())},
        **{f"tool_failures/{name}": float(count) for name, count in sorted(count_failures(calls).items())},
    }


def _token_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    sampled = [node for tree in trees for node in tree.nodes if node.sampled]
    unique, total = sum(tree.unique_tokens for tree in trees), sum(tree.total_tokens for tree in trees)
    return {
        "tokens/generated": float(sum(tree.sampled_tokens for tree in trees)),
        "tokens/unique": float(unique),
        "tokens/total": float(total),
        "tokens/share_ratio": total / unique if unique else math.nan,
        "entropy/mean": mean_or_nan([value for node in sampled for value in node.entropies]),
        "entropy/mass_covered": mean_or_nan([mass for node in sampled for mass in (node.bounds.covered if node.bounds else [1.0] * len(node.token_ids))]),
    }


def _trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    origins = Counter(trajectory.origin for trajectory in trajectories)
    stops = Counter(trajectory.stop_reason or "none" for trajectory in trajectories)
    return {
        "turns/mean": mean_or_nan([sum(node.sampled for node in trajectory.nodes()) for trajectory in trajectories]),
        **{f"trajectories/{origin}": float(origins[origin]) for origin in get_args(Origin)},
        **{f"stop/{reason}": count / len(trajectories) for reason, count in sorted(stops.items())},
    }


def _branch_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    decisions = [decision for tree in trees for decision in tree.decisions]
    branched = [decision for decision in decisions if decision.children]
    return {
        "branch/points": float(len(decisions)),
        "branch/branched": float(len(branched)),
        "branch/children": float(sum(decision.children for decision in branched)),
        "branch/delta_mean": mean_or_nan([decision.delta for decision in decisions]),
        "branch/depth_mean": mean_or_nan([decision.depth for decision in branched for _ in range(decision.children)]),
        "branch/fork_failures": float(sum(tree.metadata.get("fork_failures", 0) for tree in trees)),
        "branch/unsettled": float(sum(not decision.settled for decision in decisions)),
        **{f"branch/by_tool/{tool}": float(count) for tool, count in sorted(_branched_by_tool(trees).items())},
        "entropy/initial": mean_or_nan([decision.initial_entropy for decision in decisions]),
        "entropy/after_observation": mean_or_nan([decision.entropy for decision in decisions]),
    }


def _branched_by_tool(trees: Sequence[RolloutTree]) -> Counter[str]:
    def tools(tree: RolloutTree, decision: Decision) -> set[str]:
        return set(tree.nodes[decision.node].tools) or {"none"}

    return Counter(tool for tree in trees for decision in tree.decisions if decision.children for tool in tools(tree, decision))


def _group_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    return {
        "groups/zero_variance": mean_or_nan([float(not tree.has_signal) for tree in trees]),
        "groups/effective_size": mean_or_nan([effective_size(tree) for tree in trees]),
    }


def _advantage_metrics(trees: Sequence[RolloutTree], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    expected, got = [(len(tree.trajectories),) for tree in trees], [np.shape(advantages_M) for advantages_M in advantages]
    if expected != got:
        raise ValueError(f"advantages must hold one number for each trajectory of each tree, shapes {expected}, got {got}")
    scored = [value for tree, advantages_M in zip(trees, advantages, strict=True) for value in np.abs(advantages_M[tree.scored_M])]
    return {"advantage/mean_abs": mean_or_nan(scored), "advantage/zero": mean_or_nan([float(value == 0) for value in scored])}
