"""What a run starts from: the model that is trained, and the policy that samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arpo_algo.config import ARPOConfig
from arpo_algo.distributed import Ranks
from arpo_algo.learner import add_lora
from arpo_algo.policies.base import ServedPolicy
from arpo_algo.policies.transformers import TransformersPolicy

PolicySource = ServedPolicy | Callable[[], ServedPolicy]
"""A policy with weights of its own, or a function that makes one."""


def load_model(model: nn.Module | str | Path, tokenizer: Any, config: ARPOConfig, ranks: Ranks) -> tuple[nn.Module, Any]:
    """The model to train and its tokenizer, loaded when given as a path; with fresh LoRA adapters where the config asks for them."""
    if isinstance(model, str | Path):
        from transformers import AutoTokenizer

        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model)
        model = _load(model, ranks)
    if tokenizer is None:
        raise ValueError("a model object needs its tokenizer: ARPOTrainer(model, env, tokenizer=...)")
    if config.lora_rank:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            torch.manual_seed(config.seed)  # adapters start at random
            model = add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha)
    return model, tokenizer


def _load(path: str | Path, ranks: Ranks) -> nn.Module:
    """The model in float32; with several ranks on rank 0's CPU alone, from where the learner spreads it, and without memory on the others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not ranks.is_main:
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            empty: nn.Module = make(AutoConfig.from_pretrained(path), dtype=torch.float32)
        return empty
    # transformers keeps the checkpoint's type; 16-bit weights lose most of an update at the learning rates of fine-tuning.
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    whole: nn.Module = loaded.to(ranks.device) if ranks.size == 1 else loaded
    return whole


def make_policy(source: PolicySource | None, model: nn.Module, tokenizer: Any, ranks: Ranks) -> ServedPolicy:
    """What samples.

    Without a source it is the model itself; a model that will be sharded over several ranks cannot sample, so that a copy of it does, on rank 0.
    """
    if source is None:
        return TransformersPolicy(model if ranks.size == 1 else _plain_copy(model).to(ranks.device), tokenizer)
    given: Any = source
    ready = isinstance(given, ServedPolicy) and not isinstance(given, type)
    made = given() if callable(given) and not ready else given
    if not isinstance(made, ServedPolicy):
        raise TypeError(
            f"a policy that trains takes new weights: expected one with update_weights and close, or a function that makes one, got {type(made).__name__}"
        )
    return made


def _plain_copy(model: nn.Module) -> nn.Module:
    """A copy that takes weights under the names of the checkpoint: without adapters, whose product comes merged."""
    twin: Any = copy.deepcopy(model)
    plain: nn.Module = twin.merge_and_unload() if hasattr(twin, "peft_config") else twin
    return plain
