"""Raw rows as a list of Python values a column: what JSON gives, and for a few rows much cheaper than Arrow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import pyarrow as pa


@dataclass(frozen=True)
class ColumnLists:
    """`columns` are those of `schema`, in its order, each with a value a row: numbers, text, lists of text, or None."""

    schema: pa.Schema
    columns: Sequence[Sequence[Any]]
    num_rows: int

    def slice(self, begin: int, length: int) -> ColumnLists:
        if begin == 0 and length >= self.num_rows:
            return self
        columns = [column[begin : begin + length] for column in self.columns]
        return ColumnLists(self.schema, columns, max(0, min(length, self.num_rows - begin)))

    def to_table(self) -> pa.Table:
        """Raises ServingError for text that is no Unicode."""
        arrays = [pa.array(column, field.type) for field, column in zip(self.schema, self.columns, strict=True)]
        return pa.table(arrays, schema=self.schema)


Rows: TypeAlias = pa.Table | ColumnLists


def as_table(rows: Rows) -> pa.Table:
    return rows.to_table() if isinstance(rows, ColumnLists) else rows


def with_text(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Whole numbers of these columns as text, in the spelling that prepare gives them."""
    numbers = {field.name for field in table.schema if pa.types.is_integer(field.type)}.intersection(names)
    if not numbers:
        return table
    schema = pa.schema([field.with_type(pa.string()) if field.name in numbers else field for field in table.schema])
    return table.cast(schema)


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Of one schema, but for categories that are whole numbers in some parts and text in others."""
    if len(parts) == 1:
        return parts[0]
    lists = [part for part in parts if isinstance(part, ColumnLists)]
    if len(lists) < len(parts):
        tables = [as_table(part) for part in parts]
        if any(table.schema != tables[0].schema for table in tables):
            tables = [with_text(table, table.column_names) for table in tables]
        return pa.concat_tables(tables)
    columns = [list(chain.from_iterable(columns)) for columns in zip(*(part.columns for part in lists), strict=True)]
    return ColumnLists(lists[0].schema, columns, sum(part.num_rows for part in lists))
