"""The weights of a model as whole tensors under the names of its checkpoint, whether it is sharded over ranks, adapted by LoRA, or neither.

A tensor at a time, so that no rank ever holds the whole model. All functions are *collective* for a sharded model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from arpo_algo.distributed import Ranks
from arpo_algo.sharding import fill, whole

_PEFT_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer"


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` of every weight and stored buffer, detached, on the model's device; of tied weights only the first name.

    The names are those of the module without an adapter, which for most models are those of the checkpoint on disk. LoRA is merged into the weights it adapts
    by peft's own rule; other changes that peft can make raise ``ValueError`` before anything is yielded. A tensor that is not gathered or merged is the
    model's own memory: use it before the weights change.
    """
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "adapter_layer_names")}  # what peft has put in, of any kind
    owners = Counter(map(id, model.state_dict(keep_vars=True).values()))
    for name, module in adapted.items():
        _check_mergeable(name, module, owners)
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ValueError("a prompt that is trained is no part of the weights: use LoRA or the model without an adapter")
    return _weights(model, adapted)


def _adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's parameters, sharded or not, under the names of peft's ``adapter_model.safetensors``."""
    from peft import get_peft_model_state_dict

    parameters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    return dict(get_peft_model_state_dict(model, state_dict=parameters, save_embedding_layers=False))


def fill_weights(model: nn.Module, tensors: dict[str, Tensor] | None, ranks: Ranks) -> None:
    """Copy rank 0's whole ``tensors`` into a sharded model: those of its adapter if it has one, else of all. The other ranks pass None.

    Raises ``RuntimeError`` on every rank when names or shapes differ, before anything is copied.
    """
    state = _adapter_parameters(model) if hasattr(model, "peft_config") else dict(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    first_name = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}  # tied weights have several, of which one will do
    own = {name: state[name] for name in first.values()}
    given = None if tensors is None else {first_name.get(name, name): tensor for name, tensor in tensors.items()}
    shapes = ranks.broadcast(None if given is None else {name: tuple(t.shape) for name, t in given.items()})
    expected = {name: tuple(t.shape) for name, t in own.items()}
    differing = {name: (shapes.get(name), shape) for name, shape in expected.items() if shapes.get(name) != shape}
    unexpected = sorted(shapes.keys() - expected.keys())
    if differing or unexpected:
        raise RuntimeError(f"the weights do not fit the model: (given, expected) shapes {differing}, unexpected {unexpected}")
    for name, target in own.items():
        fill(target, None if given is None else given[name], ranks)


def _weights(model: nn.Module, adapted: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer, _, leaf = name.removesuffix(".weight").rpartition(".")
        merged = leaf == "base_layer" and name.endswith(".weight") and layer in adapted
        if "lora_" in name or (id(tensor) in seen and not merged):
            continue
        seen.add(id(tensor))
        yield _plain_name(name) if hasattr(model, "peft_config") else name, _merged(tensor, adapted[layer]) if merged else whole(tensor)


def _plain_name(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX).replace(_BASE_LAYER, "")


def _check_mergeable(name: str, module: Any, owners: Mapping[int, int]) -> None:
    weight = getattr(getattr(module, "base_layer", None), "weight", None)
    plain = hasattr(module, "lora_A") and hasattr(module, "get_delta_weight") and isinstance(weight, Tensor) and not hasattr(module, "parameter_name")
    if not plain or module.lora_variant or module.lora_embedding_A or any(module.lora_bias.values()) or module.merged or len(module.active_adapters) != 1:
        raise ValueError(f"{name}: only one plain LoRA without bias on linear layers, not merged yet, can be merged, got {type(module).__name__}")
    if owners[id(weight)] > 1:
        raise ValueError(f"{name}: LoRA on one of several tied weights cannot be merged into both; leave it out of target_modules, or untie them")


@torch.no_grad()
def _merged(base: Tensor, layer: Any) -> Tensor:
    (adapter,) = layer.active_adapters
    weight = whole(base)
    with _whole_parameters(layer.lora_A[adapter]), _whole_parameters(layer.lora_B[adapter]):
        delta: Tensor = layer.get_delta_weight(adapter)
    return (weight + delta).to(weight.dtype)  # rounded once, as peft does


@contextmanager
def _whole_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, a small module has its whole parameters, for code that computes with them."""
    sharded = dict(module._parameters)
    try:
        for name, parameter in sharded.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(whole(parameter), requires_grad=False)
        yield
    finally:
        module._parameters.update(sharded)
