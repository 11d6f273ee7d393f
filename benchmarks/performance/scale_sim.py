"""What the sampler itself costs: CPU seconds and memory per trajectory with up to 10,000 of them alive at once, and the speed at which it is the brake.

    python benchmarks/performance/scale_sim.py [--live 96 304 1000 3200 10000] [--saturation] [--out figures.json]

The real sampling loop, chat codec (byte-level BPE) and ``ToolEnv`` with ``EntropyBranching`` (M=16, N=8); only the engine is a script, which takes as long for
a turn as an engine that was measured (``ENGINE``) with as many turns under way, on a clock that jumps. An engine that is slower than the sampler hides what the
sampler costs, one that is faster does not: the figure to compare with is tokens a second. Each size runs in a process of its own. ``--saturation`` adds runs in
real time with faster and faster engines: where what they deliver stops growing, one sampling process is spent.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import virtual_clock
from measure import apart, exponent, machine

import arpo_env
from arpo_algo.branching import EntropyBranching
from arpo_algo.codec import ChatCodec
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.rollout import RolloutConfig, sample_groups
from arpo_algo.tree import RolloutTree
from arpo_env.tools.base import Tool

ROOT = Path(__file__).resolve().parents[2]
GROUP, INITIAL, WINDOW = 16, 8, 20
ENGINE = {1: 168.0, 16: 1628.0, 64: 3003.0}
"""Tokens a second of vLLM 0.32 on one core with a model of 560,000 parameters, by turns under way; measured, constant beyond the last."""
ANSWERS, MAX_TURNS = 0.3, 8
"""Chance that a turn is an answer, and the most turns of a trajectory."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def step_seconds(engine: Mapping[int, float], under_way: int) -> float:
    """Seconds that an engine takes to give each of its turns one token, interpolated between measured concurrencies."""
    points = sorted((c, c / rate) for c, rate in engine.items())
    at = bisect_left([c for c, _ in points], under_way)
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1] * under_way / points[-1][0]
    (c0, s0), (c1, s1) = points[at - 1], points[at]
    return s0 + (s1 - s0) * (under_way - c0) / (c1 - c0)


class Meter:
    """Seconds of the event loop by what they went into. On the virtual clock it never waits, so that their shares are those of its CPU seconds; to ask for
    CPU seconds here would cost more than what is measured."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"engine": 0.0, "codec": 0.0, "environment": 0.0}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


METER = Meter()


# -- the parts -----------------------------------------------------------------------------------------------------------------------------------------


class Lookup(Tool):
    """Answers with a page of text."""

    name = "search"
    description = "Finds a passage."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    timeout = None

    def call(self, *, query: str) -> str:
        return passage(query, 150)


def passage(about: str, words: int) -> str:
    """So many words of the project's README, from a place that ``about`` decides."""
    text = corpus()
    start = random.Random(about).randrange(len(text) - words)
    return " ".join(text[start : start + words])


@cache
def corpus() -> list[str]:
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("<", "(").replace(">", ")").split()


class MeteredEnv(arpo_env.ToolEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        with METER("environment"):
            return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with METER("environment"):
            return super().step(action)

    def fork_many(self, n: int) -> list[Any]:
        with METER("environment"):
            return super().fork_many(n)

    def close(self) -> None:
        with METER("environment"):
            super().close()


class MeteredCodec(ChatCodec):
    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        with METER("codec"):
            return super().prompt(messages)

    def observation(self, text: str, messages: Sequence[Mapping[str, Any]], role: str, *, closed: bool) -> list[int]:
        with METER("codec"):
            return super().observation(text, messages, role, closed=closed)

    def decode(self, token_ids: Sequence[int]) -> str:
        with METER("codec"):
            return super().decode(token_ids)


class Engine:
    """Plays turns that were encoded before; hands out fresh lists of fresh numbers, as an engine does."""

    version, context_length = 0, 32_768

    def __init__(self, tokenizer: Any, seconds_per_token: Callable[[int], float]) -> None:
        self.vocab_size = len(tokenizer)
        self.seconds_per_token = seconds_per_token
        self.under_way = self.most = self.tokens = self.turns = 0
        self._call, self._answer = (
            [array("l", tokenizer.encode(f"<think>{passage(f'{tag}{n}', 60)}</think><{tag}>{passage(str(n), 6)}</{tag}>")) for n in range(64)]
            for tag in ("search", "answer")
        )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        with METER("engine"):
            rng = random.Random(params.seed)
            ids = (self._answer if rng.random() < ANSWERS else self._call)[rng.randrange(64)].tolist()
            values = array("d", (rng.random() for _ in ids))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            seconds = len(ids) * self.seconds_per_token(self.under_way)
        await asyncio.sleep(seconds)
        with METER("engine"):
            self.under_way -= 1
            self.turns += 1
            self.tokens += len(ids)
            return Generation(token_ids=ids, logprobs=[-v for v in values], entropies=values.tolist(), stop_reason="stop")


def build_tokenizer() -> Any:
    """A byte-level BPE of 4,096 tokens trained on the documentation, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    tokenizer.train_from_iterator(pages, trainers.BpeTrainer(vocab_size=4096, special_tokens=specials, initial_alphabet=alphabet, show_progress=False))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    wrapped.chat_template = TEMPLATE
    return wrapped


# -- one run -------------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """What sampling ``trajectories`` cost: CPU seconds and bytes, for all of them together."""

    trajectories: int
    most_live: int
    """Turns under way at once."""
    turns: int
    sampled_tokens: int
    unique_tokens: int
    cpu: float
    engine: float
    """The script's own CPU seconds, which a real engine has in another process."""
    codec: float
    environment: float
    memory: int
    seconds: float
    """On the clock of the run."""

    @property
    def scheduler(self) -> float:
        return self.cpu - self.engine - self.codec - self.environment

    @property
    def sampler(self) -> float:
        """All that is not the script."""
        return self.cpu - self.engine


def sample(live: int, seconds_per_token: Callable[[int], float], *, env_workers: int = 0, real: bool = False) -> Run:
    """Sample the groups of which ``live`` trajectories start at once."""
    tokenizer = build_tokenizer()
    engine, codec = Engine(tokenizer, seconds_per_token), MeteredCodec(tokenizer)
    env = MeteredEnv([{"question": passage("question", 40), "answer": "84"}], [Lookup()], reward=arpo_env.ExactMatch(), max_turns=MAX_TURNS)
    groups = max(1, live // INITIAL)
    config = RolloutConfig(group_size=GROUP, initial=INITIAL, window=WINDOW, max_live=groups * GROUP, env_workers=env_workers)
    main = sample_groups(env, engine, codec, EntropyBranching(), config, [{"task": 0}] * groups, seed=0)
    gc.collect()
    METER.seconds.update(dict.fromkeys(METER.seconds, 0.0))
    memory, cpu, start = peak_bytes(), time.process_time(), time.perf_counter()
    clock = virtual_clock.VirtualClock("arpo-env")
    trees: list[RolloutTree] = asyncio.run(main) if real else virtual_clock.run(main, clock)
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
    return Run(
        trajectories=sum(len(tree.trajectories) for tree in trees),
        most_live=engine.most,
        turns=engine.turns,
        sampled_tokens=engine.tokens,
        unique_tokens=sum(tree.unique_tokens for tree in trees),
        cpu=cpu,
        memory=peak_bytes() - memory,
        seconds=seconds if real else clock.now,
        **{name: part * min(1.0, cpu / seconds) for name, part in METER.seconds.items()},
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recorded(live: int, env_workers: int = 0) -> Run:
    """With the engine of the table, on the clock that jumps."""
    return sample(live, lambda under_way: step_seconds(ENGINE, under_way), env_workers=env_workers)


def at_speed(live: int, tokens_a_second: float) -> Run:
    """In real time, with an engine that gives so many tokens a second to all turns together, however many they are."""
    return sample(live, lambda under_way: live / tokens_a_second, real=True)


# -- the report ----------------------------------------------------------------------------------------------------------------------------------------


def line(run: Run) -> str:
    n = run.trajectories
    parts = "  ".join(f"{name} {1e3 * getattr(run, name) / n:.2f}" for name in ("sampler", "scheduler", "codec", "environment"))
    per_token = 1e6 * run.sampler / run.sampled_tokens
    return (
        f"live {run.most_live:6d}  trajectories {n:6d}  CPU ms each: {parts}   us a token {per_token:.1f}"
        f"   KiB each {run.memory / n / 1024:.1f}   clock {run.seconds:.1f} s   busy {100 * run.sampler / run.seconds:.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--live", type=int, nargs="+", default=[96, 304, 1000, 3200, 10_000])
    parser.add_argument("--repeats", type=int, default=1, help="runs of each size, taken in turns; the one with the least CPU seconds counts")
    parser.add_argument("--saturation", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "runs": [], "threads": [], "saturation": []}
    found: dict[int, list[Run]] = {}
    for live in options.live * options.repeats:
        found.setdefault(live, []).append(run := apart(recorded, live))
        print(line(run), flush=True)
        report["runs"].append(asdict(run))
    runs = [min(found[live], key=lambda run: run.sampler) for live in options.live]
    if len(runs) > 1:
        for name in ("sampler", "scheduler", "codec", "environment", "memory"):
            grows = exponent([run.trajectories for run in runs], [getattr(run, name) for run in runs])
            print(f"{name} grows with trajectories to the power {grows:.3f}")
    last = runs[-1]
    print(f"one process drives at most {last.trajectories / last.sampler:.0f} trajectories/s, {last.sampled_tokens / last.sampler:.0f} sampled tokens/s")
    threads = apart(recorded, 304, 16)
    print("environment steps in 16 threads:\n" + line(threads), flush=True)
    report["threads"].append(asdict(threads))
    for share in (0.25, 0.5, 1.0, 2.0, 4.0) if options.saturation else ():
        asked = share * last.sampled_tokens / last.sampler
        run = apart(at_speed, 1000, asked)
        print(f"engine of {asked:.0f} tokens/s for 1,000 turns: {run.sampled_tokens / run.seconds:.0f} tokens/s came, wall {run.seconds:.1f} s", flush=True)
        report["saturation"].append({"asked": asked, **asdict(run)})
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
