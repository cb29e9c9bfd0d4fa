"""Write values into DuckDB's SQL."""

from __future__ import annotations


def sql_text(value: str) -> str:
    """A text literal: what the value holds is never read as SQL."""
    return "'" + value.replace("'", "''") + "'"


def parquet(*paths: str) -> str:
    """A table of Parquet files of this package. A folder of the path such as dt=2026-11-02 is not a column."""
    return f"read_parquet([{', '.join(map(sql_text, paths))}], hive_partitioning=false)"
