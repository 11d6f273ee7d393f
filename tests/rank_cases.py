"""What the ranks of tests/arpo_algo/test_distributed.py do: the same training alone and together, each with everything that must agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.checkpoint import load_checkpoint, load_weights, rng_state, save_checkpoint
from arpo_algo.distributed import MainRankError, Ranks
from arpo_algo.learner import Learner, LearnerConfig, add_lora
from arpo_algo.losses import gspo
from arpo_algo.packing import Rows, trajectory_mean
from arpo_algo.sharding import part, whole

VOCABULARY = 13
LENGTHS = (4, 19, 7, 11, 5)
"""Tokens of each row, the first three a prompt: uneven, and no multiple of two or three ranks."""


def tiny_model(seed: int = 0, *, tied: bool = True, lora: bool = False, adapter: int = 0, layers: int = 2, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, initializer_range=0.3, pad_token_id=0, **sizes)
    model: nn.Module = LlamaForCausalLM(config).to(dtype).eval()
    if not lora:
        return model
    model = add_lora(model, rank=2, alpha=4).to(dtype)
    generator = torch.Generator().manual_seed(adapter)
    with torch.no_grad():  # as after a cold start: the adapter is not the identity
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def batch(lengths: tuple[int, ...] = LENGTHS, *, masked: tuple[int, ...] = (), seed: int = 0) -> Rows:
    """Random rows whose old log-probabilities are those of ``tiny_model`` and some noise, so that the clip bites; ``masked`` rows have no token to train."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    attention = np.arange(shape[1]) < np.array(lengths)[:, None]
    mask = attention & (np.arange(shape[1]) >= 3) & (rng.random(shape) < 0.8)
    mask[:, 3] = True
    mask[list(masked)] = False
    zeros = np.zeros(shape, dtype=np.float32)
    rows = Rows(
        token_ids=np.where(attention, rng.integers(1, VOCABULARY, shape), 0),
        attention=attention,
        mask=mask,
        old_logprobs=zeros,
        advantages=np.where(mask, rng.normal(size=(shape[0], 1)), 0).astype(np.float32),
        weights=trajectory_mean(mask).astype(np.float32),
        groups=np.arange(shape[0]),
    )
    logprobs, _ = Learner(tiny_model(), LearnerConfig()).token_logprobs(rows)
    return replace(rows, old_logprobs=np.where(mask, logprobs.numpy() + rng.normal(0, 0.2, shape), 0).astype(np.float32))


def outcome(learner: Learner, rows: Rows, *, updates: int = 3) -> dict[str, Any]:
    """All that must not depend on the number of ranks: metrics, the first gradient given to the optimiser, weights afterwards, log-probabilities."""
    gradients: list[Tensor] = []
    step = learner.optimizer.step

    def noting_step() -> None:
        if not gradients:
            gradients.extend(whole(p.grad).flatten().clone() for p in learner.trainable if p.grad is not None)
        step()

    learner.optimizer.step = noting_step  # type: ignore[assignment]
    metrics = [{name: value for name, value in learner.update(rows).items() if name not in ("seconds", "padded_share")} for _ in range(updates)]
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    logprobs, entropies = learner.token_logprobs(rows)
    gradient = torch.cat(gradients) if gradients else torch.zeros(0)
    return {"metrics": metrics, "gradient": gradient, "weights": weights, "logprobs": logprobs, "entropies": entropies}


def learner(
    ranks: Ranks, *, model: dict[str, Any] | None = None, chunk_rows: int | None = None, loss: Any = None, ref: bool = False, **settings: Any
) -> Learner:
    config = LearnerConfig(**{"lr": 1e-2, "max_grad_norm": math.inf} | settings)
    objective = {} if loss is None else {"loss": loss}
    made = Learner(tiny_model(**model or {}), config, ref_model=tiny_model(5) if ref else None, ranks=ranks, **objective)
    if chunk_rows is not None:
        made.logprobs.chunk_elements = chunk_rows * VOCABULARY
    return made


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a row a micro-batch": {"micro_batch_tokens": 1},
    "gradients kept whole": {"micro_batch_tokens": 1, "accumulate_whole": True},
    "several steps, clipped": {"minibatches": 3, "epochs": 2, "max_grad_norm": 1e-2, "weight_decay": 0.1},
    "KL": {"kl_coef": 0.3, "micro_batch_tokens": 24},
    "KL to a model": {"kl_coef": 0.3, "ref": True, "loss": gspo},
    "recomputed activations and head": {"gradient_checkpointing": True, "chunk_rows": 2, "entropy_coef": 0.1},
    "a head of its own": {"model": {"tied": False}, "chunk_rows": 2},
    "LoRA": {"model": {"lora": True}, "kl_coef": 0.3, "gradient_checkpointing": True, "chunk_rows": 2, "micro_batch_tokens": 24},
    "recomputed old": {"recompute_old_logprobs": True, "importance_cap": 1.1, "minibatches": 2},
}
OF_THREE = ("plain", "a row a micro-batch", "several steps, clipped", "KL", "LoRA", "one row that counts", "one row")
"""Cases that three ranks go through as well."""


def batches() -> dict[str, Rows]:
    return {
        "one row": batch((9,)),
        "one row that counts": batch(masked=(0, 1, 2, 4)),
        "nothing to train": batch(masked=(0, 1, 2, 3, 4)),
        "without a signal": replace(batch(), advantages=np.zeros((5, max(LENGTHS)), dtype=np.float32)),
        "not finite": replace(batch(), advantages=np.where(batch().mask, np.nan, 0).astype(np.float32)),
    }


def parity(ranks: Ranks) -> dict[str, tuple[Any, Any]]:
    """``(alone, together)`` of every case."""
    single = {"model": {"dtype": torch.float32}, "lr": 1e-3}
    cases = {name: (settings, batch()) for name, settings in SETTINGS.items()} | {name: ({}, rows) for name, rows in batches().items()}
    cases |= {"float32": (single, batch())}
    chosen = {name: case for name, case in cases.items() if ranks.size == 2 or name in OF_THREE}
    return {name: (outcome(learner(Ranks(), **made), rows), outcome(learner(ranks, **made), rows)) for name, (made, rows) in chosen.items()}


def faults(ranks: Ranks) -> dict[str, tuple[Any, Any]]:
    """``(right, wrong)`` for faults that the comparison must see."""
    averaging = learner(ranks)
    for module in averaging.logprobs.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(float(ranks.size))
    local = learner(ranks)
    tensors = local._tensors
    local._tensors = lambda rows, *layout: _of_own_mean(tensors(rows, *layout))  # type: ignore[method-assign]
    right = outcome(learner(Ranks()), batch())
    return {"averaged over ranks": (right, outcome(averaging, batch())), "denominators of a rank": (right, outcome(local, batch()))}


def _of_own_mean(values: Any) -> Any:
    return values._replace(weights=values.weights / values.weights.sum().clamp(min=1e-9))


def weights(ranks: Ranks) -> dict[str, Any]:
    """Weights as they are handed over, and what a failure on the way does."""
    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        together = learner(ranks, model=model)
        found[name] = {key: tensor.clone() for key, tensor in together.weights()}
    found["held"] = sum(part(p).numel() for p in together.model.parameters()), sum(p.numel() for p in together.model.parameters())

    def stumble(tensors: Any) -> None:
        next(tensors)
        raise OSError("the engine is gone")

    found["failure"] = raised(lambda: together.give_weights(stumble))
    taken: list[str] = []
    together.give_weights(lambda tensors: taken.extend(name for name, _ in tensors))
    found["taken"] = taken
    return found


def raised(action: Callable[[], object]) -> tuple[str, str]:
    """Type and text of what the action raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def without_memory() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(tiny_model().config).double()


def starts(ranks: Ranks) -> dict[str, Any]:
    """Ranks that start from different models, from models without memory, from models that do not fit."""
    found: dict[str, Any] = {}
    for name, make in {"other weights": lambda: tiny_model(ranks.rank), "meta": lambda: tiny_model(0) if ranks.is_main else without_memory()}.items():
        together = Learner(make(), LearnerConfig(lr=1e-2, max_grad_norm=math.inf), ranks=ranks)
        found[name] = outcome(together, batch())
    found["plain"] = outcome(learner(Ranks()), batch())
    found["other shape"] = raised(lambda: Learner(tiny_model(layers=1 + ranks.rank), LearnerConfig(), ranks=ranks))
    return found


def talk(ranks: Ranks) -> dict[str, Any]:
    """The methods of Ranks themselves."""

    def fail() -> None:
        raise KeyError("no such task") if ranks.is_main else AssertionError("called on another rank than 0")

    rows = ranks.broadcast(batch() if ranks.is_main else None)
    found = {
        "rows": bool(np.array_equal(rows.token_ids, batch().token_ids)),
        "made": ranks.broadcast_from_main(lambda: ranks.rank + 7),
        "failure": raised(lambda: ranks.broadcast_from_main(fail)),
        "cause": raised(lambda: ranks.broadcast_from_main(fail))[0] == ("KeyError" if ranks.is_main else MainRankError.__name__),
        "unpicklable": raised(lambda: ranks.broadcast_from_main(lambda: lambda: None))[0],
        "any": (ranks.any(ranks.rank == ranks.size - 1), ranks.any(False)),
        "sum": ranks.sum(torch.tensor([1.0, ranks.rank])).tolist(),
        "max": float(ranks.max(torch.tensor(float(ranks.rank)))),
        "who": (ranks.rank, ranks.size, ranks.is_main, str(ranks.device)),
    }
    ranks.barrier()
    return found


KEPT = {"lr": 1e-2, "kl_coef": 0.1, "minibatches": 2, "warmup_steps": 3, "schedule": "linear", "total_steps": 40}
MODELS: dict[str, dict[str, Any]] = {"tied": {}, "lora": {"lora": True}}


def save(folder: Path, trained: Learner, ranks: Ranks) -> Path:
    state = {"learner_state": trained.state_dict(), "trainer_state": {"step": 2}, "rng": rng_state()}
    return save_checkpoint(folder, model=trained.model, tokenizer=None, ranks=ranks, **state)


def resume(folder: Path, ranks: Ranks, model: dict[str, Any]) -> Learner:
    resumed = learner(ranks, model={"adapter": 8} | model if "lora" in model else {"seed": 8} | model, **KEPT)
    checkpoint = load_checkpoint(folder, ranks=ranks)
    load_weights(resumed.model, checkpoint, ranks)
    resumed.load_state_dict(checkpoint.learner_state)
    return resumed


def resumption(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Four updates, and two that are saved with two that are resumed from there."""
    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        straight = learner(ranks, model=model, **KEPT)
        first = [straight.update(batch()) for _ in range(2)]
        found[name, "saved"] = {key: tensor.clone() for key, tensor in straight.weights()}
        save(folder / name, straight, ranks)
        resumed = resume(folder / name, ranks, model)
        assert first[1]["kl"] > 0
        found[name, "straight"], found[name, "resumed"] = outcome(straight, batch(), updates=2), outcome(resumed, batch(), updates=2)
    found["failure"] = raised(lambda: load_checkpoint(folder / "nowhere", ranks=ranks))
    found["misfit"] = raised(lambda: resume(folder / "tied", ranks, {"layers": 1}))
    return found


def continuation(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Two more updates from checkpoints that another number of ranks has written."""
    return {name: outcome(resume(folder / name, ranks, model), batch(), updates=2) for name, model in MODELS.items()}


def bfloat16(ranks: Ranks) -> dict[str, Any]:
    """Mixed precision: metrics of two updates, types, and the log-probabilities before them."""
    together = learner(ranks, model={"dtype": torch.float32}, dtype="bfloat16", recompute_old_logprobs=True, kl_coef=0.1, lr=1e-3)
    logprobs, _ = together.token_logprobs(batch())
    exact, _ = learner(Ranks(), model={"dtype": torch.float32}).token_logprobs(batch())
    metrics = [together.update(batch()) for _ in range(2)]
    kinds = {str(p.dtype) for p in together.trainable} | {str(tensor.dtype) for _, tensor in together.weights()} | {str(logprobs.dtype)}
    return {"metrics": metrics, "kinds": kinds, "logprobs": logprobs, "exact": exact}


def two_ranks(ranks: Ranks, folder: Path) -> dict[str, Any]:
    cases: dict[str, Any] = {"parity": parity(ranks), "faults": faults(ranks), "weights": weights(ranks), "starts": starts(ranks), "talk": talk(ranks)}
    return cases | {"resumption": resumption(ranks, folder / "two"), "bfloat16": bfloat16(ranks), "continuation": continuation(ranks, folder / "one")}


def three_ranks(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {"parity": parity(ranks), "talk": talk(ranks), "weights": weights(ranks), "continuation": continuation(ranks, folder / "two")}
