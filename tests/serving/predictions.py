"""Rows as raw files, prediction jobs over a stand-in model, and the scores that they must give."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import PredictJob
from tests.serving.stand_in import score_of

VERSION = "stand-in-1"


def rows_of(count: int, seed: int = 0) -> list[dict[str, object]]:
    chance = random.Random(seed)
    return [
        {
            "user": f"u{number}", "label": chance.choice([0, 1]), "price": chance.choice([None, chance.uniform(-5, 90)]),
            "age": float(chance.randrange(90)), "city": chance.choice([None, "Rom", "Zürich", "São Paulo"]),
            "device": chance.choice(["a", "b"]), "tags": [f"t{chance.randrange(9)}" for _ in range(chance.randrange(4))],
        }
        for number in range(count)
    ]  # fmt: skip


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    """As Parquet with lists, or as text with lists joined by |."""
    if path.suffix == ".parquet":
        schema = pa.schema(
            [
                ("user", pa.string()), ("label", pa.int8()), ("price", pa.float64()), ("age", pa.float64()),
                ("city", pa.string()), ("device", pa.string()), ("tags", pa.list_(pa.string())),
            ]
        )  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=1000)
        return path
    delimiter = "," if ".csv" in path.name else "\t"
    lines = [delimiter.join(rows[0])]
    for row in rows:
        cells = [
            "" if value is None else "|".join(value) if isinstance(value, list) else str(value)
            for value in row.values()
        ]
        lines.append(delimiter.join(cells))
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def job_of(source: object, output: object, *more: str) -> PredictJob:
    return load_config(PredictJob, ["artifact=stand-in", f"source='{source}'", f"output={output}", *more])


def expected(rows: list[dict[str, object]]) -> list[float]:
    return [score_of(row, VERSION) for row in rows]
