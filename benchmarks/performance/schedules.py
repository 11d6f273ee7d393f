"""Wall time of sampling 16 trees: one task a trajectory, beside the barrier schedules of the ARPO authors' code and of TRL, and the longest path.

    python benchmarks/performance/schedules.py [--short] [--seeds 7] [--real 1] [--out part.json]

Nothing is computed but the schedule: a scripted policy takes a drawn number of tokens at a stated speed for each turn, tools take drawn seconds. All draws
are functions of (tree, place in it, turn), so that every schedule meets the same latencies. Ours is ``arpo_algo.rollout.sample_groups`` itself, with its
threads, on a clock that jumps (``virtual_clock.py``); ``--real N`` repeats N seeds in real time to show that the clock tells the truth. The barrier schedules
are simulations of what their sources do:

* *authors*: one ``generate`` for all rows, then all tool calls in a pool of 64 threads, then the next round; branch slots first come, first served; a prompt
  whose trajectories have all ended gets one fresh trajectory a round (``vllm_rollout_with_tools.py`` lines 264-280, 379, 463-508 of RUC-NLPIR/ARPO a95cd08);
* *barrier, same tree*: the same two barriers over the very tree that ours sampled, which leaves the barrier as the only difference;
* *TRL*: one ``generate`` for all rows, then the tool calls one sample after another (``grpo_trainer.py`` lines 1957-2010 of TRL 1.16), no branching.

The engine is as fast with one turn as with all of them; a real one is faster with the few that a barrier waits for, so barriers look somewhat worse here.
Bound: the slowest path from a question to an answer, nothing waited for. Rounds are calls of the engine one after another: with barriers as they happen, ours
as many as its trees would take behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import virtual_clock
from comparison import Comparison, Part, compared, write
from measure import Row

from arpo_algo.branching import AuthorsBranching, BranchingStrategy, BranchPoint, EntropyBranching, NoBranching
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.rollout import RolloutConfig, derive_seed, sample_groups
from arpo_algo.tree import Node, RolloutTree
from arpo_env.core import ForkableEnv

TREES, GROUP, INITIAL = 16, 16, 8
AUTHORS_THREADS = 64
VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        return self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn costs and whether it calls a tool."""

    generate: float
    """Seconds."""
    tool: float | None
    """Seconds; None: the turn is an answer."""
    entropy: float

    def text(self) -> str:
        return f"{self.generate!r} {'end' if self.tool is None else repr(self.tool)}"


@dataclass(frozen=True, kw_only=True)
class Script:
    """Draws turns."""

    tool: LogNormal
    """Seconds of a call."""
    token_seconds: float
    """Seconds that a token takes."""
    tokens: LogNormal = LogNormal(median=80, sigma=0.6)
    """Tokens of a turn."""
    answers: float = 0.25
    """Chance that a turn is an answer."""
    max_calls: int = 6

    def turn(self, seed: int, depth: int) -> Turn:
        """The turn after ``depth`` observations whose seed the sampler has derived from its place in the tree."""
        rng = random.Random(seed)
        generate, tool = self.token_seconds * self.tokens.draw(rng), self.tool.draw(rng)
        entropy, answer = rng.random(), rng.random() < self.answers
        return Turn(generate, None if answer or depth >= self.max_calls else tool, entropy)


# -- ours: the real sampler ----------------------------------------------------------------------------------------------------------------------------


class Letters:
    """A codec of one id a character."""

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [ord(c) for message in messages for c in message["content"]]

    def observation(self, text: str, messages: Sequence[Mapping[str, Any]], role: str, *, closed: bool) -> list[int]:
        return [ord(c) for c in text]

    def encode(self, text: str, *, plain: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class TimedTools(ForkableEnv):
    """A tool that takes as long as the turn says, by ``sleep``."""

    shared: ClassVar[frozenset[str]] = ForkableEnv.shared | {"sleep", "action_space", "observation_space"}

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self.sleep = sleep

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "?", {"messages": [{"role": "user", "content": "?"}]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        seconds = action.split()[1]
        if seconds == "end":
            return "", 1.0, True, False, {"stop_reason": "answer"}
        self.sleep(float(seconds))
        return "<", 0.0, False, False, {"observation_role": "inline"}


class TimedPolicy:
    """Plays a script; a turn takes as long as it says on the clock of the loop."""

    version, context_length, vocab_size = 0, 100_000, VOCABULARY

    def __init__(self, script: Script) -> None:
        self.script = script

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        turn = self.script.turn(params.seed, prompt_ids.count(ord("<")))
        await asyncio.sleep(turn.generate)
        ids = [ord(c) for c in turn.text()]
        return Generation(token_ids=ids, logprobs=[-turn.entropy] * len(ids), entropies=[turn.entropy] * len(ids), stop_reason="stop")


def settings(*, env_workers: int, max_live: int) -> RolloutConfig:
    return RolloutConfig(group_size=GROUP, initial=INITIAL, env_workers=env_workers, max_live=max_live)


ROOMY = settings(env_workers=TREES * GROUP, max_live=TREES * GROUP)
"""A place for each trajectory and a thread for each tool call."""
FEW_THREADS = settings(env_workers=16, max_live=TREES * GROUP)
TWO_WAVES = settings(env_workers=16, max_live=TREES * GROUP // 2)
"""Half of the trees wait until others have ended."""


def sampling(script: Script, seed: int, strategy: BranchingStrategy, config: RolloutConfig, sleep: Callable[[float], None], trees: int = TREES) -> Any:
    return sample_groups(TimedTools(sleep), TimedPolicy(script), Letters(), strategy, config, [None] * trees, seed=seed)


def asynchronous(script: Script, seed: int, strategy: BranchingStrategy, config: RolloutConfig = ROOMY, trees: int = TREES) -> tuple[float, list[RolloutTree]]:
    """Virtual seconds of the real sampler, and what it sampled."""
    clock = virtual_clock.VirtualClock("arpo-env")
    sampled = virtual_clock.run(sampling(script, seed, strategy, config, clock.sleep, trees), clock)
    return clock.now, sampled


def in_real_time(script: Script, seed: int, strategy: BranchingStrategy) -> float:
    start = time.perf_counter()
    asyncio.run(sampling(script, seed, strategy, ROOMY, time.sleep))
    return time.perf_counter() - start


def turn_of(node: Node) -> tuple[float, float]:
    """Seconds of generation and of the tool call, 0 without one, of a policy node."""
    generate, tool = node.text.split()
    return float(generate), 0.0 if tool == "end" else float(tool)


def longest_path(trees: Iterable[RolloutTree]) -> float:
    """Seconds of the slowest trajectory if nothing ever waited."""
    return max(sum(sum(turn_of(node)) for node in trajectory.nodes() if node.sampled) for tree in trees for trajectory in tree.trajectories)


# -- schedules with barriers ---------------------------------------------------------------------------------------------------------------------------


def makespan(seconds: Iterable[float], workers: int) -> float:
    """When the last of the jobs ends that ``workers`` take up in this order."""
    free = [0.0] * workers
    for job in seconds:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def barrier(rounds: Sequence[Sequence[tuple[float, float]]], workers: int) -> float:
    """Seconds of rounds of (generation, tool call): every round waits for its slowest turn, then for its last tool call."""
    return sum(max(generate for generate, _ in turns) + makespan((tool for _, tool in turns if tool), workers) for turns in rounds if turns)


def rounds_of(trees: Iterable[RolloutTree]) -> list[list[tuple[float, float]]]:
    """The turns of sampled trees by round. A branch joins in the round after its observation, fresh trajectories when the rest of their tree has ended."""
    rounds: dict[int, list[tuple[float, float]]] = {}
    for tree in trees:
        seen: set[int] = set()
        last = 0
        for trajectory in sorted(tree.trajectories, key=lambda t: t.origin == "fresh"):
            fresh = trajectory.origin == "fresh"
            turns = [node for node in trajectory.nodes() if node.sampled]
            last = last if fresh else max(last, len(turns))
            for depth, node in enumerate(turns):
                if node.id not in seen:
                    rounds.setdefault(depth + (last if fresh else 0), []).append(turn_of(node))
            seen.update(node.id for node in turns)
    return [rounds[number] for number in sorted(rounds)]


@dataclass(slots=True)
class _Row:
    """A trajectory of the authors' batch."""

    path: tuple[int, ...]
    depth: int = 0
    windows: list[float] = field(default_factory=list)
    """Entropy of each of its turns, the first one's being the baseline."""
    ended: bool = False


def authors_rounds(script: Script, seed: int, trees: int = TREES) -> list[list[tuple[float, float]]]:
    """The turns of each round under the authors' budget rules."""
    seeds = [derive_seed(seed, index) for index in range(trees)]
    rng = np.random.default_rng(seed)
    batch = [[_Row((0, index)) for index in range(INITIAL)] for _ in seeds]
    rounds = []
    while any(not row.ended for rows in batch for row in rows):
        turns = []
        for rows, tree in zip(batch, seeds, strict=True):
            turns += _authors_round(script, rows, tree, rng)
        rounds.append(turns)
    return rounds


def _authors_round(script: Script, rows: list[_Row], tree: int, rng: np.random.Generator) -> list[tuple[float, float]]:
    """Plays one turn of every live row, then branches and refills."""
    turns, called = [], []
    for row in [row for row in rows if not row.ended]:
        turn = script.turn(derive_seed(tree, *row.path, row.depth), row.depth)
        turns.append((turn.generate, turn.tool or 0.0))
        row.windows.append(turn.entropy)
        row.ended = turn.tool is None
        row.depth += 1
        if not row.ended:
            called.append(row)
    points = [
        BranchPoint(node=0, trajectory=n, depth=row.depth, initial=(row.windows[0],), after=(), before=(row.windows[-1],), vocab_size=VOCABULARY)
        for n, row in enumerate(called)
    ]
    for row, given in zip(called, AuthorsBranching().allocate(points, GROUP - len(rows), rng), strict=True):
        rows += [_Row((*row.path, row.depth, number + 2), row.depth, [*row.windows]) for number in range(given.children)]
    if all(row.ended for row in rows) and len(rows) < GROUP:
        rows.append(_Row((1, len(rows))))
    return turns


# -- the table -----------------------------------------------------------------------------------------------------------------------------------------

TOOLS = {
    "0.2 s, all alike": LogNormal(median=0.2, sigma=0.0),
    "log-normal, median 0.2 s, sigma 1": LogNormal(median=0.2, sigma=1.0),
    "log-normal, median 0.2 s, sigma 2": LogNormal(median=0.2, sigma=2.0),
}
TOKEN_SECONDS = 0.010
COMMON = "log-normal, median 0.2 s, sigma 1"
CASES = {
    **{f"engine 10 ms a token, tools {name}": Script(tool=tool, token_seconds=TOKEN_SECONDS) for name, tool in TOOLS.items()},
    f"engine of no time, tools {COMMON}": Script(tool=TOOLS[COMMON], token_seconds=0.0),
}


@dataclass(frozen=True)
class Played:
    """One batch under one schedule."""

    seconds: float
    bound: float
    """Seconds of the longest path of what was sampled."""
    rounds: Sequence[Sequence[tuple[float, float]]]
    """(Seconds of generation, of the tool call) of each turn, round by round."""

    @property
    def calls(self) -> int:
        return sum(tool > 0 for turns in self.rounds for _, tool in turns)

    @property
    def generated(self) -> float:
        """Seconds of generation, all turns one after another."""
        return sum(generate for turns in self.rounds for generate, _ in turns)


def compare(script: Script, seed: int, *, all_schedules: bool = True) -> dict[str, Played]:
    """The batch under each schedule, or under those of ARPO with room for all."""
    branched, trees = asynchronous(script, seed, EntropyBranching())
    bound, same, authors = longest_path(trees), rounds_of(trees), authors_rounds(script, seed)
    found = {
        "ARPO, ours": Played(branched, bound, same),
        "ARPO, barrier, same tree": Played(barrier(same, AUTHORS_THREADS), bound, same),
        "ARPO, authors' rules": Played(barrier(authors, AUTHORS_THREADS), bound, authors),
    }
    if not all_schedules:
        return found
    chains, groups = asynchronous(script, seed, NoBranching())
    chain_bound, plain = longest_path(groups), rounds_of(groups)
    return found | {
        "ARPO, ours, env_workers=16": Played(asynchronous(script, seed, EntropyBranching(), FEW_THREADS)[0], bound, same),
        "ARPO, ours, env_workers=16, max_live=128": Played(asynchronous(script, seed, EntropyBranching(), TWO_WAVES)[0], bound, same),
        "GRPO, ours": Played(chains, chain_bound, plain),
        "GRPO, barrier, 64 threads": Played(barrier(plain, AUTHORS_THREADS), chain_bound, plain),
        "GRPO, TRL's schedule": Played(barrier(plain, 1), chain_bound, plain),
    }


def rows_of(name: str, found: Sequence[Mapping[str, Played]]) -> list[Row]:
    """Medians over seeds of seconds, with those of the ratio to the longest path in the note."""
    rows = []
    for schedule in found[0]:
        seconds = sorted(each[schedule].seconds for each in found)
        ratio = statistics.median(each[schedule].seconds / each[schedule].bound for each in found)
        p90 = seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))]
        rows.append(Row(f"{name}: {schedule}", statistics.median(seconds), p90, len(seconds), "s", f"{ratio:.2f} x longest path"))
    return rows


BESIDE = [
    ("ARPO, ours", "ARPO, authors' rules", "the authors' schedule"),
    ("ARPO, ours", "ARPO, barrier, same tree", "the same trees behind barriers"),
    ("GRPO, ours", "GRPO, TRL's schedule", "TRL's schedule"),
]


def comparisons(name: str, script: Script, found: Sequence[Mapping[str, Played]]) -> list[Comparison]:
    """Wall time of ours beside each peer, at most as much better as the longest path allows; then what ARPO computes beside the authors' schedule."""
    rows = []
    for ours, theirs, peer in BESIDE:
        if theirs in found[0]:
            pairs = [(each[ours], each[theirs]) for each in found]
            limit = statistics.median(other.seconds / mine.bound for mine, other in pairs)
            ours_s, theirs_s = ([each.seconds for each in side] for side in zip(*pairs, strict=True))
            rows.append(compared(f"{ours.split(',')[0]}, {name}: wall time", ours_s, theirs_s, peer=peer, unit="s", limit=limit))
    mine, other = ([each[side] for each in found] for side in BESIDE[0][:2])
    counts: list[tuple[str, str, Callable[[Played], float]]] = [
        ("engine rounds", "ours behind barriers, of which it has none", lambda played: len(played.rounds)),
        ("tool calls", "", lambda played: played.calls),
    ]
    if script.token_seconds:
        counts.append(("tokens", "", lambda played: played.generated / script.token_seconds))
    for what, note, count in counts:
        rows.append(compared(f"ARPO, {name}: {what}", [*map(count, mine)], [*map(count, other)], peer=BESIDE[0][2], unit=what, note=note))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="the three distributions, ARPO only: seconds in place of minutes")
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--real", type=int, default=None, help="seeds to repeat in real time: 1, or none in the short form")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    seeds, real = options.seeds, (not options.short) if options.real is None else options.real
    rows: list[Comparison] = []
    seconds: list[Row] = []
    for name, script in CASES.items():
        if options.short and not script.token_seconds:
            continue
        found = [compare(script, seed, all_schedules=not options.short) for seed in range(seeds)]
        seconds += (new := rows_of(name, found))
        print(f"\n{name}")
        for row in new:
            print(f"  {row.name.split(': ')[1]:<42} {row.median:8.2f} s   p90 {row.p90:8.2f} s   {row.note}", flush=True)
        rows += (beside := comparisons(name, script, found))
        for line in beside:
            print(f"  {line.name.split(': ')[1]:<14} {line.ours:9.1f} {line.unit}, {line.peer} {line.theirs:9.1f}: {line.ratio:.2f} x", flush=True)
    script = Script(tool=TOOLS[COMMON], token_seconds=TOKEN_SECONDS)
    for seed in range(real):
        told, took = asynchronous(script, seed, EntropyBranching())[0], in_real_time(script, seed, EntropyBranching())
        print(f"\nreal time, seed {seed}: the virtual clock said {told:.2f} s, the wall clock {took:.2f} s")
        seconds.append(Row(f"real time, seed {seed}", took, took, 1, "s", f"virtual clock {told:.2f} s"))
    about = {"trees": TREES, "group_size": GROUP, "initial": INITIAL, "seeds": seeds, "clock": "virtual"}
    command = f"python benchmarks/performance/schedules.py{' --short' if options.short else ''}"
    lines = [{"schedule": row.name, "s": row.median, "p90": row.p90, "n": row.n, "note": row.note} for row in seconds]
    write(options.out, Part(title="Sampling beside schedules with barriers", command=command, about=about, rows=rows, figures={"Seconds": lines}))


if __name__ == "__main__":
    main()
