"""What each isolation level keeps from the code in a cell. Each guarantee is tried at every level that claims it, as root and as an ordinary user."""

import ctypes
import dataclasses
import json
import os
import platform
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from arpo_env.sandbox import IsolationError, IsolationWarning, Limits, Pool, SandboxError, Session, isolation, landlock, probe, proctree, roots, seccomp
from arpo_env.sandbox.isolation import LOCAL_LEVELS, Level, report_of
from arpo_env.sandbox.trees import remove_tree

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local sandbox needs Linux")
ROOT = Path(__file__).parents[2]
WAIT = 60.0
"""Seconds until a wait for another process is a failure. Never slept: every wait ends with its event."""
LIMITS = Limits(memory_mb=256, processes=24, disk_mb=16)
CELL_UID = 60000 if os.getuid() == 0 else os.getuid()
"""Who cells are outside at the level ``namespaces``."""


@pytest.fixture(scope="module", params=LOCAL_LEVELS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    level: Level = request.param
    try:
        probe(level)
    except IsolationError as error:
        pytest.skip(str(error))
    with Pool((), LIMITS, level=level) as made:
        yield made


@pytest.fixture
def session(pool: Pool) -> Iterator[Session]:
    with pool.session() as made:
        yield made


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of the host that everybody may read and write."""
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def victim(pool: Pool) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host that has the cells' user, so that only isolation stands between."""
    user = CELL_UID if pool.level == "namespaces" else os.getuid()
    arguments = {} if user == os.getuid() else {"user": user, "group": user, "extra_groups": ()}
    with subprocess.Popen(["sleep", "98765"], env={"KEY": "s3cret-of-the-host"}, cwd="/", **arguments) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def claims(pool: Pool, guarantee: str) -> None:
    """Skip where the level does not give ``guarantee``; the report says why."""
    assert guarantee in pool.report.guarantees
    if guarantee not in pool.report.kept:
        pytest.skip(pool.report.missing[guarantee])


def value(session: Session, code: str) -> str | None:
    """The result of a cell that must succeed."""
    cell = session.exec(code, timeout=WAIT)
    assert cell.status == "ok", cell
    return cell.result


def refused(session: Session, code: str) -> None:
    """The cell must fail because the system does not let it."""
    cell = session.exec(code, timeout=WAIT)
    assert cell.status == "exception", cell
    last = cell.error.splitlines()[-1].split(":")[0]
    assert last in ("PermissionError", "FileNotFoundError", "OSError", "ProcessLookupError"), cell.error


def ended(pid: int) -> bool:
    """Whether the process ends within the wait; the wait ends with the process."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], WAIT)[0])
    finally:
        os.close(pidfd)


# -- files ------------------------------------------------------------------------------------------------------------------------------------------------


def test_files_of_the_host_cannot_be_read(pool: Pool, session: Session, shared: Path) -> None:
    claims(pool, "host files unreadable")
    (shared / "secret").write_text("s3cret")
    (shared / "secret").chmod(0o644)
    for path in (shared / "secret", ROOT / "README.md", "/etc/hostname", "/etc/shadow"):
        refused(session, f"open({str(path)!r}).read()")
        assert value(session, f"import subprocess\nsubprocess.run(['cat', {str(path)!r}], capture_output=True).stdout") == "b''"
        refused(session, f"import os\nos.open('/proc/1/root{path}', os.O_RDONLY)")
        refused(session, f"import os\nfd = os.open({str(path)!r}, os.O_PATH)\nos.open(f'/proc/self/fd/{{fd}}', os.O_RDONLY)")
    for directory in (shared, Path.home(), ROOT):  # the second may hold the interpreter's directory: then the names on the way to it are there, nothing else
        files = f"import os, subprocess\n[n for n in subprocess.run(['ls', '-a', {str(directory)!r}], capture_output=True, text=True).stdout.split()"
        assert value(session, f"{files} if os.path.isfile({str(directory)!r} + '/' + n)]") == "[]"
    refused(session, f"import os\nos.link({str(shared / 'secret')!r}, 'own')")


def test_files_of_the_host_cannot_be_written(pool: Pool, session: Session, shared: Path) -> None:
    claims(pool, "host files unwritable")
    file = shared / "file"
    file.write_text("as it was")
    file.chmod(0o666)
    for code in (
        f"open({str(file)!r}, 'w')",
        f"open({str(file)!r}, 'a')",
        f"open({str(shared / 'new')!r}, 'w')",
        f"import os\nos.remove({str(file)!r})",
        f"import os\nos.rename({str(file)!r}, {str(shared / 'other')!r})",
        f"import os\nos.mkdir({str(shared / 'directory')!r})",
        f"import os\nos.symlink('x', {str(shared / 'link')!r})",
        f"import os\nos.truncate({str(file)!r}, 0)",
        f"import os\nopen('own', 'w').close()\nos.rename('own', {str(shared / 'moved')!r})",
        "open('/usr/bin/evil', 'w')",
        f"open({str(Path(isolation.__file__).parent / 'evil.py')!r}, 'w')",
        f"open({os.path.join(sys.prefix, 'evil')!r}, 'w')",
        "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
    ):
        refused(session, code)
    assert os.listdir(shared) == ["file"] and file.read_text() == "as it was"


def test_what_may_be_read_may_not_be_written(pool: Pool, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rights to the file alone would let the cell: the interpreter's own files mostly belong to somebody else."""
    claims(pool, "host files unwritable")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{shared}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    (shared / "library").write_text("code")
    (shared / "library").chmod(0o666)
    with Pool((), LIMITS, level=pool.level) as made, made.session() as session:
        assert value(session, f"open({str(shared / 'library')!r}).read()") == "'code'"
        refused(session, f"open({str(shared / 'library')!r}, 'r+')")
        refused(session, f"open({str(shared / 'new')!r}, 'w')")
        refused(session, f"import os\nos.remove({str(shared / 'library')!r})")


def test_modes_and_times_of_host_files_stay(pool: Pool, session: Session, shared: Path) -> None:
    claims(pool, "modes, owners and times of host files fixed")
    refused(session, f"import os\nos.chmod({str(shared)!r}, 0o700)")
    refused(session, f"import os\nos.utime({str(shared)!r}, (0, 0))")


def test_the_working_directory_and_tmp_are_the_cells_own(session: Session) -> None:
    session.exec("import os, tempfile\nopen('a', 'w').write('1'); os.mkdir('d'); os.rename('a', 'd/b'); os.chmod('d/b', 0o600)")
    assert value(session, "open('d/b').read(), os.path.isdir(tempfile.mkdtemp())") == "('1', True)"


def test_an_absolute_path_saved_before_a_fork_is_the_copys_own(pool: Pool, session: Session) -> None:
    claims(pool, "absolute paths private to a copy")
    session.exec("import os\npaths = [os.path.abspath('f'), '/tmp/f', '/dev/shm/f', '/var/tmp/g']\nfor path in paths: open(path, 'w').write('parent')")
    with session.fork() as copy, copy.fork() as grandchild:
        for made, word in ((copy, "copy"), (grandchild, "grandchild")):
            made.exec(f"for path in paths: open(path, 'w').write('{word}')")
        for made, word in ((session, "parent"), (copy, "copy"), (grandchild, "grandchild")):
            assert value(made, "{open(path).read() for path in paths}") == f"{{'{word}'}}"
        # Removing the parent's directory must not take the copy's mount along. The keeper does it in its own time.
        session.close()
        deadline = time.monotonic() + WAIT
        while value(copy, "import os\nlen(os.listdir('/run/branches/' + os.listdir('/run/branches')[0]))") != "2":
            assert time.monotonic() < deadline
        assert value(copy, "open(paths[0]).read()") == "'copy'"


def test_the_disk_of_a_session_is_limited(pool: Pool) -> None:
    claims(pool, "disk use limited")
    with pool.session() as session, pool.session() as other:
        session.exec("x = 1")
        assert "No space left" in session.exec("for i in range(5): open(f'f{i}', 'wb').write(bytes(4 << 20))").error
        with pytest.raises(SandboxError, match="No space left"):
            session.fork()
        assert value(other, "open('f', 'wb').write(bytes(12 << 20))") == str(12 << 20)
        assert value(session, "import os\nfor i in range(5): os.path.exists(f'f{i}') and os.remove(f'f{i}')\nx") == "1"
        assert "No space left" in session.exec("for i in range(100_000): open(f'g{i}', 'w').close()", timeout=WAIT).error


# -- network ----------------------------------------------------------------------------------------------------------------------------------------------


def test_no_tcp_and_no_udp(pool: Pool, session: Session) -> None:
    claims(pool, "no network")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        for listening in (server, datagrams):
            listening.setblocking(False)
        refused(session, f"import socket\nsocket.create_connection({server.getsockname()}, timeout=5)")
        refused(session, f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {datagrams.getsockname()})")
        with pytest.raises(BlockingIOError):
            server.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)


def test_no_unix_sockets_of_the_host(pool: Pool, session: Session, shared: Path) -> None:
    claims(pool, "no unix sockets of the host")
    for address in (str(shared / "socket"), f"\0arpo-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            if address[0] != "\0":
                os.chmod(address, 0o777)
            server.listen()
            server.setblocking(False)
            refused(session, f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})")
            with pytest.raises(BlockingIOError):
                server.accept()


def test_no_datagrams_to_unix_sockets_of_the_host(pool: Pool, session: Session, shared: Path) -> None:
    """A socket of a pair can send them to any address, such as the system's log."""
    claims(pool, "no unix sockets of the host")
    for address in (str(shared / "log"), f"\0arpo-test-log-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(address)
            if address[0] != "\0":
                os.chmod(address, 0o777)
            server.setblocking(False)
            refused(session, f"import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {address!r})")
            with pytest.raises(BlockingIOError):
                server.recv(1)


def test_what_calculations_need_still_works(session: Session) -> None:
    assert value(session, "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 3\nasyncio.run(f())") == "3"
    assert (
        value(session, "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, check=True).stdout") == "b'42\\n'"
    )
    assert value(session, "import threading\nt = threading.Thread(target=lambda: made.append(1)); made = []\nt.start(); t.join()\nmade") == "[1]"
    assert (
        value(
            session, "from concurrent.futures import ProcessPoolExecutor as P\nimport os\npid = os.fork()\nif not pid: os._exit(4)\nos.waitpid(pid, 0)[1] >> 8"
        )
        == "4"
    )
    assert value(session, "import os\nos.getcwd() == os.path.realpath('.') and os.path.isdir(os.environ['TMPDIR'])") == "True"


# -- processes --------------------------------------------------------------------------------------------------------------------------------------------


def test_processes_of_the_host_cannot_be_seen(pool: Pool, session: Session, victim: subprocess.Popen[bytes]) -> None:
    claims(pool, "host processes invisible")
    seen = "import os\n[n for n in os.listdir('/proc') if n.isdigit() and b'98765' in open(f'/proc/{n}/cmdline', 'rb').read()]"
    assert value(session, seen) == "[]"
    assert value(session, "len([n for n in os.listdir('/proc') if n.isdigit()]), os.uname().nodename") == "(2, 'sandbox')"  # the keeper and the worker


def test_processes_of_the_host_cannot_be_signalled(pool: Pool, session: Session, victim: subprocess.Popen[bytes]) -> None:
    claims(pool, "host processes cannot be signalled")
    refused(session, f"import os\nos.kill({victim.pid}, 15)")
    refused(session, f"import os, signal\nsignal.pidfd_send_signal(os.pidfd_open({victim.pid}), 15)")
    session.exec(
        "import os\nfor n in os.listdir('/proc'):\n    if n.isdigit() and int(n) != os.getpid():\n        try: os.kill(int(n), 9)\n        except OSError: pass"
    )
    session.exec("os.kill(os.getppid(), 9)")
    assert value(session, "1") == "1" and pool.alive
    assert victim.poll() is None


def test_nobody_is_signalled_by_a_kill_of_all(pool: Pool, session: Session, victim: subprocess.Popen[bytes]) -> None:
    needs_filter(pool)
    with session.fork() as copy:
        refused(session, "import os\nos.kill(-1, 9)")
        assert value(copy, "1") == value(session, "1") == "1"
    assert victim.poll() is None


def test_limits_and_scheduling_of_the_hosts_processes_stay(pool: Pool, session: Session, victim: subprocess.Popen[bytes]) -> None:
    """A CPU limit of a second would end them as a signal does; the kernel asks for nothing but the same user."""
    needs_filter(pool)
    refused(session, f"import resource\nresource.prlimit({victim.pid}, resource.RLIMIT_CPU, (1, 1))")
    refused(session, f"import os\nos.sched_setaffinity({victim.pid}, {{0}})")
    refused(session, f"import os\nos.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)")
    assert (
        value(session, "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))")
        is None
    )


def test_a_copy_cannot_name_a_process_of_the_host_as_itself(pool: Pool) -> None:
    """The host ends what a session says that it is, with the host's rights."""
    with subprocess.Popen(["sleep", "98765"]) as process, pool.session() as session, session.fork() as sibling:
        lie = "import os, sys\nclass Lying:\n    def __getattr__(self, name): return getattr(os, name)\n"
        lie += "    def pidfd_open(self, _): return os.pidfd_open({pid})\nsys.modules['arpo_sandbox.worker'].os = Lying()"
        for pid in (process.pid, sibling._branch.inner_pid):
            session.exec(lie.format(pid=pid))
            with pytest.raises(SandboxError, match="did not come up"):
                session.fork()
        assert value(session, "1") == value(sibling, "1") == "1"
        assert process.poll() is None
        process.kill()


def test_processes_of_the_host_cannot_be_traced(pool: Pool, session: Session, victim: subprocess.Popen[bytes]) -> None:
    claims(pool, "host processes cannot be traced")
    attach = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.ptrace(16, {victim.pid}, 0, 0), ctypes.get_errno()"
    assert value(session, attach) == "(-1, 1)"
    for name in ("mem", "environ", "root/etc/hostname", "cwd/etc/hostname", "fd/0"):
        refused(session, f"open('/proc/{victim.pid}/{name}', 'rb')")


def test_no_environment_of_the_host_reaches_a_cell(pool: Pool, session: Session, victim: subprocess.Popen[bytes]) -> None:
    claims(pool, "environment variables of the host hidden")
    look = """
import os
found = []
for name in os.listdir('/proc'):
    try: found.append(open(f'/proc/{name}/environ', 'rb').read())
    except OSError: pass
len(found) > 0, sum(text.count(b's3cret') for text in found), 's3cret' in str(os.environ)"""
    assert value(session, look) == "(True, 0, False)"
    assert b"s3cret" in Path(f"/proc/{victim.pid}/environ").read_bytes()  # it was there to be found


def test_sessions_cannot_reach_each_other(pool: Pool, session: Session) -> None:
    claims(pool, "sessions cannot reach each other")
    with pool.session() as other:
        other.exec("open('f', 'w').write('other'); open('/tmp/f', 'w').write('other') if __import__('os').path.islink('/tmp') else None")
        if pool.root is not None:
            refused(session, f"open({other.directory + '/work/f'!r})")
            refused(session, f"open({other.directory + '/work/g'!r}, 'w')")
            refused(session, f"import os\nos.kill({other.pid}, 9)")
        else:
            assert value(session, "import os\n[os.path.exists(p) for p in ('f', '/tmp/f')], len(os.listdir('/run/branches'))") == "([False, False], 1)"
            session.exec("for pid in range(2, 2000):\n    try: pid != os.getpid() and os.kill(pid, 9)\n    except OSError: pass")
        assert value(other, "open('f').read()") == "'other'"


BOMBS = {
    "popen": "import subprocess\nrunning = []\nwhile True: running.append(subprocess.Popen(['sleep', '1000']))",
    "fork": "import os\nwhile True: os.fork()",
    "daemons": "import os, time\nwhile True:\n    if os.fork() == 0: os.setsid(); time.sleep(1000)",
    "threads": "import threading\n_ = threading.stack_size(32768)\nnever = threading.Event()\n"
    "for _ in range(60): threading.Thread(target=never.wait, daemon=True).start()\nnever.wait()",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_processes_are_counted_per_session(pool: Pool, bomb: str) -> None:
    claims(pool, "processes counted per session")
    with pool.session() as session, pool.session() as other:
        cell = session.exec(BOMBS[bomb], timeout=WAIT)
        if pool._watchdog is None:
            assert (cell.status, cell.kept) == ("exception", True) and ("BlockingIOError" in cell.error or "can't start new thread" in cell.error)
            assert len(proctree.descendants(session.pid)) < LIMITS.processes
        else:
            assert (cell.status, cell.kept) == ("limit", False) and "more than the 24 that it may have" in cell.error
        assert value(other, "import subprocess\nsubprocess.run(['echo', 'x'], capture_output=True).stdout") == "b'x\\n'"
        keeper = session._branch.lineage.keeper_pid
    assert ended(keeper) and ended(session.pid)


def test_what_a_dead_branch_left_ends_with_its_session(pool: Pool) -> None:
    daemon = "import os, time\nif (child := os.fork()) == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(1000)\n"
    with pool.session() as parent:
        copy = parent.fork()
        for made in (copy, parent):
            made.exec(daemon + "_ = os.waitpid(child, 0)")
        left = [*proctree.descendants(copy.pid), *(pid for pid in proctree.descendants(parent.pid, [copy.pid]))]
        assert len(left) == 2
        for made in (copy, parent):
            assert made.exec("os._exit(0)").status == "died"
    assert all(ended(pid) for pid in left)


# -- what makes it hold -----------------------------------------------------------------------------------------------------------------------------------


def needs_filter(pool: Pool) -> None:
    """Skip where there is no seccomp."""
    if "no unix sockets of the host" not in pool.report.kept:
        pytest.skip(pool.report.missing["no unix sockets of the host"])


def test_cells_have_no_privileges_and_get_none(pool: Pool, session: Session) -> None:
    needs_filter(pool)
    status = "dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)"
    session.exec(f"status = {status}")
    expected = "0000000000200000" if pool.level == "namespaces" else "0" * 16  # SYS_ADMIN of its own user namespace, for the mounts of copies
    assert value(session, "status['CapEff'], status['NoNewPrivs'], status['Seccomp']") == f"('{expected}', '1', '2')"
    assert (
        value(session, "import subprocess\n'CapEff:\\t' + '0' * 16 in subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout")
        == "True"
    )
    if pool.level == "namespaces":
        refused(session, "import os\nos.setuid(0)")


MOUNTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags):
    if libc.mount(source, target, kind, ctypes.c_ulong(flags), None): raise OSError(ctypes.get_errno(), 'mount')
def umount(target):
    if libc.umount2(target, 2): raise OSError(ctypes.get_errno(), 'umount')
def unshare(flags):
    if libc.unshare(flags): raise OSError(ctypes.get_errno(), 'unshare')
"""


def test_mounts_cannot_be_undone(pool: Pool, session: Session) -> None:
    needs_filter(pool)
    session.exec(MOUNTS)
    for code in (
        "umount(b'/usr')",
        "umount(b'/proc')",
        "umount(b'/')",
        "mount(b'none', b'/usr', None, 4096 | 32)",  # remount, read-write
        "mount(b'tmpfs', b'/tmp', b'tmpfs', 0)",
        "mount(b'proc', b'/tmp', b'proc', 0)",
        "unshare(0x10000000)",
        "unshare(0x20000 | 0x10000000)",
        "unshare(0x40000000)",
        "unshare(0x20000000)",
        "os.chroot('/')",
        "mount(b'/usr', b'.', None, 4096), open('bin/evil', 'w')",
    ):
        refused(session, code)


def test_every_call_of_the_table_is_refused(pool: Pool, session: Session) -> None:
    needs_filter(pool)
    column = seccomp._MACHINES[platform.machine()][0]
    numbers = [numbers[column] for numbers in seccomp._REFUSED.values() if numbers[column] is not None]
    session.exec("import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)")
    code = f"[n for n in {numbers} if libc.syscall(n, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != 1]"
    assert value(session, code) == "[]"


def run_filter(program: bytes, number: int, arguments: tuple[int, ...] = (), architecture: int = 0) -> int:
    """What a seccomp program answers: an interpreter of the instructions it is made of."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *(0,) * (6 - len(arguments)))
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            test = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[operation]
            at += yes if test else no


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        (
            "x86_64",
            0xC000003E,
            {
                "read": 0,
                "socket": 41,
                "socketpair": 53,
                "clone": 56,
                "kill": 62,
                "unshare": 272,
                "mount": 165,
                "umount2": 166,
                "prlimit64": 302,
                "setpriority": 141,
            },
        ),
        (
            "aarch64",
            0xC00000B7,
            {
                "read": 63,
                "socket": 198,
                "socketpair": 199,
                "clone": 220,
                "kill": 129,
                "unshare": 97,
                "mount": 40,
                "umount2": 39,
                "prlimit64": 261,
                "setpriority": 140,
            },
        ),
    ],
)
def test_the_filter_decides_alike_on_both_machines(monkeypatch: pytest.MonkeyPatch, machine: str, architecture: int, calls: dict[str, int]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    allow, refuse, absent = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM, ENOSYS
    bind, newns, newuser, everyone = 4096, 0x20000, 0x10000000, (1 << 64) - 1
    table = [  # call, arguments, answer with own mounts, answer without
        ("read", (), allow, allow),
        ("socketpair", (1, 1), allow, allow),
        ("socketpair", (1, 1 | 0x80000 | 0x800), allow, allow),  # CLOEXEC and NONBLOCK
        ("socketpair", (1, 2 | 0x80000), refuse, refuse),  # datagrams
        ("socketpair", (1, 5), refuse, refuse),
        ("prlimit64", (0, 7), allow, allow),
        ("prlimit64", (1234, 7), refuse, refuse),
        ("setpriority", (0, 0, 5), allow, allow),
        ("setpriority", (0, 1234, 5), refuse, refuse),
        ("setpriority", (2, 0, 5), refuse, refuse),
        ("socket", (1,), refuse, refuse),
        ("clone", (0x01200011,), allow, allow),  # os.fork
        ("clone", (0x003D0F00,), allow, allow),  # a thread
        ("clone", (newuser | 17,), refuse, refuse),
        ("kill", (1, 9), allow, allow),
        ("kill", (everyone, 9), refuse, refuse),
        ("unshare", (newns,), allow, refuse),
        ("unshare", (newns | newuser,), refuse, refuse),
        ("unshare", (1 << 32 | newns,), refuse, refuse),
        ("mount", (0, 0, 0, bind), allow, refuse),
        ("mount", (0, 0, 0, bind | 32), refuse, refuse),
        ("mount", (0, 0, 0, 0), refuse, refuse),
        ("umount2", (), allow, refuse),
    ]
    with_mounts, without = seccomp.program(own_mounts=True), seccomp.program(own_mounts=False)
    for call, arguments, expected, bare in table:
        found = [run_filter(program, calls[call], arguments, architecture) for program in (with_mounts, without)]
        assert found == [expected, bare], (call, arguments)
    assert run_filter(without, 435, (), architecture) == absent  # clone3
    assert run_filter(without, 0x40000000 + calls["read"], (), architecture) == refuse
    assert run_filter(without, calls["read"], (), 0x40000003) == 0x80000000  # 32-bit calls end the process
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        seccomp.program(own_mounts=False)


def test_an_older_landlock_is_asked_for_what_it_has() -> None:
    # Bits of linux/landlock.h: 13 rights to files in ABI 1, then REFER, TRUNCATE (ABI 3), IOCTL_DEV (ABI 5).
    assert [landlock._handled(version) for version in (1, 2, 3, 4, 5, 7)] == [0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF, 0xFFFF]


def test_a_cell_that_writes_to_our_socket_harms_only_itself(pool: Pool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    lies = (
        {"op": "hello"},
        {"status": "exception", "result": [1], "error": {"a": 1}},
        {"status": "ok", "result": "a" * 10**6},
    )
    frames = [len(body).to_bytes(4, "big") + body for body in (json.dumps(lie).encode() for lie in lies)]
    for bytes_written in ("b'\\xff' * 8", "b'\\0\\0\\0\\2{}'", "b'\\0\\0\\0\\2}}'", *map(repr, frames)):
        with pool.session() as session, pool.session() as other:
            cell = session.exec(f"import os\nos.write(1000, {bytes_written})\nos.read(0, 1)\nimport time\ntime.sleep(1000)", timeout=WAIT)
            assert (cell.status, cell.kept) == ("died", False)
            assert value(other, "1") == "1"
    with pool.session() as session:  # an answer in the worker's place is cut as the worker would have
        body = json.dumps({"status": "exception", "result": None, "error": "a" * 100_000}).encode()
        cell = session.exec(f"import os\nos.write(1000, {len(body).to_bytes(4, 'big') + body!r})\nimport time\ntime.sleep(1000)", timeout=WAIT)
        assert len(cell.error) < 9000
    with pool.session() as session:  # descriptors by the thousand are not held until their message is complete
        code = "import os, socket\ns = socket.socket(fileno=os.dup(1000)); s.setblocking(True)\n"
        code += "s.sendall(b'\\0\\0\\xff\\0')\nfor i in range(2000): socket.send_fds(s, [b' '], [0] * 4)"
        assert session.exec(code + "\nimport time\ntime.sleep(1000)", timeout=WAIT).status == "died"
    with pool.session() as session:  # descriptors that come with an answer are closed
        session.exec('import os, socket\ns = socket.socket(fileno=os.dup(1000))\nbody = b\'{"status": "ok", "result": "1", "error": null}\'')
        session.exec("_ = socket.send_fds(s, [len(body).to_bytes(4, 'big') + body], [0, 1, 2])")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("report", [b"%d 99999999999999\n", b"%d 100\n", b"%d -1\n", b"x" * 100_000])
def test_a_forged_report_of_its_end_harms_only_the_session(pool: Pool, report: bytes) -> None:
    for _ in range(2):  # either the forged report is seen first or the true state
        with pool.session() as session, session.fork() as copy:
            cell = session.exec(f"import os\nreport = {report!r}\nos.write(1001, report.replace(b'%d', str(os.getpid()).encode()))\nos._exit(0)")
            assert cell.status == "died"
            with copy.fork() as late:
                assert value(late, "1") == "1"
                assert len(session._branch.lineage._partial) < 100


def test_directories_deeper_than_the_stack_are_removed_and_harm_nobody(pool: Pool) -> None:
    deep = "import os\nhere = os.getcwd()\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\nos.chdir(here)"
    with pool.session() as session:
        copy = session.fork()
        assert copy.exec(deep, timeout=WAIT).status == "ok"
        with pytest.raises(SandboxError, match="did not come up"):
            copy.fork()
        assert value(copy, "1") == "1"
        directory = copy.directory
        copy.close()
        assert pool.root is None or not os.path.exists(directory)
        assert value(session, "1") == "1"
        with session.fork() as late:  # the keeper is still there
            assert value(late, "1") == "1"


def test_a_tree_is_removed_whatever_its_modes_and_links_are_not_followed(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (outside / "kept").mkdir(parents=True)
    for name, mode in (("closed", 0), ("fixed", 0o500)):
        (tree / name / "inner").mkdir(parents=True)
        (tree / name / "inner" / "file").touch()
        (tree / name / "inner").chmod(mode)
        (tree / name).chmod(mode)
    (tree / "link").symlink_to(outside)
    (tree / "alias").symlink_to(tmp_path)
    os.mkfifo(tree / "pipe")
    remove_tree(str(tree))
    remove_tree(str(tree))
    assert [path.name for path in tmp_path.iterdir()] == ["outside"] and (outside / "kept").is_dir()
    (tmp_path / "named").symlink_to(outside)
    remove_tree(str(tmp_path / "named"))
    assert (outside / "kept").is_dir()


# -- the choice of a level --------------------------------------------------------------------------------------------------------------------------------


def test_the_strongest_level_is_taken_and_the_report_is_about_it(pool: Pool) -> None:
    assert pool.report.level == pool.level
    assert set(pool.report.kept) | set(pool.report.missing) == set(pool.report.guarantees)
    assert (pool.report.missing == {}) == (pool.level == "namespaces")
    assert LOCAL_LEVELS.index(probe().level) <= LOCAL_LEVELS.index(pool.level)


def test_what_the_machine_offers_is_taken() -> None:
    """Found without our own code: a level that broke would otherwise only skip its tests."""
    if shutil.which("unshare"):
        namespaces = ["unshare", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc", "true"]
        if subprocess.run(namespaces, capture_output=True, check=False).returncode == 0:
            assert probe().level == "namespaces", probe()
    if ctypes.CDLL(None).syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), ctypes.c_uint32(1)) > 0:  # the version of Landlock
        assert probe("landlock").level == "landlock"


def test_reports_say_what_is_missing_and_why() -> None:
    nothing = {"user": "no users", "network": "no net", "seccomp": "no filter", "signals": "old landlock", "truncate": ""}
    everything = dict.fromkeys(nothing, "")
    weak, strong = report_of("process", nothing), report_of("process", everything)
    assert set(strong.missing) < set(weak.missing)
    assert "no filter" in weak.missing["no network"] and "no net" in weak.missing["no network"]
    assert "no users" in weak.missing["environment variables of the host hidden"]
    assert "no network" in report_of("process", nothing | {"seccomp": ""}).kept and "no network" in report_of("process", nothing | {"network": ""}).kept
    landlock = report_of("landlock", nothing | {"seccomp": ""})
    assert landlock.missing["host processes cannot be signalled"] == "old landlock"
    assert "host files unwritable" in landlock.kept and "no network" in landlock.kept
    assert report_of("landlock", everything | {"truncate": "ABI 2"}).missing["host files unwritable"] == "ABI 2"
    assert report_of("namespaces", everything).missing == {}
    assert "level namespaces is not to be had: why" in str(dataclasses.replace(landlock, refused={"namespaces": "why"}))


def test_a_level_can_be_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isolation.LEVEL_VARIABLE, "process")
    assert probe().level == "process"
    with Pool() as pool:
        assert pool.report == probe()
    with pytest.raises(IsolationError, match=r"'landlock' was required, this machine and version give 'process'"):
        isolation.require("landlock")
    monkeypatch.setenv(isolation.LEVEL_VARIABLE, "vm")
    with pytest.raises(ValueError, match=r"ARPO_SANDBOX_LEVEL or an argument\) was 'vm'"):
        probe()


def test_every_level_below_namespaces_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, expected in (("process", 1), ("language", 1), ("landlock", 1), ("namespaces", 0), ("vm", 0)):
        monkeypatch.setattr(isolation, "_warned", threading.Event())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            isolation.warn_once(isolation.IsolationReport(level=level, missing={}))  # type: ignore[arg-type]
        assert [w.category for w in caught] == [IsolationWarning] * expected


CONTAINER = """
import platform, sys
sys.path[:0] = {path!r}
from arpo_env.sandbox import Pool, kernel, probe, seccomp
column, _ = seccomp._MACHINES[platform.machine()]
code = [(0x20, 0, 0, 0)]
for number in (seccomp._UNSHARE[column], seccomp._MOUNT[column]):
    code += seccomp._when(number, [seccomp._refuse()])
if {landlock}:
    code += seccomp._when(444, [seccomp._refuse(38)])
code.append(seccomp._allow())
kernel.forbid_new_privileges()
kernel.install_filter(b''.join(__import__('struct').pack('<HBBI', *line) for line in code))
report = probe()
print(report)
with Pool() as pool, pool.session() as session, session.fork() as copy:
    assert pool.report == report
    print([copy.exec(code).error.splitlines()[-1:] for code in ("import socket\\nsocket.socket()", "open('/etc/hostname')", "open('/var/tmp/evil', 'w')")])
    print([copy.exec("open('f', 'w').write('x')").result])
"""


@pytest.mark.parametrize("level", ["landlock", "process"])
def test_in_a_container_that_denies_namespaces_the_next_level_is_taken(level: Level) -> None:
    """What Docker's default seccomp profile and Ubuntu's AppArmor restriction do: unshare and mount fail. Then without Landlock as well."""
    try:
        probe(level)
    except IsolationError as error:
        pytest.skip(str(error))
    if platform.machine() not in seccomp._MACHINES:
        pytest.skip(f"no table for {platform.machine()}")
    code = CONTAINER.format(path=sys.path, landlock=level == "process")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    assert f"isolation level: {level}" in done.stdout
    assert "level namespaces is not to be had: unshare(" in done.stdout and "EPERM" in done.stdout and "To change that: Docker" in done.stdout
    assert ("level landlock is not to be had: landlock_create_ruleset: ENOSYS" in done.stdout) == (level == "process")
    denied = "['PermissionError: [Errno 1] Operation not permitted'], ["
    assert denied in done.stdout and done.stdout.endswith("['1']\n")
    if level == "landlock":
        assert done.stdout.count("PermissionError: [Errno 13] Permission denied") == 2
    else:
        os.unlink("/var/tmp/evil")
        assert "NO   environment variables of the host hidden" in done.stdout


def test_an_interpreter_below_tmp_is_found(tmp_path: Path) -> None:
    """A private /tmp must not hide the virtual environment that a test run made there."""
    try:
        probe("namespaces")
    except IsolationError as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        made = Path(directory, "some", "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(made)], check=True)
        packages = next(made.glob("lib/python3*/site-packages"))
        (packages / "only_here.py").write_text("value = 5")
        subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
        code = f"""
import sys
sys.path += {sys.path!r}
from arpo_env.sandbox import Pool
with Pool(("only_here",), level="namespaces") as pool, pool.session() as session, session.fork() as copy:
    child = "subprocess.run([sys.executable, '-c', 'import only_here']).returncode"
    cell = "import only_here, subprocess, sys\\nopen('/tmp/x', 'w').close()\\nonly_here.value, " + child
    print(pool.missing_imports, session.exec(cell), copy.exec(cell))
"""
        done = subprocess.run([str(made / "bin" / "python"), "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
        assert done.stdout.count("result='(5, 0)'") == 2 and done.stdout.startswith("{} "), done


@pytest.mark.skipif(os.getuid() != 0, reason="only root's cells run as another user")
def test_a_virtual_environment_that_only_root_may_read_is_said_aloud() -> None:
    try:
        probe("namespaces")
    except IsolationError as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        made = Path(directory, "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(made)], check=True)
        made.chmod(0o700)
        code = f"import sys\nsys.path += {sys.path!r}\nfrom arpo_env.sandbox import probe\nprint(probe())"
        done = subprocess.run([str(made / "bin" / "python"), "-c", code], capture_output=True, text=True, timeout=WAIT, check=True)
        assert f"{made} is not readable for others than root, and cells run as user 60000" in done.stdout
        assert "level namespaces is not to be had" in done.stdout


def test_directories_of_dead_hosts_are_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale, young, foreign = (tmp_path / name for name in ("arpo-sandbox-stale", "arpo-sandbox-young", "something"))
    for path in (stale, young, foreign):
        (path / "deep").mkdir(parents=True)
    living = roots.Root()
    old = time.time() - 1000
    for path in (stale, foreign, Path(living.path)):
        os.utime(path, (old, old))
    other = roots.Root()
    assert {path.name for path in tmp_path.iterdir()} == {young.name, foreign.name, Path(living.path).name, Path(other.path).name}
    living.remove()
    living.remove()
    other.remove()
    assert {path.name for path in tmp_path.iterdir()} == {young.name, foreign.name}


# -- as an ordinary user ----------------------------------------------------------------------------------------------------------------------------------


def user_python() -> str:
    """An interpreter with the test's packages that user 12345 can run, or a skip."""
    check = "import subprocess, sys, pytest, numpy, gymnasium; subprocess.run([sys.executable, '-c', ''], check=True)"
    for candidate in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(candidate) and subprocess.run(as_user(candidate, "-c", check), capture_output=True, check=False).returncode == 0:
            return candidate
    pytest.skip("no interpreter here can be run by an ordinary user: they lie in directories that only root may enter")


def as_user(*command: str) -> list[str]:
    path = ":".join(entry for entry in sys.path if entry.endswith("site-packages"))
    return ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "env", f"PYTHONPATH={path}", "HOME=/nonexistent", *command]


@pytest.mark.timeout(4 * WAIT)
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user, by setpriv")
def test_all_of_this_holds_for_an_ordinary_user() -> None:
    python = user_python()
    here = os.path.relpath(__file__, ROOT)
    command = as_user(python, "-B", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", "not table and not filter and not swept", here)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * WAIT, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "only root can become another user" in done.stdout
