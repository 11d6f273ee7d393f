r"""The entropy of a token's distribution when only the K most probable log-probabilities of V are known: bounds, an estimate, the authors' truncated sum.

Known are p_1 >= ... >= p_K of a distribution over V ids, so the tail's mass r = 1 - sum p_k and its number of ids n = V - K, none above p_K. With
h(x) = -x ln x and S = sum h(p_k), the entropy is H = S + T, where the tail adds T = sum h(q_j) for some 0 <= q_j <= p_K that add up to r:

* lower: T is concave in q, so least at a corner of what is allowed: m = floor(r / p_K) ids at p_K and one with the rest.
  ``L = S + m h(p_K) + h(r - m p_K)``
* upper: T is greatest where all are equal, at r / n, which is at most p_K. ``U = S + r ln(n / r)``
* estimate: a tail that falls off geometrically from p_K: q_j = p_K rho^j for j = 1, 2, ... adds up to p_K rho / (1 - rho) = r at rho = r / (r + p_K), and
  ``-sum q_j ln q_j = -ln p_K sum q_j - ln rho sum j q_j = -r ln p_K - ln rho r / (1 - rho)``. It is clipped to [L, U].

No other interval is narrower: the corner and the uniform tail are distributions with these p_k. So the interval for a larger K lies inside that for a smaller
one, and at K = V all three are H. Where little mass is covered it is wide: :class:`EntropyBounds` keeps how much is.

Rounding. p_k that add up to more than 1, or leave more than n ids at p_K can hold, are off by rounding: what is known is then all of the mass, and is made to
add up to 1. Off by more than ``MASS_TOLERANCE``, they are no distribution over V ids. Log-probabilities with errors of e move the bounds by about e ln(V / e).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

MASS_TOLERANCE = 1e-3
"""Of the sum of probabilities. An engine's softmax in float32 over 150,000 ids can be off by 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBounds:
    """Where the entropies lie that were estimated, one entry a token."""

    lower: tuple[float, ...]
    """Nats."""
    upper: tuple[float, ...]
    """Nats."""
    covered: tuple[float, ...]
    """Mass of the ids whose probability is known, in [0, 1]."""

    def __post_init__(self) -> None:
        if not len(self.lower) == len(self.upper) == len(self.covered):
            raise ValueError(f"expected a lower bound, an upper bound and a mass a token, got {len(self.lower)}, {len(self.upper)} and {len(self.covered)}")

    def __len__(self) -> int:
        return len(self.lower)

    def head(self, n: int) -> EntropyBounds:
        """The bounds of the first ``n`` tokens."""
        return EntropyBounds(lower=self.lower[:n], upper=self.upper[:n], covered=self.covered[:n])


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Entropies of consecutive tokens."""

    values: tuple[float, ...] = ()
    """Nats; estimates where there are ``bounds``."""
    bounds: EntropyBounds | None = None
    """None: the values are exact."""

    @property
    def least(self) -> tuple[float, ...]:
        """The lowest that the entropies can be."""
        return self.values if self.bounds is None else self.bounds.lower

    @property
    def greatest(self) -> tuple[float, ...]:
        """The highest that the entropies can be."""
        return self.values if self.bounds is None else self.bounds.upper


def estimate_entropies(logprobs_T_K: ArrayLike, vocab_size: int) -> tuple[list[float], EntropyBounds]:
    """Estimates in nats for T tokens, and their bounds, from the log-probabilities of each token's K most probable ids, in any order.

    NaN stands for no entry, where a token has fewer than K; -inf is the probability 0. They must be the *most* probable ids: one sampled from the tail is not
    among them. Raises ``ValueError`` where they are no such part of a distribution over ``vocab_size`` ids.
    """
    logp = np.asarray(logprobs_T_K, np.float64)
    if logp.ndim != 2:
        raise ValueError(f"expected log-probabilities of shape (tokens, K), got {logp.shape}")
    known = ~np.isnan(logp)
    count = known.sum(-1)
    if not len(logp):
        return [], EntropyBounds(lower=(), upper=(), covered=())
    if count.min() < 1 or count.max() > vocab_size:
        raise ValueError(f"expected 1 to vocab_size={vocab_size} log-probabilities a token, got {count.min()} to {count.max()}")
    p = np.where(known, np.exp(np.where(known, logp, -np.inf)), 0.0)
    last = np.where(known, p, np.inf).min(-1)
    sum_p = p.sum(-1)
    rest = vocab_size - count
    tail = np.clip(1.0 - sum_p, 0.0, rest * last)
    off = np.abs(sum_p + tail - 1.0)
    if not off.max() <= MASS_TOLERANCE:
        t = int(np.argmax(off))
        raise ValueError(
            f"expected the {count[t]} highest log-probabilities of {vocab_size}: those of token {t} add up to a mass of {sum_p[t]:.6g}"
            f" and leave at most {rest[t] * last[t]:.6g} to the other ids"
        )
    total = sum_p + tail
    head, last, tail = _h(p / total[:, None]).sum(-1), last / total, tail / total
    lower = head + _corner(tail, last)
    upper = np.maximum(lower, head + _uniform(tail, rest))
    estimates = np.clip(head + _geometric(tail, last), lower, upper)
    return estimates.tolist(), EntropyBounds(lower=tuple(lower.tolist()), upper=tuple(upper.tolist()), covered=tuple((1.0 - tail).tolist()))


def truncated_entropy(logprobs_T_K: ArrayLike) -> list[float]:
    """S = -sum p ln p in nats over the given log-probabilities of each token, as the authors' code has it: nothing for the tail. For comparison only.

    At most H, and far below it where the distribution is flat: it orders states less well than the estimate does. NaN stands for no entry.
    """
    logp = np.asarray(logprobs_T_K, np.float64)
    return [float(value) for value in _h(np.nan_to_num(np.exp(logp), nan=0.0)).sum(-1)]


def _h(x: Floats) -> Floats:
    """-x ln x, 0 at 0."""
    return -x * np.log(np.where(x > 0, x, 1.0))


def _corner(tail: Floats, last: Floats) -> Floats:
    """As many ids at ``last`` as the tail can fill, and one with what remains."""
    filled = np.floor(np.divide(tail, last, out=np.zeros_like(tail), where=tail > 0))
    return filled * _h(last) + _h(np.clip(tail - filled * last, 0.0, None))


def _uniform(tail: Floats, rest: NDArray[np.int64]) -> Floats:
    """The tail spread evenly over the other ids."""
    return _h(tail) + tail * np.log(np.maximum(rest, 1))


def _geometric(tail: Floats, last: Floats) -> Floats:
    """-r ln p_K - ln rho r / (1 - rho), with x = p_K / r: -ln rho = ln(1 + x) and 1 / (1 - rho) = (1 + x) / x."""
    some = tail > 0
    x = np.divide(last, tail, out=np.ones_like(tail), where=some)
    slope = np.divide(np.log1p(x), x, out=np.ones_like(x), where=x > 0)
    return np.where(some, tail * (-np.log(np.where(last > 0, last, 1.0)) + (1.0 + x) * slope), 0.0)
