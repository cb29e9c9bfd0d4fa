"""Compare columns that are joined at read with a table joined beforehand: bytes on disk, and rows read per second.

    python -m benchmarks.joins [--rows 200000] [--rounds 5] [--output docs/measurements/joins.json]

Three data sets of the same rows: `rows alone` lacks the joined columns, `joined at read` stores them once (data.joins),
`joined beforehand` repeats them in each row, by an as-of join of DuckDB. Batches of the last two are compared first: all bits are equal.
`items`: 8 categories and 4 numbers of 5,000 items, with 8 versions each. `histories`: the newest 50 items of each of 500 users, their categories and shops, written
20 times each, so that 20 rows of 200,000 see one version. Each data set is read by one thread without a cache of row groups, and the data sets take turns.
A ratio compares the CPU time of one round, and the output has the median of the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.about import about
from pipeline.config.columns import ColumnsConfig, SequenceConfig
from pipeline.config.data import DataConfig, ReaderConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.read.reader import ShardReader
from pipeline.devices.cpu.process import keep_freed_memory

BEGIN, SECONDS = 1_760_000_000, 20 * 86_400
ITEMS, ITEM_VERSIONS, USERS, USER_VERSIONS, LENGTH, BATCH = 5_000, 8, 500, 20, 50, 2048
TURNS = 6  # of each data set in a round
CATEGORIES, NUMBERS = [f"category_{i}" for i in range(8)], [f"number_{i}" for i in range(4)]
OWN = ["user", "item", "place", "hour"]
WAYS = ["rows alone", "joined at read", "joined beforehand"]


def write_tables(folder: Path, num_rows: int) -> None:
    generator = np.random.default_rng(0)
    rows: dict[str, Any] = {"click": (generator.random(num_rows) < 0.1).astype(np.int8)}
    rows |= {
        "user": generator.integers(0, USERS, num_rows),
        "item": np.minimum(generator.zipf(1.3, num_rows), ITEMS) - 1,
    }
    rows |= {"place": generator.integers(0, 50, num_rows), "hour": generator.integers(0, 24, num_rows)}
    rows |= {f"count_{i}": generator.geometric(0.05, num_rows).astype(np.float64) for i in range(4)}
    rows["ts"] = BEGIN + np.sort(generator.integers(0, SECONDS, num_rows))
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    of_item = np.repeat(np.arange(ITEMS), ITEM_VERSIONS)
    items: dict[str, Any] = {
        "item": of_item,
        "written_at": BEGIN - 1 + np.tile(np.arange(ITEM_VERSIONS), ITEMS) * SECONDS // ITEM_VERSIONS,
    }
    items |= {name: generator.integers(0, 10 ** (1 + at % 4), len(of_item)) for at, name in enumerate(CATEGORIES)}
    items |= {name: generator.exponential(10.0, len(of_item)) for name in NUMBERS}
    pq.write_table(pa.table(items), folder / "items.parquet")
    of_user = np.repeat(np.arange(USERS), USER_VERSIONS)
    users: dict[str, Any] = {
        "user": of_user,
        "written_at": BEGIN - 1 + np.tile(np.arange(USER_VERSIONS), USERS) * SECONDS // USER_VERSIONS,
    }
    history = np.minimum(generator.zipf(1.3, (len(of_user), LENGTH)), ITEMS) - 1
    users |= {"history": history.tolist(), "categories": (history % 100).tolist(), "shops": (history % 1000).tolist()}
    pq.write_table(pa.table(users), folder / "users.parquet")
    for name, key in (("items", "item"), ("users", "user")):
        duckdb.sql(
            f"COPY (SELECT r.*, t.* EXCLUDE ({key}, written_at) FROM (SELECT *, row_number() OVER () AS at FROM '{folder}/rows.parquet') r "
            f"ASOF LEFT JOIN '{folder}/{name}.parquet' t ON r.{key} = t.{key} AND r.ts >= t.written_at ORDER BY r.at) "
            f"TO '{folder}/rows_{name}.parquet' (FORMAT parquet)"
        )


def prepare_ways(folder: Path, case: str) -> dict[str, Dataset]:
    columns = ColumnsConfig(label="click", sparse=OWN, dense=[f"count_{i}" for i in range(4)], timestamp="ts")
    if case == "items":
        wide = replace(columns, sparse=[*OWN, *CATEGORIES], dense=[*columns.dense, *NUMBERS])
        join = {"table": "items", "on": "item", "columns": [*CATEGORIES, *NUMBERS]}
    else:
        sequences = {name: SequenceConfig(beside="history") for name in ("categories", "shops")}
        wide = replace(columns, sequence={"history": SequenceConfig(max_length=LENGTH, shares="item"), **sequences})
        join = {"table": "users", "on": "user", "columns": ["history", "categories", "shops"]}
    join = {**join, "table": f"{folder}/{join['table']}.parquet", "written_at": "written_at"}
    sources = {"rows alone": ("rows", columns, []), "joined at read": ("rows", wide, [join])}
    sources["joined beforehand"] = (f"rows_{'items' if case == 'items' else 'users'}", wide, [])
    found = {}
    for way, (source, read, joins) in sources.items():
        path = str(folder / f"{case} {way}")
        data = DataConfig(
            name=case,
            path=path,
            format="parquet",
            columns=read,
            joins=joins,
            split=SplitConfig(validation_fraction=0.0, test_fraction=0.0),
        )
        prepare(PrepareJob(data=data, source=f"{folder}/{source}.parquet"))
        found[way] = load_dataset(path)
    return found


def reader_of(folder: Path, case: str, way: str, dataset: Dataset) -> ShardReader:
    config = ReaderConfig(keep_mib=0)
    return ShardReader(
        f"{folder}/{case} {way}", dataset, "train", global_batch_size=BATCH, rank=0, world_size=1, config=config, seed=0
    )


def check_equal(folder: Path, case: str, datasets: dict[str, Dataset]) -> None:
    readers = [reader_of(folder, case, way, datasets[way]).batches(0) for way in WAYS[1:]]
    for one, other in zip(*readers, strict=True):
        for name in ("values", "lengths"):
            assert torch.equal(getattr(one.sparse_features, name)(), getattr(other.sparse_features, name)())
        assert torch.equal(one.dense_features, other.dense_features) and torch.equal(one.labels, other.labels)


def bytes_of(dataset: Dataset) -> int:
    return sum(file.size_bytes for file in [*dataset.splits["train"].files, *dataset.side_tables])


def ratios(rates: dict[str, list[float]], way: str, base: str) -> str:
    """Return the median of the rounds' ratios, and their least and greatest one."""
    found = sorted(one / other for one, other in zip(rates[way][1:], rates[base][1:], strict=True))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def measure(folder: Path, case: str, rounds: int) -> list[dict[str, Any]]:
    datasets = prepare_ways(folder, case)
    check_equal(folder, case, datasets)
    readers = {way: reader_of(folder, case, way, datasets[way]) for way in WAYS}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):  # the first round warms up
        seconds = dict.fromkeys(WAYS, 0.0)
        for turn in range(TURNS):
            for way in WAYS:
                began = time.process_time()
                rows = sum(batch.batch_size for batch in readers[way].batches(number * TURNS + turn))
                seconds[way] += time.process_time() - began
        for way in WAYS:
            rates[way].append(rows * TURNS / seconds[way])
    figures = []
    for way in WAYS:
        size = bytes_of(datasets[way])
        figures.append({
            "columns": case, "data set": way, "MB": round(size / 1e6, 2),
            "MB in side tables": round(sum(file.size_bytes for file in datasets[way].side_tables) / 1e6, 2),
            "bytes saved": f"{bytes_of(datasets['joined beforehand']) / size:.1f}x",
            "million rows/CPU-s": round(statistics.median(rates[way][1:]) / 1e6, 3),
            "of rows alone": ratios(rates, way, "rows alone"),
            "of joined beforehand": ratios(rates, way, "joined beforehand"),
        })  # fmt: skip
        print(figures[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as train does
    with tempfile.TemporaryDirectory() as name:
        write_tables(Path(name), options.rows)
        figures = [figure for case in ("items", "histories") for figure in measure(Path(name), case, options.rounds)]
    if options.output:
        options.output.write_text(json.dumps({"about": about(rows=options.rows), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
