"""The settings of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from arpo_algo.bounds import check_above, check_at_least
from arpo_algo.optim import Schedule


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the weights are updated."""

    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this 2-norm; ``inf`` leaves them alone."""
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises linearly."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up; linear and cosine fall to 0 at ``total_steps``."""
    total_steps: int | None = None
    """Optimiser steps of the whole run; needed by the linear and cosine schedules."""
    epochs: int = 1
    """Passes over each batch (mu of GRPO)."""
    minibatches: int = 1
    """Optimiser steps in one pass. 1: fully on-policy in the first epoch."""
    micro_batch_tokens: int = 2048
    """Most tokens in one forward, padding included; changes memory and speed, never the result. About 2,000 are fastest on a CPU; a GPU takes more."""
    layout: Literal["auto", "tree", "packed", "padded"] = "auto"
    """``tree``: tokens that trajectories share are computed once; ``padded``: each trajectory is a padded row; ``packed``: one behind the other. ``auto``: the
    tree where the model can take it and the batch shares enough. Changes memory and speed, never the result."""
    temperature: float = 1.0
    """Divides the logits; must be the temperature of sampling."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low (epsilon_low)."""
    clip_high: float = 0.2
    """The ratio is clipped at 1 + clip_high (epsilon_high; 0.28 in DAPO)."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference (beta); 0 keeps no reference at all."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    recompute_old_logprobs: bool = False
    """Take old log-probabilities from a forward of the learner instead of from the rollout: for engines with other numerics."""
    importance_cap: float | None = None
    """With ``recompute_old_logprobs``: cap of the weight learner's / engine's probability on each token (truncated importance sampling; 2 is usual)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    accumulate_whole: bool = False
    """With several ranks: keep the gradient whole on every rank and sum it once a step instead of once a micro-batch. Less traffic, far more memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Matrix products of the forward; bfloat16 through autocast (several ranks: through FSDP's mixed precision), with the weights and the sums of gradients
    kept in float32. Pays on GPUs. Needs ``recompute_old_logprobs``."""
    logit_chunk_mib: int = 256
    """Most float32 logits held at once, in MiB."""
    seed: int = 0
    """Order of the rows when there are several mini-batches."""

    def __post_init__(self) -> None:
        for name, known in (("layout", ("auto", "tree", "packed", "padded")), ("dtype", ("float32", "bfloat16")), ("schedule", get_args(Schedule))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")
        check_above(self, 0, "lr", "max_grad_norm", "epochs", "minibatches", "micro_batch_tokens", "temperature", "logit_chunk_mib")
        check_at_least(self, 0, "weight_decay", "warmup_steps", "clip_low", "clip_high", "kl_coef", "entropy_coef")
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps > warmup_steps={self.warmup_steps}, got total_steps={self.total_steps}")
        if self.dtype == "bfloat16" and not self.recompute_old_logprobs:
            raise ValueError(
                "dtype='bfloat16' needs recompute_old_logprobs=True: the sampler computes in another precision, and the ratio would not start at 1"
            )
        if self.importance_cap is not None and not (self.recompute_old_logprobs and self.importance_cap > 0):
            cap, recompute = self.importance_cap, self.recompute_old_logprobs
            raise ValueError(f"importance_cap must be > 0 and needs recompute_old_logprobs=True, got importance_cap={cap}, recompute_old_logprobs={recompute}")
