"""What of the host's files a cell may read: the interpreter, the system's programs and libraries, a few files of /etc. Guest side, standard library only."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator

GUEST = os.path.dirname(os.path.abspath(__file__))
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/fonts", "/etc/mime.types")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def inside(path: str, directories: Iterable[str]) -> bool:
    """Whether ``path`` is one of ``directories`` or lies below one."""
    return any(path == directory or path.startswith(directory + "/") for directory in directories)


def interpreter(imports: Iterable[str]) -> list[str]:
    """Directories and files that this interpreter and the modules ``imports`` are loaded from, shortest first, none below another or below :data:`SYSTEM`.

    ``ValueError`` when one of them is the root directory: then nothing of the host would be hidden.
    """
    wanted = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, GUEST, os.path.realpath(sys.executable)}
    wanted.update(filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    wanted.update(_homes(imports))
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in wanted} | {os.path.realpath(path) for path in wanted}, key=len):
        if path == "/":
            raise ValueError("the interpreter's prefix is /: no file of the host would be hidden")
        if os.path.exists(path) and not inside(path, (*SYSTEM, *found)):
            found.append(path)
    return found


def links() -> Iterator[tuple[str, str]]:
    """The chain of symbolic links from ``sys.executable`` to the program (a virtual environment may have several): each with its target."""
    path = sys.executable
    while os.path.islink(path):
        target = os.readlink(path)
        yield path, target
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))


def _homes(imports: Iterable[str]) -> Iterator[str]:
    """Where packages lie that were installed in place (``pip install -e``), outside the interpreter's directories."""
    for name in imports:
        try:
            spec = importlib.util.find_spec(name.partition(".")[0])
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None and spec.submodule_search_locations is not None:
            yield from map(os.path.abspath, spec.submodule_search_locations)
        elif spec is not None and spec.origin is not None and os.path.isabs(spec.origin):
            yield spec.origin
