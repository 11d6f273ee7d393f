"""What of VLLMPolicy can be tested without vLLM: its absence, the entropy column, the thread of an engine."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_engine_fakes import Engine, Listener, start

from arpo_algo.policies import vllm_engine, vllm_start
from arpo_algo.policies.vllm import VLLMPolicy
from arpo_algo.policies.vllm_adapters import Adapters
from arpo_algo.policies.vllm_engine import EngineThread, probe_entropy_column
from arpo_algo.policies.vllm_turns import EngineStopped
from arpo_algo.policies.vllm_worker import COLUMNS, EntropyColumn, SamplerWithEntropy, entropies, version_of


def test_without_vllm_the_policy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ImportError, match=r"pip install 'arpo\[vllm\]'"):
        VLLMPolicy("nowhere")


@pytest.mark.parametrize("rows", [1, 64, 150])
def test_entropies(rows: int) -> None:
    logits = 4 * torch.randn(rows, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, :998] = -math.inf
    p = logits.double().softmax(-1)
    np.testing.assert_allclose(entropies(logits), torch.special.entr(p).sum(-1), atol=2e-6)
    a, b = p[0, -2:].tolist()
    assert float(entropies(logits)[0]) == pytest.approx(-a * math.log(a) - b * math.log(b), abs=1e-6)
    assert entropies(logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("scale", [0.02, 4.0])
def test_entropies_of_a_large_vocabulary(scale: float) -> None:
    """Through ``log_softmax`` in float32 the second is off by 1e-4."""
    logits = scale * torch.randn(2, 151_936, generator=torch.Generator().manual_seed(0))
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    np.testing.assert_allclose(entropies(logits), expected, atol=4e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_without_a_distribution_have_no_entropy(bad: float) -> None:
    logits = torch.zeros(2, 3)
    logits[1] = bad
    assert torch.isnan(entropies(logits)).tolist() == [False, True]


class NewerSampler:
    """As the sampler of vLLM's newer runner: not a module; tempers in place like the older one. ``columns`` beside each sampled token."""

    hidden = "found"

    def __init__(self, columns: int | None) -> None:
        self.columns = columns

    def __call__(self, logits: torch.Tensor, batch: str) -> Any:
        assert batch == "batch"
        logits /= 0.1
        if self.columns is None:
            return SimpleNamespace(logprobs_tensors=None)
        shape = (len(logits), self.columns)
        return SimpleNamespace(logprobs_tensors=SimpleNamespace(logprobs=torch.full(shape, 7.0), logprob_token_ids=torch.full(shape, 5)))


def test_the_column_is_written_where_two_are_asked_for() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])
    sampler = SamplerWithEntropy(NewerSampler(COLUMNS))
    sampler.version = 4
    columns = sampler(logits.clone(), "batch").logprobs_tensors
    assert columns.logprobs[:, 0].tolist() == [7.0, 7.0]
    assert columns.logprobs[:, 1].tolist() == pytest.approx([math.log(2), -0.25 * math.log(0.25) - 0.75 * math.log(0.75)])
    assert columns.logprob_token_ids.tolist() == [[5, -5], [5, -5]] and version_of(-5) == 4
    three = SamplerWithEntropy(NewerSampler(3))(logits.clone(), "batch").logprobs_tensors.logprobs
    assert torch.equal(three, torch.full((2, 3), 7.0))
    assert SamplerWithEntropy(NewerSampler(None))(logits.clone(), "batch").logprobs_tensors is None
    assert SamplerWithEntropy(NewerSampler(None)).hidden == "found"


def test_a_rank_without_a_sampler_is_left_alone() -> None:
    worker: Any = EntropyColumn()
    worker.model_runner = SimpleNamespace(sampler=None, model_config=SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=False)))
    worker.add_entropy_column()
    assert worker.model_runner.sampler is None


def test_memory_of_the_cache_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"max_model_len": 8, "enable_sleep_mode": False}
    monkeypatch.setattr(vllm_start, "on_cpu", lambda: True)
    assert vllm_start.engine_arguments(arguments)["kv_cache_memory_bytes"] == 1 << 30
    assert vllm_start.engine_arguments({**arguments, "kv_cache_memory_bytes": 5})["kv_cache_memory_bytes"] == 5
    monkeypatch.setattr(vllm_start, "on_cpu", lambda: False)
    assert "kv_cache_memory_bytes" not in vllm_start.engine_arguments(arguments), "vLLM takes its share of the GPU"


def test_the_files_of_adapters_go_without_close() -> None:
    engine: Any = None
    for end in (Adapters.close, lambda adapters: None):
        adapters = Adapters(engine, Listener())
        folder = adapters._folder
        assert folder.is_dir()
        end(adapters)
        del adapters
        assert not folder.exists()


def test_an_engine_beside_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for world, refused in ((2, True), (1, False)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)  # noqa: B023
        if refused:
            with pytest.raises(ValueError, match="process group of the learner's ranks: pass separate_process=True"):
                EngineThread({}, Listener())
        else:
            start(monkeypatch, Engine(), Listener()).close()


def join(thread: EngineThread, name: str, steps: int) -> None:
    thread.call(lambda engine: engine.left.update({name: steps})).result(60)


def test_requests_are_stepped_until_each_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, listener = Engine(), Listener(ends="b")
    thread = start(monkeypatch, engine, listener)
    assert thread.vocab_size == 11
    thread.call(lambda engine: engine.left.update({"a": 3, "b": 100})).result(60)
    with pytest.raises(RuntimeError, match="runs a vLLM engine already"):
        EngineThread({}, listener)
    thread.close()
    assert engine.closed and sorted(listener.heard)[-1] == "b" and listener.heard.count("b") == 1
    assert str(listener.error) == "the vLLM engine was closed"
    with pytest.raises(EngineStopped, match="was closed"):
        thread.call(lambda engine: None).result(60)


def test_a_failing_step_and_a_failing_start_free_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, listener = Engine(fail_at=2), Listener()
    thread = start(monkeypatch, engine, listener)
    join(thread, "a", 10)
    thread._thread.join(60)
    assert engine.closed and isinstance(listener.error, EngineStopped) and isinstance(listener.error.__cause__, OSError)
    with pytest.raises(EngineStopped, match="failed: OSError: says the test"):
        thread.call(lambda engine: None).result(60)
    thread.close()

    def broken(arguments: Any) -> Any:
        raise ValueError("no such model")

    monkeypatch.setattr(vllm_engine, "start_engine", broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such model"):
            EngineThread({}, listener)


def test_an_error_of_a_command_is_the_callers_unless_it_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, listener = Engine(), Listener()
    thread = start(monkeypatch, engine, listener)

    def fail(error: Exception) -> Any:
        raise error

    with pytest.raises(KeyError):
        thread.call(lambda engine: fail(KeyError("mine"))).result(60)
    assert thread.call(lambda engine: 5).result(60) == 5
    with pytest.raises(EngineStopped, match="half way"):
        thread.call(lambda engine: fail(EngineStopped("half way"))).result(60)
    with pytest.raises(EngineStopped, match="half way"):
        thread.call(lambda engine: 5).result(60)
    thread.close()
    assert engine.closed


def test_the_start_leaves_the_random_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    def seeding(arguments: Any) -> Engine:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return Engine()

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    thread = start(monkeypatch, Engine(), Listener())
    thread.close()
    monkeypatch.setattr(vllm_engine, "start_engine", seeding)
    EngineThread({}, Listener()).close()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_the_probe_compares_with_all_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Engine()
    logp = torch.log_softmax(torch.arange(11.0), 0)
    entropy = float(-(logp.exp() * logp).sum())
    asked = []

    def first_token(engine: Any, prompt: list[int], *, logprobs: int, temperature: float) -> list[float]:
        asked.append((tuple(prompt), logprobs, temperature))
        return [-1.0, *logp.tolist()] if logprobs == -1 else [-1.0, entropy]

    monkeypatch.setattr(vllm_engine, "_first_token", first_token)
    probe_entropy_column(engine)
    assert {logprobs for _, logprobs, _ in asked} == {1, -1} and {t for _, n, t in asked if n == -1} == {1.0} and len({t for _, n, t in asked if n == 1}) == 3
    entropy += 2e-4
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace(__version__="9.9"))
    with pytest.raises(RuntimeError, match=r"vLLM 9\.9 reports the entropy"):
        probe_entropy_column(engine)
