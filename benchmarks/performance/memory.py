"""How long a trajectory may be: peak memory of one update, measured on this CPU at small shapes, and what follows from it for large ones on GPUs.

    python benchmarks/performance/memory.py [--longest 16384] [--out figures.json]        # about ten minutes on two cores

Measured: the growth of resident memory during ``Learner.update`` on one row, the peak (VmHWM, reset before) over what was there before, each case in a process
of its own, in float32. A law is fitted to it:

    bytes a token = size of a number * (layers * (a * hidden + b * intermediate) + c * hidden)                    activations kept
    bytes a token = size of a number * (layers * hidden + a * hidden + b * intermediate + c * hidden)             recomputed, a layer at a time
    bytes once    = d * logit_chunk_mib                                                                         the output layer, whatever the length

Calculated, not measured: the longest row that fits into a GPU beside weights, gradients and Adam's moments (float32, 16 bytes a weight, spread over the ranks),
the weights that are gathered (two layers, embedding and head, in bfloat16, with their gradients and a float32 buffer for the sum) and the activations of the
law in bfloat16. One rank computes by autocast and keeps a bfloat16 copy of all weights instead. A tenth of the memory is left to the allocator. There is no
context parallelism: a row is computed by one rank, and more ranks make room for a longer one only until the weights are spread thin.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine, status_bytes

MIB = 2**20
MEMORIES_GB, RANKS = (80, 141), (1, 8, 64)
SPARE = 0.1
"""Share of a GPU's memory that the allocator, the libraries and the exchange between ranks may take."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What memory depends on in a decoder of the Llama and Qwen family."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 512
    kv_share: float = 0.25
    """Width of keys (or values) / hidden."""
    tied: bool = True

    @property
    def layer_weights(self) -> float:
        return self.hidden**2 * (2 + 2 * self.kv_share) + 3 * self.hidden * self.intermediate

    @property
    def outer_weights(self) -> float:
        return self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def weights(self) -> float:
        return self.layers * self.layer_weights + self.outer_weights


QWEN = {  # the published configurations
    "3B": Shape(hidden=2048, intermediate=11008, layers=36, vocabulary=151_936, kv_share=2 / 16),
    "7B": Shape(hidden=3584, intermediate=18944, layers=28, vocabulary=152_064, kv_share=4 / 28, tied=False),
    "14B": Shape(hidden=5120, intermediate=13824, layers=48, vocabulary=152_064, kv_share=8 / 40, tied=False),
    "32B": Shape(hidden=5120, intermediate=27648, layers=64, vocabulary=152_064, kv_share=8 / 40, tied=False),
}
BASE = Shape(hidden=128, intermediate=512, layers=2)
OTHERS = (
    Shape(hidden=256, intermediate=512, layers=2),
    Shape(hidden=128, intermediate=1024, layers=2),
    Shape(hidden=128, intermediate=512, layers=6),
)
HEAD = Shape(hidden=64, intermediate=64, layers=1, vocabulary=151_936)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One update on one row."""

    shape: Shape
    tokens: int
    recompute: bool
    chunk_mib: int = 1


def peak_bytes(case: Case) -> int:
    """Peak resident memory of an update over what the process held before, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "arpo_algo.learner"])
    with context.Pool(1) as pool:
        return pool.apply(_peak_bytes, (case,))


def _peak_bytes(case: Case) -> int:
    import torch

    from arpo_algo.learner import Learner, LearnerConfig

    torch.set_num_threads(1)
    config = LearnerConfig(lr=1e-6, gradient_checkpointing=case.recompute, logit_chunk_mib=case.chunk_mib)
    learner = Learner(_model(case.shape), config)
    learner.update(_row(16, case.shape.vocabulary))  # the optimiser's moments are there afterwards
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    learner.update(_row(case.tokens, case.shape.vocabulary))
    return status_bytes("VmHWM") - before


def _model(shape: Shape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = 4
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": heads}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=shape.vocabulary, num_key_value_heads=round(heads * shape.kv_share), tie_word_embeddings=shape.tied, **sizes)
    )


def _row(tokens: int, vocabulary: int) -> Any:
    from arpo_algo.packing import Rows

    shape = (1, tokens)
    mask = np.arange(tokens)[None] >= 4
    numbers = np.full(shape, 0.5, dtype=np.float32)
    ids = np.random.default_rng(0).integers(0, vocabulary, shape)
    weights = (mask / mask.sum()).astype(np.float32)
    return Rows(
        token_ids=ids,
        attention=np.ones(shape, dtype=bool),
        mask=mask,
        old_logprobs=-numbers,
        advantages=numbers * mask,
        weights=weights,
        groups=np.arange(len(ids)),
    )


@dataclass(frozen=True, kw_only=True)
class Law:
    """The coefficients of the module's docstring."""

    a: float
    b: float
    c: float
    d: float

    def per_token(self, shape: Shape, *, recompute: bool, number: int) -> float:
        """Bytes of activations a token at ``number`` bytes a number."""
        layer = self.a * shape.hidden + self.b * shape.intermediate
        return number * (self.c * shape.hidden + (shape.layers * shape.hidden + layer if recompute else shape.layers * layer))


def slope(tokens: Sequence[int], peaks: Sequence[int]) -> float:
    """Bytes a token, by least squares."""
    return float(np.polyfit(tokens, peaks, 1)[0])


def fit(slopes: Sequence[tuple[Shape, float]], head: Sequence[tuple[int, int]]) -> Law:
    """The law behind float32 slopes with the activations kept, and peaks at several sizes of the chunk (MiB, bytes)."""
    terms = [[4 * s.layers * s.hidden, 4 * s.layers * s.intermediate, 4 * s.hidden] for s, _ in slopes]
    a, b, c = np.linalg.lstsq(np.array(terms, dtype=float), np.array([bytes_ for _, bytes_ in slopes]), rcond=None)[0]
    return Law(a=float(a), b=float(b), c=float(c), d=slope([chunk for chunk, _ in head], [peak for _, peak in head]) / MIB)


def fixed_bytes(shape: Shape, ranks: int) -> float:
    """Bytes on one rank that do not depend on the length: weights, gradients, moments, and what is gathered or copied of them."""
    held = 16 * shape.weights / ranks
    if ranks == 1:
        return held + 2 * shape.weights
    unit = max(shape.layer_weights, shape.outer_weights)
    return held + 2 * (shape.outer_weights + 2 * shape.layer_weights) + 2 * (shape.outer_weights + shape.layer_weights) + 4 * unit


def longest_row(shape: Shape, law: Law, *, memory_gb: int, ranks: int, recompute: bool, chunk_mib: int = 256) -> int:
    """The most tokens of one row that fit into a rank's memory, by the law in bfloat16; 0 where the weights alone do not fit."""
    left = memory_gb * 1e9 * (1 - SPARE) - fixed_bytes(shape, ranks) - law.d * chunk_mib * MIB
    return max(0, int(left / law.per_token(shape, recompute=recompute, number=2)))


def cases(longest: int) -> list[Case]:
    """Every shape with and without recomputation at several lengths, the base shape up to ``longest``; and the output layer at several sizes of its chunk."""
    lengths = [tokens for tokens in (1024, 2048, 4096, 8192, 16384) if tokens <= longest]
    found = []
    for shape in (BASE, *OTHERS):
        for recompute in (False, True):
            found += [Case(shape=shape, tokens=tokens, recompute=recompute) for tokens in (lengths if shape is BASE else lengths[:3:2])]
    return found + [Case(shape=HEAD, tokens=tokens, recompute=False, chunk_mib=chunk) for tokens in (1024, 2048) for chunk in (32, 64, 128, 256)]


def describe(case: Case) -> str:
    shape = case.shape
    sizes = f"hidden {shape.hidden:>4}, intermediate {shape.intermediate:>5}, layers {shape.layers}, V {shape.vocabulary:>7}, chunk {case.chunk_mib:>3} MiB"
    return f"{sizes}, activations {'recomputed' if case.recompute else 'kept':<10} {case.tokens:>6} tokens"


def slopes(peaks: Sequence[tuple[Case, int]], *, recompute: bool) -> list[tuple[Shape, float]]:
    """Bytes a token of each shape but the one for the output layer."""
    found = []
    for shape in (BASE, *OTHERS):
        of_shape = [(case.tokens, peak) for case, peak in peaks if case.shape == shape and case.recompute == recompute]
        found.append((shape, slope(*zip(*of_shape, strict=True))))
    return found


def show_law(law: Law, peaks: Sequence[tuple[Case, int]]) -> list[dict[str, Any]]:
    """Print and return the law beside what was measured; the recomputing one is predicted by the coefficients of the other."""
    print(f"\nlaw: a = {law.a:.2f}, b = {law.b:.2f}, c = {law.c:.2f} numbers; output layer: d = {law.d:.2f} bytes a byte of logit_chunk_mib")
    print("bytes a token, float32                                     measured   by the law")
    rows = []
    for recompute in (False, True):
        for shape, measured in slopes(peaks, recompute=recompute):
            predicted = law.per_token(shape, recompute=recompute, number=4)
            rows.append({"shape": asdict(shape), "recompute": recompute, "measured": measured, "law": predicted})
            kept = "recomputed" if recompute else "kept"
            print(f"  hidden {shape.hidden:>4} intermediate {shape.intermediate:>5} layers {shape.layers}  {kept:<10} {measured:>12.0f} {predicted:>12.0f}")
    return rows


def show_lengths(law: Law) -> list[dict[str, Any]]:
    """Print and return the calculated table."""
    print("\nlongest row in tokens, CALCULATED (bfloat16, logit_chunk_mib 256): activations recomputed / kept; '-' where the weights do not fit")
    print("model  GPU     " + "".join(f"{f'{ranks} rank' + 's' * (ranks > 1):>24}" for ranks in RANKS))
    rows = []
    for name, shape in QWEN.items():
        for memory in MEMORIES_GB:
            cells = []
            for ranks in RANKS:
                found = [longest_row(shape, law, memory_gb=memory, ranks=ranks, recompute=recompute) for recompute in (True, False)]
                cells.append(" / ".join(f"{tokens:,}" if tokens else "-" for tokens in found))
                fixed = fixed_bytes(shape, ranks) / 1e9
                rows.append({"model": name, "memory_gb": memory, "ranks": ranks, "recomputed": found[0], "kept": found[1], "fixed_gb": round(fixed, 2)})
            print(f"{name:<6} {memory:>3} GB  " + "".join(f"{cell:>24}" for cell in cells))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest row measured, at least 4096")
    parser.add_argument("--out", type=Path, help="write machine, command, peaks, law and table here, as JSON")
    arguments = parser.parse_args()
    # Freed blocks of some size go back to the system at once, or the peak would count what the allocator keeps.
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = []
    for case in cases(arguments.longest):
        peaks.append((case, peak_bytes(case)))
        print(f"  {describe(case)} {peaks[-1][1] / MIB:>9.1f} MiB", flush=True)
    heads = [(case.chunk_mib, peak) for case, peak in peaks if case.shape == HEAD]
    law = fit(slopes(peaks, recompute=False), heads)
    figures = {"law": asdict(law), "slopes": show_law(law, peaks), "longest_rows_calculated": show_lengths(law)}
    if arguments.out is not None:
        about = {"machine": machine(), "command": " ".join(["python", *sys.argv])}
        measured = [{"case": asdict(case), "peak_bytes": peak} for case, peak in peaks]
        arguments.out.write_text(json.dumps(about | {"peaks": measured} | figures, indent=2) + "\n")
        print(f"\nwritten: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
