"""Tests of Task and TaskSet: what is read from which layout, what is repaired, what is reported."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from arpo_env.latex_repair import repair_latex
from arpo_env.task import Task, TaskSet, TaskSource
from arpo_env.task_report import RowProblem

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
public_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not beside the repository")


def numbered(n: int) -> TaskSet:
    return TaskSet(Task(question=f"q{i}", answer=str(i), id=str(i), ability="qa") for i in range(n))


def ids(tasks: TaskSet) -> list[str]:
    return [task.id for task in tasks]


def chat_row(user: str, truth: str, *, system: str | None = None, index: int = 0, ability: str | None = "math", style: str | None = "rule") -> dict[str, Any]:
    """A row in the layout of the public ARPO training set."""
    prompt = [{"role": "user", "content": user}]
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
    reward_model = {"ground_truth": truth} | ({"style": style} if style else {})
    extra_info = {"index": index, "question": user, "split": "train"}
    return {"data_source": "made_up", "prompt": prompt, "ability": ability, "reward_model": reward_model, "extra_info": extra_info, "metadata": None}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


# -- Task -----------------------------------------------------------------------------------------------------------------


def test_a_task_is_hashable_and_survives_copying_and_pickling() -> None:
    task = Task(question="q", answer=("a", "b"), metadata=MappingProxyType({"level": 3}))
    assert copy.deepcopy(task) is task
    twin = pickle.loads(pickle.dumps(task))
    assert twin == task
    assert hash(twin) == hash(task)
    with pytest.raises(TypeError):
        twin.metadata["level"] = 4


# -- a sequence -----------------------------------------------------------------------------------------------------------


def test_a_task_set_is_a_sequence_of_tasks() -> None:
    tasks = numbered(5)
    assert isinstance(tasks, Sequence)
    assert len(tasks) == 5
    assert (tasks[0].question, tasks[-1].question) == ("q0", "q4")
    assert isinstance(tasks[1:3], TaskSet)
    assert ids(tasks[1:3]) == ["1", "2"]
    assert ids(tasks[::-2]) == ["4", "2", "0"]
    assert ids(tasks + tasks[:1]) == ["0", "1", "2", "3", "4", "0"]
    assert tasks[2] in tasks
    assert len(TaskSet([])) == 0
    with pytest.raises(IndexError, match=r"must be in \[-5, 4\], got 5"):
        tasks[5]
    with pytest.raises(TypeError):
        tasks[0] = tasks[1]  # type: ignore[index]
    with pytest.raises(TypeError):
        tasks + list(tasks)  # type: ignore[operator]


def test_a_task_set_takes_tasks_only() -> None:
    with pytest.raises(TypeError, match=r"tasks\[1\] must be a Task, got dict; TaskSet.from_rows"):
        TaskSet([Task(question="q"), {"question": "q"}])  # type: ignore[list-item]


def test_copies_share_the_tasks_and_pickles_hold_equal_ones() -> None:
    tasks = numbered(3)
    assert copy.deepcopy(tasks) is tasks
    assert copy.copy(tasks) is tasks
    assert list(pickle.loads(pickle.dumps(tasks))) == list(tasks)


def test_sample_uses_one_draw_of_the_generator_and_reaches_every_task() -> None:
    source: TaskSource = numbered(4)
    assert [source.sample(np.random.default_rng(7)) for _ in range(2)] == [source[int(np.random.default_rng(7).integers(4))]] * 2
    rng, twin = np.random.default_rng(0), np.random.default_rng(0)
    assert {source.sample(rng).id for _ in range(60)} == {"0", "1", "2", "3"}
    for _ in range(60):
        twin.integers(4)
    assert rng.bit_generator.state == twin.bit_generator.state
    with pytest.raises(ValueError, match="without tasks"):
        TaskSet([]).sample(rng)


def test_shuffle_is_a_permutation_that_the_seed_decides() -> None:
    tasks = numbered(20)
    assert ids(tasks.shuffle(1)) == ids(tasks.shuffle(1))
    assert ids(tasks.shuffle(1)) != ids(tasks.shuffle(2))
    assert ids(tasks.shuffle(1)) != ids(tasks)
    assert sorted(ids(tasks.shuffle(1))) == sorted(ids(tasks))


def test_filter() -> None:
    assert ids(numbered(6).filter(lambda task: int(task.id) % 2)) == ["1", "3", "5"]


@pytest.mark.parametrize("first", [3, 0.3, np.int64(3)])
def test_split_gives_two_parts_that_share_nothing_and_keep_the_order(first: float) -> None:
    tasks = numbered(10)
    some, rest = tasks.split(first, seed=5)
    assert (len(some), len(rest)) == (3, 7)
    assert sorted(ids(some) + ids(rest)) == sorted(ids(tasks))
    assert ids(some) == sorted(ids(some))
    assert ids(rest) == sorted(ids(rest))
    assert ids(some) == ids(tasks.split(3, seed=5)[0])
    assert {tuple(ids(tasks.split(3, seed=s)[0])) for s in range(5)} != {tuple(ids(some))}


@pytest.mark.parametrize(("first", "message"), [(0, "1 to 9 of 10 tasks, got 0"), (10, "got 10"), (1.0, r"in \(0, 1\), got 1.0"), (0.01, "got 0")])
def test_split_refuses_an_empty_part(first: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbered(10).split(first, seed=0)


# -- rows -----------------------------------------------------------------------------------------------------------------


def test_a_chat_row_gives_question_system_prompt_answer_and_metadata() -> None:
    (task,) = TaskSet.from_rows([chat_row("What is 1+1?", "2", system="Think first.", index=17)])
    assert task == Task(
        question="What is 1+1?",
        answer="2",
        id="rows/0",
        system_prompt="Think first.",
        ability="math",
        data_source="made_up",
        metadata={"reward_model.style": "rule", "extra_info.index": 17, "extra_info.split": "train"},
    )


@pytest.mark.parametrize("name", ["question", "Question", "problem", "prompt", "query"])
@pytest.mark.parametrize("answer_name", ["answer", "Final answer", "golden_answers", "ground_truth"])
def test_plain_rows_under_the_usual_names(name: str, answer_name: str) -> None:
    (task,) = TaskSet.from_rows([{name: "Who?", answer_name: "Ada"}])
    assert (task.question, task.answer, task.metadata) == ("Who?", "Ada", {})


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("Ada", "Ada"),
        (70, "70"),
        (0, "0"),
        (2.5, "2.5"),
        (["Ada", "Lovelace"], ("Ada", "Lovelace")),
        (["Ada"], ("Ada",)),
        (("Ada", 3), ("Ada", "3")),
        (["Ada", "", None], ("Ada",)),
        (np.array(["Ada", "Lovelace"]), ("Ada", "Lovelace")),
        (np.int64(70), "70"),
        ("16-3-4=<<16-3-4=9>>9 eggs.\n#### 9", "9"),
        ("so 114,200\n#### 114,200", "114200"),
        ("it falls\n#### -$1,250.50 ", "-1250.50"),
        ("#### The heading\ntext", "#### The heading\ntext"),
        ("", None),
        (" ", None),
        ([], None),
        ([""], None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_answers_become_text_or_a_tuple_of_texts(value: Any, answer: Any) -> None:
    tasks = TaskSet.from_rows([{"question": "Who?", "answer": value, "ability": "qa"}])
    assert tasks[0].answer == answer
    assert type(tasks[0].answer) is type(answer)
    noted = tasks.report.notes == ("1 without an answer, which cannot be scored: rows/0",)
    assert noted == (answer is None)


def test_list_of_truths_in_the_layout_of_search_r1() -> None:
    user = {"role": "user", "content": "Answer the given question. Question: Who?"}
    row = {"id": "test_3", "question": "Who?", "prompt": [user], "ability": "fact-reasoning", "reward_model": {"ground_truth": {"target": ["Ada", "A. L."]}}}
    (task,) = TaskSet.from_rows([row])
    assert (task.id, task.question, task.answer, task.system_prompt) == ("test_3", "Who?", ("Ada", "A. L."), None)


def test_ability_of_the_row_comes_before_the_default_and_its_case_does_not_matter() -> None:
    rows = [{"question": "a", "answer": "1", "ability": "MATH"}, {"question": "b", "answer": "2"}]
    assert [task.ability for task in TaskSet.from_rows(rows)] == ["math", None]
    assert [task.ability for task in TaskSet.from_rows(rows, ability="qa")] == ["math", "qa"]
    assert TaskSet.from_rows(rows).report.notes == ("1 name no ability: graded as the environment says, else as qa; ability= says otherwise",)


def test_the_last_user_message_is_the_question_and_dropped_turns_are_noted() -> None:
    turns = [("system", "S"), ("user", "first"), ("assistant", "no"), ("user", "second")]
    row = {"prompt": [{"role": role, "content": content} for role, content in turns], "answer": "1", "ability": "qa"}
    tasks = TaskSet.from_rows([row])
    assert (tasks[0].question, tasks[0].system_prompt, tasks[0].metadata["dropped_turns"]) == ("second", "S", 2)
    assert tasks.report.notes == ("1 chat prompts have other turns, which were dropped: the last user message is the question",)


def test_tasks_among_the_rows_are_taken_as_they_are() -> None:
    task = Task(question="\x0crac", answer="1", id="mine")
    assert list(TaskSet.from_rows([{"question": "q", "answer": "2"}, task]))[1] is task


def test_metadata_keeps_small_scalars_only() -> None:
    row = {"question": "q", "answer": "1", "level": 5, "hard": True, "score": 0.5, "solution": "x" * 257, "topic": "x" * 256, "image": None, "tags": ["a"]}
    (task,) = TaskSet.from_rows([row])
    assert task.metadata == {"level": 5, "hard": True, "score": 0.5, "topic": "x" * 256}


@pytest.mark.parametrize("name", ["id", "task_id", "unique_id", "_id"])
def test_the_rows_own_id(name: str) -> None:
    tasks = TaskSet.from_rows([{"question": "q", "answer": "1", name: 7}, {"question": "q2", "answer": "1", name: None}])
    assert ids(tasks) == ["7", "rows/1"]


def test_columns_of_the_users_own_names() -> None:
    row = {"text": "Who?", "label": {"value": "Ada", "kind": "person"}, "key": "k1", "question": "not this one"}
    (task,) = TaskSet.from_rows([row], columns={"question": "text", "answer": "label.value", "id": "key"})
    assert (task.question, task.answer, task.id) == ("Who?", "Ada", "k1")
    assert task.metadata == {"label.kind": "person", "question": "not this one"}
    with pytest.raises(ValueError, match=r"expected keys among question, answer, id, .*, got truth"):
        TaskSet.from_rows([row], columns={"truth": "label"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "1", "text": "q"}, r"no column for the question: looked for question, .*; found answer, text$"),
        ({"question": "q", "label": {"value": 1}}, r"no column for the answer: looked for .*; found question, label\.value$"),
        ({"question": " ", "answer": "1"}, "question in 'question' is empty"),
        ({"question": 5, "answer": "1"}, "expected text or chat messages, got int 5"),
        ({"prompt": [{"role": "assistant", "content": "hi"}], "answer": "1"}, "without a user message: roles assistant"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "user message: expected text, got NoneType"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}, "user message: expected text, got list"),
        ({"question": "q", "answer": True}, "expected text, a number or a list of them, got bool True"),
        ({"question": "q", "answer": {"value": "Ada", "aliases": []}}, "got a mapping with value, aliases"),
        ({"question": "q", "answer": [["Ada"]]}, "got list"),
        ({"question": "half \ud83d", "answer": "1"}, r"half of a surrogate pair \(U\+D83D\)"),
        (["q", "1"], "expected a mapping of column names to values, got list"),
    ],
)
def test_a_row_that_does_not_fit_is_reported_and_the_rest_load(row: Any, reason: str) -> None:
    good = {"question": "q", "answer": "1"}
    tasks = TaskSet.from_rows([good, row, good])
    assert ids(tasks) == ["rows/0", "rows/2"]
    (problem,) = tasks.report.problems
    assert (problem.file, problem.row) == ("rows", 1)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(problem.reason)
    with pytest.raises(ValueError, match="rows: none of its 1 rows"):
        TaskSet.from_rows([row])


def test_no_row_that_fits_is_an_error_with_the_first_reasons_once_each() -> None:
    with pytest.raises(ValueError) as caught:
        TaskSet.from_rows([{"text": "q"}] * 50 + [{"question": "", "answer": "1"}])
    message = str(caught.value)
    assert message.startswith("rows: none of its 51 rows could be read as a task\n  row 0: no column for the question")
    assert "row 50: the question in 'question' is empty" in message
    assert "row 1:" not in message
    assert 'columns={"question": ..., "answer": ...}' in message
    with pytest.raises(ValueError, match="rows: expected at least one row, got none"):
        TaskSet.from_rows([])


# -- the report -----------------------------------------------------------------------------------------------------------


def test_repeated_questions_and_ids_are_noted_and_kept() -> None:
    pairs = [("a", "1"), ("b", "2"), ("a", "1"), ("b", "3"), ("c", ["x", "y"]), ("c", ["y", "x"]), ("d", "4"), ("d", "")]
    tasks = TaskSet.from_rows([{"question": q, "answer": a, "ability": "qa"} for q, a in pairs])
    assert len(tasks) == 8
    assert tasks.report.notes == (
        "1 without an answer, which cannot be scored: rows/7",
        "4 questions occur more than once: rows/0 = rows/2, rows/1 = rows/3, rows/4 = rows/5, ...",
        "1 of these have answers that differ as written: rows/1 = rows/3",  # the order of a list says nothing, nor does a missing answer
    )
    assert (tasks + tasks).report.notes[-1] == "8 ids occur more than once: rows/0, rows/1, rows/2, ..."


def test_the_report_is_readable_in_a_few_lines() -> None:
    rows: list[Any] = [chat_row("\x0crac12 or \x0c", "1", system="\x08oxed{}"), *[{"question": f"q{i}"} for i in range(7)]]
    lines = str(TaskSet.from_rows(rows).report).splitlines()
    assert lines[:3] == [
        "8 rows read, 1 loaded, 7 left out",
        r"LaTeX repaired in 1 rows: \frac 1x, \boxed 1x",
        "control characters left as they are: 0x0C 1x",
    ]
    assert lines[3].startswith("left out: rows, row 1: no column for the answer")
    assert lines[-1] == "left out: 2 more (see .problems)"
    assert len(lines) == 9


def test_parts_keep_the_report_and_sums_add_it_once() -> None:
    one = TaskSet.from_rows([{"question": "\x08oxed", "answer": "1"}, {"question": "q"}])
    two = TaskSet.from_rows([{"question": "\x08ar", "answer": "1"}])
    assert one[:1].report is one.report
    assert one.filter(bool).report is one.report
    assert (one[:1] + one[1:]).report == one.report
    both = (one + two).report
    assert (both.rows, both.loaded, both.repaired_rows) == (3, 2, 2)
    assert both.repaired == {"\\boxed": 1, "\\bar": 1}
    assert len(both.problems) == 1
    assert (numbered(3).report.rows, numbered(3).report.loaded, str(numbered(3).report)) == (3, 3, "3 rows read, 3 loaded, 0 left out")


# -- repair ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mangled", "text"),
    [
        ("\x08oxed{answer here}", r"\boxed{answer here}"),
        ("\x0crac{m}{n}", r"\frac{m}{n}"),
        ("\x0crac12", r"\frac12"),
        ("\x0brac 2\x07lpha\x08eta", "\x0brac 2" + r"\alpha\beta"),
        ("\x0barepsilon_0 \x0bec v", r"\varepsilon_0 \vec v"),
        ("p \x0bee q", r"p \vee q"),
        ("x\x0bee y", r"x\vee y"),
        ("\theta + 2 \times 3", r"\theta + 2 \times 3"),
        (r"\left( x \right)".replace(r"\r", "\r"), r"\left( x \right)"),
        ("\nabla f", r"\nabla f"),
    ],
)
def test_mangled_latex_is_repaired(mangled: str, text: str) -> None:
    assert repair_latex(mangled).text == text


@pytest.mark.parametrize(
    "text",
    [
        "the in\x0cfinite series",  # left by a ligature
        "di\x0bfference",
        "co\x0bee",  # VERTICAL TAB as the ligature ff
        "\x0cracture",  # "fracture" is no command, though "frac" is
        "page\x0cFirst",
        "\x08oxedx",
        "column\tan example\to be\tau",  # words that follow a TAB
        "line\ne\nu\not\neg\neq\nmid\nleft",
        "old Mac\rho\rangle\rm",
        "windows\r\nright\r\nat",
        "\tfinal\r\n\ttext: ends",
        "\x08",
        "",
    ],
)
def test_text_that_only_looks_like_it_is_left_alone(text: str) -> None:
    repaired = repair_latex(text)
    assert repaired.text == text
    assert repaired.commands == ()


def test_what_is_repaired_and_what_is_left_is_counted() -> None:
    repaired = repair_latex("\x08oxed \x08oxed \x0crac \x0cx \x00 \x7f \x85 \t\r\n")
    assert repaired.commands == ("\\boxed", "\\boxed", "\\frac")
    assert repaired.left == ("0x0C", "0x00", "0x7F", "0x85")


def test_repair_covers_answers_and_system_prompts_and_can_be_turned_off() -> None:
    rows = [chat_row("\x0crac", "\x0crac{1}{2}", system="\x08oxed{}"), chat_row("plain", "1", system="\x08oxed{}"), chat_row("none", "1")]
    tasks = TaskSet.from_rows(rows)
    assert (tasks[0].question, tasks[0].answer, tasks[0].system_prompt) == (r"\frac", r"\frac{1}{2}", r"\boxed{}")
    assert (tasks.report.repaired_rows, tasks.report.repaired, tasks.report.left) == (2, {"\\frac": 2, "\\boxed": 2}, {})
    raw = TaskSet.from_rows(rows, repair=False)
    assert (raw[0].question, raw[0].answer, raw[0].system_prompt) == ("\x0crac", "\x0crac{1}{2}", "\x08oxed{}")
    assert (raw.report.repaired_rows, raw.report.repaired, raw.report.left) == (0, {}, {"0x0C": 2, "0x08": 2})


# -- files ----------------------------------------------------------------------------------------------------------------


def test_json_lines_bad_lines_are_reported_by_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    good = b'{"problem": "q", "answer": 70}\n'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + b'{"problem": "\\alpha"}\n' + b'{"problem": "\xff"}\n' + b"3\n" + good.strip())
    tasks = TaskSet.from_jsonl(path)
    assert [(task.id, task.answer) for task in tasks] == [("mine/0", "70"), ("mine/4", "70")]
    assert [(problem.file, problem.row) for problem in tasks.report.problems] == [(str(path), 1), (str(path), 2), (str(path), 3)]
    reasons = [problem.reason for problem in tasks.report.problems]
    assert reasons[0].startswith("line 3 is not JSON: Invalid \\escape")
    assert reasons[1].startswith("line 4 is not JSON: 'utf-8' codec can't decode")
    assert reasons[2] == "expected a mapping of column names to values, got int 3"
    assert str(tasks.report.problems[0]).startswith(f"{path}, row 1: line 3 is not JSON")


def test_latex_mangled_by_json_escapes_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(r'{"question": "Is \frac{1}{2} \times \theta in \boxed{}?", "answer": "\frac{1}{2}"}', encoding="utf-8")
    (task,) = TaskSet.load(path)
    assert (task.question, task.answer) == (r"Is \frac{1}{2} \times \theta in \boxed{}?", r"\frac{1}{2}")


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: expected at least one row, got none"):
        TaskSet.load(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        TaskSet.load(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match="at least one path, got none"):
        TaskSet.from_jsonl([])


def test_a_parquet_file_without_rows_or_that_is_none(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "some.parquet", [{"question": "q", "answer": "1"}])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"question": pyarrow.array([], "string")}), path)
    with pytest.raises(ValueError, match=r"some\.parquet: expected at least one row, got none"):
        TaskSet.from_parquet(path)
    path.write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"some\.parquet: expected a Parquet file: "):
        TaskSet.from_parquet(path)


def test_parquet_files_of_different_column_types_load_together(tmp_path: Path) -> None:
    """pyarrow itself refuses to concatenate these two (ability: string and null; reward_model with and without style)."""
    one = write_parquet(tmp_path / "one.parquet", [chat_row(q, a, system="Use \x08oxed{}.") for q, a in (("a", "1"), ("b", "2"))])
    two = write_parquet(tmp_path / "two.parquet", [chat_row("c", "3", ability=None, style=None)])
    together = TaskSet.from_parquet([one, two])
    assert [(task.id, task.question, task.answer, task.ability) for task in together] == [
        ("one/0", "a", "1", "math"),
        ("one/1", "b", "2", "math"),
        ("two/0", "c", "3", None),
    ]
    assert together[0].system_prompt is together[1].system_prompt  # one text, kept once
    assert list(TaskSet.load(one) + TaskSet.load(str(two))) == list(together)


def test_a_raw_parquet_of_gsm8k_loads_and_one_of_unknown_columns_says_what_was_looked_for(tmp_path: Path) -> None:
    raw = write_parquet(tmp_path / "gsm8k.parquet", [{"question": "q", "answer": "3+4=7\n#### 7"}])
    assert TaskSet.from_parquet(raw)[0].answer == "7"
    unknown = write_parquet(tmp_path / "mine.parquet", [{"text": "q", "label": {"value": "7"}}] * 2)
    expected = r"mine\.parquet: none of its 2 rows .*\n  row 0: no column for the question: looked for question, .*; found text, label\.value\n  name your own"
    with pytest.raises(ValueError, match=expected):
        TaskSet.from_parquet(unknown)
    assert TaskSet.from_parquet(unknown, columns={"question": "text", "answer": "label.value"})[0].answer == "7"


def test_a_wrong_file_among_right_ones_is_an_error(tmp_path: Path) -> None:
    right, wrong = write_jsonl(tmp_path / "right.jsonl", [{"question": "q", "answer": "1"}]), write_jsonl(tmp_path / "wrong.jsonl", [{"a": 1}])
    with pytest.raises(ValueError, match=r"wrong\.jsonl: none of its 1 rows"):
        TaskSet.from_jsonl([right, wrong])


def test_load_refuses_other_files_and_a_split_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a \.jsonl, \.ndjson or \.parquet file or the name of a dataset, got data/train\.csv"):
        TaskSet.load("data/train.csv")
    with pytest.raises(ValueError, match=r"expected a \.jsonl"):
        TaskSet.load(tmp_path)
    with pytest.raises(ValueError, match="split='test' belongs to a dataset name"):
        TaskSet.load("a.parquet", split="test")


@pytest.mark.parametrize("module", ["pyarrow", "datasets"])
def test_a_missing_package_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (module, f"{module}.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ImportError, match=rf"needs {module}: pip install 'arpo\[data\]'"):
        TaskSet.load(tmp_path / "a.parquet" if module == "pyarrow" else "openai/gsm8k")


def test_rows_of_gaia_and_hle(tmp_path: Path) -> None:
    """Made-up rows in the columns of the gated benchmarks."""
    gaia = {"task_id": "c61d", "Question": "How many?", "Level": "2", "Final answer": "17", "file_name": "", "Annotator Metadata": {"Steps": "1. Count " * 90}}
    hle = {"id": "668", "question": "Which?", "answer": "B", "answer_type": "multipleChoice", "image": "data:image/png;base64," + "A" * 900}
    tasks = TaskSet.from_jsonl([write_jsonl(tmp_path / "gaia.jsonl", [gaia]), write_jsonl(tmp_path / "hle.jsonl", [hle])])
    assert [(task.id, task.question, task.answer, task.metadata) for task in tasks] == [
        ("c61d", "How many?", "17", {"Level": "2"}),
        ("668", "Which?", "B", {"answer_type": "multipleChoice"}),
    ]


# -- Hugging Face datasets ------------------------------------------------------------------------------------------------

ROWS = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]


def test_datasets_by_object() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    assert [(task.id, task.answer) for task in TaskSet.from_dataset(dataset)] == [("dataset/0", "1"), ("dataset/1", "2")]
    splits = datasets.DatasetDict(train=dataset, test=dataset.select([1]))
    assert ids(TaskSet.from_dataset(splits, split="test")) == ["dataset/test/0"]
    assert ids(TaskSet.from_dataset(datasets.DatasetDict(test=dataset))) == ["dataset/test/0", "dataset/test/1"]
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', got None"):
        TaskSet.from_dataset(splits)
    with pytest.raises(ValueError, match="got 'valid'"):
        TaskSet.from_dataset(splits, split="valid")
    with pytest.raises(ValueError, match="split='test' belongs to a dataset name or a DatasetDict, got a Dataset"):
        TaskSet.from_dataset(dataset, split="test")
    with pytest.raises(ValueError, match="config and revision belong to a dataset name"):
        TaskSet.from_dataset(dataset, config="main")


def test_datasets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append((path, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert ids(TaskSet.from_dataset("openai/gsm8k", config="main", split="test", revision="abc")) == ["gsm8k/test/0", "gsm8k/test/1"]
    assert ids(TaskSet.load("xbench/DeepSearch-2510", split="train")) == ["DeepSearch-2510/train/0", "DeepSearch-2510/train/1"]
    assert asked == [
        ("openai/gsm8k", {"name": "main", "split": "test", "revision": "abc"}),
        ("xbench/DeepSearch-2510", {"name": None, "split": "train", "revision": None}),
    ]


# -- the public data ------------------------------------------------------------------------------------------------------


@public_data
def test_the_public_training_set() -> None:
    tasks = TaskSet.from_parquet(DATA / "train_10k.parquet")
    report = tasks.report
    assert (len(tasks), report.rows, report.loaded, report.problems) == (10_000, 10_000, 10_000, ())
    # Two \boxed in the one system prompt of every row; 21 \frac in questions; the rest stands beside ligatures ("in\x0cfinite").
    assert (report.repaired_rows, report.repaired, report.left) == (10_000, {"\\boxed": 20_000, "\\frac": 21}, {"0x0C": 4, "0x0B": 1})
    assert [sum(task.ability == ability for task in tasks) for ability in ("math", "qa")] == [5_000, 5_000]
    assert {task.data_source for task in tasks} == {"DR_grpo_mix"}
    assert len({task.system_prompt for task in tasks}) == 1
    assert r"\[ \boxed{answer here} \]" in (tasks[0].system_prompt or "")
    assert (tasks[0].id, tasks[0].answer) == ("train_10k/0", r"3\sqrt{3} - 6")
    assert tasks[0].metadata == {"reward_model.style": "rule", "extra_info.index": 0, "extra_info.need_tools_kwargs": True, "extra_info.split": "train"}
    assert [task.id for task in tasks if task.answer is None] == ["train_10k/5274"]
    assert report.notes[0] == "1 without an answer, which cannot be scored: train_10k/5274"
    assert report.notes[1].startswith("37 questions occur more than once: train_10k/56 = train_10k/5925, ")
    assert report.notes[2].startswith("9 of these have answers that differ as written: train_10k/56 = train_10k/5925, train_10k/1353 = train_10k/7171, ")
    assert len(report.notes) == 3
    assert len(str(report).splitlines()) == 6


@public_data
def test_the_public_training_set_raw() -> None:
    tasks = TaskSet.from_parquet(DATA / "train_10k.parquet", repair=False)
    assert (tasks.report.repaired, tasks.report.left) == ({}, {"0x08": 20_000, "0x0C": 25, "0x0B": 1})
    assert "\x08oxed{answer here}" in (tasks[0].system_prompt or "")


@public_data
def test_the_public_search_and_validation_sets() -> None:
    tasks = TaskSet.from_parquet([DATA / "hard_search_1k.parquet", DATA / "valid.parquet"])
    assert (tasks.report.rows, tasks.report.loaded, tasks.report.repaired) == (1_251, 1_251, {"\\boxed": 2_502})
    assert tasks.report.notes == ("1071 name no ability: graded as the environment says, else as qa; ability= says otherwise",)
    assert (tasks[0].question, tasks[0].answer, tasks[0].ability) == ("who illustrated the original winnie the pooh books", "E. H. Shepard", None)
    assert [sum(task.data_source == name for task in tasks) for name in ("DR_simpledeepsearch0.8k", "DR_nan", "DR_grpo_mix")] == [871, 200, 180]


@public_data
@pytest.mark.parametrize(
    ("name", "rows", "first_id", "first_answer"),
    [
        ("2wiki", 200, "2wiki/0", ("the five boroughs", "City of New York", "New York", "NY City", "New York City", "NYC", "Big Apple", "New York, New York")),
        ("aime24", 30, "60", "204"),
        ("aime25", 30, "0", "70"),
        ("bamboogle", 125, "bamboogle/0", ("james madison",)),
        ("gsm8k", 1_319, "gsm8k/0", "18"),
        ("hotpotqa", 200, "hotpotqa/0", ("Frank Lowy",)),
        ("math500", 500, "math500/0", r"\left( 3, \frac{\pi}{2} \right)"),
        ("musique", 200, "musique/0", ("passes over the Rio di Palazzo",)),
        ("webwalker", 200, "webwalker/0", "资格申请截止日期为2024年10月27日\uff0c北京考点题库考试时间为2024年11月2-3日。"),
    ],
)
def test_the_evaluation_sets(name: str, rows: int, first_id: str, first_answer: Any) -> None:
    tasks = TaskSet.load(DATA / "eval" / f"{name}.jsonl", ability="qa")
    assert (len(tasks), tasks.report.rows, tasks.report.problems, tasks.report.notes) == (rows, rows, (), ())
    assert (tasks[0].id, tasks[0].answer) == (first_id, first_answer)
    assert all(task.answers for task in tasks)
    assert tasks.report.repaired == ({"\\frac": 6, "\\triangle": 1} if name == "aime25" else {})
    assert tasks.report.left == {}
    if name == "gsm8k":
        assert all(task.answer is not None and float(str(task.answer)).is_integer() for task in tasks)  # no comma, no "####"


def test_row_problem_is_one_line() -> None:
    assert str(RowProblem("a.jsonl", 3, "why")) == "a.jsonl, row 3: why"


class TestJson:
    def test_a_task_comes_back_whole(self) -> None:
        task = Task(question="Wie viele? \u2028", answer=("a", "b"), id="7", system_prompt="", ability="qa", data_source="x", metadata={"k": [1, {"z": None}]})
        for each in (task, Task(question="q"), Task(question="q", answer="a")):
            assert Task.from_json(each.to_json()) == each

    @pytest.mark.parametrize("metadata", [{"t": (1, 2)}, {1: "x"}, {"n": float("nan")}, {"o": object()}])
    def test_what_json_would_change_is_refused(self, metadata: Any) -> None:
        with pytest.raises(ValueError, match="task 't9'"):
            Task(question="q", id="t9", metadata=metadata).to_json()
