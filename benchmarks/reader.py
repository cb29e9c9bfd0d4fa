"""Measure rows per second of the reader alone, and how long a training step waits for it:

    python -m benchmarks.reader [--rows 1000000] [--step-ms 87] [--output reader.json]

On generated shards of Criteo's shape (13 dense, 26 one-hot features), in one process and in rounds that take each
measurement once, beside two peers on the same files: pyarrow decoding them and nothing else (the floor), and a
torch DataLoader over an IterableDataset that turns pyarrow batches into KeyedJaggedTensors, in file order. The row
`mlperf multi-hot` draws DLRMv2's 214 ids a sample on the fly. The reader decodes a row group twice where two streams
share it: 79 for the 64 of a million rows, which matters less the larger the data set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, ShardFile, SparseFeature, Split
from pipeline.data.read.reader import ShardReader

NUM_DENSE = 13
# MLPerf DLRMv2: rows a table and ids a sample
CARDINALITIES = [
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
]  # fmt: skip
MULTI_HOT_SIZES = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
DENSE = [f"int_{i}" for i in range(NUM_DENSE)]
SPARSE = [f"cat_{i}" for i in range(len(CARDINALITIES))]
COLUMNS = ["label", *DENSE, *SPARSE]
ROWS_PER_SHARD = 250_000
ROWS_PER_ROW_GROUP = 16_384
LIKE_PREPARE = {"compression": "lz4", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}


@dataclass
class Figure:
    """Million rows a second: median, least and most over the rounds; ratio to the floor of as many threads.

    Per CPU-second (of all threads and worker processes) tells more than the clock on a machine that others use too.
    """

    name: str
    million_rows_per_s: float
    least: float
    most: float
    million_rows_per_cpu_s: float
    ratio_to_floor: float = 0.0


def write_shards(folder: Path, num_rows: int) -> Dataset:
    generator = np.random.default_rng(0)
    files = []
    for index, begin in enumerate(range(0, num_rows, ROWS_PER_SHARD)):
        rows = min(ROWS_PER_SHARD, num_rows - begin)
        columns = {"label": (generator.random(rows) < 0.25).astype(np.int8)}
        columns |= {name: np.log1p(generator.geometric(0.05, rows)).astype(np.float32) for name in DENSE}
        for name, cardinality in zip(SPARSE, CARDINALITIES, strict=True):
            columns[name] = np.minimum(generator.zipf(1.2, rows) - 1, cardinality - 1).astype(np.int32)
        path = folder / f"part-{index:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_ROW_GROUP, **LIKE_PREPARE)
        metadata = pq.read_metadata(path)
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        files.append(ShardFile(path.name, rows, path.stat().st_size, "", sizes))
    features = [
        SparseFeature(name, cardinality, False, 1.0, FrequencyCurve([1], [1.0]))
        for name, cardinality in zip(SPARSE, CARDINALITIES, strict=True)
    ]
    splits = {"train": Split(files, num_rows, 0)}
    return Dataset("generated", "label", DENSE, features, splits, num_rows, num_rows, 0, "log1p")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def use_cores(count: int) -> None:
    """Bind all threads of this process, pyarrow's among them, to the first `count` cores it may use."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended in the meantime
            os.sched_setaffinity(int(thread), ALLOWED_CORES[:count])


ALLOWED_CORES = sorted(os.sched_getaffinity(0))


def decode_only(folder: Path, dataset: Dataset, threads: int) -> int:
    """The floor: every row group decoded into Arrow arrays, nothing made of them."""

    def decode(shard: ShardFile) -> int:
        file = pq.ParquetFile(folder / shard.path, page_checksum_verification=True)
        groups = range(len(shard.row_groups))
        return sum(file.read_row_group(i, columns=COLUMNS, use_threads=False).num_rows for i in groups)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(decode, dataset.splits["train"].files))


class ArrowBatches(IterableDataset[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]):
    """The plain way: a batch of a file at a time, columns stacked, lengths counted by TorchRec."""

    def __init__(self, paths: list[Path], batch_size: int) -> None:
        self.paths, self.batch_size = paths, batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
        for path in self.paths:
            for rows in pq.ParquetFile(path).iter_batches(self.batch_size, use_threads=False):
                dense = np.stack([rows.column(name).to_numpy() for name in DENSE], axis=1)
                ids = np.concatenate([rows.column(name).to_numpy() for name in SPARSE]).astype(np.int64)
                lengths = torch.ones(len(ids), dtype=torch.int32)
                sparse = KeyedJaggedTensor.from_lengths_sync(SPARSE, torch.from_numpy(ids), lengths)
                labels = torch.from_numpy(rows.column("label").to_numpy().astype(np.float32))
                yield torch.from_numpy(dense), sparse, labels


def data_loader(folder: Path, dataset: Dataset, batch_size: int, workers: int) -> int:
    paths = [folder / shard.path for shard in dataset.splits["train"].files]
    loader = DataLoader(ArrowBatches(paths, batch_size), batch_size=None, num_workers=workers)
    return sum(labels.shape[0] for _, _, labels in loader)


def make_reader(
    folder: Path, dataset: Dataset, batch_size: int, threads: int, shuffle: str = "row_groups", **options: Any
) -> ShardReader:
    config = ReaderConfig(decode_threads=threads, shuffle=shuffle)
    return ShardReader(
        str(folder),
        dataset,
        "train",
        global_batch_size=batch_size,
        rank=0,
        world_size=1,
        config=config,
        seed=0,
        **options,
    )


def read_epoch(*args: Any, **options: Any) -> int:
    """Rows of one epoch of make_reader(...)."""
    return sum(batch.batch_size for batch in make_reader(*args, **options).batches(0))


def throughput(folder: Path, dataset: Dataset, batch_size: int, rounds: int) -> list[Figure]:
    """One figure for each way to read, on as many cores as it has decode threads."""
    multi_hot = dict(zip(SPARSE, MULTI_HOT_SIZES, strict=True))
    ways: dict[str, tuple[int, Callable[[], int]]] = {
        "pyarrow decode": (1, lambda: decode_only(folder, dataset, 1)),
        "reader": (1, lambda: read_epoch(folder, dataset, batch_size, 1)),
        "reader, batch 65536": (1, lambda: read_epoch(folder, dataset, 65_536, 1)),
        "reader, file order": (1, lambda: read_epoch(folder, dataset, batch_size, 1, "none")),
        "reader, mlperf multi-hot": (1, lambda: read_epoch(folder, dataset, batch_size, 1, multi_hot=multi_hot)),
        "DataLoader, in process": (1, lambda: data_loader(folder, dataset, batch_size, 0)),
        "pyarrow decode x2": (2, lambda: decode_only(folder, dataset, 2)),
        "reader x2": (2, lambda: read_epoch(folder, dataset, batch_size, 2)),
        "DataLoader, 1 worker": (2, lambda: data_loader(folder, dataset, batch_size, 1)),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (cores, read) in ways.items():
            use_cores(cores)
            torch.set_num_threads(cores)
            began, cpu_began = time.perf_counter(), sum(os.times()[:4])
            rows = read() / 1e6
            rates[name].append((rows / (time.perf_counter() - began), rows / (sum(os.times()[:4]) - cpu_began)))
    use_cores(len(ALLOWED_CORES))
    figures = {}
    for name, (cores, _) in ways.items():
        clock, cpu = zip(*rates[name][1:], strict=True)  # the first round warms up files and imports
        figures[name] = Figure(name, statistics.median(clock), min(clock), max(clock), statistics.median(cpu))
        floor = figures["pyarrow decode" if cores == 1 else "pyarrow decode x2"]
        figures[name].ratio_to_floor = figures[name].million_rows_per_s / floor.million_rows_per_s
    return list(figures.values())


def waiting(folder: Path, dataset: Dataset, batch_size: int, step_ms: float, steps: int) -> dict[str, float]:
    """A step is a fixed number of matrix products that takes `step_ms` alone, on all cores, while the reader works."""
    matrix = torch.randn(512, 512)

    def products(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix)
        return time.perf_counter() - began

    products(50)
    per_step = max(1, round(200 * step_ms / 1e3 / products(200)))
    alone = [products(per_step) for _ in range(steps // 2)]
    reader = make_reader(folder, dataset, batch_size, 1)
    batches = reader.batches(0)
    next(batches)
    first_ms = reader.stall_seconds * 1e3
    reader.stall_seconds = 0.0
    began = time.perf_counter()
    beside = []
    for _, _ in zip(range(min(steps, reader.steps_per_epoch - 1)), batches, strict=False):
        beside.append(products(per_step))
    elapsed = time.perf_counter() - began
    batches.close()
    alone += [products(per_step) for _ in range(steps // 2)]
    return {
        "step_ms_alone": statistics.median(alone) * 1e3,
        "step_ms_beside_reader": statistics.median(beside) * 1e3,
        "steps": len(beside),
        "first_batch_ms": first_ms,
        "waiting_percent": 100 * reader.stall_seconds / elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=87.0, help="default: DLRM, 26 tables, dim 64, batch 2048, CPU")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        dataset = write_shards(Path(name), options.rows)
        size_mb = sum(shard.size_bytes for shard in dataset.splits["train"].files) / 1e6
        print(f"{options.rows} rows, {size_mb:.0f} MB of Parquet, batch {options.batch_size}, {cpu_name()}")
        figures = throughput(Path(name), dataset, options.batch_size, options.rounds)
        for figure in figures:
            print(
                f"{figure.name:26} {figure.million_rows_per_s:6.2f} M rows/s  "
                f"({figure.least:.2f} .. {figure.most:.2f})  {figure.ratio_to_floor:5.2f} of the floor  "
                f"{figure.million_rows_per_cpu_s:6.2f} M rows/CPU-s"
            )
        wait = waiting(Path(name), dataset, options.batch_size, options.step_ms, options.steps)
    print(
        f"{wait['steps']:.0f} steps of {wait['step_ms_alone']:.1f} ms ({wait['step_ms_beside_reader']:.1f} ms beside the "
        f"reader) waited {wait['waiting_percent']:.3f} % of the time; the first batch took {wait['first_batch_ms']:.0f} ms"
    )
    if options.output:
        report = {"options": {k: str(v) for k, v in vars(options).items()}, "megabytes": size_mb, "waiting": wait}
        report["throughput"] = [asdict(figure) for figure in figures]
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
