"""ARPO's sampling under TRL's ``GRPOTrainer``: each group of generations is one rollout tree.

::

    trainer = GRPOTrainer(
        model, reward_func, GRPOConfig(num_generations=8, ...), train_dataset=dataset(tasks), processing_class=tokenizer,
        rollout_func=rollout_func(env, EntropyBranching(), RolloutConfig(group_size=8, initial=4)),
    )

``dataset`` is that of ``arpo_env.interop.trl``. Who does what:

1. This side samples: the environment's own messages through the codec, turns by the trainer's model (its very weights), tools by the environment, branches
   by ``fork``. TRL's own sampling settings are compared with ours, not applied, and a difference is refused: ratios would not start at 1.
2. TRL trains: its loss, its optimiser, its advantages, which are one number a sequence, divided by the sample standard deviation. That is ARPO's *soft*
   assignment: a token that several trajectories share is trained once in each. *Hard* assignment has no place in it; that is ``ARPOTrainer``'s.
3. Evaluation samples independent trajectories, without branches: those would weigh uncertain beginnings more than the policy does.

A trajectory that cannot be scored has the reward None: TRL leaves it out of the group's statistics and gives it the advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from arpo_algo.branching import AnyBranching, NoBranching
from arpo_algo.codec import ChatCodec, Codec
from arpo_algo.config import ARPOConfig
from arpo_algo.env_source import EnvSource
from arpo_algo.health import check_env, check_health, warn_of_silence
from arpo_algo.metrics import rollout_metrics
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.rollout import derive_seed, sample_groups
from arpo_algo.rollout_config import RolloutConfig
from arpo_algo.sampler import run_async
from arpo_algo.tree import RolloutTree, Trajectory
from arpo_env.task import Task

Prompt = Sequence[Mapping[str, Any]]
RolloutFunc = Callable[[list[Prompt], Any], dict[str, list[Any]]]

_WHOLE = "TRL computes probabilities over the full vocabulary, so tokens must be drawn from all of it"
_REQUIRED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((1.0,), _WHOLE),
    "top_k": ((0, None), _WHOLE),
    "min_p": ((None, 0.0), _WHOLE),
    "repetition_penalty": ((1.0,), _WHOLE),
    "generation_kwargs": ((None, {}), "they would not be applied"),
    "use_vllm": ((False,), "turns are sampled with the trainer's own model"),
    "mask_truncated_completions": ((False,), "TRL takes every completion without an end-of-sequence id for truncated; turns also end with stop strings"),
}
"""Settings of ``GRPOConfig`` that have to be left as they are, and why."""


def rollout_func(env: EnvSource, branching: AnyBranching, config: RolloutConfig, *, codec: Codec | None = None) -> RolloutFunc:
    """A ``rollout_func`` for ``GRPOTrainer`` that samples each group in ``env`` as a rollout tree branched by ``branching``.

    ``codec``: by default a :class:`ChatCodec` of the trainer's tokenizer. The limits on tokens are those of ``config``. What it returns holds, besides what
    TRL requires, ``env_mask`` (1 exactly on sampled ids) and ``trajectory``, the :class:`Trajectory` of each completion, for reward functions: its reward,
    calls, entropies, and in ``trajectory.tree`` all its group.

    Raises ``ValueError`` for an environment that cannot be forked, and at the first call for settings of the trainer that do not go with ``config``.
    """
    return _TreeRollouts(env, ARPOConfig(rollout=config, branching=branching), codec)


def reward_func(trajectory: Sequence[Trajectory], log_metric: Callable[[str, float], None] | None = None, **_: Any) -> list[float | None]:
    """The environment's own reward of each completion that :func:`rollout_func` sampled, None where it could not be scored. Logs the trees' metrics too."""
    trees = {id(one.tree): one.tree for one in trajectory}
    if log_metric is not None:
        for name, value in rollout_metrics(list(trees.values())).items():
            if math.isfinite(value):
                log_metric(f"arpo/{name}", value)
    return [one.reward if one.scored else None for one in trajectory]


class _TreeRollouts:
    """The state behind :func:`rollout_func`: the policy over the trainer's model, and how often it was asked."""

    def __init__(self, env: EnvSource, config: ARPOConfig, codec: Codec | None) -> None:
        self.env, self.config, self.codec = env, config, codec
        self.has_tools = check_env(env, config)
        self.policy: TransformersPolicy | None = None
        self.calls = 0

    def __call__(self, prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        training = trainer.model.training
        policy, codec = self._policy(trainer), self.codec or _codec(trainer)
        _check(trainer, self.config.rollout, policy.context_length)
        if training:
            rollout, strategy = self.config.rollout, self.config.branching
        else:
            size = trainer.num_generations_eval
            rollout, strategy = replace(self.config.rollout, group_size=size, initial=size), NoBranching()
        groups = group_prompts(prompts, rollout.group_size)
        seed = derive_seed(trainer.args.seed, trainer.accelerator.process_index, trainer.state.global_step, self.calls)
        self.calls += 1
        options = [{"task": task_of(prompt)} for prompt in groups]
        trees = run_async(sample_groups(self.env, policy, codec, strategy, rollout, options, seed=seed))
        self._check_trees(trees, options)
        return _output([trajectory for tree in trees for trajectory in tree.trajectories], trainer)

    def _policy(self, trainer: Any) -> TransformersPolicy:
        """The policy over the weights of now. Nothing that an earlier call computed is used again: they may have changed since."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.policy is None or self.policy.model is not model:
            self.policy = TransformersPolicy(model, _tokenizer(trainer))
        else:
            self.policy.weights_updated()
        return self.policy

    def _check_trees(self, trees: Sequence[RolloutTree], options: Sequence[Mapping[str, Any]]) -> None:
        if len(trees) < len(options):
            lost = [option["task"].id for index, option in enumerate(options) if index not in {tree.group for tree in trees}]
            raise ValueError(f"the prompts of the tasks {lost} leave no room for a turn, but TRL needs a completion for each prompt: leave such tasks out")
        check_health(trees, self.config)
        warn_of_silence(trees, self.config, self.has_tools)


def group_prompts(prompts: Sequence[Prompt], size: int) -> list[Prompt]:
    """One prompt for each group. TRL gives every prompt ``size`` times in a row; raises ``ValueError`` where it did not."""
    if len(prompts) % size:
        raise ValueError(
            f"this process was given {len(prompts)} prompts, which is no multiple of num_generations={size}: a group is split over processes, and a tree"
            " cannot be. Make per_device_train_batch_size * steps_per_generation (evaluation: per_device_eval_batch_size) a multiple of it"
        )
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    for number, group in enumerate(groups):
        if different := sum(prompt != group[0] for prompt in group):
            raise ValueError(f"group {number} should be one prompt num_generations={size} times, but {different} of its prompts differ from the first")
    return [group[0] for group in groups]


def task_of(prompt: Prompt) -> Task:
    """The task that ``arpo_env.interop.trl.dataset`` wrote into the last message of a prompt."""
    message = prompt[-1] if isinstance(prompt, Sequence) and prompt and isinstance(prompt[-1], Mapping) else {}
    if not message.get("task"):
        raise ValueError(f"expected a prompt with its task, as arpo_env.interop.trl.dataset(tasks) makes them, got {prompt!r:.200}")
    return Task.from_json(message["task"])


def _check(trainer: Any, config: RolloutConfig, context_length: int) -> None:
    """Raise ``ValueError`` where a setting of the trainer does not go with ours or with trees."""
    args = trainer.args
    for name, (accepted, reason) in _REQUIRED.items():
        if getattr(args, name) not in accepted:
            raise ValueError(f"GRPOConfig.{name} must be {accepted[0]!r} with this rollout_func, got {getattr(args, name)!r}: {reason}")
    if args.temperature != config.temperature:
        raise ValueError(
            f"GRPOConfig.temperature={args.temperature} and RolloutConfig.temperature={config.temperature} must be equal:"
            " the loss would be computed for another distribution than the one that was sampled"
        )
    if trainer.num_generations != config.group_size:
        raise ValueError(f"GRPOConfig.num_generations={trainer.num_generations} and RolloutConfig.group_size={config.group_size} must be equal")
    limit = min(context_length, config.max_context or context_length)
    if limit > args.max_completion_length:
        raise ValueError(
            f"trajectories may have {limit} tokens, GRPOConfig.max_completion_length is {args.max_completion_length}:"
            f" set RolloutConfig.max_context to at most that, or max_completion_length to at least {limit}"
        )
    if trainer.tools:
        raise ValueError(f"the environment runs the tools: give the trainer neither tools nor environment_factory, got {len(trainer.tools)} tools")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("each process samples with whole weights: expected one process or data parallelism (DDP), got FSDP or DeepSpeed")


def _tokenizer(trainer: Any) -> Any:
    from transformers import ProcessorMixin

    processing = trainer.processing_class
    return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing


def _codec(trainer: Any) -> Codec:
    if trainer.args.chat_template_kwargs:
        raise ValueError(f"chat_template_kwargs={trainer.args.chat_template_kwargs} is not applied: pass codec=ChatCodec(tokenizer, template=...) instead")
    return ChatCodec(_tokenizer(trainer))


def _output(trajectories: Sequence[Trajectory], trainer: Any) -> dict[str, list[Any]]:
    """What TRL takes, one entry for each trajectory."""
    output: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "trajectory": list(trajectories)}
    for trajectory in trajectories:
        ids, logprobs, mask = trajectory.token_ids, trajectory.logprobs, [int(sampled) for sampled in trajectory.mask]
        start = len(trajectory.nodes()[0].token_ids)
        if len(ids) == start:  # its environment failed before the first turn; TRL needs a token
            ids, logprobs, mask = [*ids, _tokenizer(trainer).eos_token_id], [*logprobs, 0.0], [*mask, 0]
        for name, values in {"prompt_ids": ids[:start], "completion_ids": ids[start:], "logprobs": logprobs[start:], "env_mask": mask[start:]}.items():
            output[name].append(values)
    return output
