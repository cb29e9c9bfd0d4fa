"""Measure how many rows a second a folder's SSD brings in and takes back, by the store's own reads and writes.

And what they cost a step that computes beside them: where cores are few, the threads that read take some of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.sharding.tiers.row_store import RowStore
from pipeline.sharding.tiers.settings import IO_THREADS

STORE_BYTES = 128 << 20
ROWS_AT_ONCE, ROUNDS = 2048, 4
COMPUTE_ROUNDS = 200


@dataclass(frozen=True)
class SsdSpeed:
    """Rows a second, scattered over a file: loads read a block each; stores write one, or the sectors of a record.

    slowdown: how much longer a thread takes that computes while rows are loaded and stored all the time.
    """

    loads_per_s: float
    stores_per_s: float
    slowdown: float = 1.0


def measure(folder: str, record: int, io_threads: int = IO_THREADS) -> SsdSpeed:
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

    def move() -> None:
        rows = np.sort(rng.choice(num_rows, ROWS_AT_ONCE, replace=False))
        began = time.perf_counter()
        store.finish(store.begin_load(rows, slots, columns))
        between = time.perf_counter()
        store.finish(store.begin_store(rows, records))
        seconds[0] += between - began
        seconds[1] += time.perf_counter() - between

    for _ in range(ROUNDS):
        move()
    loads, stores = (ROUNDS * ROWS_AT_ONCE / max(each, 1e-9) for each in seconds)
    slowdown = _slowdown(move)
    store.close()
    return SsdSpeed(loads, stores, slowdown)


def _slowdown(move: Callable[[], None]) -> float:
    """Of a thread that computes, while another calls `move` again and again."""
    values = np.ones(1 << 20, np.float32)

    def compute() -> float:
        began = time.perf_counter()
        for _ in range(COMPUTE_ROUNDS):
            values.sum(dtype=np.float32)
            np.multiply(values, 1.0, out=values)
        return time.perf_counter() - began

    compute()
    alone = min(compute() for _ in range(3))
    ended = threading.Event()

    def keep_moving() -> None:
        while not ended.is_set():
            move()

    thread = threading.Thread(target=keep_moving)
    thread.start()
    try:
        beside = sum(compute() for _ in range(3)) / 3
    finally:
        ended.set()
        thread.join()
    return max(1.0, beside / alone)
