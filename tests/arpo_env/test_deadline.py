"""``call_with_deadline``: returns, raises, gives up on time, and never waits for what it gave up on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from arpo_env import _deadline
from arpo_env._deadline import DeadlineExceeded, call_with_deadline

ROOT = Path(__file__).resolve().parents[2]


def test_gives_what_the_function_gives() -> None:
    assert call_with_deadline(lambda: 42, 30.0) == 42
    with pytest.raises(KeyError, match="x"):
        call_with_deadline(lambda: {}["x"], 30.0)
    with pytest.raises(SystemExit):
        call_with_deadline(lambda: sys.exit(1), 30.0)
    assert call_with_deadline(lambda: None, 30.0) is None


def test_gives_up_and_goes_on() -> None:
    """The abandoned function ends later, its thread with it; meanwhile other calls are served by other threads."""
    free, ended = threading.Event(), threading.Event()
    stuck: list[threading.Thread] = []

    def wait() -> None:
        stuck.append(threading.current_thread())
        free.wait()
        ended.set()

    with pytest.raises(DeadlineExceeded, match=r"0\.02 s"):
        call_with_deadline(wait, 0.02)
    others = {call_with_deadline(threading.current_thread, 30.0) for _ in range(5)}
    assert stuck[0] not in others
    assert stuck[0].daemon
    free.set()
    assert ended.wait(30)
    stuck[0].join(30)
    assert not stuck[0].is_alive()
    assert stuck[0] not in _deadline._idle


@pytest.mark.parametrize("seconds", [0.0, -0.5, -1.0])
def test_a_deadline_that_has_passed_already(seconds: float) -> None:
    free = threading.Event()
    with pytest.raises(DeadlineExceeded):
        call_with_deadline(free.wait, seconds)
    free.set()


def test_a_thread_is_used_again() -> None:
    first = call_with_deadline(threading.current_thread, 30.0)
    assert call_with_deadline(threading.current_thread, 30.0) is first
    assert first is not threading.current_thread()


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Thing:
        def use(self) -> str:
            return "used"

    thing = Thing()
    reference = weakref.ref(thing)
    assert call_with_deadline(thing.use, 30.0) == "used"
    call_with_deadline(lambda: None, 30.0)  # whatever the thread held of the call before is gone now at the latest
    del thing
    gc.collect()
    assert reference() is None


def test_calls_may_nest() -> None:
    assert call_with_deadline(lambda: call_with_deadline(lambda: 1, 30.0) + 1, 30.0) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_after_fork_of_the_process() -> None:
    """Threads do not live on in a forked process: a call there must not be handed to one of them."""
    program = """
import os, sys
from arpo_env._deadline import call_with_deadline
assert call_with_deadline(lambda: 1, 60.0) == 1
child = os.fork()
if child == 0:
    os._exit(0 if call_with_deadline(lambda: 1, 60.0) == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "0", done.stderr
