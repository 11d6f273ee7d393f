"""The outer loop under torchrun: one process or two write the same run, and a failure of the rank that samples ends them all.

Run by torchrun, this file is the training script itself: all that two ranks are to show, in one launch.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import arpo_env
from arpo_algo import ARPOConfig, ARPOTrainer, RolloutConfig, UniformBranching
from arpo_algo.checkpoint import read_weights
from arpo_algo.distributed import MainRankError
from arpo_algo.tracking import read_jsonl
from arpo_env.envs.world import WorldConfig, WorldTasks, world_vocabulary

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("reward/", "tokens/", "trajectories/", "branch/", "stop/", "tool_calls/", "eval/")
"""Metrics that must not differ at all: the tokens are the same."""


def any_answer(task: arpo_env.Task, episode: arpo_env.Episode) -> float:
    return float(sum(map(len, episode.turns)) % 3)


def trainer(run_dir: Path, steps: int = 4, **options: Any) -> ARPOTrainer:
    from tiny_policy import build_model, build_tokenizer

    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    model = build_model(tokenizer, hidden=16, layers=2, heads=2)
    env = gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=any_answer, max_turns=2)
    config = ARPOConfig(
        steps=steps,
        tasks_per_step=2,
        lr=1e-3,
        kl_coef=0.1,
        **options,
        save_every=2,
        eval_every=2,
        eval_tasks=2,
        branching=UniformBranching(),
        rollout=RolloutConfig(group_size=3, initial=2, window=2, max_turn_tokens=6, max_context=64, reserve_tokens=4, env_workers=0),
    )
    held_out = WorldTasks(WorldConfig(split="test"))
    return ARPOTrainer(model, env, config, tokenizer=tokenizer, eval_tasks=held_out, run_dir=run_dir)


class Failing:
    """A sampler whose disk is full."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("the disk is full")


def interrupted(update: Any) -> Any:
    """An update in the middle of which somebody presses Ctrl-C."""

    def and_interrupt(rows: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return update(rows)

    return and_interrupt


def on_two_ranks(out: Path) -> None:
    """The script: a whole run, one in two parts, one whose sampling fails, one interrupted on the rank that does not sample."""
    assert trainer(out / "two").train().step == 4
    for steps in (2, 4):
        assert trainer(out / "parts", steps).train().step == steps

    assert trainer(out / "lora", 2, lora_rank=2).train().metrics["mismatch/max_abs"] < 1e-5

    failing = trainer(out / "failing")
    failing.sampler = Failing()
    expected, text = (OSError, "the disk is full") if failing.ranks.is_main else (MainRankError, "rank 0 failed, rank 1 stops with it")
    with pytest.raises(expected, match=text) as caught:
        failing.train()
    assert "the disk is full" in str(caught.value)

    stopped = trainer(out / "interrupted")
    if not stopped.ranks.is_main:
        stopped.learner.update = interrupted(stopped.learner.update)  # type: ignore[method-assign]
    result = stopped.train()
    assert (result.step, result.interrupted) == (1, True)

    if not stopped.ranks.is_main:
        with pytest.raises(RuntimeError, match="rank 1 of 2 does not sample"):
            stopped.sample()
    stopped.ranks.close()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "quickstart"), str(ROOT)])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(600)
def test_two_ranks_write_the_run_that_one_writes(out: Path) -> None:
    trainer(out / "one").train()
    for a, b in zip(read_jsonl(out / "one" / "metrics.jsonl"), read_jsonl(out / "two" / "metrics.jsonl"), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if name.startswith(EXACT):
                assert a[name] == b[name], name
        for name in ("loss", "kl", "grad_norm", "ratio_mean", "entropy", "mismatch/max_abs", "clip_fraction_high"):
            assert math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=1e-5), f"{name}: {a[name]} and {b[name]}"
    left, right = (read_weights(out / name / "checkpoints" / "step-000004" / "model") for name in ("one", "two"))
    assert left.keys() == right.keys()
    assert all((left[name] - right[name]).abs().max() < 1e-5 for name in left)


@pytest.mark.timeout(600)
def test_adapters_are_trained_by_two_ranks_as_by_one(out: Path) -> None:
    trainer(out / "lora-one", 2, lora_rank=2).train()
    for a, b in zip(read_jsonl(out / "lora-one" / "metrics.jsonl"), read_jsonl(out / "lora" / "metrics.jsonl"), strict=True):
        assert a["reward/mean"] == b["reward/mean"] and math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-4)


@pytest.mark.timeout(600)
def test_two_ranks_resume_to_the_bit(out: Path) -> None:
    whole, parts = (read_weights(out / name / "checkpoints" / "step-000004" / "model") for name in ("two", "parts"))
    assert all((whole[name] == parts[name]).all() for name in whole)


@pytest.mark.timeout(600)
def test_an_interrupt_of_any_rank_saves_the_step(out: Path) -> None:
    assert (out / "interrupted" / "checkpoints" / "step-000001" / "model").is_dir()


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]))
