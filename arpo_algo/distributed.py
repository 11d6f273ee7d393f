"""Who else trains: the processes of one run, as the learner and the trainer see them.

One process, torchrun and Ray Train differ in who opens the process group; :meth:`Ranks.current` answers for all three. Rank 0 does what is done once (sampling,
files, logging); the others wait in :meth:`Ranks.broadcast_from_main` for its result::

    ranks = Ranks.current()
    rows = ranks.broadcast_from_main(sample)   # sample() runs on rank 0 alone; every rank gets what it returns, or its failure
    learner.update(rows)                       # every rank

A method marked *collective* must be called by every rank, in the same order; a rank that leaves one out leaves the others waiting.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

PATIENCE = timedelta(hours=24)
"""How long a rank waits for rank 0, which may be sampling. A rank that dies ends the wait at once, and launchers end the others; this is for a hang."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class MainRankError(RuntimeError):
    """Rank 0 failed in its part; raised on the other ranks, with what happened there."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that train together. ``Ranks()`` is one process alone, for which every method is trivial and ``torch.distributed`` stays untouched."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """How many there are."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where this rank's share of a sharded model lives. A single rank leaves models where they are."""
    objects: Any = None
    """Process group for Python objects and CPU tensors (gloo, :data:`PATIENCE`); None with one rank."""
    opened: bool = False
    """Whether :meth:`close` closes the default process group as well, since :meth:`current` opened it."""

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of this run. Collective where there are several.

        Joins a process group that is open (Ray Train opens one), else opens the default group where torchrun or another launcher has set RANK, WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT: gloo, with nccl beside it when the machine has a GPU for each of its ranks. Anything else is one rank.
        """
        from torch import distributed

        if not distributed.is_available():
            return cls(device=_device(gpu=torch.cuda.is_available()))
        opened = False
        if not distributed.is_initialized():
            if not all(os.environ.get(name) for name in _LAUNCHED) or int(os.environ["WORLD_SIZE"]) == 1:
                return cls(device=_device(gpu=torch.cuda.is_available()))
            gpu = torch.cuda.is_available() and (torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or _has_its_own_gpu())
            if gpu:
                torch.cuda.set_device(_device(gpu=True))
            distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
            opened = True
        rank, size = distributed.get_rank(), distributed.get_world_size()
        device = _device(gpu="nccl" in str(distributed.get_backend_config()))
        objects = distributed.new_group(backend="gloo", timeout=PATIENCE) if size > 1 else None
        return cls(rank=rank, size=size, device=device, objects=objects, opened=opened)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which does what is done once."""
        return self.rank == 0

    def broadcast(self, value: T | None = None) -> T:
        """Rank 0's value on every rank; what the others pass is ignored. Collective. It must pickle; on rank 0 it is the very object."""
        return self.broadcast_from_main(lambda: cast(T, value))

    def broadcast_from_main(self, make: Callable[[], T]) -> T:
        """What ``make()`` returns on rank 0, on every rank; it is called there alone. Collective. It must pickle; on rank 0 it is the very object.

        When it raises on rank 0, whatever the exception, the other ranks raise :class:`MainRankError` instead of waiting for a value that will not come.
        """
        if self.size == 1:
            return make()
        if not self.is_main:
            pickled, failure = self._from_main((b"", None))
            if failure is not None:
                raise MainRankError(f"rank 0 failed, rank {self.rank} stops with it:\n{failure}")
            return cast(T, pickle.loads(pickled))
        try:
            value = make()
            pickled = pickle.dumps(value)
        except BaseException as error:  # Ctrl-C too: the others wait for this rank
            self._from_main((b"", "".join(traceback.format_exception(error)).rstrip()))
            raise
        self._from_main((pickled, None))
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank. Collective."""
        return bool(self.max(torch.tensor(flag, dtype=torch.int32)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of tensors of one shape, in a new tensor; alone, the tensor itself. Collective."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, in a new tensor; alone, the tensor itself. Collective."""
        return self._reduce(tensor, "MAX")

    def spread(self, tensor: Tensor) -> Tensor:
        """Fill the tensor, of the same shape and type on every rank, with rank 0's values, in place. Collective. Returns it."""
        if self.size > 1:
            from torch import distributed

            distributed.broadcast(tensor, src=0, group=self._group(tensor))
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        if self.size > 1:
            from torch import distributed

            distributed.barrier(group=self.objects)

    def close(self) -> None:
        """Leave the process groups that :meth:`current` opened. Idempotent."""
        if self.size == 1 or sys.exception() is not None:  # leaving takes all ranks; one that failed ends the others by its end
            return
        from torch import distributed

        if distributed.is_initialized() and self.opened:
            distributed.destroy_process_group()  # with all groups made from it

    def _from_main(self, outcome: tuple[bytes, str | None]) -> tuple[bytes, str | None]:
        """Rank 0's pickled value, or its failure."""
        from torch import distributed

        box: list[Any] = [outcome if self.is_main else None]
        distributed.broadcast_object_list(box, src=0, group=self.objects, device=torch.device("cpu"))
        return cast("tuple[bytes, str | None]", box[0])

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        if self.size == 1:
            return tensor
        from torch import distributed

        result = tensor.detach().clone()
        distributed.all_reduce(result, op=getattr(distributed.ReduceOp, operation), group=self._group(result))
        return result

    def _group(self, tensor: Tensor) -> Any:
        """The process group that takes a tensor of this device: one of nccl alone takes none on the CPU."""
        return self.objects if tensor.device.type == "cpu" else None


def _has_its_own_gpu() -> bool:
    """Whether the launcher shows this process one GPU alone, as SLURM does with ``--gpus-per-task=1``."""
    return torch.cuda.device_count() == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")


def _device(*, gpu: bool) -> torch.device:
    """This process's device; launchers may show a process all GPUs of its machine or only its own."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()) if gpu else torch.device("cpu")
