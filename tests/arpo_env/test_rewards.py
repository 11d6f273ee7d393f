"""Rewards and the mathematics grader. Numbers are worked by hand in the comments."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from arpo_env import math_grading
from arpo_env._workers import WorkerDied, WorkerLate, WorkerPool
from arpo_env.core import Episode, ExecutedCall
from arpo_env.formats import ParsedTurn, Tags
from arpo_env.math_grading import GraderPool, clean, default_pool, hostile, math_equal
from arpo_env.rewards import (
    Accuracy,
    ExactMatch,
    Format,
    FunctionReward,
    HierarchicalReward,
    MathEquality,
    Reward,
    Score,
    TokenF1,
    WeightedSum,
    as_reward,
    check_task,
    exact_match,
    normalize_answer,
    token_f1,
)
from arpo_env.task import Task
from arpo_env.tools.base import ErrorKind, ToolResult, tool

QA = Task(question="Where?", answer="Paris", ability="qa")
MATH = Task(question="How much?", answer=r"\frac{1}{2}", ability="math")


def executed(name: str, error: ErrorKind | None = None) -> ExecutedCall:
    return ExecutedCall(name, {}, ToolResult("") if error is None else ToolResult.failure(error, "failed"))


def episode(answer: str | None = None, *calls: ExecutedCall, task: Task = QA, stop_reason: str = "answer", well_formed: bool = True) -> Episode:
    parsed = ParsedTurn(answer=answer, well_formed=well_formed)
    return Episode(task, turns=("text",), parsed=(parsed,), calls=calls, answer=answer, stop_reason=stop_reason)


@pytest.fixture(scope="module", autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    default_pool().close()


# --- token F1 and exact match ---------------------------------------------------------------------------------------------------------------------


def test_normalize_answer() -> None:
    assert normalize_answer("The  Eiffel-Tower, a tower!") == "eiffeltower tower"
    assert normalize_answer("A") == "a"
    assert normalize_answer("C++") == "c"
    assert normalize_answer("+ The") == "+ the"
    assert normalize_answer(" ") == ""


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("3.14 m.", "3.14 m"),
        ("-5 m", "-5 m"),
        ("(-5) m", "-5 m"),
        ("-.5 m, .5 m", "-.5 m .5 m"),
        ("-$5.20!", "-5.20"),
        ("1/2 cup", "1/2 cup"),
        ("1990-1995 / 2020", "1990-1995 2020"),
        ("1,000.50 m", "1000.50 m"),
        ("a/2 of it", "a/2 of it"),
        ("Paris.", "paris"),
        ("Jean-Paul", "jeanpaul"),
        ("COVID-19, No.5", "covid19 no5"),
        ("wait...5 - 3.", "wait5 3"),
        ("and/or", "andor"),
        ("+5 m", "5 m"),
    ],
)
def test_normalize_answer_keeps_what_makes_a_number(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("Paris, France", ["Paris"], 2 / 3),  # 1 common word; 2 * 1 / (2 + 1)
        ("the cat the cat sat", ["a cat cat ran"], 2 / 3),  # bags {cat 2, sat} and {cat 2, ran}: 2 * 2 / (3 + 3)
        ("Paris", ["London", "paris."], 1.0),
        ("Paris", [], 0.0),
        ("", ["Paris"], 0.0),
        ("Yes.", ["yes"], 1.0),
        ("yes it is", ["yes"], 0.0),  # the yes/no rule; by words it would be 1/2
        ("no", ["no one"], 0.0),
        ("noanswer", ["noanswer"], 1.0),
        ("A", ["A"], 1.0),
        ("5", ["-5"], 0.0),
        ("3.14", ["314"], 0.0),
        ("1/2", ["12"], 0.0),
        ("1,000", ["1000"], 1.0),
        ("1/0", ["10"], 0.0),  # no number: compared as text, in which the slash stays
        ("1/0", ["1/0."], 1.0),
        ("3.14 m", ["314 m"], 0.5),  # m is common
        ("-5 degrees", ["5 degrees"], 0.5),
        ("1/2 cup", ["12 cup"], 0.5),
        ("1,000 m", ["1000 m"], 1.0),
    ],
)
def test_token_f1(prediction: str, answers: list[str], expected: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(expected, abs=1e-12)


def test_exact_match() -> None:
    assert exact_match("The Paris!", ["London", "paris"]) == 1.0
    assert exact_match("Paris, France", ["Paris"]) == 0.0
    assert exact_match("A", ["A"]) == 1.0
    assert exact_match("5", ["-5"]) == 0.0
    assert exact_match("2.50", ["2.5"]) == 1.0


# --- mathematical equality ------------------------------------------------------------------------------------------------------------------------

VERDICTS: list[tuple[str, str, bool | None]] = [
    ("5", "-5", False),
    ("3.14", "314", False),
    ("1/2", "12", False),
    ("0.5", r"\frac{1}{2}", True),
    ("A", "A", True),
    ("(A)", r"\text{(A)}", True),
    ("B", "A", False),
    ("x^2", "x2", False),
    ("x**2", "x^2", True),
    ("(1,2)", "12", False),
    ("[1,3]", "(1,3)", False),
    ("[1,3]", "[1,3)", False),
    ("2,3", r"\{3,2\}", True),
    (r"10\%", "10", True),  # the sign may be left out,
    ("10%", "0.1", True),  # and a percentage is its value;
    ("10", "0.1", False),  # but without the sign these are two numbers
    (r"\text{Evelyn}", "Evelyn", True),
    ("Evelyn", "Carla", False),
    ("no solution", "5", False),
    (r"\frac97", r"\dfrac{9}{7}", True),
    (r"\boxed{\frac97}", r"\dfrac{9}{7}", True),
    ("1/2004!", "1/2006!", False),
    ("1/2^{99}", "1/2^{98}", False),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}", False),
    ("1-1/e", r"1-\frac{1}{\mathrm{e}}", True),
    ("n=2,3,4", "n=1,2,3", False),
    ("3*x-1*y+13=0", "3x+4y+14=0", False),
    ("x=5", "5", True),
    ("1<x<2", "(1,2)", True),
    ("6.02e23", r"6.02\times 10^{23}", True),
    ("2*sqrt(3)/3", r"\frac{2}{\sqrt3}", True),
    ("1 1/2", r"\frac32", True),
    ("1 1/2", r"\frac{11}{2}", False),
    ("1,000", "1000.", True),
    (r"5.4 \text{ cents}", "5.4", True),
    ("5 m", "5 km", None),
    ("5 apples", "5", None),
    ("0.333333", "1/3", True),
    ("0.33", "1/3", False),
    ("(37", "(37", True),
    (r"\frac{1", "0.5", None),
    ("9^9^9^9", "5", None),
    ("", "5", False),
    (" . ", "5", False),
    ("5", "", None),
]


@pytest.mark.parametrize(("prediction", "truth", "verdict"), VERDICTS)
def test_math_equal(prediction: str, truth: str, verdict: bool | None) -> None:
    assert math_equal(prediction, truth) is verdict


def test_math_equal_works_off_the_main_thread() -> None:
    found: list[bool | None] = []
    thread = threading.Thread(target=lambda: found.append(math_equal("3/7", r"\boxed{\frac37}")))
    thread.start()
    thread.join()
    assert found == [True]

    async def many() -> list[bool | None]:
        return await asyncio.gather(*(asyncio.to_thread(math_equal, f"{n}/11", f"\\frac{{{2 * n}}}{{22}}") for n in range(1, 9)))

    assert asyncio.run(many()) == [True] * 8


HOSTILE = [
    *("9^{9^{9}}", "9^9^9", "(((10!)!)!)!", "123456!", "2^{99999}", r"\int_0^1 x", r"\sum_{k} k", "{" * 5000, "(" * 13 + "1" + ")" * 13),
    *(",".join("a" * 70), "9" * 100_000, "." * 100_000, "$1$ " * 20_000, "\\" * 100_000, "\\text{" * 20_000, "1e" * 50_000, " " * 100_000),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: str(text)[:12])
def test_hostile_answers_never_reach_a_worker(text: str) -> None:
    before = default_pool().counts
    assert math_equal(text, "5") is not True
    after = default_pool().counts
    assert {what: after[what] - before[what] for what in ("graded", "unreadable", "timeouts", "died")} == dict.fromkeys(
        ("graded", "unreadable", "timeouts", "died"), 0
    )
    assert hostile(clean(text)) or not clean(text)


@pytest.mark.parametrize("text", ["x^2y^2", "x^{2}+y^{2}", "10!", r"\frac{1}{2004!}", r"\sqrt{\frac{1}{2}}", "2^{1000}", r"\sin^2 x"])
def test_ordinary_answers_are_not_hostile(text: str) -> None:
    assert not hostile(text)


def test_a_late_worker_is_killed_and_counted_and_the_next_pair_is_graded() -> None:
    pool = GraderPool(size=1, deadline=60.0)
    assert pool.grade("1/2", "0.5") is True
    (first,) = pool.workers._all
    pool.deadline = 0.1
    with pytest.raises(WorkerLate):
        pool.grade("x^{9999}-1=(x-1)^{9999}", "5")  # sympy expands it for minutes
    assert first.process.returncode is not None
    pool.deadline = 60.0
    assert pool.grade("2+3", "5") is True
    (second,) = pool.workers._all
    assert second.process.pid != first.process.pid
    second.process.kill()
    second.process.wait()
    assert pool.grade("2+4", "5") is False  # a worker that died while idle costs no pair
    assert pool.counts == {"graded": 3, "unreadable": 0, "refused": 0, "timeouts": 1, "died": 0}
    (third,) = pool.workers._all
    pool.close()
    assert third.process.returncode is not None and not pool.workers._all
    pool.close()


def test_running_out_of_time_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make an answer ungradable for the rest of the run."""
    pool = GraderPool(size=1, deadline=0.0001)
    monkeypatch.setattr(math_grading, "default_pool", lambda: pool)
    assert math_equal("17/34", r"\frac{1}{2}") is None
    assert pool.counts["timeouts"] == 1
    pool.deadline = 60.0
    assert math_equal("17/34", r"\frac{1}{2}") is True
    workers, pool.workers = pool.workers, mute_workers()
    assert math_equal("17/35", r"\frac{1}{2}") is None
    pool.workers = workers
    assert math_equal("17/35", r"\frac{1}{2}") is False
    assert math_equal(r"\frac{17", "0.5") is math_equal(r"\frac{17", "0.5") is None
    # Remembered: a verdict, and that a text is unreadable.
    assert math_equal("17/34", r"\frac{1}{2}") is True
    assert pool.counts == {"graded": 2, "unreadable": 1, "refused": 0, "timeouts": 1, "died": 1}
    pool.close()


def mute_workers() -> WorkerPool:
    """Processes in the workers' place that end as soon as they are asked."""
    return WorkerPool([sys.executable, "-c", "print('{}', flush=True); input()"], size=1, start_deadline=60.0)


def test_a_worker_that_dies_of_a_pair_is_counted_and_let_go() -> None:
    pool = GraderPool(size=1, deadline=60.0)
    pool.workers = mute_workers()
    with pytest.raises(WorkerDied):
        pool.grade("1", "1")
    assert pool.counts["died"] == 1 and not pool.workers._all


def test_a_forked_child_has_its_own_workers() -> None:
    program = """
        import os
        from arpo_env.math_grading import default_pool, math_equal
        assert math_equal("0.25", "1/4") is True
        (worker,) = default_pool().workers._all
        child = os.fork()
        if child == 0:
            assert math_equal("0.75", "3/4") is True
            (own,) = default_pool().workers._all
            os._exit(0 if own.process.pid != worker.process.pid else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert math_equal("0.375", "3/8") is True and default_pool().workers._all == {worker}
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True, timeout=100)


def test_no_worker_outlives_the_program_and_no_main_guard_is_needed() -> None:
    program = """
        from arpo_env.math_grading import default_pool, math_equal
        assert math_equal("0.25", "1/4") is True
        print(*(worker.process.pid for worker in default_pool().workers._all))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (pid,) = map(int, done.stdout.split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_pool_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="size must be at least 1"):
        GraderPool(size=0)
    with pytest.raises(ValueError, match="deadline must be positive"):
        GraderPool(deadline=0.0)


def test_without_math_verify_mathematics_stops_before_the_first_turn_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'arpo\[math\]'"):
        MathEquality()
    for reward in (Accuracy(), HierarchicalReward(), WeightedSum(((1.0, Accuracy()), (1.0, Format())))):
        check_task(reward, QA)
        with pytest.raises(ImportError, match=r"pip install 'arpo\[math\]'"):
            check_task(reward, MATH)
    assert HierarchicalReward()(QA, episode("Paris")).value == 1.0


# --- leaves ---------------------------------------------------------------------------------------------------------------------------------------


def test_accuracy_picks_the_grader_by_ability() -> None:
    assert Accuracy()(QA, episode("Paris, France")).value == pytest.approx(2 / 3)
    assert Accuracy()(Task(question="", answer=("London", "Paris")), episode("paris")) == Score(1.0, {"accuracy": 1.0})
    assert Accuracy()(MATH, episode("0.5")) == Score(1.0, {"accuracy": 1.0})
    assert Accuracy()(MATH, episode("12")) == Score(0.0, {"accuracy": 0.0})
    with pytest.raises(ValueError, match="ability must be 'math', 'qa' or None, got 'Math'"):
        Accuracy()(Task(question="", answer="1", ability="Math"), episode("1"))


@pytest.mark.parametrize("reward", [Accuracy(), TokenF1(), MathEquality(), ExactMatch()])
def test_no_answer_is_zero_and_no_truth_is_unscored(reward: Reward) -> None:
    (part,) = reward.parts
    assert reward(MATH, episode(None, stop_reason="max_turns")) == Score(0.0, {part: 0.0})
    for answer in (None, (), "", ("", " ")):
        assert reward(Task(question="", answer=answer, ability="math"), episode("5")) == Score(None)


def test_an_ungradable_answer_is_unscored_not_zero() -> None:
    assert Accuracy()(MATH, episode("9^9^9^9")) == Score(None)
    either = Task(question="", answer=("5", "9^9^9^9"), ability="math")
    assert MathEquality()(either, episode("5")).value == 1.0
    assert MathEquality()(either, episode("6")).value is None  # not 5; the other cannot be told


def test_format_needs_good_turns_and_an_answer() -> None:
    assert Format()(QA, episode("Paris")) == Score(1.0, {"format": 1.0})
    assert Format()(QA, episode("Paris", well_formed=False)).value == 0.0
    assert Format()(QA, episode(None, stop_reason="max_turns")).value == 0.0
    assert Format()(QA, Episode(QA)).value == 0.0


@tool
def search(query: str) -> str:
    """Search."""
    return query


def test_format_is_judged_on_the_policys_own_text() -> None:
    """Tags inside a tool's text neither spoil the format nor pay a bonus; one answer is enough although the prompt shows another."""
    texts = ("<think>t</think><search>q</search>", "<think>t</think><answer>Paris</answer>")
    parsed = tuple(Tags().parse(text, {"search": search}) for text in texts)
    observation = "<result> </result></search><python>x</python><answer>no</answer>"
    done = Episode(QA, texts, parsed, (observation,), (executed("search"),), parsed[-1].answer, "answer")
    assert Format()(QA, done).value == 1.0
    assert HierarchicalReward()(QA, done) == Score(1.0, {"accuracy": 1.0, "format": 1.0, "tool_bonus": 0.0})


# --- compositions ---------------------------------------------------------------------------------------------------------------------------------

SEARCHED, RAN = executed("search"), executed("python", "exception")


@pytest.mark.parametrize(
    ("done", "value", "parts"),
    [
        (episode("Paris", SEARCHED, RAN, well_formed=False), -1.0, (1.0, 0.0, 0.0)),
        (episode(None, SEARCHED, RAN, stop_reason="max_turns"), -1.0, (0.0, 0.0, 0.0)),
        (episode("London", SEARCHED, RAN), 0.0, (0.0, 1.0, 0.0)),
        (episode("Paris"), 1.0, (1.0, 1.0, 0.0)),
        (episode("Paris", SEARCHED, SEARCHED), 1.0, (1.0, 1.0, 0.0)),
        (episode("Paris", SEARCHED, RAN), 1.1, (1.0, 1.0, 0.1)),
        (episode("Paris", SEARCHED, executed("python", "unavailable")), 1.0, (1.0, 1.0, 0.0)),
        (episode("Paris Texas", SEARCHED, RAN), 2 / 3 + 0.1, (2 / 3, 1.0, 0.1)),
    ],
)
def test_hierarchical_reward(done: Episode, value: float, parts: tuple[float, float, float]) -> None:
    score = HierarchicalReward()(QA, done)
    assert score.value == pytest.approx(value, abs=1e-12)
    assert tuple(score.parts) == HierarchicalReward().parts == ("accuracy", "format", "tool_bonus")
    assert tuple(score.parts.values()) == pytest.approx(parts, abs=1e-12)


def test_hierarchical_reward_options() -> None:
    both = episode("Paris", SEARCHED, RAN)
    assert HierarchicalReward(bonus=0.5, bonus_tools=("search",))(QA, episode("Paris", SEARCHED)).value == 1.5
    assert HierarchicalReward(bonus=-0.5)(QA, both).value == 1.0  # max(acc + r_M, acc)
    assert HierarchicalReward(accuracy=ExactMatch())(QA, episode("Paris Texas", SEARCHED, RAN)).value == 0.0
    for wrong in ((), "search"):
        with pytest.raises(ValueError, match="bonus_tools must be a tuple of at least one tool name"):
            HierarchicalReward(bonus_tools=wrong)  # type: ignore[arg-type]


def test_hierarchical_reward_unscored_accuracy() -> None:
    assert HierarchicalReward()(MATH, episode("9^9^9^9")) == Score(None, {"format": 1.0, "tool_bonus": 0.0})
    assert HierarchicalReward()(MATH, episode("9^9^9^9", well_formed=False)).value == -1.0  # whatever the accuracy


def length(task: Task, done: Episode) -> float:
    return len(done.turns)


def test_weighted_sum() -> None:
    reward = WeightedSum(((0.9, TokenF1()), (0.1, Format()), (-0.01, as_reward(length))))
    assert reward.parts == ("accuracy", "format", "length")
    score = reward(QA, episode("Paris, France"))
    assert score.value == pytest.approx(0.9 * 2 / 3 + 0.1 - 0.01, abs=1e-12)
    assert score.parts == {"accuracy": pytest.approx(2 / 3), "format": 1.0, "length": 1.0}
    unscored = reward(Task(question=""), episode("Paris"))
    assert unscored == Score(None, {"format": 1.0, "length": 1.0})


def test_weighted_sum_checks_its_terms() -> None:
    with pytest.raises(TypeError, match="a term must be"):
        WeightedSum(((1.0, length),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a term must be"):
        WeightedSum(((1.0, Format),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a term must be"):
        WeightedSum(((float("nan"), Format()),))
    with pytest.raises(ValueError, match="at least one term"):
        WeightedSum(())
    with pytest.raises(ValueError, match=r"different names, got \('accuracy', 'accuracy'\)"):
        WeightedSum(((1.0, TokenF1()), (1.0, Accuracy())))


def test_as_reward() -> None:
    inner = ExactMatch()
    assert as_reward(inner) is inner
    wrapped = as_reward(length)
    assert isinstance(wrapped, FunctionReward) and wrapped.parts == ("length",)
    assert wrapped(QA, episode("x")) == Score(1.0, {"length": 1.0})
    assert as_reward(lambda task, done: None)(QA, episode("x")) == Score(None)
    for wrong in (ExactMatch, "exact_match", 0.5):
        with pytest.raises(TypeError, match="expected a reward object or a function"):
            as_reward(wrong)  # type: ignore[arg-type]
    for value in ("1", float("nan")):
        with pytest.raises(TypeError, match="must return a finite number or None"):
            as_reward(lambda task, done, value=value: value)(QA, episode("x"))


def test_rewards_are_values() -> None:
    assert HierarchicalReward() == HierarchicalReward() and hash(Accuracy()) == hash(Accuracy())
    assert all(isinstance(reward, Reward) for reward in (Accuracy(), ExactMatch(), Format(), HierarchicalReward(), WeightedSum(((1.0, Format()),))))
