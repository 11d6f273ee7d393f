"""The conformance kit: it passes what is right, catches each planted fault, and every registered environment passes it."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_fakes import Dice, Notebook, ReplayedNotebook, note, notebook_env
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import arpo_env
from arpo_env.sandbox import IsolationWarning
from arpo_env.testing import EnvConformance, ToolConformance, check_fork
from arpo_env.tools.base import Tool, ToolResult

IDS = sorted(name for name in gymnasium.registry if name.startswith("arpo/"))


def broken_rules(kit: type[EnvConformance] | type[ToolConformance], make: Any, actions: Any) -> set[str]:
    """The names of the kit's tests that fail for what ``make`` makes."""

    class Case(kit):  # type: ignore[valid-type, misc]
        make_env = make_tool = staticmethod(make)

    Case.actions = Case.calls = actions
    broken = set()
    for name in (name for name in dir(Case) if name.startswith("test_")):
        try:
            getattr(Case(), name)()
        except (AssertionError, UserWarning):
            broken.add(name)
    return broken


class TestNotebookEnv(EnvConformance):
    actions = (note("a"), "nonsense", note("b"), "<answer>answer 3</answer>")

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return notebook_env(Notebook(), render_mode="ansi")


class TestDice(EnvConformance):
    actions = ("x",) * 6

    def make_env(self) -> gymnasium.Env[Any, Any]:
        return Dice()


class TestNotebook(ToolConformance):
    calls = ({"text": "a"}, {"text": "b"}, {"text": "c"})

    def make_tool(self) -> Tool:
        return Notebook()


class ReturnsItself(Dice):
    def fork(self) -> ReturnsItself:
        return self


class CopiesShallowly(Dice):
    def fork(self) -> CopiesShallowly:
        twin = object.__new__(type(self))
        twin.__dict__.update(vars(self))
        return twin


class SharesOneList(Dice):
    shared = Dice.shared | {"rolls"}


class SharesTheGenerator(Dice):
    shared = Dice.shared | {"_np_random"}


class ForgetsTheEpisode(Dice):
    def fork(self) -> ForgetsTheEpisode:
        twin = type(self)()
        twin.reset(seed=0)
        return twin


class DiesWithItsParent(Dice):
    def __init__(self) -> None:
        super().__init__()
        self.parent: Any = None

    shared = Dice.shared | {"parent"}

    def _fork_into(self, twin: Any) -> None:
        twin.parent = self

    def step(self, action: str) -> Any:
        assert self.parent is None or not self.parent._closed, "the server of the parent is gone"
        return super().step(action)


class DropsTheSeed(Dice):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return f"start {random.random()}", {}


class RemembersTheLastEpisode(Dice):
    def __init__(self) -> None:
        super().__init__()
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episodes += 1
        return f"episode {self.episodes}", {}


class TellsTheTime(Dice):
    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "seconds": time.perf_counter()}


class FailsOnSomeText(Dice):
    def step(self, action: str) -> Any:
        assert "{" not in action, "cannot parse"
        return super().step(action)


class ForksBeforeReset(Dice):
    def fork(self) -> Any:
        self._closed, closed, self._running, running = False, self._closed, True, self._running
        try:
            return super().fork()
        finally:
            self._closed, self._running = closed, running


class TestTheKitCatches:
    """Each fault is one that was met in the wild; the kit must name at least these rules."""

    @pytest.mark.parametrize(
        ("fault", "rules"),
        [
            (ReturnsItself, {"test_fork"}),
            (CopiesShallowly, {"test_fork"}),
            (SharesOneList, {"test_fork", "test_forks_step_in_threads"}),
            (SharesTheGenerator, {"test_fork", "test_forks_step_in_threads"}),
            (ForgetsTheEpisode, {"test_fork"}),
            (DiesWithItsParent, {"test_fork"}),
            (DropsTheSeed, {"test_seed_alone_decides"}),
            (RemembersTheLastEpisode, {"test_seed_alone_decides"}),
            (TellsTheTime, {"test_fork"}),
            (FailsOnSomeText, {"test_any_text_is_answered"}),
            (ForksBeforeReset, {"test_fork_of_closed_or_unreset"}),
        ],
    )
    def test_faulty_environments(self, fault: type[Dice], rules: set[str]) -> None:
        assert rules <= broken_rules(EnvConformance, fault, ("x",) * 6)

    def test_and_passes_the_right_one(self) -> None:
        assert broken_rules(EnvConformance, Dice, ("x",) * 6) == set()

    def test_a_tool_that_forks_share(self) -> None:
        class SharedNotebook(Notebook):
            def fork(self) -> SharedNotebook:
                return self

        assert "test_fork" in broken_rules(EnvConformance, lambda: notebook_env(SharedNotebook()), TestNotebookEnv.actions)
        assert broken_rules(ToolConformance, SharedNotebook, TestNotebook.calls) == {"test_fork_at_every_call"}

    def test_a_tool_that_episodes_share(self) -> None:
        class Unbound(Notebook):
            def bind(self) -> Unbound:
                return self

        assert "test_episodes_share_nothing" in broken_rules(ToolConformance, Unbound, TestNotebook.calls)

    def test_a_tool_whose_fork_is_fresh(self) -> None:
        class Fresh(Notebook):
            def fork(self) -> Fresh:
                return type(self)()

        assert broken_rules(ToolConformance, Fresh, TestNotebook.calls) == {"test_fork_at_every_call"}

    def test_a_tool_that_closes_its_forks(self) -> None:
        class Server(Notebook):
            def __init__(self) -> None:
                super().__init__()
                self.open = [True]

            def fork(self) -> Server:
                twin = super().fork()
                twin.open = self.open
                return twin

            def call(self, text: str) -> str | ToolResult:  # type: ignore[override]
                return super().call(text) if self.open[0] else ToolResult.failure("died", "server gone")

            def close(self) -> None:
                self.open[0] = False

        assert "test_fork_at_every_call" in broken_rules(ToolConformance, Server, TestNotebook.calls)

    def test_a_tool_with_a_bad_contract(self) -> None:
        class Nameless(Notebook):
            name = ""

        with pytest.raises(ValueError, match="name"):
            broken_rules(ToolConformance, Nameless, TestNotebook.calls)

    def test_an_episode_of_another_length(self) -> None:
        """A fork that ends sooner than its parent breaks the rule in words, not by an error of the kit."""

        class Shortened(Dice):
            def _fork_into(self, twin: Any) -> None:
                twin.rolls.append(0)

        with pytest.raises(AssertionError, match=r"(?s)after a fork.*(more steps|steps later)"):
            check_fork(Shortened, ["x"] * 6)

    def test_an_environment_that_fails_itself(self) -> None:
        class Broken(Dice):
            def step(self, action: str) -> Any:
                observation, reward, _, _, info = super().step(action)
                return observation, reward, False, True, {**info, "stop_reason": "env_error", "answer": "TypeError: opponent"}

        assert "test_the_episode_is_played" in broken_rules(EnvConformance, Broken, ("x",))

    def test_a_tool_of_the_wrong_type_and_a_kit_without_calls(self) -> None:
        class Dictionary(Notebook):
            def call(self, text: str) -> Any:  # type: ignore[override]
                return {"text": text}

        assert "test_episodes_share_nothing" in broken_rules(ToolConformance, Dictionary, TestNotebook.calls)
        assert "test_fork_at_every_call" in broken_rules(ToolConformance, Notebook, ())

    def test_replayed_tools_pass(self) -> None:
        assert broken_rules(EnvConformance, lambda: notebook_env(ReplayedNotebook()), TestNotebookEnv.actions) == set()


@pytest.mark.filterwarnings(f"ignore::{IsolationWarning.__module__}.{IsolationWarning.__name__}")
@pytest.mark.parametrize("name", IDS)
class TestEveryRegisteredId:
    def make(self, name: str, **keywords: Any) -> Any:
        if name == "arpo/Math-v0":
            pytest.importorskip("math_verify")
        return gymnasium.make(name, **keywords)

    def test_check_env_without_warnings(self, name: str) -> None:
        env = self.make(name).unwrapped
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env)
        env.close()

    def test_the_spec_goes_through_json(self, name: str) -> None:
        spec = gymnasium.spec(name)
        assert isinstance(spec.entry_point, str)
        assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()) == spec

    def test_make_and_the_common_wrappers(self, name: str) -> None:
        env = RecordEpisodeStatistics(TimeLimit(self.make(name), max_episode_steps=2))
        env.reset(seed=0)
        env.step("nothing of use")
        with pytest.raises(AttributeError):
            env.fork  # noqa: B018
        twin = arpo_env.fork(env)
        assert arpo_env.fork_support(env) == "native"
        for each in (env, twin):
            *_, truncated, info = each.step("nothing of use")
            assert truncated is True
            assert info["episode"]["l"] == 2
            each.close()

    def test_make_vec(self, name: str) -> None:
        self.make(name).close()
        envs = gymnasium.make_vec(name, 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})
        assert isinstance(envs, SyncVectorEnv)
        observations, info = envs.reset(seed=[0, 1])
        assert all(isinstance(text, str) for text in observations) and len(info["task_id"]) == 2
        twin = arpo_env.fork(envs)
        one, other = (each.step(("<answer>x</answer>", "nothing of use")) for each in (envs, twin))
        assert one[0] == other[0]
        assert all(np.array_equal(a, b) for a, b in zip(one[1:4], other[1:4], strict=True))
        envs.close()
        twin.close()

    def test_info_has_the_keys_and_types_of_tool_env(self, name: str) -> None:
        reference = notebook_env().reset(seed=0)[1]
        env = self.make(name)
        infos = [env.reset(seed=0)[1]]
        for text in ("nothing of use", "<answer>x</answer>"):
            *_, terminated, truncated, info = env.step(text)
            infos.append(info)
            if terminated or truncated:
                break
        for info in infos:
            assert {key: type(value) for key, value in info.items()} == {key: type(value) for key, value in reference.items()}
            assert set(info["reward"]) == set(infos[0]["reward"])
            assert all(isinstance(value, float) for value in info["reward"].values())
        assert infos[0]["messages"][-1] == {"role": "user", "content": env.reset(seed=0)[0]}
        env.close()


def test_the_ids() -> None:
    assert IDS == ["arpo/GuessNumber-v0", "arpo/Math-v0", "arpo/Negotiation-v0", "arpo/SearchQA-v0", "arpo/World-v0"]


def test_exports() -> None:
    """``__all__`` is sorted, complete and true."""
    names = arpo_env.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(arpo_env, name) is not None
    modules = {name for name, value in vars(arpo_env).items() if isinstance(value, type(arpo_env))}
    at_once = {name for name in vars(arpo_env) if not name.startswith("_")} - modules - {"TYPE_CHECKING", "Any"}
    when_used = {name for names in arpo_env._HOME.values() for name in names} | {"testing"}
    assert at_once | when_used == set(names)
