"""Rows with a column of vectors and two categories, and a job in which both tables start from files: one frozen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import prepare

NUM_ROWS, NUM_ITEMS, DIM, WIDTH = 3000, 400, 8, 4


def prepared(folder: Path) -> list[str]:
    """Prepare rows.parquet. Return the words that name the data."""
    draw = np.random.default_rng(2)
    item, user = draw.integers(0, NUM_ITEMS, NUM_ROWS), draw.integers(0, 900, NUM_ROWS)
    vectors = draw.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    given = draw.standard_normal((NUM_ITEMS, DIM)).astype(np.float32)
    clicks = draw.random(NUM_ROWS) < 1 / (1 + np.exp(-(given[item, 0] + vectors[:, 0])))
    rows = {
        "label": clicks.astype(np.int64), "item": [f"i{each}" for each in item], "user": user,
        "emb": pa.array([*vectors], mask=draw.random(NUM_ROWS) < 0.1),
    }  # fmt: skip
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    values = [f"i{each}" for each in range(0, NUM_ITEMS, 2)]
    pq.write_table(pa.table({"value": values, "vector": [*given[::2]]}), folder / "items.parquet")
    np.save(folder / "users.npy", draw.standard_normal((900, DIM)).astype(np.float32))
    data = {
        "defaults": ["default", "_self_"], "name": "combined", "format": "parquet", "path": str(folder / "prepared"),
        "columns": {"sparse": ["item", "user"], "vectors": {"emb": WIDTH}}, "rows_per_row_group": 256,
    }  # fmt: skip
    (folder / "data").mkdir()
    (folder / "data" / "combined.yaml").write_text(yaml.safe_dump(data))
    words = [f"--config-dir={folder}", "data=combined"]
    prepare(load_config(PrepareJob, [*words, f"source={folder}/rows.parquet"]))
    return words


def words_of_tables(folder: Path) -> list[str]:
    return [
        "model=logistic_regression", f"tables.default.embedding_dim={DIM}", f"tables.item.init.file={folder}/items.parquet",
        "tables.item.frozen=true", f"tables.user.init.file={folder}/users.npy", "tables.user.lr_factor=0.5",
    ]  # fmt: skip
