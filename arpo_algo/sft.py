"""Cold start: supervised fine-tuning on traces, before reinforcement learning.

The loss of a step is the mean over the policy tokens of its batch of ``-log p``. Batches are drawn at random and each is cut into micro-batches of like length,
which spares padding without making the batches of one length (and, often, of one kind of task) that bucketing the whole data would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from arpo_algo.bounds import check_above
from arpo_algo.logprobs import TokenLogprobs
from arpo_algo.optim import Muon, check_trainable, decay_groups, schedule_factor
from arpo_algo.packing import Rows, micro_batches, token_mean


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One trace."""

    token_ids: Sequence[int]
    mask: Sequence[bool]
    """True on the tokens that the policy is to write; the first token cannot be one."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.mask):
            raise ValueError(f"expected one mask entry for each of {len(self.token_ids)} tokens, got {len(self.mask)}")
        if self.mask and self.mask[0]:
            raise ValueError("the first token of an example is not predicted by anything; its mask must be False")


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """How the cold start runs."""

    steps: int
    """Optimiser steps."""
    batch_size: int = 32
    """Examples a step."""
    lr: float = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    muon_lr: float | None = None
    """Peak learning rate of Muon on the hidden matrices; None trains them with AdamW. Pays on small models trained from scratch (0.03)."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    warmup_steps: int = 0
    """Steps over which the learning rates rise linearly; after them they fall linearly to 0 at ``steps``."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this 2-norm; ``inf`` leaves them alone."""
    micro_batch_tokens: int = 4096
    """Most tokens in one forward, padding included; changes memory and speed, never the result. About 2,000 is fastest on a CPU."""
    seed: int = 0
    """Order of the examples."""

    def __post_init__(self) -> None:
        check_above(self, 0, "steps", "batch_size", "lr", "max_grad_norm", "micro_batch_tokens")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps must be in [0, steps={self.steps}), got {self.warmup_steps}")


class SFTLearner:
    """Model, optimisers and step counter of a cold start: ``step(batch)`` trains, ``state_dict`` resumes."""

    def __init__(self, model: nn.Module, config: SFTConfig, *, pad_id: int) -> None:
        self.model, self.config, self.pad_id = model, config, pad_id
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        check_trainable(self.trainable)
        self.optimizers = make_optimizers(model, config)
        self.logprobs = TokenLogprobs(model)
        self.steps = 0
        """Optimiser steps taken."""

    def step(self, examples: Sequence[SFTExample]) -> dict[str, float]:
        """Train on one batch; returns ``loss`` (mean over policy tokens, nats), ``grad_norm``, ``lr``, ``tokens``, ``padded_share``, ``seconds``.

        Raises ``ValueError`` when no token of the batch is the policy's, ``FloatingPointError`` when the gradient is not finite.
        """
        started = time.perf_counter()
        rows = pad_examples(examples, pad_id=self.pad_id)
        total, positions = torch.zeros((), device=self.trainable[0].device), 0
        self.model.train()
        for index in micro_batches(rows, self.config.micro_batch_tokens):
            part = rows.select(index)
            token_ids, mask, weights = (torch.as_tensor(x, device=total.device) for x in (part.token_ids, part.mask, part.weights))
            logprobs, _ = self.logprobs(token_ids, mask)
            loss = -(weights * logprobs).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total, positions = total + loss.detach(), positions + part.token_ids.size
        self.model.eval()
        factor = schedule_factor(self.steps, "linear", warmup_steps=self.config.warmup_steps, total_steps=self.config.steps)
        norm = self._step(factor)
        return {
            "loss": float(total),
            "grad_norm": norm,
            "lr": self.config.lr * factor,
            "tokens": float(rows.mask.sum()),
            "padded_share": 1 - float(rows.attention.sum()) / positions,
            "seconds": time.perf_counter() - started,
        }

    def state_dict(self) -> dict[str, Any]:
        """Optimisers and counter; the weights of the model are not in it. Opens with ``torch.load(weights_only=True)``."""
        return {"steps": self.steps, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps = state["steps"]

    def _step(self, factor: float) -> float:
        norm = float(nn.utils.clip_grad_norm_(self.trainable, self.config.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of cold-start step {self.steps} has norm {norm}; a smaller learning rate may help")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return norm


OnStep = Callable[[SFTLearner, dict[str, float]], None]


def sft(
    model: nn.Module,
    examples: Iterable[SFTExample],
    config: SFTConfig,
    *,
    pad_id: int,
    on_step: OnStep | None = None,
    state: Mapping[str, Any] | None = None,
) -> list[dict[str, float]]:
    """Train ``model`` in place and return the metrics of each step (see :meth:`SFTLearner.step`).

    A sequence of examples is gone through in a new seeded order each pass, as often as ``steps`` needs. Any other iterable is read once, in its own order;
    training ends when it does. ``on_step(learner, metrics)`` is called after each step and may take ``learner.state_dict()``; given back as ``state``, with the
    same weights and the same examples from their start, training goes on as if it had not stopped. Raises ``ValueError`` when there are no examples.
    """
    learner = SFTLearner(model, config, pad_id=pad_id)
    if state is not None:
        learner.load_state_dict(state)
    history: list[dict[str, float]] = []
    for batch in islice(_batches(examples, config), learner.steps, config.steps):
        history.append(learner.step(batch))
        if on_step is not None:
            on_step(learner, history[-1])
    if not history and learner.steps < config.steps:
        raise ValueError(f"expected examples for steps {learner.steps} to {config.steps}, got none")
    return history


def pad_examples(examples: Sequence[SFTExample], *, pad_id: int) -> Rows:
    """Examples as right-padded rows whose weights are the mean over policy tokens; advantages and old log-probabilities are 0."""
    shape = (len(examples), max((len(example.token_ids) for example in examples), default=0))
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    attention, mask, zeros = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.float32)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        token_ids[row, :length], mask[row, :length], attention[row, :length] = example.token_ids, example.mask, True
    if not mask.any():
        raise ValueError(f"expected a batch with tokens of the policy, got {len(examples)} examples without any")
    weights, groups = token_mean(mask).astype(np.float32), np.arange(len(examples))
    return Rows(token_ids=token_ids, attention=attention, mask=mask, old_logprobs=zeros, advantages=zeros, weights=weights, groups=groups)


def make_optimizers(model: nn.Module, config: SFTConfig) -> list[torch.optim.Optimizer]:
    """AdamW on everything; or, with ``muon_lr``, Muon on the hidden matrices and AdamW on the rest (embeddings, head, norms, biases)."""
    hidden = [] if config.muon_lr is None else hidden_matrices(model)
    taken = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden and config.muon_lr is not None:
        optimizers.append(Muon(hidden, lr=config.muon_lr, momentum=config.muon_momentum))
    if rest:
        optimizers.append(torch.optim.AdamW(decay_groups(rest, config.weight_decay), lr=config.lr, betas=config.betas, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable matrices that are neither token or position embeddings nor the output head."""
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) or module is head for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outer]


def _batches(examples: Iterable[SFTExample], config: SFTConfig) -> Iterator[list[SFTExample]]:
    stream = _shuffled_passes(examples, config.seed) if isinstance(examples, Sequence) else iter(examples)
    while batch := list(islice(stream, config.batch_size)):
        yield batch


def _shuffled_passes(examples: Sequence[SFTExample], seed: int) -> Iterator[SFTExample]:
    epoch = 0
    while examples:
        for index in np.random.default_rng([seed, epoch]).permutation(len(examples)):
            yield examples[int(index)]
        epoch += 1
