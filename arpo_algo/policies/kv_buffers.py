"""Keys and values of all layers, a sequence in each row, and where those of one forward go. Which row holds what is for the owner to know
(:mod:`arpo_algo.policies.kv_cache`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where the keys and values of one forward go, and which of them it attends to. The same for all layers."""

    rows: Ids
    """Of the buffers, for each row of the forward."""
    length: int
    """Keys that are attended to."""
    queries: int
    """Of each row of the forward, padding included."""
    new: tuple[Ids, Ids]
    """Row of the forward and query of each new token."""
    at: tuple[Ids, Ids]
    """Row of the buffers and position of each."""
    _read: slice | torch.Tensor | None = None
    _written: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        """Puts the new vectors among ``states`` (rows, heads, queries, head_dim) into the buffer."""
        heads, capacity, width = buffer.shape[1:]
        if heads not in self._written:
            source, target = (
                torch.from_numpy((row[:, None] * heads + np.arange(heads)) * steps + step[:, None]).flatten().to(buffer.device)
                for (row, step), steps in ((self.new, self.queries), (self.at, capacity))
            )
            self._written[heads] = source, target
        source, target = self._written[heads]
        vectors = states.reshape(-1, width)
        in_order = self.queries == 1 and len(vectors) == len(source)
        buffer.view(-1, width).index_copy_(0, target, vectors if in_order else vectors.index_select(0, source))

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """What is attended to (rows, heads, length, head_dim): a view where the rows are neighbours, else a copy."""
        if self._read is None:
            first, last = int(self.rows[0]), int(self.rows[-1]) + 1
            neighbours = np.array_equal(self.rows, np.arange(first, last))
            self._read = slice(first, last) if neighbours else torch.from_numpy(self.rows).to(buffer.device)
        attended = buffer[:, :, : self.length]
        return attended[self._read] if isinstance(self._read, slice) else attended.index_select(0, self._read)


class KVBuffers:
    """A layer's keys and its values have the shape (rows, heads, capacity, head_dim). They are made in the first forward, which tells their sizes."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.token_bytes = 0
        """Of one token over all layers; 0 while it is not known."""

    def add_layer(self, key_states: torch.Tensor, value_states: torch.Tensor, *, rows: int, capacity: int) -> None:
        """Room for another layer, of whose heads ``states`` (any, heads, any, head_dim) are an example."""
        for buffers, states in ((self.keys, key_states), (self.values, value_states)):
            # Zeros, not empty: what lies beyond a row's end is masked, and 0 * NaN would still be NaN.
            buffers.append(states.new_zeros((rows, states.shape[1], capacity, states.shape[3])))
        self.token_bytes = sum(b.shape[1] * b.shape[3] * b.element_size() for b in (*self.keys, *self.values))

    def swap(self, a: int, of_a: int, b: int, of_b: int) -> None:
        """Exchanges the first ``of_a`` tokens of row a and the first ``of_b`` of row b."""
        for buffer in (*self.keys, *self.values):
            held = buffer[a, :, :of_a].clone()
            if of_b:
                buffer[a, :, :of_b] = buffer[b, :, :of_b]
            buffer[b, :, :of_a] = held

    def copy(self, source: int, target: int, length: int) -> None:
        """The first ``length`` tokens of a row, also to another."""
        for buffer in (*self.keys, *self.values) if length else ():
            buffer[target, :, :length] = buffer[source, :, :length]

    def begin_with(self, other: KVBuffers, length: int, *, rows: int, capacity: int) -> None:
        """New buffers, whose row 0 begins with ``length`` tokens of row 0 of ``other``."""
        for keys, values in zip(other.keys, other.values, strict=True):
            self.add_layer(keys, values, rows=rows, capacity=capacity)
            self.keys[-1][0, :, :length] = keys[0, :, :length]
            self.values[-1][0, :, :length] = values[0, :, :length]

    def resize(self, kept: Ids, *, rows: int, capacity: int) -> None:
        """As many rows and positions, at least as many as are ``kept``, which come first. Old and new exist together for one layer only."""
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                buffers[layer] = old.new_zeros((rows, old.shape[1], capacity, old.shape[3]))
                buffers[layer][: len(kept), :, : old.shape[2]] = old[torch.from_numpy(kept).to(old.device)]

    def clear(self) -> None:
        """Frees everything."""
        self.keys.clear()
        self.values.clear()
