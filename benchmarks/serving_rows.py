"""Count the CPU time of a batch of raw rows by its parts:  python -m benchmarks.serving_rows [--rows 50000] [--rounds 5]

In one process, without a server, of the model of benchmarks/serving.py: the request's body to rows, rows to ids and dense
values (with the compiled kernels, and without them, as where there is no Numba), and tables and layers. Sides take turns; each
figure is the least of the rounds' means over 40 batches, in CPU milliseconds of the process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch

from benchmarks.serving import bodies_of
from benchmarks.serving_artifacts import Shape, write_artifact
from pipeline.config.serving import LimitsConfig
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, RequestReader
from pipeline.serving.scoring.predictor import Predictor

BATCHES = 40


def _cpu_ms(work: Callable[[int], object]) -> float:
    begun = time.process_time()
    for number in range(BATCHES):
        work(number)
    return 1000 * (time.process_time() - begun) / BATCHES


def _with_text(body: bytes, schema: pa.Schema) -> bytes:
    table, sink = pa.ipc.open_stream(body).read_all().cast(schema), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def measure(predictors: dict[str, Predictor], before: Predictor, table_rows: int, num_rows: int, rounds: int) -> None:
    """`before` reads rows without kernels."""
    first = next(iter(predictors.values()))
    reader = RequestReader(first.columns, LimitsConfig())
    numbers = bodies_of(table_rows, num_rows, as_ids=True, count=BATCHES)
    bodies = {
        "Arrow, whole numbers": (numbers, ARROW_TYPE),
        "Arrow, text": ([_with_text(body, reader.schema) for body in numbers], ARROW_TYPE),
        "JSON": (bodies_of(table_rows, num_rows, as_ids=False, count=BATCHES), JSON_TYPE),
    }
    works: dict[str, Callable[[int], object]] = {}
    for name, (own, kind) in bodies.items():
        rows = [reader.read(body, kind) for body in own]
        works[f"{name}: body"] = lambda i, own=own, kind=kind: reader.read(own[i], kind)
        works[f"{name}: rows"] = lambda i, rows=rows: first.encoder.encode(rows[i])
        works[f"{name}: rows without Numba"] = lambda i, rows=rows: before.encoder.encode(rows[i])
        for dense, predictor in predictors.items():
            works[f"{name}: all but the body, {dense}"] = lambda i, rows=rows, of=predictor: of.score(rows[i])
    encoded = [first.encoder.encode(each) for each in rows]
    for dense, predictor in predictors.items():
        works[f"tables and layers, {dense}"] = lambda i, of=predictor: of.score_ids(encoded[i].dense, *encoded[i].ids)
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            found[name].append(_cpu_ms(work))
    for name, turns in found.items():
        print(f"{num_rows:5} rows  {name:46}{min(turns[1:]):7.2f} CPU-ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000, help="of each of the 26 tables")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            dense: write_artifact(Path(folder) / dense, Shape(options.rows), "int8", False, True, dense)
            for dense in ("fp32", "bf16")
        }
        predictors = {dense: Predictor.load(str(path), verify=False) for dense, path in paths.items()}
        before = Predictor.load(str(paths["bf16"]), verify=False)
        before.encoder._ids.of_arrow = None
        for num_rows in (16, 256, 1024):
            measure(predictors, before, options.rows, num_rows, options.rounds)


if __name__ == "__main__":
    main()
