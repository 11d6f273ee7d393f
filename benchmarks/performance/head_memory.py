"""Memory of the language-model head in the update: a vocabulary of 151,936 and a growing number of tokens.

    python benchmarks/performance/head_memory.py [--short] [--out part.json]

Each figure is the peak of resident memory in a child process of its own, over what it held before: forward and backward of ``head_logprobs`` in float32 at
width 896 (Qwen2.5-0.5B), with the gradient of the entropies. The weight's gradient is 519 MiB of it. Beside ours the same head called in chunks of 256 MiB of
logits with ``torch.utils.checkpoint``, which is what heads get that are not plain linear layers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from comparison import Part, compared, show, write
from measure import ALONE, status_bytes

VOCABULARY, WIDTH = 151_936, 896
CHUNK = 2**26
"""Logits of a chunk at most: 256 MiB."""
MIB = 2**20
WEIGHT_MIB = VOCABULARY * WIDTH * 4 / MIB


def measure(tokens: int, *, plain: bool) -> tuple[float, float]:
    """Peak MiB over what was held before, and CPU seconds, in this process."""
    import torch

    from arpo_algo.head import head_logprobs

    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    if not plain:
        head.register_forward_hook(lambda *_: None)  # a head with a hook is called
    hidden, targets = torch.randn(tokens, WIDTH, requires_grad=True), torch.randint(0, VOCABULARY, (tokens,))
    (torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).sum().backward()  # loads libraries
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    started = time.process_time()
    logprobs, entropies = head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=CHUNK, entropy_grad=True)
    (logprobs.sum() + entropies.sum()).backward()
    return (status_bytes("VmHWM") - before) / MIB, time.process_time() - started


def in_child(tokens: int, *, plain: bool) -> tuple[float, float]:
    """:func:`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(tokens), "--plain" if plain else "--no-plain"]
    peak, seconds = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ALONE).stdout.split()
    return float(peak), float(seconds)


def part(counts: list[int]) -> Part:
    measured = [in_child(tokens, plain=True) for tokens in counts]
    called = in_child(counts[0], plain=False)
    lines = [{"tokens": n, "peak MiB": peak, "beside the gradient MiB": peak - WEIGHT_MIB, "CPU s": s} for n, (peak, s) in zip(counts, measured, strict=True)]
    most = max(peak for peak, _ in measured[1:])
    bounds = [
        {"what": f"growth from {counts[0]} tokens on, %", "measured": 100 * (most / measured[0][0] - 1), "at most": 2.0},
        {"what": "peak, MiB", "measured": max(peak for peak, _ in measured), "at most": WEIGHT_MIB + 4 * CHUNK * 4 / MIB},
    ]
    name = f"{counts[0]} tokens, V = {VOCABULARY}, H = {WIDTH}"
    rows = [
        compared(f"{name}: peak", [measured[0][0]], [called[0]], peer="our own head, called in checkpointed chunks", unit="MiB"),
        compared(f"{name}: time", [measured[0][1]], [called[1]], peer="our own head, called in checkpointed chunks", unit="CPU s"),
        compared(f"up to {counts[-1]} tokens: peak", [most], [measured[0][0]], peer=f"{counts[0]} tokens", unit="MiB", bar=1 / 1.02),
    ]
    about = {"dtype": "float32", "chunk_mib": CHUNK * 4 // MIB, "weight_gradient_mib": WEIGHT_MIB, "entropy_grad": True}
    return Part(
        title="Memory of the head",
        command="python benchmarks/performance/head_memory.py",
        about=about,
        rows=rows,
        figures={"Peak over what was held before": lines, "Bounds": bounds},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="512 and 1024 tokens only")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--measure", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(*measure(options.measure, plain=options.plain))
        return
    found = part([512, 1024] if options.short else [512, 1024, 2048])
    show(found)
    write(options.out, found)


if __name__ == "__main__":
    main()
