"""``SearchQAEnv`` and ``MathEnv``: built-in tasks, tasks of one's own, rewards of whole episodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest

import arpo_env
from arpo_env.envs.math import MathEnv
from arpo_env.envs.search_qa import SearchQAEnv
from arpo_env.testing import EnvConformance

ROOT = Path(__file__).resolve().parents[2]


def light_python() -> arpo_env.PythonTool:
    """The Python tool without imports made beforehand, isolated by a process alone and without a word about that."""
    return arpo_env.PythonTool(arpo_env.LocalPython(imports=()), require="process")


class TestSearchQAConformance(EnvConformance):
    actions = (
        "<think>who?</think><search>lighthouse of Port Ellery</search>",
        "<python>x = 1894 - 1871\nx</python>",
        "<python>x + y</python>",
        "<answer>\\boxed{23}</answer>",
    )

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return SearchQAEnv(python=light_python())


class TestMathConformance(EnvConformance):
    actions = ("<search>Tarrow sum</search>", "<python>total = sum(int(d) ** 2 for d in str(2 ** 50))\ntotal</python>", "<python>total + 1</python>")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        pytest.importorskip("math_verify")
        return MathEnv(python=light_python())


def test_a_question_that_needs_both_tools() -> None:
    """5,240 and 3,115 inhabitants are 8,355. The answer is right (1) and both tools ran (0.1)."""
    env = SearchQAEnv(python=light_python())
    env.reset(seed=0, options={"task": 4})
    first = env.step("<search>inhabitants of Grenwick in 1900</search>")[0]
    second = env.step("<search>Dunmarrow inhabitants</search>")[0]
    assert "5,240" in first and "3,115" in second
    assert env.step("<python>5240 + 3115</python>")[0] == "\n<result>\n8355\n</result>\n"
    _, reward, terminated, _, info = env.step("<answer>\\boxed{8,355}</answer>")
    assert terminated
    assert reward == pytest.approx(1.1)
    assert info["reward"] == {"accuracy": 1.0, "format": 1.0, "tool_bonus": pytest.approx(0.1)}
    env.close()


def test_the_interpreter_forks_with_the_environment() -> None:
    env = SearchQAEnv(python=light_python())
    env.reset(seed=0)
    env.step("<python>x = [1]</python>")
    twin = arpo_env.fork(env)
    assert env.step("<python>x.append(2); x</python>")[0] == "\n<result>\n[1, 2]\n</result>\n"
    env.close()
    assert twin.step("<python>x.append(3); x</python>")[0] == "\n<result>\n[1, 3]\n</result>\n"
    twin.close()


@pytest.mark.parametrize("kind", [SearchQAEnv, MathEnv])
def test_every_built_in_answer_can_be_found(kind: type[SearchQAEnv] | type[MathEnv]) -> None:
    """Each task's reference answer is worth 1, and questions name something that the documents know."""
    if kind is MathEnv:
        pytest.importorskip("math_verify")
    env = kind(python=light_python())
    assert len(env.tasks) == len(kind.rows) == 5  # type: ignore[arg-type]
    for index, row in enumerate(kind.rows):
        env.reset(options={"task": index})
        answer = row["answer"] if isinstance(row["answer"], str) else row["answer"][0]
        assert env.step(f"<answer>\\boxed{{{answer}}}</answer>")[1] == 1.0
        env.reset(options={"task": index})
        assert env.step("<answer>\\boxed{77777}</answer>")[1] == 0.0
    env.close()


def test_mathematics_is_graded_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    env = MathEnv(python=light_python())
    for answer, expected in (("0.5", 1.0), ("1/2", 1.0), ("-0.5", 0.0), ("12", 0.0)):
        env.reset(options={"task": 3})
        assert env.step(f"<answer>\\boxed{{{answer}}}</answer>")[1] == expected


def own_search() -> arpo_env.SearchTool:
    return arpo_env.SearchTool(arpo_env.KeywordIndex([{"text": "The moon of Tolva is called Ess."}]))


class TestSearchInAFile:
    TASKS = ({"question": "What is the moon of Tolva called?", "answer": "Ess"},)

    def found(self, path: Path | str) -> str:
        env = SearchQAEnv(self.TASKS, path, light_python())
        env.reset(seed=0)
        return str(env.step("<search>moon of Tolva</search>")[0])

    def test_recorded_searches(self, tmp_path: Path) -> None:
        path = tmp_path / "cache.json"
        path.write_text(json.dumps({"Moon of Tolva?": "Page 1: Ess circles Tolva.\nPage 2: Tolva is a planet.", "sea": "Page 1: salt"}))
        assert self.found(path) == self.found(str(path)) == "\n<result>\n1. Ess circles Tolva.\n2. Tolva is a planet.\n</result>\n"

    @pytest.mark.parametrize("installed", [True, False])
    def test_documents(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
        if installed:
            pytest.importorskip("tantivy")
        else:
            monkeypatch.setattr("arpo_env.envs.search_python.find_spec", lambda name: None)
        path = tmp_path / "documents.jsonl"
        path.write_text('{"title": "Tolva", "text": "The moon is called Ess."}\n\n{"text": "The sea is salt."}\n')
        tool = SearchQAEnv(self.TASKS, path, light_python()).prototypes["search"]
        assert type(tool.backend) is (arpo_env.TantivyIndex if installed else arpo_env.KeywordIndex)  # type: ignore[attr-defined]
        assert self.found(path) == "\n<result>\n1. Tolva: The moon is called Ess.\n</result>\n"

    @pytest.mark.parametrize(
        ("name", "text", "problem"), [("c.json", "[]", "query -> text"), ("d.jsonl", "{", "one JSON object a line"), ("d.txt", "", "d.txt")]
    )
    def test_files_that_hold_something_else(self, tmp_path: Path, name: str, text: str, problem: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=problem):
            SearchQAEnv(self.TASKS, tmp_path / name, light_python())


class TestTasksOfOnesOwn:
    ROWS = ({"question": "What is the moon of Tolva called?", "answer": "Ess"},)

    def test_rows(self) -> None:
        env = SearchQAEnv(self.ROWS, own_search(), light_python())
        assert env.reset(seed=0)[0] == "What is the moon of Tolva called?"
        assert "Ess" in env.step("<search>moon of Tolva</search>")[0]

    def test_a_task_set_is_taken_as_it_is(self) -> None:
        tasks = arpo_env.TaskSet.from_rows(self.ROWS)
        assert SearchQAEnv(tasks, own_search(), light_python()).tasks is tasks

    def test_a_file_and_its_ability(self, tmp_path: Path) -> None:
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ({"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"})))
        pytest.importorskip("math_verify")
        env = MathEnv(str(path), own_search(), light_python())
        env.reset(seed=0)
        assert env.episode.task.ability == "math"
        env = SearchQAEnv(path, own_search(), light_python())  # type: ignore[assignment]
        env.reset(seed=0)
        assert env.episode.task.ability == "qa"

    SUM: ClassVar[dict[str, str]] = {"question": "What is 2 + 3?", "answer": "5"}

    @pytest.mark.parametrize(
        ("tasks", "options"),
        [
            (arpo_env.TaskSet.from_rows([SUM]), {}),
            ([arpo_env.Task(**SUM)], {}),
            (None, {"task": SUM}),
            (None, {"task": arpo_env.Task(**SUM)}),
            (arpo_env.TaskSet.from_rows([SUM]), {"task": 0}),
        ],
        ids=["set", "tasks", "row-option", "task-option", "index-option"],
    )
    def test_mathematics_is_graded_as_mathematics_wherever_the_task_comes_from(self, tasks: Any, options: dict[str, Any]) -> None:
        """By token F1 ``\\frac{10}{2}`` would be worth 0."""
        pytest.importorskip("math_verify")
        env = MathEnv(tasks, own_search(), light_python())
        env.reset(seed=0, options=options)
        assert env.step("<answer>\\boxed{\\frac{10}{2}}</answer>")[1] == 1.0

    def test_a_task_that_names_its_ability_keeps_it(self) -> None:
        task = arpo_env.Task(**self.SUM, ability="qa")
        env = MathEnv([task], own_search(), light_python())
        env.reset(seed=0)
        assert env.episode.task is task

    def test_they_need_a_search_that_knows_them(self) -> None:
        with pytest.raises(ValueError, match="search="):
            SearchQAEnv(self.ROWS, python=light_python())

    def test_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "tasks.jsonl"
        path.write_text("")
        with pytest.raises(ValueError, match=r"tasks\.jsonl"):
            SearchQAEnv(path, own_search(), light_python())

    def test_tools_under_other_names(self) -> None:
        with pytest.raises(ValueError, match="must be named 'search'"):
            SearchQAEnv(search=light_python(), python=light_python())
        with pytest.raises(ValueError, match="must be named 'python'"):
            SearchQAEnv(python=own_search())  # type: ignore[arg-type]


def test_with_gymnasium_and_numpy_alone() -> None:
    """The ids that promise it work where nothing else is installed; Math says what it needs."""
    program = """
import sys, warnings
for name in ("math_verify", "sympy", "tantivy", "pyarrow", "datasets", "torch", "transformers"):
    sys.modules[name] = None
import gymnasium, arpo_env
from arpo_env.sandbox import IsolationWarning
from gymnasium.utils.env_checker import check_env
warnings.simplefilter("ignore", IsolationWarning)
for name in ("GuessNumber", "Negotiation", "SearchQA", "World"):
    check_env(gymnasium.make(f"arpo/{name}-v0").unwrapped, skip_render_check=True)
try:
    gymnasium.make("arpo/Math-v0").reset(seed=0)
except ImportError as error:
    print("arpo[math]" in str(error))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
