"""The probe of packed trees: its verdict over the architectures of transformers, beside the truth; faults that it must see; what it must leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from arpo_algo import tree_attention, tree_support
from arpo_algo.layouts import Costs
from arpo_algo.learner import add_lora
from arpo_algo.token_tree import build_tree
from arpo_algo.tree_attention import Backend, model_inputs

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
WINDOW = 6
"""Shorter than the truth's rows."""

PATH: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Phi": {},
    "Phi3": {"sliding_window": WINDOW},
    "Mistral": {"sliding_window": WINDOW},
    "Mixtral": {"sliding_window": WINDOW, **EXPERTS},
    "Gemma": {},
    "Gemma3Text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmo2": {},
    "Olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmoe": {"shared_expert_intermediate_size": 16, **EXPERTS},
    "Granite": {},
    "Cohere": {},
    "Cohere2": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "SmolLM3": {},
    "Glm4": {},
    "Glm4Moe": {**EXPERTS, **GROUPS},
    "GPTNeoX": {},
    "GPT2": OLD,
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Starcoder2": {},
    "Ministral3": {},
    "Ernie4_5": {},
    "SeedOss": {},
    "Exaone4": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "Apertus": {},
    "Cwm": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "ModernBertDecoder": {"local_attention": 2 * WINDOW, "cls_token_id": 1, "sep_token_id": 2},
    "DeepseekV3": {**LATENT, **EXPERTS, **GROUPS},
    "MiniCPM3": LATENT,
    "Gemma4Text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16, "hidden_size_per_layer_input": 8},
}
"""Config classes of models that take the first choice on a CPU."""
DENSE: dict[str, tuple[dict[str, Any], str]] = {
    "Falcon": ({"num_kv_heads": 2}, "fails with TypeError"),
    "GPTJ": ({**OLD, "rotary_dim": 4}, "gives other logits"),
    "StableLm": ({}, "does not pass it on to its attention"),
    "Nemotron": ({}, "does not pass it on to its attention"),
    "Gemma2": ({"sliding_window": WINDOW}, "softcap"),
    "GptOss": ({"sliding_window": WINDOW, **EXPERTS}, "s_aux"),
    "DiffLlama": ({}, "another one of layer 0"),
}
"""Models whose own attention a mask reaches, but which cannot be exchanged or computes more than that of a tree, and what the probe says of them."""
NONE: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"n_layer": 2, "n_head": 4}, "single rows"),
    "Mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "single rows"),
    "RecurrentGemma": ({"lru_width": 32, "attention_window_size": 32, "num_hidden_layers": 3}, "single rows"),
    "Rwkv": ({"attention_hidden_size": 32}, "single rows"),
    "Qwen3Next": ({**DELTA, **MIXED, **EXPERTS}, "layers of type linear_attention"),
    "Qwen3_5Text": ({**DELTA, **MIXED}, "layers of type linear_attention"),
    "Lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "GraniteMoeHybrid": ({**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16}, "layers of type linear_attention"),
    "FalconH1": ({**MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8}, "layers of type hybrid"),
    "Mamba": ({"state_size": 8}, "layers of type linear_attention"),
    "Mamba2": ({"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}, "layers of type linear_attention"),
    "Jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, **EXPERTS}, "layers of type linear_attention"),
    "Bamba": ({**MAMBA, "attn_layer_indices": [1]}, "layers of type linear_attention"),
    "MiniMax": ({**MIXED, **EXPERTS}, "layers of type linear_attention"),
    "Llama4Text": (EXPERTS, "layers of type chunked_attention"),
    "GPTNeo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, "window_size=256"),
    "Doge": ({}, "keep_window_size=2048"),
}
"""Models that do not take a packed tree, and what the probe says of them."""


def tiny(name: str, **options: Any) -> nn.Module:
    """A random model of a config class, its matrices large enough that attention matters."""
    config_class: Any = getattr(transformers, f"{name}Config")
    options = SIZES | options
    if name == "Falcon":
        del options["head_dim"]
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_class(**options))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return model.eval()


def rows_of_a_tree() -> tuple[np.ndarray, np.ndarray]:
    """Seven random rows (7, T) that branch at several depths, one of them a prefix of another, with lengths (7,)."""
    rng = np.random.default_rng(5)
    rows = [rng.integers(3, VOCABULARY, 19)]
    for keep, more in ((11, 13), (11, 4), (3, 17), (17, 9), (0, 8)):
        rows.append(np.concatenate((rows[-1][:keep], rng.integers(3, VOCABULARY, more))))
    rows.append(rows[1][:16])
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, lengths


def error_of(model: nn.Module, backend: Backend) -> float:
    """Largest difference between a row's logits in the tree and alone, as a share of the largest logit."""
    tokens, lengths = rows_of_a_tree()
    tree = build_tree(tokens, lengths)
    assert len(tree) < 0.75 * lengths.sum()
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        with tree_attention.tree_attention(model, backend):
            inputs = model_inputs(tree, backend, device=torch.device("cpu"), dtype=dtype, config=model.config)
            packed = model(**inputs, use_cache=False).logits[0]
        worst, largest = 0.0, 0.0
        for row, (ids, length) in enumerate(zip(tokens, lengths.tolist(), strict=True)):
            alone = model(input_ids=torch.as_tensor(ids[None, :length])).logits[0]
            worst = max(worst, float((packed[tree.where[row, :length]] - alone).abs().max()))
            largest = max(largest, float(alone.abs().max()))
    return worst / largest


@pytest.mark.parametrize("name", PATH)
def test_models_that_take_a_tree(name: str) -> None:
    model = tiny(name, **PATH[name])
    support = tree_support.tree_support(model)
    assert support == tree_support.TreeSupport("path")
    assert error_of(model, "path") < 1e-5
    assert Costs.of(model).pair > 0  # whatever its config calls the sizes


@pytest.mark.parametrize("name", DENSE)
def test_models_whose_attention_cannot_be_exchanged_take_a_tree_under_a_mask(name: str) -> None:
    options, said = DENSE[name]
    model = tiny(name, **options)
    support = tree_support.tree_support(model)
    assert support.backend == "dense"
    assert support.reason.startswith("attention over packed trees by 'dense': 'path' ") and said in support.reason
    assert error_of(model, "dense") < 1e-5


@pytest.mark.parametrize("name", NONE)
def test_models_that_take_no_tree(name: str) -> None:
    options, said = NONE[name]
    support = tree_support.tree_support(tiny(name, **options))
    assert support.backend is None
    assert support.reason.startswith("no packed trees: ") and said in support.reason and "\n" not in support.reason


def test_a_window_longer_than_the_trial_is_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Mistral", sliding_window=4096)
    assert tree_support.tree_support(model).backend == "path"

    def without_windows(*args: Any, config: Any, **options: Any) -> dict[str, Any]:
        return model_inputs(*args, **options)

    monkeypatch.setitem(tree_support.BACKENDS, "cpu", ("dense",))
    assert tree_support.tree_support(model).backend == "dense"
    monkeypatch.setattr(tree_support, "model_inputs", without_windows)
    support = tree_support.tree_support(model)
    assert support.backend is None
    assert "other logits than single rows" in support.reason
    config: Any = model.config
    assert config.sliding_window == 4096


class Blind(nn.Module):
    """A Llama that leaves out some of what it is given."""

    def __init__(self, *drops: str, **changes: Any) -> None:
        super().__init__()
        self.llama: Any = tiny("Llama")
        self.config = self.llama.config
        self.drops, self.changes = drops, changes

    def get_input_embeddings(self) -> nn.Module:
        return self.llama.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.llama.get_output_embeddings()

    def forward(self, **inputs: Any) -> Any:
        return self.llama(**{name: value for name, value in inputs.items() if name not in self.drops} | self.changes)


class Positionless(Blind):
    """A model without ``position_ids``."""

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return self.llama(input_ids=input_ids, use_cache=use_cache)


class Raising(Blind):
    def forward(self, **inputs: Any) -> Any:
        raise RuntimeError("no kernel for this chip\nand a long trace")


class Diverged(Blind):
    """A model whose logits under a mask are not numbers."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = output.logits * (float("nan") if inputs.get("attention_mask") is not None else 1.0)
        return output


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Blind("attention_mask", "tree_plan", "position_ids"), "'dense' gives other logits"),
        (Blind("attention_mask", "tree_plan"), "'dense' gives other logits"),
        (Blind("position_ids", "tree_plan"), "'dense' gives other logits"),
        (Diverged("tree_plan"), "off by nan"),
        (Positionless(), "'dense' fails with TypeError"),
        (Raising(), "single rows failed with RuntimeError: no kernel for this chip"),
        (nn.Linear(2, 2), "Linear has no config of transformers"),
        (nn.Sequential(), "Sequential has no config of transformers"),
    ],
)
def test_a_model_that_ignores_what_it_is_given_or_raises_is_refused(model: nn.Module, reason: str) -> None:
    support = tree_support.tree_support(model)
    assert support.backend is None
    assert reason in support.reason and "\n" not in support.reason


def test_an_encoder_with_a_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    assert "encoder" in tree_support.tree_support(transformers.T5ForConditionalGeneration(config)).reason


@contextmanager
def faulty_backward(model: nn.Module, backend: Backend) -> Iterator[None]:
    """``path`` with queries' gradients too large by a tenth, its logits untouched."""
    config: Any = model.config
    with tree_attention.tree_attention(model, backend):
        if backend != "path":
            yield
            return
        attend = transformers.AttentionInterface()[config._attn_implementation]
        name = config._attn_implementation

        def wrong(module: nn.Module, query: Tensor, *rest: Any, **options: Any) -> Any:
            if query.requires_grad:
                query.register_hook(lambda grad: 1.1 * grad)
            return attend(module, query, *rest, **options)

        transformers.AttentionInterface.register("faulty", wrong)
        config._attn_implementation = "faulty"
        yield
        config._attn_implementation = name


def test_a_back_end_with_a_broken_backward_pass_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_support, "tree_attention", faulty_backward)
    support = tree_support.tree_support(tiny("Llama"))
    assert support.backend == "dense"
    assert "'path' gives other gradients than single rows" in support.reason


def test_the_gradients_of_a_model_that_is_not_trained_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_support, "tree_attention", faulty_backward)
    assert tree_support.tree_support(tiny("Llama").requires_grad_(False)) == tree_support.TreeSupport("path")


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "OPT", "Mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_a_fault(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, **PATH[name])
    assert tree_support.tree_support(model, autocast=dtype).backend == "path"
    assert tree_support.tree_support(model.to(dtype)).backend == "path"


def test_in_16_bits_a_fault_is_not_taken_for_rounding() -> None:
    for drops in (("attention_mask", "tree_plan"), ("position_ids", "tree_plan")):
        assert "gives other logits" in tree_support.tree_support(Blind(*drops).bfloat16()).reason


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("Mistral", sliding_window=30, attention_dropout=0.5)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.model.layers[1].eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attention, random = model.config._attn_implementation, torch.get_rng_state()

    def failing(*_: Any, **__: Any) -> Any:
        torch.rand(3)
        raise KeyError("planted")

    if fails:
        monkeypatch.setattr(model, "forward", failing)
    with torch.no_grad():
        support = tree_support.tree_support(model)
        assert not torch.is_grad_enabled()
    assert support.backend == (None if fails else "path")
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == {"lm_head.weight"}
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert (model.config._attn_implementation, model.config.sliding_window) == (attention, 30)
    assert [layer.self_attn.config.sliding_window for layer in model.model.layers] == [30, 30]
    assert torch.equal(torch.get_rng_state(), random)


def test_adapters_over_frozen_weights() -> None:
    model = add_lora(tiny("Qwen3"), rank=2)
    assert tree_support.tree_support(model) == tree_support.TreeSupport("path")
    assert all(weight.grad is None for weight in model.parameters())


def test_adapters_show_a_broken_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_support, "tree_attention", faulty_backward)
    assert tree_support.tree_support(add_lora(tiny("Qwen3"), rank=2)).backend == "dense"
