"""What one update of the learner measures: sums over micro-batches, over ranks, and at the end means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arpo_algo.distributed import Ranks
from arpo_algo.losses import Objective


@dataclass(kw_only=True)
class Tally:
    """Sums over the micro-batches of one update, left on the device until the end."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    ratio_max: Tensor | None = None
    grad_norms: list[float] = field(default_factory=list)
    sharings: list[float] = field(default_factory=list)
    """Of each step: tokens over unique ones."""
    trees: int = 0
    """Steps that were computed as trees."""
    positions: int = 0
    padding: int = 0

    def chose(self, sharing: float, tree: bool) -> None:
        """Count a step, how often it shares its tokens, and whether that is made use of."""
        self.sharings.append(sharing)
        self.trees += tree

    def count(self, computed: Tensor, tokens: int) -> None:
        """Count a micro-batch that computes ``computed.numel()`` positions for ``tokens`` tokens; a packed tree computes fewer positions than tokens."""
        self.positions += computed.numel()
        self.padding += max(0, computed.numel() - tokens)

    @torch.no_grad()
    def add(self, mask: Tensor, old_logprobs: Tensor, *, loss: Tensor, logprobs: Tensor, entropies: Tensor, objective: Objective, kl: Tensor | None) -> None:
        """Count one micro-batch: (R, T) tensors, the loss a scalar. Without a token in the mask it adds zeros."""
        ratios = torch.exp(logprobs - old_logprobs)[mask]
        self.ratio_max = _larger(self.ratio_max, ratios)
        values = {
            "loss": loss,
            "tokens": mask.sum(),
            "entropy": entropies.sum(),
            "ratio_mean": ratios.sum(),
            "clip_fraction_low": objective.clipped_low[mask].sum(),
            "clip_fraction_high": objective.clipped_high[mask].sum(),
        } | ({} if kl is None else {"kl": (kl * mask).sum()})
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach()

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over tokens, the loss over steps; zeros when nothing was added. Collective, and the same on every rank."""
        names = ("loss", "entropy", "ratio_mean", "clip_fraction_low", "clip_fraction_high")
        counts = ranks.sum(torch.tensor([self.padding, self.positions]))
        sums = dict.fromkeys(names, 0.0) | reduced(self.sums, ranks)
        tokens, steps = max(sums.pop("tokens", 0.0), 1.0), max(len(self.grad_norms), 1)
        means = {name: value / (steps if name == "loss" else tokens) for name, value in sums.items()}
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return means | {
            "ratio_max": 0.0 if self.ratio_max is None else float(ranks.max(self.ratio_max)),
            "grad_norm": sum(finite) / max(len(finite), 1),
            "sharing": sum(self.sharings) / max(len(self.sharings), 1),
            "tree_layout": self.trees / max(len(self.sharings), 1),
            "padded_share": int(counts[0]) / max(int(counts[1]), 1),
        }


@dataclass(kw_only=True)
class Mismatch:
    """How far the learner's log-probabilities lie from those of the engine that sampled, for the same tokens and, so it is meant, the same weights.

    ``mean_abs`` and ``max_abs`` are in nats. ``clip_share`` is the share of tokens whose ratio learner / engine lies outside [1 - clip_low, 1 + clip_high],
    ``capped_share`` that of those above ``cap``: what engines with other numerics, or of another version of the weights, cost the objective.
    """

    clip_low: float
    clip_high: float
    cap: float | None
    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: Tensor | None = None

    @torch.no_grad()
    def add(self, logprobs: Tensor, engine: Tensor, mask: Tensor) -> None:
        """Count the mask's tokens; all three (R, T)."""
        difference = (logprobs - engine)[mask]
        ratios = difference.exp()
        self.largest = _larger(self.largest, difference.abs())
        values = {"tokens": mask.sum(), "mean_abs": difference.abs().sum(), "clip_share": ((ratios < 1 - self.clip_low) | (ratios > 1 + self.clip_high)).sum()}
        if self.cap is not None:
            values["capped_share"] = (ratios > self.cap).sum()
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """``mismatch/...``; zeros when nothing was added. Collective, and the same on every rank."""
        names = ("mean_abs", "clip_share", *(() if self.cap is None else ("capped_share",)))
        sums = dict.fromkeys(names, 0.0) | reduced(self.sums, ranks)
        tokens = max(sums.pop("tokens", 0.0), 1.0)
        largest = 0.0 if self.largest is None else float(ranks.max(self.largest))
        return {f"mismatch/{name}": value / tokens for name, value in sums.items()} | {"mismatch/max_abs": largest}


def reduced(sums: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """The sums over all ranks as numbers; alone, each to the bit. Collective: every rank has the same names."""
    if ranks.size == 1 or not sums:
        return {name: float(value) for name, value in sums.items()}
    return dict(zip(sums, ranks.sum(torch.stack([value.double() for value in sums.values()])).tolist(), strict=True))


def _larger(so_far: Tensor | None, values: Tensor) -> Tensor:
    """The largest of values >= 0 and of what was there; 0 where there is none."""
    largest = values.max() if values.numel() else values.new_zeros(())
    return largest if so_far is None else torch.maximum(so_far, largest)
