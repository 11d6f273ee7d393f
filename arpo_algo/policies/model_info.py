"""What a checkpoint says of itself: context length, vocabulary, the ids that end a turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def model_context_length(model: Any) -> int:
    """Tokens that the model can read and write together. ``ValueError`` where its configuration names no such number."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if (length := getattr(config, name, None)) is not None:
            return int(length)
    raise ValueError(f"{type(model).__name__} names no context length in its configuration, pass context_length")


def model_vocab_size(model: Any) -> int:
    """Width of the logits."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        return int(head.weight.shape[0])
    return int(model.config.get_text_config().vocab_size)


def model_eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """End ids of the generation configuration (one or a list), else of the configuration, and the tokenizer's."""
    generation: Any = getattr(model, "generation_config", None)
    configured = generation.eos_token_id if generation is not None else getattr(model.config, "eos_token_id", None)
    ids = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    return [int(i) for i in (*ids, getattr(tokenizer, "eos_token_id", None)) if i is not None]


def checkpoint_info(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configurations of a checkpoint, under the names that a transformers model has for them."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # none is saved: transformers' models then take it from the configuration
        generation = GenerationConfig.from_model_config(config)
    return SimpleNamespace(config=config, generation_config=generation)
