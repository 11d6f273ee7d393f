"""The quickstart's policy is an ordinary transformers model and tokenizer, and starts where its docstring says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_policy import build_model, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS = ["ask", "city", "of", "baker", "smith", "<search>", "</search>", "4", "2"]


def test_transformers_opens_what_is_saved(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(WORDS)
    model = build_model(tokenizer, hidden=16, heads=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    opened, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = again("<search> baker smith 4 2 </search>", return_tensors="pt").input_ids
    assert again.decode(ids[0]) == "<search> baker smith 4 2 </search>"
    assert torch.equal(opened(ids).logits, model(ids).logits)


def test_the_seed_alone_decides_the_weights() -> None:
    tokenizer = build_tokenizer(WORDS)
    state = torch.get_rng_state()
    one, two, other = (build_model(tokenizer, hidden=16, heads=2, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_half_of_the_first_heads_attend_to_the_previous_token() -> None:
    tokenizer = build_tokenizer(WORDS)
    model = build_model(tokenizer)
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 12).repeat(4)[None]  # (1, 36)
    attention = model(ids, output_attentions=True).attentions[0][0]  # (heads, T, T)
    previous = attention.diagonal(offset=-1, dim1=1, dim2=2)  # (heads, T - 1)
    assert previous[:2].mean() > 0.5
    assert previous[2:].mean() < 0.2


def test_words_that_no_tokenizer_could_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicates"):
        build_tokenizer(["a", "a"])
    with pytest.raises(ValueError, match="no white space"):
        build_tokenizer(["two words"])
