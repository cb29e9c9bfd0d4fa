"""Load the rows of coming batches into slots before their lookup, and measure how long steps waited
for them.

A batch's rows are pinned from their prefetch or lookup until backward has updated them. A thread
resolves a coming batch while another batch trains: it chooses rows to evict, reads missing rows,
and then writes the evicted rows back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint.stored_rows import FirstWeights
from pipeline.config.tables import entry_name
from pipeline.extras.tiers.row_store import (
    READ_BYTES,
    READS,
    WRITES,
    WRITTEN_BYTES,
    WRITTEN_ROWS,
    make_room_together,
)
from pipeline.extras.tiers.tiered_table import Admission, TieredTable
from pipeline.extras.tiers.transfers import transfers
from pipeline.runtime.errors import TierError
from pipeline.runtime.logs import get_logger
from pipeline.sharding.table_storage import TierStats

Array = np.ndarray[Any, Any]
MAX_AHEAD = 2
logger = get_logger(__name__)


@cache
def look_ahead_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tier-look-ahead")


class Pins:
    """Hold the rows of one batch. They keep their slots until release()."""

    def __init__(self, lookup: TieredLookup, slots: list[Array], epoch: int) -> None:
        self._lookup, self.slots, self.epoch = lookup, slots, epoch
        self._is_held = True

    def release(self) -> None:
        """Release the slots, from any thread.

        A batch whose backward never runs is released when it is dropped.
        """
        if self._is_held:
            self._is_held = False
            self._lookup.released.append(self)

    def __del__(self) -> None:
        self.release()


class TieredLookup:
    """Hold the tables with tiers of one lookup module. `tables[t]` is None if table t has no tiers.

    feature_begins [T + 1]: a table's features are adjacent.
    """

    def __init__(self, tables: Sequence[TieredTable | None], feature_begins: Array) -> None:
        self.feature_begins = feature_begins
        # of the tables with tiers among all tables
        self.positions = [at for at, table in enumerate(tables) if table is not None]
        self.tables = [table for table in tables if table is not None]
        self.released: deque[Pins] = deque()
        self._lock = threading.RLock()
        self._ahead: deque[tuple[list[Array], Future[tuple[Pins, list[Array]]]]] = deque()
        self._epoch = 0
        self._stats = TierStats()
        self._room = [0] * len(self.tables)
        self._tidied: Future[None] | None = None
        # rows are lost, so nothing is looked up or saved any more
        self._failure: TierError | None = None

    def stats(self) -> TierStats:
        """Return the statistics. Do not wait for the thread, which may still add to them."""
        stats = TierStats() + self._stats
        for table in self.tables:
            counts = table.store.counts.copy()
            stats.reads += int(counts[READS])
            stats.read_bytes += int(counts[READ_BYTES])
            stats.writes += int(counts[WRITES])
            stats.written_bytes += int(counts[WRITTEN_BYTES])
            stats.written_rows += int(counts[WRITTEN_ROWS])
        return stats

    def ids_by_table(self, ids: Array, offsets: Array) -> list[Array]:
        """Return the ids of each table with tiers, from ids [L] and offsets [F * B + 1]."""
        num_samples = (len(offsets) - 1) // int(self.feature_begins[-1])
        bounds = offsets[self.feature_begins * num_samples]
        return [ids[bounds[at] : bounds[at + 1]] for at in self.positions]

    def to_slots(self, ids: Array, offsets: Array, training: bool) -> tuple[Array, Pins]:
        """Return a copy of `ids` [L] in which slots replace the rows of tables with tiers.

        The slots stay until the pins are released.

        Raises:
            TierError: an id is not a row, there are more rows than slots, or a store cannot be read or written.
        """
        by_table = self.ids_by_table(ids, offsets)
        began = time.perf_counter()
        pins, slots = self._looked_ahead_at(by_table) if training else (None, [])
        if pins is None or _has_gap(slots):
            pins, slots = self._bring_now(by_table, training, pins)
        if training:
            self._stats.stall_seconds += time.perf_counter() - began
            self._stats.lookups += sum(map(len, by_table))
            self._stats.rows += sum(map(len, pins.slots))
            for table, used in zip(self.tables, pins.slots, strict=True):
                table.mark_dirty(used)
        result = ids.copy()
        for part, found in zip(self.ids_by_table(result, offsets), slots, strict=True):
            part[:] = found
        return result, pins

    def prefetch_rows(self, by_table: Sequence[Array]) -> None:
        """Start loading the rows of a coming batch, by the ids of each table with tiers.

        The previous batch may be in flight.
        """
        copies = [np.array(ids) for ids in by_table]
        while len(self._ahead) >= MAX_AHEAD:  # batches that were never looked up
            self._ahead.popleft()
        self._ahead.append((copies, look_ahead_pool().submit(self._bring, copies)))
        self._tidied = look_ahead_pool().submit(self._tidy)

    def quiet(self) -> AbstractContextManager[bool]:
        """Return a context in which no other thread moves rows. Raises TierError if rows were lost."""
        self._drop_ahead()
        self._check_failure()
        return self._lock

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Record that rows are lost if the code in the context raises."""
        try:
            yield
        except TierError as error:
            self._failure = error
            raise

    def void_pins(self) -> None:
        """Make the pins of batches in flight invalid. The caller empties a table."""
        self._epoch += 1
        for table in self.tables:
            table.unpin_all()

    def _drop_ahead(self) -> None:
        """Wait for the thread and release what it has loaded. Raises the thread's error."""
        while self._ahead:
            _, future = self._ahead.popleft()
            future.result()[0].release()

    def _looked_ahead_at(self, by_table: list[Array]) -> tuple[Pins | None, list[Array]]:
        """Return this batch's pins and slots if it was prefetched.

        Waits for the thread and raises the thread's error.
        """
        if self._ahead:
            expected, future = self._ahead[0]
            if all(map(np.array_equal, expected, by_table)):
                self._ahead.popleft()
                pins, slots = future.result()
                if pins.epoch == self._epoch:
                    return pins, slots
        return None, []

    def _bring(self, by_table: list[Array]) -> tuple[Pins, list[Array]]:
        with self._lock:
            if any(table.check(ids) is not None for table, ids in zip(self.tables, by_table, strict=True)):
                return Pins(self, [], -1), []  # the lookup reports it
            return self._pin(by_table, training=True)

    def _bring_now(self, by_table: list[Array], training: bool, before: Pins | None) -> tuple[Pins, list[Array]]:
        """Load the rows now. before: the pins of the part of the batch that was prefetched."""
        with self._lock:
            self._check(by_table)
            pins, slots = self._pin(by_table, training)
            if before is not None:
                before.release()
            if not _has_gap(slots):
                return pins, slots
        self._drop_ahead()  # frees the slots of its rows
        with self._lock:
            pins.release()
            pins, slots = self._pin(by_table, training)
            if _has_gap(slots) and self._release_heads(slots):
                pins.release()
                pins, slots = self._pin(by_table, training)
            if _has_gap(slots):
                raise self._too_few(by_table, slots)
            return pins, slots

    def _pin(self, by_table: list[Array], training: bool) -> tuple[Pins, list[Array]]:
        """Pin rows, and return each table's slots by id; -1 if batches in flight need all slots."""
        self._check_failure()
        self._unpin_released()
        with self.failing():
            for table in self.tables:
                table.bring_head()
        pins, all_slots, wanted = Pins(self, [], self._epoch), [], []
        for table, ids in zip(self.tables, by_table, strict=True):
            slots = np.empty(len(ids), np.int64)
            pinned, missing = table.pin(ids, slots)
            pins.slots.append(pinned)
            all_slots.append(slots)
            wanted.append(missing)
        with self.failing():
            admissions = self._exchange(wanted, training) if any(map(len, wanted)) else []
        for at, admission in enumerate(admissions):
            if not len(wanted[at]):
                continue
            pins.slots[at] = np.concatenate([pins.slots[at], admission.slots])
            missed = np.count_nonzero(all_slots[at] < 0)
            self.tables[at].fill_in(by_table[at], all_slots[at])
            if training:
                self._stats.missed_lookups += int(missed - np.count_nonzero(all_slots[at] < 0))
                self._stats.missed_rows += len(admission.rows)
        return pins, all_slots

    def _release_heads(self, slots: list[Array]) -> bool:
        """Release the heads of tables with too few other slots.

        Return False if no table had a head.
        """
        short = [table for table, found in zip(self.tables, slots, strict=True) if table.head and _has_gap([found])]
        for table in short:
            logger.warning(
                "table %r no longer keeps its first %d rows in slots, because the other %d slots "
                "are too few for the batches in flight; raise tables.%s.tiers.slots, or lower "
                "tiers.head",
                table.name,
                table.head,
                table.num_slots - table.head,
                table.name,
            )
            table.release_head()
        return bool(short)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._tidied is not None and self._tidied.done():
            self._tidied.result()

    def _exchange(self, wanted: list[Array], training: bool) -> list[Admission]:
        """Exchange rows.

        Reads of all tables are one transfer; evicted rows wait in their stores' pools until tidy()
        writes them.
        """
        admissions = [table.admit(rows) for table, rows in zip(self.tables, wanted, strict=True)]
        pairs = [*zip(self.tables, admissions, strict=True)]
        transfers().read([piece for table, each in pairs for piece in table.begin_fill(each, training)])
        for table, admission in pairs:
            table.write_back(admission)
        self._room = [max(len(each.victims), table.store.pool_size // 4) for table, each in pairs]
        return admissions

    def _tidy(self) -> None:
        """Reserve space in the pools for the rows that the next batch evicts, while no step
        waits.
        """
        with self._lock, self.failing():
            if self._failure is None:
                make_room_together([table.store for table in self.tables], self._room)

    def _unpin_released(self) -> None:
        while self.released:
            pins = self.released.popleft()
            if pins.epoch == self._epoch:
                for table, slots in zip(self.tables, pins.slots, strict=True):
                    table.unpin(slots)

    def _check(self, by_table: list[Array]) -> None:
        for table, ids in zip(self.tables, by_table, strict=True):
            if (bad := table.check(ids)) is not None:
                raise TierError(
                    f"id {bad} of table {table.name!r} is out of range: this rank has rows 0..{table.num_rows - 1} of it; check "
                    "the data with `inspect`"
                )

    def _too_few(self, by_table: list[Array], slots: list[Array]) -> TierError:
        table, ids = next(
            (table, ids) for table, ids, found in zip(self.tables, by_table, slots, strict=True) if _has_gap([found])
        )
        return TierError(
            f"table {entry_name(table.name)!r} has {table.num_slots:,} slots here, but the "
            "batches in flight need more: one has "
            f"{len(np.unique(ids)):,} distinct rows; raise tables.{entry_name(table.name)}.tiers.slots, or lower trainer.global_batch_size"
        )


class ShardRows:
    """The RowSource of a table's shard. It waits while the thread that prefetches moves rows."""

    def __init__(self, lookup: TieredLookup, table: TieredTable) -> None:
        self._lookup, self.table = lookup, table

    def read_rows(self, column: int, rows: Array) -> torch.Tensor:
        with self._lookup.quiet(), self._lookup.failing():
            return self.table.read_rows(column, rows)

    def write_rows(self, column: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        with self._lookup.quiet(), self._lookup.failing():
            self._lookup.void_pins()
            self.table.write_rows(column, rows, values)

    def first_weights(self) -> FirstWeights:
        return self.table.first_weights

    def changed_rows(self) -> Array:
        with self._lookup.quiet(), self._lookup.failing():
            return self.table.changed_rows()

    def begin(self, first_weights: FirstWeights) -> None:
        """Drop everything that was trained or loaded. Rows start with `first_weights`."""
        with self._lookup.quiet():
            self._lookup.void_pins()
            self.table.first_weights = first_weights
            self.table.forget()


def _has_gap(slots: Sequence[Array]) -> bool:
    return any(len(found) > 0 and found.min() < 0 for found in slots)
