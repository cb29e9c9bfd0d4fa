"""Check the columns of all source files first, so that a bad file does not end a preparation after
hours."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.rows import open_source
from pipeline.data.raw.source import unchanged
from pipeline.runtime.errors import DataError

TEXT, WHOLE, FRACTIONS, TRUTHS = "text", "whole numbers", "fractions", "true and false"
KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "times": pa.types.is_temporal,
    "decimals": pa.types.is_decimal,
    FRACTIONS: pa.types.is_floating,
    WHOLE: pa.types.is_integer,
    TRUTHS: pa.types.is_boolean,
}
# Kinds that give one value the same text (pipeline.data.raw.value_text), except
# times as fractions.
ALIKE = {
    TEXT: {TEXT, WHOLE, TRUTHS},
    WHOLE: {WHOLE, TEXT, FRACTIONS},
    FRACTIONS: {FRACTIONS, WHOLE},
    TRUTHS: {TRUTHS, TEXT},
}


def check_sources(layout: Layout, sources: list[Source]) -> None:
    """Check every source's columns before any rows are read.

    Raises:
        DataError: a needed column is missing, or has another kind of type than in an earlier source. The text
            1.0 and the number 1.0 would be two values of one category.
    """
    seen: dict[str, dict[str, str]] = {}
    for source in sources:
        with unchanged(source):
            reader, _ = open_source(layout, source, 1 << 16)
            with reader:
                schema = reader.schema()
                kinds = {} if schema is None else _kinds(layout, schema, source)
        for name, kind in kinds.items():
            before = seen.setdefault(name, {})
            alike = ALIKE.get(kind, {kind})
            if name == layout.columns.timestamp:
                alike = alike - {FRACTIONS} if kind != FRACTIONS else {FRACTIONS}
            if other := next((each for each in before if each not in alike), None):
                raise DataError(
                    f"{source.path}: column {name!r} holds {kind}, but in {before[other]} {other}: the same value would become "
                    "two ids or two times; write both files with one type"
                )
            before.setdefault(kind, source.path)


def _kinds(layout: Layout, schema: pa.Schema, source: Source) -> dict[str, str]:
    """Return column -> kind of values. A column with only nulls fits every kind and is left out."""
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
        if name == columns.timestamp and (pa.types.is_time(inner) or pa.types.is_duration(inner)):
            raise DataError(
                f"{source.path}: column {name!r} has type {kind}, {'a span' if pa.types.is_duration(inner) else 'a time of day'} without "
                "a date: name a column of dates, of times with their date, or of whole numbers under data.columns.timestamp"
            )
        if not pa.types.is_null(inner):
            kinds[name] = next((kind for kind, fits in KINDS.items() if fits(inner)), TEXT)
    return kinds


def _is_text(kind: pa.DataType) -> bool:
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
