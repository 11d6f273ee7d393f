"""``rollout_func`` under a real ``GRPOTrainer`` with a tiny model on the CPU."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("trl")

import torch
from tiny_policy import build_model, build_tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

import arpo_env
from arpo_algo.branching import EntropyBranching, NoBranching
from arpo_algo.codec import ChatCodec
from arpo_algo.health import RunStopped
from arpo_algo.interop.trl import _output, group_prompts, reward_func, rollout_func, task_of
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.transformers import TransformersPolicy
from arpo_algo.rollout import RolloutConfig
from arpo_algo.tree import RolloutTree, Trajectory
from arpo_env.envs.world import WorldConfig, world_vocabulary
from arpo_env.formats import ParsedTurn, ToolCall
from arpo_env.interop.trl import dataset

GROUP = 6


@dataclass(frozen=True)
class OneWord:
    """Turns of one word: a policy that knows nothing calls and answers often enough."""

    role: ClassVar[str] = "inline"

    def stop_strings(self, tools: Sequence[arpo_env.Tool], /) -> tuple[str, ...]:
        return ("look", "peek", "yes", "no")

    def parse(self, text: str, tools: Mapping[str, arpo_env.Tool], /) -> ParsedTurn:
        word = text.split()[-1] if text.split() else ""
        if word in ("look", "peek"):
            return ParsedTurn(calls=(ToolCall("look", {}),))
        return ParsedTurn(answer=word) if word in ("yes", "no") else ParsedTurn(errors=("look, or say yes or no",))

    def system_prompt(self, tools: Sequence[arpo_env.Tool], /) -> str:
        return ""

    def render_results(self, results: Sequence[tuple[str, arpo_env.ToolResult]], /) -> str:
        return " " + " ".join(result.text for _, result in results) + " "

    def render_error(self, message: str, /) -> str:
        return " what "


class Look(arpo_env.Tool):
    """Counts the looks of its episode: a fork that shared it would count those of others."""

    name = "look"
    description = "Looks."
    stateful = True
    fork_support = "copy"
    timeout = None

    def __init__(self) -> None:
        self.looks = 0

    def call(self) -> str:
        self.looks += 1
        return f"saw {min(self.looks, 4)}"


TASKS = arpo_env.TaskSet.from_rows([{"question": f"is it {i}", "answer": "yes" if i % 2 else "no", "id": f"t{i}"} for i in range(4)])


def env(**keywords: Any) -> arpo_env.ToolEnv:
    return arpo_env.ToolEnv(TASKS, [Look()], call_format=OneWord(), reward=lambda task, episode: float(episode.answer == task.answer), max_turns=4, **keywords)


def make_trainer(path: Path, rollouts: Any, rewards: Any = reward_func, *, eval_dataset: Any = None, **settings: Any) -> GRPOTrainer:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["look", "peek", "yes", "no", "is", "it", "saw", "what", *map(str, range(5))])
    model = build_model(tokenizer, hidden=16, heads=2, context=64)
    defaults: dict[str, Any] = {
        "output_dir": str(path),
        "max_steps": 2,
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 64,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental feature", category=UserWarning)
        return GRPOTrainer(
            model, rewards, GRPOConfig(**{**defaults, **settings}), train_dataset=dataset(TASKS), eval_dataset=eval_dataset,
            processing_class=tokenizer, rollout_func=rollouts,
        )  # fmt: skip


def config(**settings: Any) -> RolloutConfig:
    return RolloutConfig(**{"group_size": GROUP, "initial": 3, "window": 1, "max_turn_tokens": 6, "max_context": 48, "env_workers": 0, **settings})


ALWAYS = EntropyBranching(tau=-10.0)
"""Branches at every point while there is budget."""


@dataclass
class Call:
    """One call of a rollout_func: what went in, what came out, and what TRL made of it."""

    prompts: list[Any]
    output: dict[str, list[Any]]
    recomputed: torch.Tensor
    """Log-probabilities of the completions by the trainer's own function, before the update."""
    training: tuple[bool, ...]
    """Modes of the model's modules after the call."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.output["trajectory"]

    @property
    def trees(self) -> list[RolloutTree]:
        return list({id(t.tree): t.tree for t in self.trajectories}.values())


@dataclass
class Recorder:
    """A rollout_func that keeps what passes through it."""

    inner: Any
    calls: list[Call] = field(default_factory=list)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        output = self.inner(prompts, trainer)
        training = tuple(module.training for module in trainer.model.modules())
        self.calls.append(Call(prompts, output, recompute(trainer, output), training))
        return output


def recompute(trainer: Any, output: Mapping[str, list[Any]]) -> torch.Tensor:
    """(rows, longest completion), as ``_generate_and_score_completions`` computes old log-probabilities."""
    pairs = list(zip(output["prompt_ids"], output["completion_ids"], strict=True))
    before, after = (max(len(pair[side]) for pair in pairs) for side in (0, 1))
    ids = torch.tensor([[0] * (before - len(p)) + p + c + [0] * (after - len(c)) for p, c in pairs])
    seen = torch.tensor([[0] * (before - len(p)) + [1] * len(p + c) + [0] * (after - len(c)) for p, c in pairs])
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, seen, after)[0]


@dataclass
class Run:
    trainer: GRPOTrainer
    calls: list[Call]
    generations: list[tuple[list[int], Generation]]
    before: dict[str, torch.Tensor]


def train(path: Path, branching: Any = ALWAYS, **settings: Any) -> Run:
    """Two steps on the CPU, with every turn of the policy kept."""
    generations: list[tuple[list[int], Generation]] = []
    generate = TransformersPolicy.generate

    async def kept(self: TransformersPolicy, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        generation = await generate(self, prompt_ids, params)
        generations.append((list(prompt_ids), generation))
        return generation

    recorder = Recorder(rollout_func(env(), branching, config(temperature=settings.get("temperature", 1.0))))
    trainer = make_trainer(path, recorder, **settings)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersPolicy, "generate", kept)
        trainer.train()
    return Run(trainer, recorder.calls, generations, before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("hot"), temperature=0.7)


# -- the run -------------------------------------------------------------------------------------------------------------------------------------------


def test_two_steps_train(run: Run) -> None:
    losses = [entry["loss"] for entry in run.trainer.state.log_history if "loss" in entry]
    assert len(losses) == len(run.calls) == 2
    assert all(math.isfinite(loss) and loss != 0 for loss in losses)
    assert any(not torch.equal(run.before[name], value) for name, value in run.trainer.model.state_dict().items())


def test_each_prompt_gets_one_completion_in_order(run: Run) -> None:
    for call in run.calls:
        assert len(call.prompts) == 2 * GROUP
        assert {len(values) for values in call.output.values()} == {2 * GROUP}
        assert [task_of(prompt).id for prompt in call.prompts] == [trajectory.tree.task_id for trajectory in call.trajectories]
        assert len({trajectory.leaf for trajectory in call.trees[0].trajectories}) == GROUP, "the same trajectory twice"


def test_groups_are_branched_trees_whose_branches_share_what_came_before(run: Run) -> None:
    branched = 0
    for call in run.calls:
        rows = {(id(trajectory.tree), trajectory.index): row for row, trajectory in enumerate(call.trajectories)}
        for row, trajectory in enumerate(call.trajectories):
            if trajectory.origin != "branched":
                continue
            assert trajectory.parent is not None and trajectory.branched_from is not None
            shared = [token for node in trajectory.tree.path(trajectory.branched_from)[1:] for token in node.token_ids]
            parent = rows[id(trajectory.tree), trajectory.parent]
            for completion in (call.output["completion_ids"][row], call.output["completion_ids"][parent]):
                assert len(completion) > len(shared) > 0
                assert completion[: len(shared)] == shared
            branched += 1
    assert branched >= 4


def test_the_mask_is_1_exactly_on_sampled_ids(run: Run) -> None:
    zeros = 0
    for call in run.calls:
        for prompt, completion, mask in zip(call.output["prompt_ids"], call.output["completion_ids"], call.output["env_mask"], strict=True):
            ids, sampled = prompt + completion, set()
            for context, generation in run.generations:
                end = len(context) + len(generation.token_ids)
                if ids[:end] == context + generation.token_ids:
                    sampled |= set(range(len(context), end))
            assert [position for position, one in enumerate(mask, len(prompt)) if one] == sorted(sampled)
            zeros += mask.count(0)
    assert zeros > 20, "no observation was masked"


@pytest.mark.parametrize("which", ["run", "hot"])
def test_log_probabilities_are_those_the_trainer_computes(which: str, request: pytest.FixtureRequest) -> None:
    compared = 0
    for call in request.getfixturevalue(which).calls:
        for row, (logprobs, mask) in enumerate(zip(call.output["logprobs"], call.output["env_mask"], strict=True)):
            assert len(logprobs) == len(mask)
            for column, (ours, sampled) in enumerate(zip(logprobs, mask, strict=True)):
                assert ours == pytest.approx(call.recomputed[row, column].item(), abs=1e-5) if sampled else ours == 0.0
                compared += sampled
    assert compared > 100


def test_rewards_are_the_environments_own(run: Run) -> None:
    for call in run.calls:
        for prompt, trajectory in zip(call.prompts, call.trajectories, strict=True):
            twin = env()
            twin.reset(options={"task": task_of(prompt)})
            turns = [node for node in trajectory.nodes() if node.sampled]
            paid = [twin.step(turn.text)[1] for turn in turns if turn.stop_reason != "length"]
            assert trajectory.reward == sum(paid)
    rewards = [trajectory.reward for trajectory in run.calls[-1].trajectories]
    assert set(rewards) == {0.0, 1.0}
    assert list(run.trainer._logs["rewards"]["reward_func"]) == rewards
    logged = [entry for entry in run.trainer.state.log_history if "reward" in entry]
    assert [entry["arpo/trajectories/branched"] for entry in logged] == [sum(t.origin == "branched" for t in call.trajectories) for call in run.calls]


def test_the_policy_is_the_trainers_model_and_its_version_moves_on(run: Run) -> None:
    recorder: Any = run.trainer.rollout_func
    assert recorder.inner.policy.model is run.trainer.model
    assert all(all(call.training) for call in run.calls), "the model was left in evaluation mode"
    versions = [{node.version for tree in call.trees for node in tree.nodes if node.sampled} for call in run.calls]
    assert versions == [{0}, {1}]


def test_the_seed_decides_what_is_sampled_and_no_two_calls_sample_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(rollouts: Any) -> Any:
        return rollouts(run.calls[0].prompts, run.trainer)["completion_ids"]

    rollouts = rollout_func(env(), ALWAYS, config())
    first = sampled(rollouts)
    assert sampled(rollouts) != first
    assert sampled(rollout_func(env(), ALWAYS, config())) == first
    with monkeypatch.context() as later:
        later.setattr(run.trainer.state, "global_step", 7)
        assert sampled(rollout_func(env(), ALWAYS, config())) != first
    monkeypatch.setattr(run.trainer.args, "seed", run.trainer.args.seed + 1)
    assert sampled(rollout_func(env(), ALWAYS, config())) != first


def test_without_branching_nothing_branches_and_evaluation_never_does(tmp_path: Path) -> None:
    plain = train(tmp_path, NoBranching(), max_steps=1)
    assert {trajectory.origin for call in plain.calls for trajectory in call.trajectories} == {"initial"}
    recorder = Recorder(rollout_func(env(), ALWAYS, config()))
    trainer = make_trainer(tmp_path, recorder, eval_dataset=dataset(TASKS[:2]), num_generations_eval=4, per_device_eval_batch_size=8)
    assert math.isfinite(trainer.evaluate()["eval_reward"])
    (call,) = recorder.calls
    assert [len(tree.trajectories) for tree in call.trees] == [4, 4]
    assert {trajectory.origin for trajectory in call.trajectories} == {"initial"}
    assert not any(call.training)


# -- what cannot be scored -----------------------------------------------------------------------------------------------------------------------------


class BrokenEnv(arpo_env.ToolEnv):
    """Raises in ``step``, which no environment should."""

    def step(self, action: str) -> Any:
        raise RuntimeError("the environment is broken")


def test_an_environment_that_fails_too_often_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func(BrokenEnv(TASKS, [Look()], call_format=OneWord()), ALWAYS, config()))
    with pytest.raises(RunStopped, match=r"of 12 trajectories ended .* the environment is broken"):
        trainer.train()


def test_a_trajectory_that_cannot_be_scored_has_no_reward_and_no_advantage(tmp_path: Path) -> None:
    advantages: list[torch.Tensor] = []

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            advantages.append(output["advantages"])
            return output

    def lose(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        output = inner(prompts, trainer)
        output["trajectory"][0].scored = False
        return output

    inner = rollout_func(env(), ALWAYS, config())
    trainer = make_trainer(tmp_path, lose, max_steps=1)
    trainer.__class__ = Trainer
    trainer.train()
    assert advantages[0][0] == 0 and advantages[0].any()
    assert math.isnan(trainer._logs["rewards"]["reward_func"][0])


def test_a_trajectory_without_a_token_is_one_masked_token_for_trl(run: Run) -> None:
    tree = RolloutTree()
    tree.add(None, "prompt", [5, 6])
    output = _output([Trajectory(tree=tree, index=0, origin="fresh", scored=False)], run.trainer)
    eos = run.trainer.processing_class.eos_token_id
    assert (output["prompt_ids"], output["completion_ids"], output["env_mask"], output["logprobs"]) == ([[5, 6]], [[eos]], [[0]], [[0.0]])
    assert reward_func(output["trajectory"]) == [None]


# -- refusals ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("temperature", 0.7, "temperature=0.7 and RolloutConfig.temperature=1.0 must be equal"),
        ("top_p", 0.9, "top_p must be 1.0 .*got 0.9.*full vocabulary"),
        ("top_k", 20, "top_k must be 0 .*got 20"),
        ("min_p", 0.1, "min_p must be None .*got 0.1"),
        ("repetition_penalty", 1.1, "repetition_penalty must be 1.0 .*got 1.1"),
        ("generation_kwargs", {"bad_words_ids": [[3]]}, "generation_kwargs must be None"),
        ("use_vllm", True, "use_vllm must be False .*the trainer's own model"),
        ("mask_truncated_completions", True, "mask_truncated_completions must be False .*stop strings"),
        ("max_completion_length", 47, "may have 48 tokens, GRPOConfig.max_completion_length is 47"),
        ("chat_template_kwargs", {"enable_thinking": False}, "enable_thinking.*pass codec"),
    ],
)
def test_a_setting_that_would_make_ratios_wrong_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str) -> None:
    monkeypatch.setattr(run.trainer.args, name, value)
    with pytest.raises(ValueError, match=message):
        rollout_func(env(), ALWAYS, config())(run.calls[0].prompts, run.trainer)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("num_generations", 4, f"num_generations=4 and RolloutConfig.group_size={GROUP}"),
        ("tools", [print], "neither tools nor environment_factory, got 1 tools"),
        ("is_fsdp_enabled", True, "FSDP or DeepSpeed"),
        ("is_deepspeed_enabled", True, "FSDP or DeepSpeed"),
    ],
)
def test_a_trainer_that_does_not_go_with_trees_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str) -> None:
    monkeypatch.setattr(run.trainer, name, value)
    with pytest.raises(ValueError, match=message):
        rollout_func(env(), ALWAYS, config())(run.calls[0].prompts, run.trainer)


def test_a_codec_of_the_users_own_takes_chat_template_kwargs_upon_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.trainer.args, "chat_template_kwargs", {"enable_thinking": False})
    codec = ChatCodec(run.trainer.processing_class, template="{% for m in messages %}what what {{ m['content'] }} {% endfor %}")
    output = rollout_func(env(), ALWAYS, config(), codec=codec)(run.calls[0].prompts, run.trainer)
    what = run.trainer.processing_class.convert_tokens_to_ids("what")
    assert all(prompt[:2] == [what, what] for prompt in output["prompt_ids"])


def test_what_cannot_work_is_refused_before_the_first_token() -> None:
    class Bolted(Look):
        fork_support = "none"

    bolted = arpo_env.ToolEnv(TASKS, [Bolted()], call_format=OneWord(), reward=lambda task, episode: 0.0)
    with pytest.raises(ValueError, match="cannot be forked"):
        rollout_func(bolted, ALWAYS, config())
    with pytest.raises(ValueError, match=r"rollout\.top_p must be 1"):
        rollout_func(env(), ALWAYS, config(top_p=0.9))


def test_a_prompt_that_leaves_no_room_is_refused_by_name(run: Run) -> None:
    rollouts = rollout_func(env(), ALWAYS, config(max_context=5))
    long = dataset([arpo_env.Task(question="is it 1 1 1 1", answer="yes", id="long")])[0]["prompt"]
    with pytest.raises(ValueError, match=r"tasks \['long'\] leave no room"):
        rollouts([run.calls[0].prompts[0]] * GROUP + [long] * GROUP, run.trainer)


def asked(task: int) -> Any:
    return [{"role": "user", "content": "the same question", "task": f'{{"id": {task}}}'}]


def test_groups_are_told_apart_by_their_tasks() -> None:
    assert group_prompts([asked(1)] * 3 + [asked(2)] * 3 + [asked(2)] * 3, 3) == [asked(1), asked(2), asked(2)]


def test_a_split_group_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="given 4 prompts, which is no multiple of num_generations=3"):
        group_prompts([asked(1)] * 3 + [asked(2)], 3)
    with pytest.raises(ValueError, match="group 1 should be one prompt num_generations=3 times, but 1 of its prompts"):
        group_prompts([asked(1)] * 3 + [asked(2), asked(2), asked(3)], 3)


@pytest.mark.parametrize("bare", ["a text", [], [{"role": "user", "content": "question"}], [{"role": "user", "content": "q", "task": None}]])
def test_a_prompt_without_its_task_is_refused(bare: Any) -> None:
    with pytest.raises(ValueError, match="expected a prompt with its task"):
        task_of(bare)


# -- the page ------------------------------------------------------------------------------------------------------------------------------------------


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``docs/interop_trl.md`` with tiny models, one step each."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    page = Path(__file__).parents[2] / "docs" / "interop_trl.md"
    code = "".join(re.findall(r"^```py\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    words = build_tokenizer(world_vocabulary(WorldConfig()))
    build_model(words, hidden=16, heads=2).save_pretrained("word-model")
    words.save_pretrained("word-model")
    build_model(words, hidden=16, heads=2).save_pretrained("chat-model")
    words.chat_template = qwen3_chat_template
    words.save_pretrained("chat-model")
    small = 'output_dir="runs", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no"'
    for text, shorter in {
        "path/to/model": "word-model", "path/to/chat-model": "chat-model", 'output_dir="runs/trl"': small, "max_steps=100": "max_steps=1",
        "max_completion_length=1024": "max_completion_length=8", "islice(env.unwrapped.tasks, 1000)": "islice(env.unwrapped.tasks, 4)",
    }.items():  # fmt: skip
        assert text in code
        code = code.replace(text, shorter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental feature", category=UserWarning)
        exec(compile(code, page.name, "exec"), {"__name__": "page"})
