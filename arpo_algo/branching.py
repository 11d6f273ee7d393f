"""When to branch: strategies side by side, one object each with one method.

A strategy sees branch points and a budget and says how many children each point gets. It is called

* ``each_round``: round d holds the windows after the d-th observation of every trajectory alive; children of round d take part from round d + 1;
* ``at_end``: when all trajectories have ended, with every point not yet decided, and again for the points of the children;
* ``never``: the whole group is started at once.

Rounds are complete before they are decided, so the tree does not depend on which tool answered first. Points arrive in the order of their trajectories.

Departures from the paper (arXiv:2507.19849):

1. dH is a mean over the window, in nats. The paper divides by the vocabulary size (``scale="vocab"``), its code by the logarithm (``"log_vocab"``).
2. When a round has more takers than budget, the highest scores are served, not the first in row order.
3. ``AuthorsBranching`` follows the published code instead of the paper, with full entropies where the code sums the top 10 log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args

import numpy as np

from arpo_algo.entropy import EntropyBounds, Window

Scale = Literal["mean_nats", "vocab", "log_vocab"]
Timing = Literal["each_round", "at_end", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """The state right after an observation, and the entropies that speak for or against branching there (nats, full vocabulary)."""

    node: int
    trajectory: int
    depth: int
    """Observations on the path, this one included."""
    tools: tuple[str, ...] = ()
    initial: tuple[float, ...]
    """The first k tokens of the root that this trajectory goes back to."""
    after: tuple[float, ...]
    """The first k tokens after the observation; fewer where the turn was shorter."""
    before: tuple[float, ...] = ()
    """The first k tokens of the turn that led to the observation."""
    initial_bounds: EntropyBounds | None = None
    """Where the entropies of ``initial`` lie that the policy could only estimate; None: they are exact. Likewise:"""
    after_bounds: EntropyBounds | None = None
    before_bounds: EntropyBounds | None = None
    vocab_size: int

    @property
    def windows(self) -> tuple[Window, Window, Window]:
        """``initial``, ``after`` and ``before``, each with its bounds."""
        return (
            Window(values=self.initial, bounds=self.initial_bounds),
            Window(values=self.after, bounds=self.after_bounds),
            Window(values=self.before, bounds=self.before_bounds),
        )

    def delta(self, scale: Scale = "mean_nats") -> float:
        """Entropy after the observation minus initial entropy: means over the windows, divided as ``scale`` says."""
        return (mean(self.after) - mean(self.initial)) / _DIVISORS[scale](self.vocab_size)


class UnsettledBranching(ValueError):
    """Entropies that are only estimated leave a decision to branch open, and the settings ask for an error then."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one branch point gets, and why."""

    children: int
    score: float
    reason: str


class BranchingStrategy(Protocol):
    """Decides where a group branches. Stateless: everything it may look at is in the arguments."""

    timing: ClassVar[Timing]

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        """One allocation for each point; their children add up to at most ``budget``. ``rng`` depends on the seed of the group and the round alone."""
        ...


def check_strategy(strategy: object) -> None:
    """Raise ``TypeError`` for what is no strategy and ``ValueError`` for a ``timing`` that does not exist, which would never branch and say nothing."""
    if isinstance(strategy, type):
        raise TypeError(f"branching must be an object, got the class {strategy.__name__}: write {strategy.__name__}()")
    if not callable(getattr(strategy, "allocate", None)):
        raise TypeError(f"branching must be an object with a method allocate(points, budget, rng), got {strategy!r}")
    if (timing := getattr(strategy, "timing", None)) not in get_args(Timing):
        raise ValueError(f"{type(strategy).__name__}.timing must be one of {', '.join(map(repr, get_args(Timing)))}, got {timing!r}")


@dataclass(frozen=True, kw_only=True)
class EntropyBranching:
    """The paper's rule: branch where P = alpha + beta * dH exceeds tau (arXiv:2507.19849, section 3.1). With alpha = tau it is dH > 0."""

    alpha: float = 0.5
    """Base score (paper: 0.5)."""
    beta: float = 0.2
    """Weight of the entropy change (paper: 0.2)."""
    tau: float = 0.5
    """Threshold (paper: 0.5)."""
    children: int = 1
    """Z, new trajectories at a branch point."""
    scale: Scale = "mean_nats"
    timing: ClassVar[Timing] = "each_round"

    def __post_init__(self) -> None:
        _check_children(self.children)
        _check_scale(self.scale)

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        scores = [self.alpha + self.beta * point.delta(self.scale) for point in points]
        return _threshold(scores, self.tau, self.children, budget)


@dataclass(frozen=True, kw_only=True)
class LowEntropyBranching(EntropyBranching):
    """The reverse of the paper's rule, as a control: branch where alpha - beta * dH exceeds tau."""

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        scores = [self.alpha - self.beta * point.delta(self.scale) for point in points]
        return _threshold(scores, self.tau, self.children, budget)


@dataclass(frozen=True, kw_only=True)
class TopEntropyBranching:
    """Rank all branch points of the group by dH, then spend the budget on the highest, whatever the turn they lie in."""

    children: int = 1
    scale: Scale = "mean_nats"
    timing: ClassVar[Timing] = "at_end"

    def __post_init__(self) -> None:
        _check_children(self.children)
        _check_scale(self.scale)

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        scores = [point.delta(self.scale) for point in points]
        granted = _serve(scores, [True] * len(points), self.children, budget)
        ranks = {index: rank for rank, index in enumerate(_order(scores), 1)}
        return [Allocation(n, score, f"rank {ranks[i]} of {len(points)}") for i, (n, score) in enumerate(zip(granted, scores, strict=True))]


@dataclass(frozen=True, kw_only=True)
class UniformBranching:
    """Branch at every branch point while the budget lasts, in the order of the trajectories."""

    children: int = 1
    timing: ClassVar[Timing] = "each_round"

    def __post_init__(self) -> None:
        _check_children(self.children)

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        granted = _serve([0.0] * len(points), [True] * len(points), self.children, budget)
        return [Allocation(n, 1.0, "every point" if n else "budget spent") for n in granted]


@dataclass(frozen=True, kw_only=True)
class RandomBranching:
    """Branch with probability ``rate``, blind to entropy: the control at the rate that another strategy reached (``branch/branched / branch/points``)."""

    rate: float = 0.25
    children: int = 1
    timing: ClassVar[Timing] = "each_round"

    def __post_init__(self) -> None:
        _check_children(self.children)
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must be in [0, 1], got {self.rate}")

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        draws = [float(u) for u in rng.random(len(points))]
        granted = _serve([-u for u in draws], [u < self.rate for u in draws], self.children, budget)
        return [Allocation(n, u, _verdict(u < self.rate, n, f"u={u:.3f}", "<", ">=", f"{self.rate:g}")) for n, u in zip(granted, draws, strict=True)]


@dataclass(frozen=True, kw_only=True)
class AuthorsBranching:
    """The stochastic rule of the authors' published code: branch where clip(u - weight * d, 0, 1) <= probability, u uniform, served in row order.

    d is the change of the *summed* entropy of the first k tokens, divided by ln V, of the turn **before** the observation: one call late by
    construction, and 0 at the first call. For comparison only.
    """

    probability: float = 0.5
    weight: float = 0.2
    children: int = 1
    timing: ClassVar[Timing] = "each_round"

    def __post_init__(self) -> None:
        _check_children(self.children)

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        scores = []
        for point, u in zip(points, rng.random(len(points)), strict=True):
            d = (sum(point.before) - sum(point.initial)) / math.log(point.vocab_size)
            scores.append(float(np.clip(u - self.weight * d, 0.0, 1.0)))
        takers = [score <= self.probability for score in scores]
        granted = _serve([0.0] * len(points), takers, self.children, budget)
        return [
            Allocation(n, s, _verdict(take, n, f"u-wd={s:.3f}", "<=", ">", f"{self.probability:g}")) for n, s, take in zip(granted, scores, takers, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class NoBranching:
    """Plain GRPO: the whole group starts from the question."""

    timing: ClassVar[Timing] = "never"

    def allocate(self, points: Sequence[BranchPoint], budget: int, rng: np.random.Generator) -> list[Allocation]:
        return [Allocation(0, 0.0, "no branching") for _ in points]


AnyBranching = (
    EntropyBranching | TopEntropyBranching | UniformBranching | RandomBranching | LowEntropyBranching | AuthorsBranching | NoBranching | BranchingStrategy
)
"""The strategies that a configuration file can name, or any object that is one."""


def _check_children(children: int) -> None:
    if children < 1:
        raise ValueError(f"children must be at least 1, got {children}")


def mean(values: Sequence[float]) -> float:
    """The mean of ``values``; 0.0 of none (a turn without a token)."""
    return math.fsum(values) / len(values) if values else 0.0


_DIVISORS: dict[Scale, Callable[[int], float]] = {"mean_nats": lambda vocab_size: 1.0, "vocab": float, "log_vocab": math.log}


def _check_scale(scale: Scale) -> None:
    if scale not in _DIVISORS:
        raise ValueError(f"scale must be one of {sorted(_DIVISORS)}, got {scale!r}")


def _order(scores: Sequence[float]) -> list[int]:
    """Indices from the highest score to the lowest; equal scores keep the order of the points."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def _serve(scores: Sequence[float], takers: Sequence[bool], children: int, budget: int) -> list[int]:
    """Children for each taker, highest score first, until the budget is spent."""
    granted = [0] * len(scores)
    for index in _order(scores):
        if takers[index]:
            granted[index] = min(children, budget)
            budget -= granted[index]
    return granted


def _threshold(scores: Sequence[float], tau: float, children: int, budget: int) -> list[Allocation]:
    takers = [score > tau for score in scores]
    granted = _serve(scores, takers, children, budget)
    return [Allocation(n, s, _verdict(take, n, f"P={s:.3f}", ">", "<=", f"{tau:g}")) for n, s, take in zip(granted, scores, takers, strict=True)]


def _verdict(taken: bool, granted: int, score: str, yes: str, no: str, threshold: str) -> str:
    text = f"{score} {yes if taken else no} {threshold}"
    return f"{text}, budget spent" if taken and not granted else text
