"""Keep the records of a table's shard in a sparse file on a local SSD that vanishes with the process.

The file has no name (O_TMPFILE), so no run can find another's, and a killed one leaves nothing: checkpoints are what lasts.
Records that were never written take no space, and reading them is the caller's error. The page cache is passed by (O_DIRECT)
where the file system can.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.runtime.errors import TierError
from pipeline.runtime.logs import get_logger
from pipeline.sharding.kernels import record_kernels

BLOCK_BYTES = 4096
BUFFER_BYTES = 1 << 19  # of a thread: the longest read or write
SECTOR_BYTES = 512  # the least that most devices write
MOST_PADDED = 1.34  # times its size, for a record to be whole sectors
LEAST_ROWS = 8  # of a thread's share
READS, READ_BYTES, WRITES, WRITTEN_BYTES, WRITTEN_ROWS = range(5)
logger = get_logger(__name__)
Array = np.ndarray[Any, Any]
Columns = Sequence[Array]  # weights, states, squares: [slots, numbers a row], 0 wide where there are none


@cache
def io_pool(num_threads: int) -> ThreadPoolExecutor:
    """Its threads wait for the SSD most of the time: more of them than cores."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="tier-io")


class RowStore:
    """Records of `num_rows` rows, each of sum(widths) float32 numbers; `name` is of the table, for errors."""

    def __init__(self, folder: str, name: str, num_rows: int, widths: Sequence[int], num_threads: int) -> None:
        self.folder, self.name, self.num_rows = folder, name, num_rows
        self._widths, self._threads = list(widths), num_threads
        self.record = sum(widths)
        self._fd, self.is_direct, sector_bytes = _open(folder, name)
        stride_bytes = 4 * self.record
        padded = -(-stride_bytes // sector_bytes) * sector_bytes
        if padded <= MOST_PADDED * stride_bytes:
            stride_bytes = padded
        self.rows_a_unit = max(1, BLOCK_BYTES // stride_bytes)
        unit_bytes = -(-stride_bytes // BLOCK_BYTES) * BLOCK_BYTES if self.rows_a_unit == 1 else BLOCK_BYTES
        self._layout = (self.rows_a_unit, unit_bytes // 4, self.record, stride_bytes // 4, sector_bytes // 4)
        self._buffer_bytes = max(BUFFER_BYTES, unit_bytes)
        self.size_bytes = -(-num_rows // self.rows_a_unit) * unit_bytes
        self._written = np.zeros(num_rows // 8 + 1, np.uint8)
        self.counts = np.zeros(5, np.int64)
        self._local = threading.local()

    def forget(self) -> None:
        """As if no record had been written."""
        self._written[:] = 0

    def written_bits(self) -> Array:
        """A copy: a bit for each row, as numpy.packbits(bitorder="little") has them."""
        return self._written.copy()

    def are_written(self, rows: Array) -> Array:
        """[n] bool."""
        result = np.empty(len(rows), np.bool_)
        record_kernels.are_set(self._written, rows, result)
        return result

    def begin_load(self, rows: Array, slots: Array, columns: Columns) -> list[Future[Array]]:
        """Fill `slots` from the records of `rows`, ascending and written; finish() waits for it."""
        pool = io_pool(self._threads)
        return [pool.submit(self._load, rows, slots, *span, columns) for span in self._shares(rows)]

    def begin_store(self, rows: Array, records: Array) -> list[Future[Array]]:
        """Write records [n, numbers] of `rows`, ascending; they count as written after finish() and mark_written()."""
        pool = io_pool(self._threads)
        return [pool.submit(self._store, rows, records, *span) for span in self._shares(rows)]

    def finish(self, futures: Iterable[Future[Array]]) -> None:
        """Raises TierError for the first that failed."""
        for future in futures:
            self.counts += future.result()

    def mark_written(self, rows: Array) -> None:
        record_kernels.set_bits(self._written, rows)

    def read_column(self, column: int, first: int, count: int) -> tuple[Array, Array]:
        """[count, width] of rows `first` and on, and which of them are written; the others' values are undefined."""
        begin = sum(self._widths[:column])
        values = np.empty((count, self._widths[column]), np.float32)
        error = record_kernels.read_range(
            self._fd, first, count, self._layout, begin, begin + self._widths[column], self._written, self._buffer(), values
        )  # fmt: skip
        self._check(error, "read")
        return values, self.are_written(np.arange(first, first + count))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def _shares(self, rows: Array) -> list[tuple[int, int]]:
        """Spans of rows for threads; no unit is in two."""
        num_shares = max(1, min(self._threads, len(rows) // LEAST_ROWS))
        bounds = [0]
        for share in range(1, num_shares):
            bound = max(len(rows) * share // num_shares, bounds[-1])
            while 0 < bound < len(rows) and rows[bound] // self.rows_a_unit == rows[bound - 1] // self.rows_a_unit:
                bound += 1
            bounds.append(bound)
        bounds.append(len(rows))
        return [(begin, end) for begin, end in pairwise(bounds) if begin < end]

    def _load(self, rows: Array, slots: Array, begin: int, end: int, columns: Columns) -> Array:
        counts, (weights, states, squares) = np.zeros(5, np.int64), columns
        error = record_kernels.load(
            self._fd, rows, slots, begin, end, self._layout, self._buffer(), weights, states, squares, counts
        )
        self._check(error, "read")
        return counts

    def _store(self, rows: Array, records: Array, begin: int, end: int) -> Array:
        counts = np.zeros(5, np.int64)
        error = record_kernels.store(
            self._fd, rows, records, begin, end, self._layout, self._buffer(), self._written, self.num_rows, counts
        )
        self._check(error, "written")
        return counts

    def _buffer(self) -> Array:
        """This thread's, which begins with a page."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.frombuffer(mmap.mmap(-1, self._buffer_bytes), np.float32)
        buffer: Array = self._local.buffer
        return buffer

    def _check(self, error: int, what: str) -> None:
        if error:
            said = os.strerror(error) if error > 0 else "the device took no bytes"
            raise TierError(
                f"rows of table {self.name!r} could not be {what} in {self.folder}: {said}; its store there may grow to "
                f"{self.size_bytes / 2**30:.2f} GiB. Free space or choose another SSD by sharding.tier_folder, and run the same "
                "command again: it goes on from the last checkpoint, which is intact"
            )


def _open(folder: str, name: str) -> tuple[int, bool, int]:
    """A file without a name in `folder`, whether it passes by the page cache, and the least bytes that can be written."""
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
                    logger.warning("%s has no O_DIRECT: rows of table %r go through the page cache", folder, name)
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
    """Of the device, by a write of a part of a block."""
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
    """Some file systems take O_DIRECT and then refuse to read."""
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        return False
    return True
