"""Linux system calls that Python 3.11 has no function for. Guest side, standard library and ctypes only.

Each raises ``OSError`` with its errno and begins its text with the name of the call: what the isolation report shows to the user.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, call: str) -> int:
    """``result``, or the ``OSError`` of the call that gave it when it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {errno.errorcode.get(code, code)} ({os.strerror(code)})")
    return result


def reason(error: BaseException) -> str:
    """``error`` in the words that go to the user."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error}"


def syscall(number: int, *arguments: object) -> int:
    """The raw system call, unchecked: see :func:`checked`."""
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


# -- namespaces and mounts ---------------------------------------------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """unshare(2). The process must have one thread for ``CLONE_NEWUSER``."""
    names = [name for name, value in globals().items() if name.startswith("CLONE_") and flags & value]
    checked(_libc.unshare(flags), f"unshare({'|'.join(names)})")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    checked(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)
    checked(result, f"mount({kind or 'bind'} on {target})")


def unmount(target: str) -> None:
    """umount2(2) that succeeds while files of it are open: it is gone from the tree at once."""
    checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount({target})")


def set_read_only(target: str) -> None:
    """Make the mount at ``target`` and all below it read-only, without set-uid bits (mount_setattr(2), Linux 5.12)."""
    wanted = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID)  # attr_set, attr_clr, propagation, userns_fd
    result = syscall(_SYS_MOUNT_SETATTR, -100, target.encode(), ctypes.c_uint(_AT_RECURSIVE), wanted, ctypes.c_size_t(ctypes.sizeof(wanted)))
    checked(result, f"mount_setattr({target})")


def pivot_root(new_root: str) -> None:
    """Make ``new_root``, a mount, the root of this mount namespace; the old one is gone."""
    number = _SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root: no number known for {platform.machine()}")
    os.chdir(new_root)
    checked(syscall(number, b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


# -- one process ---------------------------------------------------------------------------------------------------------------------------------------------


def _prctl(name: str, option: int, *arguments: object) -> None:
    padded = [argument if not isinstance(argument, int) else ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    checked(_libc.prctl(option, *padded), f"prctl({name})")


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parents_end(number: int) -> None:
    """Get the signal ``number`` when the parent ends. A later change of user or of capabilities forgets it."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)


def forbid_new_privileges() -> None:
    """No program started from here gains privileges (set-uid bits do nothing)."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def own_proc_entries() -> None:
    """Let this process read its own files in /proc after a change of user; until then they are root's."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 1)


def install_filter(program: bytes) -> None:
    """Load a seccomp filter (an array of ``struct sock_filter``) for this process and all it starts. Needs :func:`forbid_new_privileges`."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    loaded = Program(len(program) // 8, program)
    _prctl("PR_SET_SECCOMP", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded))


def capabilities() -> int:
    """The effective capabilities of this process, bit n for capability n."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))


def keep_capabilities(keep: int) -> None:
    """Give up all capabilities but those in the bit set ``keep``, for ever. Quiet where there are none."""
    last = 0
    try:
        while True:
            if not keep >> last & 1:
                _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, last)
            last += 1
    except OSError:  # EINVAL: one beyond the last; EPERM: nothing there to give up
        pass
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    sets = [half & 0xFFFFFFFF for half in (keep, keep >> 32)]
    data = (ctypes.c_uint32 * 6)(sets[0], sets[0], 0, sets[1], sets[1], 0)  # effective, permitted, inheritable, twice
    checked(_libc.capset(header, data), "capset")


def enter_user_namespace(inside: int, more: int = 0) -> None:
    """A user namespace of our own, in which this user and group have the number ``inside``, together with the namespaces ``more``."""
    uid, gid = os.getuid(), os.getgid()  # after unshare they read 65534
    unshare(CLONE_NEWUSER | more)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
