"""Keys and values of many token sequences, one a row, kept between turns so that continuations and branches compute only what is new.

::

    row 0   in use, slot 2
    row 1   idle: a finished turn, kept for its continuation and for branches; empty rows count as idle
    row 2   in use, slot 0
    row 3   in use, slot 1

Row i holds its tokens at positions 0 .. lengths[i]-1 and only ever appends. Any prefix of any row is therefore valid for every sequence that begins
with the same ids: a new sequence takes over an idle row that is wholly a prefix of it, or else copies the longest common part from whichever row has it.
``tokens`` may run ahead of ``lengths``: ids that are known but not yet computed. Buffers grow by doubling; when they may not, the idle row that was used
longest ago goes.

A row that falls idle stays where it is, and a continuation finds it there: where it comes before the next decode step, nothing moves. A decode step reads the
view [:n] of every buffer and copies nothing, so before it the rows in use that lie beyond move into the gaps.

A long opening that many sequences have in common (the prompt of a group) is held once, as a :class:`Base`: the rows of these sequences hold only what comes
after it, and attention reads it once for all of them (:mod:`arpo_algo.policies.base_attention`). Which base a sequence stands on is the caller's choice and
part of what it asks for: rows are shared among sequences of the same base only. What branches copy, then, are the turns between the prompt and the branch
point. For a model of 135M parameters on one core that is 9 to 51 ms for 1,000 tokens, once, beside 0.2 s for each decode step of 16 rows.

The class is a transformers ``Cache``: a model writes each row's new keys and values at that row's own positions and gets the view back. Positions and the
4D mask are passed explicitly, so nothing here depends on the rows having one length.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from arpo_algo.policies.base_attention import BasePlan, BaseRows
from arpo_algo.policies.kv_buffers import Ids, KVBuffers, Placement

_LENGTH_STEP = 16
"""The attended length is rounded up to a multiple of this. With a ragged end the CPU attention kernel adds in another order, and the numbers of a row
would depend (in the last bit) on the length of its neighbours."""
NO_BASE = -1
"""Number of the base of a row that holds its sequence from the first token on."""
_COMPARED = 16
"""Tokens of all rows that are compared first, and how many times more next: most rows part from a sequence soon, and idle ones are many."""
_QUERY_STEP = 4
"""Likewise the number of queries in a prefill: CPU matrix kernels treat a remainder of one to three rows apart."""


@dataclass(slots=True)
class Base:
    """The first tokens of several sequences, computed once."""

    ids: Ids
    cache: KVCache
    """Their keys and values, in one row."""
    used: int
    """When a sequence last asked for it."""
    hidden: torch.Tensor | None = None
    """What hides the padding of the row; see :class:`~arpo_algo.policies.base_attention.BaseRows`."""

    @property
    def bytes(self) -> int:
        return self.cache.bytes

    @property
    def computed(self) -> Ids:
        """Those of its tokens that have been computed: none where the forward raised."""
        return self.ids[: self.cache.lengths[0]]

    def rows(self, rows: Ids, device: torch.device) -> BaseRows:
        keys, values = self.cache.buffers.keys, self.cache.buffers.values
        length = len(self.ids)
        if self.hidden is None and length % _LENGTH_STEP:
            self.hidden = torch.zeros((1, 1, 1, self.cache.capacity), dtype=keys[0].dtype, device=device)
            self.hidden[..., length:] = torch.finfo(keys[0].dtype).min
        return BaseRows(keys=keys, values=values, hidden=self.hidden, rows=torch.from_numpy(rows).to(device))


class Held(NamedTuple):
    """What a row has of a sequence."""

    row: int
    tokens: int
    """Number of leading ones."""


class KVCache(Cache):
    """Rows of keys and values with the tokens that they belong to.

    ``max_bytes`` bounds what all rows and bases together take; those in use are never refused, so it decides how many idle ones are kept. ``shares``: whether
    forwards run inside :func:`~arpo_algo.policies.base_attention.base_attention`; without it there are no bases.
    """

    def __init__(self, *, max_bytes: int, rows: int = 8, capacity: int = 64, shares: bool = False) -> None:
        super().__init__(layers=[])
        self.max_bytes = max_bytes
        self.shares = shares
        self.in_use: list[int] = []
        """The row of each slot."""
        self.tokens: Ids = np.zeros((rows, capacity), np.int64)
        self.lengths: Ids = np.zeros(rows, np.int64)
        self.bases: dict[int, Base] = {}
        self._bases_made = 0
        self._base: Ids = np.full(rows, NO_BASE, np.int64)  # the base of each row
        self._offset: Ids = np.zeros(rows, np.int64)  # and its length
        self._used: Ids = np.full(rows, -1, np.int64)  # when each row was last used; -1: empty
        self._clock = 0
        self.buffers = KVBuffers()
        self._placement: Placement | None = None  # of the forward under way

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def active(self) -> int:
        """How many rows are in use."""
        return len(self.in_use)

    @property
    def capacity(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def bytes(self) -> int:
        """What keys and values take, those of the bases included."""
        return self.buffers.token_bytes * self.rows * self.capacity + sum(base.bytes for base in self.bases.values())

    # --- what the model calls -------------------------------------------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values, (rows of this forward, heads, attended length, head_dim), with the new ones written in."""
        placement, buffers = self._placement, self.buffers
        assert placement is not None, "inputs() comes before the forward"
        while len(buffers.keys) <= layer_idx:
            buffers.add_layer(key_states, value_states, rows=self.rows, capacity=self.capacity)
        keys, values = buffers.keys[layer_idx], buffers.values[layer_idx]
        placement.write(keys, key_states)
        placement.write(values, value_states)
        return placement.read(keys), placement.read(values)

    # --- what the decoder calls -----------------------------------------------------------------------------------------------------------------

    def inputs(self, rows: Ids, counts: Ids, *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Ids, positions and additive mask of a forward that feeds the next ``counts[i]`` known tokens of ``rows[i]``; 0 computes a padding row.

        Shapes: ``input_ids`` and ``position_ids`` (rows, queries), ``attention_mask`` (rows, 1, queries, attended length). A cache that shares adds the
        ``base_plan``; its mask is over the rows' own tokens.
        """
        queries = int(counts.max())
        if queries > 1:
            queries = _up(queries, _QUERY_STEP)
        start = self.lengths[rows]
        length = _up(int((start + counts)[counts > 0].max()), _LENGTH_STEP)
        offset = np.arange(queries)
        # Padding queries repeat the last real position: positions past the context would overflow a learned position table.
        own = np.minimum(start[:, None] + np.minimum(offset, np.maximum(counts, 1)[:, None] - 1), self.capacity - 1)
        row, query = (offset < counts[:, None]).nonzero()
        self._placement = Placement(rows=rows, length=length, queries=queries, new=(row, query), at=(rows[row], own[row, query]))
        hidden = torch.arange(length, device=device) > torch.from_numpy(own).to(device)[:, None, :, None]
        # Not -inf: the kernel reports a log-sum-exp of 0 where everything is hidden, and in a run of own keys that may be.
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(self.tokens[rows[:, None], own]).to(device),
            "position_ids": torch.from_numpy(own + self._offset[rows, None]).to(device),
            "attention_mask": mask,
        }
        return inputs | {"base_plan": self._plan(np.where(counts > 0, self._base[rows], NO_BASE), queries, device)} if self.shares else inputs

    def _plan(self, held: Ids, queries: int, device: torch.device) -> BasePlan:
        """``held``: the base of each row of a forward."""
        plan = BasePlan(bases=[])
        for number in np.unique(held[held != NO_BASE]).tolist():
            rows = np.flatnonzero(held == number)
            if queries == 1:
                rows = np.resize(rows, _up(len(rows), _QUERY_STEP))  # repeats them
            plan.bases.append(self.bases[number].rows(rows, device))
        return plan

    def computed(self, rows: Ids, counts: Ids) -> None:
        """Records that the forward prepared by ``inputs`` has run."""
        self.lengths[rows] += counts
        self._placement = None

    def find_base(self, ids: Ids) -> int | None:
        """The number of the base that consists of ``ids``."""
        return next((number for number, base in self.bases.items() if np.array_equal(base.ids, ids)), None)

    def add_base(self, ids: Ids) -> int:
        """The number of a new base, whose row 0 is left to compute from ``lengths[0]`` on: it begins with what another base has of it."""
        cache = KVCache(max_bytes=0, rows=1, capacity=_up(len(ids), _LENGTH_STEP))
        cache.buffers.token_bytes = self.buffers.token_bytes
        cache.claim(ids)
        like = max(self.bases.values(), key=lambda base: common_prefix(base.computed, ids[:-1]), default=None)
        if like is not None and (common := common_prefix(like.computed, ids[:-1])):
            cache.buffers.begin_with(like.cache.buffers, common, rows=1, capacity=cache.capacity)
            cache.lengths[0] = common
        self._bases_made += 1
        self.bases[self._bases_made] = Base(ids, cache, self._clock)
        if self.rows > (rows := max(self._affordable(self.capacity), self.active + 1)):  # idle rows make room for it
            self._resize(rows, self.capacity)
        return self._bases_made

    def trim_bases(self, keep: Container[int]) -> None:
        """Drops bases that no row in use stands on, those asked for longest ago first, until all take at most half of ``max_bytes``."""
        used = set(self._base[self.in_use].tolist())
        for number in sorted(self.bases, key=lambda number: self.bases[number].used):
            if sum(base.bytes for base in self.bases.values()) <= self.max_bytes // 2:
                return
            if number not in used and number not in keep:
                del self.bases[number]
                gone = self._base == number
                self.lengths[gone], self._used[gone], self._base[gone], self._offset[gone] = 0, -1, NO_BASE, 0

    def find(self, ids: Ids, base: int = NO_BASE) -> Held:
        """The row on ``base`` that holds most leading ``ids``, the last not counted, and how many. Among equals it is an idle row that ends there, which can
        be taken over."""
        common = np.zeros(self.rows, np.int64)
        rows = np.flatnonzero((self._base == base) & (self.lengths > 0))
        start, width = 0, min(len(ids) - 1, self.capacity)
        while start < width and len(rows):
            stop = min(_COMPARED * max(1, start), width)
            differs = self.tokens[rows, start:stop] != ids[start:stop]
            parts = differs.any(1)
            common[rows] = np.where(parts, start + differs.argmax(1), stop)
            start, rows = stop, rows[~parts]
        np.minimum(common, self.lengths, out=common)  # what is known beyond them is not computed
        ends = (common == self.lengths) & self._idle()
        best = int(np.argmax(2 * common + ends))
        return Held(best, int(common[best]))

    def claim(self, ids: Ids, base: int = NO_BASE, found: Held | None = None) -> int:
        """Adds a slot whose row knows ``ids``, what its sequence has beyond ``base``; returns how many of them it holds already: at most all but the last,
        which is left to feed. ``found``: what :meth:`find` said a while ago."""
        self.reserve(len(ids))
        row, common = found if found is not None and self._holds(found, ids, base) else self.find(ids, base)
        if self.lengths[row] > common or row in self.in_use:
            source, row = row, self._spare(keep=row if common else None)
            if row != source:  # else the source is the only idle row, and is shortened in place
                self.buffers.copy(source, row, common)
        self.lengths[row] = common
        self.tokens[row, : len(ids)] = ids
        self._base[row] = base
        self._offset[row] = 0 if base == NO_BASE else len(self.bases[base].ids)
        self._touch(row)
        self.in_use.append(row)
        return common

    def release(self, slot: int) -> None:
        """Makes the row of a slot idle. The last slot becomes this one."""
        self._touch(self.in_use[slot])
        self.in_use[slot] = self.in_use[-1]
        self.in_use.pop()

    def compact(self) -> None:
        """Moves rows in use so that they are the first ones, in any order."""
        n = self.active
        idle = self._idle()[:n]
        gaps = iter(np.flatnonzero(idle)[np.argsort(self._used[:n][idle], kind="stable")].tolist())
        for slot, row in enumerate(self.in_use):
            if row >= n:
                self.in_use[slot] = next(gaps)
                self._swap(row, self.in_use[slot])

    def reserve(self, length: int) -> None:
        """Makes sure that rows can hold ``length`` tokens."""
        if length > self.capacity:
            capacity = self.capacity
            while capacity < length:
                capacity *= 2
            self._resize(min(self.rows, max(self._affordable(capacity), self.active + 1)), capacity)

    def clear(self) -> None:
        """Forgets every row and frees the buffers."""
        self.in_use.clear()
        self.lengths[:] = 0
        self._used[:] = -1
        self._base[:] = NO_BASE
        self._offset[:] = 0
        self.bases.clear()
        self.buffers.clear()
        self._placement = None

    # --- rows ---------------------------------------------------------------------------------------------------------------------------------

    def _holds(self, held: Held, ids: Ids, base: int) -> bool:
        row, common = held
        return row < self.rows and bool(self._base[row] == base and self.lengths[row] >= common and (self.tokens[row, :common] == ids[:common]).all())

    def _idle(self) -> NDArray[np.bool_]:
        """Which rows are not in use."""
        idle = np.ones(self.rows, bool)
        idle[self.in_use] = False
        return idle

    def _spare(self, keep: int | None) -> int:
        """An idle row to overwrite: an empty one, else a new one, else the one used longest ago other than ``keep``, else ``keep``."""
        idle = np.flatnonzero(self._idle())
        order = idle[np.argsort(self._used[idle], kind="stable")]
        if len(order) and self._used[order[0]] < 0:
            return int(order[0])
        affordable = self._affordable(self.capacity)
        if not len(order) or self.rows < affordable:
            old = self.rows
            self._resize(max(self.active + 1, min(2 * old, affordable)), self.capacity)
            return old
        return int(next((row for row in order if row != keep), order[0]))

    def _affordable(self, capacity: int) -> int:
        """How many rows of this capacity ``max_bytes`` pays for; unbounded while the shape of the buffers is not known."""
        left = self.max_bytes - sum(base.bytes for base in self.bases.values())
        return max(0, left) // (self.buffers.token_bytes * capacity) if self.buffers.token_bytes else 2 * self.rows

    def _resize(self, rows: int, capacity: int) -> None:
        """New buffers. Where there are fewer rows, those in use are kept and the idle ones used last, in order."""
        kept = np.arange(self.rows)
        if rows < self.rows:
            worth = np.where(self._idle(), self._used, self._clock + 1)
            kept = np.sort(np.argsort(-worth, kind="stable")[:rows])
            self.in_use = np.searchsorted(kept, self.in_use).tolist()
        self.buffers.resize(kept, rows=rows, capacity=capacity)
        tokens = np.zeros((rows, capacity), np.int64)
        tokens[: len(kept), : self.capacity] = self.tokens[kept]
        self.tokens = tokens
        empty = rows - len(kept)
        self.lengths = np.concatenate((self.lengths[kept], np.zeros(empty, np.int64)))
        self._used = np.concatenate((self._used[kept], np.full(empty, -1, np.int64)))
        self._base = np.concatenate((self._base[kept], np.full(empty, NO_BASE, np.int64)))
        self._offset = np.concatenate((self._offset[kept], np.zeros(empty, np.int64)))

    def _swap(self, a: int, b: int) -> None:
        """Exchanges what two rows hold."""
        self.buffers.swap(a, int(self.lengths[a]), b, int(self.lengths[b]))
        for array in (self.tokens, self.lengths, self._used, self._base, self._offset):
            array[[a, b]] = array[[b, a]]

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock
        if self._base[row] != NO_BASE:
            self.bases[int(self._base[row])].used = self._clock


def _up(n: int, step: int) -> int:
    """``n`` rounded up to a multiple of ``step``."""
    return -(-n // step) * step


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix."""
    width = min(len(a), len(b))
    differs = a[:width] != b[:width]
    return int(differs.argmax()) if differs.any() else width
