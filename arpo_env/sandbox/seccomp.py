"""The system calls that a cell is refused, as a seccomp filter. Guest side, standard library only.

A deny list: what a calculation needs stays possible. Refused at every level: sockets (``socketpair``, which asyncio uses, is none to the outside as long as
it is a stream: datagrams can be sent to any address), other processes' memory, memory that no limit counts (memfd), mounts and namespaces, ``kill(-1)``, and
the calls with a record of kernel faults (bpf, io_uring, userfaultfd, keys, perf).
At the level ``namespaces`` a copy makes a mount namespace of its own and binds its directory there, so exactly these calls stay possible for cells as well;
the user namespace they run in can do nothing to a mount it did not make.

A refused call fails with EPERM, ``clone3`` with ENOSYS: its flags lie in memory, where a filter cannot look, and every C library then takes ``clone``.
"""

from __future__ import annotations

import errno
import platform
import struct

from . import kernel

# name: (x86_64, aarch64)
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_CLONE, _CLONE3, _KILL, _SOCKETPAIR = (56, 220), (435, 435), (62, 129), (53, 199)
_UNSHARE, _MOUNT, _UMOUNT = (272, 97), (165, 40), (166, 39)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and the number by which the kernel calls the machine (AUDIT_ARCH)."""
_X32 = 0x40000000
"""Numbers from here on are the x86_64 calls again in another calling convention."""
_NEW_NAMESPACES = 0x7E020000
_OWN_ONLY = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
"""Calls that change limits and scheduling of the process in their first argument, for the same user without asking further: 0, the caller, alone is allowed."""
_SETPRIORITY = (141, 140)
_NO_STREAM = 0xE
"""Bits of a socket's type that SOCK_STREAM, which is 1, does not have; the flags of the type are above."""

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Code = list[tuple[int, int, int, int]]
"""Instructions: operation, jump if true, jump if false, operand."""


def program(*, own_mounts: bool) -> bytes:
    """The filter for this machine. ``own_mounts`` leaves a new mount namespace, bind mounts and unmounting to the process. ``OSError`` where no table fits."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: no table of system calls for {machine}")
    column, architecture = _MACHINES[machine]
    code: Code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _refuse(),
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += _when(number, [_refuse()])
    code += _when(_CLONE3[column], [_refuse(errno.ENOSYS)])
    code += _when(_CLONE[column], _unless_any(0, _NEW_NAMESPACES))
    code += _when(_KILL[column], [(_LOAD, 0, 0, _low(0)), (_EQUAL, 0, 1, 0xFFFFFFFF), _refuse(), _allow()])
    for numbers in _OWN_ONLY.values():
        code += _when(numbers[column], _only(0, 0))
    code += _when(_SETPRIORITY[column], [(_LOAD, 0, 0, _low(0)), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, _low(1)), (_EQUAL, 0, 1, 0), _allow(), _refuse()])
    code += _when(_SOCKETPAIR[column], _unless_any(1, _NO_STREAM))
    if own_mounts:
        code += _when(_UNSHARE[column], _only(0, kernel.CLONE_NEWNS))
        code += _when(_MOUNT[column], _only(3, kernel.MS_BIND))
    else:
        for call in (_UNSHARE, _MOUNT, _UMOUNT):
            code += _when(call[column], [_refuse()])
    code.append(_allow())
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _refuse(code: int = errno.EPERM) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, 0x00050000 | code)


def _allow() -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ALLOW)


def _low(argument: int) -> int:
    return _ARGUMENTS + 8 * argument


def _when(number: int, block: Code) -> Code:
    """``block``, which must end in a return on every way, for the call ``number``; others jump over it."""
    return [(_EQUAL, 0, len(block), number), *block]


def _unless_any(argument: int, bits: int) -> Code:
    return [(_LOAD, 0, 0, _low(argument)), (_ANY_BIT, 0, 1, bits), _refuse(), _allow()]


def _only(argument: int, value: int) -> Code:
    """Allowed when the whole argument is ``value`` (both halves: a long has 64 bits)."""
    return [(_LOAD, 0, 0, _low(argument) + 4), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, _low(argument)), (_EQUAL, 0, 1, value), _allow(), _refuse()]
