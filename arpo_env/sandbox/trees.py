"""Removing a directory that code of others has filled. Both sides use this file; standard library only.

``shutil.rmtree`` needs one level of the stack and one descriptor for each level of the tree, and leaves what it may not write: a cell makes a chain of three
thousand directories, or one without the right to enter it, in a moment. Here directories are moved up before they are emptied, so nothing grows with the depth.
"""

from __future__ import annotations

import contextlib
import os
import secrets

_ROUNDS = 100_000
"""One a level of the deepest directory. Bounded, because a process that still lives may add to the tree meanwhile."""


def remove_tree(path: str) -> None:
    """Remove ``path`` with all that is in it, as far as the system lets; links are removed, not followed. Quiet where it does not exist."""
    with contextlib.suppress(OSError):
        top = _enter(path, None)
        try:
            for _ in range(_ROUNDS):
                if not _lower(top):
                    break
        finally:
            os.close(top)
        os.rmdir(path)


def _lower(top: int) -> bool:
    """Remove the files in ``top`` and take one level off each of its directories. Whether anything was done."""
    done = False
    for name, is_directory in _entries(top):
        with contextlib.suppress(OSError):
            if is_directory:
                _dissolve(name, top)
            else:
                os.unlink(name, dir_fd=top)
            done = True
    return done


def _dissolve(name: str, top: int) -> None:
    """Move the directories in the directory ``name`` up into ``top``, and remove the rest of it. ``OSError`` when something stays."""
    directory = _enter(name, top)
    try:
        for inner, is_directory in _entries(directory):
            if is_directory:
                os.close(_enter(inner, directory))  # a directory that may not be written cannot be moved
                os.rename(inner, secrets.token_hex(8), src_dir_fd=directory, dst_dir_fd=top)
            else:
                os.unlink(inner, dir_fd=directory)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=top)


def _entries(directory: int) -> list[tuple[str, bool]]:
    with os.scandir(directory) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _enter(path: str, parent: int | None) -> int:
    """A descriptor of a directory, with all rights of its owner given back to them. Never follows a link: ``path`` may be one by the time we get there."""
    handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
