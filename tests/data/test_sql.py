"""Paths in DuckDB's SQL name one file, whatever signs are in them."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.sql import parquet, sql_path
from pipeline.runtime.errors import DataError
from tests.support.messages import names

FOLDERS = ("g*x", "g?x", "g[1]x", "g1x", "gax", "it's", "a\\b", "dt=2026-11-02")


def test_a_path_with_the_signs_of_a_glob_names_one_file(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"value": [folder]}), tmp_path / folder / "v.parquet")
    for folder in FOLDERS:
        table = parquet(str(tmp_path / folder / "v.parquet"))
        assert duckdb.sql(f"SELECT * FROM {table}").fetchall() == [(folder,)]


def test_a_backslash_next_to_the_sign_of_a_glob_is_refused() -> None:
    with pytest.raises(DataError, match=names("g*x rename")):
        sql_path("a\\b/g*x")
