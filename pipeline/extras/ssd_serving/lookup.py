"""Look up and pool rows of tables on SSD, with their most frequent rows cached in memory.

Each table has a region of one buffer: its hot rows, then space for the rows that a batch misses.
Several threads read missed rows from the mapped file into that space, so that their page faults
overlap. FBGEMM pools from the buffer: the same bytes in the same order as with all tables in
memory, so scores are equal bit for bit.

MADV_RANDOM keeps the kernel from reading ahead. Without it a miss reads 128 KiB instead of 4
(measured with a table larger than memory: 47 s per batch without it, 0.2 s with it).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage import storage
from pipeline.serving.scoring.lookup import (
    ALIGNMENT,
    RowPooler,
    ServedFeature,
    ServedTable,
    read_rows,
    replace_rows,
    stored_rows_of,
)

MIN_ROWS_A_THREAD = 4
# space for missed rows that is kept after a batch; a larger space is released
KEPT_ROOM_BYTES = 64 << 20
PAGE_BYTES = 4096
NUM_PROBES = 128
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it


@dataclass
class CacheCounts:
    """Counts since the tables were opened."""

    lookups: int = 0
    hits: int = 0


class SsdLookup:
    """Look up rows. heads[t]: how many first rows of table t are in memory.

    The remaining rows are not verified here.

    For one caller at a time.
    """

    def __init__(
        self, tables: list[ServedTable], features: list[ServedFeature], heads: list[int], io_threads: int
    ) -> None:
        self.tables, self.features = tables, features
        self.heads = [min(head, table.stored_rows) for head, table in zip(heads, tables, strict=True)]
        self.counts = CacheCounts()
        self._begins, size = [], 0
        for number, table in enumerate(tables):
            self._begins.append(size)
            users = max(1, sum(feature.table == number for feature in features))
            room = (table.stored_rows - self.heads[number]) * users
            size += -(-(self.heads[number] + room) * table.row_bytes // ALIGNMENT) * ALIGNMENT
        # As large as the tables, but only written parts take memory: the hot rows and the last
        # batch's misses.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, max(size, 1), flags=flags)
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pooler = RowPooler(tables, features, self._buffer, self._begins)
        self._files = [_map(table) for table in tables]
        self._regions = [self._region(number, table) for number, table in enumerate(tables)]
        for number, table in enumerate(tables):
            head = memoryview(self._memory)[self._begins[number] :][: self.heads[number] * table.row_bytes]
            read_rows(table, head)
        # The rows of each table after its head that patch() changed: ids (ascending) and rows.
        self._patched = [(torch.empty(0, dtype=torch.int64), file[:0].clone()) for file in self._files]
        self._threads = ThreadPoolExecutor(io_threads, thread_name_prefix="table-read")
        self._num_threads = io_threads

    @property
    def cache_bytes(self) -> int:
        return sum(head * table.row_bytes for head, table in zip(self.heads, self.tables, strict=True))

    def _region(self, number: int, table: ServedTable) -> torch.Tensor:
        """Return the region of a table, [rows of its region, row_bytes]."""
        end = self._begins[number + 1] if number + 1 < len(self._begins) else len(self._buffer)
        count = (end - self._begins[number]) // table.row_bytes
        begin = self._begins[number]
        return self._buffer[begin : begin + count * table.row_bytes].view(count, table.row_bytes)

    @property
    def patched_bytes(self) -> int:
        """Return the memory of changed rows in addition to the cache."""
        return sum(ids.nbytes + rows.nbytes for ids, rows in self._patched)

    def patch(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Overwrite hot rows in the cache; keep the other rows in memory from now on."""
        head = self.heads[table]
        is_hot = ids < head
        cold, cold_rows = ids[~is_hot], rows[~is_hot]
        earlier = before, old = self._patched[table]
        stays = ~torch.isin(before, cold)
        merged, order = torch.cat([before[stays], cold]).sort()
        patched = merged, torch.cat([old[stays], cold_rows])[order]
        put_back_hot = replace_rows(self._regions[table], ids[is_hot], rows[is_hot])
        self._patched[table] = patched

        def put_back() -> None:
            put_back_hot()
            self._patched[table] = earlier

        return put_back

    def stored(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        found = self._files[table][ids]
        is_hot = ids < self.heads[table]
        found[is_hot] = self._regions[table][ids[is_hot]]
        self._overlay(table, ids, found)
        return found

    def _overlay(self, table: int, ids: torch.Tensor, into: torch.Tensor) -> None:
        """Write patched rows among the rows `ids` over the file's rows, in `into` [n,
        row_bytes].
        """
        known, rows = self._patched[table]
        if len(known):
            places = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
            is_patched = known[places] == ids
            into[is_patched] = rows[places[is_patched]]

    def pooled(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Pool rows with the same bits as RamLookup."""
        rows = stored_rows_of(self.tables, self.features, values, offsets)
        batch = (len(offsets) - 1) // max(1, len(self.features))
        ends = offsets[::batch].tolist() if batch else [0] * (len(self.features) + 1)
        placed, reads = self._place_misses(rows, ends)
        self._read(reads)
        result = self._pooler.pool(torch.from_numpy(placed), offsets, weights)
        self._give_back_room(reads)
        return result

    def _place_misses(
        self, rows: NDArray[np.int64], ends: list[int]
    ) -> tuple[NDArray[np.int64], list[tuple[int, int, NDArray[np.int64]]]]:
        """Return each row's position in its region, and what to read: (table, first position,
        rows).
        """
        placed, reads = rows, []
        used = list(self.heads)
        for feature, begin, end in zip(self.features, ends, ends[1:], strict=False):
            part, head = rows[begin:end], self.heads[feature.table]
            is_miss = part >= head
            num_misses = int(np.count_nonzero(is_miss))
            self.counts.lookups += len(part)
            self.counts.hits += len(part) - num_misses
            if not num_misses:
                continue
            missed, positions = np.unique(part[is_miss], return_inverse=True)
            placed = rows.copy() if placed is rows else placed
            placed[begin:end][is_miss] = used[feature.table] + positions
            reads.append((feature.table, used[feature.table], missed))
            used[feature.table] += len(missed)
        return placed, reads

    def _read(self, reads: list[tuple[int, int, NDArray[np.int64]]]) -> None:
        total = sum(len(rows) for _, _, rows in reads)
        size = max(MIN_ROWS_A_THREAD, -(-total // self._num_threads))
        pieces = [
            (table, slot + begin, rows[begin : begin + size])
            for table, slot, rows in reads
            for begin in range(0, len(rows), size)
        ]
        for _ in self._threads.map(self._read_piece, pieces):
            pass

    def _read_piece(self, piece: tuple[int, int, NDArray[np.int64]]) -> None:
        table, slot, rows = piece
        into = self._regions[table][slot : slot + len(rows)]
        ids = torch.from_numpy(rows)
        torch.index_select(self._files[table], 0, ids, out=into)
        self._overlay(table, ids, into)

    def _give_back_room(self, reads: list[tuple[int, int, NDArray[np.int64]]]) -> None:
        """Release the space of an unusually large batch."""
        if sum(len(rows) * self.tables[table].row_bytes for table, _, rows in reads) <= KEPT_ROOM_BYTES:
            return
        for table, slot, rows in reads:
            begin = self._begins[table] + slot * self.tables[table].row_bytes
            end = begin + len(rows) * self.tables[table].row_bytes
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            if end - first >= mmap.PAGESIZE:
                self._memory.madvise(mmap.MADV_DONTNEED, first, (end - first) // mmap.PAGESIZE * mmap.PAGESIZE)


def _map(table: ServedTable) -> torch.Tensor:
    """Map the file as [stored_rows, row_bytes] uint8 without reading it.

    Raises ServingError if it is not local.
    """
    if not storage.is_local(table.path):
        raise ServingError(
            f"memory=ssd needs a local copy of the artifact, but {table.path} is remote: copy it "
            "to a local SSD, or use memory=ram"
        )
    with open(table.path, "rb") as file:
        if os.fstat(file.fileno()).st_size != table.size_bytes:
            raise ServingError(f"{table.path} does not have the {table.size_bytes:,} bytes of table {table.name!r}")
        # A private mapping, because torch has no read-only memory. Nothing writes to it.
        mapped = mmap.mmap(file.fileno(), table.size_bytes, access=mmap.ACCESS_COPY)
    mapped.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(table.stored_rows, table.row_bytes)


def forget_pages(path: str) -> None:
    """Remove the pages of a verified file from the page cache, so that hot pages of other files
    stay.
    """
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_latency_us(paths: list[str], seed: int = 0) -> float:
    """Return the 95th percentile of reads of random pages of these files, past the page cache if
    possible.
    """
    generator = np.random.default_rng(seed)
    sizes = np.array([os.path.getsize(path) // PAGE_BYTES for path in paths], dtype=np.float64)
    if not sizes.sum():
        return 0.0  # no file has a page, so all of them are in memory after a read
    taken = []
    with _opened(paths) as files, mmap.mmap(-1, PAGE_BYTES) as page:
        for file in generator.choice(len(paths), NUM_PROBES, p=sizes / sizes.sum()):
            offset = int(generator.integers(int(sizes[file]))) * PAGE_BYTES
            begun = time.perf_counter()
            os.preadv(files[file], [page], offset)
            taken.append(time.perf_counter() - begun)
    return float(np.percentile(taken, 95) * 1e6)


@contextlib.contextmanager
def _opened(paths: list[str]) -> Iterator[list[int]]:
    files: list[int] = []
    try:
        for path in paths:
            try:
                files.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
            except OSError:  # a file system without O_DIRECT, such as tmpfs
                forget_pages(path)
                files.append(os.open(path, os.O_RDONLY))
        yield files
    finally:
        for file in files:
            os.close(file)
