"""Several ranks against one: the same numbers, whatever their number. What the ranks do stands in tests/rank_cases.py; here it is judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_cases
import torch
from ranks import run_ranks

from arpo_algo.distributed import Ranks
from arpo_algo.sharding import rank_micro_batches, shares

pytestmark = pytest.mark.timeout(600)

TESTS = Path(__file__).resolve().parents[1]
CASES = [*rank_cases.SETTINGS, *rank_cases.batches()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that one rank has written, under ``one``; two ranks write theirs beside it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model in rank_cases.MODELS.items():
        trained = rank_cases.learner(Ranks(), model=model, **rank_cases.KEPT)
        for _ in range(2):
            trained.update(rank_cases.batch())
        rank_cases.save(folder / "one" / name, trained, Ranks())
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Any]:
    return run_ranks(2, rank_cases.two_ranks, folder)


@pytest.fixture(scope="module")
def three(folder: Path, two: list[Any]) -> list[Any]:
    return run_ranks(3, rank_cases.three_ranks, folder)


@pytest.fixture(params=["two", "three"])
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    return request.getfixturevalue(request.param)


def distance(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    assert expected.shape == got.shape and expected.dtype == got.dtype
    return float((expected - got).norm() / expected.norm().clamp(min=1e-300)) if expected.numel() else 0.0


def assert_same(alone: dict[str, Any], together: dict[str, Any], tolerance: float) -> None:
    for expected, got in zip(alone["metrics"], together["metrics"], strict=True):
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=tolerance, abs=1e-12, nan_ok=True), name
    assert alone["weights"].keys() == together["weights"].keys()
    for name, weight in alone["weights"].items():
        assert distance(weight, together["weights"][name]) < tolerance, name
    for name in ("gradient", "logprobs", "entropies"):
        assert distance(alone[name], together[name]) < tolerance, name


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_numbers_of_one(two, case):
    for of_rank in two:
        assert_same(*of_rank["parity"][case], 1e-10)
    alone, untouched = two[0]["parity"][case][0], two[0]["parity"]["nothing to train"][0]
    changed = any(not torch.equal(untouched["weights"][name], weight) for name, weight in alone["weights"].items() if name in untouched["weights"])
    assert alone["metrics"][-1]["skipped_steps"] == (3 if case == "not finite" else 0)
    assert changed == (case not in ("nothing to train", "without a signal", "not finite"))


@pytest.mark.parametrize("case", rank_cases.OF_THREE)
def test_three_ranks_give_the_numbers_of_one(three, case):
    for of_rank in three:
        assert_same(*of_rank["parity"][case], 1e-10)


def test_in_float32_to_float32(two):
    for of_rank in two:
        assert_same(*of_rank["parity"]["float32"], 1e-5)


@pytest.mark.parametrize("fault", ["averaged over ranks", "denominators of a rank"])
def test_the_comparison_sees_a_planted_fault(two, fault):
    right, wrong = two[0]["faults"][fault]
    assert distance(right["gradient"], wrong["gradient"]) > 0.1
    with pytest.raises(AssertionError):
        assert_same(right, wrong, 1e-10)


def test_every_rank_sees_the_metrics_of_the_whole_batch(ranks):
    for case in rank_cases.OF_THREE:
        first, *others = (of_rank["parity"][case][1]["metrics"] for of_rank in ranks)
        assert all(np.array_equal(list(a.values()), list(b.values()), equal_nan=True) for other in others for a, b in zip(first, other, strict=True))


# ---- shares


def test_shares_are_equal_in_tokens_and_cover_every_row_once():
    rows = rank_cases.batch()  # 4, 19, 7, 11, 5 tokens: 19 and 5 (24), 11 and 7 and 4 (22)
    assert [share.tolist() for share in shares(rows, 2)] == [[1, 4], [0, 2, 3]] or [share.tolist() for share in shares(rows, 2)] == [[0, 1], [2, 3, 4]]
    assert sorted(row for share in shares(rows, 3) for row in share) == [0, 1, 2, 3, 4]
    assert [len(share) for share in shares(rows.select([0]), 3)] == [1, 0, 0]


def test_every_rank_has_the_same_number_of_micro_batches():
    rows = rank_cases.batch((9, 9, 2, 2, 2, 2))
    for size in (2, 3, 8):
        parts = [rank_micro_batches(rows, 9, Ranks(rank=rank, size=size)) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        assert sorted(int(row) for part in parts for (index,) in part for row in index) == list(range(6))


# ---- weights


def test_weights_are_whole_and_named_as_in_the_checkpoint(ranks):
    for name, model in rank_cases.MODELS.items():
        plain = rank_cases.tiny_model(**model)
        expected = (plain.merge_and_unload() if name == "lora" else plain).state_dict()
        expected.pop("lm_head.weight")  # tied
        got = ranks[0]["weights"][name]
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], weight) for key, weight in expected.items())


def test_weights_of_one_rank_are_those_of_the_model():
    alone = rank_cases.learner(Ranks(), model={"lora": True})
    merged = rank_cases.tiny_model(lora=True).merge_and_unload().state_dict()
    weights = dict(alone.weights())
    assert merged.keys() - weights.keys() == {"lm_head.weight"} and all(torch.equal(merged[name], weight) for name, weight in weights.items())


def test_a_rank_holds_its_part_only(ranks):
    held, whole = zip(*(of_rank["weights"]["held"] for of_rank in ranks), strict=True)
    assert sum(held) == whole[0] and max(held) < whole[0]


def test_a_failure_while_weights_are_handed_over_reaches_every_rank_and_leaves_them_in_step(ranks):
    main, *others = (of_rank["weights"] for of_rank in ranks)
    assert main["failure"] == ("OSError", "the engine is gone")
    assert all(kind == "MainRankError" and "OSError: the engine is gone" in text for kind, text in (other["failure"] for other in others))
    assert main["taken"] == list(main["lora"]) and all(other["taken"] == [] for other in others)


def test_rank_0_gives_the_others_their_weights(two):
    for of_rank in two:
        for name in ("other weights", "meta"):
            assert_same(of_rank["starts"]["plain"], of_rank["starts"][name], 1e-10)
    errors = [of_rank["starts"]["other shape"] for of_rank in two]
    assert [kind for kind, _ in errors] == ["ValueError", "ValueError"]
    assert "rank 1 differs from rank 0 in ['model.model.layers.1" in errors[1][1]


def test_mixed_precision_keeps_weights_and_logprobs_in_float32(two):
    for of_rank in two:
        found = of_rank["bfloat16"]
        assert found["kinds"] == {"torch.float32"}
        torch.testing.assert_close(found["logprobs"], found["exact"], atol=0.1, rtol=0.1)
        assert not torch.equal(found["logprobs"], found["exact"])
        first, second = found["metrics"]
        assert first["kl"] == 0 and first["ratio_max"] == pytest.approx(1, abs=1e-6) and second["kl"] > 0 and second["steps"] == 2


# ---- checkpoints


@pytest.mark.parametrize("model", rank_cases.MODELS)
def test_resumed_to_the_bit_on_the_same_number_of_ranks(two, model):
    for of_rank in two:
        straight, resumed = (of_rank["resumption"][model, name] for name in ("straight", "resumed"))
        assert straight["metrics"] == resumed["metrics"] and straight["metrics"][0]["kl"] > 0
        assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in straight["weights"].items())
        assert torch.equal(straight["gradient"], resumed["gradient"])


@pytest.mark.parametrize("model", rank_cases.MODELS)
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_three(two, three, folder, model):
    straight = two[0]["resumption"][model, "straight"]
    alone = rank_cases.resume(folder / "two" / model, Ranks(), rank_cases.MODELS[model])
    assert all(torch.equal(weight, two[0]["resumption"][model, "saved"][name]) for name, weight in alone.weights())
    assert_same(straight, rank_cases.outcome(alone, rank_cases.batch(), updates=2), 1e-10)
    assert_same(straight, three[0]["continuation"][model], 1e-10)


@pytest.mark.parametrize("model", rank_cases.MODELS)
def test_a_checkpoint_of_one_rank_goes_on_with_two(two, folder, model):
    assert_same(two[0]["resumption"][model, "straight"], two[0]["continuation"][model], 1e-10)
    files = [sorted(str(path.relative_to(folder / name / model)) for path in (folder / name / model).rglob("*")) for name in ("one", "two")]
    assert files[0] == files[1]


def test_transformers_opens_what_two_ranks_wrote(two, folder):
    from transformers import AutoModelForCausalLM

    for name in rank_cases.MODELS:
        opened = AutoModelForCausalLM.from_pretrained(folder / "two" / name / "model", dtype=torch.float64).state_dict()
        saved = two[0]["resumption"][name, "saved"]
        assert opened.keys() - saved.keys() <= {"lm_head.weight"} and all(torch.equal(opened[key], weight) for key, weight in saved.items())


def test_what_cannot_be_loaded_is_refused_on_every_rank(two):
    main, other = (of_rank["resumption"] for of_rank in two)
    assert main["failure"][0] == "CheckpointError" and other["failure"][0] == "MainRankError" and "not a whole checkpoint" in other["failure"][1]
    assert main["misfit"][0] == other["misfit"][0] == "RuntimeError" and "unexpected ['model.layers.1" in other["misfit"][1]


# ---- the ranks themselves


def test_what_ranks_say_to_each_other(ranks):
    size = len(ranks)
    for rank, of_rank in enumerate(ranks):
        found = of_rank["talk"]
        assert found["who"] == (rank, size, rank == 0, "cpu")
        assert found["rows"] and found["made"] == 7 and found["cause"]
        assert found["any"] == (True, False) and found["max"] == size - 1 and found["sum"] == [size, sum(range(size))]
    assert ranks[0]["talk"]["failure"] == ("KeyError", "'no such task'")
    assert ranks[0]["talk"]["unpicklable"] in ("PicklingError", "AttributeError") and ranks[1]["talk"]["unpicklable"] == "MainRankError"
    assert "rank 0 failed, rank 1 stops with it" in ranks[1]["talk"]["failure"][1] and "KeyError: 'no such task'" in ranks[1]["talk"]["failure"][1]


def test_one_process_is_one_rank_and_opens_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    alone = Ranks.current()
    assert (alone.rank, alone.size, alone.is_main) == (0, 1, True) and not torch.distributed.is_initialized()
    value, tensor = object(), torch.tensor(3.0)
    assert alone.broadcast(value) is value and alone.sum(tensor) is tensor and alone.max(tensor) is tensor and alone.spread(tensor) is tensor
    assert alone.any(True) and not alone.any(False)
    with pytest.raises(KeyError, match="here"):
        alone.broadcast_from_main(lambda: {}["here"])
    alone.barrier(), alone.close()


def test_the_learner_alone_imports_nothing_of_fsdp():
    script = "import sys, arpo_algo.learner, arpo_algo.checkpoint; print([m for m in sys.modules if m.startswith('torch.distributed.fsdp')])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=400)
    assert ended.stdout.strip() == "[]", ended.stderr


def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TESTS / "torchrun_smoke.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400)
    assert ended.returncode == 0, ended.stderr
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    expected = rank_cases.learner(Ranks()).update(rank_cases.batch())["loss"]
    assert math.isfinite(expected) and all(of_rank["loss"] == pytest.approx(expected, rel=1e-10) for of_rank in seen)
    assert [of_rank["failure"] for of_rank in seen] == ["OSError", "MainRankError"]
    assert all(of_rank["size"] == 2 and of_rank["opened"] for of_rank in seen)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
