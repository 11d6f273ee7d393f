"""``ReplayFork``: any deterministic environment forks by replay, and one that is not deterministic is caught."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_fakes import PickledCounter, PlainCounter
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from arpo_env.forking import ForkError, fork, fork_support, layers
from arpo_env.testing import check_fork, play
from arpo_env.wrappers import ReplayFork


def test_cart_pole_and_frozen_lake() -> None:
    check_fork(lambda: ReplayFork(gymnasium.make("CartPole-v1")), [0, 1, 1, 0, 1])
    check_fork(lambda: ReplayFork(gymnasium.make("FrozenLake-v1", is_slippery=True)), [2, 1, 2, 1, 0, 3])


def test_through_wrappers_on_both_sides() -> None:
    def make() -> gymnasium.Env[Any, Any]:
        return RecordEpisodeStatistics(TimeLimit(ReplayFork(gymnasium.make("CartPole-v1")), max_episode_steps=4))

    check_fork(make, [0, 1, 1, 0])
    env = make()
    env.reset(seed=0)
    assert fork_support(env) == "replay"
    assert [type(layer) for layer in layers(fork(env))] == [type(layer) for layer in layers(env)]


def test_an_ezpickle_environment_becomes_forkable() -> None:
    """The very thing that ``fork`` recommends when it refuses one."""
    check_fork(lambda: TimeLimit(ReplayFork(PickledCounter(), PickledCounter), 10), [1, 2, 3])
    env = ReplayFork(PickledCounter(), PickledCounter)
    env.reset(seed=0, options={"start": 5})
    env.step(2)
    assert fork_support(env) == "replay"
    assert fork(env).unwrapped.state[0] == 7.0  # 5 at the start and 2
    assert copy.deepcopy(env).unwrapped.state[0] == 7.0


def test_a_reset_without_seed_can_be_replayed() -> None:
    env = ReplayFork(PlainCounter(), PlainCounter)
    env.reset(seed=4)
    starts = []
    for _ in range(5):
        observation, _ = env.reset()
        starts.append(observation[1])
        env.step(1)
        twin = fork(env)
        assert data_equivalence(twin.step(2), env.step(2))
        assert data_equivalence(twin.reset(), fork(env).reset()), "the next episode too is that of the parent"
    assert len(set(starts)) > 1
    env.reset(seed=4)
    assert [env.reset()[0][1] for _ in range(5)] == starts


class Drifting(PlainCounter):
    """Not deterministic: how many there were before it shows at the step (or reset) ``at``."""

    made = 0

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.steps, self.closed = at, 0, False
        Drifting.made += 1
        self.number = Drifting.made

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self.steps = 0
        return observation + (self.number if self.at == 0 else 0), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, *rest = super().step(action)
        return (observation + (self.number if self.steps == self.at else 0), *rest)  # type: ignore[return-value]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("at", "where"), [(0, "reset"), (1, "step 1"), (3, "step 3")])
def test_a_difference_names_the_step(at: int, where: str) -> None:
    """Wherever it lies, though all later steps agree."""
    made: list[Drifting] = []

    def make() -> Drifting:
        made.append(Drifting(at))
        return made[-1]

    env = ReplayFork(make(), make)
    env.reset(seed=0)
    play(env, [1, 2, 3, 4])
    with pytest.raises(ForkError, match=f"replay differs at {where}: recorded .*, replayed .*not deterministic"):
        fork(env)
    assert [each.closed for each in made] == [False, True], "the fork that failed is closed"
    env.step(5)


def test_a_difference_in_reward_or_flags_counts() -> None:
    class Moody(PlainCounter):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Moody.made += 1
            self.bonus = Moody.made

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            observation, reward, *rest = super().step(action)
            return (observation, reward + self.bonus, *rest)  # type: ignore[return-value]

    env = ReplayFork(Moody(), Moody)
    env.reset(seed=0)
    env.step(1)
    with pytest.raises(ForkError, match="step 1"):
        fork(env)


def test_what_was_recorded_cannot_be_changed_from_outside() -> None:
    """Actions, observations and options are kept as they were when they passed."""
    env = ReplayFork(PlainCounter(), PlainCounter)
    options = {"start": 5}
    observation, _ = env.reset(seed=0, options=options)
    options["start"] = 9
    observation += 100
    action = np.array(2)
    result = env.step(action)  # type: ignore[arg-type]
    action += 5
    result[0][:] = -1
    assert fork(env).unwrapped.state[0] == 7.0


def test_a_step_that_raised_is_not_replayed() -> None:
    class Picky(PlainCounter):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            if action > 9:
                raise ValueError("no such action")
            return super().step(action)

    env = ReplayFork(Picky(), Picky)
    env.reset(seed=0)
    env.step(1)
    with pytest.raises(ValueError, match="no such action"):
        env.step(10)
    assert fork(env).unwrapped.state[0] == 1.0


def test_before_reset_and_after_close() -> None:
    env = ReplayFork(PlainCounter(), PlainCounter)
    with pytest.raises(ForkError, match="before reset"):
        fork(env)
    env.reset(seed=0)
    twin = fork(env)
    env.close()
    env.close()
    with pytest.raises(ForkError, match="closed"):
        fork(env)
    with pytest.raises(ClosedEnvironmentError):
        env.reset()
    twin.step(1)
    fork(twin).close()
    twin.step(1)


def test_without_a_spec_it_has_to_be_told_how_to_make_another() -> None:
    with pytest.raises(ValueError, match="make="):
        ReplayFork(PlainCounter())


class Whispering(PlainCounter):
    """Not deterministic in its info alone: ``where`` is "reset" or "step"."""

    made = 0

    def __init__(self, where: str, key: str) -> None:
        super().__init__()
        Whispering.made += 1
        self.where, self.said = where, {key: Whispering.made} if key != "episode" else {"episode": {"r": 1.0, "t": Whispering.made}}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | (self.said if self.where == "reset" else {})

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        *rest, info = super().step(action)
        return (*rest, info | (self.said if self.where == "step" else {}))  # type: ignore[return-value]


@pytest.mark.parametrize(("where", "named"), [("reset", "reset"), ("step", "step 1")])
def test_a_difference_in_info_counts(where: str, named: str) -> None:
    env = ReplayFork(Whispering(where, "number"), lambda: Whispering(where, "number"))
    env.reset(seed=0)
    env.step(1)
    with pytest.raises(ForkError, match=f"replay differs at {named}: "):
        fork(env)


def test_the_seconds_of_an_episode_are_no_difference() -> None:
    env = ReplayFork(Whispering("step", "episode"), lambda: Whispering("step", "episode"))
    env.reset(seed=0)
    assert "t" in env.step(1)[-1]["episode"], "the caller still gets them"
    fork(env)


class Tallying(ReplayFork[Any, Any]):
    """A subclass with a constructor, a reset and a step of its own: doubles actions and keeps a list of them."""

    def __init__(self, env: gymnasium.Env[Any, Any], word: str) -> None:
        super().__init__(env, PlainCounter)
        self.word, self.tally, self.inside = word, [0], env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.tally.clear()
        return super().reset(seed=None if seed is None else seed + 1, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.tally.append(action)
        return super().step(2 * action)


def test_the_fork_of_a_subclass_is_of_its_class_and_in_its_state() -> None:
    env = Tallying(PlainCounter(), "hm")
    env.reset(seed=3)
    env.step(1)
    env.step(2)
    twin = copy.deepcopy(env)
    assert type(twin) is Tallying and (twin.word, twin.tally, env.tally) == ("hm", [1, 2], [1, 2])
    assert twin.inside is twin.env is not env.env
    assert data_equivalence(twin.step(3), env.step(3)) and twin.unwrapped.state[0] == 12.0
    twin.step(1)
    assert (twin.tally, env.tally) == ([1, 2, 3, 1], [1, 2, 3])
    assert data_equivalence(fork(twin).step(1), twin.step(1))
