"""The process that all sessions are forked from: modules imported once, namespaces entered once, one thread. Guest side, standard library only.

Started by exec, never by fork: the host may hold threads, locks and CUDA contexts. It runs no user code and is idle between requests, so it notices at once
when the host is gone, and then ends every process below it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import threading

from . import isolate, proctree, worker
from .limits import Limits
from .wire import PROTOCOL, Channel, Message


def main(control: int) -> None:
    """Serve on the socket ``control`` until it closes; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = [""]
    os.umask(0o077)
    channel = Channel(socket.socket(fileno=control))
    setup, (exits,) = channel.receive()
    os.dup2(exits, worker.EXITS_FD, inheritable=False)
    os.close(exits)
    os.set_blocking(worker.EXITS_FD, False)
    try:
        if setup["protocol"] != PROTOCOL:
            raise RuntimeError(f"the host speaks protocol {setup['protocol']}, this file speaks {PROTOCOL}")
        isolate.become_subreaper()
        isolation = isolate.isolate()
        missing = _import(setup["imports"])
        signal.signal(signal.SIGCHLD, _reap)
        _open_streams()
        gc.collect()
        gc.freeze()  # a collection in a worker then leaves the pages of the imported modules shared
        channel.send({"op": "hello", "protocol": PROTOCOL, "pid": os.getpid(), "isolation": isolation, "missing": missing})
        _serve(channel, Limits(**setup["limits"]), isolation)
    except EOFError:
        pass
    except Exception as error:
        channel.send({"op": "failed", "reason": f"{type(error).__name__}: {error}"})
    finally:
        proctree.kill_descendants(os.getpid())
        shutil.rmtree(setup["root"], ignore_errors=True)
        os._exit(0)


def _serve(channel: Channel, settings: Limits, isolation: dict[str, str]) -> None:
    while True:
        message, fds = channel.receive()
        try:
            pid = os.fork()
        except OSError as error:
            answer: Message = {"op": "failed", "reason": f"fork: {error}"}
        else:
            if pid == 0:
                try:
                    channel.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    worker.start(message["dir"], settings, isolation, *fds)
                finally:
                    os._exit(1)
            answer = {"op": "forked", "pid": pid}
        for fd in fds:
            os.close(fd)
        channel.send(answer)


def _reap(*_: object) -> None:
    for pid in proctree.children(os.getpid()):
        worker.reap(pid)


def _import(names: list[str]) -> dict[str, str]:
    """Import ``names``; those that cannot be imported, with the reason. ``RuntimeError`` when one started a thread: a fork would lose it."""
    missing: dict[str, str] = {}
    if "numpy" in names:
        names = [*names, "numpy.random"]  # numpy loads it at first use; sessions seed it
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            alive = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            raise RuntimeError(f"importing {name!r} started {threads - 1} thread(s) {alive}; a forked session would lose them: import it in the cells instead")
    return missing


def _open_streams() -> None:
    """Line-buffered UTF-8 text on 1 and 2 whatever the locale; a lone surrogate is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
