"""Updates in packed layouts against the same updates in padded rows: one loss, one gradient, the same metrics. And faults that must not go unseen."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import FAULTS, KINDS, VOCABULARY, WINDOW, Outcome, Path, batch, relative, some_groups, tiny, update
from torch import nn

from arpo_algo.advantages import group_advantages, hard, soft
from arpo_algo.distributed import Ranks
from arpo_algo.learner import Learner, LearnerConfig, add_lora
from arpo_algo.losses import cispo, clipped_surrogate, gspo, kl_k1, kl_k2, kl_k3
from arpo_algo.packing import Rows, constant_length, pad_groups, token_mean, trajectory_mean, tree_micro_batches, unique_tokens
from arpo_algo.sharding import rank_micro_batches
from arpo_algo.token_tree import build_tree
from arpo_algo.tree import RolloutTree, Trajectory

PACKED = ["tree", "packed"]
LOSSES = {"grpo": clipped_surrogate, "dual clip": partial(clipped_surrogate, dual_clip=1.3), "gspo": gspo, "cispo": cispo}
KLS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
WEIGHTS = {"trajectory mean": trajectory_mean, "token mean": token_mean, "constant": constant_length(9)}
ALL_ON = {"kl_coef": 0.04, "entropy_coef": 0.01, "temperature": 0.8}
MODEL = tiny()
OTHER = tiny(seed=1)
CUT = 20
"""Tokens of a micro-batch at which trees are cut, and their trunk is computed apart."""
OF_LAYOUT = {"seconds", "sharing", "tree_layout", "padded_share"}


def assert_same(got: Outcome, expected: Outcome, *, gradient: float = 1e-12, numbers: float = 1e-13) -> None:
    assert expected.gradients.norm() > 1e-3
    assert relative(got.gradients, expected.gradients) <= gradient
    assert got.metrics.keys() == expected.metrics.keys()
    for name in got.metrics.keys() - OF_LAYOUT:
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=numbers, abs=numbers), name


# ---- exactness


def test_the_batches_are_as_hard_as_they_should_be():
    rows = batch(MODEL, some_groups(0), temperature=0.8)
    metrics = update(MODEL, rows, "tree", temperature=0.8).metrics
    assert 0.15 < metrics["clip_fraction_low"] + metrics["clip_fraction_high"] < 0.35
    assert min(metrics["clip_fraction_low"], metrics["clip_fraction_high"]) > 0.05
    assert metrics["sharing"] > 2 and len(set(rows.lengths.tolist())) > 5 and len(set(rows.groups.tolist())) == 2
    in_mask, of_rows = rows.mask.sum(1), (rows.attention[:, 3:]).sum(1)
    assert (in_mask == 0).any() and (in_mask < of_rows).any()  # rows that are not scored, tokens of tools
    assert (rows.advantages > 0).any() and (rows.advantages < 0).any()
    for seed in (5, 6):
        rows, layouts = batch(MODEL, some_groups(seed)), Learner(MODEL, LearnerConfig(layout="tree", micro_batch_tokens=CUT)).layouts
        assert all(layouts.cut(rows, pieces) for pieces in tree_micro_batches(rows, CUT) if len(pieces) > 1)


@pytest.mark.parametrize(("loss", "kl"), [("grpo", "k3"), ("dual clip", "k1"), ("gspo", "k2"), ("cispo", "k3")])
def test_every_objective_with_kl_and_entropy(loss, kl):
    arguments = {"loss": LOSSES[loss], "kl": KLS[kl], "ref_model": OTHER}
    rows = batch(MODEL, some_groups(0), temperature=0.8)
    expected, *got = (update(MODEL, rows, layout, arguments=arguments, **ALL_ON) for layout in ("padded", *PACKED))
    for outcome in got:
        assert_same(outcome, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_model(kind, tied):
    model = tiny(kind, tied=tied)
    rows = batch(model, some_groups(1), temperature=0.8)
    assert rows.lengths.max() > 3 * WINDOW
    expected, *got = (update(model, rows, layout, arguments={"ref_model": tiny(kind, seed=1)}, **ALL_ON) for layout in ("padded", *PACKED))
    for outcome in got:
        assert_same(outcome, expected)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    groups=st.lists(
        st.lists(
            st.builds(Path, st.integers(0, 9), st.lists(st.integers(1, 4), max_size=3), st.floats(-1, 1, width=16), st.sampled_from([True, True, True, False])),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=3,
    ),
    weigh=st.sampled_from(list(WEIGHTS)),
    loss=st.sampled_from(list(LOSSES)),
    kl=st.sampled_from(list(KLS)),
    options=st.fixed_dictionaries(
        {
            "micro_batch_tokens": st.sampled_from([4096, CUT, 12]),
            "minibatches": st.integers(1, 3),
            "temperature": st.sampled_from([1.0, 0.8]),
            "entropy_coef": st.sampled_from([0.01, 0.0]),
        }
    ),
)
def test_random_trees(groups, weigh, loss, kl, options):
    rows = batch(MODEL, [[Path(0, (2,), 1.0), *group] for group in groups], weigh=WEIGHTS[weigh], temperature=options["temperature"])
    arguments = {"loss": LOSSES[loss], "kl": KLS[kl], "ref_model": OTHER}
    expected, *got = (update(MODEL, rows, layout, arguments=arguments, kl_coef=0.04, **options) for layout in ("padded", *PACKED))
    for outcome in got:
        assert_same(outcome, expected)


@pytest.mark.parametrize("options", [{}, {"importance_cap": 1.2}, {"dtype": "bfloat16"}])
def test_old_logprobs_recomputed_in_the_same_layout(options):
    exact = options.get("dtype") is None
    model = tiny(exact=exact)
    rows = batch(model, some_groups(2))
    tree, padded = (update(model, rows, layout, recompute_old_logprobs=True, **options) for layout in ("tree", "padded"))
    if exact:
        assert_same(tree, padded)
    assert tree.metrics["ratio_max"] == pytest.approx(1, abs=1e-12 if exact else 1e-6)
    assert tree.metrics["mismatch/clip_share"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("most", [1, 12, CUT])
def test_micro_batches_change_nothing(layout, most):
    rows = batch(MODEL, some_groups(5))
    expected = update(MODEL, rows, "padded", arguments={"loss": gspo}, entropy_coef=0.01)
    assert_same(update(MODEL, rows, layout, arguments={"loss": gspo}, micro_batch_tokens=most, entropy_coef=0.01), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_larger_than_a_block_of_attention(kind):
    # attention goes block by block from 128 tokens on: nodes longer than that, and forks before and after the edges of blocks
    model = tiny(kind)
    long = [Path(0, (60, 60, 60), 1.0), *(Path(fork, (40, 15), reward) for fork, reward in ((4, -1.0), (2, 0.5), (5, 2.0), (8, -0.5), (0, 0.3)))]
    rows = batch(model, [long, long[2:]])
    assert unique_tokens(rows) > 500
    expected, *got = (update(model, rows, layout, entropy_coef=0.01) for layout in ("padded", *PACKED))
    for outcome in [*got, update(model, rows, "tree", entropy_coef=0.01, micro_batch_tokens=250)]:
        assert_same(outcome, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_the_shares_of_ranks_add_up_to_the_whole(size):
    rows = batch(MODEL, some_groups(4))
    shares = [piece for rank in range(size) for pieces in rank_micro_batches(rows, 40, Ranks(rank=rank, size=size), layout="tree") for piece in pieces]
    parts = [update(MODEL, rows.select(index), "tree").gradients for index in shares if rows.mask[index].any()]
    assert len(parts) >= size and relative(torch.stack(parts).sum(0), update(MODEL, rows, "padded").gradients) <= 1e-12


@pytest.mark.parametrize("layout", PACKED)
def test_weights_after_several_steps(layout):
    rows = batch(MODEL, some_groups(5))
    after = []
    for chosen in (layout, "padded"):
        model = copy.deepcopy(MODEL)
        learner = Learner(model, LearnerConfig(lr=1e-2, epochs=2, minibatches=3, kl_coef=0.1, entropy_coef=0.01, micro_batch_tokens=CUT, layout=chosen))
        metrics = [learner.update(rows) for _ in range(2)]
        assert learner.steps == 12 and metrics[1]["kl"] > 1e-3
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in MODEL.parameters()])
    assert relative(after[0] - start, after[1] - start) <= 1e-7  # Adam divides by gradients of 1e-8 and less


def lora_model() -> nn.Module:
    """An adapter that is no longer the identity, whose weights alone are trained."""
    model = add_lora(tiny("qwen2"), rank=2, alpha=4).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_tokens": CUT}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "micro_batch_tokens": CUT}]
)
@pytest.mark.parametrize("make", [lora_model, partial(tiny, "mistral")], ids=["lora", "mistral"])
def test_adapters_windows_and_recomputed_activations(make, options):
    rows = batch(make(), some_groups(6), temperature=0.8)
    arguments = {"ref_model": OTHER}
    expected = update(make(), rows, "padded", arguments=arguments, **ALL_ON)
    for layout in PACKED:
        assert_same(update(make(), rows, layout, arguments=arguments, **ALL_ON, **options), expected)


@pytest.mark.parametrize("seed", range(3))
def test_float32(seed):
    model, other = tiny(seed=seed, exact=False), tiny(seed=seed + 1, exact=False)
    rows = batch(model, some_groups(seed), temperature=0.8)
    expected = update(model, rows, "padded", arguments={"ref_model": other}, **ALL_ON)
    for layout in PACKED:
        assert_same(update(model, rows, layout, arguments={"ref_model": other}, **ALL_ON), expected, gradient=1e-5, numbers=1e-5)


def test_bfloat16_is_as_far_from_the_truth_as_padded_rows_are():
    settings = {"recompute_old_logprobs": True, "entropy_coef": 0.01}
    errors: dict[tuple[str, int], list[float]] = {("padded", 4096): [], ("tree", 4096): [], ("tree", CUT): [], ("packed", 4096): []}
    for seed in range(6):
        rows = batch(tiny(seed=seed), some_groups(seed))
        truth = update(tiny(seed=seed), rows, "padded", **settings).gradients
        for (layout, most), of_layout in errors.items():
            outcome = update(tiny(seed=seed, exact=False), rows, layout, dtype="bfloat16", micro_batch_tokens=most, **settings)
            of_layout.append(relative(outcome.gradients, truth))
    padded, *others = (float(np.mean(values)) for values in errors.values())
    assert 1e-3 < padded < 0.2 and max(others) <= 1.2 * padded, errors


@pytest.mark.parametrize("kind", KINDS)
def test_token_logprobs_and_entropies(kind):
    model = tiny(kind)
    rows = batch(model, some_groups(5))
    (expected, tree, packed) = (
        Learner(model, LearnerConfig(layout=layout, temperature=0.8, micro_batch_tokens=CUT)).token_logprobs(rows) for layout in ("padded", *PACKED)
    )
    for values in (tree, packed):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


def test_auto_takes_the_tree_where_rows_share_and_padded_rows_where_they_do_not():
    rows = batch(MODEL, [[Path(0, (9, 9), 1.0), *(Path(3, (n,), -n) for n in (1, 2, 3, 4))]])
    outcome = update(MODEL, rows, "auto")
    assert outcome.metrics["tree_layout"] == 1 and outcome.metrics["sharing"] > 2
    assert_same(outcome, update(MODEL, rows, "padded"))
    assert update(MODEL, rows.select([1]), "auto").metrics["tree_layout"] == 0
    assert update(MODEL, rows, "auto", minibatches=len(rows)).metrics["tree_layout"] == 0  # no two rows in one step


# ---- faults that must show


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_tree_shows(fault):
    rows = batch(MODEL, some_groups(0), temperature=0.8)
    expected = update(MODEL, rows, "padded", temperature=0.8)
    assert relative(update(MODEL, rows, "tree", fault=lambda _, __, packed: packed, temperature=0.8).gradients, expected.gradients) <= 1e-12
    assert relative(update(MODEL, rows, "tree", fault=FAULTS[fault], temperature=0.8).gradients, expected.gradients) > 1e-3


def once(rows: Rows) -> Rows:
    """Shared tokens are trained for the first of their owners only, as a trainer does that sets the loss mask of the others to 0."""
    tree, mask = build_tree(rows.token_ids, rows.lengths), np.zeros_like(rows.mask)
    _, first = np.unique(tree.where[rows.mask], return_index=True)
    mask[tuple(np.argwhere(rows.mask)[first].T)] = True
    return replace(rows, mask=mask)


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_hard_advantages_and_tokens_trained_once_are_other_objectives(layout):
    groups = some_groups(0)
    rows = batch(MODEL, groups)
    expected = update(MODEL, rows, "padded").gradients
    harder = update(MODEL, batch(MODEL, groups, assign=hard), layout)
    assert relative(harder.gradients, expected) > 1e-3
    assert_same(harder, update(MODEL, batch(MODEL, groups, assign=hard), "padded"))
    assert relative(update(MODEL, once(rows), layout).gradients, expected) > 1e-3
    assert relative(update(MODEL, once(rows), "tree").gradients, update(MODEL, once(rows), "padded").gradients) <= 1e-12


def test_the_ratio_is_one_and_the_kl_zero_before_the_first_step():
    """At another temperature, and from a trained adapter, which is its own reference."""
    for model in (MODEL, lora_model()):
        rows = batch(model, some_groups(8), temperature=0.6)
        own = Learner(model, LearnerConfig(layout="padded", temperature=0.6)).token_logprobs(rows)[0].numpy()
        metrics = update(model, replace(rows, old_logprobs=own), "tree", temperature=0.6, kl_coef=0.1).metrics
        assert metrics["kl"] == 0 and metrics["ratio_mean"] == pytest.approx(1, abs=1e-12) and metrics["ratio_max"] == pytest.approx(1, abs=1e-12)


def test_rows_that_are_not_scored_and_groups_without_signal_change_nothing():
    # The unscored row continues a scored one; its tokens may not enter denominators, and its group's zeros not the gradient of the other.
    group = [Path(0, (3, 2), 1.0), Path(0, (2,), 0.0), Path(1, (4,), 5.0, False)]
    with_it, without = batch(MODEL, [group]), batch(MODEL, [group])
    without = without.select([0, 1])
    for layout in PACKED:
        assert_same(update(MODEL, with_it, layout), update(MODEL, without, "padded"))
    equal = batch(MODEL, [[path._replace(reward=0.7, scored=True) for path in group]])
    start = copy.deepcopy(MODEL)
    learner = Learner(start, LearnerConfig(lr=0.1, layout="tree"))
    assert learner.update(equal)["steps"] == 0
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), MODEL.parameters(), strict=True))


# ---- soft and hard assignment by hand


def four(lengths: Sequence[int]) -> RolloutTree:
    """Trajectories 0, 1 and 2 share their first sampled token; number 3 has its own. Rewards 1, 1, 0, 0."""
    tree, ids = RolloutTree(), itertools.cycle(range(3, VOCABULARY))
    prompt = tree.add(None, "prompt", [1, 2])
    shared = tree.add(prompt.id, "policy", [next(ids)], logprobs=[0.0], entropies=[0.0])
    for index, (length, reward) in enumerate(zip(lengths, (1.0, 1.0, 0.0, 0.0), strict=True)):
        above, own = (prompt, length) if index == 3 else (shared, length - 1)
        node = tree.add(above.id, "policy", [next(ids) for _ in range(own)], logprobs=[0.0] * own, entropies=[0.0] * own)
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=node.id, reward=reward))
    return tree


@cache
def token_gradients(lengths: tuple[int, ...]) -> torch.Tensor:
    """(N, P) gradient of the weights by the log-probability of each trained token of :func:`four`, row by row: one whole row at a time, full logits."""
    gradients = []
    for trajectory in four(lengths).trajectories:
        ids = torch.tensor(trajectory.token_ids)
        log_p = MODEL(input_ids=ids[None]).logits[0].log_softmax(-1)
        for column in np.flatnonzero(trajectory.mask):
            parts = torch.autograd.grad(log_p[column - 1, ids[column]], list(MODEL.parameters()), retain_graph=True)
            gradients.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(gradients)


@pytest.mark.parametrize(
    ("lengths", "ratio", "soft_16", "hard_16"),
    [
        # a sixteenth: 1 / (4 trajectories x 4 tokens). The shared token has advantages 1, 1, -1, and their mean 1/3 three times
        ((4, 4, 4, 4), 1.0, 1.0, 1.0),
        ((4, 4, 4, 4), 1.1, 1.1, 1.1),
        ((4, 8, 5, 4), 1.0, 0.7, 2.3 / 3),  # 4 x (1/4 + 1/8 - 1/5) and 4/3 x (1/4 + 1/8 + 1/5)
        ((4, 4, 4, 4), 1.5, -1.5, 0.0),  # A > 0 is clipped: soft keeps the third owner, hard none
        ((4, 4, 4, 4), 0.5, 1.0, 0.5),  # A < 0 is clipped: soft keeps two owners, hard all three
    ],
)
@pytest.mark.parametrize("assign", [soft, hard])
@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_the_weight_of_a_shared_token_by_hand(lengths, ratio, soft_16, hard_16, assign, layout):
    tree = four(lengths)
    advantages = assign(tree, group_advantages(tree.rewards_M, tree.scored_M, delta=0.0))
    rows = pad_groups([tree], [advantages], pad_id=0, weigh=trajectory_mean)
    width = rows.mask.shape[1]
    exact = np.stack([np.pad(values, (0, width - len(values))) for values in advantages])  # float64, where pad_groups keeps float32
    own = Learner(MODEL, LearnerConfig(layout="padded")).token_logprobs(rows)[0].numpy()
    rows = replace(rows, advantages=exact, weights=trajectory_mean(rows.mask), old_logprobs=np.where(rows.mask, own - math.log(ratio), 0.0))
    _, first, copies = np.unique(build_tree(rows.token_ids, rows.lengths).where[rows.mask], return_index=True, return_inverse=True)
    of_unique = token_gradients(lengths)[first]  # (E, P)
    gradient = -update(MODEL, rows, layout).gradients
    solved = torch.linalg.lstsq(of_unique.T, gradient[:, None]).solution[:, 0]  # (E,) the one sum of the tokens' gradients that it can be
    assert relative(of_unique.T @ solved, gradient) <= 1e-12
    weights = np.zeros(rows.mask.shape)
    weights[rows.mask] = solved.numpy()[copies]
    for row, (length, advantage) in enumerate(zip(lengths, (1, 1, -1, -1), strict=True)):
        clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        of_own_16 = 0.0 if clipped else 4 * advantage * ratio / length
        of_shared_16 = of_own_16 if row == 3 else soft_16 if assign is soft else hard_16
        expected = [0.0, 0.0, of_shared_16, *[of_own_16] * (length - 1)]
        np.testing.assert_allclose(16 * weights[row, : 2 + length], expected, rtol=0, atol=1e-12)
