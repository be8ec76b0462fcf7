"""The key-value cache by slot: one row a sequence, one column a position.

A row owns its positions: the token at position p lies in column p, whatever the other rows do, so nothing is ever
shifted and there is no padding on the left. Columns at and after a row's length hold garbage that the masks hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

COLUMN_STEP = 64


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of up to `max_rows` sequences of up to `max_columns` tokens, grown in steps as they are needed.

    Before each forward the engine says which rows and columns it concerns (`step_of`, `chunk_of`); the attention
    layers then call `update`. One more column than asked for is kept as scratch: padded queries of a chunk write there.
    Sliding-window layers keep all columns too; the mask does the sliding.
    """

    def __init__(self, max_rows: int, max_columns: int) -> None:
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.max_columns = max_columns
        self.n_rows = 0
        self.n_columns = 0
        self._last_size = (0, 0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._columns = 0
        self._rows: Tensor | None = None
        self._width = 0
        self._targets: Tensor | None = None
        self._flat: dict[int, Tensor] = {}

    def step_of(self, positions: Tensor, columns: int) -> None:
        """The next forward decodes one token in each of the first `len(positions)` rows, looking at `columns`
        columns."""
        self._rows = None
        self._width = len(positions)
        self._columns = columns
        self._targets = positions
        self._flat = {}
        self._reserve(self._width, columns)

    def chunk_of(self, rows: Sequence[int], targets: Tensor, columns: int) -> None:
        """The next forward writes `targets[n, Q]` columns of `rows[n]`; a target of -1 is the scratch column."""
        self._rows = torch.tensor(rows, dtype=torch.long, device=targets.device)
        self._columns = columns
        self._reserve(max(rows) + 1, columns)
        self._targets = torch.where(targets < 0, self.n_columns, targets)

    def _reserve(self, rows: int, columns: int) -> None:
        if rows > self.n_rows or columns > self.n_columns:
            self.grow(rows, columns)

    def grow(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of `columns` tokens (in steps: rows double, columns by a quarter)."""
        if not self.keys:
            rows, columns = max(rows, self._last_size[0]), max(columns, self._last_size[1])
        if rows > self.n_rows:
            self.n_rows = min(self.max_rows, max(rows, 2 * self.n_rows))
        if columns > self.n_columns:
            wanted = max(columns, self.n_columns + self.n_columns // 4)
            self.n_columns = min(self.max_columns, -(-wanted // COLUMN_STEP) * COLUMN_STEP)
        if rows > self.n_rows or columns > self.n_columns:
            raise ValueError(
                f"{rows} rows of {columns} columns do not fit a cache of {self.max_rows} x {self.max_columns}"
            )
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = self._resized(old)

    def _resized(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.n_rows, old.shape[1], self.n_columns + 1, old.shape[3])
        rows, columns = min(len(old), self.n_rows), min(old.shape[2] - 1, self.n_columns)
        new[:rows, :, :columns] = old[:rows, :, :columns]
        return new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values `[B, H, Q, D]` of one layer; give back all that its attention sees."""
        while len(self.keys) <= layer_idx:
            for store, states in ((self.keys, key_states), (self.values, value_states)):
                store.append(states.new_zeros(self.n_rows, states.shape[1], self.n_columns + 1, states.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        targets, columns = self._targets, self._columns
        assert targets is not None
        if self._rows is None:
            heads = keys.shape[1]
            flat = self._flat.get(heads)
            if flat is None:
                line = torch.arange(self._width * heads, device=keys.device).view(self._width, heads)
                flat = self._flat[heads] = (line * (self.n_columns + 1) + targets.unsqueeze(1)).flatten()
            keys.view(-1, keys.shape[3]).index_copy_(0, flat, key_states.reshape(-1, keys.shape[3]))
            values.view(-1, values.shape[3]).index_copy_(0, flat, value_states.reshape(-1, values.shape[3]))
            return keys[: self._width, :, :columns], values[: self._width, :, :columns]
        rows = self._rows
        keys[rows.unsqueeze(1), :, targets] = key_states.transpose(1, 2)
        values[rows.unsqueeze(1), :, targets] = value_states.transpose(1, 2)
        return keys[:, :, :columns].index_select(0, rows), values[:, :, :columns].index_select(0, rows)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copy the first `columns` columns of rows `sources[n]` to rows `targets[n]`; sources are read before any
        write."""
        if not targets or not self.keys:
            return
        self._reserve(max(targets) + 1, columns)
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for store in (*self.keys, *self.values):
            part = store[:, :, :columns]
            part.index_copy_(0, target, part.index_select(0, source))

    def drop(self) -> None:
        """Free the memory. The next forward allocates again, as much at once as there was."""
        self._last_size = (max(self._last_size[0], self.n_rows), max(self._last_size[1], self.n_columns))
        self.keys, self.values = [], []
        self.n_rows = self.n_columns = 0
        self._targets = self._rows = None
        self._flat = {}

    def memory_bytes(self) -> int:
        """Bytes held now."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def bytes_per_token(self) -> int:
        """Bytes one token of one sequence takes over all layers; 0 before the first forward."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in (*self.keys, *self.values))
