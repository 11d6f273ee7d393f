"""A session: one process that holds the state of an interpreter, runs cells in it, and forks copies of itself. Guest side, standard library only.

A worker is the leader of its own session (setsid), with its control socket on descriptor 1000, the pipe for exit reports on 1001, output (stdout and stderr,
one pipe, so that their order is kept) on 1 and 2, and nothing to read on 0. A copy puts its own channels on the same numbers and so drops its parent's.

SIGINT stops a cell and is harmless at any other time. SIGCHLD is ours while the worker waits for a message, the cells' otherwise.
"""

from __future__ import annotations

import builtins
import os
import random
import re
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from . import isolate, kernel, limits, proctree, workdir
from .cell import Cells, format_error
from .isolate import Home
from .limits import Limits
from .reaper import EXITS_FD, reap
from .text import shorten
from .wire import PROTOCOL, Channel, Message

CONTROL_FD = 1000
_REASON_CHARS = 1000
SEED = 0
"""Every session starts with this seed in ``random`` and in numpy's global generator: the same cells print the same numbers."""

_WRITABLE_SHARED = re.compile(r"^\S+ .w.s \S+ \S+ \S+ +(.*)$", re.MULTILINE).findall
"""The last column, a path, of lines of /proc/PID/maps."""

_random = random._inst  # CPython seeds exactly this generator anew in a forked child


class Worker:
    """The process that :func:`start` turned into a session."""

    memory: limits.MemoryLimit

    def __init__(self, level: isolate.Process, home: Home):
        self.level, self.home = level, home
        # The cells' own copy of the builtins: a cell that assigns to builtins.len changes len for cells, not for this loop or the library.
        own_builtins = types.ModuleType("builtins")
        own_builtins.__dict__.update(vars(builtins))
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = own_builtins
        sys.modules.update({"__main__": module, "builtins": own_builtins})
        self.cells = Cells(module.__dict__)
        self.copies: set[int] = set()
        self.armed = self.interrupted = False

    # -- becoming and being ---------------------------------------------------------------------------------------------------------------------------

    def settle(self, prepare: Callable[[], None], control: int, output: int) -> None:
        """Take the channels, run ``prepare`` (directory, limits), and say hello. A failure is reported on the channel and ends the process."""
        os.setsid()
        for source, target in ((control, CONTROL_FD), (output, 1), (output, 2)):
            os.dup2(source, target, inheritable=target != CONTROL_FD)
        for fd in {control, output} - {CONTROL_FD, 1, 2}:
            os.close(fd)
        self.channel = Channel(socket.socket(fileno=CONTROL_FD))
        self.pid = os.getpid()
        self.copies = set()
        try:
            kernel.become_subreaper()
            prepare()
        except BaseException as error:
            self.channel.send({"op": "failed", "reason": kernel.reason(error)})
            os._exit(1)
        own = os.pidfd_open(self.pid)  # by a number the host could not find us: it may see another PID namespace
        self.channel.send({"op": "hello", "protocol": PROTOCOL, "pid": self.pid}, (own,))
        os.close(own)

    def serve(self) -> None:
        """Answer messages until the other side is gone; never returns."""
        try:
            while True:
                message, fds = self._next()
                if message["op"] == "exec":
                    self._exec(message["code"], message["limit"], message["cpu"])
                else:
                    self._fork(message["branch"], *fds)
        except EOFError:
            os._exit(0)
        except BaseException:  # user code broke what the loop stands on
            os._exit(1)

    def _next(self) -> tuple[Message, list[int]]:
        """Wait for a message; meanwhile copies that ended are reaped at once."""
        previous = signal.signal(signal.SIGCHLD, self._reap)
        self._reap()
        try:
            return self.channel.receive()
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if previous is None else previous)

    def _reap(self, *_: object) -> None:
        """Reap copies of ours that ended, and copies of copies that were left to us. Children that a cell started are the cell's to wait for, except that
        one started with ``start_new_session`` cannot be told from a copy: a later ``Popen.wait`` gives 0 for it."""
        for pid in proctree.children(self.pid):
            entry = proctree.stat(pid)
            if entry is not None and entry.state == "Z" and (pid in self.copies or entry.session == pid):
                self.copies.discard(pid)
                reap(pid)

    # -- cells ----------------------------------------------------------------------------------------------------------------------------------------

    def _exec(self, code: str, limit: int, cpu: int) -> None:
        self.interrupted = False
        _open_standard_streams()
        signal.signal(signal.SIGINT, self._on_interrupt)
        self.memory.lower()
        limits.limit_cpu(cpu)
        result, error = self._guarded(self.cells.run, code, limit)
        self.memory.lift()
        reply: Message = {"op": "result", "status": "ok", "result": result, "error": None}
        if error is not None:
            reply |= self._describe(error, limit)
        del error  # its traceback holds the cell's frames
        self._guarded(_flush)
        if os.getpid() != self.pid:  # a child of os.fork() in the cell that ran to its end
            os._exit(0)
        self.channel.send(reply | {"interrupted": self.interrupted})

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
        """What ``function`` returns, and what it raised. SIGINT raises KeyboardInterrupt in here and nowhere else, once."""
        try:
            try:
                self.armed = True
                return function(*arguments), None
            finally:
                self.armed = False
        except BaseException as error:
            return None, error

    def _on_interrupt(self, *_: object) -> None:
        self.interrupted = True
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _describe(self, error: BaseException, limit: int) -> Message:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return {"status": "exit"}
        text, failed = self._guarded(format_error, error, limit)
        if failed is not None:
            text = f"{shorten(type(error).__name__, limit)} (its traceback could not be shown: {type(failed).__name__})"
        return {"status": "memory" if isinstance(error, MemoryError) else "exception", "error": text}

    # -- copies ---------------------------------------------------------------------------------------------------------------------------------------

    def _fork(self, branch: str, control: int, output: int) -> None:
        """Fork; the copy goes on in :meth:`serve` with channels and files of its own."""
        if reason := _no_copy():
            self._answer_fork({"op": "refused", "reason": shorten(reason, _REASON_CHARS)}, control, output)
            return
        _flush()
        state = _random.getstate()
        try:
            pid = os.fork()
        except OSError as error:
            self._answer_fork({"op": "failed", "reason": f"fork: {kernel.reason(error)}"}, control, output)
            return
        if pid:
            self.copies.add(pid)
            self._answer_fork({"op": "forked"}, control, output)
            return
        _random.setstate(state)
        self.channel.close()
        self.settle(lambda: self._move(self.level.home(branch)), control, output)

    def _move(self, home: Home) -> None:
        old, self.home = self.home, home
        workdir.adopt(old, home, {0, 1, 2, CONTROL_FD, EXITS_FD}, lambda: self.level.enter_branch(home, copy=True))

    def _answer_fork(self, message: Message, *fds: int) -> None:
        for fd in fds:
            os.close(fd)
        self.channel.send(message)


def start(level: isolate.Process, branch: str, settings: Limits, control: int, output: int) -> None:
    """Turn this process, a fresh fork of the keeper, into a session; never returns."""
    home = level.home(branch)

    def prepare() -> None:
        level.fill(home)
        level.enter_branch(home, copy=False)
        workdir.enter(home.view)
        worker.memory = limits.apply(settings, count_processes=level.counts_processes)
        level.lock(home)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, "")
    random.seed(SEED)
    if "numpy.random" in sys.modules:  # the zygote imported numpy
        sys.modules["numpy.random"].seed(SEED)
    worker = Worker(level, home)
    worker.settle(prepare, control, output)
    worker.serve()


def _no_copy() -> str:
    """What a copy would lose, or share with this process; "" where nothing is."""
    if threads := _threads():
        return f"threads are alive and would not live on in a copy: {', '.join(threads)}"
    if shared := _shared_memory():
        return f"memory is mapped that a copy would go on sharing (mmap, multiprocessing, sqlite's WAL): {', '.join(shared)}"
    return ""


def _shared_memory() -> list[str]:
    """The files behind writable shared mappings; ``/dev/zero`` for one without a file."""
    with open("/proc/self/maps", errors="replace") as file:
        return sorted(set(_WRITABLE_SHARED(file.read())))


def _threads() -> list[str]:
    """Names of threads beside the main one."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    unknown = len(os.listdir("/proc/self/task")) - 1 - len(names)
    return [*names, f"{unknown} native"] if unknown > 0 else names


def _open_standard_streams() -> None:
    """Open the standard streams again where a cell closed them (``quit()`` closes stdin)."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False):
            errors = "replace" if fd == 0 else "backslashreplace"
            fresh = open(fd, mode, buffering=1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115  # lives as long as the session
            setattr(sys, name, fresh)
            setattr(sys, f"__{name}__", fresh)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
