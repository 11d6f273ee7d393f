"""The file system that cells see at the level ``namespaces``. Guest side, standard library only.

::

    /                  tmpfs, read-only: directories, links and mount points made here
    /usr /lib ...      the host's, bound read-only; so are the interpreter's directories, at their own paths
    /proc              of the session's own PID namespace
    /dev               null, zero, full, random, urandom; shm is /tmp
    /sandbox           work and tmp of one branch, another in every copy; /tmp is a link into it
    /run/branches      tmpfs of the session, limited in size: the directories of all its branches

Every copy has a mount namespace of its own, in which its directory is bound to /sandbox: an absolute path saved before a fork names the copy's file after it.
An interpreter below /tmp (a virtual environment made by a test run) is bound below /run/bound, and every branch's tmp has a link to it.
"""

from __future__ import annotations

import errno
import os

from . import kernel, places

VIEW = "/sandbox"
BRANCHES = "/run/branches"
_BOUND = "/run/bound"
_HIDDEN = ("/tmp", "/var/tmp", "/dev", "/proc", VIEW, "/run")
"""Where the host's files cannot keep their paths."""
_INODES_PER_MB = 64
_PASSWD = "root:x:0:0::/:/bin/false\nuser:x:{uid}:{uid}::/sandbox/work:/bin/sh\n"


def enter_new_root(imports: list[str], uid: int) -> None:
    """Make the root described above, without a branch in it, and go there; the host's is gone. Needs CAP_SYS_ADMIN and a PID namespace of its own."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root = next((path for path in ("/sys", "/mnt", "/media") if os.path.isdir(path)), "")  # nothing below is wanted
    if not root:
        raise OSError(errno.ENOENT, "neither /sys nor /mnt nor /media is there to build a root on")
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "size=4m,nr_inodes=4096,mode=755")
    umask = os.umask(0o022)
    for name in ("proc", "dev", "etc", "var", "run/branches", "run/bound", "sandbox/work", "sandbox/tmp"):
        os.makedirs(f"{root}/{name}")
    for link, target in (("tmp", "/sandbox/tmp"), ("var/tmp", "/sandbox/tmp"), ("dev/shm", "/sandbox/tmp"), ("dev/fd", "/proc/self/fd")):
        os.symlink(target, f"{root}/{link}")
    with open(f"{root}/etc/passwd", "w") as passwd, open(f"{root}/etc/group", "w") as group:
        passwd.write(_PASSWD.format(uid=uid))
        group.write(f"root:x:0:\nuser:x:{uid}:\n")
    for path in places.DEVICES:
        _bind(path, root + path)
    shown = [*places.SYSTEM, *places.ETC, *places.interpreter(imports)]
    for path in shown:
        _show(path, root)
    for path, target in places.links():
        if not places.inside(path, shown):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(target, root + path)
    kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.mount("none", root, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    os.umask(umask)
    kernel.pivot_root(root)


def _show(path: str, root: str) -> None:
    """Make the host's ``path`` readable below the new root, nothing where it does not exist."""
    target = root + path
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif places.inside(path, _HIDDEN):
        number = len(os.listdir(root + _BOUND))
        _bind(path, f"{root}{_BOUND}/{number}", read_only=True)
        hidden = path.removeprefix("/var") if path.startswith("/var/tmp/") else path
        if not hidden.startswith("/tmp/"):
            raise ValueError(f"the interpreter lies at {path}, where the sandbox has its own files")
        link = f"{root}{VIEW}{hidden}"
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(f"{_BOUND}/{number}", link)
    elif os.path.exists(path):
        _bind(path, target, read_only=True)


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "x"):
            pass
    else:
        return
    kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)
    if read_only:
        kernel.set_read_only(target)


def mount_session(disk_mb: int, uid: int) -> None:
    """/proc of this process's PID namespace, and an empty file system for the session's branches that holds at most ``disk_mb`` MiB."""
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    size = f"size={disk_mb}m,nr_inodes={max(4096, disk_mb * _INODES_PER_MB)},mode=700,uid={uid},gid={uid}"
    kernel.mount("tmpfs", BRANCHES, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)


def bind_branch(storage: str, *, copy: bool) -> None:
    """Show the directory ``storage`` at /sandbox. In a ``copy`` first a mount namespace of its own, without its parent's: a directory bound on top of
    the parent's would go when the parent's is removed."""
    if copy:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.unmount(VIEW)
    kernel.mount(storage, VIEW, flags=kernel.MS_BIND)
