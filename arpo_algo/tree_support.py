"""Which back end of the tree's attention a model can use, tried before the first update: several architectures accept what they then ignore.

Three random rows that branch twice go through the model one by one and as one packed tree. A back end is taken where logits and gradients agree. What a
short trial of small numbers cannot see is settled otherwise:

- sliding windows are longer than the trial's rows, and scores seldom reach the cap that some models put on them: both are made small meanwhile, so that a
  window counted by packed index instead of depth shows, and so does a cap that is left out;
- layers that carry a state from token to token, choose keys by content, or attend otherwise from a certain length on are refused by the model's config.

Dropout does not matter, since the learner evaluates. Experts are routed token by token, so a mixture of them packs like any other layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arpo_algo.token_tree import build_tree
from arpo_algo.tree_attention import Backend, TrunkKeys, model_inputs, tree_attention

BACKENDS: dict[str, tuple[Backend, ...]] = {"cpu": ("path", "dense"), "cuda": ("varlen", "flex", "path", "dense")}
"""Back ends by type of device, fastest first."""
TOLERANCE = 1e-4
"""Largest error of a logit, as a share of the largest logit, and, times ten, of a weight's gradient, as a share of its norm. Rounding gives 1e-6."""
SHARE_16_BIT = 0.2
"""In 16 bits: largest errors as a share of those of tokens packed without a tree, which see each other. Rounding gives 0.1 at most."""
MADE_SMALL = {"sliding_window": 5, "attn_logit_softcapping": 1.0}
"""What configs and layers are set to during the trial where it is larger: tokens, and the cap of attention scores."""
HORIZONS = ("window_size", "keep_window_size")
"""Configs' names of lengths from which on a model attends otherwise and which it does not read again: GPT-Neo's windows, Doge's choice of keys."""


@dataclass(frozen=True, slots=True)
class TreeSupport:
    """What the probe found."""

    backend: Backend | None
    """None: this model cannot take a packed tree."""
    reason: str = ""
    """Why not, or why not the first choice; empty where nothing is missing."""


def tree_support(model: nn.Module, autocast: torch.dtype | None = None) -> TreeSupport:
    """The first back end with which the model's logits and gradients on a small tree are those of its rows one by one, and why not an earlier one.

    ``autocast`` is the dtype of matrix products in updates, None for the model's own. Never raises, and leaves the model as it was.
    """
    refused = _refused(model)
    if refused:
        return TreeSupport(None, f"no packed trees: {refused}")
    failures: list[str] = []
    with _as_it_was(model), _made_small(model):
        try:
            trial = _Trial.of(model, autocast)
            alone = _alone(trial)
            allowed = _allowed(trial, alone)
        except Exception as error:  # whatever a model does with the rows is its answer, here and below
            return TreeSupport(None, f"no packed trees: a trial with single rows failed with {_said(error)}")
        for backend in BACKENDS.get(trial.tokens.device.type, BACKENDS["cpu"]):
            failure = _failure(trial, backend, alone, allowed)
            if not failure:
                return TreeSupport(backend, f"attention over packed trees by {backend!r}: {'; '.join(failures)}" if failures else "")
            failures.append(f"{backend!r} {failure}")
    return TreeSupport(None, f"no packed trees: {'; '.join(failures)}")


def _refused(model: nn.Module) -> str:
    """Why no trial is made; empty where one is."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return f"{type(model).__name__} has no config of transformers, through which attention is exchanged"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder"
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"its layers of type {', '.join(sorted(kinds))} do more than attend to the tokens before"
    horizons = [f"{name}={value}" for name in HORIZONS if isinstance(value := getattr(text, name, None), int)]
    return f"from {', '.join(horizons)} tokens on it attends otherwise, which a short trial cannot see" if horizons else ""


class _Trial(NamedTuple):
    """The model and what is put to it."""

    model: nn.Module
    autocast: torch.dtype | None
    dtype: torch.dtype
    """Of the model's activations."""
    tokens: Tensor
    """(R, T) int64 on the model's device, right-padded."""
    inside: Tensor
    """(R, T) bool, False where padded."""
    weights: Sequence[Tensor]
    """Trainable weights whose gradients are compared."""

    @classmethod
    def of(cls, model: nn.Module, autocast: torch.dtype | None) -> _Trial:
        """Three rows of 12 to 14 tokens: all share 4, two of them 3 more."""
        lm: Any = model
        vocabulary, first = int(lm.get_input_embeddings().weight.shape[0]), next(model.parameters())
        parts = np.split(np.random.default_rng(0).integers(0, vocabulary, 28), (4, 13, 16, 21))
        parts[2][0], parts[4][0] = (parts[1][0] + 1) % vocabulary, (parts[3][0] + 1) % vocabulary  # so that they branch there
        rows = [torch.as_tensor(np.concatenate([parts[number] for number in numbers])) for numbers in ((0, 1), (0, 2, 3), (0, 2, 4))]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(first.device)
        lengths = torch.tensor([len(row) for row in rows], device=first.device)
        inside = torch.arange(tokens.shape[1], device=first.device) < lengths[:, None]
        return cls(model, autocast, autocast or first.dtype, tokens, inside, _some_weights(model))


def _some_weights(model: nn.Module) -> Sequence[Tensor]:
    """The first and the last trainable matrices between embeddings and head: the backward pass of every attention lies between them and the loss.

    Not the vectors: the gradient of a key's bias is 0 but for rounding.
    """
    lm: Any = model
    outside = {id(layer.weight) for layer in (lm.get_input_embeddings(), lm.get_output_embeddings()) if layer is not None}
    inside = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim > 1 and id(weight) not in outside]
    return inside if len(inside) < 16 else inside[:8] + inside[-8:]


class _Outcome(NamedTuple):
    """What the rows gave in one layout."""

    logits: Tensor
    """(tokens of all rows, V) float32 or float64."""
    grads: Sequence[Tensor]
    """Of the sum of the rows' log-probabilities; none for a model without trainable weights."""


def _alone(trial: _Trial) -> _Outcome:
    """The rows one by one."""
    rows = [row[inside] for row, inside in zip(trial.tokens, trial.inside, strict=True)]
    return _outcome(trial, lambda: torch.cat([_logits(trial, input_ids=row[None])[0] for row in rows]))


def _packed(trial: _Trial, backend: Backend | None) -> _Outcome:
    """The rows as a tree, each token read back for every row that holds it; without a back end each token sees all that stand before it."""
    device = trial.tokens.device
    tree = build_tree(trial.tokens.cpu().numpy(), trial.inside.sum(1).cpu().numpy())
    where = torch.as_tensor(tree.where, device=device)[trial.inside]
    if backend is None:
        return _outcome(trial, lambda: _logits(trial, input_ids=torch.as_tensor(tree.token_ids, device=device)[None])[0][where])
    record: dict[str, Any] = {"record": _KeysOfEachLayer()} if backend == "path" else {}  # large trees are cut: the keys of one part serve the others
    with tree_attention(trial.model, backend):
        inputs = model_inputs(tree, backend, device=device, dtype=trial.dtype, config=trial.model.config, **record)
        return _outcome(trial, lambda: _logits(trial, **inputs)[0][where])


class _KeysOfEachLayer(TrunkKeys):
    """Keys that would not be mistaken for those of another layer."""

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer in self.keys:
            raise ValueError(f"expected one set of keys of each layer, got another one of layer {layer}")
        super().record(layer, key, value)


def _logits(trial: _Trial, **inputs: Any) -> Tensor:
    with torch.autocast(trial.tokens.device.type, dtype=trial.autocast, enabled=trial.autocast is not None):
        logits: Tensor = trial.model(**inputs, use_cache=False).logits
    return logits if logits.dtype == torch.float64 else logits.float()


def _outcome(trial: _Trial, compute: Callable[[], Tensor]) -> _Outcome:
    """``compute`` gives the logits (tokens of all rows, V). The gradients go nowhere but here."""
    with torch.set_grad_enabled(bool(trial.weights)):
        logits = compute()
        if not trial.weights:
            return _Outcome(logits, [])
        predicts = nn.functional.pad(trial.inside[:, 1:], (0, 1))[trial.inside]  # all but the last token of each row
        targets = trial.tokens[:, 1:][trial.inside[:, 1:]]
        loss = logits[predicts].log_softmax(-1).gather(-1, targets[:, None]).sum()
        grads = torch.autograd.grad(loss, trial.weights, allow_unused=True)
    return _Outcome(logits.detach(), [torch.zeros_like(weight) if grad is None else grad for weight, grad in zip(trial.weights, grads, strict=True)])


class _Errors(NamedTuple):
    """Of an outcome beside that of the rows one by one."""

    logits: float
    """Largest, as a share of the largest logit."""
    gradients: float
    """Largest norm, as a share of that of the weight's gradient."""


def _errors(outcome: _Outcome, alone: _Outcome) -> _Errors:
    differences = torch.where(outcome.logits == alone.logits, 0.0, outcome.logits - alone.logits)  # logits may be -inf
    logits = differences.abs().max() / alone.logits[alone.logits.isfinite()].abs().max()
    norms = [float(grad.double().norm()) for grad in alone.grads]
    floor = max(1e-3 * max(norms, default=0.0), 1e-30)  # LoRA starts with gradients of exactly 0
    errors = [float((ours.double() - theirs.double()).norm()) for ours, theirs in zip(outcome.grads, alone.grads, strict=True)]
    shares = torch.tensor([0.0, *(error / max(norm, floor) for error, norm in zip(errors, norms, strict=True))])
    return _Errors(float(logits), float(shares.max()))  # the tensors' max is nan where one is


def _allowed(trial: _Trial, alone: _Outcome) -> _Errors:
    """The errors that a back end may have."""
    if torch.finfo(trial.dtype).bits > 16:
        return _Errors(TOLERANCE, 10 * TOLERANCE)
    blind = _errors(_packed(trial, None), alone)
    return _Errors(SHARE_16_BIT * blind.logits, SHARE_16_BIT * blind.gradients)


def _failure(trial: _Trial, backend: Backend, alone: _Outcome, allowed: _Errors) -> str:
    """What is wrong with a back end; empty where nothing is."""
    try:
        errors = _errors(_packed(trial, backend), alone)
    except Exception as error:
        return f"fails with {_said(error)}"
    for what, found, most in zip(_Errors._fields, errors, allowed, strict=True):
        if not found <= most:  # nan too
            return f"gives other {what} than single rows (off by {found:.1e} of their size, {most:.1e} allowed)"
    return ""


def _said(error: Exception) -> str:
    """An exception in one short line."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:160]}"


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Inside, the model evaluates and may draw random numbers; afterwards modes and generators are those of before."""
    training = [(module, module.training) for module in model.modules()]
    devices = sorted({weight.device.index for weight in model.parameters() if weight.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, trains in training:
            module.training = trains


@contextmanager
def _made_small(model: nn.Module) -> Iterator[None]:
    """Inside, what ``MADE_SMALL`` names is small: in configs, from which masks are built, and in layers."""
    lm: Any = model
    holders = [lm.config, lm.config.get_text_config(), *model.modules(), *(module.config for module in model.modules() if hasattr(module, "config"))]
    found = [(vars(holder), name, vars(holder)[name]) for holder in holders for name in MADE_SMALL if name in getattr(holder, "__dict__", ())]
    numbers = [(attributes, name, value) for attributes, name, value in found if isinstance(value, int | float)]
    try:
        for attributes, name, value in numbers:
            attributes[name] = type(value)(min(value, MADE_SMALL[name]))
        yield
    finally:
        for attributes, name, value in numbers:
            attributes[name] = value
