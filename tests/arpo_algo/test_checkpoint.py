"""Checkpoints: whole or not there, opened by transformers, resumed to the bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from arpo_algo import checkpoint as module
from arpo_algo.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    prune_checkpoints,
    restore_rng,
    rng_state,
    save_checkpoint,
)
from arpo_algo.learner import Learner, LearnerConfig, add_lora
from arpo_algo.packing import Rows

CONFIG = {"learner": {"lr": 1e-2, "clip": [0.2, 0.28]}, "seed": 3}


def tiny_model(seed: int = 0, *, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, tie_word_embeddings=tied, initializer_range=0.3, pad_token_id=0, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), unk_token="a")


def random_rows(learner: Learner) -> Rows:
    """A batch drawn from the three global generators, so that a random state which is not restored shows in the weights."""
    ids = np.random.randint(0, 11, (6, random.randint(5, 8)))
    mask = np.ones(ids.shape, dtype=bool)
    mask[:, :2] = False
    rows = Rows(
        token_ids=ids,
        attention=np.ones_like(mask),
        mask=mask,
        old_logprobs=np.zeros(ids.shape, dtype=np.float32),
        advantages=np.where(mask, torch.randn(6, 1).numpy(), 0).astype(np.float32),
        weights=(mask / mask.sum()).astype(np.float32),
        groups=np.arange(6),
    )
    logprobs, _ = learner.token_logprobs(rows)
    return Rows(**{name: getattr(rows, name) for name in rows.__dataclass_fields__} | {"old_logprobs": logprobs.numpy()})


def seed_all(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def save(folder: Path, model: torch.nn.Module, learner: Learner | None = None, **values) -> Path:
    given = {"learner_state": learner.state_dict() if learner else {}, "trainer_state": {"step": 1}, "rng": rng_state(), "config": CONFIG, "tokenizer": None}
    return save_checkpoint(folder, model=model, **given | values)


LEARNER = LearnerConfig(lr=1e-2, kl_coef=0.1, minibatches=2, warmup_steps=3, schedule="linear", total_steps=20)


@pytest.mark.parametrize("make", [tiny_model, lambda seed=0: tiny_model(seed, tied=False), lambda seed=0: add_lora(tiny_model(seed=0), rank=2)])
def test_four_steps_equal_two_saved_loaded_and_two_more(make, tmp_path):
    seed_all(5)
    straight = Learner(make(), LEARNER)
    for _ in range(4):
        straight.update(random_rows(straight))

    seed_all(5)
    first = Learner(make(), LEARNER)
    for _ in range(2):
        first.update(random_rows(first))
    save(tmp_path / "step-000002", first.model, first)

    found = latest_checkpoint(tmp_path)
    assert found is not None
    loaded = load_checkpoint(found, config=CONFIG)
    model = make(9)
    learner = Learner(model, LEARNER)
    load_weights(model, loaded)
    learner.load_state_dict(loaded.learner_state)
    restore_rng(loaded.rng)  # building the model has drawn from the generators; this comes last
    for _ in range(2):
        metrics = learner.update(random_rows(learner))
    assert metrics["kl"] > 0
    for (name, a), (_, b) in zip(straight.model.named_parameters(), learner.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_transformers_opens_it_bit_for_bit(tmp_path):
    model = tiny_model()
    folder = save(tmp_path / "step-1", model, tokenizer=tokenizer())
    again = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert AutoTokenizer.from_pretrained(folder / "model").get_vocab() == {"a": 0, "b": 1}


def train_adapter(model: torch.nn.Module) -> torch.nn.Module:
    adapted = add_lora(model, rank=2)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
    return adapted.eval()


@pytest.mark.parametrize("on_disk", [False, True])
def test_transformers_opens_a_model_with_lora(on_disk, tmp_path):
    base = tiny_model()
    if on_disk:
        base.save_pretrained(tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = train_adapter(base)
    folder = save(tmp_path / "step-1", adapted)
    assert (folder / "adapter").exists() != on_disk
    assert (folder / "model" / "adapter_config.json").exists() == on_disk
    ids = torch.tensor([[1, 2, 3]])
    again = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, adapted(input_ids=ids).logits)
    with adapted.disable_adapter():
        assert not torch.allclose(again(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-3)


def test_trainer_state_comes_back(tmp_path):
    state = {"step": 7, "cursor": [3, 1], "name": "é"}
    assert load_checkpoint(save(tmp_path / "step-7", tiny_model(), trainer_state=state)).trainer_state == state


def test_a_crash_while_writing_leaves_the_previous_one(tmp_path, monkeypatch):
    first = save(checkpoint_folder(tmp_path, 1), tiny_model())

    def crash(path: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module, "_sync", crash)
    with pytest.raises(OSError, match="disk full"):
        save(checkpoint_folder(tmp_path, 2), tiny_model())
    with pytest.raises(OSError, match="disk full"):
        save(first, tiny_model(1))
    assert latest_checkpoint(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("damage", ["manifest", "missing", "short", "garbled"])
def test_a_half_written_checkpoint_is_never_picked_up(damage, tmp_path):
    whole = save(checkpoint_folder(tmp_path, 9), tiny_model())
    half = save(checkpoint_folder(tmp_path, 10), tiny_model())
    assert latest_checkpoint(tmp_path) == half
    if damage == "manifest":
        (half / "manifest.json").unlink()
    elif damage == "missing":
        (half / "rng.pt").unlink()
    elif damage == "short":
        os.truncate(half / "model" / "model.safetensors", 100)
    else:
        (half / "manifest.json").write_text('{"fil')
    (tmp_path / ".step-000011.draft-1").mkdir()
    (tmp_path / "step-final").mkdir()
    assert latest_checkpoint(tmp_path) == whole
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load_checkpoint(half)


def test_latest_is_by_number_and_none_where_nothing_is(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for name in ("step-9", "step-000010"):
        save(tmp_path / name, tiny_model())
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000010"


def test_saving_again_replaces(tmp_path):
    folder = save(tmp_path / "step-1", tiny_model(0))
    save(folder, tiny_model(1), trainer_state={"step": 2})
    model = tiny_model(2)
    load_weights(model, load_checkpoint(folder))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model(1).parameters(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_the_newest_are_kept(tmp_path):
    folders = [save(checkpoint_folder(tmp_path, step), tiny_model()) for step in (1, 2, 3)]
    (folders[2] / "rng.pt").unlink()
    folders.append(save(checkpoint_folder(tmp_path, 4), tiny_model()))
    assert prune_checkpoints(tmp_path, keep=2) == folders[:1]  # 2 and 4 are whole; 3 is not and stays
    assert sorted(tmp_path.iterdir()) == folders[1:]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        prune_checkpoints(tmp_path, keep=0)


def test_other_settings_are_named(tmp_path):
    folder = save(tmp_path / "step-1", tiny_model())
    assert load_checkpoint(folder, config={"seed": 3, "learner": {"clip": (0.2, 0.28), "lr": 0.01}}).config == CONFIG
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, config={"learner": {"lr": 2e-2, "clip": [0.2, 0.28]}, "rollout": {"M": 4}})
    for part in ("learner.lr: checkpoint 0.01, now 0.02", "rollout.M: checkpoint '(absent)', now 4", "seed: checkpoint 3, now '(absent)'"):
        assert part in str(error.value)
    assert "clip" not in str(error.value)


def test_weights_of_another_shape_are_refused(tmp_path):
    loaded = load_checkpoint(save(tmp_path / "step-1", tiny_model(tied=False)))
    with pytest.raises(RuntimeError, match=r"missing \['model.layers.1"):
        config = tiny_model().config
        config.num_hidden_layers = 2
        load_weights(LlamaForCausalLM(config), loaded)


def test_random_states_come_back_and_loading_touches_none(tmp_path):
    seed_all(1)
    random.gauss(0, 1), np.random.normal(size=3)  # leave a spare value in both normal generators
    folder = save(tmp_path / "step-1", tiny_model())
    seed_all(1)
    random.gauss(0, 1), np.random.normal(size=3)
    save(folder, tiny_model())
    torch.manual_seed(4)
    state = rng_state()
    drawn = random.gauss(0, 1), np.random.normal(size=4).tolist(), torch.rand(3).tolist()
    restore_rng(state)
    loaded = load_checkpoint(folder)
    assert (random.gauss(0, 1), np.random.normal(size=4).tolist(), torch.rand(3).tolist()) == drawn
    restore_rng(loaded.rng)
    assert json.dumps(loaded.rng["python"]) == json.dumps(random.getstate())
