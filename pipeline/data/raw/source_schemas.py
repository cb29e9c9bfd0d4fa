"""Check the columns of all source files first, so that the last of them does not end a preparation that took hours."""

from __future__ import annotations

import pyarrow as pa

from pipeline.data.raw.layout import Layout
from pipeline.data.raw.rows import open_source
from pipeline.data.raw.source import Source
from pipeline.runtime.errors import DataError


def check_sources(layout: Layout, sources: list[Source]) -> None:
    """Look at every source's columns before rows are read of any.

    Raises:
        DataError: a needed column is missing, or has another kind of type than in the first source: 1 and 1.0 would
            be two values of one category.
    """
    first: dict[str, str] = {}
    for source in sources:
        reader, _ = open_source(layout, source, 1 << 16)
        with reader:
            schema = reader.schema()
            kinds = {} if schema is None else _kinds(layout, schema, source)
        first = first or kinds
        for name in kinds:
            if kinds[name] != first[name]:
                raise DataError(
                    f"{source.path}: column {name!r} holds {kinds[name]}, in {sources[0].path} {first[name]}: the same value "
                    "would become two ids or two times; write both files with one type"
                )


def _kinds(layout: Layout, schema: pa.Schema, source: Source) -> dict[str, str]:
    """Column -> "fractions", "times", "lists of fractions", or "values" (text and whole numbers read alike)."""
    columns = layout.columns
    kinds = {}
    for name in (*columns.sparse, *columns.lists, *([columns.timestamp] if columns.timestamp else [])):
        kind = inner = schema.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list:
            inner = kind.value_type
        if pa.types.is_dictionary(inner):
            inner = inner.value_type
        if pa.types.is_nested(inner):
            raise DataError(
                f"{source.path}: column {name!r} has type {kind}: give text, whole numbers, or lists of them"
            )
        if is_list and name not in columns.lists:
            raise DataError(
                f"{source.path}: column {name!r} has type {kind}, a list a row: name it under data.columns.multi_hot or sequence, not "
                f"{'sparse' if name in columns.sparse else 'timestamp'}"
            )
        if name in columns.lists and not is_list and not _is_text(inner):
            raise DataError(
                f"{source.path}: column {name!r} has type {kind}, one value a row: name it under data.columns.sparse, not "
                "multi_hot (lists, or text joined by data.columns.list_separator)"
            )
        is_time = pa.types.is_temporal(inner)
        is_fraction = pa.types.is_floating(inner) or pa.types.is_decimal(inner)
        kinds[name] = "times" if is_time else "fractions" if is_fraction else "values"
    return kinds


def _is_text(kind: pa.DataType) -> bool:
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
