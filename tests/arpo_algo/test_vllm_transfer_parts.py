"""Weights on their way into an engine, without vLLM: an engine that writes down what it is asked."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arpo_algo.policies import vllm_transfer
from arpo_algo.policies.vllm_transfer import (
    NCCL,
    CheckpointFolder,
    CudaIPC,
    SharedMemory,
    Transport,
    default_transport,
    engine_arguments,
    send_checkpoint,
    send_weights,
)
from arpo_algo.policies.vllm_turns import EngineStopped

TENSORS = [
    ("a", torch.arange(6.0).view(2, 3)),
    ("b", torch.tensor(7, dtype=torch.int64)),
    ("c", torch.ones(3, 4).t().to(torch.bfloat16)),
    ("d", torch.zeros(0)),
]


class Engine:
    """An ``AsyncLLM`` that keeps the calls and, of shared memory, what it read at the time."""

    def __init__(self, *, fail: str | None = None, paused: bool = True) -> None:
        self.calls: list[Any] = []
        self.fail, self.paused = fail, paused
        self.held: list[int] = []
        self.cache_in_use = False
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2, data_parallel_size=3))

    async def _call(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details) if details else name)
        await asyncio.sleep(0)
        if name == self.fail:
            raise OSError(f"{name} failed")

    async def is_paused(self) -> bool:
        return self.paused

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._call("init", self._read(request.init_info))

    async def start_weight_update(self) -> None:
        await self._call("start")

    async def update_weights(self, request: Any) -> None:
        self.held.append(len(open_memory()))
        await self._call("update", self._read(request.update_info))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        await self._call(method, *args)

    async def finish_weight_update(self, weight_version: str) -> None:
        await self._call("finish", weight_version)

    async def update_weight_version(self, version: str) -> None:
        await self._call("version", version)

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        await self._call("reset", reset_running_requests)
        return not self.cache_in_use

    def _read(self, info: dict[str, Any]) -> Any:
        if "path" not in info:
            return info
        assert os.readlink(info["path"]) == info["file"]
        memory = Path(info["path"]).read_bytes()
        found = {}
        for name, dtype, shape, start in zip(info["names"], info["dtypes"], info["shapes"], info["offsets"], strict=True):
            assert start % 64 == 0
            length = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            raw = torch.frombuffer(bytearray(memory[start : start + length]), dtype=torch.uint8) if length else torch.zeros(0, dtype=torch.uint8)
            found[name] = raw.view(getattr(torch, dtype)).view(shape)
        return found


@pytest.fixture(autouse=True)
def requests_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two dataclasses of vLLM's that the engine is called with."""

    class Init(SimpleNamespace):
        pass

    fake = SimpleNamespace(WeightTransferInitRequest=Init, WeightTransferUpdateRequest=Init)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", fake)


def open_memory() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [link for link in links if "arpo-weights" in link]


def mapped_memory() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "arpo-weights" in line]


def names(engine: Engine) -> list[str]:
    return [call if isinstance(call, str) else call[0] for call in engine.calls]


def send(engine: Engine, tensors: Any, transport: Transport) -> None:
    asyncio.run(send_weights(engine, tensors, 5, transport))


def test_shared_memory_in_one_piece() -> None:
    engine = Engine()
    send(engine, TENSORS, SharedMemory())
    assert names(engine) == ["init", "start", "update", "check_weights", "finish", "reset"]
    assert engine.calls[4:] == [("finish", "5"), ("reset", True)]
    received = engine.calls[2][1]
    assert list(received) == ["a", "b", "c", "d"]
    for name, tensor in TENSORS:
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)
    assert not open_memory() and not mapped_memory()


def test_pieces_hold_no_more_than_stated() -> None:
    engine = Engine()
    tensors = [(str(i), torch.full((n,), i, dtype=torch.uint8)) for i, n in enumerate([64, 64, 100, 300, 1, 1])]
    send(engine, tensors, SharedMemory(piece_bytes=128))
    pieces = [call[1] for call in engine.calls if call[0] == "update"]
    # 64 + 64 fill a piece; 100 leaves no aligned room; 300 has one of its own; 1 + 1 fit together
    assert [list(piece) for piece in pieces] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert all(torch.equal(piece[name], dict(tensors)[name]) for piece in pieces for name in piece)
    assert engine.held == [1] * 4
    assert not open_memory() and not mapped_memory()


@pytest.mark.parametrize("transport", [SharedMemory(piece_bytes=64), CheckpointFolder(path=Path("unused"))])
def test_an_engine_that_is_not_paused_is_left_alone(transport: Transport) -> None:
    engine, asked = Engine(paused=False), []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append(1)
        yield from TENSORS

    with pytest.raises(RuntimeError, match="only while it is paused"):
        send(engine, tensors(), transport)
    with pytest.raises(RuntimeError, match="only while it is paused"):
        asyncio.run(send_checkpoint(engine, "anywhere", 1))
    assert engine.calls == [] and asked == []


def test_errors_before_the_engine_lets_go_of_its_weights_leave_it_whole(tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="expected the tensors of a model, got none"):
        send(engine, [], SharedMemory())
    with pytest.raises(ValueError, match="expected the folder of a checkpoint"):
        asyncio.run(send_checkpoint(engine, tmp_path / "nowhere", 1))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise ArithmeticError("no tensors today")
        yield

    with pytest.raises(ArithmeticError, match="no tensors today"):
        send(engine, broken(), SharedMemory())
    assert engine.calls == []
    engine.fail = "init"
    with pytest.raises(OSError, match="init failed"):
        send(engine, TENSORS, SharedMemory())
    assert names(engine) == ["init"]
    assert not open_memory() and not mapped_memory()


@pytest.mark.parametrize("step", ["start", "update", "check_weights", "finish"])
def test_errors_midway_cost_the_engine_and_no_memory(step: str) -> None:
    engine = Engine(fail=step)
    with pytest.raises(EngineStopped, match=f"must be restarted, it holds weights of neither version: OSError: {step} failed"):
        send(engine, TENSORS, SharedMemory(piece_bytes=64))
    assert names(engine)[-1] == step and "reset" not in names(engine)
    assert not open_memory() and not mapped_memory()


def test_a_cache_that_stays_costs_the_engine() -> None:
    engine = Engine()
    engine.cache_in_use = True
    with pytest.raises(EngineStopped, match="keeps keys and values of the old weights"):
        send(engine, TENSORS, SharedMemory())


def test_tensors_that_end_in_an_error_midway() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS[:3]
        raise ArithmeticError("the other rank is gone")

    engine = Engine()
    with pytest.raises(EngineStopped, match="ArithmeticError: the other rank is gone"):
        send(engine, broken(), SharedMemory(piece_bytes=64))
    assert "finish" not in names(engine)
    assert not open_memory() and not mapped_memory()


def test_a_cancelled_transfer_ends_first() -> None:
    class Slow(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.reached, self.go = asyncio.Event(), asyncio.Event()

        async def update_weights(self, request: Any) -> None:
            self.reached.set()
            await self.go.wait()
            await super().update_weights(request)

    async def main() -> list[str]:
        engine = Slow()
        task = asyncio.create_task(send_weights(engine, TENSORS, 5, SharedMemory()))
        await engine.reached.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        engine.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return names(engine)

    assert asyncio.run(main())[-2:] == ["finish", "reset"]
    assert not open_memory()


def test_a_cancelled_transfer_that_fails_says_so() -> None:
    class Failing(Engine):
        async def update_weights(self, request: Any) -> None:
            task.cancel()
            await asyncio.sleep(0)
            raise OSError("the worker is gone")

    async def main() -> None:
        nonlocal task
        task = asyncio.create_task(send_weights(Failing(), TENSORS, 5, SharedMemory()))
        with pytest.raises(EngineStopped, match="the worker is gone") as error:
            await task
        assert isinstance(error.value.__cause__, OSError)

    task: asyncio.Task[None]
    asyncio.run(main())


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine, folder = Engine(), tmp_path / "sent"
    send(engine, TENSORS, CheckpointFolder(path=folder, file_bytes=24))
    assert engine.calls == [("replace_weights", str(folder), None), ("version", "5"), ("reset", True)]
    files = [load_file(file) for file in sorted(folder.iterdir())]
    assert [list(file) for file in files] == [["a"], ["b", "c"], ["d"]]
    assert torch.equal(files[1]["c"], TENSORS[2][1])
    send(Engine(), TENSORS[:1], CheckpointFolder(path=folder))
    assert len(list(folder.iterdir())) == 1, "files of the earlier transfer would be loaded too"
    with pytest.raises(EngineStopped, match=r"could not load the checkpoint .* must be restarted: OSError"):
        asyncio.run(send_checkpoint(Engine(fail="replace_weights"), folder, 1))


class OnGPU(torch.Tensor):
    is_cuda = True


def on_gpu(tensors: Any) -> Any:
    """The tensors, as those of a GPU for whoever asks."""
    return [(name, tensor.as_subclass(OnGPU)) for name, tensor in tensors]


def test_cuda_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    import base64
    import pickle

    collected: list[str] = []
    engine = Engine()
    monkeypatch.setattr(vllm_transfer, "cuda_handle", lambda tensor: {"gpu-0": tuple(tensor.shape)})
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(names(engine)[-1]))
    with pytest.raises(ValueError, match=r"got tensors on cpu: pass transport=SharedMemory\(\)"):
        send(engine, [*on_gpu(TENSORS), TENSORS[0]], CudaIPC())
    assert engine.calls == []
    send(engine, on_gpu(TENSORS), CudaIPC())
    assert names(engine) == ["init", "start", "update", "check_weights", "finish", "reset"]
    assert engine.calls[0] == ("init", {"packed": False})
    info = engine.calls[2][1]
    assert info["names"] == ["a", "b", "c", "d"] and info["dtype_names"] == ["float32", "int64", "bfloat16", "float32"]
    assert info["shapes"] == [[2, 3], [], [4, 3], [0]]
    assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == [{"gpu-0": (2, 3)}, {"gpu-0": ()}, {"gpu-0": (4, 3)}, {"gpu-0": (0,)}]
    assert collected == ["finish"], "handles are released when the engine has the tensors, not before"


class Broadcasts(NCCL):
    """NCCL without GPUs."""

    def prepare(self, broadcast: Callable[[Any], None]) -> Broadcasts:
        self.broadcast = broadcast
        self.met = 0
        return self

    async def _connect(self, llm: Any) -> Any:
        self.met += 1
        return object()

    def _broadcast(self, part: Any) -> None:
        self.broadcast(part)


def test_nccl_sends_metadata_and_data_side_by_side() -> None:
    engine, sent = Engine(), []
    transport = Broadcasts(device=0, piece_bytes=24).prepare(lambda part: sent.append([name for name, _ in part]))
    send(engine, TENSORS, transport)
    assert names(engine) == ["start", "update", "update", "update", "check_weights", "finish", "reset"]
    assert sent == [call[1]["names"] for call in engine.calls if call[0] == "update"] == [["a"], ["b", "c"], ["d"]]
    send(engine, TENSORS, transport)
    assert transport.met == 1, "a connection is opened once"


def test_nccl_raises_while_the_other_side_hangs() -> None:
    """Where a worker refuses a tensor it never joins the broadcast, which then waits for ever."""
    import threading

    release = threading.Event()
    try:
        with pytest.raises(EngineStopped, match="update failed"):
            send(Engine(fail="update"), TENSORS, Broadcasts(device=0).prepare(lambda part: release.wait(60) and None))
    finally:
        release.set()
    with pytest.raises(EngineStopped, match="ArithmeticError: broken wire"):

        def broken(part: Any) -> None:
            raise ArithmeticError("broken wire")

        send(Engine(), TENSORS, Broadcasts(device=0).prepare(broken))


def test_nccl_meets_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    met: list[Any] = []
    common = SimpleNamespace(trainer_init=lambda meeting: met.append(meeting) or "group")
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", common)
    monkeypatch.setitem(sys.modules, "vllm.utils.network_utils", SimpleNamespace(get_open_port=lambda: 1234))
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext())
    engine = Engine()
    assert asyncio.run(NCCL(device=1, address="10.0.0.1")._connect(engine)) == "group"
    # this process and three replicas of two workers each
    assert met == [{"master_address": "10.0.0.1", "master_port": 1234, "world_size": 7}]
    assert engine.calls == [("init", {**met[0], "rank_offset": 1, "packed": False})]


def test_which_transport() -> None:
    assert default_transport(same_gpu=False) == SharedMemory() and default_transport(same_gpu=True) == CudaIPC()
    assert engine_arguments(CudaIPC())["weight_transfer_config"] == {"backend": "ipc"}
    assert engine_arguments(NCCL(device=0))["weight_transfer_config"] == {"backend": "nccl"}
    assert engine_arguments(SharedMemory()) == {"weight_transfer_config": {"backend": "arpo_shared_memory"}}
