"""Store the records of a table's shard in a sparse file on a local SSD, which disappears with the
process.

The file has no name (O_TMPFILE), so no run can find the file of another run, and a killed run
leaves no file. Only checkpoints are kept. Records that were never stored use no space. The file
bypasses the page cache (O_DIRECT) if the file system supports it.

Stored records wait in a pool in memory until many of one region can be written together, to the
region's emptiest segment. So an SSD and the processor handle a few large writes instead of one for
each row. A row that is read for training is no longer stored, because it will change; its place
becomes free.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pipeline.extras.tiers.forecast import SLOTS_A_POOLED_ROW
from pipeline.extras.tiers.kernels import record as record_kernels
from pipeline.extras.tiers.transfers import PIECE_BYTES, Piece, transfers
from pipeline.runtime.errors import TierError
from pipeline.runtime.logs import get_logger

BLOCK_BYTES = 4096
SECTOR_BYTES = 512  # the smallest read of most devices
REGION_BYTES = 4 << 20  # of the records of neighbouring rows that share places
SEGMENT_BYTES = 64 << 10  # the largest write
SPARE_PLACES = 0.25  # of the rows of a region; more places mean fewer rewritten bytes
GAP_BYTES = 4096  # a smaller gap between two records is read with them
MIN_POOL = 16  # records
READS, READ_BYTES, WRITES, WRITTEN_BYTES, WRITTEN_ROWS = range(5)
logger = get_logger(__name__)
Array = np.ndarray[Any, Any]
# weights, states, squares: [slots, numbers per row], 0 wide if there are none
Columns = Sequence[Array]


class RowStore:
    """Store the records of `num_rows` rows, each with sum(widths) float32 numbers. name: the
    table's name, for errors.

    pool_rows: the maximum number of records that wait in memory.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        num_rows: int,
        widths: Sequence[int],
        pool_rows: int = MIN_POOL,
        region_bytes: int = REGION_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.folder, self.name, self.num_rows = folder, name, num_rows
        self._widths = list(widths)
        self.record = sum(widths)
        self._layout = _layout(num_rows, 4 * self.record, region_bytes, segment_bytes)
        rows_a_region, places_a_region, _, _rows_a_unit, bytes_a_region, _, _, segments = self._layout
        self._num_regions = -(-num_rows // rows_a_region)
        self._num_bits, self._num_segments = self._num_regions * places_a_region, self._num_regions * segments
        self.size_bytes = self._num_regions * bytes_a_region
        self._fd, self.is_direct, self._sector = _open(folder, name)
        self._pool_rows = np.empty(pool_rows, np.int64)
        self._pool = np.empty((pool_rows, self.record), np.float32)
        self._pool_buckets = np.empty(1 << (2 * pool_rows - 1).bit_length(), np.int32)
        self._free = np.empty(1 + pool_rows, np.int64)
        self.counts = np.zeros(5, np.int64)
        self.forget()

    @property
    def pool_size(self) -> int:
        """Return how many records the pool can hold."""
        return len(self._pool_rows)

    def forget(self) -> None:
        """Reset the store to its initial state without records."""
        # New arrays, because untouched arrays take no memory.
        self._place = np.zeros(self.num_rows, np.uint16)
        self._taken = np.zeros(self._num_bits // 8 + 1, np.uint8)
        self._num_taken = np.zeros(self._num_segments, np.uint16)
        self._waiting = np.zeros(self._num_regions, np.int32)
        self._pool_rows[:], self._pool_buckets[:] = -1, -1
        self._free[0], self._free[1:] = len(self._pool_rows), np.arange(len(self._pool_rows))
        for size in (0, self.size_bytes):
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                self._check("emptied", error.errno or -1)

    def stored_bits(self) -> Array:
        """Return a bit for each row, in the format of numpy.packbits(bitorder="little")."""
        bits = np.zeros(self.num_rows // 8 + 1, np.uint8)
        record_kernels.stored_bits(self._place, bits)
        return bits

    def are_stored(self, rows: Array) -> Array:
        """Return [n] bool: whether each row is stored."""
        found: Array = self._place[rows] != 0
        return found

    def load(self, rows: Array, slots: Array, columns: Columns, *, take: bool = False) -> None:
        """Do the same as begin_load, and read the records. Raises TierError."""
        transfers().read(self.begin_load(rows, slots, columns, take=take))

    def begin_load(
        self, rows: Array, slots: Array, columns: Columns, *, take: bool = False, begin: int = 0
    ) -> list[Piece]:
        """Return what to read so that `slots` get the records of `rows` (distinct and stored).

        Pooled records are copied at once.

        take: remove the rows from the store after the read, before other rows are stored. begin:
        the position in a record of the first number of the columns.
        """
        offsets = np.empty(len(rows), np.int64)
        record_kernels.locate(rows, self._place, self._layout, offsets)
        pooled = np.flatnonzero(offsets < 0)
        if len(pooled):
            at = np.empty(len(pooled), np.int64)
            record_kernels.find_pooled(rows[pooled], self._pool_buckets, self._pool_rows, at)
            record_kernels.scatter(self._pool.reshape(-1), at * self.record + begin, slots[pooled], *columns)
        order = np.argsort(offsets, kind="stable")[len(pooled) :]
        pieces = list(self._reads(offsets[order], slots[order], columns, begin))
        if take:
            self.leave(rows)
        return pieces

    def _reads(self, offsets: Array, slots: Array, columns: Columns, begin: int) -> Iterator[Piece]:
        first = 0
        span_offsets, span_sizes, at = (np.empty(len(offsets), np.int64) for _ in range(3))
        while first < len(offsets):
            after, num_spans, num_bytes = record_kernels.plan_reads(
                offsets, first, 4 * self.record, self._sector, GAP_BYTES, PIECE_BYTES, span_offsets, span_sizes, at
            )
            self.counts[READS] += num_spans
            self.counts[READ_BYTES] += num_bytes
            own, own_slots = at[first:after] + begin, slots[first:after]

            def use(numbers: Array, own: Array = own, own_slots: Array = own_slots) -> None:
                record_kernels.scatter(numbers, own, own_slots, *columns)

            spans = (span_offsets[:num_spans].copy(), span_sizes[:num_spans].copy())
            yield Piece(self._fd, *spans, use, partial(self._check, "read"))
            first = after

    def leave(self, rows: Array) -> None:
        """Remove distinct rows from the store."""
        record_kernels.leave(
            rows, self._place, self._taken, self._num_taken, self._layout, self._pool_buckets, self._pool_rows, self._free,
            self._waiting,
        )  # fmt: skip

    def store(self, rows: Array, records: Array) -> None:
        """Store records [n, numbers] of `rows`, ascending and distinct, in the pool or in the file.

        Raises TierError.
        """
        if len(rows) > len(self._pool_rows):
            self.leave(rows)
            for piece in self._writes(rows, records):
                transfers().write([piece])
            return
        first = 0
        while True:
            first = record_kernels.pool(
                rows, first, records, self._place, self._taken, self._num_taken, self._layout, self._pool_buckets,
                self._pool_rows, self._pool, self._free, self._waiting,
            )  # fmt: skip
            if first == len(rows):
                return
            self.make_room(len(rows) - first)

    def make_room(self, least: int) -> None:
        """Write waiting records until the pool has space for `least` records. Raises TierError."""
        make_room_together([self], [least])

    def begin_room(self, least: int) -> list[Piece]:
        """Return what to write so that the pool has space for `least` records.

        The pool drops these records at once.
        """
        least = min(least, len(self._pool_rows)) - int(self._free[0])
        if least <= 0:
            return []
        rows = np.empty(len(self._pool_rows), np.int64)
        count = record_kernels.choose_regions(self._waiting, least, self._layout[0], self._pool_rows, rows)
        rows = np.sort(rows[:count])
        at = np.empty(count, np.int64)
        record_kernels.find_pooled(rows, self._pool_buckets, self._pool_rows, at)
        records = self._pool[at]
        self.leave(rows)
        return list(self._writes(rows, records))

    def _writes(self, rows: Array, records: Array) -> Iterator[Piece]:
        """Yield the writes.

        Each write must be done before the next one is requested, or all of them in their order.
        """
        first = 0
        span_offsets, span_sizes, at = (np.empty(len(rows), np.int64) for _ in range(3))
        is_read = np.empty(len(rows), np.bool_)
        while first < len(rows):
            after, num_spans, num_bytes = record_kernels.plan_writes(
                rows, first, self._layout, self._place, self._taken, self._num_taken, PIECE_BYTES, span_offsets, span_sizes,
                is_read, at,
            )  # fmt: skip
            read = is_read[:num_spans].copy()
            self.counts[READS] += read.sum()
            self.counts[READ_BYTES] += span_sizes[:num_spans][read].sum()
            self.counts[WRITES] += num_spans
            self.counts[WRITTEN_BYTES] += num_bytes
            self.counts[WRITTEN_ROWS] += after - first
            own, own_records = at[first:after].copy(), records[first:after]

            def use(numbers: Array, own: Array = own, own_records: Array = own_records) -> None:
                record_kernels.fill_records(numbers, own, own_records)

            spans = (span_offsets[:num_spans].copy(), span_sizes[:num_spans].copy())
            yield Piece(self._fd, *spans, use, partial(self._check, "written"), read)
            first = after

    def read_column(self, column: int, rows: Array) -> tuple[Array, Array]:
        """Return [n, width] of rows [n], and [n] bool: whether each row is stored. Values of other
        rows are undefined.

        Raises TierError.
        """
        values, none = np.empty((len(rows), self._widths[column]), np.float32), np.empty((len(rows), 0), np.float32)
        stored = self.are_stored(rows)
        begin = sum(self._widths[:column])
        transfers().read(self.begin_load(rows[stored], np.flatnonzero(stored), (values, none, none), begin=begin))
        return values, stored

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def _check(self, what: str, error: int) -> None:
        if error:
            said = os.strerror(error) if error > 0 else "the device accepted no bytes"
            raise TierError(
                f"rows of table {self.name!r} could not be {what} in {self.folder}: {said}; its store there may grow to "
                f"{self.size_bytes / 2**30:.2f} GiB. Free space or choose another SSD by "
                "sharding.tier_folder, and run the same command again to resume from the last "
                "checkpoint, which is intact"
            )


def make_room_together(stores: Sequence[RowStore], least: Sequence[int]) -> None:
    """Write waiting records of all stores at once until each pool has this much space.

    Raises TierError.
    """
    pieces = [piece for store, room in zip(stores, least, strict=True) for piece in store.begin_room(room)]
    transfers().write(pieces)


def pool_rows(num_slots: int) -> int:
    """Return how many records wait in memory for this many slots."""
    return max(MIN_POOL, num_slots // SLOTS_A_POOLED_ROW)


def _layout(num_rows: int, record_bytes: int, region_bytes: int, segment_bytes: int) -> tuple[int, ...]:
    """Return the layout that the record kernels describe."""
    rows_a_unit = max(1, BLOCK_BYTES // record_bytes)
    unit_bytes = BLOCK_BYTES if rows_a_unit > 1 else -(-record_bytes // BLOCK_BYTES) * BLOCK_BYTES
    places_a_segment = max(1, segment_bytes // unit_bytes) * rows_a_unit
    most_segments = record_kernels.MAX_PLACES // places_a_segment
    most_rows = int(most_segments * places_a_segment / (1 + SPARE_PLACES))
    rows_a_region = max(1, min(num_rows, region_bytes // record_bytes, most_rows))
    segments = min(most_segments, -(-int(rows_a_region * (1 + SPARE_PLACES)) // places_a_segment))
    places = segments * places_a_segment
    return (
        rows_a_region, places, places_a_segment, rows_a_unit, places // rows_a_unit * unit_bytes, unit_bytes, record_bytes,
        segments,
    )  # fmt: skip


def _open(folder: str, name: str) -> tuple[int, bool, int]:
    """Open a file without a name in `folder`.

    Return whether it bypasses the page cache, and the smallest write.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        for flags in (os.O_DIRECT, 0):
            try:
                fd = _open_unnamed(folder, flags)
            except OSError:
                if not flags:
                    raise
                continue
            if not flags or _is_usable(fd):
                if not flags:
                    logger.warning("%s does not support O_DIRECT: rows of table %r use the page cache", folder, name)
                return fd, bool(flags), (_sector_bytes(fd) if flags else 4)
            os.close(fd)
    except OSError as error:
        raise TierError(
            f"table {name!r} cannot have a row store in {folder}: {error.strerror}; set sharding.tier_folder to a folder "
            "on a local SSD"
        ) from None
    raise AssertionError


def _open_unnamed(folder: str, flags: int) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except OSError:  # a file system without O_TMPFILE
        handle, path = tempfile.mkstemp(dir=folder)
        os.close(handle)
        try:
            return os.open(path, os.O_RDWR | flags)
        finally:
            os.unlink(path)


def _sector_bytes(fd: int) -> int:
    """Return the sector size of the device. It is found by writing a part of a block."""
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as page, memoryview(page) as whole, whole[:SECTOR_BYTES] as part:
            os.pwritev(fd, [whole], 0)
            os.pwritev(fd, [part], SECTOR_BYTES)
    except OSError:
        return BLOCK_BYTES
    finally:
        os.ftruncate(fd, 0)
    return SECTOR_BYTES


def _is_usable(fd: int) -> bool:
    """Return whether reads work. Some file systems accept O_DIRECT and then refuse to read."""
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        return False
    return True
