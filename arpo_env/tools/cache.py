"""Results of tools kept on disk: ``ToolCache`` (one SQLite file), ``CachedTool`` (any stateless tool answered from it).

What decides a result is its key: the tool's name, its version, its settings (for a search: the index, the number of passages) and the arguments. Only
successes are kept: a search that failed today is asked again tomorrow. Three modes: ``record`` answers from the cache and stores what is new; ``replay``
answers from the cache alone, so that a run can be repeated without network; ``off`` calls every time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from arpo_env.tools.base import Shared, Tool, ToolResult, check_tool
from arpo_env.tools.cache_flights import Flights
from arpo_env.tools.cache_store import CacheError, Row, Store

if TYPE_CHECKING:
    from arpo_env.sandbox.isolation import IsolationReport

__all__ = ["CacheError", "CacheKey", "CacheMiss", "CacheStats", "CachedTool", "ToolCache"]

V = TypeVar("V")
Mode = Literal["record", "replay", "off"]

_log = logging.getLogger(__name__)


class CacheMiss(CacheError):
    """Replay only, and the cache does not hold this result."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a result depends on. Every character of an argument counts; which of them mean the same, a tool knows (see :class:`CachedTool`)."""

    tool: str
    version: str
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def words(self) -> str:
        """Settings and arguments as JSON, names in order. ``TypeError`` where they have no JSON form."""
        return json.dumps({"settings": self.settings, "arguments": self.arguments}, sort_keys=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join((self.tool, self.version, self.words)).encode("utf-8", "backslashreplace")).hexdigest()

    def __str__(self) -> str:
        return f"{self.tool} (version {self.version}) {self.words}"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds and what it did. The counts of a tool: ``hits``, ``misses``, ``shared`` (waited for the same call of another thread), ``stored``,
    ``evicted`` (others for its results), ``too_large`` (for the limit), ``failures`` (of the cache itself; the tool was called)."""

    entries: int
    bytes: int
    here: Mapping[str, Mapping[str, int]]
    """tool -> counts of this process since the cache was opened."""
    ever: Mapping[str, Mapping[str, int]]
    """tool -> counts of all processes. A process that is killed loses its last few hundred; replay adds nothing."""

    def hit_rate(self, tool: str) -> float | None:
        """The share of this process's lookups that needed no call; None before the first."""
        counts = self.here.get(tool, {})
        answered = counts.get("hits", 0) + counts.get("shared", 0)
        asked = answered + counts.get("misses", 0)
        return answered / asked if asked else None


class ToolCache(Shared):
    """Results of tools in one SQLite file, for any number of threads and processes. Copies (deepcopy) are the same object; a pickle opens the file again.

    Args:
        path: the file, made with mode 0600. On a local file system. :class:`CacheError` when it is something else, or when there is none to replay.
        mode: ``record``, ``replay`` (reads only, also from a read-only disk) or ``off``.
        expire_after: seconds after which a result is asked for again; None: never. Replay takes no notice: it repeats what was recorded.
        max_mb: limit of keys and values together in MiB; beyond it those unused for longest go.
    """

    def __init__(self, path: str | os.PathLike[str], *, mode: Mode = "record", expire_after: float | None = None, max_mb: int = 1024):
        if mode not in ("record", "replay", "off"):
            raise ValueError(f"mode must be 'record', 'replay' or 'off', got {mode!r}")
        if expire_after is not None and not expire_after > 0:
            raise ValueError(f"expire_after must be positive or None, got {expire_after!r}")
        if max_mb < 1:
            raise ValueError(f"max_mb must be at least 1, got {max_mb!r}")
        self.path, self.mode, self.expire_after, self.max_mb = os.path.abspath(path), mode, expire_after, max_mb
        if mode == "replay" and not os.path.isfile(self.path):
            raise CacheError(f"no tool cache to replay at {self.path}; record one first")
        self._store = Store(self.path, read_only=mode == "replay", max_bytes=max_mb * 2**20)
        self._flights = Flights()
        self._warned = False
        if mode != "off":
            self._store.check()

    def get(self, key: CacheKey) -> Any | None:
        """The stored JSON value; None when there is none, it has expired, or the mode is ``off``. :class:`CacheError` when the file fails."""
        found = self._read(key)
        self._count(key, "hits" if found else "misses")
        return found[0] if found else None

    def put(self, key: CacheKey, value: Any) -> None:
        """Store ``value`` (``TypeError`` when it has no JSON form) in mode ``record``; nothing in the others. :class:`CacheError` when the file fails."""
        text = _json(value)
        row = Row(key.digest, _printable(key.tool), _printable(key.version), key.words, text)
        if self.mode != "record":
            return
        if row.size > self._store.max_bytes:
            self._count(key, "too_large")
            return
        self._count(key, "evicted", self._store.write(row))
        self._count(key, "stored")

    def get_or_call(self, key: CacheKey, call: Callable[[], V], *, keep: Callable[[V], bool]) -> V:
        """The stored value, otherwise what ``call()`` returns or raises; stored when ``keep`` of it is true.

        Threads that ask for the same key at the same time share one call, its failure included. A failing cache is counted and the call is made; in mode
        ``replay`` it raises :class:`CacheError`, and what is not stored :class:`CacheMiss`.
        """
        if self.mode == "off":
            return call()
        try:
            found = self._read(key)
        except CacheError as error:
            if self.mode == "replay":
                raise
            self._failed(key, error)
            found = None
        if found is not None:
            self._count(key, "hits")
            stored: V = found[0]
            return stored
        if self.mode == "replay":
            self._count(key, "misses")
            raise CacheMiss(f"replay only, and {self.path} does not hold {key}")
        value, own = self._flights.join(key.digest, lambda: self._call_and_keep(key, call, keep))
        if not own:
            self._count(key, "shared")
        return value

    def stats(self) -> CacheStats:
        """What the cache holds and what it did. :class:`CacheError` when the file fails."""
        entries, size, ever = (0, 0, {}) if self.mode == "off" else self._store.totals()
        return CacheStats(entries, size, self._store.here(), ever)

    def close(self) -> None:
        """Save the counts and close the file. Idempotent. What is asked afterwards is called, and counted as a failure of the cache."""
        self._store.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.path, self.mode, self.expire_after, self.max_mb)

    def _read(self, key: CacheKey) -> tuple[Any] | None:
        """The stored value, which may be None itself."""
        row = None if self.mode == "off" else self._store.read(key.digest)
        if row is None:
            return None
        text, created = row
        if self.mode == "record" and self.expire_after is not None and time.time() - created >= self.expire_after:
            return None
        try:
            return (json.loads(text),)
        except ValueError as error:
            raise CacheError(f"tool cache {self.path}: the value of {key} is damaged: {error}") from error

    def _call_and_keep(self, key: CacheKey, call: Callable[[], V], keep: Callable[[V], bool]) -> V:
        self._count(key, "misses")
        value = call()
        if keep(value):
            try:
                self.put(key, value)
            except CacheError as error:
                self._failed(key, error)
        return value

    def _failed(self, key: CacheKey, error: CacheError) -> None:
        self._count(key, "failures")
        if not self._warned:
            self._warned = True
            _log.warning("the tool cache failed; tools are called without it (said once, counted always): %s", error)

    def _count(self, key: CacheKey, name: str, value: int = 1) -> None:
        if value:
            self._store.count(_printable(key.tool), name, value)


def _open(path: str, mode: Mode, expire_after: float | None, max_mb: int) -> ToolCache:
    return ToolCache(path, mode=mode, expire_after=expire_after, max_mb=max_mb)


def _json(value: Any) -> str:
    """``value`` as JSON that UTF-8 can hold: characters as they are, unless a lone surrogate forces escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _printable(text) == text else json.dumps(value)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class CachedTool(Tool):
    """``tool``, answered from ``cache``: same name, schema and settings. Stateless, so all episodes and forks share it. ``Tool.normalised``
    says which arguments mean the same (for a search, spacing is nothing); unless a tool has its own, every character counts.

    ``data`` of a result comes as JSON from the first call on (dataclasses as objects, tuples as lists; None where it has no JSON form), so that a result is
    the same whether it was stored or not. In replay, what is not stored is an ``exception`` result that the model reads, counted under ``misses`` and
    logged; ``cache.stats()`` after the run says whether there was one; a cache that fails then is ``unavailable``. Closing it closes the tool, not the cache.
    """

    def __init__(self, tool: Tool, cache: ToolCache):
        check_tool(tool)
        if not isinstance(cache, ToolCache):
            raise TypeError(f"cache must be a ToolCache, got {type(cache).__name__}: write ToolCache({cache!r})")
        if tool.stateful or isinstance(tool, CachedTool):
            what = "stateful: its results depend on the calls before" if tool.stateful else "cached already"
            raise ValueError(f"only a stateless tool can be cached; {tool.name!r} is {what}")
        if type(tool).start_episode is not Tool.start_episode:
            raise ValueError(f"only a tool whose results depend on its arguments alone can be cached; {tool.name!r} depends on the task (start_episode)")
        self.tool, self.cache = tool, cache
        self.name, self.description, self.parameters, self.version = tool.name, tool.description, tool.parameters, tool.version
        self.timeout, self.retries, self.max_concurrency = tool.timeout, tool.retries, tool.max_concurrency
        self.deterministic = tool.deterministic or cache.mode != "off"  # while its results are kept
        try:
            self.key({}).words  # noqa: B018 - settings without a JSON form are found here, not in an episode
        except TypeError as error:
            raise TypeError(f"the settings of {tool.name!r} cannot be part of a key, which is JSON: {error}") from None

    def key(self, arguments: Mapping[str, Any]) -> CacheKey:
        """The key of a call with ``arguments``."""
        return CacheKey(self.name, self.version, self.settings(), self.tool.normalised(arguments))

    def settings(self) -> Mapping[str, Any]:
        return self.tool.settings()

    def isolation(self) -> IsolationReport | None:
        return self.tool.isolation()

    def schema(self) -> dict[str, Any]:
        return self.tool.schema()

    def call(self, **arguments: Any) -> ToolResult:
        """The stored result, otherwise the tool's."""
        try:
            stored = self.cache.get_or_call(self.key(arguments), lambda: to_json(self.tool.call(**arguments)), keep=lambda value: bool(value["ok"]))
        except CacheMiss as miss:
            _log.warning("%s", miss)
            return ToolResult.failure("exception", f"This call of {self.name} was not recorded, and only recorded results are served in this run.")
        except CacheError as error:
            _log.error("%s", error)
            return ToolResult.failure("unavailable", f"The recorded results of {self.name} cannot be read now, and only they are served in this run.")
        return ToolResult(**stored)

    def close(self) -> None:
        self.tool.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedTool:
        return self


def to_json(result: ToolResult | str) -> dict[str, Any]:
    """The fields of a result as a JSON object, from which ``ToolResult(**fields)`` makes it again."""
    if isinstance(result, str):
        result = ToolResult(result)
    try:
        data = json.loads(json.dumps(result.data, default=_plain))
    except (TypeError, ValueError):
        data = None
    return {"text": result.text, "ok": result.ok, "error": result.error, "data": data, "state": result.state}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")
