"""Check the columns of all source files first, so that a bad file does not end a preparation after
hours."""

from __future__ import annotations

import pyarrow as pa

from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.rows import open_source
from pipeline.data.raw.source import unchanged
from pipeline.data.raw.value_types import (
    ALIKE,
    DATES,
    DECIMALS,
    FRACTIONS,
    NOTHING,
    NUMBER,
    TEXT,
    TIMES,
    WHOLE,
    ZONED,
    kind_of,
    why_not_read,
)  # fmt: skip
from pipeline.runtime.errors import DataError

# Whole numbers have a unit and dates have none, but text may hold both.
TIME_ALIKE = {
    FRACTIONS: {FRACTIONS, DECIMALS},
    DECIMALS: {FRACTIONS, DECIMALS},
    WHOLE: {WHOLE, TEXT},
    TEXT: {TEXT, WHOLE, DATES, TIMES, ZONED},
    DATES: {TEXT, DATES, TIMES, ZONED},
}


def check_sources(layout: Layout, sources: list[Source]) -> None:
    """Check every source's columns before any rows are read.

    Raises:
        DataError: a needed column is missing, or its type is of another kind than in an earlier source. The text
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
            alike = (
                TIME_ALIKE.get(kind, TIME_ALIKE[DATES]) if name == layout.columns.timestamp else ALIKE.get(kind, {kind})
            )
            if other := next((each for each in before if each not in alike), None):
                raise DataError(
                    f"{source.path}: column {name!r} holds {kind}, but in {before[other]} {other}: the same value would become "
                    "two ids or two times; write both files with one type"
                )
            before.setdefault(kind, source.path)


def _kinds(layout: Layout, schema: pa.Schema, source: Source) -> dict[str, str]:
    """Return column -> kind of values, for columns of categories and times.

    A column with only nulls fits every kind and is left out. Raises DataError for a type that is
    not read.
    """
    kinds = {}
    for name, role in layout.roles.items():
        kind = schema.field(name).type
        if problem := why_not_read(kind, role):
            raise DataError(f"{source.path}: column {name!r} has type {kind}: {problem}")
        if role != NUMBER and (found := kind_of(kind)) != NOTHING:
            kinds[name] = found
    return kinds
