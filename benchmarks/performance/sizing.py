"""How many engines and learner ranks, how much memory, how long a step: calculated for 1, 8 and 64 GPUs and models of 3 to 32 billion parameters.

    python benchmarks/performance/sizing.py                 # the tables of docs/scaling.md
    python benchmarks/performance/sizing.py --write         # put them into the page

NOTHING HERE IS MEASURED ON A GPU. It is arithmetic over the assumptions below, each of which names its source or says that it has none; a change of one is a
change of the table. For each case every placement that fits in memory is tried (colocated or split, tensor parallel size, share of engines) and the one
with the shortest step is shown. What is measured is said in docs/scaling.md with the command that measured it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

GB = 1e9
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- written by benchmarks/performance/sizing.py -->", "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shape of a dense transformer, as in its public configuration."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int = 128
    vocabulary: int = 151_936
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


MODELS = (
    Model(name="3B", layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, tied=True),  # Qwen2.5-3B
    Model(name="8B", layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8),  # Qwen3-8B
    Model(name="14B", layers=40, hidden=5120, intermediate=17408, heads=40, kv_heads=8),  # Qwen3-14B
    Model(name="32B", layers=64, hidden=5120, intermediate=25600, heads=64, kv_heads=8),  # Qwen3-32B
)


@dataclass(frozen=True, kw_only=True)
class GPU:
    memory: float
    """GB, as sold."""
    bandwidth: float
    """Of its memory, GB/s."""
    flops: float = 989e12
    """Dense bfloat16, a second."""


GPUS = (GPU(memory=80, bandwidth=3350), GPU(memory=141, bandwidth=4800))
"""H100 SXM and H200 SXM, from the vendor's data sheets."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step."""

    groups: int = 128
    """Tasks a step [the ARPO authors' scripts: 128]."""
    group_size: int = 16
    """M [paper: 16]."""
    initial: int = 8
    """N [paper: 8]."""
    prompt: int = 600
    """Tokens of system prompt and question [assumed]."""
    calls: int = 3
    """Tool calls of a trajectory [assumed]."""
    turn: int = 200
    """Tokens that the policy samples in a turn [assumed]."""
    observation: int = 400
    """Tokens of a tool result [assumed]."""
    branch_after: int = 1
    """Call after which the branches start [measured with all threshold rules: 90 to 98 % of the budget goes to the first result]."""

    @property
    def length(self) -> int:
        """Tokens of a trajectory."""
        return self.prompt + (self.calls + 1) * self.turn + self.calls * self.observation

    @property
    def trajectories(self) -> int:
        return self.groups * self.group_size

    @property
    def sampled(self) -> int:
        """Tokens that the engines sample in a step: what branches share is sampled once."""
        branched = self.group_size - self.initial
        turns = self.group_size * (self.calls + 1) - branched * self.branch_after
        return self.groups * turns * self.turn

    @property
    def turns(self) -> int:
        """Turns that are sampled in a step."""
        return self.sampled // self.turn

    @property
    def unique(self) -> int:
        """Tokens of the trees, shared ones counted once: what the engines' prefix cache has to hold and to prefill at least."""
        branched, shared = self.group_size - self.initial, self.branch_after * (self.turn + self.observation)
        return self.groups * (self.prompt + self.group_size * (self.length - self.prompt) - branched * shared)

    @property
    def total(self) -> int:
        """Tokens of all trajectories: what the learner's rows hold."""
        return self.trajectories * self.length


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the calculation takes for granted. In brackets the source, or "assumed"."""

    decode_efficiency: float = 0.6
    """Share of memory bandwidth that decoding reaches [assumed]."""
    prefill_efficiency: float = 0.5
    """Share of peak FLOP/s that prefill reaches [assumed]."""
    step_overhead: float = 0.004
    """Seconds that each decoding step costs besides [assumed]."""
    tensor_parallel_efficiency: float = 0.85
    """Left of the speed for each doubling of GPUs under one engine [assumed]."""
    max_batch: int = 256
    """Turns that an engine decodes at once [a setting, ``policy.max_batch``]; ``max_live`` and ``env_workers`` are taken to be large enough for all engines."""
    engine_share: float = 0.9
    """Of a GPU's memory that may be filled [vLLM's ``gpu_memory_utilization``]."""
    engine_overhead: float = 4.0
    """GB that an engine needs for activations and graphs [assumed]."""
    min_cache: float = 5.0
    """GB of keys and values below which a placement counts as too small [assumed]."""
    tool_seconds: float = 0.33
    """Mean of a log-normal with median 0.2 s and sigma 1 [the latencies of schedules.py]."""
    slowest: float = 2.0
    """Slowest trajectory of a step in mean trajectories [assumed]."""
    waiting: float = 1.5
    """Wall time of ``EntropyBranching`` in slowest trajectories, engines permitting [measured: schedules.py]."""
    sampler_turn: float = 0.003
    """CPU seconds of scheduler, codec and environment a turn, in one sampling process a machine [measured: scale_sim.py]."""
    mfu: float = 0.35
    """Share of peak FLOP/s that the learner reaches [assumed]."""
    micro_batch: int = 16_384
    """``micro_batch_tokens`` [a setting]."""
    node_bandwidth: float = 300.0
    """GB/s between two GPUs of a machine in collectives [assumed; NVLink 4: 450 a direction]."""
    network_bandwidth: float = 40.0
    """GB/s a GPU between machines [assumed; one 400 Gbit/s adapter a GPU: 50]."""
    transfer_bandwidth: float = 8.25
    """GB/s of weights from rank 0 to the engines [what verl reports for a 30B model on 32 GPUs over NCCL]."""
    node: int = 8
    """GPUs of a machine."""
    state_bytes: int = 16
    """Of a trained parameter on the learner: weight, gradient and two moments of AdamW in float32 [the learner]."""
    sent_bytes: int = 4
    """Of a parameter on its way to an engine: float32 [the learner's weights go as they are]."""
    logit_chunk: float = 0.27
    """GB of logits at once [``logit_chunk_mib=256``]; the output layer takes 3.97 times as much [measured: memory.py]."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who does what. ``ranks`` equal to all GPUs with ``engines`` on the same ones is colocated."""

    gpus: int
    ranks: int
    engines: int
    tensor_parallel: int
    lora: bool = False

    @property
    def colocated(self) -> bool:
        return self.ranks + self.engines * self.tensor_parallel > self.gpus


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a layout comes to. Memory in GB a GPU, times in seconds."""

    learner: float
    """State and activations."""
    weights: float
    """Of the engine."""
    cache: float
    """Left for keys and values."""
    live: int
    """Trajectories of mean length that all caches hold at once."""
    sent: float
    """GB that leave rank 0."""
    transfer: float
    sample: float
    update: float

    @property
    def on_policy(self) -> float:
        return self.sample + self.update + self.transfer

    @property
    def one_behind(self) -> float:
        """With ``max_staleness=1``: the longer of sampling and updating; new weights wait for neither."""
        return max(self.sample, self.update) + self.transfer


def activations(model: Model, a: Assumptions) -> float:
    """GB of a micro-batch under checkpointing, in bfloat16: the input of each layer, one layer in full, what lies around the layers, a chunk of logits."""
    numbers = model.layers * model.hidden + 4.68 * model.hidden + 4.94 * model.intermediate + 10.37 * model.hidden  # a token; the fit of memory.py
    return a.micro_batch * 2 * numbers / GB + 3.97 * a.logit_chunk


def state_memory(model: Model, layout: Layout, a: Assumptions) -> float:
    """GB a rank that stay between updates. With LoRA the frozen weights, in bfloat16 (a model object loaded so); the adapters are left out as small."""
    return (2 if layout.lora else a.state_bytes) * model.parameters / layout.ranks / GB


def learner_memory(model: Model, layout: Layout, a: Assumptions) -> float:
    """GB a rank during an update: state, activations, weights in bfloat16 (two gathered layers and the vocabulary's matrix; on one rank autocast's copy)."""
    gathered = 2 * (2 * model.layer_parameters + model.vocabulary * model.hidden)
    copy = 0 if layout.lora else 2 * model.parameters
    return state_memory(model, layout, a) + (copy if layout.ranks == 1 else gathered) / GB + activations(model, a)


def sampling_seconds(model: Model, layout: Layout, gpu: GPU, live: int, work: Work, a: Assumptions) -> float:
    """The largest of what the engines need for all tokens, the slowest trajectory for its own, and the sampling processes for all turns."""
    batch = max(1, min(a.max_batch, live // layout.engines, work.trajectories // layout.engines))
    t = layout.tensor_parallel
    speed = t * math.pow(a.tensor_parallel_efficiency, math.log2(t))
    read = (2 * model.parameters + batch * model.kv_bytes * work.length / 2) / (gpu.bandwidth * GB * a.decode_efficiency * speed)
    compute = 2 * model.parameters * batch / (gpu.flops * a.prefill_efficiency * speed)
    step = max(read, compute) + a.step_overhead
    decode = work.sampled / layout.engines / batch * step
    prefill = 2 * model.parameters * (work.unique - work.sampled) / layout.engines / (gpu.flops * a.prefill_efficiency * speed)
    path = (work.calls + 1) * work.turn * step + work.calls * a.tool_seconds
    return max(decode + prefill, a.waiting * a.slowest * path, a.sampler_turn * work.turns / math.ceil(layout.gpus / a.node))


def update_seconds(model: Model, layout: Layout, gpu: GPU, work: Work, a: Assumptions) -> float:
    """The larger of arithmetic and of gathering layers. Per parameter and token: 2 FLOPs for old log-probabilities (bfloat16 needs them from the learner),
    6 for forward and backward (4 with LoRA), 2 for the forward that checkpointing repeats."""
    compute = ((2 + 4 + 2) if layout.lora else (2 + 6 + 2)) * model.parameters * work.total / (layout.ranks * gpu.flops * a.mfu)
    if layout.ranks == 1:
        return compute
    batches = math.ceil(work.total / layout.ranks / a.micro_batch)
    moved = (3 * 2 + (0 if layout.lora else 4)) * model.parameters / GB  # three gathers in bfloat16, one sum of gradients in float32
    bandwidth = a.node_bandwidth if layout.ranks <= a.node else a.network_bandwidth
    return max(compute, batches * moved / bandwidth)


def evaluate(model: Model, layout: Layout, gpu: GPU, work: Work, a: Assumptions) -> Step | None:
    """None where it does not fit."""
    learner = learner_memory(model, layout, a)
    weights = 2 * model.parameters / layout.tensor_parallel / GB
    usable = gpu.memory * a.engine_share
    cache = usable - weights - a.engine_overhead - (state_memory(model, layout, a) if layout.colocated else 0)  # the rest while the engine sleeps
    if learner > usable or cache < a.min_cache or model.kv_heads % layout.tensor_parallel:
        return None
    live = int(cache * layout.tensor_parallel * GB / (model.kv_bytes * work.length)) * layout.engines
    sent = (2 if layout.lora else a.sent_bytes) * model.parameters * layout.engines / GB
    return Step(
        learner=learner,
        weights=weights,
        cache=cache,
        live=live,
        sent=sent,
        transfer=sent / a.transfer_bandwidth,
        sample=sampling_seconds(model, layout, gpu, live, work, a),
        update=update_seconds(model, layout, gpu, work, a),
    )


def layouts(gpus: int, lora: bool, node: int) -> Iterator[Layout]:
    for tensor_parallel in (1, 2, 4, 8):
        if tensor_parallel <= min(gpus, node):
            yield Layout(gpus=gpus, ranks=gpus, engines=gpus // tensor_parallel, tensor_parallel=tensor_parallel, lora=lora)
            for sampling in sorted({gpus * eighths // 8 for eighths in range(1, 8)} - {0}):
                if sampling % tensor_parallel == 0 and sampling < gpus:
                    yield Layout(gpus=gpus, ranks=gpus - sampling, engines=sampling // tensor_parallel, tensor_parallel=tensor_parallel, lora=lora)


def shortest(model: Model, gpus: int, gpu: GPU, work: Work, a: Assumptions) -> tuple[Layout, Step] | None:
    """The placement with the shortest step: colocated ones on-policy, split ones with ``max_staleness=1``. LoRA where nothing else fits."""
    for lora in (False, True):
        found = [(layout, step) for layout in layouts(gpus, lora, a.node) if (step := evaluate(model, layout, gpu, work, a)) is not None]
        if found:
            return min(found, key=lambda pair: pair[1].on_policy if pair[0].colocated else pair[1].one_behind)
    return None


# -- the page ------------------------------------------------------------------------------------------------------------------------------------------


def cell(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def row(model: Model, gpus: int, gpu: GPU, work: Work, a: Assumptions) -> str:
    found = shortest(model, gpus, gpu, work, a)
    if found is None:
        return f"| {gpus} | {model.name} | does not fit |" + " |" * 10
    layout, step = found
    how = ("colocated" if layout.colocated else "split") + (", LoRA" if layout.lora else "")
    cells = (
        str(gpus), model.name, how, f"{layout.engines} x {layout.tensor_parallel}", str(layout.ranks), f"{step.learner:.0f}",
        f"{step.weights:.0f} + {step.cache:.0f}", f"{step.live:,}", f"{step.sent:.0f} in {cell(step.transfer)}", cell(step.sample), cell(step.update),
        cell(step.on_policy), "-" if layout.colocated else cell(step.one_behind),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| GPUs | model | placement | engines x tensor parallel | ranks | learner GB | engine GB: weights + cache | live | sent GB in s | sampling s | update s"
    " | step s, staleness 0 | staleness 1 |"
)


def table(gpu: GPU, work: Work, a: Assumptions) -> str:
    rows = [row(model, gpus, gpu, work, a) for gpus in (1, 8, 64) for model in MODELS]
    return "\n".join([f"{gpu.memory:.0f} GB a GPU ({gpu.bandwidth:,} GB/s, {gpu.flops / 1e12:.0f} TFLOP/s):", "", HEADER, "|" + "---|" * 13, *rows])


def assumed(settings: Work | Assumptions) -> list[str]:
    """A line for each field, with its docstring read from this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"class {type(settings).__name__}"))
    found = []
    for field in fields(settings):
        at = next(n for n in range(start, len(lines)) if lines[n].strip().startswith(f"{field.name}:"))
        found.append(f"| `{field.name}` | {getattr(settings, field.name):,} | {lines[at + 1].strip().strip(chr(34))} |")
    return found


def page(work: Work, a: Assumptions) -> str:
    """What stands between the two marks of docs/scaling.md."""
    ratio = (
        f"A step is {work.trajectories:,} trajectories of {work.length:,} tokens: {work.sampled:,} sampled, {work.unique:,} unique and {work.total:,} in the"
        f" learner's rows (total/unique {work.total / work.unique:.2f}; {100 * work.sampled / (work.trajectories * (work.calls + 1) * work.turn):.0f} % of the"
        " tokens that GRPO would sample)."
    )
    names = ["| assumption | value | meaning and [source] |", "|---|---|---|", *assumed(work), *assumed(a)]
    return "\n\n".join([ratio, *(table(gpu, work, a) for gpu in GPUS), "\n".join(names)])


def with_tables(text: str, tables: str) -> str:
    """The page with what stands between the marks replaced. Raises ``ValueError`` where they are missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r} in {PAGE}")
    return f"{head}{begin}\n\n{tables}\n\n{end}{tail}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    parser.add_argument("--groups", type=int, default=Work().groups)
    options = parser.parse_args(arguments)
    tables = page(replace(Work(), groups=options.groups), Assumptions())
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(tables)


if __name__ == "__main__":
    main()
