"""The SQLite file behind :class:`arpo_env.tools.cache.ToolCache`: rows, size limit, counts, several processes, fork.

One connection a process, used under a lock: SQLite allows one writer at a time anyway, and hundreds of tool threads would hold hundreds of file descriptors.
Write-ahead log with ``synchronous=NORMAL``: readers never wait for writers; after a kill the file is whole and holds all results but perhaps the last ones.
SQLite forbids to use, or even to close, a connection in a forked child. So all connections are closed just before ``os.fork``, and both sides reconnect.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_APPLICATION_ID = 0x41_52_50_4F  # "ARPO"
_LAYOUT = 1
_BUSY_SECONDS = 5.0
_UNSAVED_READS = 256
"""How many reads may wait for the next write before their times of use are saved; what a sudden death loses of the statistics."""
_KEEP_SHARE = 0.9
"""An eviction goes down to this share of the limit, so that not every write evicts."""

_SMALLEST = 512
"""Bytes of the smallest SQLite file. A smaller one SQLite takes for empty, and would write over it."""
_FOREIGN = "is not a tool cache but something else; nothing was changed. Name another file, or remove it"

_TABLES = f"""
CREATE TABLE results (digest TEXT PRIMARY KEY, tool TEXT NOT NULL, version TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
                      bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL);
CREATE INDEX results_used ON results (used);
CREATE TABLE size (bytes INTEGER NOT NULL);
INSERT INTO size VALUES (0);
CREATE TRIGGER grown AFTER INSERT ON results BEGIN UPDATE size SET bytes = bytes + new.bytes; END;
CREATE TRIGGER shrunk AFTER DELETE ON results BEGIN UPDATE size SET bytes = bytes - old.bytes; END;
CREATE TABLE counts (tool TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (tool, name)) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_LAYOUT};
"""


class CacheError(RuntimeError):
    """The cache file cannot be used: not one of ours, damaged, locked, disk full, closed."""


class Row(NamedTuple):
    """One stored result."""

    digest: str
    tool: str
    version: str
    key: str
    """Settings and arguments as JSON, for people who look into the file."""
    value: str
    """JSON."""

    @property
    def size(self) -> int:
        return len(self.key.encode()) + len(self.value.encode())


class Store:
    """The rows of one cache file. Every method may raise :class:`CacheError`; all are safe in threads and after ``os.fork``."""

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool, max_bytes: int):
        """Args:
        path: the file; made with mode 0600, directories included, when it is not there.
        read_only: never write; the file must be there.
        max_bytes: of keys and values together; the file is somewhat larger.
        """
        self.path = Path(os.path.abspath(path))
        self.read_only, self.max_bytes = read_only, max_bytes
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._used: dict[str, float] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._here: Counter[tuple[str, str]] = Counter()
        with _registry:
            _stores.add(self)

    def check(self) -> None:
        """Open the file, which is otherwise opened by the first call."""
        with self._session():
            pass

    def read(self, digest: str) -> tuple[str, float] | None:
        """The value and the time of writing (seconds since the epoch) of ``digest``; None when there is none."""
        with self._session() as connection:
            row: tuple[str, float] | None = connection.execute("SELECT value, created FROM results WHERE digest = ?", (digest,)).fetchone()
            if row is not None and not self.read_only:
                self._used[digest] = time.time()
                if len(self._used) >= _UNSAVED_READS:
                    with contextlib.suppress(sqlite3.Error):  # the value was found: it counts more than when it was used
                        self._save(connection)
        return row

    def write(self, row: Row) -> int:
        """Put ``row`` in the place of what was there and return how many others were evicted for it."""
        now = time.time()
        with self._session() as connection, _transaction(connection):
            self._save_rows(connection)
            connection.execute("DELETE FROM results WHERE digest = ?", (row.digest,))
            connection.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, row.size, now, now))
            return self._evict(connection, row.digest)

    def count(self, tool: str, name: str, value: int = 1) -> None:
        """Add to a count of this process, which is saved with the next write."""
        with self._lock:
            self._counts[tool, name] += value
            self._here[tool, name] += value

    def here(self) -> dict[str, dict[str, int]]:
        """The counts of this process: tool -> name -> value."""
        with self._lock:
            return _by_tool((*name, value) for name, value in self._here.items())

    def totals(self) -> tuple[int, int, dict[str, dict[str, int]]]:
        """Number of rows, their bytes, and the counts of all processes that saved theirs: tool -> name -> value."""
        with self._session() as connection:
            self._save(connection)
            rows, size = connection.execute("SELECT (SELECT COUNT(*) FROM results), bytes FROM size").fetchone()
            return rows, size, _by_tool(connection.execute("SELECT tool, name, value FROM counts"))

    def close(self) -> None:
        """Save what waits and close the file. Idempotent."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._save(self._connection)
            self._disconnect()
            self._closed = True

    def __del__(self) -> None:
        self.close()

    @contextlib.contextmanager
    def _session(self) -> Iterator[sqlite3.Connection]:
        """The open connection, held alone."""
        with self._lock:
            if self._closed:
                raise CacheError(f"the tool cache {self.path} is closed")
            try:
                if self._connection is None:
                    self._connection = _connect(self.path, self.read_only)
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                    raise CacheError(f"{self.path} {_FOREIGN}") from error
                raise CacheError(f"tool cache {self.path}: {type(error).__name__}: {error}") from error

    def _save(self, connection: sqlite3.Connection) -> None:
        if not self.read_only:
            with _transaction(connection):
                self._save_rows(connection)

    def _save_rows(self, connection: sqlite3.Connection) -> None:
        """Write the waiting times of use and counts. Both are dropped even when that fails: they must not grow while a disk is full."""
        used, self._used = self._used, {}
        counts, self._counts = self._counts, Counter()
        connection.executemany("UPDATE results SET used = ? WHERE digest = ?", [(when, digest) for digest, when in used.items()])
        connection.executemany(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(*name, value) for name, value in counts.items()],
        )

    def _evict(self, connection: sqlite3.Connection, newest: str) -> int:
        (size,) = connection.execute("SELECT bytes FROM size").fetchone()
        if size <= self.max_bytes:
            return 0
        excess, victims = size - int(_KEEP_SHARE * self.max_bytes), []
        for digest, row_bytes in connection.execute("SELECT digest, bytes FROM results WHERE digest <> ? ORDER BY used, rowid", (newest,)):
            victims.append((digest,))
            excess -= row_bytes
            if excess <= 0:
                break
        connection.executemany("DELETE FROM results WHERE digest = ?", victims)
        return len(victims)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _before_fork(self) -> None:
        self._lock.acquire()
        self._disconnect()

    def _after_fork_in_parent(self) -> None:
        self._lock.release()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._used, self._counts, self._here = {}, Counter(), Counter()  # the parent saves them


def _by_tool(counts: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for tool, name, value in counts:
        found.setdefault(tool, {})[name] = value
    return found


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")  # a read that turns into a write would fail at once instead of waiting
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
            connection.execute("ROLLBACK")
        raise


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if read_only:
        # Where the directory cannot be written to, nobody else writes either, and SQLite could not make its shared memory beside the file.
        query = "mode=ro" if os.access(path.parent, os.W_OK) else "mode=ro&immutable=1"
    else:
        query = "mode=rw"
        _create(path)
    connection = sqlite3.connect(f"{path.as_uri()}?{query}", uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _check_layout(connection, path)
        if not read_only:
            _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """An empty private file, when there is none. A file that is there is never opened here: closing it again would drop the locks that another connection
    of this process holds on it (POSIX), and SQLite's data with them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if 0 < path.stat().st_size < _SMALLEST:
        raise CacheError(f"{path} {_FOREIGN}")


def _check_layout(connection: sqlite3.Connection, path: Path) -> None:
    """Raise :class:`CacheError` for a database of somebody else or of another layout. Writes nothing."""
    connection.execute("BEGIN")  # one view of all three: another process may be making the tables
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    connection.execute("COMMIT")
    if (application, layout) == (_APPLICATION_ID, _LAYOUT) or (application, layout, tables) == (0, 0, 0):
        return
    if application == _APPLICATION_ID:
        raise CacheError(f"{path} is a tool cache of layout {layout}, expected {_LAYOUT}; nothing was changed. Name another file")
    raise CacheError(f"{path} is a SQLite database of another program (application_id {application}, {tables} tables); nothing was changed. Name another file")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    mode = _write_ahead(connection)
    if mode != "wal":
        raise CacheError(f"{path}: SQLite cannot keep a write-ahead log there (journal mode {mode!r}); a tool cache needs a local file system")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
    with _transaction(connection):
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if not tables:
            for statement in _TABLES.replace(";\n", "\0").split("\0"):
                connection.execute(statement)


def _write_ahead(connection: sqlite3.Connection) -> str:
    """Turn the write-ahead log on and return the mode in force. SQLite does not wait here while another process does the same, so this does."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_registry = threading.Lock()
_forking: list[Store] = []


def _before_fork() -> None:
    _registry.acquire()
    _forking.extend(_stores)
    for store in _forking:
        store._before_fork()


def _after_fork_in_parent() -> None:
    for store in _forking:
        store._after_fork_in_parent()
    _forking.clear()
    _registry.release()


def _after_fork_in_child() -> None:
    for store in _forking:
        store._after_fork_in_child()
    _forking.clear()
    _registry.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


@atexit.register
def _close_all() -> None:
    with _registry:
        stores = list(_stores)
    for store in stores:
        store.close()
