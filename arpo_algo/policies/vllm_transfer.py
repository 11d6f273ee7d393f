"""New weights for a running vLLM engine, through vLLM's own interface for weight transfer.

The engine is paused, its layers become placeholders, named tensors come in pieces, the layers are put in place, the cache of keys and values is dropped, and
the engine carries the new version's label. A transport moves the tensors: each is a small object, and one object serves one engine.

Before the layers become placeholders an error leaves the engine as it was and is raised as it is. Later ones raise ``EngineStopped``: the engine holds
weights of neither version and has to be started anew. Nothing can be sampled from it meanwhile, since placeholders cannot be computed with.

A transport with NCCL or CUDA's shared handles needs GPUs. What happens in the workers is in :mod:`arpo_algo.policies.vllm_shared_memory`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from arpo_algo.policies.vllm_turns import EngineStopped

Named: TypeAlias = tuple[str, Tensor]

_ALIGNMENT = 64
"""Bytes; of the start of each tensor in shared memory."""


class Transport(Protocol):
    """A way for tensors into one engine."""

    @property
    def backend(self) -> str:
        """Name of the back end of vLLM's weight transfer that the engine is started with."""
        ...

    async def send(self, llm: Any, tensors: Iterator[Named], version: str) -> None:
        """Moves ``tensors`` into the paused engine and puts them in place, under the label ``version``."""
        ...


async def send_weights(llm: Any, tensors: Iterable[Named], version: int, transport: Transport) -> None:
    """Replaces the weights of ``llm``, a paused ``AsyncLLM`` started with :func:`engine_arguments`; the caller resumes it.

    ``tensors``: under the names of a checkpoint, whole, on any device; iterated in this thread. Raises ``RuntimeError`` where the engine is not paused,
    ``ValueError`` where there is no tensor, and ``EngineStopped`` where the transfer fails midway or names are missing or unexpected. A call that is cancelled
    ends the transfer first.
    """
    await _check_paused(llm)
    pairs = iter(tensors)
    first = next(pairs, None)  # what gathers the tensors fails here, if it fails at once
    if first is None:
        raise ValueError("expected the tensors of a model, got none")
    await _whole(_with_new_cache(llm, transport.send(llm, itertools.chain([first], pairs), str(version))))


async def send_checkpoint(llm: Any, folder: str | os.PathLike[str], version: int) -> None:
    """Replaces the weights of ``llm`` by those of a checkpoint's folder that its workers can read; otherwise like :func:`send_weights`."""
    await _check_paused(llm)
    path = os.path.abspath(folder)
    if not os.path.isdir(path):
        raise ValueError(f"expected the folder of a checkpoint, got {path!r}")
    await _whole(_with_new_cache(llm, _load_checkpoint(llm, path, str(version))))


def engine_arguments(transport: Transport) -> dict[str, Any]:
    """What vLLM's ``AsyncEngineArgs`` need beside the model and the worker extension ``WeightReceiver``, so that ``transport`` can be used."""
    return {"weight_transfer_config": {"backend": transport.backend}}


def default_transport(*, same_gpu: bool) -> Transport:
    """Handles for an engine with one worker on the learner's own GPU; else shared memory, which all workers on this host read, with a GPU or without."""
    return CudaIPC() if same_gpu else SharedMemory()


# --- what the transports share ------------------------------------------------------------------------------------------------------------------------


async def _check_paused(llm: Any) -> None:
    if not await llm.is_paused():
        raise RuntimeError("the weights of an engine can be replaced only while it is paused: await llm.pause_generation() first")


async def _with_new_cache(llm: Any, transfer: Coroutine[Any, Any, None]) -> None:
    await transfer
    if not await llm.reset_prefix_cache(reset_running_requests=True):  # also where the pause left the cache alone
        raise EngineStopped("the vLLM engine keeps keys and values of the old weights in its cache and must be restarted")


async def _whole(transfer: Coroutine[Any, Any, None]) -> None:
    """Awaits ``transfer``; cancelled, it awaits the end before it passes that on: half a transfer would cost the engine."""
    task = asyncio.create_task(transfer)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        raise


@asynccontextmanager
async def _loading(llm: Any, version: str) -> AsyncIterator[None]:
    """Between its start and its end the engine takes tensors; the end fails where some are missing."""
    try:
        await llm.start_weight_update()
        yield
        await llm.collective_rpc("check_weights")
        await llm.finish_weight_update(weight_version=version)
    except Exception as error:
        failed = "the vLLM engine could not load new weights and must be restarted, it holds weights of neither version"
        raise EngineStopped(f"{failed}: {type(error).__name__}: {error}") from error


async def _load_checkpoint(llm: Any, folder: str, version: str) -> None:
    try:
        await llm.collective_rpc("replace_weights", args=(folder, None))
        await llm.update_weight_version(version)
    except Exception as error:
        raise EngineStopped(f"the vLLM engine could not load the checkpoint {folder} and must be restarted: {type(error).__name__}: {error}") from error


async def _init(llm: Any, info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))


async def _update(llm: Any, info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.update_weights(WeightTransferUpdateRequest(update_info=info))


def _metadata(tensors: Sequence[Named]) -> dict[str, Any]:
    """How vLLM's own back ends are told what comes."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [_dtype_name(tensor) for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- one host -----------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Through memory of this process that the engine's workers map, whatever their device: one host, Linux. The memory has no name: nothing can be left behind.

    Beside the tensors themselves two pieces exist at once at most, each of ``piece_bytes`` or of one tensor that is larger, as long as the parameters of a
    layer come one after the other, as those of a ``state_dict`` do.
    """

    piece_bytes: int = 1 << 26
    """Tensors are sent in pieces of this many bytes."""

    @property
    def backend(self) -> str:
        return "arpo_shared_memory"

    async def send(self, llm: Any, tensors: Iterator[Named], version: str) -> None:
        pieces = _pieces(tensors, self.piece_bytes)
        piece: _Piece | None = next(pieces)
        try:
            assert piece is not None
            await _init(llm, piece.info)  # a worker that cannot read the memory says so before anything is lost
            async with _loading(llm, version):
                while piece is not None:
                    await _update(llm, piece.info)
                    piece.close()
                    piece = next(pieces, None)
        finally:
            pieces.close()
            if piece is not None:
                piece.close()


class _Piece:
    """Anonymous memory with tensors in it. It is freed when nobody has it open or mapped, through the processes' deaths too."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create(f"arpo-weights-{os.urandom(8).hex()}")
        os.ftruncate(self._fd, size)  # takes no memory before it is written
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._size, self._used = size, 0
        self.info: dict[str, Any] = {"path": path, "file": os.readlink(path), "names": [], "dtypes": [], "shapes": [], "offsets": []}

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copies a tensor in; False where there is no room for it."""
        start, length = -(-self._used // _ALIGNMENT) * _ALIGNMENT, _bytes(tensor)
        if start + length > self._size:
            return False
        content: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        written = 0
        while written < length:  # a system call writes 2 GiB at most; through a mapping each new page would be cleared first
            written += os.pwrite(self._fd, content[written:], start + written)
        self._used = start + length
        for key, value in {"names": name, "dtypes": _dtype_name(tensor), "shapes": list(tensor.shape), "offsets": start}.items():
            self.info[key].append(value)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pieces(tensors: Iterable[Named], size: int) -> Generator[_Piece, None, None]:
    """Generates pieces of ``size`` bytes, larger where one tensor is. The caller closes each."""
    piece = None
    try:
        for name, tensor in tensors:
            if piece is not None and not piece.add(name, tensor):
                full, piece = piece, None
                yield full
            if piece is None:
                piece = _Piece(max(size, _bytes(tensor), 1))
                piece.add(name, tensor)
        if piece is not None:
            full, piece = piece, None
            yield full
    finally:
        if piece is not None:
            piece.close()


# --- any device ---------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """Through files that workers read: any device, any host that sees the folder. Slow; for debugging, since what was sent can be looked at."""

    path: Path
    """The folder; files of an earlier transfer in it are replaced."""
    file_bytes: int = 1 << 30
    """Tensors are written to files of about this many bytes."""

    @property
    def backend(self) -> str:
        return "arpo_shared_memory"

    async def send(self, llm: Any, tensors: Iterator[Named], version: str) -> None:
        from safetensors.torch import save_file

        self.path.mkdir(parents=True, exist_ok=True)
        for old in self.path.glob("*.safetensors"):
            old.unlink()
        for number, part in enumerate(_parts(tensors, self.file_bytes)):
            save_file(
                {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in part}, self.path / f"{number:05}.safetensors"
            )
        await _load_checkpoint(llm, os.path.abspath(self.path), version)


def _parts(tensors: Iterable[Named], size: int) -> Iterator[list[Named]]:
    """Lists of tensors of about ``size`` bytes together."""
    part: list[Named] = []
    for pair in tensors:
        part.append(pair)
        if sum(_bytes(tensor) for _, tensor in part) >= size:
            yield part
            part = []
    if part:
        yield part


# --- GPUs ---------------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CudaIPC:
    """Through handles of CUDA memory: for an engine with one worker, on the very GPU that holds the tensors. Copies nothing on the way.

    All tensors stay alive until the engine has them: those that were gathered for the transfer need memory together. The handles travel pickled, which vLLM
    allows where the engine's processes have ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``; :class:`~arpo_algo.policies.vllm.VLLMPolicy` starts them so.
    """

    @property
    def backend(self) -> str:
        return "ipc"

    async def send(self, llm: Any, tensors: Iterator[Named], version: str) -> None:
        kept = [(name, tensor.detach().contiguous()) for name, tensor in tensors]
        if elsewhere := sorted({str(tensor.device) for _, tensor in kept if not tensor.is_cuda}):
            raise ValueError(f"CudaIPC hands over memory of the GPU, got tensors on {', '.join(elsewhere)}: pass transport=SharedMemory()")
        await _init(llm, {"packed": False})
        handles = pickle.dumps([cuda_handle(tensor) for _, tensor in kept])
        async with _loading(llm, version):
            await _update(llm, _metadata(kept) | {"ipc_handles_pickled": base64.b64encode(handles).decode()})
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def cuda_handle(tensor: Tensor) -> dict[str, Any]:
    """What another process opens the memory of a CUDA tensor with, under the identity of its GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    return {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]}  # type: ignore[no-untyped-call]


@dataclass(kw_only=True)
class NCCL:
    """By broadcast from one GPU of this process to the GPUs of all workers, which must be others. The first transfer opens the connection."""

    device: int
    """Number of the GPU that sends."""
    address: str = "127.0.0.1"
    """Where the workers reach this process."""
    piece_bytes: int = 1 << 30
    """Tensors are sent in pieces of about this many bytes, which are on the sending GPU at once."""
    _group: Any = field(default=None, init=False, repr=False)

    @property
    def backend(self) -> str:
        return "nccl"

    async def send(self, llm: Any, tensors: Iterator[Named], version: str) -> None:
        if self._group is None:
            self._group = await self._connect(llm)
        async with _loading(llm, version):
            for part in _parts(tensors, self.piece_bytes):
                await _both(_update(llm, _metadata(part)), partial(self._broadcast, part))

    async def _connect(self, llm: Any) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.utils.network_utils import get_open_port

        parallel = llm.vllm_config.parallel_config
        meeting = {"master_address": self.address, "master_port": get_open_port(), "world_size": 1 + parallel.world_size * parallel.data_parallel_size}

        def join() -> Any:
            with torch.cuda.device(self.device):
                return trainer_init(meeting)

        return await _both(_init(llm, meeting | {"rank_offset": 1, "packed": False}), join)

    def _broadcast(self, part: Sequence[Named]) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            sent = [tensor.detach().to(f"cuda:{self.device}").contiguous() for _, tensor in part]
            for tensor in sent:
                self._group.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()


async def _both(theirs: Coroutine[Any, Any, None], ours: Callable[[], Any]) -> Any:
    """What ``ours`` returns in a thread while the engine does its part. The first error is raised at once: the other side may wait for ever."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(ours())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weights").start()  # a daemon: a call that hangs does not keep the process alive
    mine, task = asyncio.wrap_future(outcome), asyncio.create_task(theirs)
    done, _ = await asyncio.wait({task, mine}, return_when=asyncio.FIRST_EXCEPTION)
    if not task.done():
        task.cancel()
    for side in done:
        side.result()
    return mine.result()
