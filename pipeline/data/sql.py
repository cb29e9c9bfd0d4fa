"""Write values into DuckDB's SQL."""

from __future__ import annotations

import re

from pipeline.runtime.errors import DataError

GLOB_SIGN = re.compile(r"[*?\[]")


def sql_text(value: str) -> str:
    """Return a text literal. The content of the value is never read as SQL."""
    return "'" + value.replace("'", "''") + "'"


def sql_path(path: str) -> str:
    """Return a text literal for a file that DuckDB reads. Glob characters in the name keep their
    literal meaning.

    Raises:
        DataError: the path also has a backslash, which DuckDB reads as an escape if there are glob characters.
    """
    if "\\" in path and GLOB_SIGN.search(path):
        raise DataError(
            f"{path!r} has a backslash next to one of * ? [, and DuckDB cannot read a file of such a name: rename it"
        )
    return sql_text(GLOB_SIGN.sub(r"[\g<0>]", path))


def parquet(*paths: str) -> str:
    """Return a table expression for Parquet files. A folder in the path such as dt=2026-11-02 does
    not become a column.
    """
    return f"read_parquet([{', '.join(map(sql_path, paths))}], hive_partitioning=false)"
