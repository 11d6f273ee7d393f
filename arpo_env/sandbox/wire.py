"""Frames between host and guest: a length (unsigned 32 bits, big-endian), then that many bytes of JSON; file descriptors ride along (SCM_RIGHTS).

Both sides use this file. The guest loads it without the rest of ``arpo_env``, so it needs the standard library alone, and it holds its own references to
what it calls: a cell that assigns to ``json.dumps`` changes nothing here.

Messages, protocol 2 (``op`` names the message):

==================  =====================================================================  ==================================================
sender to receiver  message                                                                answer
==================  =====================================================================  ==================================================
host to zygote      ``setup`` protocol, level, imports, limits, root                       ``hello`` protocol, facts, missing | ``failed`` reason
host to zygote      ``session`` session, branch; 4 fds (keeper's control, exit reports,    ``forked`` | ``failed`` reason
                    worker's control, output)
host to keeper      ``gone`` branch                                                        none: its directory is removed
host to worker      ``exec`` code, cpu, limit                                              ``result`` status, result, error, interrupted
host to worker      ``fork`` branch; 2 fds (control, output)                               ``forked`` | ``refused`` reason | ``failed`` reason
new worker to host  (first message on its own socket; 1 fd, its pidfd)                     ``hello`` protocol, pid | ``failed`` reason
==================  =====================================================================  ==================================================

End of file on any socket means that the other side is gone: the receiver ends too, with everything below it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from json import dumps, loads
from time import monotonic
from typing import Any

PROTOCOL = 2
MAX_FRAME = 64 << 20
SHORT_FRAME = 1 << 16
"""Bytes of an answer that holds no text of a cell's."""
MAX_FDS = 4
_HEADER = struct.Struct(">I")

Message = dict[str, Any]


def open_ends() -> tuple[socket.socket, socket.socket, int, int]:
    """A pair of sockets and a pipe's two ends, all or none: our socket, theirs, the reading end, the writing end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reader, writer = os.pipe()
    except OSError:
        ours.close()
        theirs.close()
        raise
    return ours, theirs, reader, writer


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody asked for."""
    for fd in fds:
        os.close(fd)


class Channel:
    """One end of a connected stream socket that carries messages. One thread at a time may send, and one may receive."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket and every descriptor that was received and not handed out. Idempotent."""
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def send(self, message: Message, fds: Sequence[int] = (), *, deadline: float | None = None) -> None:
        """Send one message; the descriptors stay open here. ``TimeoutError`` past ``deadline`` (monotonic seconds), ``OSError`` when the peer is gone."""
        body = dumps(message).encode("ascii")
        if len(body) > MAX_FRAME:
            raise ValueError(f"a message may have {MAX_FRAME} bytes, got {len(body)}")
        rest = memoryview(_HEADER.pack(len(body)) + body)
        while rest:
            try:
                sent = socket.send_fds(self._sock, [rest], list(fds), socket.MSG_NOSIGNAL) if fds else self._sock.send(rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            else:
                rest, fds = rest[sent:], ()

    def receive(self, *, deadline: float | None = None, most: int = MAX_FRAME) -> tuple[Message, list[int]]:
        """The next message with the descriptors that came with it. ``TimeoutError`` past ``deadline``, ``EOFError`` when the peer is gone or its message has
        more than ``most`` bytes: the host does not hold whatever a hostile cell sends."""
        while (found := self.receive_now(most)) is None:
            self._wait(select.POLLIN, deadline)
        return found

    def receive_now(self, most: int = MAX_FRAME) -> tuple[Message, list[int]] | None:
        """The next message when it is all there, else None; never waits. ``EOFError`` when the peer is gone."""
        while (message := self._parse(most)) is None:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return None
            except ConnectionError:
                data, fds = b"", []
            self._fds += fds
            if len(self._fds) > MAX_FDS:
                raise EOFError(f"a message may bring {MAX_FDS} descriptors, there are {len(self._fds)}: not our protocol")
            if not data:
                raise EOFError("the other side closed the connection")
            self._buffer += data
        received, self._fds = self._fds, []
        return message, received

    def _parse(self, most: int) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > most:
            raise EOFError(f"a frame may have {most} bytes, the header says {length}: not our protocol")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        try:
            message = loads(self._buffer[_HEADER.size : end])
        except (ValueError, RecursionError) as error:
            raise EOFError(f"a message must be JSON ({error}): not our protocol") from None
        del self._buffer[:end]
        if not isinstance(message, dict):
            raise EOFError(f"a message must be a JSON object, got {type(message).__name__}: not our protocol")
        return message

    def _wait(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self._sock, event)
        wait = None if deadline is None else max(0.0, deadline - monotonic()) * 1000
        if not poller.poll(wait):
            raise TimeoutError("the other side did not answer in time")
