"""Whether a run can be started, and whether its numbers can still be trusted: what stops it, and what is only said."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence, Sized

import gymnasium
from torch import nn

from arpo_algo.config import ARPOConfig
from arpo_algo.distributed import Ranks
from arpo_algo.env_source import EnvSource
from arpo_algo.metrics import count_calls
from arpo_algo.policies.base import AdapterServer, Policy
from arpo_algo.tree import RolloutTree
from arpo_env.core import fork_support
from arpo_env.task import TaskSource

log = logging.getLogger(__name__)

TOKEN_LIMITS = ("length", "context_full")
"""Stop reasons of trajectories that ran into a token limit."""


class RunStopped(RuntimeError):
    """The run was stopped because its numbers could no longer be trusted; the message says which limit was passed."""


def check_not_empty(**sources: TaskSource | None) -> None:
    for name, tasks in sources.items():
        if isinstance(tasks, Sized) and not len(tasks):
            raise ValueError(f"{name}: expected at least one task, got a {type(tasks).__name__} without tasks")


def check_env(env: EnvSource, config: ARPOConfig) -> bool:
    """Whether the environment offers tools. Raises ``ValueError`` where it cannot be forked and has to be, or where a wrapper would miss rewards."""
    made = env if isinstance(env, gymnasium.Env) else env()
    support, has_tools = fork_support(made), bool(getattr(made.unwrapped, "tool_schemas", ()))
    wrapper = _reward_wrapper(made)
    if made is not env:
        made.close()
    if wrapper is not None:
        raise ValueError(
            f"{type(wrapper).__name__} changes rewards from outside {type(made.unwrapped).__name__}, which scores a turn that ran into a limit without it;"
            " give the environment a reward object instead, such as arpo_env.WeightedSum"
        )
    if support == "none" and (config.branching.timing != "never" or isinstance(env, gymnasium.Env)):
        raise ValueError(
            f"{made} cannot be forked, which {type(config.branching).__name__} needs. Give it a fork() method, wrap it in arpo_env.ReplayFork,"
            " or use NoBranching() with a function that makes environments"
        )
    return has_tools


def _reward_wrapper(env: gymnasium.Env[str, str]) -> gymnasium.Env[str, str] | None:
    """A wrapper that changes rewards, around an environment that scores cut turns itself."""
    layer: gymnasium.Env[str, str] = env
    while isinstance(layer, gymnasium.Wrapper) and hasattr(env.unwrapped, "truncate"):
        if isinstance(layer, gymnasium.RewardWrapper | gymnasium.wrappers.TransformReward | gymnasium.wrappers.NormalizeReward):
            return layer
        layer = layer.env
    return None


def check_health(trees: Sequence[RolloutTree], config: ARPOConfig) -> None:
    """Stop where environments or tools fail too often for the rewards to mean anything."""
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    failed = [trajectory for trajectory in trajectories if trajectory.stop_reason in ("env_error", "env_timeout")]
    if len(failed) > config.max_failed_share * len(trajectories):
        raise RunStopped(
            f"{len(failed)} of {len(trajectories)} trajectories ended in an environment that failed (max_failed_share={config.max_failed_share});"
            f" the first: {failed[0].stop_reason}: {failed[0].answer}"
        )
    calls = [call for tree in trees for node in tree.nodes for call in node.calls]
    unavailable = [call["name"] for call in calls if call.get("error") == "unavailable"]
    if len(unavailable) > config.max_unavailable_share * len(calls):
        raise RunStopped(
            f"{len(unavailable)} of {len(calls)} tool calls found their tool unavailable (max_unavailable_share={config.max_unavailable_share}):"
            f" {', '.join(sorted(set(unavailable)))}"
        )


def warn_of_silence(trees: Sequence[RolloutTree], config: ARPOConfig, has_tools: bool) -> None:
    """Warn where a step can teach nothing of what it is for: no tool was reached, or no trajectory came to an end of its own."""
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    if has_tools and not count_calls(call for tree in trees for node in tree.nodes for call in node.calls):
        log.warning(
            "no call reached a tool in the %d trajectories of this step: the policy does not write the call format, or was not told of it;"
            " look at rollouts/, check the system prompt, or cold-start the policy (arpo sft)",
            len(trajectories),
        )
    if all(trajectory.stop_reason in TOKEN_LIMITS for trajectory in trajectories):
        log.warning(
            "all %d trajectories of this step ran into a token limit (max_turn_tokens=%d, max_context=%s): the policy does not come to an end;"
            " raise the limits, or check its end token",
            len(trajectories),
            config.rollout.max_turn_tokens,
            config.rollout.max_context,
        )


def check_overlap(policy: Policy | None, model: nn.Module, config: ARPOConfig) -> None:
    """Raises ``ValueError`` where the policy cannot sample while the learner works, and is asked to."""
    if config.max_staleness == 0 or policy is None:
        return
    if getattr(policy, "model", None) is model:
        raise ValueError(f"max_staleness={config.max_staleness} samples during updates, which needs a policy with weights of its own: pass policy=, got none")
    if (shared := getattr(getattr(policy, "model", None), "config", None)) is not None and shared is getattr(model, "config", None):
        raise ValueError(
            f"max_staleness={config.max_staleness} needs a policy whose model has a config of its own, through which attention is exchanged: "
            "give it a copy.deepcopy of the learner's"
        )
    if getattr(policy, "sleeps", False):
        raise ValueError(f"max_staleness={config.max_staleness} samples during updates, but this {type(policy).__name__} sleeps meanwhile (sleeps=True)")
    take = getattr(policy, "update_weights", None)
    known = () if take is None else inspect.signature(take).parameters.values()
    if config.update_in_flight and not any(p.name == "keep_requests" or p.kind is p.VAR_KEYWORD for p in known):
        raise ValueError(f"update_in_flight=True needs a policy whose turns go on with new weights, as VLLMPolicy's do; {type(policy).__name__}'s do not")


def check_adapters(policy: Policy | None, config: ARPOConfig, ranks: Ranks) -> None:
    """Raises ``ValueError`` where the policy serves LoRA adapters and the learner has none to give, or has them in parts."""
    if not isinstance(policy, AdapterServer) or not policy.serves_adapters:
        return
    if not config.lora_rank:
        raise ValueError(f"this {type(policy).__name__} serves LoRA adapters, but lora_rank=0 trains the model's own weights; set lora_rank")
    if ranks.size > 1:
        raise ValueError(f"adapters are served from a learner of one rank, got {ranks.size}; a policy that takes whole weights is sent them merged")


def check_mismatch(metrics: Mapping[str, float], config: ARPOConfig) -> None:
    """Raises :class:`RunStopped` where the sampler's log-probabilities are not the learner's."""
    mean = metrics.get("mismatch/mean_abs", 0.0)
    if not mean <= config.max_mismatch:  # NaN too
        older = f", or by weights up to max_staleness={config.max_staleness} updates older that have moved far since" if config.max_staleness else ""
        raise RunStopped(
            f"the sampler's log-probabilities differ from the learner's by {mean:.3g} nats a token in the mean, {metrics['mismatch/max_abs']:.3g} at most"
            f" (max_mismatch={config.max_mismatch}): it samples with other weights, in another precision, or at another temperature{older}"
        )


def check_staleness(trees: Sequence[RolloutTree], version: int, config: ARPOConfig) -> dict[str, float]:
    """Weight updates between the sampling of a token and its training, over sampled tokens, each once; ``version``: of the weights that are trained.

    Raises ``AssertionError`` where one passed ``config.max_staleness``, which the schedule rules out.
    """
    ages = [version - v for tree in trees for node in tree.nodes if node.sampled for v in (node.versions or [node.version] * len(node.token_ids))]
    if ages and max(ages) > config.max_staleness:
        raise AssertionError(f"a token was sampled {max(ages)} updates before its training, max_staleness={config.max_staleness}")
    return {"staleness/mean": sum(ages) / max(len(ages), 1), "staleness/max": float(max(ages, default=0))}
