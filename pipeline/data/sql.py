"""Write values into DuckDB's SQL."""

from __future__ import annotations


def sql_text(value: str) -> str:
    """Return a text literal. The content of the value is never read as SQL."""
    return "'" + value.replace("'", "''") + "'"


def parquet(*paths: str) -> str:
    """Return a table of Parquet files.

    A folder of the path such as dt=2026-11-02 is not a column.
    """
    return f"read_parquet([{', '.join(map(sql_text, paths))}], hive_partitioning=false)"
