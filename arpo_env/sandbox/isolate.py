"""What the kernel lets a process cut off from itself without privileges: namespaces by ``unshare``. Guest side, standard library only.

Python 3.11 has no ``os.unshare``, hence ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import os

CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """unshare(2). ``OSError`` with its errno. The process must have one thread for ``CLONE_NEWUSER``."""
    _check(_libc.unshare(flags), "unshare")


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def forbid_new_privileges() -> None:
    """No program started from here gains privileges (set-uid bits do nothing)."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def enter_user_namespace(more: int = 0) -> None:
    """A user namespace of our own, in which uid and gid stay what they are, together with the namespaces ``more``."""
    uid, gid = os.getuid(), os.getgid()  # after unshare they read 65534
    unshare(CLONE_NEWUSER | more)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _network_and_user() -> None:
    enter_user_namespace(CLONE_NEWNET | CLONE_NEWIPC)


def _network_alone() -> None:
    unshare(CLONE_NEWNET | CLONE_NEWIPC)


def isolate() -> dict[str, str]:
    """Enter the namespaces that can be had. Gives for ``user`` and ``network`` the empty string, or why it was not possible."""
    forbid_new_privileges()
    failed = _attempt(_network_and_user)
    if failed is None:
        return {"user": "", "network": ""}
    alone = _attempt(_network_alone)  # root of a container that denies user namespaces may still have this one
    return {"user": failed, "network": alone or ""}


def _attempt(step: object) -> str | None:
    """Run ``step`` in this process if it works in a child of ours first; else say why. A step that fails half-way would leave us without our uid."""
    assert callable(step)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            step()
        except OSError as error:
            os.write(writer, f"{errno.errorcode.get(error.errno or 0, '?')}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reason = file.read().decode()
    os.waitpid(pid, 0)
    if reason:
        return reason
    step()
    return None


def probe() -> None:
    """Print what :func:`isolate` gives here, as JSON. The host runs this in a process of its own."""
    import json

    print(json.dumps(isolate()))
