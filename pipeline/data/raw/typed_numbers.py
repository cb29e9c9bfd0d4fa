"""Read the columns of numbers of typed rows as float64: numbers of any type, truths, and text that holds numbers."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.raw.label_cells import is_text
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parquet_rows import with_text
from pipeline.data.raw.row_rules import wanted_number
from pipeline.data.raw.suspects import with_numbers
from pipeline.runtime.errors import DataError


def with_typed_numbers(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Labels, weight and dense columns as float64; row -> reason where a text is no number.

    Exports without types write numbers as text in Parquet too. Raises DataError for a type that is neither.
    """
    reasons: dict[int, str] = {}
    for name in layout.numbers:
        if is_text(layout, name):
            continue
        column = with_text(table, [name])[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        place = table.schema.get_field_index(name)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            table = table.set_column(place, name, _as_numbers(name, column))
            continue
        missing = pc.is_in(column, pa.array(["", *layout.columns.null_values], column.type))
        column = pc.if_else(missing, None, column)
        table, found = with_numbers(table.set_column(place, name, column), [name])
        wanted = wanted_number(layout, name)
        for row in sorted(found):
            reasons.setdefault(row, f"{name} is {column[row].as_py()!r}, not {wanted}")
    return table, reasons


def _as_numbers(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise DataError(
            f"column {name!r} has type {kind}: labels and dense features are numbers; correct data.columns, or for a label say which text is 1, "
            "data.columns.label_values={yes: 1, no: 0}"
        )
    return column.cast(pa.float64(), safe=False)
