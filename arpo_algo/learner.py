"""The learner: rows in, weights changed, numbers out.

``Learner.update`` reads top to bottom: mini-batches, micro-batches, log-probabilities, objective, backward, step. What an objective computes stands in
:mod:`arpo_algo.losses`, how tokens are weighed in :mod:`arpo_algo.packing`.

The reference of the KL term is the policy as the learner was given it (:mod:`arpo_algo.reference`). Another one is passed as ``ref_model``.

With several ranks the model is spread over them (:mod:`arpo_algo.sharding`). Every rank is given the whole batch and takes its share of the rows of each
step, so that the result is the same for any number of ranks; every method is then *collective*: all ranks call it, in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arpo_algo.distributed import Ranks
from arpo_algo.layouts import Layouts
from arpo_algo.learner_config import LearnerConfig as LearnerConfig
from arpo_algo.logprobs import Packed, TokenLogprobs
from arpo_algo.losses import KLEstimator, PolicyLoss, clipped_surrogate, kl_k3, truncated_importance_weights
from arpo_algo.optim import check_trainable, decay_groups, load_optimizer, optimizer_state, schedule_factor
from arpo_algo.packing import Layout, Rows
from arpo_algo.reference import in_place
from arpo_algo.sharding import fill, on_main, rank_micro_batches, reshard, shard, sync_gradients, whole
from arpo_algo.tally import Mismatch, Tally
from arpo_algo.tree_support import TreeSupport, tree_support
from arpo_algo.weights import whole_weights


class Batch(NamedTuple):
    """Rows as tensors on the device, each (R, T)."""

    token_ids: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None
    packed: Packed | None
    """The same rows as a packed token tree, where they are computed as one."""


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
        ranks: Ranks | None = None,
    ) -> None:
        """``model`` is updated in place; with several ``ranks`` it is spread over them, starting from rank 0's weights, and runs only inside the learner.

        Raises ``ValueError`` when nothing is trainable, trainable weights are kept in 16 bits, or the ranks have different models.
        """
        self.model, self.config, self.loss, self.kl = model, config, loss, kl
        self.ranks = Ranks() if ranks is None else ranks
        check_trainable([p for p in model.parameters() if p.requires_grad])
        if config.gradient_checkpointing:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.layouts = self._layouts(model)
        self.logprobs = self._scorer(model)
        self.ref_layouts = self.layouts if ref_model is None else self._layouts(ref_model)
        self.ref_logprobs = None if ref_model is None else self._scorer(ref_model.eval())
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(decay_groups(self.trainable, config.weight_decay), lr=config.lr, betas=config.betas, fused=True)
        keep = config.kl_coef > 0 and ref_model is None
        self.reference = [p.detach().clone() for p in self.trainable] if keep else None
        self.steps = 0
        """Optimiser steps taken."""
        self.updates = 0
        """Calls of :meth:`update`."""
        self.skipped_steps = 0
        """Steps left out because a gradient was not finite."""

    def update(self, rows: Rows) -> dict[str, float]:
        """Train on one batch of rollouts and return its metrics, those of the whole batch on every rank.

        Rows without a gradient are left out: those with no trained token, and those with all advantages 0 where no KL or entropy term pulls. They count in the
        weights of the others all the same. Metrics are means over trained tokens of the other rows, and over passes, unless their name says otherwise; ``kl``
        is there only where a reference is, ``mismatch/...`` (:class:`~arpo_algo.tally.Mismatch`) is measured before the first step changes anything. A batch
        of which nothing is left, and a step whose gradient is exactly 0, leave the weights alone (momentum would still move them); a gradient that is not
        finite skips its step.
        """
        started, config, tally = time.perf_counter(), self.config, Tally()
        self.optimizer.zero_grad(set_to_none=True)  # what an update that was interrupted has left
        mismatch = Mismatch(clip_low=config.clip_low, clip_high=config.clip_high, cap=config.importance_cap)
        pulls = rows.mask if self._always_pulls else rows.mask & (rows.advantages != 0)
        rows = rows.select(np.flatnonzero(pulls.any(1)))
        rows = self._with_ref_logprobs(self._with_old_logprobs(rows, mismatch))
        with self._mode():
            for number, minibatch in enumerate(self._minibatches(rows)):
                for batch in self._micro_batches(minibatch, tally):
                    logprobs, entropies = self.logprobs(batch.token_ids, batch.mask, batch.packed, entropy_grad=config.entropy_coef > 0)
                    objective = self.loss(logprobs, batch.old_logprobs, batch.advantages, batch.mask, clip_low=config.clip_low, clip_high=config.clip_high)
                    kl = None if batch.ref_logprobs is None else self.kl(logprobs, batch.ref_logprobs)
                    per_token = objective.per_token + config.entropy_coef * entropies - (0.0 if kl is None else config.kl_coef * kl)  # (R, T)
                    loss = -(batch.weights * per_token).sum()
                    loss.backward()  # type: ignore[no-untyped-call]
                    tally.add(batch.mask, batch.old_logprobs, loss=loss, logprobs=logprobs, entropies=entropies, objective=objective, kl=kl)
                    if number == 0 and not config.recompute_old_logprobs:
                        mismatch.add(logprobs, batch.old_logprobs, batch.mask)
                tally.grad_norms.append(self._step())
        self.updates += 1
        counts = {"lr": self._lr(max(self.steps - 1, 0)), "tokens_trained": float(rows.mask.sum()), "steps": self.steps, "skipped_steps": self.skipped_steps}
        return tally.metrics(self.ranks) | mismatch.metrics(self.ranks) | counts | {"seconds": time.perf_counter() - started}

    def token_logprobs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Log-probabilities at the sampling temperature and entropies (nats, temperature 1) of the mask's tokens, both (R, T), 0 elsewhere; no gradient."""
        return self._computed(self.logprobs, self.layouts, rows)

    @torch.no_grad()
    def _computed(self, scorer: TokenLogprobs, layouts: Layouts, rows: Rows) -> tuple[Tensor, Tensor]:
        """What a scorer says of all rows, in micro-batches that the ranks share; every rank gets all of it."""
        logprobs, entropies = (torch.zeros(rows.mask.shape, dtype=self.trainable[0].dtype, device=self.device) for _ in range(2))
        counted = np.flatnonzero(rows.mask.any(1))
        chosen = rows.select(counted)
        layout, _ = layouts.choose(chosen)
        with self._mode(), layouts.active(layout):
            for index, part in self._batches(scorer, layouts, chosen, layout):
                width, where = part.mask.shape[1], torch.as_tensor(counted[index], device=self.device)
                values = scorer(part.token_ids, part.mask, part.packed)
                if len(index):
                    logprobs[where, :width], entropies[where, :width] = values
            reshard(scorer)
        return self.ranks.sum(logprobs), self.ranks.sum(entropies)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's whole weights one after another, on its device; LoRA merged, tied weights once.

        The names are the module's own, which for dense models are those of the checkpoint on disk.

        Collective: every rank must run the iterator to its end (``for _ in learner.weights(): pass``). All of them receive the tensors, since gathering gives
        them to all; the others than rank 0 have no use for them. :meth:`give_weights` sees to all that.
        """
        return whole_weights(self.model)

    def give_weights(self, take: Callable[[Iterator[tuple[str, Tensor]]], object]) -> None:
        """Call ``take(weights)`` on rank 0, ``policy.update_weights`` for one, while the other ranks gather along.

        ``take`` may leave the iterator early or raise. Its exception is raised here, and :class:`~arpo_algo.distributed.MainRankError` on the other ranks.
        """
        weights = self._when_asked()
        if not self.ranks.is_main:
            _exhaust(weights)
        self.ranks.broadcast_from_main(lambda: self._give(take, weights))

    def _give(self, take: Callable[[Iterator[tuple[str, Tensor]]], object], weights: Iterator[tuple[str, Tensor]]) -> None:
        try:
            take(weights)
        finally:
            if self.ranks.size > 1:
                _exhaust(weights)  # the other ranks are waiting in the gathering of the rest

    def _when_asked(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, gathered once rank 0 asks for the first: it may have to wait for a batch, longer than a gathering waits.

        A ``map``, since a generator that is passed on by ``yield from`` is closed together with the other one, and the ranks would lose step.
        """
        weights = self.weights()  # what cannot be merged is refused here, on every rank

        def gathered() -> Iterator[tuple[str, Tensor]]:
            self.ranks.barrier()
            yield from weights

        return map(lambda pair: pair, gathered())

    @property
    def _always_pulls(self) -> bool:
        """Whether the objective has a gradient also where every advantage is 0: a KL or an entropy term."""
        return self.config.kl_coef > 0 or self.config.entropy_coef > 0

    @property
    def device(self) -> torch.device:
        return self.trainable[0].device

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters and reference; the weights of the model are not in it. Opens with ``torch.load(weights_only=True)``.

        It does not depend on the number of ranks. Where there are several, rank 0 has it whole, on the CPU, and the others only the counters.
        """
        state: dict[str, Any] = {"steps": self.steps, "updates": self.updates, "skipped_steps": self.skipped_steps}
        optimizer = optimizer_state(self.optimizer, self.ranks)
        reference = self.reference if self.ranks.size == 1 or self.reference is None else [on_main(weight, self.ranks) for weight in self.reference]
        return {"optimizer": optimizer, "reference": reference} | state if self.ranks.is_main else state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue where :meth:`state_dict` was taken, on any number of ranks; what ranks other than 0 pass is ignored. The schedule follows from ``steps``.

        ``ValueError`` when only one side has a reference.
        """
        main = dict(state) if state is not None and self.ranks.is_main else None
        held = self.ranks.broadcast_from_main(lambda: main is not None and main["reference"] is not None)
        if held != (self.reference is not None):
            raise ValueError(f"the state holds {'reference weights' if held else 'no reference weights'}, which does not fit kl_coef={self.config.kl_coef}")
        load_optimizer(self.optimizer, None if main is None else main["optimizer"], self.ranks)
        for number, weight in enumerate(self.reference or ()):
            fill(weight, None if main is None else main["reference"][number], self.ranks)
        counters = ("steps", "updates", "skipped_steps")
        self.steps, self.updates, self.skipped_steps = self.ranks.broadcast_from_main(lambda: [(main or {})[name] for name in counters])

    def _minibatches(self, rows: Rows) -> Iterator[Rows]:
        """The rows of each optimiser step. Weights are scaled by the share of rows, so that each step is a mean over its own trajectories.

        Groups are drawn in a random order and so are the rows of each, which stand side by side: a step computes once what they share. Steps have equally many
        rows, so a group is cut where one ends in its middle.
        """
        for epoch in range(self.config.epochs if len(rows) else 0):
            order = np.arange(len(rows))
            if self.config.minibatches > 1:
                rng = np.random.default_rng([self.config.seed, self.updates, epoch])
                order = np.concatenate([rng.permutation(np.flatnonzero(rows.groups == group)) for group in rng.permutation(np.unique(rows.groups))])
            for index in np.array_split(order, min(self.config.minibatches, len(rows))):
                part = rows.select(index)
                yield replace(part, weights=part.weights * np.float32(len(rows) / len(index)))

    def _micro_batches(self, rows: Rows, tally: Tally) -> Iterator[Batch]:
        """This rank's share of the rows of a step, to be trained on."""
        layout, shared = self.layouts.choose(rows)
        tally.chose(shared.tokens, layout == "tree")
        with self.layouts.active(layout):
            for index, batch in self._batches(self.logprobs, self.layouts, rows, layout):
                tally.count(batch.token_ids if batch.packed is None else batch.packed.inputs["input_ids"], int(rows.attention[index].sum()))
                yield batch

    def _batches(self, scorer: TokenLogprobs, layouts: Layouts, rows: Rows, layout: Layout) -> Iterator[tuple[np.ndarray, Batch]]:
        """Row numbers and tensors of this rank's micro-batches. Gradients are summed over ranks where the last of them ends, or after each."""
        pieces = rank_micro_batches(rows, self.config.micro_batch_tokens, self.ranks, layout=layout)
        for number, bins in enumerate(pieces):
            sync_gradients(scorer, number == len(pieces) - 1 or not self.config.accumulate_whole)
            plan = layouts.cut(rows, bins) if layout == "tree" else None
            if plan is not None:
                with layouts.with_trunk(scorer, plan, entropy_grad=self.config.entropy_coef > 0, device=self.device) as packs:
                    for index, packed in zip(bins, packs, strict=True):
                        yield index, self._tensors(rows.select(index), packed)
            else:
                for index in bins:
                    part = _with_a_row(rows.select(index))
                    yield index, self._tensors(part, layouts.pack(part, layout, device=self.device))

    def _tensors(self, rows: Rows, packed: Packed | None) -> Batch:
        arrays: dict[str, Any] = {name: getattr(rows, name) for name in Batch._fields if name != "packed"}
        tensors: dict[str, Any] = {name: None if array is None else torch.as_tensor(array, device=self.device) for name, array in arrays.items()}
        return Batch(**tensors, packed=packed)

    def _with_old_logprobs(self, rows: Rows, mismatch: Mismatch) -> Rows:
        """The rows, with old log-probabilities of this learner where the config asks for them."""
        if not self.config.recompute_old_logprobs or not len(rows):
            return rows
        logprobs, _ = self.token_logprobs(rows)
        engine = torch.as_tensor(rows.old_logprobs, device=self.device)
        mask = torch.as_tensor(rows.mask, device=self.device)
        mismatch.add(logprobs, engine, mask & self.ranks.is_main)  # every rank has all of them; they are to be counted once
        advantages = rows.advantages
        if self.config.importance_cap is not None:  # a factor >= 0 on the advantage is a factor on the objective, whatever the clip does
            advantages = advantages * truncated_importance_weights(logprobs, engine, cap=self.config.importance_cap).cpu().numpy()
        return replace(rows, old_logprobs=logprobs.cpu().numpy(), advantages=advantages)

    def _with_ref_logprobs(self, rows: Rows) -> Rows:
        """The rows, with log-probabilities of the reference where there is one: they do not change while the batch is trained on."""
        if not len(rows):
            return rows
        if self.ref_logprobs is not None:
            return replace(rows, ref_logprobs=self._computed(self.ref_logprobs, self.ref_layouts, rows)[0].cpu().numpy())
        if self.reference is None:
            return rows
        with in_place(self.reference, self.trainable, self.logprobs):
            return replace(rows, ref_logprobs=self.token_logprobs(rows)[0].cpu().numpy())

    def _step(self) -> float:
        """Clip, step, clear; returns the norm of the gradient before clipping."""
        norm = float(whole(nn.utils.clip_grad_norm_(self.trainable, self.config.max_grad_norm)))
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
        marked = {layer: _evaluating(layer) for layer in self.model.modules() if getattr(layer, "gradient_checkpointing", False)}
        layers = [layer for layer, hooks in marked.items() if hooks] or marked  # what holds such layers need not train, and may drop activations itself
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for hooks in marked.values():
                for hook in hooks:
                    hook.remove()
            self.model.eval()
            reshard(self.logprobs)

    def _layouts(self, model: nn.Module) -> Layouts:
        """What layouts a model can take, tried on rank 0 before it is spread."""
        compute = torch.bfloat16 if self.config.dtype == "bfloat16" else None
        support = TreeSupport(None) if self.config.layout == "padded" else self.ranks.broadcast_from_main(lambda: tree_support(model, compute))
        return Layouts(model, self.config, support, self.ranks.size)

    def _scorer(self, model: nn.Module) -> TokenLogprobs:
        """The forward of a model, which is spread over the ranks where there are several."""
        compute = torch.bfloat16 if self.config.dtype == "bfloat16" else None
        alone = self.ranks.size == 1
        scorer = TokenLogprobs(model, temperature=self.config.temperature, chunk_mib=self.config.logit_chunk_mib, autocast=compute if alone else None)
        device = next(model.parameters()).device
        scorer.use_head(self.ranks.broadcast_from_main(lambda: scorer.has_plain_head(torch.arange(2, device=device)[None])))
        if not alone:
            shard(scorer, self.ranks, compute=compute)
        return scorer


def add_lora(model: nn.Module, *, rank: int = 16, alpha: int = 32, target: str | list[str] = "all-linear") -> nn.Module:
    """The model with LoRA adapters (arXiv:2106.09685) as its only trainable weights; ``target`` is peft's ``target_modules``. Needs peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("add_lora needs peft: pip install 'arpo[lora]'") from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target, task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def _evaluating(layer: nn.Module) -> list[Any]:
    """Hooks by which a layer whose checkpointing surrounds its forward does not train inside it: some drop activations themselves."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not isinstance(layer, GradientCheckpointingLayer):
        return []
    before = layer.register_forward_pre_hook(lambda module, _: setattr(module, "training", False))
    return [before, layer.register_forward_hook(lambda module, *_: setattr(module, "training", True), always_call=True)]


def _with_a_row(rows: Rows) -> Rows:
    """The rows; where there are none, one of two tokens and an empty mask, since every rank must go along with each forward and backward."""
    if len(rows):
        return rows
    arrays: dict[str, Any] = {name: getattr(rows, name) for name in Rows.__dataclass_fields__}
    blank: dict[str, Any] = {name: None if array is None else np.zeros((1, 2)[: array.ndim], dtype=array.dtype) for name, array in arrays.items()}
    return Rows(**blank | {"attention": np.ones((1, 2), dtype=bool)})
