"""Landlock: a process gives up rights to files, TCP ports and signals for itself and all it starts, without any privilege. Guest side, ctypes only.

What each version of the interface (ABI) adds: 1 files; 2 renaming between directories; 3 truncation; 4 TCP; 5 ioctl on devices; 6 signals and abstract unix
sockets. On an older one the right cannot be taken away, and the report says so. https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

from . import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_ABI_1 = (1 << 13) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP = 1 | 2
_SCOPES = 1 | 2
"""Abstract unix sockets and signals."""
SIGNALS_ABI = 6
TRUNCATE_ABI = 3


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """The version that the kernel has. ``OSError`` with ENOSYS or EOPNOTSUPP where it has none."""
    return kernel.checked(kernel.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)), "landlock_create_ruleset")


def _handled(version: int) -> int:
    handled = _ALL_OF_ABI_1
    for least, right in ((2, _REFER), (TRUNCATE_ABI, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= least:
            handled |= right
    return handled


def restrict(readable: Iterable[str], devices: Iterable[str], writable: Iterable[str]) -> None:
    """From now on: read and execute below ``readable``, read and write the files ``devices``, everything below ``writable``, and nothing else; no TCP; no
    signals to processes outside. Paths that do not exist are left out. Needs ``no_new_privs``."""
    version = abi()
    handled = _handled(version)
    attributes = _Ruleset(handled, _TCP if version >= 4 else 0, _SCOPES if version >= SIGNALS_ABI else 0)
    size = 24 if version >= SIGNALS_ABI else 16 if version >= 4 else 8
    created = kernel.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0))
    ruleset = kernel.checked(created, "landlock_create_ruleset")
    try:
        for paths, rights in ((readable, _READ), (devices, _READ_FILE | _WRITE_FILE), (writable, handled)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        kernel.checked(kernel.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return
        raise
    try:
        if not os.path.isdir(path):
            rights &= _FILE_ONLY
        rule = _PathBeneath(rights, fd)
        added = kernel.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
        kernel.checked(added, f"landlock_add_rule({path})")
    finally:
        os.close(fd)
