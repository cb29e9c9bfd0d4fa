"""Read rows of any kind as an Arrow table: pandas, Polars, DuckDB, Arrow, or dicts. None of the libraries is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.runtime.errors import DataError

# Anything with __arrow_c_stream__ (pandas, Polars, DuckDB, Arrow), a list of dicts, or column -> values.
Frame = Any


def to_table(rows: Frame) -> pa.Table:
    """Return the rows as a table. Raises DataError if they are no rows, or a column mixes types."""
    try:
        return _plain(_read(rows))
    except (pa.ArrowException, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the rows cannot be read: {' '.join(str(error).split())[:300]}") from None


def _read(rows: Frame) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(rows).read_all()
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if type(rows).__module__.partition(".")[0] == "pandas":  # before version 3
        return pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, Mapping):
        return pa.table({name: list(values) for name, values in rows.items()})
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        names = dict.fromkeys(name for row in rows for name in row)  # a row may lack a column
        return pa.table({name: [row.get(name) for row in rows] for name in names})
    raise DataError(
        f"{type(rows).__name__} has no rows to read: give a pandas or Polars frame, an Arrow table, a DuckDB relation, "
        "or a list of dicts"
    )


def _plain(table: pa.Table) -> pa.Table:
    """Give text and lists the types that a Parquet file would have."""
    kinds = [_plain_type(field.type) for field in table.schema]
    if all(kind == field.type for kind, field in zip(kinds, table.schema, strict=True)):
        return table
    return table.cast(pa.schema([field.with_type(kind) for kind, field in zip(kinds, table.schema, strict=True)]))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_plain_type(kind.value_type))
    return kind
