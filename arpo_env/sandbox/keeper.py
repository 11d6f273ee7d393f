"""The process above all branches of one session: it reaps them, and when the host lets go of the session it ends what is left. Guest side, stdlib only.

A branch may live longer than the one that it was forked from, and a daemon that a cell started longer than its cell; both then become children of the keeper.
The keeper runs no code of others. At the level ``namespaces`` it is the first process of the session's PID namespace, elsewhere a subreaper.
"""

from __future__ import annotations

import os
import signal
import socket

from . import kernel, worker
from .isolate import Process
from .limits import Limits
from .reaper import EXITS_FD, reap_all
from .trees import remove_tree
from .wire import Channel, Message


def start(level: Process, settings: Limits, message: Message, control: int, exits: int, worker_control: int, worker_output: int) -> None:
    """Turn this process, a fresh fork of the zygote, into the keeper of a new session with one worker; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(exits, EXITS_FD, inheritable=False)
    os.close(exits)
    session, branch = message["session"], message["branch"]
    try:
        level.enter_session(session)
        pid = os.fork()
    except BaseException as error:
        Channel(socket.socket(fileno=worker_control)).send({"op": "failed", "reason": kernel.reason(error)})
        os._exit(1)
    if pid == 0:
        os.close(control)
        worker.start(level, branch, settings, worker_control, worker_output)
    os.close(worker_control)
    os.close(worker_output)
    _keep(level, session, Channel(socket.socket(fileno=control)))


def _keep(level: Process, session: str, channel: Channel) -> None:
    signal.signal(signal.SIGTERM, _on_parents_end)
    signal.signal(signal.SIGCHLD, reap_all)
    reap_all()
    try:
        while True:
            message, _ = channel.receive()
            remove_tree(level.home(message["branch"]).storage)  # "gone", the only one there is
    except EOFError:
        pass
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        level.end_session(session)
        os._exit(0)


def _on_parents_end(*_: object) -> None:
    raise EOFError("the zygote is gone")
