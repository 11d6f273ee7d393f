"""New weights in a running vLLM engine: log-probabilities afterwards beside plain forwards of the same weights.

Needs vLLM (``make test-vllm`` installs its CPU build). One engine at a time, in a process of its own; tests follow each other in it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None and not os.environ.get("ARPO_REQUIRE_VLLM"):  # where it is set, a missing package is a failure
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from vllm_fakes import ENVIRONMENT, TOLERANCE, llama, logprobs_of, prompt
from vllm_fakes import SETTINGS as ENGINE

from arpo_algo.policies import vllm_transfer
from arpo_algo.policies.vllm_transfer import NCCL, CheckpointFolder, CudaIPC, SharedMemory, Transport, engine_arguments, send_checkpoint, send_weights
from arpo_algo.policies.vllm_turns import EngineStopped

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # a start takes 30 s on an idle machine
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports
]
SETTINGS = ENGINE | {"logprobs_mode": "processed_logprobs"}


@dataclass
class Turn:
    """What vLLM sampled greedily after a prompt."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    versions: list[tuple[str, int, int]]


@dataclass
class Served:
    """An engine, the loop that it belongs to, and the model whose weights it should have."""

    llm: Any
    loop: asyncio.AbstractEventLoop
    model: Any
    count: int = field(default=0)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(awaitable)

    async def turn(self, ids: list[int], tokens: int = 12, *, started: asyncio.Event | None = None) -> Turn:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        kind = RequestOutputKind.CUMULATIVE if started else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, logprobs=1, flat_logprobs=True, detokenize=False, ignore_eos=True, output_kind=kind, seed=self.count
        )
        async for output in self.llm.generate({"prompt_token_ids": ids}, params, str(self.count)):
            last = output
            if started:
                started.set()
        got = last.outputs[0]
        logprobs = [got.logprobs.logprobs[start] for start in got.logprobs.start_indices]
        spans = [(span.version, span.start, span.end) for span in got.weight_versions]
        return Turn(list(got.token_ids), logprobs, last.num_cached_tokens, spans)

    def gap(self, ids: list[int], turn: Turn) -> float:
        """Largest difference to a plain forward with the model's present weights."""
        own = logprobs_of(self.model)(ids + turn.ids, len(ids))
        return max(abs(a - b) for a, b in zip(turn.logprobs, own, strict=True))

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.97).add_(0.05 * torch.randn_like(parameter))  # of about the same size however often

    def paused(self, act: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            try:
                await act()
            finally:
                await self.llm.resume_generation()

        self.run(main())


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    model = llama(folder, tied=request.param == "tied")
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)

        async def start() -> Any:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = {"model": str(folder), "worker_extension_cls": "vllm_receivers.ProbedReceiver", **SETTINGS, **engine_arguments(SharedMemory())}
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            await llm.collective_rpc("add_entropy_column")  # without it vLLM compiles a kernel for its log-probabilities
            return llm

        with closing(loop):
            llm = loop.run_until_complete(start())
            try:
                yield Served(llm, loop, model)
            finally:
                llm.shutdown()
                loop.run_until_complete(asyncio.sleep(0.1))  # its tasks end


both = pytest.mark.parametrize("served", ["tied", "untied"], indirect=True, scope="module")
tied = pytest.mark.parametrize("served", ["tied"], indirect=True, scope="module")


@both
def test_new_weights_are_the_ones_served(served: Served, tmp_path: Path) -> None:
    ids = prompt(70)
    transports: list[Transport] = [SharedMemory(), SharedMemory(piece_bytes=5000), CheckpointFolder(path=tmp_path / "sent", file_bytes=20_000)]
    for version, transport in enumerate(transports, start=1):
        served.change()
        stale = served.run(served.turn(ids))
        assert served.run(served.turn(ids)).cached == 64, "the prompt should lie in the cache, for the update to clear"
        assert served.gap(ids, stale) > 0.01
        tensors = served.model.state_dict().items() if version == 2 else served.model.named_parameters()  # with and without a tied head
        served.paused(lambda: send_weights(served.llm, tensors, version, transport))  # noqa: B023
        fresh = served.run(served.turn(ids))
        assert served.gap(ids, fresh) < TOLERANCE
        assert (fresh.cached, fresh.versions) == (0, [(str(version), 0, 12)])
        assert served.run(served.llm.collective_rpc("mapped")) == [0]
    served.change()
    served.model.save_pretrained(tmp_path / "checkpoint")
    served.paused(lambda: send_checkpoint(served.llm, tmp_path / "checkpoint", 7))
    fresh = served.run(served.turn(ids))
    assert served.gap(ids, fresh) < TOLERANCE and fresh.versions == [("7", 0, 12)]


@tied
def test_a_turn_under_way_goes_on_with_the_new_weights(served: Served) -> None:
    ids = prompt(40, seed=1)
    served.paused(lambda: send_weights(served.llm, served.model.named_parameters(), 10, SharedMemory()))

    async def main() -> Turn:
        started = asyncio.Event()
        task = asyncio.create_task(served.turn(ids, tokens=600, started=started))
        await started.wait()
        await served.llm.pause_generation(mode="keep", clear_cache=False)
        served.change()
        await send_weights(served.llm, served.model.named_parameters(), 11, SharedMemory())
        await served.llm.resume_generation()
        return await task

    turn = served.run(main())
    (_, _, change), (label, start, end) = turn.versions
    assert (label, start, end) == ("11", change, 600) and 0 < change < 600
    tail = Turn(turn.ids[change:], turn.logprobs[change:], 0, [])
    assert served.gap(ids + turn.ids[:change], tail) < TOLERANCE, "keys and values of the old weights are in use"


def without(part: str) -> Callable[[Any], Any]:
    return lambda pairs: [(name, tensor) for name, tensor in pairs if part not in name]


def beside(name: str, *shape: int) -> Callable[[Any], Any]:
    return lambda pairs: [*pairs, (name, torch.zeros(shape))]


def broken(pairs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(pairs)[:5]
    raise ArithmeticError("the other rank is gone")


async def failing(served: Served, transfer: Awaitable[None], message: str) -> None:
    """Awaits a transfer that costs the engine, and makes it good again."""
    await served.llm.pause_generation(mode="keep")
    try:
        with pytest.raises(EngineStopped, match="must be restarted") as failed:
            await transfer
        assert await served.llm.get_weight_version() not in ("20", "30"), "the label of weights that are not there"
        if "missing" in message or "gone" in message:  # layers are placeholders still: nothing that comes later may be counted with what came before
            with pytest.raises(EngineStopped, match=r"broken off|already active"):
                await send_weights(served.llm, served.model.named_parameters(), 50, SharedMemory())
    finally:
        await served.llm.collective_rpc("mend")
        await send_weights(served.llm, served.model.named_parameters(), 51, SharedMemory())
        await served.llm.resume_generation()
    failed.match(message)


@tied
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("1.self_attn.k_proj"), r"missing parameters of 1 layers: model\.layers\.1\.self_attn\.qkv_proj \(6144 of 8192 numbers arrived\)"),
        (without("embed_tokens"), r"missing parameters of 1 layers: model\.embed_tokens \(0 of 3904 numbers arrived\)"),
        (without("0.input_layernorm"), r"missing parameters of 1 layers: model\.layers\.0\.input_layernorm \(0 of 64"),
        (beside("model.layers.0.self_attn.z_proj.weight", 2, 2), r"parameters that do not fit LlamaForCausalLM: model\.layers\.0\.self_attn\.z_proj\.weight: "),
        (beside("model.layers.0.mlp.down_proj.bias", 64), r"unexpected name of a parameter: 'model\.layers\.0\.mlp\.down_proj\.bias'"),
        (
            lambda pairs: [(name, tensor[:3]) for name, tensor in pairs],
            r"parameters that do not fit LlamaForCausalLM: model\.embed_tokens\.weight to model\.norm\.weight: AssertionError",
        ),
        (broken, "ArithmeticError: the other rank is gone"),
    ],
    ids=["part of a layer", "embedding", "norm", "unknown module", "name that vLLM skips", "shapes", "ended early"],
)
def test_what_is_not_the_whole_model_is_an_error(served: Served, change: Callable[[Any], Any], message: str) -> None:
    served.change()
    served.run(failing(served, send_weights(served.llm, change(served.model.named_parameters()), 20, SharedMemory(piece_bytes=50_000)), message))
    assert not [name for name in os.listdir("/dev/shm") if "arpo-weights" in name] and served.run(served.llm.collective_rpc("mapped")) == [0]
    ids = prompt(50, seed=2)
    assert served.gap(ids, served.run(served.turn(ids))) < TOLERANCE


@tied
def test_a_checkpoint_that_lacks_a_layer_is_an_error(served: Served, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().clone() for name, tensor in without("layers.1.mlp")(served.model.named_parameters())}, tmp_path / "model.safetensors")
    message = r"could not load the checkpoint .* must be restarted: .*missing parameters of 2 layers: model\.layers\.1\.mlp\.gate_up_proj"
    served.run(failing(served, send_checkpoint(served.llm, tmp_path, 30), message))
    ids = prompt(50, seed=3)
    assert served.gap(ids, served.run(served.turn(ids))) < TOLERANCE


@tied
def test_what_is_refused_before_leaves_the_engine_whole(served: Served) -> None:
    from arpo_algo.policies.vllm_transfer import _init

    ids = prompt(45, seed=4)
    with pytest.raises(RuntimeError, match="only while it is paused"):
        served.run(send_weights(served.llm, served.model.named_parameters(), 40, SharedMemory()))
    with pytest.raises(ValueError, match="got none"):
        served.paused(lambda: send_weights(served.llm, [], 40, SharedMemory()))
    elsewhere = {"path": "/proc/self/fd/999", "file": "/memfd:arpo-weights (deleted)", "names": [], "dtypes": [], "shapes": [], "offsets": []}
    with pytest.raises(Exception, match=r"cannot read the weights in shared memory: .* on the host of the sender"):
        served.paused(lambda: _init(served.llm, elsewhere))
    assert served.gap(ids, served.run(served.turn(ids))) < TOLERANCE


# --- vLLM's own back ends, which need GPUs: what they are sent is what they read ----------------------------------------------------------------------


class Recorder:
    """An engine of two workers that keeps what it is sent."""

    def __init__(self) -> None:
        parallel = type("Parallel", (), {"world_size": 2, "data_parallel_size": 1})
        self.vllm_config = type("Config", (), {"parallel_config": parallel})
        self.inits: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.inits.append(request.init_info)

    async def update_weights(self, request: Any) -> None:
        self.updates.append(request.update_info)

    def __getattr__(self, name: str) -> Any:
        async def done(*args: Any, **kwargs: Any) -> bool:
            return True

        return done


class OnGPU(torch.Tensor):
    is_cuda = True


def test_cuda_handles_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo

    engine = Recorder()
    monkeypatch.setattr(vllm_transfer, "cuda_handle", lambda tensor: {"gpu-0": (tuple(tensor.shape),)})
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    asyncio.run(send_weights(engine, [("a", torch.zeros(2, 3).as_subclass(OnGPU)), ("b", torch.zeros(4).as_subclass(OnGPU))], 1, CudaIPC()))
    assert not IPCWeightTransferInitInfo(**engine.inits[0]).packed
    assert IPCWeightTransferUpdateInfo(**engine.updates[0]).ipc_handles == [{"gpu-0": ((2, 3),)}, {"gpu-0": ((4,),)}]


def test_broadcasts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from vllm.distributed.weight_transfer import nccl_common
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    engine, groups = Recorder(), []
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", lambda *meeting: groups.append(meeting) or "group")
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(NCCL, "_broadcast", lambda self, part: None)
    asyncio.run(send_weights(engine, [("a", torch.zeros(2, 3))], 1, NCCL(device=1)))
    init = NCCLWeightTransferInitInfo(**engine.inits[0])
    assert (init.rank_offset, init.world_size, init.packed) == (1, 3, False)
    assert groups == [(init.master_address, init.master_port, 0, 3, 1)], "this process is rank 0 of three"
    assert NCCLWeightTransferUpdateInfo(**engine.updates[0]).names == ["a"]
