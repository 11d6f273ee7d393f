"""The outer loop with a policy that has weights of its own: sent new ones, sampling ahead, asleep, out of step."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tiny_policy import build_model, build_tokenizer

import arpo_env
from arpo_algo import ARPOConfig, ARPOTrainer, RolloutConfig, UniformBranching
from arpo_algo.checkpoint import read_weights
from arpo_algo.health import RunStopped
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.recording import read_rollouts, step_folder
from arpo_algo.tracking import read_jsonl
from arpo_env.envs.world import WorldConfig, WorldTasks, world_vocabulary

CONFIG = ARPOConfig(
    steps=4,
    tasks_per_step=2,
    lr=1e-2,
    save_every=100,
    branching=UniformBranching(),
    rollout=RolloutConfig(group_size=4, initial=2, window=2, max_turn_tokens=6, max_context=64, reserve_tokens=4, env_workers=0),
)


def any_answer(task: arpo_env.Task, episode: arpo_env.Episode) -> float:
    """Something that varies under a random policy."""
    return float(sum(map(len, episode.turns)) % 3)


def trainer(run_dir: Path, config: ARPOConfig = CONFIG, *, policy: Any = None, **options: Any) -> ARPOTrainer:
    """``policy``: a class of policies, made on a copy of the model."""
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    model = build_model(tokenizer, hidden=16, layers=2, heads=2)
    env = gymnasium.make("arpo/World-v0", disable_env_checker=True, reward=any_answer, max_turns=2)
    served = None if policy is None else policy(copy.deepcopy(model), tokenizer)
    return ARPOTrainer(model, env, config, tokenizer=tokenizer, policy=served, run_dir=run_dir, **options)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics without those that the clock makes."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in read_jsonl(folder / "metrics.jsonl")]


def test_a_policy_that_is_sent_the_weights_samples_what_the_model_itself_would(tmp_path: Path) -> None:
    itself, served = trainer(tmp_path / "itself"), trainer(tmp_path / "served", policy=TransformersPolicy)
    itself.train(), served.train()
    assert rows(tmp_path / "itself") == rows(tmp_path / "served")
    assert served.policy is not None and served.policy.version == 1 + CONFIG.steps, "once at the start, then after each update"
    assert all(torch.equal(a, b) for a, b in zip(served.model.state_dict().values(), served.policy.model.state_dict().values(), strict=True))  # type: ignore[attr-defined]
    assert all(row["staleness/max"] == 0 and row["mismatch/max_abs"] < 1e-5 for row in rows(tmp_path / "served"))


def test_a_function_makes_the_policy_and_the_trainer_closes_it(tmp_path: Path) -> None:
    closed = []

    class Closing(TransformersPolicy):
        def close(self) -> None:
            closed.append(True)

    run = trainer(tmp_path, replace(CONFIG, steps=1), policy=lambda model, tokenizer: lambda: Closing(model, tokenizer))
    assert run.train().step == 1
    run.close()
    assert closed == [True]


def test_sampling_ahead_is_one_update_behind_and_a_function_of_the_seed(tmp_path: Path) -> None:
    config = replace(CONFIG, max_staleness=1)
    for name in ("one", "two"):
        trainer(tmp_path / name, config, policy=TransformersPolicy).train()
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    assert [row["staleness/max"] for row in rows(tmp_path / "one")] == [0, 1, 1, 1]
    for step in range(1, 5):
        trees = read_rollouts(step_folder(tmp_path / "one" / "rollouts", step))
        versions = {node.version for tree in trees for node in tree.nodes if node.sampled}
        assert versions == {1 + max(0, step - 2)}, "version 1 is the first that the trainer sent"


def test_on_policy_and_one_behind_draw_the_same_tasks(tmp_path: Path) -> None:
    trainer(tmp_path / "on", policy=TransformersPolicy).train()
    trainer(tmp_path / "behind", replace(CONFIG, max_staleness=1), policy=TransformersPolicy).train()
    tasks = [[[tree.task_id for tree in read_rollouts(step_folder(tmp_path / name / "rollouts", s))] for s in range(1, 5)] for name in ("on", "behind")]
    assert tasks[0] == tasks[1]


def test_a_run_that_samples_ahead_is_interrupted_and_resumed_without_losing_or_repeating_a_task(tmp_path: Path) -> None:
    class Interrupting(TransformersPolicy):
        def update_weights(self, weights: Any) -> None:
            super().update_weights(weights)
            if self.version == 3:  # the start and two updates
                os.kill(os.getpid(), signal.SIGINT)

    config = replace(CONFIG, max_staleness=1)
    first = trainer(tmp_path, config, policy=Interrupting).train()
    assert (first.step, first.interrupted) == (2, True)
    assert trainer(tmp_path, config, policy=TransformersPolicy).train().step == 4
    trainer(tmp_path / "whole", config, policy=TransformersPolicy).train()
    drawn = [[[tree.task_id for tree in read_rollouts(step_folder(path / "rollouts", s))] for s in range(1, 5)] for path in (tmp_path, tmp_path / "whole")]
    assert drawn[0] == drawn[1]
    assert [row["staleness/max"] for row in rows(tmp_path)] == [0, 1, 0, 1], "a resumed run starts on-policy"


def test_an_evaluation_waits_for_the_batch_that_is_sampled_ahead(tmp_path: Path) -> None:
    config = replace(CONFIG, max_staleness=2, eval_every=1, eval_tasks=2)
    held_out = WorldTasks(WorldConfig(split="test"))
    trainer(tmp_path, config, policy=TransformersPolicy, eval_tasks=held_out).train()
    evaluated = rows(tmp_path)
    assert all("eval/accuracy" in row for row in evaluated)
    assert max(row["staleness/max"] for row in evaluated) <= 2


def test_what_sampling_ahead_needs_is_checked_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a policy with weights of its own"):
        trainer(tmp_path, replace(CONFIG, max_staleness=1))

    class Sleeping(TransformersPolicy):
        sleeps = True

    with pytest.raises(ValueError, match="sleeps"):
        trainer(tmp_path, replace(CONFIG, max_staleness=1), policy=Sleeping)
    with pytest.raises(ValueError, match="TransformersPolicy's do not"):
        trainer(tmp_path, replace(CONFIG, max_staleness=1, update_in_flight=True), policy=TransformersPolicy)
    with pytest.raises(ValueError, match="update_in_flight=True needs max_staleness"):
        replace(CONFIG, update_in_flight=True)
    with pytest.raises(ValueError, match="max_mismatch must be greater than 0"):
        replace(CONFIG, max_mismatch=0.0)


def test_a_policy_that_keeps_other_weights_stops_the_run(tmp_path: Path) -> None:
    class Deaf(TransformersPolicy):
        """Says that it took the weights and did not."""

        def update_weights(self, weights: Any) -> None:
            dict(weights)
            self.weights_updated()

    def deaf(model: Any, tokenizer: Any) -> Deaf:
        other = build_model(tokenizer, hidden=16, layers=2, heads=2, seed=1)
        return Deaf(other, tokenizer)

    with pytest.raises(RunStopped, match="it samples with other weights"):
        trainer(tmp_path, policy=deaf).train()
    assert not list(tmp_path.glob("checkpoints/*")), "nothing learned from wrong numbers is kept"


def test_a_policy_sleeps_while_the_learner_works_and_wakes_with_the_new_weights(tmp_path: Path) -> None:
    said: list[str] = []

    class Sleeper(TransformersPolicy):
        sleeps = True

        def sleep(self) -> None:
            said.append("sleep")

        def update_weights(self, weights: Any) -> None:
            said.append("weights")
            super().update_weights(weights)

        async def generate(self, *args: Any) -> Any:
            if said[-1] != "sample":
                said.append("sample")
            return await super().generate(*args)

    trainer(tmp_path, replace(CONFIG, steps=2), policy=Sleeper).train()
    assert said == ["weights", "sample", "sleep", "weights", "sample", "sleep", "weights"]


def test_new_weights_in_flight_are_asked_for_by_name(tmp_path: Path) -> None:
    kept: list[bool] = []

    class InFlight(TransformersPolicy):
        def update_weights(self, weights: Any, *, keep_requests: bool = False) -> None:
            kept.append(keep_requests)
            if not keep_requests:
                super().update_weights(weights)
            else:
                dict(weights)  # the step's own weights; a real engine recomputes what is under way

    config = replace(CONFIG, steps=3, max_staleness=1, update_in_flight=True, max_mismatch=9.0, lr=1e-6)
    with pytest.raises(AssertionError, match="max_staleness=1"):
        trainer(tmp_path, config, policy=InFlight).train()
    assert kept[0] is False and all(kept[1:]), "nothing is under way at the start"


def test_the_checkpoint_of_a_served_run_holds_the_learners_weights(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, steps=1), policy=TransformersPolicy)
    saved = read_weights(run.train().checkpoint / "model")
    state = run.model.state_dict()
    assert saved and all(torch.equal(tensor, state[name]) for name, tensor in saved.items())


def test_a_policy_that_serves_adapters_is_given_the_adapter_and_only_by_a_learner_that_has_one(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    given: list[Any] = []

    class Adapting(TransformersPolicy):
        serves_adapters = True

        def update_adapter(self, model: Any) -> None:
            given.append(model)
            super().update_weights(copy.deepcopy(model).merge_and_unload().state_dict())

        def update_weights(self, weights: Any) -> None:
            raise AssertionError("whole weights are not for this policy")

    with pytest.raises(ValueError, match="lora_rank=0 trains the model's own weights"):
        trainer(tmp_path, policy=Adapting)
    run = trainer(tmp_path, replace(CONFIG, steps=2, lora_rank=2), policy=Adapting)
    run.train()
    assert given == [run.model] * 3


def test_an_evaluation_that_fails_loses_neither_the_step_nor_its_metrics(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, steps=2, save_every=2, eval_every=2, eval_tasks=2), eval_tasks=WorldTasks(WorldConfig(split="test")))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the judge is down")

    run.evaluate = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the judge is down"):
        run.train()
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_policy_that_takes_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    class Fixed:
        def generate(self) -> None: ...

    for policy in (lambda model, tokenizer: Fixed(), lambda model, tokenizer: Fixed, lambda model, tokenizer: lambda: Fixed()):
        with pytest.raises(TypeError, match="expected one with update_weights and close, or a function that makes one, got Fixed"):
            trainer(tmp_path, policy=policy)


def test_a_policy_that_does_not_fit_is_closed_where_it_was_made_here(tmp_path: Path) -> None:
    closed: list[bool] = []

    class Sleeping(TransformersPolicy):
        sleeps = True

        def sleep(self) -> None: ...

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(ValueError, match="sleeps"):
        trainer(tmp_path, replace(CONFIG, max_staleness=1), policy=lambda model, tokenizer: lambda: Sleeping(model, tokenizer))
    assert closed == [True]
    with pytest.raises(ValueError, match="sleeps"):
        trainer(tmp_path, replace(CONFIG, max_staleness=1), policy=Sleeping)
    assert closed == [True], "a policy that was passed in stays the caller's"


def test_training_again_after_a_failure_begins_with_the_task_that_was_next(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, max_staleness=2), policy=TransformersPolicy)
    update, calls = run.learner.update, []

    def fails_once(batch: Any) -> Any:
        calls.append(run.cursor)
        if len(calls) == 1:
            raise OSError("out of memory")
        return update(batch)

    run.learner.update = fails_once  # type: ignore[method-assign]
    with pytest.raises(OSError, match="out of memory"):
        run.train()
    assert run._drawn > run.cursor == 0
    assert run.train().step == CONFIG.steps and run.cursor == CONFIG.steps * CONFIG.tasks_per_step


def test_a_run_that_a_limit_stopped_goes_on_with_the_limit_raised(tmp_path: Path) -> None:
    trainer(tmp_path, replace(CONFIG, steps=1, max_mismatch=0.1)).train()
    assert trainer(tmp_path, replace(CONFIG, steps=2, max_mismatch=0.3, micro_batch_tokens=64)).train().step == 2
