"""Write values into DuckDB's SQL."""

from __future__ import annotations

import re

from pipeline.runtime.errors import DataError

GLOB_SIGN = re.compile(r"[*?\[]")


def sql_text(value: str) -> str:
    """Return a text literal. The content of the value is never read as SQL."""
    return "'" + value.replace("'", "''") + "'"


def sql_path(path: str) -> str:
    """A text literal for a file that DuckDB reads: the signs of a glob in its name stand for themselves.

    Raises:
        DataError: the path also has a backslash, which DuckDB takes for an escape next to a glob.
    """
    if "\\" in path and GLOB_SIGN.search(path):
        raise DataError(
            f"{path!r} has a backslash next to one of * ? [, and DuckDB cannot read a file of such a name: rename it"
        )
    return sql_text(GLOB_SIGN.sub(r"[\g<0>]", path))


def parquet(*paths: str) -> str:
    """Return a table of Parquet files.

    A folder of the path such as dt=2026-11-02 is not a column.
    """
    return f"read_parquet([{', '.join(map(sql_path, paths))}], hive_partitioning=false)"
