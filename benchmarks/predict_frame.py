"""Compare Artifact.predict on rows in memory with the verb `predict`:  python -m benchmarks.predict_frame [--rows 1000000] [--rounds 3]

Both score the same rows of the model of benchmarks/serving.py in one process. The verb reads a Parquet file and writes another. Sides
take turns; each figure is the best of the rounds, in rows a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import pipeline
from benchmarks.serving import bodies_of
from benchmarks.serving_artifacts import Shape, write_artifact

TABLE_ROWS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    best = {"verb": 0.0, "frame": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        artifact = pipeline.Artifact(
            str(write_artifact(Path(folder) / "made", Shape(TABLE_ROWS), "int8", vocabularies=True))
        )
        body = bodies_of(TABLE_ROWS, given.rows, as_ids=True, count=1)[0]
        table, source = pa.ipc.open_stream(body).read_all(), f"{folder}/rows.parquet"
        pq.write_table(table, source)
        artifact.predict(table.slice(0, 10_000))  # load and compile
        for number in range(given.rounds):
            output = f"{folder}/{number}.parquet"
            begun = time.perf_counter()
            pipeline.predict(artifact.path, source=source, output=output)
            best["verb"] = max(best["verb"], given.rows / (time.perf_counter() - begun))
            begun = time.perf_counter()
            scores = artifact.predict(table)
            best["frame"] = max(best["frame"], given.rows / (time.perf_counter() - begun))
            assert pq.read_table(output)["score"].to_numpy().tobytes() == scores.tobytes()
    print(f"{given.rows:,} rows: predict {best['verb']:,.0f} rows/s, Artifact.predict {best['frame']:,.0f}, equal bits")
    print(f"ratio {best['frame'] / best['verb']:.2f}")


if __name__ == "__main__":
    main()
