"""What every environment of another library has in common here: the ``info`` of a ToolEnv, forks at every point, vector environments, ``arpo check-env``.

The whole conformance kit runs over two and more environments of each library in the files beside this one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import arpo_env
from arpo_algo.cli import main
from arpo_env.interop.gem import GemEnv
from arpo_env.interop.reasoning_gym import ReasoningGymEnv
from arpo_env.interop.skyrl_gym import SkyRLGymEnv
from arpo_env.interop.textarena import TextArenaEnv, bracketed_move
from arpo_env.testing import check_fork

Env = gymnasium.Env[Any, Any]
ROWS = [{"prompt": f"What is {n} + 3?", "reward_spec": {"ground_truth": str(n + 3)}, "extra_info": {"max_turns": 3}} for n in range(4)]


@dataclass(frozen=True)
class Case:
    """An environment and turns that do something in it."""

    package: str
    name: str
    make: Callable[[], Env]
    turns: tuple[str, ...]
    support: str = "copy"


def gem(name: str, *turns: str) -> Case:
    return Case("gem", name, lambda: GemEnv(name), tuple(f"\\boxed{{{turn}}}" for turn in turns))


def textarena(name: str, *turns: str, players: int = 1) -> Case:
    return Case("textarena", name, lambda: TextArenaEnv(name, players, bracketed_move), tuple(f"[{turn}]" for turn in turns))


CASES = [
    gem("game:GuessTheNumber-v0-hard", "25", "10", "40"),
    gem("game:Mastermind-v0-easy", "1 2", "3 4"),
    gem("game:Minesweeper-v0-easy", "reveal 2 2", "flag 0 0"),
    gem("game:Sudoku-v0-easy", "1 2 1", "1 3 4"),
    gem("game:TowerofHanoi-v0-easy", "A C", "A B"),
    gem("game:FifteenPuzzle-v0-easy", "up", "left"),
    gem("game:Sokoban-v0-easy", "up", "left"),
    gem("game:Crosswords-v0-easy", "1 road"),
    gem("rg:basic_arithmetic", "4"),
    textarena("GuessTheNumber-v0-hardcore", "25", "10", "40"),
    textarena("Blackjack-v0", "Hit", "Stand", "Hit"),
    textarena("Bandit-v0", "red", "blue"),
    textarena("Minesweeper-v0", "1 1", "0 0"),
    textarena("FrozenLake-v0", "down", "right"),
    textarena("LightsOut-v0", "1 1", "0 2"),
    textarena("ConnectFour-v0", "col 1", "col 2", players=2),
    textarena("Nim-v0", "0 1", "1 1", players=2),
    textarena("LiarsDice-v0", "Bid: 1, 2", "Call", players=3),
    Case("skyrl_gym", "gsm8k_multi_turn", lambda: SkyRLGymEnv("gsm8k_multi_turn", ROWS), ("#### 1", "hm", "#### 2")),
    Case("skyrl_gym", "gsm8k", lambda: SkyRLGymEnv("gsm8k", ROWS), ("#### 1",)),
    Case("reasoning_gym", "basic_arithmetic", lambda: ReasoningGymEnv("basic_arithmetic"), ("hm", "<answer>4</answer>"), "native"),
]

every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.skipif(not importlib.util.find_spec(case.package), reason=f"needs {case.package}")) for case in CASES],
    ids=lambda case: f"{case.package}-{case.name}",
)


@every_case
def test_forks_at_every_point(case: Case) -> None:
    env = case.make()
    assert arpo_env.fork_support(env) == case.support
    check_fork(case.make, case.turns, seed=2)


@every_case
def test_info_is_that_of_a_tool_env(case: Case) -> None:
    reference = arpo_env.ToolEnv([{"question": "?", "answer": "!"}]).reset(seed=0)[1]
    env = case.make()
    observation, info = env.reset(seed=0)
    assert info["messages"][-1] == {"role": "user", "content": observation}
    assert info["task_id"]
    infos = [info]
    for turn in case.turns:
        *_, terminated, truncated, info = env.step(turn)
        infos.append(info)
        assert info["stop_reason"] not in ("env_error", "library_error"), info["answer"]
        assert bool(info["stop_reason"]) == (terminated or truncated)
        if terminated or truncated:
            break
    for info in infos:
        assert {key: type(value) for key, value in info.items()} == {key: type(value) for key, value in reference.items()}
        assert set(info["reward"]) == set(infos[0]["reward"])


@every_case
def test_a_task_is_the_same_however_it_is_asked_for(case: Case) -> None:
    env = case.make()
    tasks = env.unwrapped.tasks  # type: ignore[attr-defined]
    opening = env.reset(seed=0, options={"task": 3})
    env.step(case.turns[0])
    assert env.reset(seed=1, options={"task": tasks[3]}) == opening
    assert opening[1]["task_id"] == tasks[3].id


@pytest.mark.skipif(not importlib.util.find_spec("gem"), reason="needs gem")
def test_vector_environments_stack_and_fork() -> None:
    envs: Any = SyncVectorEnv([CASES[0].make] * 2, autoreset_mode=AutoresetMode.DISABLED)
    _, info = envs.reset(seed=[0, 1])
    assert len(set(info["task_id"])) == 2
    twin = arpo_env.fork(envs)
    turns = ("\\boxed{25}", "\\boxed{24}")
    assert envs.step(turns)[0] == twin.step(turns)[0]
    envs.close()
    twin.close()


@pytest.mark.skipif(not importlib.util.find_spec("textarena"), reason="needs textarena")
def test_check_env_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.guess", CASES[9].make, raising=False)
    monkeypatch.setitem(importlib.import_module("sys").modules, "foreign_cases", importlib.import_module(__name__))
    assert main(["check-env", "foreign_cases:guess", "--actions", "[5]", "[9]"]) == 0
    assert "forks by copy" in capsys.readouterr().out
