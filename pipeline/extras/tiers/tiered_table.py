"""A table's shard whose rows are in slots while batches need them, and in a row store otherwise.

The slots are a plain table, which kernels and FBGEMM look up and update. A row that was never
looked up is not stored. Its initial weights depend only on the seed and its number, and are sampled
on first use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint.stored_rows import FirstWeights
from pipeline.extras.tiers.kernels import record as record_kernels
from pipeline.extras.tiers.kernels import slot_map as slot_map_kernels
from pipeline.extras.tiers.row_store import RowStore
from pipeline.extras.tiers.transfers import Piece, transfers

Array = np.ndarray[Any, Any]
AT_ONCE = 1 << 14  # rows


@dataclass
class Admission:
    """Hold the rows that get slots. `rows` ascends.

    `victims`: evicted rows whose records are not written yet.
    """

    rows: Array
    slots: Array
    victims: Array
    records: Array
    num_wanted: int


class TieredTable:
    """Hold the shard.

    `columns` are the slots' weights and two states, [slots, numbers per row]; a missing state is 0
    wide.

    vectors: the columns that a checkpoint stores as [rows, width]; other columns have one number
    per row, [rows]. head: rows [0, head) get slots before the first lookup and are never evicted.
    Not thread-safe: TieredLookup takes turns.
    """

    def __init__(
        self, name: str, columns: Sequence[Array], vectors: Sequence[bool], store: RowStore, head: int = 0
    ) -> None:
        self.name, self.columns, self.store = name, list(columns), store
        self._vectors = list(vectors)
        self.num_rows, self.num_slots = store.num_rows, len(columns[0])
        assert head < self.num_slots or not head
        self.head = head
        self._head_here = 0  # the complete head, or 0 while its slots are empty
        self.first_weights = FirstWeights()
        num_buckets = 1 << max(4, (2 * self.num_slots - 1).bit_length())
        self._buckets = np.full(num_buckets, -1, np.int32)
        self._row_of = np.full(self.num_slots, -1, np.int64)
        self._visits, self._dirty = np.zeros(self.num_slots, np.uint8), np.zeros(self.num_slots, np.uint8)
        self._pins = np.zeros(self.num_slots, np.int32)
        self._seen = np.zeros(self.num_slots, np.int64)
        self._hand = np.zeros(1, np.int64)
        self._calls = itertools.count(1)
        self._is_empty = True

    def check(self, ids: Array) -> int | None:
        """Return the first id that is not a row, or None."""
        position = slot_map_kernels.out_of_range(ids, self.num_rows)
        return None if position < 0 else int(ids[position])

    def pin(self, ids: Array, slots: Array) -> tuple[Array, Array]:
        """Set slots [n]; they are -1 for rows without a slot.

        Return the distinct slots, which are now pinned, and the distinct missing rows.
        """
        pinned, missing = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        num_pinned, num_missing = slot_map_kernels.resolve(
            ids, self._buckets, self._row_of, self._visits, self._pins, self._seen, next(self._calls), self._head_here, slots,
            pinned, missing,
        )  # fmt: skip
        return pinned[:num_pinned].copy(), np.unique(missing[:num_missing])

    def bring_head(self) -> None:
        """Fill the head's slots if they are empty: before the first lookup, and after a load.

        Raises TierError.
        """
        if self._head_here == self.head:
            return
        for first in range(0, self.head, AT_ONCE):
            rows = np.arange(first, min(first + AT_ONCE, self.head))
            transfers().read(self._begin_fill(rows, rows, take=True))
        self._row_of[: self.head] = np.arange(self.head)
        self._head_here, self._is_empty = self.head, False

    def release_head(self) -> None:
        """Allow the eviction of the head's rows from now on."""
        slot_map_kernels.release_head(self._head_here, self._buckets, self._row_of)
        self.head = self._head_here = 0

    def unpin(self, slots: Array) -> None:
        """Unpin distinct slots."""
        self._pins[slots] -= 1

    def unpin_all(self) -> None:
        if not self._is_empty:
            self._pins[:] = 0

    def admit(self, rows: Array) -> Admission:
        """Give pinned slots to missing rows, as long as there are slots that no batch in flight
        needs.

        Call begin_fill next.
        """
        slots, victims, victim_slots = (np.empty(len(rows), np.int64) for _ in range(3))
        num_rows, num_victims = slot_map_kernels.admit(
            rows,
            self._buckets,
            self._row_of,
            self._visits,
            self._pins,
            self._dirty,
            self._hand,
            self._head_here,
            slots,
            victims,
            victim_slots,
        )
        self._is_empty = False
        order = np.argsort(victims[:num_victims])
        weights, states, squares = self.columns
        records = np.empty((num_victims, self.store.record), np.float32)
        record_kernels.gather(victim_slots[:num_victims][order], weights, states, squares, records)
        return Admission(rows[:num_rows], slots[:num_rows], victims[:num_victims][order], records, len(rows))

    def begin_fill(self, admission: Admission, training: bool) -> list[Piece]:
        """Fill the admitted slots with initial weights. Return what to read from the store."""
        return self._begin_fill(admission.rows, admission.slots, take=training)

    def _begin_fill(self, rows: Array, slots: Array, take: bool) -> list[Piece]:
        stored = self.store.are_stored(rows)
        pieces = self.store.begin_load(rows[stored], slots[stored], self.columns, take=take)
        if take:
            self._dirty[slots[stored]] = 1  # they are stored nowhere else
        if not stored.all():
            fresh = slots[~stored]
            self.first_weights.sample(rows[~stored], fresh, self.columns[0])
            for state in self.columns[1:]:
                state[fresh] = 0
        return pieces

    def write_back(self, admission: Admission) -> None:
        """Store the victims. Raises TierError."""
        if len(admission.victims):
            self.store.store(admission.victims, admission.records)

    def fill_in(self, ids: Array, slots: Array) -> None:
        """Set the slots of rows that were admitted since pin()."""
        slot_map_kernels.fill_in(ids, self._buckets, self._row_of, self._head_here, slots)

    def mark_dirty(self, slots: Array) -> None:
        self._dirty[slots] = 1

    def forget(self) -> None:
        """Drop everything that was trained or loaded."""
        self._clear()
        self.store.forget()

    def flush(self) -> None:
        """Store the rows that have changed, and empty the slots."""
        if self._is_empty:
            return
        slots = np.flatnonzero((self._row_of >= 0) & (self._dirty != 0))
        slots = slots[np.argsort(self._row_of[slots])]
        weights, states, squares = self.columns
        for begin in range(0, len(slots), AT_ONCE):
            part = slots[begin : begin + (AT_ONCE)]
            records = np.empty((len(part), self.store.record), np.float32)
            record_kernels.gather(part, weights, states, squares, records)
            self.store.store(self._row_of[part], records)
        self._clear()

    def read_rows(self, column: int, rows: Array) -> torch.Tensor:
        """Read rows as RowSource describes. The slots do not change."""
        slots = np.full(len(rows), -1, np.int64)
        slot_map_kernels.fill_in(rows, self._buckets, self._row_of, self._head_here, slots)
        values, stored = self.store.read_column(column, rows)
        fresh = np.flatnonzero(~stored & (slots < 0))
        if column == 0:
            self.first_weights.sample(rows[fresh], fresh, values)
        else:
            values[fresh] = 0
        here = np.flatnonzero(slots >= 0)
        values[here] = self.columns[column][slots[here]]
        return torch.from_numpy(values if self._vectors[column] else values[:, 0])

    def changed_rows(self) -> Array:
        """Return the changed rows as RowSource describes."""
        bits = self.store.stored_bits()
        record_kernels.set_bits(bits, self._row_of[(self._row_of >= 0) & (self._dirty != 0)])
        return bits

    def write_rows(self, column: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows as RowSource describes."""
        self.flush()
        begin = sum(each.shape[1] for each in self.columns[:column])
        width = self.columns[column].shape[1]
        at_once = max(1, (4 << 20) // (4 * self.store.record))
        numbers, new = rows.numpy().astype(np.int64), values.detach().float().reshape(len(rows), width).numpy()
        for first in range(0, len(numbers), at_once):
            part = numbers[first : first + at_once]
            records = self._records(part, with_weights=column > 0)
            records[:, begin : begin + width] = new[first : first + at_once]
            self.store.store(part, records)

    def _records(self, rows: Array, with_weights: bool) -> Array:
        """Return records [n, numbers] of rows that are not in slots, with initial weights only if
        requested.

        The caller must store them again at once.
        """
        records = np.zeros((len(rows), self.store.record), np.float32)
        stored = self.store.are_stored(rows)
        none = np.empty((len(rows), 0), np.float32)
        pieces = self.store.begin_load(rows[stored], np.flatnonzero(stored), (records, none, none), take=True)
        transfers().read(pieces)
        if with_weights and not stored.all():
            fresh = np.flatnonzero(~stored)
            weights = np.empty((len(fresh), self.columns[0].shape[1]), np.float32)
            self.first_weights.sample(rows[fresh], np.arange(len(fresh)), weights)
            records[fresh, : weights.shape[1]] = weights
        return records

    def _clear(self) -> None:
        self._buckets[:] = -1
        self._row_of[:] = -1
        for each in (self._visits, self._dirty, self._pins):
            each[:] = 0
        self._head_here, self._is_empty = 0, True
