"""The learner: rows in, weights changed, numbers out.

``Learner.update`` reads top to bottom: mini-batches, micro-batches, log-probabilities, objective, backward, step. What an objective computes stands in
:mod:`arpo_algo.losses`, how tokens are weighed in :mod:`arpo_algo.packing`.

The reference of the KL term is the policy as the learner was given it: a copy of the *trainable* weights, put in place for the forward of the reference. With
LoRA that is a copy of the adapter alone, and the KL is 0 at step 0 also when training starts from a trained adapter, where switching the adapter off
would measure the distance to the base model instead. Another reference is passed as ``ref_model``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arpo_algo.logprobs import TokenLogprobs
from arpo_algo.losses import KLEstimator, Objective, PolicyLoss, clipped_surrogate, kl_k3, truncated_importance_weights
from arpo_algo.optim import Schedule, check_trainable, decay_groups, schedule_factor
from arpo_algo.packing import Rows, micro_batches


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
    micro_batch_tokens: int = 4096
    """Most tokens in one forward, padding included; changes memory and speed, never the result. About 2,000 is fastest on a CPU."""
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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Matrix products of the forward; bfloat16 through autocast, with the weights kept in float32. Pays on GPUs. Needs ``recompute_old_logprobs``."""
    logit_chunk_mib: int = 256
    """Most float32 logits held at once, in MiB."""
    seed: int = 0
    """Order of the rows when there are several mini-batches."""

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "epochs", "minibatches", "micro_batch_tokens", "temperature", "logit_chunk_mib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "clip_low", "clip_high", "kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps > warmup_steps={self.warmup_steps}, got total_steps={self.total_steps}")
        if self.dtype == "bfloat16" and not self.recompute_old_logprobs:
            raise ValueError(
                "dtype='bfloat16' needs recompute_old_logprobs=True: the sampler computes in another precision, and the ratio would not start at 1"
            )
        if self.importance_cap is not None and not (self.recompute_old_logprobs and self.importance_cap > 0):
            cap, recompute = self.importance_cap, self.recompute_old_logprobs
            raise ValueError(f"importance_cap must be > 0 and needs recompute_old_logprobs=True, got importance_cap={cap}, recompute_old_logprobs={recompute}")


class Batch(NamedTuple):
    """Rows as tensors on the device, each (R, T)."""

    token_ids: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


class Learner:
    """Trains a causal language model on rows. Dropout is off throughout: with it the ratio would not be 1 before the first step."""

    def __init__(
        self,
        model: nn.Module,
        config: LearnerConfig,
        *,
        loss: PolicyLoss = clipped_surrogate,
        kl: KLEstimator = kl_k3,
        ref_model: nn.Module | None = None,
    ) -> None:
        """``model`` is updated in place. Raises ``ValueError`` when nothing is trainable or trainable weights are kept in 16 bits."""
        self.model, self.config, self.loss, self.kl = model, config, loss, kl
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        check_trainable(self.trainable)
        self.optimizer = torch.optim.AdamW(decay_groups(self.trainable, config.weight_decay), lr=config.lr, betas=config.betas, fused=True)
        self.logprobs = self._scorer(model)
        self.ref_logprobs = None if ref_model is None else self._scorer(ref_model.eval())
        keep = config.kl_coef > 0 and ref_model is None
        self.reference = [p.detach().clone() for p in self.trainable] if keep else None
        self.steps = 0
        """Optimiser steps taken."""
        self.updates = 0
        """Calls of :meth:`update`."""
        self.skipped_steps = 0
        """Steps left out because a gradient was not finite."""
        if config.gradient_checkpointing:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def update(self, rows: Rows) -> dict[str, float]:
        """Train on one batch of rollouts and return its metrics.

        Metrics are means over trained tokens and passes unless their name says otherwise; ``kl`` is there only where a reference is. A batch without a trained
        token or without a signal, and a step whose gradient is exactly 0, leave the weights alone (momentum would still move them);
        a gradient that is not finite skips its step.
        """
        started, config, tally = time.perf_counter(), self.config, _Tally()
        trained = rows.mask.any(1) & (self._always_pulls or bool(rows.advantages[rows.mask].any()))
        rows = self._with_old_logprobs(rows.select(np.flatnonzero(trained)))
        with self._mode():
            for minibatch in self._minibatches(rows):
                for batch in self._micro_batches(minibatch, tally):
                    ref_logprobs = self._ref_logprobs(batch)
                    logprobs, entropies = self.logprobs(batch.token_ids, batch.mask, entropy_grad=config.entropy_coef > 0)
                    objective = self.loss(logprobs, batch.old_logprobs, batch.advantages, batch.mask, clip_low=config.clip_low, clip_high=config.clip_high)
                    kl = None if ref_logprobs is None else self.kl(logprobs, ref_logprobs)
                    per_token = objective.per_token + config.entropy_coef * entropies - (0.0 if kl is None else config.kl_coef * kl)  # (R, T)
                    loss = -(batch.weights * per_token).sum()
                    loss.backward()  # type: ignore[no-untyped-call]
                    tally.add(batch, loss, logprobs, entropies, objective, kl)
                tally.grad_norms.append(self._step())
        self.updates += 1
        counts = {"lr": self._lr(max(self.steps - 1, 0)), "tokens_trained": float(rows.mask.sum()), "steps": self.steps, "skipped_steps": self.skipped_steps}
        return tally.metrics() | counts | {"seconds": time.perf_counter() - started}

    def token_logprobs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Log-probabilities at the sampling temperature and entropies (nats, temperature 1) of the mask's tokens, both (R, T), 0 elsewhere; no gradient."""
        logprobs, entropies = (torch.zeros(rows.mask.shape, dtype=self.trainable[0].dtype, device=self.device) for _ in range(2))
        with self._mode(), torch.no_grad():
            for index in micro_batches(rows, self.config.micro_batch_tokens):
                part = self._tensors(rows.select(index))
                width, where = part.mask.shape[1], torch.as_tensor(index, device=self.device)
                for out, values in zip((logprobs, entropies), self.logprobs(part.token_ids, part.mask), strict=True):
                    out[where, :width] = values
        return logprobs, entropies

    @property
    def _always_pulls(self) -> bool:
        """Whether the objective has a gradient also where every advantage is 0: a KL or an entropy term."""
        return self.config.kl_coef > 0 or self.config.entropy_coef > 0

    @property
    def device(self) -> torch.device:
        return self.trainable[0].device

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters and reference; the weights of the model are not in it. Opens with ``torch.load(weights_only=True)``."""
        counters = {"steps": self.steps, "updates": self.updates, "skipped_steps": self.skipped_steps}
        return {"optimizer": self.optimizer.state_dict(), "reference": self.reference, **counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the schedule follows from ``steps``. ``ValueError`` when only one side has a reference."""
        if (state["reference"] is None) != (self.reference is None):
            held = "no reference weights" if state["reference"] is None else "reference weights"
            raise ValueError(f"the state holds {held}, which does not fit kl_coef={self.config.kl_coef}")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None:
            for mine, saved in zip(self.reference, state["reference"], strict=True):
                mine.copy_(saved)
        self.steps, self.updates, self.skipped_steps = state["steps"], state["updates"], state["skipped_steps"]

    def _minibatches(self, rows: Rows) -> Iterator[Rows]:
        """The rows of each optimiser step. Weights are scaled by the share of rows, so that each step is a mean over its own trajectories."""
        for epoch in range(self.config.epochs if len(rows) else 0):
            order = np.arange(len(rows))
            if self.config.minibatches > 1:
                order = np.random.default_rng([self.config.seed, self.updates, epoch]).permutation(len(rows))
            for index in np.array_split(order, min(self.config.minibatches, len(rows))):
                part = rows.select(index)
                yield replace(part, weights=part.weights * np.float32(len(rows) / len(index)))

    def _micro_batches(self, rows: Rows, tally: _Tally) -> Iterator[Batch]:
        for index in micro_batches(rows, self.config.micro_batch_tokens):
            part = rows.select(index)
            tally.positions += part.attention.size
            tally.padding += part.attention.size - int(part.attention.sum())
            yield self._tensors(part)

    def _tensors(self, rows: Rows) -> Batch:
        return Batch(*(torch.as_tensor(getattr(rows, name), device=self.device) for name in Batch._fields))

    def _with_old_logprobs(self, rows: Rows) -> Rows:
        """The rows, with old log-probabilities of this learner where the config asks for them."""
        if not self.config.recompute_old_logprobs or not len(rows):
            return rows
        logprobs, _ = self.token_logprobs(rows)
        advantages = rows.advantages
        if self.config.importance_cap is not None:  # a factor >= 0 on the advantage is a factor on the objective, whatever the clip does
            engine = torch.as_tensor(rows.old_logprobs, device=self.device)
            advantages = advantages * truncated_importance_weights(logprobs, engine, cap=self.config.importance_cap).cpu().numpy()
        return replace(rows, old_logprobs=logprobs.cpu().numpy(), advantages=advantages)

    @torch.no_grad()
    def _ref_logprobs(self, batch: Batch) -> Tensor | None:
        if self.ref_logprobs is not None:
            return self.ref_logprobs(batch.token_ids, batch.mask)[0]
        if self.reference is None:
            return None
        # Data are exchanged, nothing is copied. They must be back before any backward pass: autograd keeps the parameters themselves.
        current = [p.data for p in self.trainable]
        try:
            for p, data in zip(self.trainable, self.reference, strict=True):
                p.data = data
            return self.logprobs(batch.token_ids, batch.mask)[0]
        finally:
            for p, data in zip(self.trainable, current, strict=True):
                p.data = data

    def _step(self) -> float:
        """Clip, step, clear; returns the norm of the gradient before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.trainable, self.config.max_grad_norm))
        if not math.isfinite(norm):
            self.skipped_steps += 1
        elif norm > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr(self.steps)
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _lr(self, step: int) -> float:
        config = self.config
        return config.lr * schedule_factor(step, config.schedule, warmup_steps=config.warmup_steps, total_steps=config.total_steps or 0)

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """Evaluation mode, dropout off; layers that checkpoint their activations do so only when they believe that they train, so they alone are told so."""
        self.model.eval()
        layers = [layer for layer in self.model.modules() if getattr(layer, "gradient_checkpointing", False)]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            self.model.eval()

    def _scorer(self, model: nn.Module) -> TokenLogprobs:
        autocast = torch.bfloat16 if self.config.dtype == "bfloat16" else None
        return TokenLogprobs(model, temperature=self.config.temperature, chunk_mib=self.config.logit_chunk_mib, autocast=autocast)


def add_lora(model: nn.Module, *, rank: int = 16, alpha: int = 32, target: str | list[str] = "all-linear") -> nn.Module:
    """The model with LoRA adapters (arXiv:2106.09685) as its only trainable weights; ``target`` is peft's ``target_modules``. Needs peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("add_lora needs peft: pip install 'arpo[lora]'") from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target, task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


@dataclass(kw_only=True)
class _Tally:
    """Sums over the micro-batches of one update, left on the device until the end."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    ratio_max: Tensor | None = None
    grad_norms: list[float] = field(default_factory=list)
    positions: int = 0
    padding: int = 0

    @torch.no_grad()
    def add(self, batch: Batch, loss: Tensor, logprobs: Tensor, entropies: Tensor, objective: Objective, kl: Tensor | None) -> None:
        ratios = torch.exp(logprobs - batch.old_logprobs)[batch.mask]
        self.ratio_max = ratios.max() if self.ratio_max is None else torch.maximum(self.ratio_max, ratios.max())
        values = {
            "loss": loss,
            "tokens": batch.mask.sum(),
            "entropy": entropies.sum(),
            "ratio_mean": ratios.sum(),
            "clip_fraction_low": objective.clipped_low[batch.mask].sum(),
            "clip_fraction_high": objective.clipped_high[batch.mask].sum(),
        } | ({} if kl is None else {"kl": (kl * batch.mask).sum()})
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach()

    def metrics(self) -> dict[str, float]:
        """Means over tokens, the loss over steps; zeros when nothing was added."""
        names = ("loss", "entropy", "ratio_mean", "clip_fraction_low", "clip_fraction_high")
        sums = dict.fromkeys(names, 0.0) | {name: float(value) for name, value in self.sums.items()}
        tokens, steps = max(sums.pop("tokens", 0.0), 1.0), max(len(self.grad_norms), 1)
        means = {name: value / (steps if name == "loss" else tokens) for name, value in sums.items()}
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return means | {
            "ratio_max": 0.0 if self.ratio_max is None else float(self.ratio_max),
            "grad_norm": sum(finite) / max(len(finite), 1),
            "padded_share": self.padding / max(self.positions, 1),
        }
