"""The process that all sessions are forked from: modules imported once, isolation entered once, one thread. Guest side, standard library only.

Started by exec, never by fork: the host may hold threads, locks and CUDA contexts. It runs no user code and is idle between requests, so it notices at once
when the host is gone, and then ends every process below it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading

from . import isolate, keeper, kernel
from .limits import Limits
from .reaper import reap_all
from .wire import PROTOCOL, Channel, Message


def main(control: int) -> None:
    """Serve on the socket ``control`` until it closes; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = [""]
    os.umask(0o077)
    channel = Channel(socket.socket(fileno=control))
    setup, _ = channel.receive()
    settings = Limits(**setup["limits"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # many processes, each within its limits, may use up the machine's memory: then they go first, not the host
    level = isolate.LEVELS[setup["level"]](setup["root"], settings.disk_mb)
    try:
        if setup["protocol"] != PROTOCOL:
            raise RuntimeError(f"the host speaks protocol {setup['protocol']}, this file speaks {PROTOCOL}")
        level.enter_pool(setup["imports"])
        missing = _import(setup["imports"])
        signal.signal(signal.SIGCHLD, reap_all)
        _open_streams()
        gc.collect()
        gc.freeze()  # a collection in a worker then leaves the pages of the imported modules shared
        facts = {**level.facts, "counted": level.counts_processes}
        channel.send({"op": "hello", "protocol": PROTOCOL, "facts": facts, "missing": missing})
        _serve(channel, level, settings)
    except EOFError:
        pass
    except Exception as error:
        channel.send({"op": "failed", "reason": kernel.reason(error)})
    finally:
        level.end_pool()
        os._exit(0)


def _serve(channel: Channel, level: isolate.Process, settings: Limits) -> None:
    while True:
        message, fds = channel.receive()
        try:
            pid = level.fork()
        except OSError as error:
            answer: Message = {"op": "failed", "reason": kernel.reason(error)}
        else:
            if pid == 0:
                try:
                    channel.close()
                    keeper.start(level, settings, message, *fds)
                finally:
                    os._exit(1)
            answer = {"op": "forked"}
        for fd in fds:
            os.close(fd)
        channel.send(answer)


def _import(names: list[str]) -> dict[str, str]:
    """Import ``names``; those that cannot be imported, with the reason. ``RuntimeError`` when one started a thread: a fork would lose it."""
    missing: dict[str, str] = {}
    if "numpy" in names:
        names = [*names, "numpy.random"]  # numpy loads it at first use; sessions seed it
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            _drop(name.partition(".")[0])
            missing[name] = f"{type(error).__name__}: {error}"
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            alive = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            raise RuntimeError(f"importing {name!r} started {threads - 1} thread(s) {alive}; a forked session would lose them: import it in the cells instead")
    return missing


def _drop(package: str) -> None:
    """Forget what is left of a package whose import failed half-way: a session, which has a directory to write to, may succeed."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _open_streams() -> None:
    """Line-buffered UTF-8 text on 1 and 2 whatever the locale; a lone surrogate is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
