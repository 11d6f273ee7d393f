"""Keys and values of many token sequences, one a row, kept between turns so that continuations and branches compute only what is new.

::

    row 0 .. active-1     in use, compact, so that a decode step reads the view [:active] of every buffer and copies nothing
    row active .. rows-1  idle: finished turns, kept for their continuation and for branches; empty rows count as idle

Row i holds its tokens at positions 0 .. lengths[i]-1 and only ever appends. Any prefix of any row is therefore valid for every sequence that begins
with the same ids: a new sequence takes over an idle row that is wholly a prefix of it, or else copies the longest common part from whichever row has it.
``tokens`` may run ahead of ``lengths``: ids that are known but not yet computed. Buffers grow by doubling; when they may not, the idle row that was used
longest ago goes.

The class is a transformers ``Cache``: a model writes each row's new keys and values at that row's own positions and gets the view back. Positions and the
4D mask are passed explicitly, so nothing here depends on the rows having one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

Ids = NDArray[np.int64]

_LENGTH_STEP = 16
"""The attended length is rounded up to a multiple of this. With a ragged end the CPU attention kernel adds in another order, and the numbers of a row
would depend (in the last bit) on the length of its neighbours."""
_QUERY_STEP = 4
"""Likewise the number of queries in a prefill: CPU matrix kernels treat a remainder of one to three rows apart."""


@dataclass(frozen=True, slots=True)
class _Write:
    """Where the keys and values of one forward go."""

    first: int
    last: int
    length: int
    rows: torch.Tensor
    positions: torch.Tensor
    source: tuple[torch.Tensor, torch.Tensor] | None
    """Row and query index of the real tokens among the padded ones; None when there is one query a row and all are real."""


class KVCache(Cache):
    """Rows of keys and values with the tokens that they belong to.

    ``max_bytes`` bounds what all rows together take; rows in use are never refused, so it decides how many idle ones are kept.
    """

    def __init__(self, *, max_bytes: int, rows: int = 8, capacity: int = 64) -> None:
        super().__init__(layers=[])
        self.max_bytes = max_bytes
        self.active = 0
        self.tokens: Ids = np.zeros((rows, capacity), np.int64)
        self.lengths: Ids = np.zeros(rows, np.int64)
        self._used: Ids = np.full(rows, -1, np.int64)  # when each row was last used; -1: empty
        self._clock = 0
        self._keys: list[torch.Tensor] = []  # a layer: (rows, heads, capacity, head_dim)
        self._values: list[torch.Tensor] = []
        self._token_bytes = 0  # of one token over all layers, known from the first forward on
        self._write: _Write | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        return int(self.tokens.shape[1])

    # --- what the model calls -------------------------------------------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the layer's keys and values, (rows of this forward, heads, attended length, head_dim), with the new ones written in."""
        write = self._write
        assert write is not None, "inputs() comes before the forward"
        while len(self._keys) <= layer_idx:
            # Zeros, not empty: what lies beyond a row's end is masked, and 0 * NaN would still be NaN.
            self._keys.append(key_states.new_zeros((self.rows, key_states.shape[1], self.capacity, key_states.shape[3])))
            self._values.append(value_states.new_zeros((self.rows, value_states.shape[1], self.capacity, value_states.shape[3])))
            self._token_bytes = sum(b.shape[1] * b.shape[3] * b.element_size() for b in (*self._keys, *self._values))
        views = []
        for buffer, new in ((self._keys[layer_idx], key_states), (self._values[layer_idx], value_states)):
            real = new[:, :, 0] if write.source is None else new.transpose(1, 2)[write.source]  # (tokens, heads, head_dim)
            buffer[write.rows, :, write.positions] = real
            views.append(buffer[write.first : write.last, :, : write.length])
        return views[0], views[1]

    # --- what the decoder calls -----------------------------------------------------------------------------------------------------------------

    def inputs(self, first: int, counts: Ids, *, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Ids, positions and additive mask of a forward that feeds the next ``counts[i]`` known tokens of row ``first + i``; 0 computes a padding row.

        Shapes: ``input_ids`` and ``position_ids`` (rows, queries), ``attention_mask`` (rows, 1, queries, attended length).
        """
        last = first + len(counts)
        queries = int(counts.max())
        if queries > 1:
            queries = _up(queries, _QUERY_STEP)
        start = self.lengths[first:last]
        length = _up(int((start + counts)[counts > 0].max()), _LENGTH_STEP)
        offset = np.arange(queries)
        # Padding queries repeat the last real position: positions past the context would overflow a learned position table.
        positions = np.minimum(start[:, None] + np.minimum(offset, np.maximum(counts, 1)[:, None] - 1), self.capacity - 1)
        real = offset < counts[:, None]
        row, query = real.nonzero()
        source = None if queries == 1 and len(row) == len(counts) else (torch.from_numpy(row).to(device), torch.from_numpy(query).to(device))
        at = torch.from_numpy(positions).to(device)
        self._write = _Write(first, last, length, torch.from_numpy(row + first).to(device), torch.from_numpy(positions[row, query]).to(device), source)
        hidden = torch.arange(length, device=device) > at[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        ids = torch.from_numpy(np.take_along_axis(self.tokens[first:last], positions, axis=1)).to(device)
        return {"input_ids": ids, "position_ids": at, "attention_mask": mask}

    def computed(self, first: int, counts: Ids) -> None:
        """Records that the forward prepared by ``inputs`` has run."""
        self.lengths[first : first + len(counts)] += counts
        self._write = None

    def reusable(self, ids: Ids) -> int:
        """How many leading ``ids`` some row holds, the last not counted."""
        return self._longest_prefix(ids[:-1])[1]

    def claim(self, ids: Ids) -> int:
        """Makes row ``active`` a row in use that knows ``ids``; returns how many of them it holds already: at most all but the last, which is left to feed."""
        self.reserve(len(ids))
        source, common = self._longest_prefix(ids[:-1])
        slot = self.active
        if source >= slot and self.lengths[source] == common:
            self._swap(source, slot)
        else:
            target = self._spare(keep=source)
            if target == source:  # the only idle row is the source: shorten it in place
                self._swap(source, slot)
            else:
                self._swap(target, slot)
                self._copy(target if source == slot else source, slot, common)
        self.lengths[slot] = common
        self.tokens[slot, : len(ids)] = ids
        self._touch(slot)
        self.active += 1
        return common

    def release(self, slot: int) -> None:
        """Makes a row in use idle. The last row in use moves into its place."""
        self._touch(slot)
        self.active -= 1
        self._swap(slot, self.active)

    def reserve(self, length: int) -> None:
        """Makes sure that rows can hold ``length`` tokens."""
        if length > self.capacity:
            capacity = self.capacity
            while capacity < length:
                capacity *= 2
            self._resize(min(self.rows, max(self._affordable(capacity), self.active + 1)), capacity)

    def clear(self) -> None:
        """Forgets every row and frees the buffers."""
        self.active = 0
        self.lengths[:] = 0
        self._used[:] = -1
        self._keys.clear()
        self._values.clear()
        self._write = None

    # --- rows ---------------------------------------------------------------------------------------------------------------------------------

    def _longest_prefix(self, ids: Ids) -> tuple[int, int]:
        """The row with the longest common prefix with ``ids`` and its length. Among equals an idle row that ends there (it can be taken over) wins."""
        width = min(len(ids), self.capacity)
        differs = (self.tokens[:, :width] != ids[:width]) | (np.arange(width) >= self.lengths[:, None])
        common = np.where(differs.any(1), differs.argmax(1), width) if width else np.zeros(self.rows, np.int64)
        ends = (common == self.lengths) & (np.arange(self.rows) >= self.active)
        best = int(np.argmax(2 * common + ends))
        return best, int(common[best])

    def _spare(self, keep: int) -> int:
        """An idle row to overwrite: an empty one, else a new one, else the one used longest ago other than ``keep``, else ``keep``."""
        idle = self._used[self.active :]
        if len(idle) and idle.min() < 0:
            return self.active + int(idle.argmin())
        affordable = self._affordable(self.capacity)
        if self.active == self.rows or self.rows < affordable:
            old = self.rows
            self._resize(max(self.active + 1, min(2 * old, affordable)), self.capacity)
            return old
        order = self.active + np.argsort(idle, kind="stable")
        return int(next((row for row in order if row != keep), keep))

    def _affordable(self, capacity: int) -> int:
        """How many rows of this capacity ``max_bytes`` pays for; unbounded while the shape of the buffers is not known."""
        return self.max_bytes // (self._token_bytes * capacity) if self._token_bytes else 2 * self.rows

    def _resize(self, rows: int, capacity: int) -> None:
        """New buffers. Rows in use stay where they are; of the idle ones those used last are kept, in order."""
        idle = self.active + np.argsort(-self._used[self.active :], kind="stable")[: rows - self.active]
        kept = np.concatenate((np.arange(self.active), np.sort(idle)))[:rows]

        def grown(old: torch.Tensor) -> torch.Tensor:
            new = old.new_zeros((rows, old.shape[1], capacity, old.shape[3]))
            new[: len(kept), :, : old.shape[2]] = old[torch.from_numpy(kept).to(old.device)]
            return new

        # One buffer at a time: old and new exist together for one layer only.
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                buffers[layer] = grown(old)
        tokens = np.zeros((rows, capacity), np.int64)
        tokens[: len(kept), : self.capacity] = self.tokens[kept]
        self.tokens = tokens
        empty = rows - len(kept)
        self.lengths = np.concatenate((self.lengths[kept], np.zeros(empty, np.int64)))
        self._used = np.concatenate((self._used[kept], np.full(empty, -1, np.int64)))

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        length = int(max(self.lengths[a], self.lengths[b]))
        for buffer in (*self._keys, *self._values):
            held = buffer[a, :, :length].clone()
            buffer[a, :, :length] = buffer[b, :, :length]
            buffer[b, :, :length] = held
        for array in (self.tokens, self.lengths, self._used):
            array[[a, b]] = array[[b, a]]

    def _copy(self, source: int, target: int, length: int) -> None:
        if length:
            for buffer in (*self._keys, *self._values):
                buffer[target, :, :length] = buffer[source, :, :length]

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock


def _up(n: int, step: int) -> int:
    """``n`` rounded up to a multiple of ``step``."""
    return -(-n // step) * step
