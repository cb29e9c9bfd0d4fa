"""Measure how many rows a second a folder's SSD brings in and takes back, by the store's own reads and writes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pipeline.sharding.tiers.row_store import RowStore

STORE_BYTES = 128 << 20
ROWS_AT_ONCE, ROUNDS = 2048, 4


@dataclass(frozen=True)
class SsdSpeed:
    """Rows a second, scattered over a file: loads read a block each; stores read it, change it and write it."""

    loads_per_s: float
    stores_per_s: float


def measure(folder: str, record: int, io_threads: int = 16) -> SsdSpeed:
    """`record`: float32 numbers a row. Takes a second or two, and 128 MiB that are gone after it. Raises TierError."""
    num_rows = max(STORE_BYTES // (4 * record), 4 * ROWS_AT_ONCE)
    store = RowStore(folder, "probe", num_rows, (record, 0, 0), io_threads)
    for first in range(0, num_rows, 1 << 14):
        rows = np.arange(first, min(first + (1 << 14), num_rows))
        store.finish(store.begin_store(rows, np.ones((len(rows), record), np.float32)))
        store.mark_written(rows)
    rng = np.random.default_rng(0)
    columns = [np.empty((ROWS_AT_ONCE, width), np.float32) for width in (record, 0, 0)]
    records, slots = np.ones((ROWS_AT_ONCE, record), np.float32), np.arange(ROWS_AT_ONCE)
    seconds = [0.0, 0.0]
    for _ in range(ROUNDS):
        rows = np.sort(rng.choice(num_rows, ROWS_AT_ONCE, replace=False))
        began = time.perf_counter()
        store.finish(store.begin_load(rows, slots, columns))
        between = time.perf_counter()
        store.finish(store.begin_store(rows, records))
        seconds[0] += between - began
        seconds[1] += time.perf_counter() - between
    store.close()
    loads, stores = (ROUNDS * ROWS_AT_ONCE / max(each, 1e-9) for each in seconds)
    return SsdSpeed(loads, stores)
