"""What of turns and of an engine in other processes can be tested without vLLM."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engine_fakes import Engine, Listener, start

from arpo_algo.policies import vllm_async, vllm_engine, vllm_processes, vllm_start
from arpo_algo.policies.base import SamplingParams
from arpo_algo.policies.decoding import DecodingStats
from arpo_algo.policies.stops import Endings
from arpo_algo.policies.vllm import VLLMPolicy
from arpo_algo.policies.vllm_async import AsyncEngine, TreeRanks
from arpo_algo.policies.vllm_transfer import CudaIPC, SharedMemory, Transport
from arpo_algo.policies.vllm_turns import EngineStopped, Turn, Turns
from arpo_algo.policies.vllm_worker import column_id

# --- turns ----------------------------------------------------------------------------------------------------------------------------------------------


def output(name: str, tokens: list[tuple[int, int]], *, finished: bool = False) -> Any:
    """What vLLM returns for ``tokens``: (id, version of the weights that sampled it). Log-probability -1, entropy 2."""
    flat = SimpleNamespace(
        logprobs=[x for _ in tokens for x in (-1.0, 2.0)],
        token_ids=[x for token, version in tokens for x in (token, column_id(version))],
        start_indices=[2 * i for i in range(len(tokens))],
        end_indices=[2 * i + 2 for i in range(len(tokens))],
    )
    completion = SimpleNamespace(token_ids=[token for token, _ in tokens], logprobs=flat, finish_reason="stop" if finished else None)
    return SimpleNamespace(request_id=name, num_cached_tokens=1, finished=finished, outputs=[completion])


def new_turn(n: int = 3, *, tree: int | None = None) -> Turn:
    return Turn([1, 2, 3], SamplingParams(max_new_tokens=n, tree=tree), None)


def turns() -> Turns:
    class WithoutVLLM(Turns):
        def params(self, turn: Turn) -> Any:
            return turn.params

    return WithoutVLLM(Endings(None, {9}), {9}, DecodingStats())


def test_every_token_has_the_version_that_sampled_it() -> None:
    live, one, other = turns(), new_turn(), new_turn(10)
    live.add("one", one)
    live.add("other", other)
    assert not live.receive(output("one", [(4, 6)]))
    assert live.receive(output("one", [(5, 6), (6, 8), (0, 8)]))  # joined on the way; the last is beyond the end
    assert live.receive(output("other", [(4, 8), (9, 8), (1, 8)]))
    assert not live.receive(output("one", [(1, 8)]))
    got = one.future.result(0)
    assert (got.token_ids, got.version, got.versions, got.stop_reason, got.entropies) == ([4, 5, 6], 6, [6, 6, 8], "length", [2.0] * 3)
    same = other.future.result(0)
    assert (same.token_ids, same.version, same.versions, same.stop_reason) == ([4, 9], 8, [], "eos")
    assert (live.stats.reused_tokens, live.stats.prefilled_tokens, live.stats.decoded_tokens, len(live)) == (2, 4, 5, 0)


def test_a_turn_that_vllm_ends_by_itself_is_an_error() -> None:
    live, turn = turns(), new_turn()
    live.add("a", turn)
    assert live.receive(output("a", [(4, 0)], finished=True))
    with pytest.raises(RuntimeError, match="of 1 tokens for the reason 'stop'"):
        turn.future.result(0)


def test_trees_stay_on_the_rank_that_had_the_fewest_turns() -> None:
    ranks = TreeRanks(2)
    assert [ranks.enter(tree) for tree in (10, 11, 10, 10, 12, None, 11)] == [0, 1, 0, 0, 1, 1, 1]
    for _ in range(4):
        ranks.leave(1)
    assert ranks.enter(11) == 1 and ranks.enter(13) == 1 and ranks.enter(None) == 1 and ranks.enter(10) == 0


# --- an engine in other processes -----------------------------------------------------------------------------------------------------------------------


class OtherProcesses:
    """An ``AsyncLLM``: ``send`` gives outputs to a request, ``die`` ends all."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: dict[str, asyncio.Queue[Any]] = {}
        self.ranks: dict[str, int] = {}
        self.resumed_with: list[str] = []
        self.errored = self.paused = self.hangs = False
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 11, enable_sleep_mode=True)
        self.output_handler = asyncio.create_task(asyncio.Event().wait())
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[]), coordinator=None))

    async def generate(self, prompt: Any, params: Any, name: str, *, data_parallel_rank: int, lora_request: Any) -> AsyncGenerator[Any, None]:
        self.requests[name] = asyncio.Queue()
        self.ranks[name] = data_parallel_rank
        try:
            while (got := await self.requests[name].get()) is not None:
                yield got
            raise ConnectionError("says the test")
        finally:
            del self.requests[name]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.calls.append(" ".join((method, *map(str, args))))
        for _ in range(8):  # others act meanwhile
            await asyncio.sleep(0)
        if self.hangs:
            await asyncio.Event().wait()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused, self.resumed_with = False, sorted(self.requests)

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.paused = True

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")
        self.paused = self.paused and tags != ["kv_cache"]

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.output_handler.cancel()

    def die(self) -> None:
        self.errored = True
        self.output_handler.cancel()
        for queue in self.requests.values():
            queue.put_nowait(None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    """On two ranks; the weights that come are in its calls."""

    async def send_weights(llm: Any, tensors: Any, version: int, transport: Any) -> None:
        llm.calls.append(f"weights {version}")
        for tensor in tensors:
            if isinstance(tensor, Exception):
                raise tensor

    async def nothing(*args: Any) -> None: ...

    monkeypatch.setattr(vllm_async, "start_engine", lambda arguments, transport: (OtherProcesses(), transport))
    monkeypatch.setattr(vllm_async, "probe_entropy_column", nothing)
    monkeypatch.setattr(vllm_async, "send_weights", send_weights)
    engine: Any = AsyncEngine({"data_parallel_size": 2}, turns())
    engine.llm = engine._llm
    engine.llm.calls.clear()
    yield engine
    engine.close()
    assert engine.llm.calls.count("shutdown") == 1 and not engine.llm.requests


def do(engine: Any, action: Callable[[OtherProcesses], Any]) -> Any:
    """Calls ``action`` when the engine's loop has done what it could before."""

    async def later(llm: Any) -> Any:
        for _ in range(8):
            await asyncio.sleep(0)
        return action(llm)

    return engine.call(later).result(60)


def under_way(engine: Any, name: str, *, tree: int | None = None) -> Turn:
    turn = new_turn(tree=tree)
    engine.join(name, turn)
    assert do(engine, lambda llm: name in llm.requests)
    return turn


def test_turns_of_other_processes(engine: Any) -> None:
    one, two, three = (under_way(engine, name, tree=tree) for name, tree in (("one", 5), ("two", 6), ("three", 5)))
    assert do(engine, lambda llm: dict(llm.ranks)) == {"one": 0, "two": 1, "three": 0}
    do(engine, lambda llm: llm.requests["one"].put_nowait(output("one", [(4, 0), (5, 0), (6, 0)])))
    assert one.future.result(60).token_ids == [4, 5, 6] and do(engine, lambda llm: sorted(llm.requests)) == ["three", "two"]
    two.future.cancel()
    engine.leave("two")
    assert do(engine, lambda llm: sorted(llm.requests)) == ["three"]
    do(engine, lambda llm: llm.requests["three"].put_nowait(None))
    with pytest.raises(ConnectionError, match="says the test"):
        three.future.result(60)
    gone = new_turn()
    gone.future.cancel()
    engine.join("gone", gone)
    assert do(engine, lambda llm: list(llm.requests)) == [] and engine._ranks._live == [0, 0]


def test_weights_change_in_a_pause(engine: Any) -> None:
    turn = under_way(engine, "a")
    with pytest.raises(RuntimeError, match="the weights changed while 1 requests were under way"):
        engine.update([], 1, keep_requests=False)
    assert engine.llm.calls == []
    engine.update([], 1, keep_requests=True)
    assert engine.llm.calls == ["pause keep", "weights 1", "adopt_version 1", "resume"] and not turn.future.done()


def test_a_turn_that_comes_while_the_weights_change_is_sampled_by_the_new_ones(engine: Any) -> None:
    late = new_turn()

    def tensors() -> Iterator[Any]:
        engine.join("late", late)  # from here on the loop is busy with the update
        yield

    engine.update(tensors(), 1, keep_requests=False)
    assert do(engine, lambda llm: "late" in llm.requests) and engine.llm.resumed_with == []


def test_an_update_that_has_touched_nothing_leaves_the_engine_as_it_was(engine: Any) -> None:
    turn = under_way(engine, "a")
    with pytest.raises(KeyError, match="mine"):
        engine.update([KeyError("mine")], 1, keep_requests=True)
    assert engine.llm.calls == ["pause keep", "weights 1", "resume"] and not turn.future.done()


def test_an_update_that_fails_midway_ends_the_engine(engine: Any) -> None:
    turn = under_way(engine, "a")
    with pytest.raises(EngineStopped, match="half way"):
        engine.update([EngineStopped("half way")], 1, keep_requests=True)
    with pytest.raises(EngineStopped, match="half way"):
        turn.future.result(60)
    engine._thread.join(60)
    assert engine.llm.calls == ["pause keep", "weights 1", "shutdown"]


def test_everybody_hears_of_a_death(engine: Any) -> None:
    turns = [under_way(engine, name) for name in "abc"]
    engine.llm.hangs = True
    errors: list[Exception] = []

    def run() -> None:
        with pytest.raises(EngineStopped, match="died") as caught:
            engine.update([], 1, keep_requests=True)
        errors.append(caught.value)

    update = threading.Thread(target=run)
    update.start()
    while "adopt_version 1" not in do(engine, lambda llm: llm.calls):  # which nobody will answer
        pass
    waiting = new_turn()
    engine.join("waiting", waiting)  # for the end of the update
    do(engine, lambda llm: llm.die())
    for turn in (*turns, waiting):
        with pytest.raises(EngineStopped, match="a process of the vLLM engine died"):
            turn.future.result(60)
    update.join(60)
    assert len(errors) == 1
    late = new_turn()
    engine.join("late", late)
    with pytest.raises(EngineStopped, match="died"):
        late.future.result(60)
    with pytest.raises(EngineStopped, match="died"):
        engine.sleep()
    engine.close()


def test_what_waits_for_an_engine_that_is_closed_is_answered(engine: Any) -> None:
    engine.llm.hangs = True
    waiting = [engine.call(lambda llm: llm.collective_rpc("wait")) for _ in range(3)]
    while len(do(engine, lambda llm: llm.calls)) < 3:
        pass
    engine.close()
    for future in waiting:
        with pytest.raises(EngineStopped, match="was closed"):
            future.result(60)


@pytest.mark.parametrize("moments", range(8))
def test_a_turn_that_comes_as_the_engine_ends_is_answered(engine: Any, moments: int) -> None:
    """Whatever of it had begun by then: a task that is cancelled before its first step runs none of its code."""
    turn = new_turn()

    async def both(llm: Any) -> None:
        engine.join("late", turn)
        for _ in range(moments):
            await asyncio.sleep(0)
        engine._end_with(EngineStopped("says the test"))

    engine.call(both)
    with pytest.raises(EngineStopped, match="says the test"):
        turn.future.result(60)


def test_a_worker_ends_with_its_owner() -> None:
    """Killed, which leaves the owner no time to end anybody. All hold the pipe that is read here: it ends when they have, the worker and another one too."""
    worker = """
import sys, time
from arpo_algo.policies.vllm_processes import end_with
end_with(int(sys.argv[1]), sys.argv[2], [int(sys.argv[3])])
print('up', flush=True)
time.sleep(600)
"""
    owner = f"""
import subprocess, sys, time
from arpo_algo.policies.vllm_processes import identity
other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
subprocess.Popen([sys.executable, '-c', {worker!r}, *map(str, (*identity(), other.pid))])
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.kill()
        assert process.stdout.read() == ""
    vllm_processes.end_with(1 << 30, "another host, where that is a process")


def test_no_process_and_no_shared_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that has one of its own, with a segment that nobody else will remove."""
    pytest.importorskip("psutil")
    monkeypatch.setattr(vllm_processes, "_PATIENCE", 0.0)
    child = "import time; print('up', flush=True); time.sleep(600)"
    script = f"""
import subprocess, sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(memory._name, 'shared_memory')
child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(memory.name, child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        name, grandchild = top.stdout.readline().split()
        resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[top]), coordinator=None)
        processes = vllm_processes.Processes(SimpleNamespace(engine_core=SimpleNamespace(resources=resources)))
        assert Path("/dev/shm", name).exists()
        asyncio.run(processes.ended())
        assert not Path("/dev/shm", name).exists()
        stat = Path(f"/proc/{grandchild}/stat")
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    assert top.returncode == -9


def test_turns_that_vllm_ends_by_itself_are_answered_like_all_others(engine: Any) -> None:
    """When one data-parallel rank dies, the others end their requests, and that may be heard of first."""
    one, other = under_way(engine, "one"), under_way(engine, "other")
    aborted = output("one", [], finished=True)
    aborted.outputs[0].finish_reason = "abort"
    do(engine, lambda llm: llm.requests["one"].put_nowait(aborted))
    for turn in (one, other):
        with pytest.raises(EngineStopped, match="a process of the vLLM engine died"):
            turn.future.result(60)


def test_a_failing_start_is_raised_where_the_engine_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Any, transport: Any) -> Any:
        raise ValueError("no such model")

    monkeypatch.setattr(vllm_async, "start_engine", broken)
    with pytest.raises(ValueError, match="no such model"):
        AsyncEngine({}, turns())
    llms: list[OtherProcesses] = []

    async def wrong(llm: Any, rank: int) -> None:
        llms.append(llm)
        raise RuntimeError("no such column")

    monkeypatch.setattr(vllm_async, "start_engine", lambda arguments, transport: (OtherProcesses(), transport))
    monkeypatch.setattr(vllm_async, "probe_entropy_column", wrong)
    with pytest.raises(RuntimeError, match="no such column"):
        AsyncEngine({}, turns())
    assert "shutdown" in llms[0].calls

    def unseen(llm: Any) -> Any:
        llms.append(llm)
        raise PermissionError("no such process")

    monkeypatch.setattr(vllm_async, "Processes", unseen)
    with pytest.raises(PermissionError, match="no such process"):
        AsyncEngine({}, turns())
    assert "shutdown" in llms[1].calls


@pytest.mark.parametrize(
    ("cpu", "arguments", "transport"),
    [
        (True, {"enable_sleep_mode": True}, SharedMemory()),
        (False, {"enable_sleep_mode": False}, SharedMemory()),
        (False, {"enable_sleep_mode": True, "data_parallel_size": 2}, SharedMemory()),
        (False, {"enable_sleep_mode": True, "tensor_parallel_size": 1}, CudaIPC()),
    ],
)
def test_which_transport_an_engine_is_started_with(monkeypatch: pytest.MonkeyPatch, cpu: bool, arguments: dict[str, Any], transport: Transport) -> None:
    """Pickles travel only where they have to, and only between this process's and the engine's."""
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    started: list[Any] = []
    llms = SimpleNamespace(from_engine_args=lambda arguments: started.append((arguments, os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION"))))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(AsyncEngineArgs=dict))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace(AsyncLLM=llms))
    for module in (vllm_async, vllm_start):
        monkeypatch.setattr(module, "on_cpu", lambda: cpu)
    assert vllm_async.start_engine({"max_model_len": 8, **arguments}, None)[1] == transport
    [(given, pickles)] = started
    assert given["weight_transfer_config"] == {"backend": transport.backend} and given["worker_extension_cls"].endswith(".WeightReceiver")
    assert pickles == ("1" if transport == CudaIPC() else None) and "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ


# --- sleep, in both kinds of engine ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["in this process", "in others"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMPolicy]:
    policy: Any = object.__new__(VLLMPolicy)
    policy.sleeps, policy._asleep, policy._version, policy._adapters = True, [], 0, None
    policy.calls = []
    if request.param == "in others":
        policy._engine = request.getfixturevalue("engine")
        policy.calls = policy._engine.llm.calls
    else:
        engine = Engine()
        policy._engine, policy.calls = start(monkeypatch, engine, Listener()), engine.calls
        monkeypatch.setattr(vllm_engine, "replace_weights", lambda engine, weights, version: engine.calls.append(f"weights {version}"))
    yield policy
    policy.close()


def test_the_memory_of_the_weights_comes_back_first(policy: Any) -> None:
    policy.sleep()
    policy.sleep()
    turn = new_turn()
    policy._engine.join("a", turn)
    with pytest.raises(RuntimeError, match=r"the engine sleeps: call wake\(\)"):
        turn.future.result(60)
    policy.wake()
    policy.wake()
    policy.sleep()
    policy.update_weights([])
    steps = [call for call in policy.calls if "adopt" not in call]
    assert steps == ["sleep 1", "wake weights", "wake kv_cache", "sleep 1", "wake weights", "weights 1", "wake kv_cache"]
    assert not policy._engine._turns.asleep and policy.version == 1


def test_sleep_is_refused_under_requests_and_where_the_engine_was_not_made_for_it(policy: Any) -> None:
    policy.sleeps = False
    with pytest.raises(RuntimeError, match="pass sleeps=True"):
        policy.sleep()
