"""Do what `prepare` does with rows in Criteo's format as a Dask job:  python -m benchmarks.prepare_dask 'rows/*' OUTPUT WORKERS

Ids by descending count, ties by value; log(1 + x) of numbers; Parquet files. It neither checks rows nor splits, shuffles, quarantines
or writes checksums, so it does less. Needs dask[dataframe] and distributed, which nothing else here does. Prints the seconds from the
start of the cluster on.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd

NUM_DENSE, NUM_SPARSE = 13, 26


def with_ids(part: pd.DataFrame, ids: dict[str, Any]) -> pd.DataFrame:
    made = {"label": part["label"].astype("int8")}
    for name in part.columns[1 : 1 + NUM_DENSE]:
        made[name] = np.log1p(part[name].fillna(0.0).clip(lower=0.0)).astype("float32")
    for name, of_value in ids.items():
        made[name] = part[name].map(of_value).fillna(0).astype("int32")
    return pd.DataFrame(made)


def main() -> None:
    source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    frames: Any = import_module("dask.dataframe")
    distributed: Any = import_module("distributed")
    dask: Any = import_module("dask")
    dense = [f"int_{number}" for number in range(NUM_DENSE)]
    sparse = [f"cat_{number}" for number in range(NUM_SPARSE)]
    began = time.monotonic()
    with (
        distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster),
    ):
        kinds = {"label": "float64", **dict.fromkeys(dense, "float64"), **dict.fromkeys(sparse, "string[pyarrow]")}
        rows = frames.read_csv(source, sep="\t", header=None, names=list(kinds), dtype=kinds, blocksize="16MB")
        counts = dask.compute(*(rows[name].value_counts() for name in sparse))
        ids = {}
        for name, count in zip(sparse, counts, strict=True):
            ordered = count.rename("n").reset_index().sort_values(["n", name], ascending=[False, True])
            ids[name] = pd.Series(np.arange(1, len(ordered) + 1, dtype="int32"), index=ordered[name])
        rows.map_partitions(with_ids, ids).to_parquet(output, write_index=False)
    print(f"done in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
