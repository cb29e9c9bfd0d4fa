"""Measure directly what small trainings do not show: peaks, copies, exchanges, the disk and the
reader.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, ShardFile, SparseFeature, Split
from pipeline.data.read.reader import ShardReader
from pipeline.devices.cpu.host_exchange import FLAGS, HostExchange, connect
from pipeline.extras.step_time.calibration import median_and_spread
from pipeline.runtime.process.distributed import DistributedContext

PRODUCT_SIZE, COPY_BYTES, FILE_BYTES = 1024, 16 << 20, 64 << 20
SMALL_BYTES, LARGE_BYTES = 512, 2 << 20  # of an all-to-all
READ_ROWS, ROWS_A_GROUP, BATCH, NUM_DENSE = 131_072, 16_384, 2048, 13
SPARSE_COLUMNS = (8, 26)
LIKE_PREPARE = {
    "compression": "lz4",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}
REPEATS = 8


def seconds_of(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of some calls, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median_and_spread(times[1:])[0]


def measure_host() -> dict[str, object]:
    """Return the fields of Speeds that one rank measures."""
    square = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE)
    half = square.bfloat16()
    into, source = torch.empty(COPY_BYTES // 4), torch.ones(COPY_BYTES // 4)
    flops = 2 * PRODUCT_SIZE**3 / 1e12
    with tempfile.TemporaryDirectory() as folder:
        return {
            "tflops_fp32": round(flops / seconds_of(lambda: square @ square), 4),
            "tflops_bf16": round(flops / seconds_of(lambda: half @ half), 4),
            "copy_gb_per_s": round(2 * COPY_BYTES / seconds_of(lambda: into.copy_(source)) / 1e9, 2),
            "write_gb_per_s": round(FILE_BYTES / _seconds_of_write(Path(folder)) / 1e9, 4),
            "reader_us": {
                str(columns + NUM_DENSE): round(_row_us(Path(folder), columns), 4) for columns in SPARSE_COLUMNS
            },
        }


def measure_exchange(context: DistributedContext) -> dict[str, float]:
    """Collective: return GB/s and microseconds of an all-to-all in shared memory."""
    exchange = connect(context, 60.0)
    if exchange is None:
        return {}
    ranks = context.world_size
    small, large = (_seconds_of_exchange(exchange, size, ranks) for size in (SMALL_BYTES, LARGE_BYTES))
    return {
        "exchange_gb_per_s": round(LARGE_BYTES * (ranks - 1) / ranks / large / 1e9, 3),
        "exchange_us": round(1e6 * small, 1),
    }


def _seconds_of_exchange(exchange: HostExchange, num_bytes: int, ranks: int) -> float:
    part = torch.ones(max(num_bytes // 4 // ranks, 1))

    def exchange_parts() -> None:
        number = exchange.post(FLAGS, [[part]] * ranks)
        for message in exchange.take(FLAGS, number):
            if message is not None:
                message.read(part.shape, part.dtype)

    return seconds_of(exchange_parts, 4 * REPEATS)


def _seconds_of_write(folder: Path) -> float:
    content = os.urandom(1 << 20) * (FILE_BYTES >> 20)

    def write() -> None:
        with (folder / "block").open("wb") as written:
            written.write(content)
            os.fsync(written.fileno())

    return seconds_of(write, 2)


def _row_us(folder: Path, columns: int) -> float:
    """Return the microseconds per row from decoding to the finished batch, for a file in the page cache."""
    dataset = _write_shard(folder, columns)
    reader = ShardReader(
        str(folder), dataset, "train", global_batch_size=BATCH, rank=0, world_size=1, config=ReaderConfig(), seed=0
    )
    rows = reader.steps_per_epoch * BATCH
    return 1e6 * seconds_of(lambda: sum(1 for _ in reader.batches(0)), 2) / rows


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
