"""Tree-shaped batches and models of the sizes that the update is measured at: what ``update.py`` and ``growth.py`` share.

A trajectory is a prompt, turns of sampled tokens with a tool result behind each, and an answer, of random tokens. Every trajectory after the first continues
a random earlier one from one of its joints: after the prompt, after a tool result, or at a third of the answer. Which joint follows from the ratio that is
asked for: in a group of ratio 2 trajectories part after about half of their tokens, in one of ratio 5 only in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from arpo_algo.packing import Rows, trajectory_mean


@dataclass(frozen=True, kw_only=True)
class Size:
    """A decoder of the Llama family with tied embeddings."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SIZES = {
    "1M": Size(vocabulary=2_048, hidden=128, intermediate=256, layers=5, heads=4, kv_heads=2),
    "20M": Size(vocabulary=16_384, hidden=384, intermediate=1_024, layers=8, heads=6, kv_heads=3),
    "135M": Size(vocabulary=49_152, hidden=576, intermediate=1_536, layers=30, heads=9, kv_heads=3),  # SmolLM2-135M
    "500M": Size(vocabulary=151_936, hidden=896, intermediate=4_864, layers=24, heads=14, kv_heads=2),  # Qwen2.5-0.5B; for GPUs
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A group of trajectories, lengths in tokens. Each turn and answer is up to a fifth shorter or longer than it says here."""

    rows: int = 16
    prompt: int = 200
    turns: int = 4
    """With the answer, which is the last."""
    sampled: int = 100
    """In each turn but the last."""
    result: int = 50
    """Of a tool, in each turn but the last: not trained on."""
    answer: int = 150
    ratio: float = 1.0
    """Tokens of all trajectories over unique ones; 1: not even the prompt is shared."""


def model(size: Size) -> Any:
    """A model of random weights (seed 0), float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=131_072,
            tie_word_embeddings=True,
        )
    )


def group(shape: Shape, *, vocabulary: int, seed: int = 0) -> Rows:
    """One group of the shape, its ratio within some percent of what was asked for: :func:`arpo_algo.token_tree.sharing` says which it has.

    Old log-probabilities lie about those of a model of random weights; advantages differ from row to row. Raises ``ValueError`` for a ratio that no group of
    the shape can have.
    """
    if not 1 <= shape.ratio < shape.rows:
        raise ValueError(f"ratio must be at least 1 and less than the number of rows, {shape.rows}, got {shape.ratio}")
    rng = np.random.default_rng(seed)
    segments = _segments(shape)
    joints = [] if shape.ratio == 1 else [1, *range(3, len(segments) - 2, 2), len(segments) - 2, len(segments) - 1]
    made: list[list[np.ndarray]] = []
    shared = 0
    for number in range(shape.rows):
        kept: list[np.ndarray] = []
        if number and joints:
            parent = made[int(rng.integers(number))]
            whole = shape.rows / number * sum(map(_length, made))  # tokens of all rows, as far as can be told by now
            due = (1 - 1 / shape.ratio) * whole * number / (shape.rows - 1)
            wanted = due - shared  # this row makes up for what the ones before shared too much or too little
            joint = min(joints, key=lambda count: abs(_length(parent[:count]) - wanted))
            kept = parent[:joint]
            shared += _length(kept)
        fresh = [rng.integers(0, vocabulary, max(1, round(length * rng.uniform(0.8, 1.2)))) for length, _ in segments[len(kept) :]]
        made.append(kept + fresh)
    return _rows(made, [trained for _, trained in segments], vocabulary, rng)


def _segments(shape: Shape) -> list[tuple[int, bool]]:
    """Length and whether it was sampled: the prompt, a turn and a result in turn, three thirds of the answer."""
    answer = [(shape.answer // 3, True)] * 3
    return [(shape.prompt, False), *[(shape.sampled, True), (shape.result, False)] * (shape.turns - 1), *answer]


def _length(segments: list[np.ndarray]) -> int:
    return sum(map(len, segments))


def _rows(made: list[list[np.ndarray]], trained: list[bool], vocabulary: int, rng: np.random.Generator) -> Rows:
    lengths = [_length(segments) for segments in made]
    shape = (len(made), max(lengths))
    token_ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    for row, segments in enumerate(made):
        token_ids[row, : lengths[row]] = np.concatenate(segments)
        mask[row, : lengths[row]] = np.repeat(trained, [len(segment) for segment in segments])
    return Rows(
        token_ids=token_ids,
        attention=np.arange(shape[1]) < np.array(lengths)[:, None],
        mask=mask,
        old_logprobs=np.where(mask, rng.normal(-np.log(vocabulary), 0.1, shape), 0.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=(len(made), 1)), 0.0).astype(np.float32),
        weights=trajectory_mean(mask).astype(np.float32),
        groups=np.zeros(len(made), dtype=np.int64),
    )
