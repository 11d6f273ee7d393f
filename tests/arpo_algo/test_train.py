"""The outer loop on a tiny policy: it trains, resumes to the bit, stops where numbers cannot be trusted, and refuses what cannot work."""

from __future__ import annotations

import json
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tiny_policy import build_model, build_tokenizer
from transformers import AutoModelForCausalLM

import arpo_env
from arpo_algo import Allocation, ARPOConfig, ARPOTrainer, NoBranching, RolloutConfig, TopEntropyBranching, UniformBranching
from arpo_algo.advantages import hard, leave_one_out
from arpo_algo.health import RunStopped, check_health
from arpo_algo.overlong import overlong_penalty
from arpo_algo.recording import read_rollouts, step_folder
from arpo_algo.sampler import run_async
from arpo_algo.tracking import read_jsonl
from arpo_env import ToolEnv
from arpo_env.envs.world import WorldConfig, WorldTasks, world_vocabulary

CONFIG = ARPOConfig(
    steps=2,
    tasks_per_step=2,
    lr=1e-2,
    save_every=1,
    keep_checkpoints=9,
    branching=UniformBranching(),
    rollout=RolloutConfig(group_size=4, initial=2, window=2, max_turn_tokens=6, max_context=64, reserve_tokens=4, env_workers=0),
)


def any_answer(task: arpo_env.Task, episode: arpo_env.Episode) -> float:
    """Something that varies under a random policy."""
    return float(sum(map(len, episode.turns)) % 3)


def world(**options: Any) -> gymnasium.Env[str, str]:
    return gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=any_answer, max_turns=2, **options)


def trainer(run_dir: Path, config: ARPOConfig = CONFIG, **options: Any) -> ARPOTrainer:
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    model = build_model(tokenizer, hidden=16, layers=2, heads=2)
    return ARPOTrainer(model, options.pop("env", None) or world(), config, tokenizer=tokenizer, run_dir=run_dir, **options)


def weights(of: ARPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in of.model.named_parameters()}


def test_a_run_leaves_metrics_rollouts_and_a_checkpoint_that_transformers_opens(tmp_path: Path) -> None:
    run = trainer(tmp_path, eval_tasks=WorldTasks(WorldConfig(split="test")))
    before = weights(run)
    result = run.train()
    assert result.step == 2 and not result.interrupted
    assert any(not torch.equal(before[name], p) for name, p in weights(run).items())
    opened = AutoModelForCausalLM.from_pretrained(result.checkpoint / "model")
    assert all(torch.equal(p, weights(run)[name]) for name, p in opened.named_parameters())

    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    wanted = {
        "reward/mean",
        "accuracy",
        "tool_calls/total",
        "tokens/generated",
        "tokens/unique",
        "branch/points",
        "branch/branched",
        "branch/delta_mean",
        "groups/zero_variance",
        "groups/effective_size",
        "entropy/mean",
        "clip_fraction_low",
        "clip_fraction_high",
        "grad_norm",
        "seconds/rollout",
        "seconds/tools",
        "seconds/update",
    }
    assert wanted <= lines[0].keys(), wanted - lines[0].keys()
    trees = read_rollouts(step_folder(tmp_path / "rollouts", 1))
    assert [len(tree.trajectories) for tree in trees] == [4, 4]
    assert json.loads((tmp_path / "run.json").read_text())["versions"]["torch"] == torch.__version__
    assert run.evaluate(n=3).tasks == 3


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=3)
    straight = trainer(tmp_path / "straight", config)
    straight.train()

    trainer(tmp_path / "parts", replace(config, steps=1)).train()
    resumed = trainer(tmp_path / "parts", config)
    resumed.train()
    assert all(torch.equal(p, weights(straight)[name]) for name, p in weights(resumed).items())

    def numbers(folder: str) -> list[dict[str, Any]]:
        rows = read_jsonl(tmp_path / folder / "metrics.jsonl")
        return [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]

    assert numbers("parts") == numbers("straight")


def test_resuming_with_other_settings_is_refused_and_names_them(tmp_path: Path) -> None:
    trainer(tmp_path, replace(CONFIG, steps=1)).train()
    with pytest.raises(ValueError, match="lr"):
        trainer(tmp_path, replace(CONFIG, lr=0.5)).train()


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, replace(CONFIG, steps=50, save_every=50))
    update = run.learner.update

    def interrupted(rows: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return update(rows)

    run.learner.update = interrupted  # type: ignore[method-assign]
    result = run.train()
    assert (result.step, result.interrupted) == (1, True)
    assert result.checkpoint.name == "step-000001"
    assert "finishing this step" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_task_is_drawn_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    tasks = arpo_env.TaskSet.from_rows([{"question": str(i), "answer": "x"} for i in range(5)])
    run = trainer(tmp_path, env=ToolEnv(tasks, reward=any_answer))
    drawn = [option["task"].question for option in run.order.options(0, 7) + run.order.options(7, 8) if option]
    epochs = [drawn[:5], drawn[5:10], drawn[10:]]
    assert all(sorted(epoch) == list("01234") for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


class Broken(ToolEnv):
    def step(self, action: str) -> Any:
        raise RuntimeError("the disk is full")

    def truncate(self, reason: str) -> Any:
        raise RuntimeError("the disk is full")


def test_an_environment_that_always_fails_stops_the_run_with_its_error(tmp_path: Path) -> None:
    run = trainer(tmp_path, env=Broken([{"question": "ask", "answer": "x"}], reward=any_answer))
    with pytest.raises(RunStopped, match=r"8 of 8 trajectories .*the disk is full"):
        run.train()


def test_a_tool_that_is_down_stops_the_run(tmp_path: Path) -> None:
    from arpo_algo.tree import RolloutTree, Trajectory

    tree = RolloutTree()
    tree.add(None, "prompt", [1])
    calls = [{"name": "search", "ok": False, "error": "unavailable"}] * 3 + [{"name": "search", "ok": True, "error": ""}] * 2
    tree.add(0, "policy", [2], logprobs=[0.0], entropies=[0.0], calls=calls)
    tree.trajectories = [Trajectory(tree=tree, index=0, origin="initial", leaf=1)]
    with pytest.raises(RunStopped, match="3 of 5 tool calls found their tool unavailable"):
        check_health([tree], CONFIG)
    check_health([tree], replace(CONFIG, max_unavailable_share=0.6))


def test_groups_without_a_signal_are_replaced_a_bounded_number_of_times(tmp_path: Path) -> None:
    def never(task: arpo_env.Task, episode: arpo_env.Episode) -> float:
        return 0.7

    run = trainer(
        tmp_path, replace(CONFIG, steps=1, resample_rounds=2), env=gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=never, max_turns=1)
    )
    result = run.train()
    assert run.cursor == 6  # 2 tasks, replaced twice, then the step goes on
    assert result.metrics["groups/zero_variance"] == 1.0
    assert result.metrics["loss"] == 0.0


def test_what_cannot_work_is_refused_before_the_first_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"initial must be in \[1, group_size=4\], got 5"):
        RolloutConfig(group_size=4, initial=5)
    with pytest.raises(ValueError, match=r"top_p must be 1 in training, got 0.9"):
        ARPOConfig(rollout=RolloutConfig(top_p=0.9))
    with pytest.raises(ValueError, match=r"temperature is taken from rollout.temperature=0.5, got temperature=0.7"):
        ARPOConfig(temperature=0.7, rollout=RolloutConfig(temperature=0.5))
    assert ARPOConfig(rollout=RolloutConfig(temperature=0.5)).temperature == 0.5
    assert ARPOConfig(schedule="linear", steps=7, minibatches=3).total_steps == 21
    with pytest.raises(ValueError, match="needs its tokenizer"):
        ARPOTrainer(trainer(tmp_path).model, world())
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        trainer(tmp_path).evaluate()


class Unforkable(gymnasium.utils.EzPickle, gymnasium.Env[str, str]):
    action_space = observation_space = arpo_env.TextSpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "ask", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action) % 2), True, False, {}


def test_an_environment_that_cannot_fork_is_refused_with_branching_and_works_without_through_a_factory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be forked, which UniformBranching needs"):
        trainer(tmp_path, env=Unforkable())
    run = trainer(tmp_path, replace(CONFIG, steps=1, branching=NoBranching()), env=Unforkable)
    assert run.train().metrics["trajectories/initial"] == 8


def test_truncated_trajectories_can_be_left_out(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, drop_truncated=True, rollout=replace(CONFIG.rollout, max_turn_tokens=1)))
    trees = run.sample()
    rows, metrics = run.assemble(trees)
    cut = [t for tree in trees for t in tree.trajectories if t.stop_reason == "length"]
    assert cut and not any(t.scored for t in cut)
    assert metrics["unscored"] >= len(cut) and rows.mask[[t.index for t in trees[0].trajectories if not t.scored]].sum() == 0


def test_overlong_penalty_by_hand() -> None:
    """Limit 100, buffer 20 (DAPO eq. 13): nothing up to 80, half at 90, all at 100 and beyond."""
    assert [overlong_penalty(n, limit=100, buffer=20) for n in (10, 80, 90, 100, 500)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(500, limit=0, buffer=0) == 0.0


def test_run_async_works_inside_a_running_loop() -> None:
    async def number() -> int:
        return 7

    async def notebook() -> int:
        return run_async(number())

    assert run_async(notebook()) == 7

    async def fails() -> int:
        raise KeyError("inside")

    async def failing() -> int:
        return run_async(fails())

    with pytest.raises(KeyError, match="inside"):
        run_async(failing())


def test_on_policy_ratio_is_one_before_the_first_update(tmp_path: Path) -> None:
    """Old log-probabilities come from the sampler; at any temperature the learner must agree with it."""
    config = replace(CONFIG, temperature=1.0, rollout=replace(CONFIG.rollout, temperature=0.6))
    run = trainer(tmp_path, config)
    rows, _ = run.assemble(run.sample())
    logprobs, _ = run.learner.token_logprobs(rows)
    difference = np.abs(logprobs.numpy() - rows.old_logprobs)[rows.mask]
    assert difference.size and difference.max() < 1e-5


def test_no_warning_is_raised_by_a_whole_run(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(tmp_path, replace(CONFIG, steps=1)).train()


class Plain:
    """A strategy that is an object and no dataclass."""

    timing = "each_round"

    def __init__(self, children: int = 1) -> None:
        self.children = children

    def allocate(self, points: Any, budget: int, rng: Any) -> list[Allocation]:
        return [Allocation(0, 0.0, "never") for _ in points]


def test_any_object_is_a_strategy_and_is_saved_with_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=1, branching=Plain())  # type: ignore[arg-type]
    trainer(tmp_path, config).train()
    assert json.loads((tmp_path / "run.json").read_text())["config"]["branching"] == {"type": "Plain", "children": "1"}
    trainer(tmp_path, replace(config, steps=2)).train()
    with pytest.raises(ValueError, match=r"branching\.children"):
        trainer(tmp_path, replace(config, branching=Plain(2))).train()  # type: ignore[arg-type]


def test_a_run_is_not_resumed_with_another_strategy_or_objective(tmp_path: Path) -> None:
    trainer(tmp_path, replace(CONFIG, steps=1)).train()
    with pytest.raises(ValueError, match=r"branching\.type"):  # the fields of both are equal
        trainer(tmp_path, replace(CONFIG, branching=TopEntropyBranching())).train()
    with pytest.raises(ValueError, match=r"objective\.assign"):
        trainer(tmp_path, assign=hard).train()


def test_evaluation_in_a_run_needs_tasks_and_is_logged(tmp_path: Path) -> None:
    config = replace(CONFIG, eval_every=2, eval_tasks=2)
    with pytest.raises(ValueError, match="eval_every=2 needs eval_tasks"):
        trainer(tmp_path, config)
    trainer(tmp_path, config, eval_tasks=WorldTasks(WorldConfig(split="test"))).train()
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [("eval/accuracy" in line) for line in lines] == [False, True] and lines[1]["eval/tasks"] == 2


def test_advantages_can_be_estimated_otherwise(tmp_path: Path) -> None:
    run = trainer(tmp_path, estimate=leave_one_out)
    trees = run.sample()
    for tree in trees:
        for index, trajectory in enumerate(tree.trajectories):
            trajectory.reward, trajectory.scored = float(index == 0), True
    rows, _ = run.assemble(trees)
    assert np.allclose(rows.advantages[0][rows.mask[0]], 1.0)  # 1 - mean of 0, 0, 0
    assert np.allclose(rows.advantages[1][rows.mask[1]], -1 / 3)  # 0 - mean of 1, 0, 0


def test_lora_trains_only_adapters_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = replace(CONFIG, steps=1, lora_rank=2)
    run = trainer(tmp_path, config)
    base = {name: p.detach().clone() for name, p in run.model.named_parameters() if "lora" not in name}
    result = run.train()
    assert all(torch.equal(p, base[name]) for name, p in run.model.named_parameters() if name in base)
    assert {"lora_A" in name or "lora_B" in name for name, p in run.model.named_parameters() if p.requires_grad} == {True}
    AutoModelForCausalLM.from_pretrained(result.checkpoint / "model")
    assert trainer(tmp_path, replace(config, steps=2)).train().step == 2


def test_a_reward_wrapper_that_would_miss_cut_turns_is_refused(tmp_path: Path) -> None:
    scaled = gymnasium.wrappers.TransformReward(world(), lambda reward: 10 * reward)
    with pytest.raises(ValueError, match="TransformReward changes rewards from outside WorldEnv"):
        trainer(tmp_path, env=scaled)
    trainer(tmp_path, env=gymnasium.wrappers.TransformReward(Fair(), lambda reward: 10 * reward))


class Fair(arpo_env.ForkableEnv):
    """An environment that scores nothing on its own account."""
