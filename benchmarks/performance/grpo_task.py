"""Both sides of ``grpo_step.py``: one model, one task, one set of settings, as an ``ARPOTrainer`` and as TRL's ``GRPOTrainer``.

*Kinds*, one turn: words of two kinds, a0 to a249 and b0 to b249; the prompt is a list of both, and the reward is the share of a-words in the
completion. A Llama of random weights scores a half and learns within some ten steps. *World*, several turns: ``arpo/World-v0`` with the quickstart's
cold-started policy. TRL plays it through ``arpo_env.interop.trl`` and its own tool-calling loop; calls are read by our call format on both sides, and a turn
ends with the closing tag. Left different: a turn that holds neither a call nor an answer ends TRL's episode, where our environment says "error" and goes on.

What is made equal: weights, prompts and their order, group size, limits on tokens, temperature, AdamW, gradient clipping, the loss (GRPO's: a mean over
completions of the mean over tokens), advantages (TRL's: divided by the sample standard deviation + 1e-4), no KL term, float32, threads.
:func:`settings_of_ours` and :func:`settings_of_trl` read them back. TRL runs without gradient checkpointing, logging, evaluation and saving, with 16 rows
in a forward (the fastest of 4, 8, 16 and 32 here) and ``generate`` on padded batches (its continuous batching took sixteen times as long on the CPU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from tiny_policy import build_tokenizer  # the policy's tokenizer has a token for each word

from arpo_algo import ARPOConfig, ARPOTrainer, NoBranching, RolloutConfig
from arpo_algo.branching import AnyBranching
from arpo_algo.task_order import TaskOrder
from arpo_env.core import ForkableEnv
from arpo_env.envs.world import WorldConfig, WorldEnv, WorldTasks, world_format, world_vocabulary
from arpo_env.task import Task, TaskSet

UNENDING = 10**6
"""Steps of a run that is ended from outside."""
TASKS = 512


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both sides run."""

    name: str
    hidden: int = 128
    """Width and layers of the random policy; that of World has its own."""
    layers: int = 4
    words: int = 500
    """Of the vocabulary of the task of kinds."""
    prompt_words: int = 64
    new_tokens: int = 64
    """Most tokens of a turn; the task of kinds's completions are as long unless the policy ends them."""
    prompts: int = 4
    """Groups in a step."""
    group: int = 16
    lr: float = 3e-3
    seed: int = 0
    threads: int = 1
    trl_rows: int = 16
    """Rows in one forward of TRL's update."""
    micro_batch_tokens: int = 4096
    """Most tokens in one forward of ours."""
    world: Path | None = None
    """Folder of a policy for World; None: the task of kinds with a policy of random weights."""
    context: int = 320
    """Most tokens of a trajectory in World."""


class Kinds(ForkableEnv):
    """One turn: say words of the first kind. The reward is :func:`share`."""

    shared = ForkableEnv.shared | {"tasks"}

    def __init__(self, tasks: TaskSet, length: int) -> None:
        super().__init__()
        self.tasks, self.length = tasks, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        task = (options or {})["task"]
        return task.question, {"task_id": task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", share(action, self.length), True, False, {}


def share(completion: str, length: int) -> float:
    """a-words of ``completion`` over the ``length`` words that there could be: words that an early end leaves out count as wrong."""
    return sum(word.startswith("a") for word in completion.split()) / length


def vocabulary(setting: Setting) -> list[str]:
    return [f"{kind}{n}" for kind in "ab" for n in range(setting.words // 2)]


def kinds_tasks(setting: Setting) -> TaskSet:
    """``TASKS`` lists of distinct words, the same for every seed of the setting."""
    rng, words = np.random.default_rng(0), np.array(vocabulary(setting))
    return TaskSet([Task(id=f"kinds-{n}", question=" ".join(rng.choice(words, setting.prompt_words, replace=False)), answer="") for n in range(TASKS)])


def tasks_of(setting: Setting) -> Any:
    return kinds_tasks(setting) if setting.world is None else WorldTasks(WorldConfig(split="train"))


def policy_of(setting: Setting) -> tuple[Any, Any]:
    """Model and tokenizer, the same for both sides."""
    if setting.world is None:
        tokenizer = build_tokenizer(vocabulary(setting))
        return random_llama(setting, tokenizer), tokenizer
    return LlamaForCausalLM.from_pretrained(setting.world, dtype=torch.float32), build_tokenizer(world_vocabulary(WorldConfig()))


def random_llama(setting: Setting, tokenizer: Any) -> LlamaForCausalLM:
    """A Llama with transformers' own random weights, which says every word about equally often."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=setting.hidden,
        intermediate_size=8 * setting.hidden // 3,
        num_hidden_layers=setting.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=setting.prompt_words + setting.new_tokens + 8,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(setting.seed)
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def sample_std_advantages(rewards_M: np.ndarray, scored_M: np.ndarray) -> np.ndarray:
    """TRL's advantages: ``(R - mean) / (sample standard deviation + 1e-4)``; 0 where not scored."""
    advantages_M = np.zeros(len(rewards_M))
    scored = rewards_M[scored_M]
    if len(scored) > 1:
        advantages_M[scored_M] = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-4)
    return advantages_M


# -- ours ----------------------------------------------------------------------------------------------------------------------------------------------


def rollout_config(setting: Setting, branching: AnyBranching) -> RolloutConfig:
    """Half of a group starts from the question where there is branching, as in the paper."""
    return RolloutConfig(
        group_size=setting.group,
        initial=setting.group if isinstance(branching, NoBranching) else setting.group // 2,
        window=4,
        max_turn_tokens=setting.new_tokens,
        max_context=None if setting.world is None else setting.context,
        temperature=1.0,
        max_live=setting.prompts * setting.group,
        env_workers=0,
    )


def make_ours(setting: Setting, folder: Path, *, branching: AnyBranching | None = None, trackers: Sequence[Any] = ()) -> ARPOTrainer:
    """Our trainer of the setting; without ``branching`` it is GRPO."""
    branching = branching or NoBranching()
    model, tokenizer = policy_of(setting)
    tasks = tasks_of(setting)
    env = Kinds(tasks, setting.new_tokens) if setting.world is None else WorldEnv(split="train")
    config = ARPOConfig(
        steps=UNENDING,
        tasks_per_step=setting.prompts,
        lr=setting.lr,
        seed=setting.seed,
        micro_batch_tokens=setting.micro_batch_tokens,
        rollout=rollout_config(setting, branching),
        branching=branching,
        save_every=UNENDING,
        record_every=0,
    )
    return ARPOTrainer(model, env, config, tokenizer=tokenizer, tasks=tasks, estimate=sample_std_advantages, trackers=trackers, run_dir=folder)


def settings_of_ours(trainer: ARPOTrainer) -> dict[str, Any]:
    """What has to be equal, as our trainer holds it."""
    config, optimizer = trainer.config, trainer.learner.optimizer
    return {
        "prompts a step": config.tasks_per_step,
        "group size": config.rollout.group_size,
        "most new tokens of a turn": config.rollout.max_turn_tokens,
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "passes": config.epochs * config.minibatches,
        "clip": (config.clip_low, config.clip_high),
        "KL": config.kl_coef,
        "loss": {"trajectory_mean": "grpo"}[trainer.weigh.__name__],  # type: ignore[attr-defined]
        "gradient norm": config.max_grad_norm,
        **_of_optimizer(optimizer, config.schedule),
        "dtype": str(next(trainer.model.parameters()).dtype),
    }


# -- TRL -----------------------------------------------------------------------------------------------------------------------------------------------


def trl_config(setting: Setting, folder: Path) -> Any:
    """TRL's settings: the same, and what is fastest on a CPU."""
    from trl import GRPOConfig

    rows = setting.prompts * setting.group
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=UNENDING,
        per_device_train_batch_size=setting.trl_rows,
        gradient_accumulation_steps=rows // setting.trl_rows,
        num_generations=setting.group,
        max_completion_length=setting.new_tokens if setting.world is None else setting.context,
        generation_kwargs={"max_new_tokens": setting.new_tokens},
        max_tool_calling_iterations=7,  # and an answer: the environment's eight turns
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=setting.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        shuffle_dataset=False,
        seed=setting.seed,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def make_trl(setting: Setting, folder: Path, *, branching: AnyBranching | None = None, callbacks: Sequence[Any] = ()) -> Any:
    """TRL's trainer of the setting. With ``branching`` it is given our rollouts through ``arpo_algo.interop.trl``; the update is its own."""
    from trl import GRPOTrainer

    from arpo_algo.interop import trl as rollouts
    from arpo_env.interop import trl as environments

    model, tokenizer = policy_of(setting)
    tasks = [option["task"] for option in TaskOrder(tasks_of(setting), setting.seed).options(0, TASKS) if option is not None]
    more: dict[str, Any] = {}
    config = trl_config(setting, folder)
    if setting.world is None:
        reward: Any = partial(_shares, length=setting.new_tokens)
        reward.__name__ = "share"
    elif branching is None:
        speak_world(tokenizer)
        closing = [tokenizer.convert_tokens_to_ids(word) for word in ("</search>", "</python>", "</answer>")]
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *closing]
        reward, more = environments.reward_func, {"environment_factory": environments.environment_factory(WorldEnv(split="train"))}
    else:
        config.generation_kwargs = None
        reward, more = rollouts.reward_func, {"rollout_func": rollouts.rollout_func(WorldEnv(split="train"), branching, rollout_config(setting, branching))}
    dataset = environments.dataset(tasks)
    return GRPOTrainer(model, reward, config, train_dataset=dataset, processing_class=tokenizer, callbacks=list(callbacks), **more)


def settings_of_trl(trainer: Any) -> dict[str, Any]:
    """What has to be equal, as TRL's trainer holds it."""
    args = trainer.args
    trainer.create_optimizer()
    return {
        "prompts a step": args.per_device_train_batch_size * args.gradient_accumulation_steps // trainer.num_generations,
        "group size": trainer.num_generations,
        "most new tokens of a turn": trainer.generation_config.max_new_tokens,
        "temperature": trainer.generation_config.temperature,
        "top_p": trainer.generation_config.top_p,
        "passes": trainer.num_iterations * args.gradient_accumulation_steps // args.steps_per_generation,
        "clip": (trainer.epsilon_low, trainer.epsilon_high),
        "KL": trainer.beta,
        "loss": trainer.loss_type,
        "gradient norm": args.max_grad_norm,
        **_of_optimizer(trainer.optimizer, str(args.lr_scheduler_type.value)),
        "dtype": str(next(trainer.model.parameters()).dtype),
    }


def _of_optimizer(optimizer: Any, schedule: str) -> dict[str, Any]:
    values = optimizer.param_groups[0]
    chosen = {name: values[name] for name in ("lr", "betas", "eps", "weight_decay", "fused")}
    return {"optimiser": type(getattr(optimizer, "optimizer", optimizer)).__name__, "schedule": schedule, **chosen}


def _shares(completions: Sequence[Any], length: int, **_: Any) -> list[float]:
    return [share(completion[-1]["content"], length) for completion in completions]


WORLD_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}<result> {{ 'error' if message.content.startswith('Error') else message.content }} </result> "
    "{% elif message.tool_calls %}{% for call in message.tool_calls %}<{{ call.function.name }}> {{ call.function.arguments }} </{{ call.function.name }}> "
    "{% endfor %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)
"""World's own format as a chat template that knows tools: the ids of a conversation are those that our codec makes."""


def speak_world(tokenizer: Any) -> None:
    """Give the tokenizer what TRL's tool-calling loop needs: a chat template with tools, and a reader of calls, which is that of our call format."""
    tools = WorldEnv(split="train").prototypes
    format_ = world_format("compact")

    def parse_response(ids: Sequence[int], prefix: Any = None, tools_: Any = None, **_: Any) -> Mapping[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        turn = format_.parse(text, tools)
        calls = [{"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in turn.calls]
        return {"role": "assistant", "content": "" if calls else text} | ({"tool_calls": calls} if calls else {})

    read: Callable[..., Any] = parse_response
    tokenizer.chat_template, tokenizer.response_template, tokenizer.parse_response = WORLD_TEMPLATE, {"read by": "parse_response"}, read
