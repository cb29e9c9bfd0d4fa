"""Time what the host itself takes: dispatching operations, calling modules, reading files and decoding rows."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from pipeline.config.reader import ReaderConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, ShardFile, SparseFeature, Split
from pipeline.data.read.reader import ShardReader
from pipeline.planner.step_time.measurements import median_and_spread
from pipeline.training.calibration.clock import Bench, time_call

FILE_BYTES, BLOCK_BYTES, PAGE_BYTES = 64 << 20, 1 << 20, 4096
WRITES = 3
READ_ROWS, ROWS_A_GROUP, NUM_DENSE = 131_072, 16_384, 13
SPARSE_COLUMNS = (8, 26)
LIKE_PREPARE = {"compression": "lz4", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}


def measure_host(bench: Bench) -> None:
    """Rows `host`: microseconds of an operation on one number, of a module's call, and of an operation with its backward."""
    one, identity = torch.ones(1), nn.Identity()
    weight = torch.ones(1, requires_grad=True)
    bench.time("host", {"what": "operation"}, lambda: torch.add(one, one))
    bench.time("host", {"what": "module"}, lambda: identity(one))
    bench.time("host", {"what": "operation_and_backward"}, lambda: (weight * 2).backward())


def measure_storage(bench: Bench, folder: str | None = None) -> None:
    """Rows `disk` (a file written, a block in order, a page at random, neither from memory) and `reader` (a batch of rows decoded)."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        _measure_disk(bench, Path(name) / "block")
        for columns in SPARSE_COLUMNS:
            _measure_reader(bench, Path(name), columns)


def _measure_disk(bench: Bench, path: Path) -> None:
    content = os.urandom(BLOCK_BYTES) * (FILE_BYTES // BLOCK_BYTES)

    def write() -> None:
        with path.open("wb") as written:
            written.write(content)
            os.fsync(written.fileno())

    seconds, spread = _time_some(write, WRITES)
    bench.add("disk", {"what": "write", "bytes": FILE_BYTES}, seconds, spread)
    file = os.open(path, os.O_RDONLY)
    try:
        generator = np.random.default_rng(0)
        for what, size in (("block", BLOCK_BYTES), ("page", PAGE_BYTES)):
            offsets = iter(generator.permutation(FILE_BYTES // size) * size)

            def read(size: int = size, offsets: Iterator[int] = offsets) -> None:
                begin = int(next(offsets))
                os.posix_fadvise(file, begin, size, os.POSIX_FADV_DONTNEED)
                os.pread(file, size, begin)

            seconds, spread = _time_some(read, 40)
            bench.add("disk", {"what": what, "bytes": size}, seconds, spread)
    finally:
        os.close(file)


def _time_some(call: Callable[[], None], count: int) -> tuple[float, float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median_and_spread(times)


def _measure_reader(bench: Bench, folder: Path, columns: int) -> None:
    """Seconds of a row, from decoding to the batch, of a file that is in memory."""
    dataset = _write_shard(folder, columns)
    reader = ShardReader(
        str(folder), dataset, "train", global_batch_size=2048, rank=0, world_size=1, config=ReaderConfig(), seed=0
    )

    def read() -> None:
        for _ in reader.batches(0):
            pass

    seconds, spread = time_call(read, 0.2)
    rows = reader.steps_per_epoch * 2048
    bench.add("reader", {"sparse": columns, "dense": NUM_DENSE}, seconds / rows, spread)


def _write_shard(folder: Path, columns: int) -> Dataset:
    generator = np.random.default_rng(0)
    dense, sparse = [f"int_{i}" for i in range(NUM_DENSE)], [f"cat_{i}" for i in range(columns)]
    values: dict[str, np.ndarray[tuple[int], np.dtype[np.generic]]] = {
        "label": (generator.random(READ_ROWS) < 0.25).astype(np.int8)
    }
    values |= {name: generator.random(READ_ROWS).astype(np.float32) for name in dense}
    values |= {name: (generator.random(READ_ROWS) ** 4 * 100_000).astype(np.int32) for name in sparse}
    path = folder / f"part-{columns:05d}.parquet"
    pq.write_table(pa.table(values), path, row_group_size=ROWS_A_GROUP, **LIKE_PREPARE)
    sizes = [ROWS_A_GROUP] * (READ_ROWS // ROWS_A_GROUP)
    features = [SparseFeature(name, 100_000, False, 1.0, FrequencyCurve([1], [1.0])) for name in sparse]
    split = Split([ShardFile(path.name, READ_ROWS, path.stat().st_size, "", sizes)], READ_ROWS, 0)
    return Dataset("calibration", "label", dense, features, {"train": split}, READ_ROWS, READ_ROWS, 0, "log1p")
