"""The working directory of a session, and what makes a copy of it independent of its parent's files. Guest side, standard library only.

Layout: ``work`` is where cells start, ``tmp`` is TMPDIR. A copy gets both.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .isolate import Home

_DELETED = " (deleted)"
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND


def enter(view: str) -> None:
    """Live in the fresh directory ``view`` from now on."""
    os.environ.update(HOME=os.path.join(view, "work"), TMPDIR=os.path.join(view, "tmp"))
    tempfile.tempdir = None
    os.chdir(os.path.join(view, "work"))


def adopt(old: Home, new: Home, keep_fds: set[int], move: Callable[[], None]) -> None:
    """Make this process, a fresh fork, live in a copy ``new`` of ``old``: files, current directory, environment and open regular files.

    ``move`` makes the copy appear at ``new.view``. Where that is the path of ``old.view``, the files of ``old`` have no path any more after it.
    """
    files = [found for fd in _open_fds() if fd not in keep_fds and (found := _regular(fd)) is not None]
    here = os.readlink("/proc/self/cwd")  # os.getcwd() raises where the cell removed its directory
    copy_tree(old.storage, new.storage)
    move()
    for file in files:
        _reopen(file, old.view, new.view)
    for name, value in os.environ.items():
        if _inside(value, old.view):
            os.environ[name] = new.view + value[len(old.view) :]
    if tempfile.tempdir is not None and _inside(str(tempfile.tempdir), old.view):
        tempfile.tempdir = new.view + str(tempfile.tempdir)[len(old.view) :]
    if _inside(here, old.view):
        target = new.view + here[len(old.view) :]
        os.chdir(target if os.path.isdir(target) else os.path.join(new.view, "work"))


def copy_tree(old: str, new: str) -> None:
    """Copy directories, regular files and symbolic links, with modes and times. Other kinds (a FIFO, a socket) are left out."""
    os.mkdir(new, 0o700)
    with os.scandir(old) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a process that a cell left behind removed it meanwhile
                _copy_entry(entry, os.path.join(new, entry.name))
    shutil.copystat(old, new)


def _copy_entry(entry: os.DirEntry[str], target: str) -> None:
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
    elif entry.is_dir():
        copy_tree(entry.path, target)
    elif entry.is_file():
        shutil.copy2(entry.path, target)


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _open_fds() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc/self/fd"))


@dataclass(frozen=True)
class _OpenFile:
    fd: int
    path: str
    flags: int


def _regular(fd: int) -> _OpenFile | None:
    """What a descriptor of a regular file is open on; None for other kinds."""
    try:
        status = os.fstat(fd)
    except OSError:  # the descriptor of the listing itself
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return _OpenFile(fd, os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL) & _KEPT_FLAGS)


def _reopen(file: _OpenFile, old: str, new: str) -> None:
    """Give a regular file that is open at the fork a description of its own, at the same offset: else parent and copy move one offset together."""
    if file.path.endswith(_DELETED) and _inside(file.path, old):
        fresh = _copy_unlinked(file.fd, file.flags, new)
    elif _inside(file.path, old):
        fresh = os.open(new + file.path[len(old) :], file.flags)
    else:
        fresh = os.open(f"/proc/self/fd/{file.fd}", file.flags)  # a file outside the session's directory: own offset, same file
    os.lseek(fresh, os.lseek(file.fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(fresh, file.fd, inheritable=os.get_inheritable(file.fd))
    os.close(fresh)


def _copy_unlinked(fd: int, flags: int, new: str) -> int:
    """A temporary file without a name: its bytes in another one without a name."""
    handle, path = tempfile.mkstemp(dir=new)
    try:
        with open(handle, "wb") as target, open(f"/proc/self/fd/{fd}", "rb") as source:
            shutil.copyfileobj(source, target)
        return os.open(path, flags)
    finally:
        os.unlink(path)
