"""Environment calls in threads: the same few threads for all calls, none of them lost to a stuck call, nothing kept alive by an idle one."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from arpo_algo.env_worker import EnvWorker, _idle

ROOT = Path(__file__).resolve().parents[2]


def run(calls: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await calls()

    return asyncio.run(main())


def test_gives_what_the_function_gives() -> None:
    worker = EnvWorker(2, 30.0)
    assert run(lambda: worker(lambda: 42)) == 42
    with pytest.raises(KeyError, match="x"):
        run(lambda: worker(lambda: {}["x"]))
    with pytest.raises(RuntimeError, match="the environment raised SystemExit: 1"):
        run(lambda: worker(lambda: sys.exit(1)))
    with pytest.raises(RuntimeError, match="the environment raised StopIteration"):
        run(lambda: worker(lambda: next(iter(()))))


def test_one_call_after_the_other_takes_one_thread() -> None:
    """Also over event loops, and after a call that raised."""

    async def threads() -> set[threading.Thread]:
        worker = EnvWorker(4, 30.0)
        with pytest.raises(KeyError):
            await worker(lambda: {}["x"])
        return {await worker(threading.current_thread) for _ in range(5)}

    first, second = asyncio.run(threads()), asyncio.run(threads())
    assert len(first) == 1 and first == second
    assert first != {threading.current_thread()} and all(thread.daemon for thread in first)


def test_as_many_threads_as_calls_at_once_and_no_more_than_workers() -> None:
    """Six calls by three workers: three meet at the barrier, then the other three; with fewer threads the first would wait for ever."""

    async def threads() -> list[threading.Thread]:
        worker, barrier = EnvWorker(3, 30.0), threading.Barrier(3)

        def meet() -> threading.Thread:
            barrier.wait(30)
            return threading.current_thread()

        return list(await asyncio.gather(*(worker(meet) for _ in range(6))))

    assert len(set(asyncio.run(threads()))) == 3


def test_a_stuck_call_is_given_up_and_its_thread_left_alone() -> None:
    """Its place is free for the next call at once, which gets another thread; when it ends after all, its thread serves again."""
    free, stuck = threading.Event(), list[threading.Thread]()

    def hang() -> None:
        stuck.append(threading.current_thread())
        free.wait()

    async def main() -> list[threading.Thread]:
        with pytest.raises(TimeoutError):
            await EnvWorker(1, 0.02)(hang)
        worker = EnvWorker(1, 30.0)
        others = [await worker(threading.current_thread) for _ in range(3)]
        free.set()
        while stuck[0] not in _idle:
            await worker(lambda: None)
        return others

    others = asyncio.run(main())
    assert stuck[0] not in others and len(set(others)) == 1
    assert stuck[0].is_alive() and stuck[0].daemon


def test_a_call_may_end_after_its_loop() -> None:
    free, done = threading.Event(), threading.Event()

    def late() -> None:
        free.wait()
        done.set()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await EnvWorker(1, 0.02)(late)

    asyncio.run(main())
    free.set()
    assert done.wait(30)
    assert run(lambda: EnvWorker(1, 30.0)(lambda: 1)) == 1


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Thing:
        def use(self) -> str:
            return "used"

    things, gone = [Thing()], threading.Event()
    weakref.finalize(things[0], gone.set)
    assert run(lambda: EnvWorker(1, 30.0)(things[0].use)) == "used"
    things.clear()
    gc.collect()
    assert gone.wait(10), "the thread waits for its next call and holds the last"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_after_fork_of_the_process() -> None:
    """Threads do not live on in a forked process: a call there must not be handed to one of them."""
    program = """
import asyncio, os, sys
from arpo_algo.env_worker import EnvWorker
async def call(): return await EnvWorker(1, 60.0)(lambda: 1)
assert asyncio.run(call()) == 1
child = os.fork()
if child == 0:
    os._exit(0 if asyncio.run(call()) == 1 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, timeout=100).returncode == 0
