"""Measure how many rows per second an SSD loads and stores, with the store's reads and writes.

Also measure the cost for a concurrent step: with few cores, the thread that reads, and the system's
work for reading, slow the step down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.extras.tiers.row_store import RowStore, pool_rows

STORE_BYTES = 128 << 20
ROWS_AT_ONCE, MIN_AT_ONCE = 2048, 64
WARM_UP, ROUNDS = 8, 24
COMPUTE_ROUNDS = 200
SLOTS = 0.2  # of the rows; the store has their pool


@dataclass(frozen=True)
class SsdSpeed:
    """Hold speeds in rows per second. The rows are scattered over a file whose records are all
    stored.

    slowdown: how much longer a thread computes while rows are loaded and stored all the time.
    spread: the relative standard deviation of the time for a step's rows.
    """

    loads_per_s: float
    stores_per_s: float
    slowdown: float = 1.0
    spread: float = 0.0


def measure(folder: str, record: int, rows_at_once: int = ROWS_AT_ONCE) -> SsdSpeed:
    """Measure the SSD. record: float32 numbers per row. rows_at_once: rows per step. Raises
    TierError.

    Takes a second or two, and 160 MiB of disk that are freed afterwards.
    """
    num_rows = STORE_BYTES // (4 * record)
    at_once = max(min(rows_at_once, num_rows // 8), MIN_AT_ONCE)
    store = RowStore(folder, "probe", num_rows, (record, 0, 0), pool_rows(int(SLOTS * num_rows)))
    for first in range(0, num_rows, 1 << 14):
        rows = np.arange(first, min(first + (1 << 14), num_rows))
        store.store(rows, np.ones((len(rows), record), np.float32))
    rng = np.random.default_rng(0)
    columns = [np.empty((at_once, width), np.float32) for width in (record, 0, 0)]
    seconds: list[tuple[float, float]] = []

    def move() -> None:
        rows = np.unique(rng.integers(0, num_rows, at_once))
        began = time.perf_counter()
        store.load(rows, np.arange(len(rows)), columns, take=True)
        between = time.perf_counter()
        store.store(rows, columns[0][: len(rows)])
        store.make_room(min(at_once, store.pool_size))
        seconds.append(((between - began) / len(rows), (time.perf_counter() - between) / len(rows)))

    for _ in range(WARM_UP + ROUNDS):
        move()
    found = np.array(seconds[WARM_UP:])
    loads, stores = (float(1 / max(each, 1e-12)) for each in found.mean(axis=0))
    times = found.sum(axis=1)
    slowdown = _slowdown(move)
    store.close()
    return SsdSpeed(loads, stores, slowdown, float(times.std() / times.mean()))


def _slowdown(move: Callable[[], None]) -> float:
    """Return the slowdown of a thread that computes while another thread calls `move`
    repeatedly.
    """
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
