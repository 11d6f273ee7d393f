"""Next tokens from logits: exact entropies, log-probabilities of the distribution sampled from, one draw a row.

The random number of a token is a hash of (seed of the turn, index of the token in the turn), and it is turned into a token by inverting the cumulative
distribution in id order. A token therefore depends on its own request alone: batching, arrival order and other requests have no part in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""Increment of SplitMix64 (Steele, Lea, Flood 2014): 2^64 divided by the golden ratio."""
_LOG_ZERO = -750.0
"""exp of this is 0 in float64: where a probability underflows, its term of the entropy becomes 0 * -750 and not 0 * -inf."""
_MUL = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def seed_key(seed: int) -> int:
    """The 64-bit key of a seed. Every 64-bit word of the seed counts, so seeds derived by hashing may be as long as they like."""
    key = 0
    while True:
        key = _mix(key ^ (seed & _MASK))
        seed >>= 64
        if seed in (0, -1):
            return key


def uniforms(keys: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each pair of key and token index: the SplitMix64 stream of the key, read at that index. 53 random bits."""
    x = keys + (index + np.uint64(1)) * np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL[1])
    x = x ^ (x >> np.uint64(31))
    return np.asarray((x >> np.uint64(11)) * 2.0**-53, np.float64)


def sample(
    logits: torch.Tensor, draws: NDArray[np.float64], temperature: NDArray[np.float64], top_p: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Ids, log-probabilities and entropies, one a row, for ``logits`` of shape (rows, vocabulary).

    Entropy: H = -sum p log p in nats over all ids, p = softmax(logits) at temperature 1 (an id with logit -inf contributes 0). Log-probability: of the
    id under softmax(logits / temperature), renormalised over the ids that ``top_p`` keeps. Temperature 0 takes the highest logit, the lowest id among
    equals, with its log-probability under softmax(logits). Logits are read as float32 and everything after that is float64.

    Raises ``FloatingPointError`` when a row holds a NaN, +inf or nothing but -inf.
    """
    logp = torch.log_softmax(logits.float().double(), dim=-1)
    p = logp.exp()
    entropy = -torch.linalg.vecdot(p, logp.clamp_min(_LOG_ZERO))
    finite = torch.isfinite(entropy)
    if not bool(finite.all()):
        rows = (~finite).nonzero().flatten().tolist()
        raise FloatingPointError(f"expected logits that make a distribution, got NaN, +inf or only -inf in rows {rows} of {len(logits)}")
    # Rows that need no tempering or truncation keep their own numbers to the last bit, whatever their neighbours ask for.
    if not ((temperature == 0) | (temperature == 1)).all():
        logp, p = _tempered(logp, p, _column(temperature, p))
    nucleus = _nucleus(p, _column(top_p, p)) if (top_p < 1).any() else p
    cdf = nucleus.cumsum(-1)
    total = cdf[:, -1:]
    # Strictly below the total, so that the first id whose cumulative probability exceeds it exists and has probability > 0.
    target = torch.minimum(_column(draws, p) * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf, target, right=True)
    greedy = _column(temperature == 0, p)
    if (temperature == 0).any():
        ids = torch.where(greedy, logp.argmax(-1, keepdim=True), ids)
    chosen = logp.gather(-1, ids)
    if nucleus is not p:
        chosen = torch.where(greedy | _column(top_p == 1, p), chosen, (p.gather(-1, ids) / total).log())
    out = torch.cat((ids.double(), chosen, entropy[:, None]), dim=1).cpu().numpy()  # one transfer; ids below 2^53 are exact
    return out[:, 0].astype(np.int64), out[:, 1], out[:, 2]


def _column(values: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """(rows,) -> (rows, 1) on the device of ``like``."""
    return torch.from_numpy(values).to(like.device)[:, None]


def _tempered(logp: torch.Tensor, p: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and probabilities at each row's temperature; greedy rows (0) stay at 1."""
    as_is = (temperature == 0) | (temperature == 1)
    tempered = torch.log_softmax(logp / torch.where(as_is, torch.ones_like(temperature), temperature), dim=-1)
    return torch.where(as_is, logp, tempered), torch.where(as_is, p, tempered.exp())


def _nucleus(p: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``p`` with the ids outside the nucleus at 0: the smallest set of most probable ids whose mass reaches ``top_p``, lower ids first among equals."""
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked  # mass of the ids ranked above: an id stays while that has not reached top_p
    keep = (before < top_p) | (top_p >= 1)
    keep[:, 0] = True
    return torch.where(torch.zeros_like(keep).scatter(-1, order, keep), p, torch.zeros_like(p))


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 on one 64-bit word."""
    x = (x + _STEP) & _MASK
    x = ((x ^ (x >> 30)) * _MUL[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MUL[1]) & _MASK
    return x ^ (x >> 31)
