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
    return (add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha) if config.lora_rank else model), tokenizer


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


def make_policy(source: PolicySource | None, model: nn.Module, tokenizer: Any, ranks: Ranks) -> ServedPolicy | None:
    """What samples; None on the ranks that do not.

    Without a source it is the model itself; a model that will be sharded over several ranks cannot sample, so that a copy of it does, on rank 0.
    """
    if not ranks.is_main:
        return None
    if source is None:
        return TransformersPolicy(model if ranks.size == 1 else copy.deepcopy(model).to(ranks.device), tokenizer)
    return source if isinstance(source, ServedPolicy) else source()
