"""``fork``: for environments with and without tools, through wrappers and vectors; what is copied, what is shared, what is refused."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_fakes import (
    ROWS,
    Dice,
    Notebook,
    PickledCounter,
    PlainCounter,
    ReplayedNotebook,
    Scripted,
    Stuck,
    hermes,
    hermes_env,
    note,
    notebook_env,
    right,
    step_stuck,
)
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import HumanRendering, OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, RecordVideo, TimeLimit

import arpo_env
from arpo_env.core import ToolEnv
from arpo_env.forking import ForkableEnv, ForkError, TextSpace, fork, fork_support, layers
from arpo_env.testing import check_fork, play
from arpo_env.tools.base import Tool, ToolResult

NOTES = [note("a"), note("b"), "nonsense", note("c"), "<answer>answer 3</answer>"]


def started(env: Any, *actions: Any, seed: int = 0) -> Any:
    """``env`` after a reset and ``actions``."""
    env.reset(seed=seed)
    play(env, actions)
    return env


def wrapped(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The chain that ``gymnasium.make`` builds, and statistics around it."""
    return RecordEpisodeStatistics(TimeLimit(OrderEnforcing(PassiveEnvChecker(env)), max_episode_steps=4))


class TestSameFuture:
    """Point 1: for every sequence of actions the child returns what the parent would have returned."""

    @pytest.mark.parametrize("tool", [Notebook, ReplayedNotebook])
    @pytest.mark.parametrize("around", [lambda env: env, wrapped])
    def test_tools_with_state(self, tool: type[Tool], around: Any) -> None:
        check_fork(lambda: around(notebook_env(tool())), NOTES)

    @pytest.mark.parametrize("around", [lambda env: env, wrapped])
    def test_random_state(self, around: Any) -> None:
        check_fork(lambda: around(Dice()), ["x"] * 6)

    def test_a_plain_environment(self) -> None:
        check_fork(PlainCounter, [1, 2, 3])

    def test_other_actions_lead_apart(self) -> None:
        env = started(notebook_env(), note("a"))
        twin = fork(env)
        assert "a | b" in env.step(note("b"))[0]
        assert "a | c" in twin.step(note("c"))[0]
        assert "a | b | d" in env.step(note("d"))[0]
        assert [len(each.episode.calls) for each in (env, twin)] == [3, 2]

    def test_a_fork_taken_before_goes_on_from_there(self) -> None:
        """The parent may run to its end first: the branch point is kept in the fork."""
        env = started(notebook_env(), note("a"))
        twin = fork(env)
        play(env, [note("x"), note("y"), "<answer>z</answer>"])
        assert env.episode.stop_reason == "answer"
        assert twin.step(note("b"))[0] == "\n<result>\na | b\n</result>\n"


class TestParentUntouched:
    """Point 2: a fork draws nothing, calls nothing, counts nothing."""

    def test_no_draw_no_call(self) -> None:
        acting = Scripted("done")
        env = started(hermes_env(acting), hermes(("act", {"text": "x"})))
        generator, episode, counts = copy.deepcopy(env.np_random.bit_generator.state), env.episode, env.telemetry.snapshot()
        fork(env, 3)
        assert env.np_random.bit_generator.state == generator
        assert env.episode is episode
        assert (acting.calls, env.telemetry.snapshot()) == (["x"], counts)

    def test_the_generator_is_copied(self) -> None:
        """Point 3: equal draws in both, and neither's draws move the other."""
        env = started(Dice(), "x")
        twin = fork(env)
        assert twin.np_random is not env.np_random
        draws = [twin.np_random.integers(1_000_000) for _ in range(5)]
        assert [env.np_random.integers(1_000_000) for _ in range(5)] == draws
        assert twin.np_random_seed == env.np_random_seed == 0

    @pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox])
    def test_the_generator_is_in_the_state_of_the_fork_whenever_it_is_asked_for(self, bits: Any) -> None:
        """A fork makes its generator late; what the parent draws and spawns until then is not its business, nor that of its own forks."""
        env = notebook_env()
        env.reset(seed=0)
        env.np_random = np.random.Generator(bits(5))
        twin = env.fork()
        late = twin.fork()
        draws, child = env.np_random.random(3).tolist(), env.np_random.spawn(1)[0].random()
        for each in (late, twin):
            assert (each.np_random.random(3).tolist(), each.np_random.spawn(1)[0].random()) == (draws, child)
        assert twin.fork().np_random.random() == twin.np_random.random() != draws[0]

    @pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox])
    def test_generators_of_any_kind_go_on_alike_and_spawn_alike(self, bits: Any) -> None:
        """Gymnasium's own kind takes a shorter way than ``deepcopy``; both must copy the state, the half-used word, and the count of spawned children."""
        env = started(Dice())
        env.np_random = env.also = np.random.Generator(bits(5))  # type: ignore[attr-defined]
        env.np_random.integers(10, dtype=np.uint32)  # leaves half of a 64-bit word
        env.np_random.spawn(2)
        twin = fork(env)
        assert twin.also is twin.np_random is not env.np_random, "one generator under two names stays one"  # type: ignore[attr-defined]
        draws = [[int(g.integers(1 << 30, dtype=np.uint32)) for _ in range(3)] for g in (twin.np_random, env.np_random)]
        assert draws[0] == draws[1]
        assert twin.np_random.spawn(1)[0].random() == env.np_random.spawn(1)[0].random()

    def test_global_generators_are_left_alone(self) -> None:
        import random

        random.seed(1)
        before = random.getstate()
        fork(started(notebook_env(), note("a")))
        assert random.getstate() == before


class TestWhatIsShared:
    """Point 4: what is immutable is common to all forks, however large; the state of the episode is each fork's own."""

    def test_tasks_are_never_copied(self) -> None:
        tasks = arpo_env.TaskSet([arpo_env.Task(question=str(i), answer="a", id=str(i)) for i in range(20_000)])
        env = started(ToolEnv(tasks, [Notebook()], reward=right), note("a"))
        twin = fork(env)
        assert twin.tasks is env.tasks is tasks
        assert twin.prototypes is env.prototypes
        assert twin.telemetry is env.telemetry
        assert twin._tools["note"] is not env._tools["note"]
        assert twin._tools["note"].lines is not env._tools["note"].lines

    def test_a_spec_is_never_copied(self) -> None:
        """A spec holds the constructor's arguments: here rows, as a list that deepcopy would copy row by row."""
        rows = [{"question": str(i), "answer": "a"} for i in range(500)]
        gymnasium.register("test/Notebook-v0", entry_point=lambda tasks: ToolEnv(tasks, [Notebook()], reward=right))
        try:
            env = RecordEpisodeStatistics(TimeLimit(gymnasium.make("test/Notebook-v0", tasks=rows), 5))
        finally:
            del gymnasium.registry["test/Notebook-v0"]
        assert env.spec is not None  # reading it makes each wrapper keep a copy of it
        twin = fork(started(env, note("a")))
        for one, other in zip(layers(env), layers(twin), strict=True):
            assert type(one) is type(other) and one is not other
            assert vars(one).get("_cached_spec") is vars(other).get("_cached_spec")
        assert twin.unwrapped.spec is env.unwrapped.spec
        assert twin.unwrapped.tasks is env.unwrapped.tasks

    def test_a_vector_spec_is_never_copied(self) -> None:
        envs = gymnasium.make_vec("arpo/GuessNumber-v0", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})
        envs.reset(seed=0)
        assert fork(envs).spec is envs.spec is not None

    def test_attributes_of_a_subclass_are_copied_unless_named_as_shared(self) -> None:
        class Custom(Dice):
            shared = Dice.shared | {"table"}

            def __init__(self) -> None:
                super().__init__()
                self.table, self.marks = {"a": 1}, {"a": [1]}

        env = started(Custom())
        twin = fork(env)
        assert twin.table is env.table
        twin.marks["a"].append(2)
        assert env.marks == {"a": [1]}

    def test_cycles_and_common_parts_are_kept(self) -> None:
        class Cyclic(Dice):
            def __init__(self) -> None:
                super().__init__()
                self.me = self
                self.history = [self.rolls]

        env = started(Cyclic(), "x")
        env.history = [env.rolls]
        twin = fork(env)
        assert twin.me is twin
        assert twin.history[0] is twin.rolls is not env.rolls

    def test_a_grandchild_keeps_no_ancestor_alive(self) -> None:
        """Point 6: forks of forks, and no chain of references."""
        env: Any = started(notebook_env(), note("a"))
        references = []
        for text in "bcdef":
            references.append(weakref.ref(env))
            env = fork(env)
            env.step(note(text))
        gc.collect()
        assert [reference() for reference in references] == [None] * 5
        assert env.step(note("g"))[0] == "\n<result>\na | b | c | d | e | f | g\n</result>\n"


class TestToolsThatFork:
    """Point 5: each tool forks as it declares; what cannot be forked is refused before anything is left behind."""

    @pytest.mark.parametrize(
        ("tools", "expected"),
        [
            ([], "native"),
            ([Scripted("x")], "native"),
            ([Scripted("x"), Notebook()], "copy"),
            ([Notebook(), ReplayedNotebook()], "replay"),
        ],
    )
    def test_the_whole_is_as_strong_as_its_weakest_tool(self, tools: list[Tool], expected: str) -> None:
        for number, tool in enumerate(tools):
            tool.name = f"tool{number}"
        env = ToolEnv(ROWS, tools, reward=right)
        assert fork_support(env) == fork_support(wrapped(env)) == expected

    def test_a_stateless_tool_is_shared(self) -> None:
        env = started(hermes_env(Scripted("x")))
        assert fork(env)._tools["act"] is env._tools["act"]

    def test_replay_runs_each_call_again_and_no_other_tool(self) -> None:
        runs: list[str] = []
        acting = Scripted("done")
        env = started(hermes_env(ReplayedNotebook(runs), acting), hermes(("note", {"text": "a"}), ("act", {"text": "x"}), ("note", {"text": "b"})))
        twin = fork(env)
        assert runs == ["a", "b", "a", "b"]
        assert acting.calls == ["x"]
        assert twin.step(hermes(("note", {"text": "c"})))[0] == "a | b | c"

    def test_a_replay_that_differs_is_an_error_that_names_call_and_tool(self) -> None:
        closed: list[str] = []

        class Clock(ReplayedNotebook):
            def call(self, text: str) -> str:
                super().call(text)
                return f"{text} {len(self.runs)}"

            def close(self) -> None:
                closed.append("closed")

        env = started(notebook_env(Clock()), note("a"))
        with pytest.raises(ForkError, match=r"'note'.*replay of call 0 gave 'a 2', recorded was 'a 1'"):
            fork(env)
        assert closed == ["closed"]
        env.step(note("b"))

    def test_a_replay_begins_after_the_last_loss_of_state(self) -> None:
        free = threading.Event()

        class ReplayedStuck(Stuck):
            fork_support = "replay"

        env = started(notebook_env(ReplayedStuck(free)), note("a"))
        step_stuck(env)
        env.step(note("b"))
        assert fork(env).step(note("c"))[0] == env.step(note("c"))[0] == "\n<result>\nb | c\n</result>\n"
        free.set()

    def test_a_tool_that_cannot_be_forked_is_named_and_nothing_is_half_made(self) -> None:
        closed: list[Tool] = []

        class Live(Notebook):
            name = "live"
            fork_support = "none"

        env = started(notebook_env(Stuck(threading.Event(), closed_instances=closed), Live()), note("a"))
        assert fork_support(env) == fork_support(wrapped(env)) == "none"
        for attempt in (env.fork, lambda: fork(env), lambda: fork(env, 2), lambda: copy.deepcopy(env), lambda: fork(TimeLimit(env, 9))):
            with pytest.raises(ForkError, match="'live'"):
                attempt()
        assert closed == [], "it is refused before any other tool is copied"
        assert env.step(note("b"))[0] == "\n<result>\na | b\n</result>\n"

    @pytest.mark.parametrize("error", [OSError("too many open files"), ForkError("no"), KeyError("x")])
    def test_n_forks_are_made_or_none(self, error: Exception) -> None:
        """The third of four copies fails: the two that were made are closed."""
        forked: list[int] = []
        closed: list[Tool] = []

        class Scarce(Stuck):
            def fork(self) -> Stuck:
                forked.append(1)
                if len(forked) == 3:
                    raise error
                return super().fork()

        env = started(notebook_env(Scarce(threading.Event(), closed_instances=closed)), note("a"))
        with pytest.raises(ForkError, match="note"):
            fork(env, 4)
        assert (len(forked), len(closed)) == (3, 2)
        assert len(fork(env, 4)) == 4

    def test_n_forks_are_one_request_of_each_tool(self) -> None:
        asked: list[int] = []

        class Remote(Notebook):
            def fork_many(self, n: int) -> list[Remote]:
                asked.append(n)
                return super().fork_many(n)

        env = started(TimeLimit(notebook_env(Remote()), 9), note("a"))
        twins = fork(env, 3)
        assert asked == [3]
        assert [twin.step(note(str(number)))[0] for number, twin in enumerate(twins)] == [f"\n<result>\na | {number}\n</result>\n" for number in range(3)]
        assert [len(fork(env, n)) for n in (1, 0)] == [1, 0]
        env.unwrapped.fork()  # type: ignore[attr-defined]
        assert asked == [3, 1, 0, 1]

    def test_a_failing_request_for_n_leaves_nothing_open(self) -> None:
        closed: list[Tool] = []

        class Full(Notebook):
            name = "full"

            def fork_many(self, n: int) -> list[Full]:
                raise RuntimeError("quota")

        env = started(notebook_env(Stuck(threading.Event(), closed_instances=closed), Full()), note("a"))
        with pytest.raises(ForkError, match=r"'full'.*quota"):
            fork(env, 3)
        assert len(closed) == 3 and len({id(tool) for tool in closed}) == 3
        assert env.step(note("b"))[0] == "\n<result>\na | b\n</result>\n", "the parent goes on"

    def test_a_class_with_its_own_fork_is_asked_n_times(self) -> None:
        class Counting(Dice):
            forks = 0

            def fork(self) -> Any:
                type(self).forks += 1
                return super().fork()

        assert len(fork(started(Counting()), 3)) == 3
        assert Counting.forks == 3

    def test_n_forks_of_an_environment_with_its_own_fork(self) -> None:
        class Fragile(Dice):
            made: list[Fragile] = []  # noqa: RUF012

            def _fork_into(self, twin: Any) -> None:
                if len(self.made) == 2:
                    raise RuntimeError("out of memory")
                self.made.append(twin)

        env = started(Fragile())
        with pytest.raises(ForkError, match="out of memory"):
            fork(env, 3)
        assert [twin._closed for twin in Fragile.made] == [True, True]

    def test_no_fork_in_the_middle_of_a_step(self) -> None:
        entered, free = threading.Event(), threading.Event()

        def wait() -> str:
            entered.set()
            free.wait(30)
            return "done"

        env = started(hermes_env(Scripted(wait)))
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(env.step, hermes(("act", {"text": "x"})))
            assert entered.wait(30)
            try:
                with pytest.raises(ForkError, match="step is running"):
                    fork(env)
            finally:
                free.set()
            assert step.result()[0] == "done"
        fork(env)


class TestLifetime:
    """Points 7 to 9."""

    def test_parent_and_child_close_apart(self) -> None:
        env = started(notebook_env(), note("a"))
        one, other = fork(env, 2)
        env.close()
        assert one.step(note("b"))[0] == "\n<result>\na | b\n</result>\n"
        one.close()
        assert other.step(note("c"))[0] == "\n<result>\na | c\n</result>\n"

    @pytest.mark.parametrize("make", [notebook_env, Dice])
    def test_closed_or_not_begun(self, make: Any) -> None:
        env, members = make(), SyncVectorEnv([make])
        for state in ("before reset", "closed"):
            for attempt in (env.fork, lambda: fork(env), lambda: fork(TimeLimit(env, 5)), lambda: fork(members)):
                with pytest.raises(ForkError, match=state):
                    attempt()
            if state == "before reset":
                env.reset(seed=0)
                env.close()
                members.reset(seed=0)
                members.close()

    def test_the_fork_of_a_finished_episode_is_finished(self) -> None:
        twin = fork(started(notebook_env(), "<answer>x</answer>"))
        assert twin.episode.answer == "x"
        with pytest.raises(ResetNeeded):
            twin.step("y")

    def test_reset_of_a_child_is_its_own(self) -> None:
        env = started(notebook_env(), note("a"))
        twin = fork(env)
        assert twin.reset(seed=5)[0] == notebook_env().reset(seed=5)[0]
        assert twin.step(note("new"))[0] == "\n<result>\nnew\n</result>\n"
        assert env.step(note("b"))[0] == "\n<result>\na | b\n</result>\n"


class TestThreads:
    """Point 10: forks of one parent step at the same time."""

    def test_sixteen_forks_in_sixteen_threads(self) -> None:
        env = started(notebook_env(), note("a"))
        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(lambda pair: pair[1].step(note(f"b{pair[0]}"))[0], enumerate(fork(env, 16))))
        assert texts == [f"\n<result>\na | b{i}\n</result>\n" for i in range(16)]


class TestDeepcopy:
    def test_is_a_fork(self) -> None:
        class Owner(Dice):
            handed_over = 0

            def _fork_into(self, twin: Any) -> None:
                twin.handed_over = self.handed_over + 1

        env = started(Owner(), "x")
        pair = copy.deepcopy([env, env])
        assert pair[0] is pair[1] is not env, "one environment met twice is copied once"
        assert pair[0].handed_over == 1
        assert data_equivalence(play(pair[0], ["y"] * 3), play(env, ["y"] * 3))


class TestWrappers:
    """Point 13: the whole chain is copied, each wrapper with its state."""

    def test_wrappers_hide_fork_and_the_function_keeps_them(self) -> None:
        env = started(TimeLimit(notebook_env(), max_episode_steps=2), note("a"))
        with pytest.raises(AttributeError):
            env.fork  # noqa: B018
        assert not isinstance(env.get_wrapper_attr("fork")(), TimeLimit), "this is the trap: the wrapper is gone"
        twin = fork(env)
        assert isinstance(twin, TimeLimit)
        assert twin.env is not env.env
        assert twin.step(note("b"))[3] is True, "the second step of two: truncated"
        assert env.step(note("b"))[3] is True

    def test_statistics_go_on_in_both(self) -> None:
        env = started(wrapped(Dice()), "x", "x")
        twin = fork(env)
        infos = [play(each, ["y", "y"])[-1][-1]["episode"] for each in (env, twin)]
        assert infos[0]["l"] == infos[1]["l"] == 4
        assert infos[0]["r"] == infos[1]["r"] > 4

    @pytest.mark.parametrize("name", ["arpo/GuessNumber-v0", "arpo/Negotiation-v0", "arpo/World-v0"])
    def test_made_by_id(self, name: str) -> None:
        env = RecordEpisodeStatistics(gymnasium.make(name, max_episode_steps=3))
        env.reset(seed=0)
        env.step("50")
        twin = fork(env)
        assert [type(layer) for layer in layers(twin)] == [type(layer) for layer in layers(env)]
        assert fork_support(env) == "native"
        one, other = (play(each, ["60", "70"]) for each in (env, twin))
        for record in (one, other):
            record[-1][-1]["episode"].pop("t")  # seconds
        assert data_equivalence(one, other)
        assert one[-1][3] is True

    def test_vector_environments(self) -> None:
        envs = gymnasium.make_vec("arpo/GuessNumber-v0", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})
        envs.reset(seed=[1, 2, 3])
        envs.step(("50", "50", "50"))
        twin = fork(envs)
        assert fork_support(envs) == "native"
        assert data_equivalence(envs.step(("25", "75", "50")), twin.step(("25", "75", "50")))
        envs.close()
        assert twin.step(("1", "2", "3"))[0] is not None
        twin.close()

    def test_a_vector_whose_second_member_fails_leaves_nothing(self) -> None:
        closed: list[Tool] = []

        class Live(Stuck):
            fork_support = "none"

        members = [notebook_env(kind(threading.Event(), closed_instances=closed)) for kind in (Stuck, Live)]
        envs = SyncVectorEnv([lambda: members[0], lambda: members[1]])
        envs.reset(seed=0)
        assert fork_support(envs) == "none"
        with pytest.raises(ForkError, match="note"):
            fork(envs)
        assert len(closed) == 1

    def test_a_layer_that_cannot_be_copied_leaves_nothing(self) -> None:
        closed: list[Tool] = []

        class Locked(gymnasium.Wrapper[Any, Any, Any, Any]):
            def __init__(self, env: Any) -> None:
                super().__init__(env)
                self.lock = threading.Lock()

        env = started(Locked(notebook_env(Stuck(threading.Event(), closed_instances=closed))), note("a"))
        with pytest.raises(ForkError, match=r"lock.*ReplayFork"):
            fork(env)
        assert len(closed) == 1


class TestOtherEnvironments:
    def test_plain_environments_are_deep_copied(self) -> None:
        env = started(TimeLimit(PlainCounter(), 10), 3)
        assert fork_support(env) == "copy"
        twin = fork(env)
        assert data_equivalence(twin.step(4), env.step(4))
        assert not np.shares_memory(twin.unwrapped.state, env.unwrapped.state)

    def test_ezpickle_is_refused(self) -> None:
        """Its deepcopy is a new environment: the state of the episode would be lost without a word."""
        env = started(PickledCounter(), 3, 4)
        assert copy.deepcopy(env).state[0] == 0.0, "this is the trap"
        for each in (env, TimeLimit(env, 10), SyncVectorEnv([lambda: env])):
            assert fork_support(each) == "none"
            with pytest.raises(ForkError, match=r"EzPickle.*ReplayFork"):
                fork(each)

    def test_an_environments_own_fork_comes_first(self) -> None:
        """Also inside wrappers, and also where its deepcopy would be wrong."""

        class Own(PickledCounter):
            def fork(self) -> Own:
                twin = type(self)()
                twin.__dict__.update(copy.deepcopy(vars(self)))
                return twin

        env = started(Own(), 3)
        for each in (env, TimeLimit(env, 10), wrapped(env)):
            assert fork_support(each) == "native"
            assert fork(each).unwrapped.state[0] == 3.0

    def test_wrappers_that_draw_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in (RecordVideo, HumanRendering):
            monkeypatch.setattr(kind, "__init__", gymnasium.Wrapper.__init__)  # without a window or a codec
            monkeypatch.setattr(kind, "__del__", lambda self: None, raising=False)
            env = TimeLimit(kind(started(notebook_env())), 5)  # type: ignore[operator]
            assert fork_support(env) == "none"
            with pytest.raises(ForkError, match=kind.__name__):
                fork(env)

    def test_what_is_no_environment(self) -> None:
        for thing in (None, "env", object()):
            assert fork_support(thing) == "none"  # type: ignore[arg-type]
            with pytest.raises(ForkError, match=r"expected a gymnasium\.Env"):
                fork(thing)  # type: ignore[call-overload]

    def test_other_processes_are_refused(self) -> None:
        envs = AsyncVectorEnv([PlainCounter], context="fork")
        try:
            with pytest.raises(ForkError, match="AsyncVectorEnv"):
                fork(envs)  # type: ignore[call-overload]
        finally:
            envs.close()


class TestTextSpace:
    def test_holds_any_text_up_to_its_length(self) -> None:
        space = TextSpace(5)
        assert all(text in space for text in ("", "日本語", "\ud800", "12345"))
        assert all(thing not in space for thing in ("123456", 5, None, b"abc"))
        assert space == TextSpace(5) != TextSpace(6)

    def test_copies_share_the_tables_and_not_the_generator(self) -> None:
        space = TextSpace()
        space.seed(3)
        twin = copy.deepcopy(space)
        assert [space.sample() for _ in range(3)] == [twin.sample() for _ in range(3)]
        assert twin._np_random is not space._np_random
        assert twin._char_index is space._char_index


def test_a_subclass_of_forkable_env_needs_reset_and_step_only() -> None:
    class Echo(ForkableEnv):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return action, 0.0, False, False, {}

    env = started(Echo())
    assert fork(env).step("hello")[0] == "hello"


def test_a_result_with_data_is_shared_not_copied() -> None:
    """Results are immutable records: forks hold the same ones."""
    result = ToolResult("text", data=object())
    env = started(hermes_env(Scripted(result)), hermes(("act", {"text": "x"})))
    assert fork(env).episode.calls[0].result is env.episode.calls[0].result
