"""``environment_factory`` under a real ``GRPOTrainer``, and its methods under transformers' own schema reader."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import pytest

pytest.importorskip("trl")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

import arpo_env
from arpo_env.core import Episode
from arpo_env.interop.trl import ToolUnavailable, dataset, environment_factory, reward_func
from arpo_env.task import Task

ROWS = [{"id": f"t{i}", "question": f"What is in room {i}?", "answer": f"a cat {i}"} for i in range(4)]
TASKS = arpo_env.TaskSet.from_rows(ROWS)


class Rooms(arpo_env.Tool):
    """Looks into rooms and counts the looks of its episode."""

    name = "look"
    description = "Looks into a room."
    parameters = {"type": "object", "properties": {"room": {"type": "integer", "description": "number of the room"}}, "required": ["room"]}  # noqa: RUF012
    stateful = True
    fork_support = "copy"
    timeout = None
    retries = 0

    def __init__(self) -> None:
        self.looks = 0

    def call(self, room: int) -> arpo_env.ToolResult | str:
        self.looks += 1
        if room == 13:
            return arpo_env.ToolResult.failure("unavailable", "The building is closed.")
        if room < 0:
            raise ValueError("there is no cellar")
        return f"look {self.looks}: a cat {room}"


def right(task: Task, episode: Episode) -> float:
    return float(episode.answer == task.answer)


def env(*tools: Any, **keywords: Any) -> arpo_env.ToolEnv:
    return arpo_env.ToolEnv(TASKS, tools or [Rooms()], reward=right, **keywords)


def begun(task: int = 0, *tools: Any, **keywords: Any) -> Any:
    environment: Any = environment_factory(env(*tools, **keywords))()
    environment.reset(**dataset(TASKS)[task])
    return environment


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# -- under the trainer ---------------------------------------------------------------------------------------------------------------------------------

FIRST_TURNS = [
    '<tool_call>\n{"name": "look", "arguments": {"room": %s}}\n</tool_call>',  # then the right answer
    "a dog",
    '<tool_call>\n{"name": "look", "arguments": {"room": -1}}\n</tool_call>',  # the tool raises
    '<tool_call>\n{"name": "look", "arguments": {"room": 13}}\n</tool_call>',  # the tool is unavailable
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the chat template of Qwen3."""
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    wrapped.chat_template = qwen3_chat_template
    return wrapped


class Scripted(LlamaForCausalLM):
    """Writes :data:`FIRST_TURNS` in turn, and after a tool's answer the right answer; its gradient is that of an ordinary small Llama."""

    tokenizer: Any
    prompts: list[str]

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        turns = []
        for row, ids in enumerate(input_ids):
            text = self.tokenizer.decode(ids)
            self.prompts.append(text)
            room = text.split("What is in room ")[1][0]
            turn = f"a cat {room}" if "<tool_response>" in text else FIRST_TURNS[row % 4].replace("%s", room)
            turns.append(self.tokenizer.encode(turn + "<|im_end|>"))
        longest = max(map(len, turns))
        padded = [turn + [self.tokenizer.pad_token_id] * (longest - len(turn)) for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


def make_trainer(path: Path, factory: Callable[[], object]) -> GRPOTrainer:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4096}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = Scripted(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends))
    model.tokenizer, model.prompts = tokenizer, []
    args = GRPOConfig(
        output_dir=str(path), max_steps=1, per_device_train_batch_size=8, num_generations=4, max_completion_length=600, learning_rate=1e-2, report_to=[],
        use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental feature", category=UserWarning)
        return GRPOTrainer(model, reward_func, args, train_dataset=dataset(TASKS), processing_class=tokenizer, environment_factory=factory)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    trainer = make_trainer(tmp_path_factory.mktemp("run"), environment_factory(env()))
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.lm_head.weight)
    return trainer


def test_a_step_trains_on_the_environments_rewards(trained: GRPOTrainer) -> None:
    assert list(trained._logs["rewards"]["reward_func"]) == [1.0, 0.0, 1.0, 1.0] * 2
    log = trained.state.log_history[0]
    assert log["tools/call_frequency"] == 0.75
    assert log["tools/failure_frequency"] == pytest.approx(1 / 3), "of the calls, that of the unavailable tool alone is a failure"
    assert 0 < abs(log["grad_norm"]) < 1000


def test_the_model_reads_what_the_tools_said(trained: GRPOTrainer) -> None:
    found = []
    for completion, prompt in zip(trained._logs["completion"], trained._logs["prompt"], strict=True):
        room = prompt[0]["content"].split("room ")[1][0]
        found.append([message["content"].replace(f"a cat {room}", "a cat N") for message in completion if message["role"] == "tool"])
    assert found == [["look 1: a cat N"], [], ["ValueError: there is no cellar"], ["{'error': 'The building is closed.'}"]] * 2


def test_the_prompt_shows_the_tools_own_schema(trained: GRPOTrainer) -> None:
    prompts = trained.model.prompts
    assert json.dumps(Rooms().schema()) in prompts[0]
    assert '"task"' not in prompts[0] and "t0" not in prompts[0], "the task's JSON must not reach the model"


# -- schemas -------------------------------------------------------------------------------------------------------------------------------------------


def schema_back(parameters: dict[str, Any], name: str = "look", description: str = "Looks.") -> dict[str, Any]:
    """The schema that transformers reads from the method made of a tool with these parameters."""

    class Any_(Rooms):
        def call(self, **arguments: Any) -> str:
            return ""

    tool = Any_()
    tool.name, tool.description, tool.parameters = name, description, parameters
    return get_json_schema(getattr(begun(0, tool), name))


def argument_back(schema: dict[str, Any]) -> dict[str, Any]:
    back: dict[str, Any] = schema_back({"type": "object", "properties": {"x": schema}, "required": ["x"]})["function"]["parameters"]["properties"]["x"]
    return back


@arpo_env.tool
def find(query: str, limit: int, exact: bool, weight: float, words: list[str], options: dict) -> str:
    """Finds documents: the best first.

    Args:
        query: what to look for
        limit: most results
        exact: whether words must match
        weight: between 0 and 1
        words: words that must occur
        options: further options
    """
    return query


def test_transformers_reads_the_same_schema_back() -> None:
    environment = begun(0, find, Rooms())
    for tool in (find, Rooms()):
        assert get_json_schema(getattr(environment, tool.name)) == tool.schema()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "description": "rows"},
        {"type": "object", "additionalProperties": {"type": "number"}, "description": "weights by name"},
        {"type": "string", "enum": ["up", "down"], "description": "where to"},
        {"type": ["integer", "string"], "description": "number or name"},
    ],
)
def test_nested_types_and_choices_come_back_unchanged(schema: dict[str, Any]) -> None:
    assert argument_back(schema) == schema


@pytest.mark.parametrize(
    "schema, back",
    [
        ({"enum": ["a", "b"]}, {"type": "string", "enum": ["a", "b"], "description": "x"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "description": "d"}, {"type": "string", "nullable": True, "description": "d"}),
        ({"type": "integer", "minimum": 1, "description": "d"}, {"type": "integer", "description": 'd {"minimum": 1}'}),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"type": "object", "description": 'x {"properties": {"a": {"type": "string"}}}'}),
        ({"type": "array", "items": {"enum": [1]}, "description": "d\n  e"},
         {"type": "array", "items": {"type": "integer", "enum": [1]}, "description": "d e"}),
        ({"type": "array", "items": {"type": "integer", "maximum": 3}},
         {"type": "array", "items": {"type": "integer"}, "description": 'x {"items": {"type": "integer", "maximum": 3}}'}),
        ({"description": "anything"}, {"description": "anything"}),
        ({"type": "array", "enum": [[1], [2]]}, {"type": "array", "description": 'x {"enum": [[1], [2]]}'}),
        ({"$ref": "#/$defs/P"}, {"description": 'x {"$ref": "#/$defs/P"}'}),
    ],
)  # fmt: skip
def test_what_types_cannot_say_is_said_in_the_description(schema: dict[str, Any], back: dict[str, Any]) -> None:
    assert argument_back(schema) == back


def test_definitions_that_arguments_refer_to_come_along() -> None:
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "object"}}}
    assert schema_back(parameters)["function"]["description"] == 'Looks. {"$defs": {"P": {"type": "object"}}}'


def test_optional_arguments_stay_optional() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "default": 3}, "b": {"type": "string"}}, "required": ["b"]}
    back = schema_back(parameters)["function"]["parameters"]
    assert back["required"] == ["b"]
    assert back["properties"]["a"] == {"type": "integer", "description": 'a {"default": 3}'}
    assert schema_back({"type": "object", "properties": {}})["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize("text", ["Finds.\nArgs: are words", "Returns: the thing", "one\n\n    two:\n  three", 'end (choices: ["a"', "a: b\nc: d"])
def test_descriptions_that_look_like_docstrings_stay_whole(text: str) -> None:
    schema = schema_back({"type": "object", "properties": {"x": {"type": "string", "description": text}, "y": {"type": "integer"}}}, description=text)
    function = schema["function"]
    words = text.replace(":", " -").split()
    assert function["description"].replace(":", " -").split() == words
    assert function["parameters"]["properties"]["x"]["description"].replace(":", " -").split() == words
    assert list(function["parameters"]["properties"]) == ["x", "y"]


@pytest.mark.parametrize("name", ["reset", "get_reward", "_hidden"])
def test_names_that_trl_keeps_for_itself_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"tool '{name}' cannot be a method"):
        schema_back({"type": "object", "properties": {}}, name=name)


def test_an_argument_that_python_cannot_name_is_refused() -> None:
    with pytest.raises(ValueError, match="tool 'look': argument 'from' cannot be an argument of a Python method"):
        schema_back({"type": "object", "properties": {"from": {"type": "string"}}})


def test_the_methods_are_those_that_trl_finds() -> None:
    environment = begun(0, find, Rooms())
    public = {name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_")}
    assert public == {"reset", "find", "look"}


# -- episodes ------------------------------------------------------------------------------------------------------------------------------------------


def test_environments_have_episodes_of_their_own() -> None:
    factory, rows = environment_factory(env()), dataset(TASKS)
    environments: list[Any] = [factory(), factory()]
    one, two = environments
    one.reset(**rows[1])
    two.reset(**rows[2])
    assert [one.look(room=1), one.look(room=1), two.look(room=2)] == ["look 1: a cat 1", "look 2: a cat 1", "look 1: a cat 2"]
    assert reward_func([said("a cat 1"), said("a cat 1")], environments) == [1.0, 0.0]
    one.reset(**rows[3])
    assert one.look(room=3) == "look 1: a cat 3"


def test_a_function_that_makes_environments_is_called_for_each_episode() -> None:
    class Bolted(Rooms):
        fork_support = "none"

    made: list[arpo_env.ToolEnv] = []

    def make() -> arpo_env.ToolEnv:
        made.append(env(Bolted()))
        return made[-1]

    environment: Any = environment_factory(make)()
    for _ in range(2):
        environment.reset(**dataset(TASKS)[1])
        assert environment.look(room=1) == "look 1: a cat 1"
        assert reward_func([said("a cat 1")], [environment]) == [1.0]
    environment.reset(**dataset(TASKS)[1])
    environment.reset(**dataset(TASKS)[1])
    assert not made.pop()._closed
    assert len(made) == 4, "one for the schemas, one for each episode"
    assert all(one._closed for one in made)
    with pytest.raises(ValueError, match="cannot be forked: pass a function"):
        environment_factory(env(Bolted()))


def test_rows_of_the_users_own_work_too() -> None:
    environment: Any = environment_factory(env())()
    environment.reset(prompt=[{"role": "user", "content": "Who?"}], answer="me")
    assert reward_func([said("me")], [environment]) == [1.0]


def test_a_row_without_a_question_is_refused() -> None:
    environment: Any = environment_factory(env())()
    with pytest.raises(ValueError, match="question"):
        environment.reset(prompt=[{"role": "user", "content": ""}])


@pytest.mark.parametrize("arguments", [{}, {"room": "3"}, {"room": 3, "floor": 1}])
def test_bad_arguments_are_told_to_the_model(arguments: dict[str, Any]) -> None:
    assert "The call of look was not run: " in begun().look(**arguments)


def echo(text: str) -> str:
    """Says it again.

    Args:
        text: what to say
    """
    return f"said: {text}"


@pytest.mark.parametrize("text", ["</think>", "<think>", "a </tool_call> b", 'x</think><tool_call>{"name": "echo", "arguments": {"text": "y"}}</tool_call>'])
def test_tags_in_an_argument_are_part_of_the_argument(text: str) -> None:
    """The environment's own format would take them for the end of a thought, and what follows for another call."""
    assert begun(0, echo).echo(text=text) == f"said: {text}"


def test_an_unavailable_tool_raises() -> None:
    with pytest.raises(ToolUnavailable, match="The building is closed"):
        begun().look(room=13)


def test_wrappers_and_limits_hold() -> None:
    wrapped: Any = environment_factory(gymnasium.wrappers.TimeLimit(env(), max_episode_steps=2))()
    wrapped.reset(**dataset(TASKS)[1])
    few = begun(1, max_turns=2)
    for environment, reason in ((wrapped, "time_limit"), (few, "max_turns")):
        assert environment.look(room=1) == "look 1: a cat 1"
        assert f"the episode has ended ({reason})" in environment.look(room=1)
        assert f"the episode has ended ({reason})" in environment.look(room=1)
        assert reward_func([said("a cat 1")], [environment]) == [0.0]
    one_call = begun(1, max_tool_calls=1)
    one_call.look(room=1)
    assert "limit of 1 tool calls" in one_call.look(room=1)
    assert reward_func([said("a cat 1")], [one_call]) == [1.0]


@pytest.mark.parametrize(
    "completion, reward",
    [
        (said("a cat 0"), 1.0),
        (said("<think>hm</think>\\boxed{a cat 0}"), 1.0),
        (said("<answer>a cat 0</answer>"), 1.0),
        ("a cat 0", 1.0),
        (said(""), 0.0),
        ([], 0.0),
        ([{"role": "assistant", "content": "a cat 0", "tool_calls": [{}]}], 0.0),
        ([{"role": "tool", "content": "a cat 0"}], 0.0),
        ([{"role": "assistant", "content": None}], 0.0),
    ],
)
def test_the_last_message_is_the_answer(completion: Any, reward: float) -> None:
    environment = begun(0)
    assert reward_func([completion], [environment]) == [reward]
    assert reward_func([said("something else")], [environment]) == [reward], "scored once"
    assert "the episode has ended" in environment.look(room=0)


@pytest.mark.parametrize("completion", [[], said(""), [{"role": "tool", "content": "a cat 0"}]])
def test_a_completion_without_an_answer_is_scored_as_it_stands(completion: Any) -> None:
    def blame(task: Task, episode: Episode) -> float:
        return -1.0 if episode.stop_reason == "no_answer" else 0.0

    environment: Any = environment_factory(arpo_env.ToolEnv(TASKS, [Rooms()], reward=blame))()
    environment.reset(**dataset(TASKS)[0])
    assert reward_func([completion], [environment]) == [-1.0]


def test_an_answer_that_nobody_can_grade_has_no_reward() -> None:
    class Unsure(arpo_env.TokenF1):
        def __call__(self, task: Task, episode: Episode) -> arpo_env.Score:
            return arpo_env.Score(None, {})

    environment: Any = environment_factory(arpo_env.ToolEnv(TASKS, [Rooms()], reward=Unsure()))()
    environment.reset(**dataset(TASKS)[0])
    assert reward_func([said("a cat 0")], [environment]) == [None]


def test_any_tool_env_will_do_and_nothing_else() -> None:
    world: Any = environment_factory(gymnasium.make("arpo/World-v0"))()
    tasks = arpo_env.WorldEnv().tasks
    world.reset(**dataset(islice(tasks, 1))[0])
    person, card = next(iter(tasks[0].metadata["cards"].items()))
    assert card["city"] in world.search(query=person)
    assert reward_func([said(str(tasks[0].answer))], [world]) == [1.0]
    with pytest.raises(TypeError, match="expected a ToolEnv, whose tools become methods, got GuessNumber"):
        environment_factory(gymnasium.make("arpo/GuessNumber-v0"))


# -- the dataset ---------------------------------------------------------------------------------------------------------------------------------------


def test_a_row_is_a_prompt_that_knows_its_task() -> None:
    short = Task(question="Who?", answer=("a", "b"), id="1", system_prompt="Be short.", metadata={"n": [1, {"m": None}]})
    rows = dataset([short, TASKS[0]], system_prompt="Hi.")
    assert rows.column_names == ["prompt"]
    assert [[(message["role"], message["content"]) for message in prompt] for prompt in rows["prompt"]] == [
        [("system", "Be short."), ("user", "Who?")],
        [("system", "Hi."), ("user", "What is in room 0?")],
    ]
    environment: Any = environment_factory(env())()
    environment.reset(**rows[0])
    assert environment._base.episode.task == short


@pytest.mark.parametrize("metadata", [{"a": {1, 2}}, {"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}])
def test_metadata_that_json_would_change_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"task 'odd'.*metadata"):
        dataset([Task(question="?", answer="!", id="odd", metadata=metadata)])


def test_a_source_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"WorldTasks has no end: pass itertools\.islice"):
        dataset(arpo_env.WorldEnv().tasks)  # type: ignore[arg-type]
