"""Runs a function on several ranks of one process group: processes of this machine, gloo, no port."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.models.llama.modeling_llama", "peft", "arpo_algo.learner"]
"""Imported once, by the process that the ranks are forked from."""


def run_ranks(size: int, function: Callable[..., Any], *args: object, deadline_s: float = 500) -> list[Any]:
    """``[function(ranks, *args) of each rank]``. The function must be importable by its name; the first rank that fails ends the others and is raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(rank, size, folder, function, args), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        try:
            while running:
                ended = wait(list(running), timeout=deadline_s)
                failed = [process.exitcode for process in (running.pop(sentinel) for sentinel in ended) if process.exitcode]
                if failed or not ended:
                    raise AssertionError("\n".join(_failures(folder, size)) or f"ranks ended with {failed}, or not within {deadline_s} s")
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(size)]


def _failures(folder: str, size: int) -> list[str]:
    files = [Path(folder) / f"{rank}.failure" for rank in range(size)]
    return [f"rank {rank}:\n{file.read_text()}" for rank, file in enumerate(files) if file.exists()]


def _rank(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    import torch
    from torch import distributed

    from arpo_algo.distributed import Ranks

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=300))
        result = function(Ranks.current(), *args)
        (Path(folder) / f"{rank}.result").write_bytes(pickle.dumps(result))
        distributed.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.failure").write_text(traceback.format_exc())
        os._exit(1)  # at once: the others may wait for this rank in a collective operation
