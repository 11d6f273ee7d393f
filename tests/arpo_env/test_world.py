"""The little world: tasks, tools, demonstrations, environment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_env.core import ToolEnv
from arpo_env.envs.world import CompactTags, WorldEnv, world_format
from arpo_env.envs.world_tasks import MAX_CANDIDATES, WorldConfig, WorldTasks, world_vocabulary
from arpo_env.envs.world_text import FIRST_NAMES, JOBS, LAST_NAMES, PETS, PLACE_HEADS, PLACE_TAILS, TEXTS, pairs
from arpo_env.envs.world_tools import MAX_EXPRESSION, WorldCalculator, WorldSearch, evaluate
from arpo_env.envs.world_traces import FLAWLESS, DemonstrationNoise, demonstration
from arpo_env.task import Task
from arpo_env.testing import EnvConformance, ToolConformance
from arpo_env.tools.base import ToolResult

CONFIGS = [
    WorldConfig(),
    WorldConfig(split="test"),
    WorldConfig(hops=(1, 1), decisions=0, after_first_search=0),
    WorldConfig(hops=(2, 3), after_first_search=0, after_later_search=1),
    WorldConfig(hops=(1, 3), after_first_search=1, after_later_search=1, after_python=1, sharpness=0.5),
    WorldConfig(hops=(3, 3), decisions=3, candidates=MAX_CANDIDATES, after_later_search=1, after_python=1, sharpness=0.0, split="test", style="prose"),
    WorldConfig(hops=(2, 2), decisions=2, after_first_search=0, after_python=1, calculation=1.0, style="prose"),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def first_tasks(config: WorldConfig, n: int = 60) -> list[Task]:
    tasks = WorldTasks(config)
    return [tasks[i] for i in range(n)]


# -- tasks ---------------------------------------------------------------------------------------------------------------------------------------------


@configs
def test_a_task_is_a_function_of_config_and_index(config: WorldConfig) -> None:
    forward, backward = WorldTasks(config), WorldTasks(config)
    later = {i: backward[i] for i in reversed(range(20))}
    assert [forward[i] for i in range(20)] == [later[i] for i in range(20)]
    assert len({task.question + json.dumps(task.metadata["cards"]) for task in later.values()}) == 20


def test_seed_and_split_change_the_tasks() -> None:
    base = [task.metadata for task in first_tasks(WorldConfig(), 5)]
    assert base != [task.metadata for task in first_tasks(WorldConfig(seed=1), 5)]
    assert base != [task.metadata for task in first_tasks(WorldConfig(split="test"), 5)]


def test_sample_uses_the_generator_alone() -> None:
    tasks = WorldTasks(WorldConfig())
    assert tasks.sample(rng(3)) == tasks.sample(rng(3)) != tasks.sample(rng(4))
    with pytest.raises(IndexError, match=">= 0, got -1"):
        tasks[-1]


@configs
def test_metadata_survives_json(config: WorldConfig) -> None:
    task = WorldTasks(config)[0]
    assert json.loads(json.dumps(task.metadata)) == task.metadata


def entities(config: WorldConfig, n: int) -> tuple[set[str], set[str]]:
    people: set[str] = set()
    places: set[str] = set()
    for task in first_tasks(config, n):
        people |= set(task.metadata["cards"])
        places |= {card["city"] for card in task.metadata["cards"].values()}
    return people, places


def test_splits_share_no_person_and_no_place() -> None:
    config = {"hops": (3, 3), "decisions": 3, "candidates": 6, "after_later_search": 1.0, "after_python": 1.0}
    train_people, train_places = entities(WorldConfig(**config), 100)
    test_people, test_places = entities(WorldConfig(split="test", **config), 60)
    assert not train_people & test_people
    assert not train_places & test_places
    # 32 x 20 people and 8 x 16 places, one in five for the test: everything occurs, so the sets above are the whole of each split
    assert len(train_people) + len(test_people) == 640 and len(test_people) == 128
    assert len(train_places) + len(test_places) == 128 and len(test_places) == 26


def test_every_last_name_has_enough_namesakes_in_both_splits() -> None:
    for split in ("train", "test"):
        assert min(map(len, pairs(FIRST_NAMES, LAST_NAMES, split).values())) >= MAX_CANDIDATES


def test_words_of_different_kinds_differ() -> None:
    kinds = (FIRST_NAMES, LAST_NAMES, JOBS, PETS, PLACE_HEADS, PLACE_TAILS)
    assert len({word for kind in kinds for word in kind}) == sum(map(len, kinds))


@configs
def test_the_answer_is_right_and_nobody_else_at_the_end_has_it(config: WorldConfig) -> None:
    for task in first_tasks(config):
        world, text = task.metadata, TEXTS[config.style]
        right = world["hops"][-1]["person"]
        fact = world["cards"][right][world["ask"]]
        value = fact + world["plus"] if world["plus"] else fact
        assert task.answer == text.value(world["ask"], value)
        namesakes = [name for name in world["lists"][right.split()[1]]["people"] if name != right]
        assert world["cards"][right][world["ask"]] not in [world["cards"][name][world["ask"]] for name in namesakes]


@configs
def test_the_question_picks_out_one_namesake_at_each_decision(config: WorldConfig) -> None:
    for task in first_tasks(config):
        world = task.metadata
        assert config.hops[0] <= len(world["hops"]) <= config.hops[1]
        assert sum(bool(hop["given"]) for hop in world["hops"]) == config.decisions
        for hop in world["hops"]:
            listed = world["lists"][hop["person"].split()[1]]
            assert hop["person"] in listed["people"]
            if hop["given"]:
                keys = [tuple(world["cards"][name][a] for a in listed["shows"]) for name in listed["people"]]
                assert listed["shows"] == hop["given"] and len(set(keys)) == len(keys) == config.candidates


@configs
def test_each_choice_leads_somewhere_of_its_own(config: WorldConfig) -> None:
    for task in first_tasks(config, 30):
        world = task.metadata
        for hop, following in zip(world["hops"], world["hops"][1:], strict=False):
            family = world["lists"][hop["person"].split()[1]]["people"]
            bosses = [world["cards"][name]["boss"] for name in family]
            assert len(set(bosses)) == len(bosses)
            assert world["cards"][hop["person"]]["boss"] == (following["person"].split()[1] if following["given"] else following["person"])
        for card in world["cards"].values():
            assert card["boss"] in world["cards"] or card["boss"] in world["lists"]


def places_of_decisions(config: WorldConfig, n: int = 300) -> dict[str, int]:
    counts = {"first": 0, "later": 0, "python": 0}
    for task in first_tasks(config, n):
        for depth, hop in enumerate(task.metadata["hops"]):
            if hop["given"]:
                counts["python" if hop["given"] == ["age"] else "later" if depth else "first"] += 1
    return counts


@pytest.mark.parametrize("place", ["first", "later", "python"])
def test_weights_put_decisions_in_their_place(place: str) -> None:
    names = {"first": "after_first_search", "later": "after_later_search", "python": "after_python"}
    weights = {name: float(key == place) for key, name in names.items()}
    counts = places_of_decisions(WorldConfig(hops=(1, 3), **weights), 60)
    assert counts == {key: 60 if key == place else 0 for key in names}


def test_weights_are_shares() -> None:
    # 300 draws at 1/4, 1/4, 1/2: standard deviation of a count below 9, four of them 36
    counts = places_of_decisions(WorldConfig(hops=(1, 3), after_first_search=1, after_later_search=1, after_python=2))
    assert abs(counts["first"] - 75) < 36 and abs(counts["later"] - 75) < 36 and abs(counts["python"] - 150) < 36


def test_sharpness_is_the_share_told_by_job_alone() -> None:
    for sharpness, low, high in ((1.0, 60, 60), (0.0, 0, 0), (0.5, 14, 46)):  # 60 draws at 1/2: 30 +- 4 x 3.9
        alone = sum(task.metadata["hops"][0]["given"] == ["job"] for task in first_tasks(WorldConfig(sharpness=sharpness)))
        assert low <= alone <= high
    for task in first_tasks(WorldConfig(sharpness=0.0)):
        cards, right = task.metadata["cards"], task.metadata["cards"][task.metadata["hops"][0]["person"]]
        family = [cards[name] for name in task.metadata["lists"][task.metadata["hops"][0]["person"].split()[1]]["people"]]
        assert sorted((card["job"] == right["job"]) + (card["pet"] == right["pet"]) for card in family) == [1, 1, 2]


def test_calculation_is_a_share_of_questions() -> None:
    for share, low, high in ((0.0, 0, 0), (1.0, 60, 60), (0.5, 14, 46)):
        assert low <= sum(task.metadata["plus"] > 0 for task in first_tasks(WorldConfig(calculation=share))) <= high


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "dev"}, "split must be 'train' or 'test', got 'dev'"),
        ({"style": "verse"}, "style must be one of .*got 'verse'"),
        ({"hops": (0, 2)}, r"1 <= least <= most <= 3, got \(0, 2\)"),
        ({"hops": (3, 2)}, r"got \(3, 2\)"),
        ({"candidates": 7}, r"candidates must be in \[2, 6\], got 7"),
        ({"sharpness": 1.5}, r"sharpness must be in \[0, 1\], got 1.5"),
        ({"calculation": -0.1}, r"calculation must be in \[0, 1\], got -0.1"),
        ({"after_python": -1.0}, "weights of decisions must not be negative"),
        ({"decisions": 2}, r"decisions must be in \[0, 1\] with hops \(1, 2\)"),
        ({"hops": (1, 1), "after_first_search": 0.0, "after_later_search": 1.0}, r"decisions must be in \[0, 0\]"),
    ],
)
def test_bad_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldConfig(**fields)


def test_hops_may_come_as_a_list() -> None:
    assert WorldConfig(hops=[1, 2]) == WorldConfig()  # type: ignore[arg-type]


# -- words ---------------------------------------------------------------------------------------------------------------------------------------------


def test_the_compact_language_is_closed_and_small() -> None:
    everything: set[str] = set()
    for config in CONFIGS:
        if config.style == "compact":
            for i, task in enumerate(first_tasks(config)):
                turns = demonstration(task, rng(i))
                everything |= set(" ".join([task.question, str(task.answer), *(f"{turn} {observation}" for turn, observation in turns)]).split())
    vocabulary = world_vocabulary(WorldConfig())
    assert everything <= set(vocabulary)
    assert len(vocabulary) == len(set(vocabulary)) <= 150
    with pytest.raises(ValueError, match="only style 'compact'"):
        world_vocabulary(WorldConfig(style="prose"))


CARDS = {
    "mia smith": {"job": "baker", "age": 34, "city": "north haven", "pet": "cat", "boss": "jones", "facts": ["city", "age", "pet", "boss"]},
    "leo smith": {"job": "nurse", "age": 41, "city": "old ford", "pet": "dog", "boss": "ana jones", "facts": ["boss", "pet", "age", "city"]},
    "ana jones": {"job": "pilot", "age": 43, "city": "new cross", "pet": "goat", "boss": "mia smith", "facts": ["age", "boss", "city", "pet"]},
}
LISTS = {"smith": {"shows": ["job"], "people": ["leo smith", "mia smith"]}, "jones": {"shows": ["age"], "people": ["ana jones"]}}


def hop(person: str, *attributes: str, plus: int = 0) -> dict[str, Any]:
    return {"person": person, "given": list(attributes), "plus": plus}


def world(style: str = "compact") -> Task:
    return Task(question="?", metadata={"style": style, "cards": CARDS, "lists": LISTS})


@pytest.mark.parametrize(
    ("ask", "plus", "hops", "compact", "prose"),
    [
        ("city", 0, [hop("mia smith")], "ask city of mia smith", "Where does Mia Smith live?"),
        ("city", 0, [hop("mia smith", "job")], "ask city of baker smith", "Where does the baker named Smith live?"),
        ("age", 7, [hop("mia smith", "job")], "ask age plus 7 of baker smith", "How old will the baker named Smith be in 7 years?"),
        ("city", 0, [hop("mia smith", "job", "pet")], "ask city of baker cat smith", "Where does the baker named Smith who has a cat live?"),
        ("pet", 0, [hop("mia smith", "age", plus=9)], "ask pet of age 2 5 plus 9 smith", "Which pet does the person named Smith whose age is 25 + 9 have?"),
        (
            "pet",
            0,
            [hop("mia smith", "job"), hop("ana jones", "age", plus=9)],
            "ask pet of plus 9 boss of baker smith",
            "Start from the baker named Smith. Go to that person's boss, the one who is 9 years older. Which pet does the person you come to have?",
        ),
        (
            "age",
            0,
            [hop("mia smith"), hop("ana jones", "job"), hop("leo smith")],
            "ask age of boss of pilot boss of mia smith",
            "Start from Mia Smith. Go to that person's boss, the pilot. Go to that person's boss. How old is the person you come to?",
        ),
    ],
)
def test_questions(ask: str, plus: int, hops: list[dict[str, Any]], compact: str, prose: str) -> None:
    assert TEXTS["compact"].question(ask, plus, hops, CARDS) == compact
    assert TEXTS["prose"].question(ask, plus, hops, CARDS) == prose


# -- tools ---------------------------------------------------------------------------------------------------------------------------------------------


def searching(style: str = "compact") -> WorldSearch:
    search = WorldSearch().bind()
    search.start_episode(world(style))
    return search


def test_search_lists_namesakes_and_shows_cards() -> None:
    search = searching()
    assert search.call(query="smith") == "nurse leo , baker mia"
    assert search.call(query="jones") == "4 3 ana"
    assert search.call(query="mia smith") == "city north haven age 3 4 pet cat boss jones"
    assert search.call(query=" Mia,  SMITH? ") == search.call(query="mia smith")
    assert search.call(query="baker mia smith") == search.call(query="mia smith")
    assert search.call(query="4 3 ana jones") == search.call(query="43 ana jones") == search.call(query="ana jones") != "none"
    for nobody in ("mia", "smith mia", "baker smith", "", "\ud800", "smith smith", "nurse mia smith", "pilot ana jones", "mia smith baker"):
        assert search.call(query=nobody) == "none"


def test_search_in_prose() -> None:
    search = searching("prose")
    assert search.call(query="Smith") == "2 people are named Smith:\n- Leo Smith (job nurse)\n- Mia Smith (job baker)"
    assert search.call(query="Mia Smith") == "Mia Smith. Lives in North Haven. Age: 34. Pet: cat. Boss: Jones (there are several)."
    assert search.call(query="Leo Smith") == "Leo Smith. Boss: Ana Jones. Pet: dog. Age: 41. Lives in Old Ford."
    assert search.call(query="Ann").startswith("No results.")


def test_search_needs_its_task() -> None:
    with pytest.raises(RuntimeError, match="before start_episode"):
        WorldSearch().call(query="smith")
    with pytest.raises(ValueError, match=r"metadata of task 'x' lacks \['cards', 'lists', 'style'\]"):
        WorldSearch().start_episode(Task(question="?", id="x"))


def test_bound_searches_are_apart() -> None:
    prototype = WorldSearch()
    one, other = prototype.bind(), prototype.bind()
    one.start_episode(WorldTasks(WorldConfig())[0])
    other.start_episode(world())
    assert other.call(query="smith") == "nurse leo , baker mia" != one.call(query="smith")
    assert other.fork().call(query="smith") == other.call(query="smith")


@pytest.mark.parametrize(
    ("code", "value"), [("34+7", 41), (" 3 4 + 7 ", 41), ("2 * (3 - 1 0)", -14), ("1 7 // 5", 3), ("-7 // 2", -4), ("print(20 + 2)", 22), ("5", 5)]
)
def test_calculator(code: str, value: int) -> None:
    assert evaluate(code) == value
    assert WorldCalculator().call(code=code) == ToolResult(str(value))
    assert WorldCalculator(spaced=True).call(code=code).text.replace(" ", "") == str(value)


@pytest.mark.parametrize(
    "code",
    ["", "1 +", "1 / 2", "2 ** 9", "1 // 0", "x", "1.5", "True", "__import__('os')", "print(1, 2)", "[1]", "1 < 2", "1\n2\n+"],
)
def test_calculator_refuses_everything_else(code: str) -> None:
    refused(code)


@pytest.mark.parametrize("code", ["\x00", "(" * 199, "1+" * 200 + "1", "\ud800"])
def test_calculator_survives_hostile_text(code: str) -> None:
    refused(code)


def refused(code: str) -> None:
    result = WorldCalculator().call(code=code)
    assert (result.ok, result.error) == (False, "exception") and result.text


def test_calculator_is_bounded() -> None:
    longest = "*".join(["9" * 19] * (MAX_EXPRESSION // 20))
    assert WorldCalculator().call(code=longest).text == str((10**19 - 1) ** 10)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=250))
def test_tools_take_any_text(text: str) -> None:
    assert isinstance(WorldCalculator().call(code=text), ToolResult)
    assert isinstance(searching().call(query=text), str)


class TestCalculatorConformance(ToolConformance):
    def make_tool(self) -> WorldCalculator:
        return WorldCalculator()

    calls = ({"code": "3 + 4"}, {"code": "7 // 2"})


class _ReadySearch(WorldSearch):
    """Bound to a task, which the kit does not give."""

    def bind(self) -> _ReadySearch:
        bound = super().bind()
        bound.start_episode(world())
        return bound


class TestSearchConformance(ToolConformance):
    def make_tool(self) -> WorldSearch:
        return _ReadySearch()

    calls = ({"query": "smith"}, {"query": "nobody"}, {"query": "mia smith"})


# -- demonstrations ------------------------------------------------------------------------------------------------------------------------------------


def replay(config: WorldConfig, task: Task, turns: list[tuple[str, str]]) -> ToolEnv:
    env = WorldEnv(config, max_turns=20)
    assert env.reset(options={"task": task})[0] == task.question
    for turn, observation in turns:
        seen, _, terminated, _, info = env.step(turn)
        assert seen == observation
        assert terminated == (turn == turns[-1][0] and observation == ""), info
    return env


@configs
def test_observations_of_traces_are_those_of_the_environment(config: WorldConfig) -> None:
    for i, task in enumerate(first_tasks(config, 40)):
        replay(config, task, demonstration(task, rng(i))).close()


@configs
def test_a_flawless_worker_is_always_right(config: WorldConfig) -> None:
    for i, task in enumerate(first_tasks(config, 40)):
        env = replay(config, task, demonstration(task, rng(i), FLAWLESS))
        decided = [h["given"] for h in task.metadata["hops"]]
        searches = len(decided) + sum(map(bool, decided))
        sums = decided.count(["age"]) + (task.metadata["plus"] > 0)
        assert env.episode.answer == task.answer
        assert [len([call for call in env.episode.calls if call.name == name]) for name in ("search", "python")] == [searches, sums]
        assert all(call.ok for call in env.episode.calls)


def test_a_trace_is_a_function_of_task_and_generator() -> None:
    task = WorldTasks(WorldConfig())[7]
    assert demonstration(task, rng(5)) == demonstration(task, rng(5))
    assert len({str(demonstration(task, rng(seed))) for seed in range(30)}) > 3


def mistakes(**noise: float) -> Iterator[tuple[Task, list[tuple[str, str]]]]:
    only = DemonstrationNoise(**{**vars(FLAWLESS), **noise})
    config = WorldConfig(hops=(2, 2), calculation=1.0)
    return ((task, demonstration(task, rng(i), only)) for i, task in enumerate(first_tasks(config, 30)))


def test_each_kind_of_noise() -> None:
    """List, person, boss, sum, answer without mistakes; each mistake at probability 1 leaves its own mark."""
    assert all(len(turns) == 5 for _, turns in mistakes())
    for task, turns in mistakes(first_candidate=1.0):
        first = task.metadata["lists"][turns[0][0].split()[1]]["people"][0]
        assert turns[1][0] == f"<search> {task.metadata['cards'][first]['job']} {first} </search>"
    assert all([turn.split()[0] for turn, _ in turns] == ["<search>", "<search>", "<python>", "<answer>"] for _, turns in mistakes(skip_hop=1.0))
    assert all([turn.split()[0] for turn, _ in turns] == ["<search>"] * 3 + ["<answer>"] for _, turns in mistakes(skip_calculation=1.0))
    assert all(turns[-1][0] != f"<answer> {task.answer} </answer>" for task, turns in mistakes(wrong_attribute=1.0))
    assert all(turns[-2] == (turns[-1][0].removeprefix("<answer> "), " <result> error </result> ") for _, turns in mistakes(bad_format=1.0))
    assert all(len(turns) == 1 for _, turns in mistakes(guess=1.0))
    chosen = [turns[1][0].split()[2:4] == task.metadata["hops"][0]["person"].split() for task, turns in mistakes(random_candidate=1.0)]
    assert 2 <= sum(chosen) <= 20  # 30 draws at 1/3


def test_the_default_worker_has_room_to_improve() -> None:
    tasks = first_tasks(WorldConfig(), 400)
    right = sum(demonstration(task, rng(i))[-1][0] == f"<answer> {task.answer} </answer>" for i, task in enumerate(tasks))
    assert 0.2 < right / 400 < 0.5


def test_noise_is_checked() -> None:
    with pytest.raises(ValueError, match=r"guess must be in \[0, 1\], got 2"):
        DemonstrationNoise(guess=2)
    with pytest.raises(ValueError, match=r"must be at most 1, got 0\.6"):
        DemonstrationNoise(first_candidate=0.6, random_candidate=0.5)


# -- environment ---------------------------------------------------------------------------------------------------------------------------------------


def made(**fields: Any) -> Any:
    """A world from ``gymnasium.make``, which gives it the spec that ``check_env`` wants."""
    return gymnasium.make(EnvSpec("arpo/World-v0", entry_point=WorldEnv), disable_env_checker=True, **fields).unwrapped


class TestCompactConformance(EnvConformance):
    def make_env(self) -> Any:
        return made(hops=(2, 3), after_later_search=1.0, after_python=1.0)

    actions = ("<search> smith </search>", "<python> 3 4 + 7 </python>", "<search> mia smith </search>", "nonsense", "<answer> cat </answer>")


class TestProseConformance(EnvConformance):
    def make_env(self) -> Any:
        return made(style="prose", split="test")

    actions = ("<search>Smith</search>", "<python>34 + 7</python>", "<answer>\\boxed{cat}</answer>")


def test_compact_observations_stay_in_the_vocabulary_whatever_happens() -> None:
    vocabulary = set(world_vocabulary(WorldConfig()))
    env = WorldEnv(max_tool_calls=3, max_turns=20)
    env.reset(seed=0)
    calls = ["<python> 1 / 0 </python>", "<python> age </python>", "<search> nobody </search>", "<search> smith </search>"]  # the fourth is over the limit
    for turn in [*calls, "", "<search> a", "<search> </search>"]:
        observation = env.step(turn)[0]
        assert observation and set(observation.split()) <= vocabulary, (turn, observation)


def test_only_the_prose_world_has_a_system_prompt() -> None:
    assert [m["role"] for m in WorldEnv().reset(seed=0)[1]["messages"]] == ["user"]
    prose = WorldEnv(style="prose").reset(seed=0)[1]["messages"]
    assert [m["role"] for m in prose] == ["system", "user"] and "last name" in prose[0]["content"]


def test_a_right_episode_is_rewarded_and_a_wrong_one_is_not() -> None:
    config = WorldConfig(calculation=1.0)
    task = WorldTasks(config)[0]
    env = WorldEnv(config)
    rewards = []
    right = [turn for turn, _ in demonstration(task, rng(), FLAWLESS)]
    for turns in (right, ["<answer> canary </answer>"], ["canary </answer>", right[-1]]):
        env.reset(options={"task": task})
        rewards.append([env.step(turn)[1] for turn in turns][-1])
    assert math.isclose(rewards[0], 1.1) and rewards[1:] == [0.0, -1.0]  # accuracy 1 and 0.1 for both tools; 0; bad format


class _OtherPython(WorldCalculator):
    description = "Another calculator."


def test_another_python_tool_can_be_plugged_in() -> None:
    env = WorldEnv(python_tool=_OtherPython())
    assert env.prototypes["python"].description == "Another calculator."
    with pytest.raises(ValueError, match="must be named 'python', got 'search'"):
        WorldEnv(python_tool=WorldSearch())
    with pytest.raises(TypeError, match="either config or its fields"):
        WorldEnv(WorldConfig(), hops=(1, 1))
    with pytest.raises(TypeError, match="hop"):
        WorldEnv(hop=1)


def test_formats_by_style() -> None:
    assert isinstance(world_format("compact"), CompactTags)
    assert world_format("prose").render_error("no such tool") != world_format("compact").render_error("no such tool") == " <result> error </result> "
