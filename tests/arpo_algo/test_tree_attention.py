"""Attention over packed trees against slow references: a dense softmax under the mask that the parents say, and each row alone through the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.attention.varlen as varlen
import transformers
import transformers.integrations.flex_attention as flex_integration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from arpo_algo.token_tree import TokenTree, build_tree
from arpo_algo.tree_attention import TrunkKeys, _gathered_paths, _padded_tree, block_mask, model_inputs, tree_attention
from arpo_algo.tree_kernels import FLASH, PLAIN, Rectangle, TreePlan, path_attention

CPU = torch.device("cpu")
VOCABULARY = 50
Rows = list[list[int]]


def rows_of(seed: int, *, prompt: int = 150, turn: int = 40, count: int = 6) -> Rows:
    """Rows that share a prompt, each branching off one before it, with unequal turns."""
    rng = np.random.default_rng(seed)
    rows: Rows = [rng.integers(0, VOCABULARY, prompt + turn).tolist()]
    for _ in range(count - 1):
        base = rows[rng.integers(len(rows))]
        cut = int(rng.integers(prompt // 2, len(base)))
        rows.append(base[:cut] + rng.integers(0, VOCABULARY, int(rng.integers(1, 2 * turn))).tolist())
    return rows


def tree_of(rows: Rows) -> TokenTree:
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return build_tree(ids, lengths)


def plan_of(tree: TokenTree, **more: Any) -> TreePlan:
    return TreePlan(tree.depths, tree.ends, tree.nodes, **more)


def sees(tree: TokenTree, window: int | None = None) -> Tensor:
    """(U, U) bool, query and key: the path of every query, walked from parent to parent."""
    visible, parents = np.zeros((len(tree), len(tree)), dtype=bool), tree.parents.tolist()
    for query in range(len(tree)):
        key, steps = query, 0
        while key >= 0 and (window is None or steps < window):
            visible[query, key] = True
            key, steps = parents[key], steps + 1
    return torch.from_numpy(visible)


def qkv(tokens: int, heads: int = 4, groups: int = 2, width: int = 8, value_width: int | None = None, seed: int = 0) -> list[Tensor]:
    """Query, key and value as views of (1, U, H, d), as models make them."""
    random = torch.Generator().manual_seed(seed)
    shapes = (heads, width), (groups, width), (groups, value_width or width)
    return [torch.randn(1, tokens, *shape, dtype=torch.float64, generator=random).transpose(1, 2).requires_grad_() for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """(1, U, H, d)"""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_grads(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The output and its gradients, from a fixed random gradient of the output."""
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def off(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest error, as a share of the largest number of each tensor, some of which are 0 but for rounding; nan where one is."""
    sizes = torch.stack([right.double().abs().max() for right in theirs])
    errors = torch.stack([(left.double() - right.double()).abs().max() for left, right in zip(ours, theirs, strict=True)])
    return float((errors / sizes.clamp_min(1e-3 * sizes.max())).max())


# ---- path


@pytest.mark.parametrize("kernels", [FLASH, PLAIN])
@pytest.mark.parametrize("window", [None, 1, 7, 60, 170])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_path_is_attention_under_the_mask_of_the_parents(kernels, window, groups):
    tree = tree_of(rows_of(groups, count=8))
    assert len(tree) > 300 and len(tree) % 128, "several squares and a rest"
    inputs = qkv(len(tree), groups=groups)
    ours = path_attention(*inputs, plan_of(tree), scale=0.3, window=window, kernels=kernels)
    theirs = dense(*inputs, sees(tree, window), 0.3)
    assert off(with_grads(ours, *inputs), with_grads(theirs, *inputs)) < 1e-12


BOUNDED = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@BOUNDED
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=9), st.integers(1, 5), st.sampled_from([None, 1, 2, 4]))
def test_path_over_any_tree_whatever_the_size_of_squares(rows, tile, window):
    tree = tree_of(rows)
    inputs = qkv(len(tree), width=4)
    ours = path_attention(*inputs, plan_of(tree, tile=tile), window=window)
    assert off(with_grads(ours, *inputs), with_grads(dense(*inputs, sees(tree, window), 0.5), *inputs)) < 1e-12


@pytest.mark.parametrize("window", [None, 9])
def test_every_visible_pair_is_in_one_block_and_every_query_of_a_block_sees_a_key(window):
    tree = tree_of(rows_of(3, count=8))
    plan, counted = plan_of(tree, tile=16), torch.zeros(len(tree), len(tree))
    for (first, last, size), masks in zip(plan.squares(), plan.square_masks(window, torch.zeros(())), strict=True):
        for low, mask in zip(range(first, last, size), masks, strict=True):
            counted[low : low + size, low : low + size] += mask[0] == 0
    for block in plan.rectangles(window):
        mask = plan.mask(block, window, torch.zeros(()))
        part = torch.ones(block.last - block.first, block.stop - block.start) if mask is None else (mask[0, 0] == 0).float()
        assert part.any(1).all() and (mask is None) == (not block.masked)
        assert mask is None or mask.shape[2] <= 4 * 16
        counted[block.first : block.last, block.start : block.stop] += part
    assert torch.equal(counted, sees(tree, window).float())


def test_the_blocks_of_a_tree_by_hand():
    # Squares of 4. Prompt 0..5, two branches: 6..8 and 9..10. Node 0 outlives two squares: queries 4, 5 and those of the second square against keys 0..3,
    # then queries from 8 on against all six keys. Node 6..8 has no descendants, but its last token lies in the square after those of 6 and 7.
    tree = tree_of([[1, 2, 3, 4, 5, 6, 7, 7, 7], [1, 2, 3, 4, 5, 6, 8, 8]])
    assert tree.nodes.tolist() == [[0, 6, 11], [6, 9, 9], [9, 11, 11]]
    assert plan_of(tree, tile=4).squares() == [(0, 8, 4), (8, 11, 3)]
    assert plan_of(tree, tile=4).rectangles(None) == [Rectangle(4, 8, 0, 4), Rectangle(8, 11, 0, 6), Rectangle(8, 9, 6, 8)]
    # A window of 4: query 4 (depth 4) sees keys 1..3 of the first rectangle, and 7 (depth 7) none, which leaves 4..6 under a mask; of the second rectangle
    # query 8 (depth 8) sees key 5 alone, and queries 9, 10 (depths 6, 7) see from 3 on.
    masked = [Rectangle(4, 7, 1, 4, masked=True), Rectangle(8, 11, 3, 6, masked=True), Rectangle(8, 9, 6, 8)]
    assert plan_of(tree, tile=4).rectangles(4) == masked


def test_values_may_be_narrower_than_keys():
    tree = tree_of(rows_of(1))
    inputs = qkv(len(tree), value_width=5)
    ours = path_attention(*inputs, plan_of(tree), scale=0.3)
    assert off(with_grads(ours, *inputs), with_grads(dense(*inputs, sees(tree), 0.3), *inputs)) < 1e-12


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.2), (torch.float16, 1.2), (torch.float32, 2.0)])
def test_a_narrow_type_loses_no_more_than_dense_attention_in_it(dtype, factor):
    tree = tree_of(rows_of(2, count=12))
    exact = [tensor.detach().to(dtype).double().requires_grad_() for tensor in qkv(len(tree))]
    narrow = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    truth = with_grads(dense(*exact, sees(tree), 0.3), *exact)
    mask = torch.zeros(len(tree), len(tree), dtype=dtype).masked_fill_(~sees(tree), -math.inf)
    whole = nn.functional.scaled_dot_product_attention(*narrow, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    ours = with_grads(path_attention(*narrow, plan_of(tree), scale=0.3), *narrow)
    assert all(tensor.dtype == dtype for tensor in ours)
    for part, other, true in zip(ours, with_grads(whole, *narrow), truth, strict=True):
        assert (part.double() - true).norm() <= factor * (other.double() - true).norm()


@pytest.mark.parametrize("kernels", [FLASH, PLAIN])
def test_any_strides_and_autocast_change_nothing(kernels):
    tree = tree_of(rows_of(4))
    plain = [tensor.detach().float().contiguous().requires_grad_() for tensor in qkv(len(tree))]
    strided = [tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in plain]
    first = with_grads(path_attention(*plain, plan_of(tree)), *plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = with_grads(path_attention(*strided, plan_of(tree), kernels=kernels), *strided)
    assert off(second, first) < 1e-5
    out = path_attention(*plain, plan_of(tree))
    assert torch.autograd.grad(out.sum(), plain)[2].isfinite().all(), "the gradient of a sum has strides of 0"


def error_of(tree: TokenTree, window: int | None = None, **arrays: np.ndarray) -> float:
    """Of path attention with something wrong in the tree's arrays."""
    inputs = qkv(len(tree))
    ours = path_attention(*inputs, plan_of(replace(tree, **arrays)), scale=0.3, window=window)
    return off(with_grads(ours, *inputs), with_grads(dense(*inputs, sees(tree, window), 0.3), *inputs))


def test_faults_in_the_arrays_show():
    tree = tree_of(rows_of(0, count=8))
    assert error_of(tree) < 1e-12
    inner = int(np.flatnonzero((tree.nodes[:, 1] < tree.nodes[:, 2]) & (tree.nodes[:, 2] < len(tree)))[0])
    for column, shift in ((0, 1), (1, -1), (2, -1), (2, 1)):
        nodes = tree.nodes.copy()
        nodes[inner, column] += shift
        assert error_of(tree, nodes=nodes) > 1e-3, f"column {column} of a node off by {shift}"
    ends = tree.ends.copy()
    ends[tree.nodes[-1, 0]] -= 1
    assert error_of(tree, ends=ends) > 1e-3, "the last token of a row does not see the first of its node"
    assert error_of(tree, 60) < 1e-12 < 1e-3 < error_of(tree, 60, depths=np.arange(len(tree))), "a window counted by packed index"


# ---- a trunk and bins


def part_of(tree: TokenTree, chosen: Tensor) -> TokenTree:
    """The chosen tokens alone, every token a node of its own; slow."""
    index = chosen.nonzero()[:, 0].tolist()
    ends = np.array([sum(1 for other in index if other < tree.ends[token]) for token in index])
    starts = np.arange(len(index))
    nodes = np.stack((starts, starts + 1, ends), axis=1)
    parents = np.array([index.index(parent) if (parent := int(tree.parents[token])) in index else -1 for token in index])
    return TokenTree(
        token_ids=tree.token_ids[index], depths=tree.depths[index], parents=parents, ends=ends, nodes=nodes, where=np.zeros((0, 0), dtype=np.int64)
    )


def cut(tree: TokenTree, rows: Rows) -> tuple[Tensor, list[Tensor], list[np.ndarray]]:
    """Tokens (U,) of the trunk, which both halves of the rows hold, those of each half alone, and who in it sees which trunk token."""
    halves = [torch.zeros(len(tree), dtype=torch.bool) for _ in range(2)]
    for number, row in enumerate(rows):
        halves[number % 2][tree.where[number, : len(row)]] = True
    trunk = halves[0] & halves[1]
    own = [half & ~trunk for half in halves]
    rectangles = []
    for half in own:
        visible = sees(tree)[half][:, trunk]  # (queries, trunk)
        runs = [(key, key + 1, int(column.nonzero()[0]), int(column.nonzero()[-1]) + 1) for key, column in enumerate(visible.T) if column.any()]
        assert all(visible[first:last, key].all() for key, _, first, last in runs)
        rectangles.append(np.array(runs))
    return trunk, own, rectangles


@pytest.mark.parametrize("kernels", [FLASH, PLAIN])
@pytest.mark.parametrize("window", [None, 20])
def test_bins_that_see_a_trunk_are_the_whole_tree(kernels, window):
    rows = rows_of(5, prompt=30, turn=20, count=8)
    tree = tree_of(rows)
    trunk, own, rectangles = cut(tree, rows)
    whole, pieces = qkv(len(tree)), qkv(len(tree))
    query, key, value = pieces
    out = torch.zeros(1, len(tree), *query.shape[1::2], dtype=torch.float64)
    stem = part_of(tree, trunk)
    out[:, trunk] = path_attention(*(tensor[:, :, trunk] for tensor in pieces), plan_of(stem, tile=8), window=window, kernels=kernels)
    for half, seen in zip(own, rectangles, strict=True):
        plan = plan_of(part_of(tree, half), tile=8, trunk_depths=stem.depths, trunk_rectangles=seen)
        parts = (tensor[:, :, half] for tensor in pieces)
        out[:, half] = path_attention(*parts, plan, window=window, trunk=(key[:, :, trunk], value[:, :, trunk]), kernels=kernels)
    theirs = with_grads(path_attention(*whole, plan_of(tree), window=window), *whole)
    assert off(with_grads(out, *pieces), theirs) < 1e-12


@pytest.mark.parametrize(("kind", "checkpointing"), [("Llama", False), ("Mistral", False), ("Llama", True)])
def test_a_model_in_bins_has_the_gradients_of_the_whole_tree(kind, checkpointing):
    rows = rows_of(6, prompt=20, turn=10, count=6)
    tree, model = tree_of(rows), tiny(kind)
    trunk, own, rectangles = cut(tree, rows)
    wanted = torch.randn(len(tree), VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def logits(part: TokenTree, **more: Any) -> Tensor:
        return model(**model_inputs(part, "path", device=CPU, dtype=torch.float64, **more), use_cache=False).logits[0]

    with tree_attention(model, "path"):
        expected = torch.autograd.grad((logits(tree) * wanted).sum(), list(model.parameters()))
        if checkpointing:
            model.train()  # no dropout anywhere
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        recorded = TrunkKeys()
        stem_loss = (logits(part_of(tree, trunk), record=recorded) * wanted[trunk]).sum()
        leaves = recorded.leaves()
        for half, seen in zip(own, rectangles, strict=True):
            (logits(part_of(tree, half), trunk=leaves, rectangles=seen) * wanted[half]).sum().backward()
        torch.autograd.backward([stem_loss, *recorded.tensors()], [None, *(leaf.grad for leaf in leaves.tensors())])
    assert off([parameter.grad for parameter in model.parameters()], list(expected)) < 1e-11


def test_a_trunk_whose_first_forward_had_no_graph_is_refused():
    model = tiny("Llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with tree_attention(model, "path"):
        inputs = model_inputs(tree_of([[1, 2, 3]]), "path", device=CPU, dtype=torch.float64, record=TrunkKeys())
        loss = model(**inputs, use_cache=False).logits.sum()
        with pytest.raises(ValueError, match="gradient checkpointing with use_reentrant=False"):
            loss.backward()


def test_keys_of_a_trunk_are_told_apart_by_their_layer():
    inputs = model_inputs(tree_of([[1, 2, 3]]), "path", device=CPU, dtype=torch.float64, record=TrunkKeys())
    with pytest.raises(ValueError, match=r"attention that knows its layer_idx, .* got Module"):
        attend(tree_plan=inputs["tree_plan"])


def test_what_a_trunk_must_be():
    tree = tree_of([[1, 2, 3]])
    given = {"device": CPU, "dtype": torch.float32}
    with pytest.raises(ValueError, match="expected back end 'path' with a trunk, got 'dense'"):
        model_inputs(tree, "dense", **given, record=TrunkKeys())
    with pytest.raises(ValueError, match="expected a trunk and the rectangles that see it"):
        model_inputs(tree, "path", **given, trunk=TrunkKeys())
    trunk = TrunkKeys(depths=np.arange(2))
    for bad in ([[0, 3, 0, 1]], [[0, 1, 2, 4]], [[1, 1, 0, 1]], [[0, 1, 1, 1]], [[-1, 1, 0, 1]], [[0, 1]]):
        with pytest.raises(ValueError, match=r"rectangles \(B, 4\), none empty, of 2 trunk keys and 3 queries"):
            model_inputs(tree, "path", **given, trunk=trunk, rectangles=np.array(bad))
    with pytest.raises(KeyError, match="expected keys of layer 0 in the trunk"), tree_attention(model := tiny("Llama"), "path"):
        model(**model_inputs(tree, "path", **given, trunk=trunk, rectangles=np.array([[0, 2, 0, 3]])))
    with pytest.raises(ValueError, match="expected 2 keys of the trunk, got 0"):
        path_attention(*qkv(3), plan_of(tree, trunk_depths=np.arange(2)))


# ---- models

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": MIXED | {"use_sliding_window": True},
    "Qwen3": {},
    "Mistral": {"sliding_window": 40},
    "Gemma2": MIXED | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 6},
    "Gemma3Text": MIXED,
    "GPT2": {},
}


def tiny(kind: str) -> Any:
    """A random model in float64 throughout: transformers' norms compute in float32, these do not."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind], max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, n_embd=24)
    model = getattr(transformers, {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config).double().eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = exact_norm(module)
    return model


def exact_norm(module: Any) -> Any:
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
    return lambda x: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (module.weight + offset)


def row_logits(model: Any, rows: Rows) -> Tensor:
    """Of all tokens of all rows, each alone through the model."""
    return torch.cat([model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows])


def tree_logits(model: Any, rows: Rows, backend: Any, **wrong: np.ndarray) -> Tensor:
    """The same from the tree, which may have something wrong in its arrays."""
    tree = tree_of(rows)
    where = torch.cat([torch.from_numpy(tree.where[number, : len(row)]) for number, row in enumerate(rows)])
    inputs = model_inputs(replace(tree, **wrong), backend, device=CPU, dtype=torch.float64, config=model.config)
    with tree_attention(model, backend):
        return model(**inputs, use_cache=False).logits[0][where]


def row_outcome(model: Any, rows: Rows) -> list[Tensor]:
    """The logits and the gradients of a weighted sum of them."""
    return with_grads(row_logits(model, rows), *model.parameters())


def tree_outcome(model: Any, rows: Rows, backend: Any, **wrong: np.ndarray) -> list[Tensor]:
    return with_grads(tree_logits(model, rows, backend, **wrong), *model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_models_over_trees_are_models_over_rows(kind):
    rows, model = rows_of(7), tiny(kind)
    before = model.config._attn_implementation
    expected = row_outcome(model, rows)
    for backend in ("path", "dense"):
        assert off(tree_outcome(model, rows, backend), expected) < 1e-10, backend
    assert model.config._attn_implementation == before


def test_faults_in_a_tree_show_through_a_model():
    rows, model = rows_of(7), tiny("Llama")
    expected, tree = row_outcome(model, rows), tree_of(rows)
    ends = tree.ends.copy()
    ends[tree.nodes[0, 0] : tree.nodes[0, 1]] -= 1
    for backend in ("path", "dense"):
        assert off(tree_outcome(model, rows, backend, depths=np.arange(len(tree))), expected) > 1e-3
        assert off(tree_outcome(model, rows, backend, ends=np.full(len(tree), len(tree))), expected) > 1e-3, "everything before is seen"
    assert off(tree_outcome(model, rows, "dense", ends=ends), expected) > 1e-3
    nodes = tree.nodes.copy()
    nodes[0, 2] -= 1
    assert off(tree_outcome(model, rows, "path", nodes=nodes), expected) > 1e-3


def test_layers_that_a_mask_does_not_describe_are_refused():
    config = transformers.LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="full_attention or sliding_attention, got linear_attention"):
        model_inputs(tree_of([[1, 2]]), "dense", device=CPU, dtype=torch.float32, config=config)
    with pytest.raises(ValueError, match=r"expected one of 'path', .* got 'paths'"):
        model_inputs(tree_of([[1, 2]]), "paths", device=CPU, dtype=torch.float32)  # type: ignore[arg-type]


def attend(**given: Any) -> Any:
    """What transformers calls, over a tree of three tokens, with something else in its arguments."""
    inputs = model_inputs(tree_of([[1, 2, 3]]), "path", device=CPU, dtype=torch.float64)
    query, key, value = qkv(3)
    arguments = {"module": nn.Module(), "query": query, "key": key, "value": value, "attention_mask": None, "tree_plan": inputs["tree_plan"]} | given
    with tree_attention(tiny("Llama"), "path"):
        return transformers.AttentionInterface()["arpo_path"](**arguments)


def test_arguments_that_change_nothing_are_accepted():
    harmless = {"dropout": 0.0, "softcap": None, "position_ids": torch.arange(3), "use_cache": True, "output_attentions": False, "is_causal": True}
    out, weights = attend(**harmless)
    assert out.shape == (1, 3, 4, 8) and weights is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"softcap": 50.0}, "without softcap, .* got 50.0"),
        ({"dropout": 0.1}, "without dropout, .* got 0.1"),
        ({"s_aux": torch.zeros(4)}, r"without s_aux, .* got Tensor of shape \(4,\)"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "without position_bias"),
        ({"output_attentions": True}, "without output_attentions"),
        ({"chosen_keys": torch.zeros(3)}, "without chosen_keys"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, r"no attention mask beside the plan of a tree, got one of shape \(1, 1, 3, 3\)"),
        ({"tree_plan": None}, "expected a plan of the tree beside its positions, got none"),
        ({"sliding_window": 0}, "sliding_window None or at least 1, got 0"),
        ({"is_causal": False}, "expected causal attention"),
        ({"query": torch.zeros(2, 4, 3, 8)}, "one tree of 3 tokens, without a cache, got 2 x 3 queries and 3 keys"),
        ({"key": torch.zeros(1, 2, 4, 8)}, "got 1 x 3 queries and 4 keys"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        attend(**given)


def test_a_forward_without_a_plan_is_refused():
    model = tiny("Llama")
    with tree_attention(model, "path"), pytest.raises(ValueError, match="expected a plan of the tree"):
        model(input_ids=torch.tensor([[1, 2]]))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'sdpa' or 'eager', which take a mask, got 'flex_attention'"), tree_attention(model, "dense"):
        pass


# ---- flex and varlen: what can be seen without a GPU


@pytest.mark.parametrize("seed", range(4))
def test_block_masks_have_the_blocks_of_create_block_mask(seed):
    tree = _padded_tree(tree_of(rows_of(seed, prompt=100 + 100 * seed, turn=60, count=10)))
    assert len(tree) % 128 == 0
    ours = block_mask(tree, None, CPU)
    theirs = flex.create_block_mask(ours.mask_mod, None, None, len(tree), len(tree), device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for mine, other in ((ours.kv_num_blocks, theirs.kv_num_blocks), (ours.full_kv_num_blocks, theirs.full_kv_num_blocks)):
        assert torch.equal(mine, other)
    for counts, mine, other in (
        (ours.kv_num_blocks, ours.kv_indices, theirs.kv_indices),
        (ours.full_kv_num_blocks, ours.full_kv_indices, theirs.full_kv_indices),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            assert torch.equal(mine[0, 0, row, :count], other[0, 0, row, :count])


@pytest.mark.parametrize("window", [None, 50, 150])
def test_block_masks_see_the_paths_and_padding_itself(window):
    tree = tree_of(rows_of(2, count=10))
    whole = _padded_tree(tree)
    mask = block_mask(whole, window, CPU)
    pairs = flex.create_mask(mask.mask_mod, None, None, len(whole), len(whole), device="cpu")[0, 0]
    assert torch.equal(pairs[: len(tree), : len(tree)], sees(tree, window)) and torch.equal(
        pairs[len(tree) :].nonzero()[:, 1], torch.arange(len(tree), len(whole))
    )
    blocks = mask.to_dense()[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1).bool()
    assert not (pairs & ~blocks).any(), "a pair outside the blocks"
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        for column in mask.full_kv_indices[0, 0, row, :count].tolist():
            assert pairs[128 * row : 128 * row + 128, 128 * column : 128 * column + 128].all(), "a full block that is not"


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Mistral"])
def test_models_over_trees_by_flex_have_the_logits_of_rows(kind, monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # or it warns that it is not compiled, which takes long
    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", lambda *qkv, training, **options: flex.flex_attention(*qkv, **options))
    rows, model = rows_of(7), tiny(kind)
    with torch.no_grad():  # no backward pass on a CPU
        assert off([tree_logits(model, rows, "flex")], [row_logits(model, rows)]) < 1e-10


def bottom_right(query: Tensor, key: Tensor, value: Tensor, firsts: Tensor, key_firsts: Tensor, longest: int, longest_key: int, **options: Any) -> Tensor:
    """What varlen_attn is said to compute, slowly: (Q, H, d) queries, sequence by sequence, causal and windowed from the last query and key."""
    left, right = options["window_size"]
    assert right == 0 and options["enable_gqa"] and longest == int(firsts.diff().max()) and longest_key == int(key_firsts.diff().max())
    out = []
    for first, last, start, stop in zip(firsts[:-1], firsts[1:], key_firsts[:-1], key_firsts[1:], strict=True):
        queries, keys = torch.arange(first, last) - last, torch.arange(start, stop) - stop
        before = queries[:, None] - keys
        visible = (before >= 0) & ((before <= left) | (left < 0))
        parts = (tensor.transpose(0, 1)[None] for tensor in (query[first:last], key[start:stop], value[start:stop]))
        out.append(dense(*parts, visible, options["scale"])[0])
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_varlen_is_exact_where_the_kernel_is_what_it_is_said_to_be(kind, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", bottom_right)
    rows, model = rows_of(7), tiny(kind)
    assert off(tree_outcome(model, rows, "varlen"), row_outcome(model, rows)) < 1e-10


def test_gathered_paths_by_hand():
    # Nodes a b | c | d e of rows a b c and a b d e: paths a b, a b c, a b d e.
    index, firsts, path_firsts, longest, longest_path = _gathered_paths(tree_of([[1, 2, 3], [1, 2, 4, 5]]), CPU)
    assert index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4]
    assert (firsts.tolist(), path_firsts.tolist(), longest, longest_path) == ([0, 2, 3, 5], [0, 2, 5, 9], 2, 4)
