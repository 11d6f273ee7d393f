"""Steps a second, cost of a fork and import time of ``ToolEnv`` beside GEM, SkyRL-Gym and a plain Gymnasium environment, in one run.

    python benchmarks/performance/environments.py [--short] [--out part.json]

All play the same episode: eight turns ``<think>..</think><calc>a*b</calc>`` and an answer, with a calculator that counts its calls. No model is involved.
They do not all do the same: the barest use of a library stands beside the environment that the library itself brings, and a row's note says what is left out.
``ToolEnv`` parses by the rules of its format, checks arguments against the schema, makes exceptions observations, keeps the episode and fills the ``info``.
Speeds are per CPU second of the process (so a loaded machine matters less); every repetition plays all of them once, in rotating order; shown are the median
over repetitions and the median of the ratios within a repetition, of ``ToolEnv`` to each of the others. Memory of a fork is what Python has allocated for it
(tracemalloc) while many are alive, after four calls. A copy is called right when a call in the copy is counted there and not in its parent. Then how
environments of other libraries fork behind their adapters, and what importing each library costs. What is not installed is listed. verifiers 0.4 has neither
a step nor a copy to measure (its environments run an agent against a model endpoint) and needs a virtual environment apart from this project's other extras:
it appears among the imports, and with figures of its version 0.3.1 that were measured another time on a machine like the one named there.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comparison
import gymnasium
from gymnasium import spaces

import arpo_env
from arpo_env.tools.base import Tool

CALL, ANSWER = "<think>multiply</think><calc>12*7</calc>", "<answer>84</answer>"
EPISODE = (*(CALL,) * 8, ANSWER)
ROWS = [{"question": "What is 12 * 7?", "answer": "84"}]
_CALL, _ANSWER = re.compile(r"<calc>(.*?)</calc>"), re.compile(r"<answer>(.*?)</answer>")


OURS = "arpo ToolEnv"


def product(expression: str) -> str:
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


@dataclass(frozen=True)
class Peer:
    """One way to have the environment. Functions take the environment that ``make`` gives."""

    name: str
    package: str
    make: Callable[[], Any]
    reset: Callable[[Any], object]
    step: Callable[[Any, str], object]
    fork: Callable[[Any], Any]
    calls: Callable[[Any], int]
    """Calls that its own calculator has counted."""
    note: str = ""
    """What it does less than ours does, or than the library's own environments do."""


# -- plain Gymnasium and this project ------------------------------------------------------------------------------------------------------------------


class Plain(gymnasium.Env[str, str]):
    """What one writes by hand."""

    action_space = observation_space = spaces.Text(1000)  # of the class, so that no copy holds a copy of it: ours share theirs too

    def __init__(self) -> None:
        self.calls = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.calls = 0
        return ROWS[0]["question"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if call := _CALL.search(action):
            self.calls += 1
            return product(call.group(1)), 0.0, False, False, {}
        answer = _ANSWER.search(action)
        return "", float(answer is not None and answer.group(1) == ROWS[0]["answer"]), True, False, {}


class Calculator(Tool):
    """A calculator that counts its calls."""

    name = "calc"
    description = "Multiplies two whole numbers."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    stateful = True
    fork_support = "copy"

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.calls = 0

    def call(self, *, expression: str) -> str:
        self.calls += 1
        return product(expression)


def tool_env(timeout: float | None) -> arpo_env.ToolEnv:
    return arpo_env.ToolEnv(ROWS, [Calculator(timeout)], reward=arpo_env.ExactMatch(), max_turns=20)


def gym_reset(env: Any) -> object:
    return env.reset(seed=0)


def gym_step(env: Any, text: str) -> object:
    return env.step(text)


def own_peers() -> Iterator[Peer]:
    less = "nothing but this task: a pattern and a comparison, an empty info"
    yield Peer("Gymnasium, by hand", "gymnasium", Plain, gym_reset, gym_step, copy.deepcopy, lambda env: env.calls, less)
    for name, timeout in ((OURS, None), ("arpo ToolEnv, calls under a deadline", 30.0)):
        yield Peer(
            name, "arpo_env", lambda timeout=timeout: tool_env(timeout), gym_reset, gym_step, arpo_env.fork, lambda env: env.unwrapped._tools["calc"].calls
        )


# -- the peers -----------------------------------------------------------------------------------------------------------------------------------------


def gem_peers() -> Iterator[Peer]:
    from datasets import Dataset, disable_progress_bars
    from gem.core import Env
    from gem.envs.qa_env import QaEnv
    from gem.tools.base_tool import BaseTool
    from gem.tools.tool_env_wrapper import ToolEnvWrapper

    from arpo_env.interop.gem import GemEnv

    class Calc(BaseTool):  # type: ignore[misc]
        tool_type = "calc"

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def instruction_string(self) -> str:
            return "Write <calc>a*b</calc>."

        def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
            call = _CALL.search(action)
            if call is None:
                return False, True, "", action
            self.calls += 1
            return True, False, product(call.group(1)), action[: call.end()]

    class Question(Env):  # type: ignore[misc]
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed)
            return ROWS[0]["question"], {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            answer = _ANSWER.search(action)
            return "", float(answer is not None and answer.group(1) == ROWS[0]["answer"]), True, True, {}

    def made() -> Any:
        return ToolEnvWrapper(Question(), tools=[Calc()], max_tool_uses=20)

    disable_progress_bars()

    def made_over_qa() -> Any:
        return ToolEnvWrapper(QaEnv(dataset=Dataset.from_list(ROWS)), tools=[Calc()], max_tool_uses=20)

    def calls(env: Any) -> int:
        return int(getattr(env, "library_env", env).tools[0].calls)

    less = "the question is written by hand: one comparison; no check of arguments, a tool's exception is raised by step"
    yield Peer("GEM ToolEnvWrapper", "gem", made, lambda env: env.reset(seed=0), gym_step, copy.deepcopy, calls, less)
    yield Peer("the same in arpo GemEnv", "gem", lambda: GemEnv(made, forks="copy"), gym_reset, gym_step, arpo_env.fork, calls)
    yield Peer("GEM ToolEnvWrapper over its QaEnv", "gem", made_over_qa, lambda env: env.reset(seed=0), gym_step, copy.deepcopy, calls)


def skyrl_peers() -> Iterator[Peer]:
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
    from skyrl_gym.envs.search.env import SearchEnv, SearchEnvConfig
    from skyrl_gym.tools.core import ToolGroup, tool

    from arpo_env.interop.skyrl_gym import SkyRLGymEnv

    class Calc(ToolGroup):  # type: ignore[misc]
        """Under the names that the library's own environment calls it by."""

        def __init__(self) -> None:
            self.calls = 0
            super().__init__(name="SearchToolGroup")

        @tool
        def search(self, expression: str) -> str:
            self.calls += 1
            return product(expression)

    class Searching(SearchEnv):  # type: ignore[misc]
        """The library's own environment of search, with the calculator as its search."""

        def __init__(self) -> None:
            super().__init__(SearchEnvConfig(), {"reward_spec": {"ground_truth": {"target": ["84"]}}, "max_turns": 20})
            self.tool_group = Calc()
            self.init_tool_groups([self.tool_group])

        def init(self, prompt: Any) -> Any:
            self.turns, self.chat_history = 0, []  # cheaper than a new environment, which the library makes for each episode
            return super().init(prompt)

        def _parse_action(self, action: str) -> list[str | None]:
            return super()._parse_action(action.replace("calc>", "search>"))

    class Question(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self.init_tool_groups([Calc()])

        def step(self, action: str) -> BaseTextEnvStepOutput:
            self.turns += 1
            if call := _CALL.search(action):
                text = self._execute_tool("SearchToolGroup", "search", [call.group(1)])
                return BaseTextEnvStepOutput(observations=[{"role": "user", "content": text}], reward=0.0, done=False, metadata={"tool_name": "calc"})
            answer = _ANSWER.search(action)
            return BaseTextEnvStepOutput(observations=[], reward=float(answer is not None and answer.group(1) == "84"), done=True, metadata={})

    prompt = [{"role": "user", "content": ROWS[0]["question"]}]

    def calls(env: Any) -> int:
        return int(getattr(env, "library_env", env).tool_groups[0].calls)

    less = "its step is written by hand: no record of the conversation, a tool's exception is raised by it, one comparison"
    yield Peer("SkyRL-Gym ToolGroup", "skyrl_gym", Question, lambda env: env.init(prompt), gym_step, copy.deepcopy, calls, less)
    rows = [{"prompt": prompt}]
    yield Peer("the same in arpo SkyRLGymEnv", "skyrl_gym", lambda: SkyRLGymEnv(Question, rows, forks="copy"), gym_reset, gym_step, arpo_env.fork, calls)
    yield Peer("SkyRL-Gym SearchEnv", "skyrl_gym", Searching, lambda env: env.init(prompt), gym_step, copy.deepcopy, calls)


# -- measuring -----------------------------------------------------------------------------------------------------------------------------------------


def steps_per_cpu_second(peer: Peer, episodes: int) -> float:
    env = peer.make()
    peer.reset(env)
    start = time.process_time()
    for _ in range(episodes):
        peer.reset(env)
        for turn in EPISODE:
            peer.step(env, turn)
    return episodes * len(EPISODE) / (time.process_time() - start)


def in_mid_episode(peer: Peer) -> Any:
    env = peer.make()
    peer.reset(env)
    for turn in EPISODE[:4]:
        peer.step(env, turn)
    return env


def fork_cost(peer: Peer, forks: int) -> float:
    """CPU milliseconds of a copy after four calls."""
    return copying(in_mid_episode(peer), peer.fork, forks)


def copying(env: Any, fork: Callable[[Any], Any], forks: int) -> float:
    start = time.process_time()
    for _ in range(forks):
        fork(env)
    return 1000 * (time.process_time() - start) / forks


def copies_rightly(peer: Peer) -> bool:
    parent = in_mid_episode(peer)
    before = peer.calls(parent)
    child = peer.fork(parent)
    peer.step(child, CALL)
    return peer.calls(child) == before + 1 and peer.calls(parent) == before


def fork_memory(peer: Peer, forks: int) -> float:
    """Kilobytes that Python has allocated for each of many copies after four calls."""
    env = in_mid_episode(peer)
    peer.fork(env)  # what the first copy imports or caches
    gc.collect()
    tracemalloc.start()
    try:
        copies = [peer.fork(env) for _ in range(forks)]
        return tracemalloc.get_traced_memory()[0] / len(copies) / 1000
    finally:
        tracemalloc.stop()


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All repetitions of one peer."""

    peer: Peer
    speeds: list[float]
    forks_ms: list[float]
    fork_kb: float
    right: bool


def samples(peers: Sequence[Peer], repeats: int, episodes: int, forks: int) -> list[Samples]:
    """Those of all peers, taken in turns."""
    speeds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    costs: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for repeat in range(repeats):
        shift = repeat % len(peers)
        for peer in (*peers[shift:], *peers[:shift]):
            speeds[peer.name].append(steps_per_cpu_second(peer, episodes))
            costs[peer.name].append(fork_cost(peer, forks))
    return [
        Samples(peer=peer, speeds=speeds[peer.name], forks_ms=costs[peer.name], fork_kb=fork_memory(peer, forks), right=copies_rightly(peer)) for peer in peers
    ]


def compare(all_samples: Sequence[Samples]) -> list[dict[str, Any]]:
    """Medians, and ratios to the first."""
    base = all_samples[0]
    return [
        {
            "name": each.peer.name,
            "steps_per_cpu_second": statistics.median(each.speeds),
            "steps_ratio": statistics.median(a / b for a, b in zip(each.speeds, base.speeds, strict=True)),
            "fork_ms": statistics.median(each.forks_ms),
            "fork_ratio": statistics.median(a / b for a, b in zip(each.forks_ms, base.forks_ms, strict=True)),
            "fork_kb": each.fork_kb,
            "copy_right": each.right,
        }
        for each in all_samples
    ]


def comparisons(all_samples: Sequence[Samples]) -> list[comparison.Comparison]:
    """``ToolEnv`` beside each of the others that is no adapter of ours."""
    ours = next(each for each in all_samples if each.peer.name == OURS)
    lines = []
    for each in all_samples:
        if "arpo" in each.peer.name:
            continue
        note = "" if each.right else "its copy acts on its parent's tools"
        peer = each.peer.name
        lines += [
            comparison.compared("steps", ours.speeds, each.speeds, peer=peer, unit="steps / CPU s", more_is_better=True, note=each.peer.note),
            comparison.compared("fork", ours.forks_ms, each.forks_ms, peer=peer, unit="CPU ms", note=note),
            comparison.compared("memory of a fork", [ours.fork_kb], [each.fork_kb], peer=peer, unit="kB", note=note),
        ]
    return lines


def foreign_forks(missing: Mapping[str, str], repeats: int, forks: int) -> list[dict[str, Any]]:
    """How environments of other libraries fork behind their adapters, and at what cost after three turns."""
    cases: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = []
    if "gem" not in missing:
        from arpo_env.interop.gem import GemEnv

        for forks_by in ("copy", "replay"):
            cases.append(
                ("GEM GuessTheNumber", lambda by=forks_by: GemEnv("game:GuessTheNumber-v0-hard", forks=by), ("\\boxed{25}", "\\boxed{10}", "\\boxed{40}"))
            )
            cases.append(("GEM Sudoku 9 x 9", lambda by=forks_by: GemEnv("game:Sudoku-v0-hard", forks=by), ("\\boxed{1 1 1}",) * 3))
    if "textarena" not in missing:
        from arpo_env.interop.textarena import TextArenaEnv, bracketed_move

        for forks_by in ("copy", "replay"):
            cases.append(("TextArena GuessTheNumber", lambda by=forks_by: TextArenaEnv("GuessTheNumber-v0", forks=by), ("[5]", "[10]", "[15]")))
            cases.append(("TextArena TicTacToe", lambda by=forks_by: TextArenaEnv("TicTacToe-v0", 2, bracketed_move, forks=by), ("[4]", "[0]")))
    if "skyrl_gym" not in missing:
        from arpo_env.interop.skyrl_gym import SkyRLGymEnv

        rows = [{"prompt": "2 + 3?", "reward_spec": {"ground_truth": "5"}, "extra_info": {"max_turns": 5}}]
        for forks_by in ("copy", "replay"):
            cases.append(("SkyRL-Gym gsm8k_multi_turn", lambda by=forks_by: SkyRLGymEnv("gsm8k_multi_turn", rows, forks=by), ("hm",) * 3))
    if "reasoning_gym" not in missing:
        from arpo_env.interop.reasoning_gym import ReasoningGymEnv

        cases.append(("reasoning-gym basic_arithmetic", lambda: ReasoningGymEnv("basic_arithmetic"), ("hm",) * 3))
    return [_foreign_fork(*case, repeats=repeats, forks=max(1, forks // 10)) for case in sorted(cases, key=lambda case: case[0])]


def _foreign_fork(name: str, make: Callable[[], Any], turns: Sequence[str], *, repeats: int, forks: int) -> dict[str, Any]:
    env = make()
    env.reset(seed=2)
    played = 0
    for turn in turns:
        played += 1
        if any(env.step(turn)[2:4]):
            break
    first_ms = copying(env, arpo_env.fork, 1)
    forks, repeats = (forks, repeats) if first_ms < 20 else (1, 3)
    return {
        "name": name,
        "forks_by": arpo_env.fork_support(env),
        "turns": played,
        "fork_ms": statistics.median(copying(env, arpo_env.fork, forks) for _ in range(repeats)),
    }


def importing(module: str, repeats: int) -> dict[str, Any]:
    """CPU seconds, modules and memory of a process that imports ``module``, beyond those of one that imports nothing."""

    def run(code: str) -> tuple[float, int, float]:
        tail = (
            "import sys, time; kb = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS')];"
            " print(time.process_time(), len(sys.modules), int(kb[0]) / 1024)"
        )
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", f"{code}; {tail}"], capture_output=True, text=True, check=True).stdout.split()[-3:]
        return float(out[0]), int(out[1]), float(out[2])

    pairs = [(run(f"import {module}"), run("pass")) for _ in range(repeats)]
    cpu, modules, memory = (statistics.median(loaded[k] - bare[k] for loaded, bare in pairs) for k in range(3))
    return {"module": module, "cpu_s": cpu, "modules": int(modules), "memory_mb": memory}


PACKAGES = {"gem": "gem-llm", "skyrl_gym": "skyrl-gym", "textarena": "textarena", "reasoning_gym": "reasoning-gym", "verifiers": "verifiers"}


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "?"


QUOTED = [
    {"what": "verifiers 0.3.1, ToolEnv.env_response", "figure": "62,000 turns a second of the clock"},
    {"what": "verifiers 0.3.1, whole rollout loop with a scripted model", "figure": "2,030 turns a second of the clock"},
    {"what": "verifiers 0.3.1, a Python tool call", "figure": "16 ms"},
    {"what": "verifiers 0.3.1, copy of a rollout's state", "figure": "fails: cannot pickle 'mappingproxy'"},
]
"""Measured once with the library's own script on 2 cores (AVX2, 24 GiB, Python 3.11), 2026-11; not in this run."""


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    missing = {module: f"pip install {name}" for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None}
    peers = [*own_peers(), *(() if "gem" in missing else gem_peers()), *(() if "skyrl_gym" in missing else skyrl_peers())]
    installed = [module for module in PACKAGES if module not in missing]
    taken = samples(peers, arguments.repeats, arguments.episodes, arguments.forks)
    return {
        "versions": {"gymnasium": version("gymnasium"), "arpo": version("arpo")} | {module: version(PACKAGES[module]) for module in installed},
        "repeats": arguments.repeats,
        "environments": compare(taken),
        "comparisons": comparisons(taken),
        "foreign": foreign_forks(missing, arguments.repeats, arguments.forks),
        "imports": [importing(module, arguments.imports) for module in ("gymnasium", "arpo_env", *installed)],
        "missing": missing,
    }


def as_part(result: Mapping[str, Any], command: str) -> comparison.Part:
    """The same for the suite."""
    return comparison.Part(
        title="4. Environments: steps and forks",
        command=command,
        about={"versions": result["versions"], "repeats": result["repeats"], "episode": "eight calls of a calculator and an answer"},
        rows=result["comparisons"],
        figures={
            "All, with what our adapters cost on top of a library": result["environments"],
            "Environments of other libraries behind our adapters, after some turns": result["foreign"],
            "Imports": result["imports"],
            "Quoted, not measured in this run": QUOTED,
        },
        missing=[f"{package}: {why}" for package, why in result["missing"].items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="five repetitions, one process for each import: under a minute")
    parser.add_argument("--repeats", type=int, help="15, or 5 with --short")
    parser.add_argument("--episodes", type=int, default=200, help="episodes of nine steps in each repetition")
    parser.add_argument("--forks", type=int, default=200, help="forks in each repetition")
    parser.add_argument("--imports", type=int, help="processes that import each library: 3, or 1 with --short")
    parser.add_argument("--out", type=Path, help="write the part, and the figures under their own names, to this JSON file")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (5 if arguments.short else 15)
    arguments.imports = arguments.imports or (1 if arguments.short else 3)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = figures(arguments)
    part = as_part(result, "python benchmarks/performance/environments.py" + (" --short" if arguments.short else ""))
    comparison.show(part)
    comparison.write(arguments.out, part, {name: result[name] for name in ("versions", "repeats", "environments", "foreign", "imports")})


if __name__ == "__main__":
    main()
