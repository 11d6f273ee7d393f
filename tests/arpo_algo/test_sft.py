"""Cold start: loss and gradient by formula, Muon against torch's, order and resumption."""

from __future__ import annotations

import io
from itertools import islice

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arpo_algo.optim import Muon, orthogonalise
from arpo_algo.sft import SFTConfig, SFTExample, SFTLearner, hidden_matrices, make_optimizers, pad_examples, sft


def tiny_model(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=12, tie_word_embeddings=tied, initializer_range=0.1, pad_token_id=0, **sizes))


def example(rng: np.random.Generator) -> SFTExample:
    """Copy a letter: prompt (1, x), the policy writes x between two and five times and then 2."""
    x, times = int(rng.integers(3, 12)), int(rng.integers(2, 6))
    return SFTExample([1, x, *[x] * times, 2], [False, False, *[True] * times, True])


def examples(number: int, seed: int = 0) -> list[SFTExample]:
    rng = np.random.default_rng(seed)
    return [example(rng) for _ in range(number)]


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_loss_is_the_mean_over_policy_tokens_whatever_the_micro_batches():
    batch = examples(7)
    model = tiny_model()
    terms = []
    for trace in batch:
        log_p = model(input_ids=torch.tensor([trace.token_ids])).logits[0].log_softmax(-1)
        terms += [-log_p[t - 1, token] for t, (token, own) in enumerate(zip(trace.token_ids, trace.mask, strict=True)) if own]
    expected = torch.stack(terms).mean()
    expected.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for tokens in (1, 20, 10_000):
        metrics = SFTLearner(tiny_model(), SFTConfig(steps=1, micro_batch_tokens=tokens), pad_id=0).step(batch)
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["tokens"] == len(terms)
    assert SFTLearner(tiny_model(), SFTConfig(steps=1, micro_batch_tokens=1), pad_id=0).step(batch)["padded_share"] == 0


@pytest.mark.parametrize("muon_lr", [None, 0.02])
def test_cold_start_learns_to_copy(muon_lr):
    model = tiny_model()
    history = sft(model, examples(64), SFTConfig(steps=60, batch_size=16, lr=1e-2, muon_lr=muon_lr, warmup_steps=5), pad_id=0)
    assert len(history) == 60
    assert history[0]["loss"] > 2.0  # ln 12 is 2.48
    assert history[-1]["loss"] < 0.6
    output = model(input_ids=torch.tensor([[1, 7]])).logits[0, -1].argmax()
    assert output == 7
    assert not model.training


def test_muon_takes_hidden_matrices_and_nothing_else():
    for tied in (True, False):
        model = tiny_model(tied=tied)
        hidden = hidden_matrices(model)
        assert len(hidden) == 2 * 7  # q, k, v, o, gate, up, down
        assert not {id(p) for p in hidden} & {id(model.model.embed_tokens.weight), id(model.lm_head.weight)}
        optimizers = make_optimizers(model, SFTConfig(steps=1, muon_lr=0.02, lr=1e-3))
        assert [type(o).__name__ for o in optimizers] == ["Muon", "AdamW"]
        covered = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        assert sorted(covered) == sorted(id(p) for p in model.parameters())
    assert [type(o).__name__ for o in make_optimizers(tiny_model(), SFTConfig(steps=1))] == ["AdamW"]


@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (12, 5)])
def test_muon_equals_that_of_torch_up_to_its_bfloat16(shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = Muon([ours], lr=0.1, momentum=0.9), torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - start).norm() > 0.1
    assert (ours - theirs).norm() < 0.03 * (ours - start).norm()


def test_orthogonalise_keeps_directions_and_levels_singular_values():
    matrix = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonalise(matrix) @ vh.T
    assert (inner.diagonal() > 0.6).all() and (inner.diagonal() < 1.3).all()
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-3
    assert s.max() / s.min() > 2


def test_muon_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_learning_rates_of_both_optimisers_warm_up_and_fall():
    learner = SFTLearner(tiny_model(), SFTConfig(steps=4, lr=1e-3, muon_lr=1e-2, warmup_steps=2), pad_id=0)
    seen = []
    for _ in range(4):
        learner.step(examples(2))
        seen.append([group["lr"] for optimizer in learner.optimizers for group in optimizer.param_groups])
    np.testing.assert_allclose(seen, np.array([0.5, 1.0, 1.0, 0.5])[:, None] * [1e-2, 1e-3, 1e-3])


def test_a_sequence_is_read_in_seeded_passes():
    data = [SFTExample([1, 3, 3 + i], [False, False, True]) for i in range(6)]
    seen: list[tuple[int, ...]] = []

    class Spy(list):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    runs = []
    for seed in (0, 0, 1):
        seen.clear()
        sft(tiny_model(), Spy(data), SFTConfig(steps=3, batch_size=4, seed=seed), pad_id=0)
        runs.append(list(seen))
    assert runs[0] == runs[1] != runs[2]
    assert sorted(runs[0][:6]) == sorted(runs[0][6:]) == list(range(6))
    assert runs[0][:6] != runs[0][6:]


def test_an_iterator_is_read_once_and_ends_training():
    history = sft(tiny_model(), iter(examples(10)), SFTConfig(steps=9, batch_size=4), pad_id=0)
    assert len(history) == 3
    with pytest.raises(ValueError, match="steps 0 to 9, got none"):
        sft(tiny_model(), [], SFTConfig(steps=9), pad_id=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_resumes_to_the_bit(streamed):
    def data():
        rng = np.random.default_rng(5)
        return (example(rng) for _ in range(10_000)) if streamed else examples(13)

    config = SFTConfig(steps=6, batch_size=4, lr=1e-2, muon_lr=0.02, warmup_steps=2)
    straight = tiny_model()
    kept = {}

    def keep(learner: SFTLearner, metrics: dict[str, float]) -> None:
        if learner.steps == 3:
            file = io.BytesIO()
            torch.save({"model": learner.model.state_dict(), "state": learner.state_dict()}, file)
            kept["file"] = file

    whole = sft(straight, data(), config, pad_id=0, on_step=keep)
    kept["file"].seek(0)
    saved = torch.load(kept["file"], weights_only=True)
    resumed = tiny_model()
    resumed.load_state_dict(saved["model"])
    rest = sft(resumed, data(), config, pad_id=0, state=saved["state"])
    assert [m["loss"] for m in rest] == [m["loss"] for m in whole[3:]]
    assert torch.equal(weights_of(straight), weights_of(resumed))
    assert sft(resumed, data(), config, pad_id=0, state={**saved["state"], "steps": 6}) == []


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="each of 3 tokens, got 2"):
        SFTExample([1, 2, 3], [False, True])
    with pytest.raises(ValueError, match="first token"):
        SFTExample([1, 2], [True, True])
    with pytest.raises(ValueError, match="2 examples without any"):
        pad_examples([SFTExample([1, 2], [False, False])] * 2, pad_id=0)
    with pytest.raises(ValueError, match=r"in \[0, steps=5\), got 5"):
        SFTConfig(steps=5, warmup_steps=5)
    with pytest.raises(ValueError, match="batch_size must be greater than 0, got 0"):
        SFTConfig(steps=5, batch_size=0)


def test_a_gradient_that_is_not_finite_stops_the_cold_start():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("inf")
    with pytest.raises(FloatingPointError, match="step 0"):
        sft(model, islice(examples(8), 8), SFTConfig(steps=2, batch_size=4), pad_id=0)
