"""The learner against slow references: one row at a time, full logits, no chunks, no micro-batches."""

from __future__ import annotations

import asyncio
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from arpo_algo.advantages import group_advantages, soft
from arpo_algo.learner import Learner, LearnerConfig, add_lora
from arpo_algo.logprobs import TokenLogprobs
from arpo_algo.losses import cispo, clipped_surrogate, gspo, kl_k1
from arpo_algo.optim import schedule_factor
from arpo_algo.packing import Rows, micro_batches, pad_groups, token_mean, trajectory_mean
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.tree import RolloutTree, Trajectory

VOCABULARY = 17


def tiny_model(seed: int = 0, *, tied: bool = True, dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval()


@torch.no_grad()
def sample(model: nn.Module, context: list[int], length: int, temperature: float, generator: torch.Generator) -> tuple[list[int], list[float], list[float]]:
    """Token by token with a KV cache, as a policy decodes: ids, log-probabilities at the temperature, entropies at temperature 1."""
    ids, logprobs, entropies = [], [], []
    output = model(input_ids=torch.tensor([context]), use_cache=True)
    for _ in range(length):
        logits = output.logits[0, -1]
        log_p = (logits / temperature).log_softmax(-1)
        token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
        log_p1 = logits.log_softmax(-1)
        ids, logprobs, entropies = [*ids, token], [*logprobs, float(log_p[token])], [*entropies, float(-(log_p1.exp() * log_p1).sum())]
        output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    return ids, logprobs, entropies


def rollout(model: nn.Module, lengths: list[list[int]], *, temperature: float = 1.0, seed: int = 0, unscored: tuple[int, ...] = ()) -> RolloutTree:
    """One group; each trajectory has turns of the given lengths with an observation of two tokens between them. Rewards alternate."""
    generator = torch.Generator().manual_seed(seed)
    tree = RolloutTree()
    prompt = tree.add(None, "prompt", [1, 2, 3])
    for index, turns in enumerate(lengths):
        node, context = prompt, [1, 2, 3]
        for number, length in enumerate(turns):
            if number:
                node = tree.add(node.id, "observation", [4, 5])
                context = [*context, 4, 5]
            ids, logprobs, entropies = sample(model, context, length, temperature, generator)
            node = tree.add(node.id, "policy", ids, logprobs=logprobs, entropies=entropies)
            context = context + ids
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=node.id, reward=float(index % 2 == 0), scored=index not in unscored))
    return tree


def rows_of(tree: RolloutTree, weigh=trajectory_mean, pad_id: int = 0) -> Rows:
    return pad_groups([tree], [soft(tree, group_advantages(tree.rewards_M, tree.scored_M))], pad_id=pad_id, weigh=weigh)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def gradient_of(model: nn.Module, rows: Rows, **settings) -> torch.Tensor:
    """The gradient that ``update`` hands to the optimiser, which is replaced by one that writes it down."""
    learner = Learner(model, LearnerConfig(max_grad_norm=math.inf, **settings))
    seen: list[torch.Tensor] = []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.trainable]))
    learner.update(rows)
    return torch.stack(seen).sum(0)


LENGTHS = [[1], [3, 2, 4], [2, 2], [5]]


# ---- log-probabilities


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_ratio_is_one_before_the_first_update_at_any_temperature(temperature):
    model = tiny_model()
    tree = rollout(model, LENGTHS, temperature=temperature)
    rows = rows_of(tree)
    learner = Learner(model, LearnerConfig(temperature=temperature, lr=1e-3))
    logprobs, entropies = learner.token_logprobs(rows)
    ratios = torch.exp(logprobs - torch.tensor(rows.old_logprobs))[torch.tensor(rows.mask)]
    assert (ratios - 1).abs().max() < 1e-6
    for row, trajectory in enumerate(tree.trajectories):
        assert entropies[row, : len(trajectory.entropies)].tolist() == pytest.approx(trajectory.entropies, abs=1e-6)
    metrics = learner.update(rows)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6) and metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
    wrong = Learner(model, LearnerConfig(temperature=temperature + 0.5)).update(rows)  # the test can see the fault
    assert abs(wrong["ratio_max"] - 1) > 1e-2


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_ratio_is_one_for_turns_of_the_transformers_policy(temperature):
    model = tiny_model()
    policy = TransformersPolicy(model, None, eos_ids=())

    async def turns() -> list[Generation]:
        settings = [SamplingParams(max_new_tokens=4 + i, temperature=temperature, seed=i) for i in range(4)]
        return await asyncio.gather(*(policy.generate([1, 2, 3], params) for params in settings))

    tree = RolloutTree()
    prompt = tree.add(None, "prompt", [1, 2, 3])
    for index, turn in enumerate(asyncio.run(turns())):
        node = tree.add(prompt.id, "policy", turn.token_ids, logprobs=turn.logprobs, entropies=turn.entropies)
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=node.id, reward=index % 2))
    learner = Learner(model, LearnerConfig(temperature=temperature))
    metrics = learner.update(rows_of(tree))
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6) and metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["tokens_trained"] == 4 + 5 + 6 + 7
    assert metrics["entropy"] == pytest.approx(np.mean([e for node in tree.nodes for e in node.entropies]), abs=1e-5)


def test_ratio_is_one_in_float32():
    model = tiny_model().float()
    metrics = Learner(model, LearnerConfig(temperature=0.6)).update(rows_of(rollout(model, LENGTHS, temperature=0.6)))
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)


def full_logits_reference(model: nn.Module, rows: Rows) -> torch.Tensor:
    out = torch.zeros(rows.mask.shape, dtype=torch.float64)
    for row in range(len(rows)):
        ids = torch.tensor(rows.token_ids[row][rows.attention[row]])
        log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for column in np.flatnonzero(rows.mask[row]):
            out[row, column] = log_p[column - 1, ids[column]]
    return out


class CappedLogits(LlamaForCausalLM):
    """Changes its logits after the head, as Gemma 2 and Granite do."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2.0 * torch.tanh(output.logits / 2.0)
        return output


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)).double().eval()


def capped() -> nn.Module:
    return CappedLogits(tiny_model().config).double().eval()


@pytest.mark.parametrize(("make", "plain"), [(tiny_model, True), (gpt2, True), (capped, False)])
@pytest.mark.parametrize("chunk_rows", [1, 10_000])
def test_gathered_and_chunked_logprobs_equal_full_logits(make, plain, chunk_rows):
    model = make()
    rows = rows_of(rollout(tiny_model(), LENGTHS))
    scorer = TokenLogprobs(model)
    scorer.chunk_elements = chunk_rows * VOCABULARY
    token_ids, mask = torch.tensor(rows.token_ids), torch.tensor(rows.mask)
    logprobs, _ = scorer(token_ids, mask)
    expected = full_logits_reference(model, rows)
    torch.testing.assert_close(logprobs, expected)
    assert (scorer._head is not None) == plain
    weights = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    for ours, reference in zip(
        torch.autograd.grad((logprobs * weights).sum(), parameters), torch.autograd.grad((expected * weights).sum(), parameters), strict=True
    ):
        torch.testing.assert_close(ours, reference)


def test_only_targets_reach_the_head_and_in_chunks():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(layout="padded"))
    learner.token_logprobs(rows)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.numel() // VOCABULARY))
    learner.logprobs.chunk_elements = 5 * VOCABULARY
    learner.token_logprobs(rows)
    targets = int(rows.mask.sum())
    assert targets == 19 and sizes == [4, 5, 5, 5, 4]  # 4: one position for each row in the model's own forward


def test_padding_and_neighbours_change_nothing():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    together, _ = Learner(model, LearnerConfig()).token_logprobs(rows)
    other_pad, _ = Learner(model, LearnerConfig()).token_logprobs(rows_of(rollout(model, LENGTHS), pad_id=11))
    alone, _ = Learner(model, LearnerConfig(micro_batch_tokens=1)).token_logprobs(rows)
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(together, other_pad)


# ---- the loss and its denominators


@pytest.mark.parametrize("weigh", [trajectory_mean, token_mean])
def test_gradient_does_not_depend_on_micro_batches(weigh):
    model = tiny_model()
    rows = rows_of(rollout(model, [[1], [9], [4, 3]]), weigh)
    whole = gradient_of(model, rows, micro_batch_tokens=10_000)
    assert len(micro_batches(rows, 1)) == 3
    torch.testing.assert_close(gradient_of(model, rows, micro_batch_tokens=1), whole)
    torch.testing.assert_close(gradient_of(model, rows, micro_batch_tokens=24), whole)
    on_two_ranks = gradient_of(model, rows.select([0])) + gradient_of(model, rows.select([1, 2]))
    torch.testing.assert_close(on_two_ranks, whole)


def test_gradient_and_loss_equal_the_formula():
    model = tiny_model()
    tree = rollout(model, LENGTHS)
    rows = rows_of(tree)
    shift = np.random.default_rng(0).normal(0, 0.5, rows.mask.shape).astype(np.float32)
    rows = replace(rows, old_logprobs=np.where(rows.mask, rows.old_logprobs + shift, 0))  # ratios far from 1 on both sides
    expected = torch.zeros(())
    logprobs = full_logits_reference(model, rows)
    for row, advantage in enumerate([1.0, -1.0, 1.0, -1.0]):
        columns = np.flatnonzero(rows.mask[row])
        terms = []
        for column in columns:
            r = torch.exp(logprobs[row, column] - float(rows.old_logprobs[row, column]))
            terms.append(torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage))
        expected = expected - torch.stack(terms).mean() / 4
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(expected, list(model.parameters()))])
    torch.testing.assert_close(gradient_of(model, rows), gradient, rtol=1e-4, atol=1e-7)
    metrics = Learner(model, LearnerConfig()).update(rows)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["clip_fraction_low"] > 0 and metrics["clip_fraction_high"] > 0


def test_unscored_rows_add_nothing():
    model = tiny_model()
    kept = rollout(model, [[2], [3]])
    with_unscored = rollout(model, [[2], [3], [30]], unscored=(2,))
    torch.testing.assert_close(gradient_of(model, rows_of(with_unscored)), gradient_of(model, rows_of(kept)))


def test_a_fully_masked_batch_takes_no_step():
    model = tiny_model()
    rows = rows_of(rollout(model, [[2], [3]], unscored=(0, 1)))
    learner, before = Learner(model, LearnerConfig(lr=0.1, kl_coef=0.1)), weights_of(model)
    metrics = learner.update(rows)
    assert metrics["loss"] == metrics["tokens_trained"] == metrics["steps"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(weights_of(model), before)


def test_equal_rewards_leave_the_weights_alone_even_with_momentum():
    model = tiny_model()
    tree = rollout(model, [[2], [3]])
    learner = Learner(model, LearnerConfig(lr=0.1))
    assert learner.update(rows_of(tree))["steps"] == 1
    before = weights_of(model)
    for trajectory in tree.trajectories:
        trajectory.reward = 0.7
    metrics = learner.update(rows_of(tree))
    assert metrics["grad_norm"] == 0 and metrics["steps"] == 1
    assert torch.equal(weights_of(model), before)


@pytest.mark.parametrize(("settings", "computed"), [({}, 7), ({"kl_coef": 0.1}, 14), ({"entropy_coef": 0.1}, 14), ({"recompute_old_logprobs": True}, 7)])
def test_a_group_without_a_signal_is_not_computed_and_counts_in_the_weights(settings, computed):
    model = tiny_model()
    trees = [rollout(model, [[3], [4]], seed=seed) for seed in (0, 1)]  # 7 trained tokens each
    for trajectory in trees[0].trajectories:
        trajectory.reward = 0.7
    advantages = [soft(tree, group_advantages(tree.rewards_M, tree.scored_M)) for tree in trees]
    rows = pad_groups(trees, advantages, pad_id=0, weigh=trajectory_mean)
    if not settings:
        # The mean is over four trajectories, two of which have no gradient: half of what the other group has alone.
        torch.testing.assert_close(gradient_of(model, rows), gradient_of(model, rows_of(trees[1])) / 2)
    learner, seen = Learner(model, LearnerConfig(**settings)), []
    learner.logprobs.register_forward_pre_hook(lambda _, args: seen.append(int(args[1].sum())))
    assert learner.update(rows)["tokens_trained"] == computed
    assert set(seen) == {computed}


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted():
    model = tiny_model()
    rows = rows_of(rollout(model, [[2], [3]]))
    learner, before = Learner(model, LearnerConfig(lr=0.1)), weights_of(model)
    broken = replace(rows, advantages=np.where(rows.mask, np.nan, 0).astype(np.float32))
    metrics = learner.update(broken)
    assert metrics["skipped_steps"] == 1 and metrics["steps"] == 0
    assert torch.equal(weights_of(model), before)
    assert learner.update(rows)["steps"] == 1
    assert torch.isfinite(weights_of(model)).all() and not torch.equal(weights_of(model), before)


def test_updates_raise_the_probability_of_rewarded_trajectories():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(lr=3e-3))
    before, _ = learner.token_logprobs(rows)
    for _ in range(3):
        learner.update(rows)
    change = (learner.token_logprobs(rows)[0] - before).numpy()
    assert (rows.weights * rows.advantages * change).sum() > 0.1


@pytest.mark.parametrize("loss", [gspo, cispo])
def test_other_objectives_are_arguments(loss):
    model = tiny_model()
    metrics = Learner(model, LearnerConfig(lr=1e-3), loss=loss).update(rows_of(rollout(model, LENGTHS)))
    assert metrics["steps"] == 1 and metrics["grad_norm"] > 0


def test_minibatches_are_means_over_their_own_trajectories():
    # Four rows in two steps: each step's weights are doubled. At fixed weights the two gradients add up to twice that of the whole.
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    torch.testing.assert_close(gradient_of(model, rows, minibatches=2), 2 * gradient_of(model, rows), rtol=1e-4, atol=1e-7)
    learner = Learner(tiny_model(), LearnerConfig(minibatches=3, epochs=2, lr=1e-4))
    parts = list(learner._minibatches(rows))
    assert [len(part) for part in parts] == [2, 1, 1, 2, 1, 1]
    assert [float(part.weights.sum()) for part in parts] == pytest.approx([1.0] * 6, rel=1e-6)
    assert learner.update(rows)["steps"] == 6


def test_minibatches_are_drawn_anew_each_pass_and_each_update():
    rows = rows_of(rollout(tiny_model(), [[length] for length in range(1, 9)]))  # a row is known by its number of sampled tokens
    learner = Learner(tiny_model(), LearnerConfig(minibatches=2, epochs=2))

    def order() -> list[list[int]]:
        sizes = [int(size) for part in learner._minibatches(rows) for size in part.mask.sum(1)]
        return [sizes[:8], sizes[8:]]

    first = order()
    assert first == order()
    learner.updates += 1
    orders = [*first, *order()]
    assert all(sorted(passed) == list(range(1, 9)) for passed in orders)
    assert len({tuple(passed) for passed in orders}) == 4


def test_entropy_bonus_raises_entropy_and_is_off_by_default():
    assert LearnerConfig().entropy_coef == 0 and LearnerConfig().kl_coef == 0
    entropies = {}
    for coefficient in (0.0, 5.0):
        model = tiny_model()
        rows = rows_of(rollout(model, LENGTHS))
        learner = Learner(model, LearnerConfig(lr=3e-3, entropy_coef=coefficient))
        for _ in range(2):
            learner.update(rows)
        entropies[coefficient] = float(learner.token_logprobs(rows)[1].sum())
    assert entropies[5.0] > entropies[0.0]


# ---- reference


def test_kl_is_exactly_zero_at_step_zero_and_grows():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(lr=1e-2, kl_coef=0.1))
    assert learner.update(rows)["kl"] == 0
    assert learner.update(rows)["kl"] > 0
    assert "kl" not in Learner(model, LearnerConfig()).update(rows)


def test_kl_pulls_back_to_the_reference():
    distance = {}
    for coefficient in (1e-9, 10.0):
        model = tiny_model()
        rows = rows_of(rollout(model, LENGTHS))
        learner = Learner(model, LearnerConfig(lr=3e-3, kl_coef=coefficient, clip_low=0.9, clip_high=9.0))
        for _ in range(4):
            metrics = learner.update(rows)
        distance[coefficient] = metrics["kl"]
    assert distance[10.0] < distance[1e-9] / 2


def test_the_gradient_is_that_of_the_policy_and_not_of_the_reference():
    """The weights of the reference are in place during its forward; they must be gone before the policy's backward."""
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(kl_coef=1e-12, max_grad_norm=math.inf))
    with torch.no_grad():
        for p in learner.reference:
            p.add_(0.1)
    seen = []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.trainable]))
    learner.update(rows)
    torch.testing.assert_close(seen[0], gradient_of(model, rows), rtol=1e-5, atol=1e-9)


def test_a_reference_model_of_ones_own():
    model, other = tiny_model(0), tiny_model(1)
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(kl_coef=0.1), kl=kl_k1, ref_model=other)
    expected = (full_logits_reference(model, rows) - full_logits_reference(other, rows)).sum() / rows.mask.sum()
    assert learner.update(rows)["kl"] == pytest.approx(expected.item(), rel=1e-6)
    assert learner.reference is None


def trained_adapter() -> nn.Module:
    """LoRA whose adapter is no longer the identity, as after a cold start."""
    model = add_lora(tiny_model(), rank=2, alpha=4).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return model


def test_kl_is_zero_at_step_zero_when_starting_from_a_trained_adapter():
    model = trained_adapter()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(lr=1e-2, kl_coef=0.1))
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    with model.disable_adapter():
        without_adapter, _ = learner.token_logprobs(rows)
    assert not torch.allclose(without_adapter, learner.token_logprobs(rows)[0], atol=1e-2)  # adapter-off would be another reference
    assert learner.update(rows)["kl"] == 0
    assert learner.update(rows)["kl"] > 0
    assert sum(t.numel() for t in learner.reference) < sum(p.numel() for p in frozen)
    assert all(torch.equal(a, b) for a, b in zip(frozen, (p for p in model.parameters() if not p.requires_grad), strict=True))


# ---- old log-probabilities, numerics, modes


def test_recomputed_old_logprobs_give_ratio_one_whatever_the_engine_said():
    rows = rows_of(rollout(tiny_model(), LENGTHS))
    off = replace(rows, old_logprobs=np.where(rows.mask, rows.old_logprobs - np.float32(math.log(4)), 0))  # engine: a quarter of the probability
    assert Learner(tiny_model(), LearnerConfig()).update(off)["ratio_mean"] == pytest.approx(4, rel=1e-5)
    assert Learner(tiny_model(), LearnerConfig(recompute_old_logprobs=True)).update(off)["ratio_mean"] == pytest.approx(1, abs=1e-6)
    plain = gradient_of(tiny_model(), rows)
    torch.testing.assert_close(gradient_of(tiny_model(), off, recompute_old_logprobs=True), plain, rtol=1e-4, atol=1e-7)
    capped = gradient_of(tiny_model(), off, recompute_old_logprobs=True, importance_cap=2.0)  # min(4, 2) on every token
    torch.testing.assert_close(capped, 2 * plain, rtol=1e-4, atol=1e-7)


def test_dropout_stays_off():
    model = tiny_model(dropout=0.5).train()
    rows = rows_of(rollout(model.eval(), LENGTHS))
    model.train()
    assert Learner(model, LearnerConfig()).update(rows)["ratio_max"] == pytest.approx(1, abs=1e-6)


def test_gradient_checkpointing_recomputes_and_changes_nothing():
    rows = rows_of(rollout(tiny_model(dropout=0.5), LENGTHS))
    plain = gradient_of(tiny_model(dropout=0.5), rows)
    model = tiny_model(dropout=0.5)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradient_of(model, rows, gradient_checkpointing=True, layout="padded"), plain)
    assert len(calls) == 3  # the two-token check of the head, the forward, the recomputation
    assert not any(module.training for module in model.modules())


def test_dropout_stays_off_around_the_layers_that_recompute():
    torch.manual_seed(0)
    config = Starcoder2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, embedding_dropout=0.5
    )
    model = Starcoder2ForCausalLM(config).double().eval()
    rows = rows_of(rollout(model, LENGTHS))
    plain = gradient_of(model, rows)
    torch.testing.assert_close(gradient_of(model, rows, gradient_checkpointing=True), plain)


def test_a_cap_that_does_not_bind_yet_is_seen():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=30.0)).eval()
    assert not TokenLogprobs(model).has_plain_head(torch.arange(2)[None])
    model.config.final_logit_softcapping = None
    assert TokenLogprobs(model).has_plain_head(torch.arange(2)[None])


def test_bfloat16_keeps_weights_and_logprobs_in_float32():
    model = tiny_model().float()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(dtype="bfloat16", lr=1e-3, kl_coef=0.1, recompute_old_logprobs=True))
    logprobs, _ = learner.token_logprobs(rows)
    exact, _ = Learner(model, LearnerConfig()).token_logprobs(rows)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, atol=0.1, rtol=0.1)
    assert not torch.equal(logprobs, exact)
    assert learner.update(rows)["kl"] == 0
    assert learner.update(rows)["kl"] > 0  # no stale 16-bit copy of the reference's weights
    with pytest.raises(ValueError, match=r"got torch.bfloat16: load the model with dtype=torch.float32"):
        Learner(tiny_model().bfloat16(), LearnerConfig())


def test_weight_decay_touches_matrices_only():
    model = tiny_model()
    learner = Learner(model, LearnerConfig(lr=0.5, weight_decay=0.5))
    decayed, kept = learner.optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)


# ---- mismatch of sampler and learner


def test_mismatch_is_zero_for_the_weights_that_sampled_and_by_hand_for_others():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    on_policy = Learner(model, LearnerConfig()).update(rows)
    assert 0 < on_policy["mismatch/max_abs"] < 1e-6 and on_policy["mismatch/clip_share"] == 0 and "mismatch/capped_share" not in on_policy
    off = replace(rows, old_logprobs=np.where(rows.mask, rows.old_logprobs, 0))
    off.old_logprobs[1, 3] -= np.float32(math.log(4))  # three of 19 tokens: ratios 4, 1/2, 1.1
    off.old_logprobs[1, 4] += np.float32(math.log(2))
    off.old_logprobs[3, 3] -= np.float32(math.log(1.1))
    expected = {"mean_abs": (math.log(4) + math.log(2) + math.log(1.1)) / 19, "max_abs": math.log(4), "clip_share": 2 / 19}
    for settings in ({}, {"recompute_old_logprobs": True}, {"recompute_old_logprobs": True, "importance_cap": 2.0, "minibatches": 2}, {"epochs": 2}):
        metrics = Learner(tiny_model(), LearnerConfig(lr=0.1, **settings)).update(off)
        assert {name: metrics[f"mismatch/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5), settings
        assert metrics.get("mismatch/capped_share") == (1 / 19 if "importance_cap" in settings else None)
    wider = Learner(tiny_model(), LearnerConfig(clip_low=0.6, clip_high=2.9)).update(off)
    assert wider["mismatch/clip_share"] == pytest.approx(1 / 19)


def test_mismatch_costs_no_forward_and_is_measured_before_the_first_step():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    calls: list[int] = []
    learner = Learner(model, LearnerConfig(lr=0.1, minibatches=2, micro_batch_tokens=1000))
    learner.token_logprobs(rows)  # looks for the head
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert learner.update(rows)["mismatch/max_abs"] < 1e-6  # the second step would show what the first one has changed
    assert len(calls) == 2
    assert learner.update(rows)["mismatch/max_abs"] > 1e-2


# ---- schedule, configuration, state


def test_schedules_by_hand():
    linear = [schedule_factor(s, "linear", warmup_steps=2, total_steps=6) for s in range(8)]
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert [schedule_factor(s, "constant", warmup_steps=2, total_steps=0) for s in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [schedule_factor(s, "cosine", warmup_steps=0, total_steps=4) for s in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def test_learning_rate_follows_the_steps_taken():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(lr=1e-3, warmup_steps=2, schedule="linear", total_steps=4))
    reported, used = [], []
    for _ in range(4):
        reported.append(learner.update(rows)["lr"])
        used.append([group["lr"] for group in learner.optimizer.param_groups])
    assert reported == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
    np.testing.assert_allclose(used, np.array(reported)[:, None] * [1, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be greater than 0, got 0.0"),
        ({"temperature": 0.0}, "temperature must be greater than 0, got 0.0"),
        ({"minibatches": 0}, "minibatches must be greater than 0, got 0"),
        ({"clip_low": -0.1}, "clip_low must be at least 0, got -0.1"),
        ({"kl_coef": math.nan}, "kl_coef must be at least 0, got nan"),
        ({"schedule": "cosine"}, "total_steps > warmup_steps=0, got total_steps=None"),
        ({"schedule": "linear", "warmup_steps": 9, "total_steps": 9}, "warmup_steps=9, got total_steps=9"),
        ({"importance_cap": 2.0}, "importance_cap=2.0, recompute_old_logprobs=False"),
    ],
)
def test_bad_configurations_name_the_values(settings, message):
    with pytest.raises(ValueError) as error:
        LearnerConfig(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_tokens": "4096"}, "micro_batch_tokens must be an integer greater than 0, got '4096'"),
        ({"epochs": 1.5}, "epochs must be an integer greater than 0, got 1.5"),
        ({"lr": None}, "lr must be a number greater than 0, got None"),
        ({"kl_coef": True}, "kl_coef must be a number at least 0, got True"),
    ],
)
def test_what_is_no_number_is_named(settings, message):
    with pytest.raises(TypeError) as error:
        LearnerConfig(**settings)
    assert str(error.value) == message
    assert LearnerConfig(micro_batch_tokens=np.int64(7), lr=np.float32(1)).micro_batch_tokens == 7


def test_nothing_trainable_is_refused():
    with pytest.raises(ValueError, match="none with requires_grad"):
        Learner(tiny_model().requires_grad_(False), LearnerConfig())


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_resumes_to_the_bit():
    config = LearnerConfig(lr=1e-2, warmup_steps=3, kl_coef=0.1, minibatches=2, epochs=2)
    rows = rows_of(rollout(tiny_model(), LENGTHS))
    straight = Learner(tiny_model(), config)
    for _ in range(2):
        straight.update(rows)
    resumed = Learner(tiny_model(1), config)
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    first, second = straight.update(rows), resumed.update(rows)
    first.pop("seconds"), second.pop("seconds")
    assert first == second and first["kl"] > 0
    assert torch.equal(weights_of(straight.model), weights_of(resumed.model))
    with pytest.raises(ValueError, match=r"holds reference weights.*kl_coef=0.0"):
        Learner(tiny_model(), LearnerConfig()).load_state_dict(straight.state_dict())


def test_metrics_count_tokens_and_padding():
    model = tiny_model()
    rows = rows_of(rollout(model, [[1], [5]]))  # 3 + 1 and 3 + 5 tokens
    metrics = Learner(model, LearnerConfig(layout="padded")).update(rows)
    assert metrics["tokens_trained"] == 6 and metrics["padded_share"] == pytest.approx(4 / 16)
    assert metrics["entropy"] == pytest.approx(float(Learner(model, LearnerConfig()).token_logprobs(rows)[1].sum()) / 6, rel=1e-3)
    assert Learner(model, LearnerConfig(micro_batch_tokens=8, layout="padded")).update(rows)["padded_share"] == 0


def test_what_an_interrupted_update_left_does_not_reach_the_next():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    whole = gradient_of(model, rows)

    def raises(*args, **kwargs):
        if calls.append(1) or len(calls) == 2:
            raise MemoryError("planted")
        return clipped_surrogate(*args, **kwargs)

    calls: list[int] = []
    learner = Learner(model, LearnerConfig(max_grad_norm=math.inf, micro_batch_tokens=1), loss=raises)
    with pytest.raises(MemoryError, match="planted"):
        learner.update(rows)
    assert model.config._attn_implementation == "sdpa"
    seen: list[torch.Tensor] = []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.trainable]))
    learner.update(rows)
    torch.testing.assert_close(seen[0], whole)


def test_a_model_of_the_same_config_object_that_runs_meanwhile_is_seen():
    model = tiny_model()
    rows = rows_of(rollout(model, LENGTHS))
    learner = Learner(model, LearnerConfig(layout="tree"))
    model.model.layers[0].register_forward_pre_hook(lambda *_: setattr(model.config, "_attn_implementation", "sdpa"))
    with pytest.raises(RuntimeError, match="a model of the same config object ran meanwhile"):
        learner.update(rows)


@pytest.mark.parametrize(("name", "value"), [("layout", "trees"), ("dtype", "float16"), ("schedule", "cosin")])
def test_names_that_are_not_known_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be one of .*, got '{value}'"):
        LearnerConfig(**{name: value})
