"""The working directory of a session, and what makes a copy of it independent of its parent's files. Guest side, standard library only.

Layout: ``DIR/work`` is where cells start, ``DIR/tmp`` is TMPDIR. A copy gets both.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

_DELETED = " (deleted)"
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND


def create(directory: str) -> None:
    """Make the empty layout below ``directory`` and go there."""
    for name in ("work", "tmp"):
        os.makedirs(os.path.join(directory, name), mode=0o700)
    os.environ.update(HOME=os.path.join(directory, "work"), TMPDIR=os.path.join(directory, "tmp"))
    tempfile.tempdir = None
    os.chdir(os.path.join(directory, "work"))


def adopt(old: str, new: str, keep_fds: set[int]) -> None:
    """Make this process, a fresh fork, live in a copy ``new`` of ``old``: files, current directory, environment and open regular files."""
    copy_tree(old, new)
    for fd in _open_fds():
        if fd not in keep_fds:
            _reopen(fd, old, new)
    for name, value in os.environ.items():
        if _inside(value, old):
            os.environ[name] = new + value[len(old) :]
    if tempfile.tempdir is not None and _inside(str(tempfile.tempdir), old):
        tempfile.tempdir = new + str(tempfile.tempdir)[len(old) :]
    here = os.readlink("/proc/self/cwd")  # os.getcwd() raises where the cell removed its directory
    if _inside(here, old):
        os.chdir(new + here[len(old) :])


def copy_tree(old: str, new: str) -> None:
    """Copy directories, regular files and symbolic links, with modes and times. Other kinds (a FIFO, a socket) are left out."""
    os.mkdir(new, 0o700)
    with os.scandir(old) as entries:
        for entry in entries:
            target = os.path.join(new, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.is_dir():
                copy_tree(entry.path, target)
            elif entry.is_file():
                shutil.copy2(entry.path, target)
    shutil.copystat(old, new)


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _open_fds() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc/self/fd"))


def _reopen(fd: int, old: str, new: str) -> None:
    """Give a regular file that is open at the fork a description of its own, at the same offset: else parent and copy move one offset together."""
    try:
        status = os.fstat(fd)
    except OSError:  # the descriptor of the listing itself
        return
    if not stat.S_ISREG(status.st_mode):
        return
    path = os.readlink(f"/proc/self/fd/{fd}")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & _KEPT_FLAGS
    if path.endswith(_DELETED) and _inside(path, old):
        fresh = _copy_unlinked(fd, flags, new)
    elif _inside(path, old):
        fresh = os.open(new + path[len(old) :], flags)
    else:
        fresh = os.open(f"/proc/self/fd/{fd}", flags)  # a file outside the session's directory: own offset, same file
    os.lseek(fresh, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(fresh, fd, inheritable=os.get_inheritable(fd))
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
