"""Parse a block of raw rows into typed columns, and list unreadable rows for the quarantine.

The fast path lets pyarrow read the complete block. If that fails, suspicious_lines.py finds by columns
which lines may be wrong, and only these lines are checked one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from pipeline.data.raw.blocks import Block, ParsedRows, QuarantinedRow, RowReader, Source
from pipeline.data.raw.json_lists import JSON, json_lists, parse_list
from pipeline.data.raw.label_cells import is_text, with_labels
from pipeline.data.raw.layout import Layout, check_columns, find_format
from pipeline.data.raw.parquet_rows import not_text, with_text, with_typed_numbers
from pipeline.data.raw.parse_cells import parse_timestamps
from pipeline.data.raw.partitions import with_partitions
from pipeline.data.raw.row_rules import invalid_rows, wanted_number, why_unreadable
from pipeline.data.raw.suspicious_lines import broken_lines, read_texts, with_numbers, with_times
from pipeline.data.raw.value_text import value_to_text
from pipeline.runtime.errors import DataError

MAX_TEXT_CHARACTERS = 500


def open_source(layout: Layout, source: Source, block_bytes: int) -> tuple[RowReader, tuple[str, ...]]:
    """Return a reader of the source's blocks and the names of its columns.

    Raises DataError if a needed column is missing.
    """
    form = find_format(layout.format)
    opened, names = form.open(source, layout, block_bytes)
    reader, names = with_partitions(layout, source, opened, names, has_cells=form.has_cells)
    check_columns(layout, names, source.path)
    return reader, names


def parse_block(layout: Layout, header: tuple[str, ...], block: Block) -> ParsedRows:
    """Parse a block. len(kept) + len(quarantined) == block.num_rows."""
    if block.table is not None:
        return parse_table(layout, block, block.table)
    return find_format(layout.format).parse(layout, header, block)


def parse_text(layout: Layout, header: tuple[str, ...], block: Block) -> ParsedRows:
    """Parse lines of cells."""
    # pyarrow treats a single carriage return as a line end, and Windows ends lines with both
    # characters.
    text = block.text.replace(b"\r\n", b"\n") if b"\r" in block.text else block.text
    table = None if b"\r" in text else _read_typed(layout, header, text)
    if table is not None and table.num_rows == block.num_rows and not invalid_rows(layout, table):
        return ParsedRows(table, np.arange(block.num_rows), [])
    lines = text.removesuffix(b"\n").split(b"\n")
    assert len(lines) == block.num_rows
    reasons = [""] * len(lines)
    for i in _suspicious_lines(layout, header, lines):
        reasons[i] = why_unreadable(layout, header, lines[i])
    kept = [i for i, reason in enumerate(reasons) if not reason]
    table = _read_rows(layout, header, [lines[i] for i in kept])
    if table is None:  # pyarrow refuses a line that our rules accept
        for i in _refused(layout, header, lines, kept):
            reasons[i] = "its values cannot be read"
        kept = [i for i in kept if not reasons[i]]
        table = _read_rows(layout, header, [lines[i] for i in kept])
    if table is None:
        raise DataError(
            f"lines {block.first_line} to {block.first_line + block.num_rows - 1} cannot be read together, but each of them can be read alone"
            + (
                f": is {layout.columns.timestamp} a whole number in some and a date in others?"
                if layout.time_column
                else ""
            )
        )
    quarantined = [
        QuarantinedRow(block.first_line + i, reason, lines[i].decode(errors="replace")[:MAX_TEXT_CHARACTERS])
        for i, reason in enumerate(reasons)
        if reason
    ]
    return ParsedRows(table, np.array(kept, dtype=np.int64), quarantined)


def _suspicious_lines(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> list[int]:
    """Return the lines that may be unreadable; all lines if their rows cannot be told apart."""
    found = broken_lines(layout, lines)
    whole = [i for i in range(len(lines)) if i not in found]
    read = read_texts(layout, header, [lines[i] for i in whole]) if whole else None
    if read is None:
        return sorted(found) if not whole else list(range(len(lines)))
    table, rows, wrong = read
    names = [name for name in layout.numbers if not is_text(layout, name)]
    table, no_numbers = with_numbers(table, names)
    table, garbled = _with_json_lists(layout, table)
    table, unknown = with_labels(layout, table)
    table, no_times = with_times(layout, table)
    bad = no_numbers | garbled.keys() | unknown.keys() | no_times | invalid_rows(layout, table).keys()
    return sorted(found | {whole[i] for i in wrong} | {whole[rows[i]] for i in bad})


def _read_rows(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> pa.Table | None:
    """Return the rows, or None unless every line is a valid row."""
    table = _read_typed(layout, header, b"\n".join(lines) + b"\n" if lines else b"")
    return None if table is None or table.num_rows != len(lines) or invalid_rows(layout, table) else table


def _refused(layout: Layout, header: tuple[str, ...], lines: list[bytes], rows: list[int]) -> list[int]:
    """Return those of `rows` whose lines cannot be read. Bisects the rows."""
    if _read_rows(layout, header, [lines[i] for i in rows]) is not None:
        return []
    if len(rows) == 1:
        return rows
    half = len(rows) // 2
    return _refused(layout, header, lines, rows[:half]) + _refused(layout, header, lines, rows[half:])


def _read_typed(layout: Layout, header: tuple[str, ...], text: bytes) -> pa.Table | None:
    """Return the typed table, None if a row has another number of columns or a value has another
    type."""
    columns = layout.columns
    types = {name: pa.float64() for name in layout.numbers}
    types |= {name: pa.dictionary(pa.int32(), pa.string()) for name in columns.sparse}
    types |= {name: pa.string() for name in layout.needed if name not in types or is_text(layout, name)}
    if not text:
        table = pa.table({name: pa.array([], types[name]) for name in layout.needed})
        return _with_timestamps(layout, with_labels(layout, _with_json_lists(layout, table)[0])[0])
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(text),
            pa.csv.ReadOptions(use_threads=False, column_names=list(header), block_size=len(text) + 1),
            pa.csv.ParseOptions(
                delimiter=layout.delimiter, quote_char='"' if layout.quoted else False, ignore_empty_lines=False
            ),
            pa.csv.ConvertOptions(
                column_types=types,
                include_columns=layout.needed,
                null_values=["", *columns.null_values],
                strings_can_be_null=True,
            ),
        )
        table, garbled = _with_json_lists(layout, table)
        table, unknown = with_labels(layout, table)
        table, no_times = with_times(layout, table)
        return None if garbled or unknown or no_times else table
    except pa.ArrowInvalid:
        return None


def _with_json_lists(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Parse text of list columns as JSON if the layout says so.

    Also return row number -> reason, for text that is not valid JSON.
    """
    reasons: dict[int, str] = {}
    for name in layout.columns.lists if layout.columns.list_separator == JSON else ():
        if pa.types.is_string(table.schema.field(name).type) or pa.types.is_large_string(table.schema.field(name).type):
            lists, bad = json_lists(table[name])
            reasons |= dict.fromkeys(bad, f"{name} is not a JSON list")
            table = table.set_column(table.schema.get_field_index(name), name, lists)
    return table, reasons


def _with_timestamps(layout: Layout, table: pa.Table) -> pa.Table:
    name = layout.columns.timestamp
    if not name:
        return table
    column = table[name].combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    times = parse_timestamps(column)
    if layout.time_column != name:
        return table.append_column(layout.time_column, times)
    return table.set_column(table.schema.get_field_index(name), name, times)


def parse_table(layout: Layout, block: Block, table: pa.Table) -> ParsedRows:
    """Parse a typed block. Its values may still be null or out of range."""
    table, no_numbers = with_typed_numbers(layout, table)
    categorical = [*layout.columns.sparse, *layout.columns.lists]
    table = with_text(table, categorical)
    raw_times = table[layout.columns.timestamp] if layout.columns.timestamp else None
    table, no_times = with_times(layout, table)
    garbled = not_text(table, categorical)
    if not garbled:
        table, garbled = _with_json_lists(layout, table)
    table, unknown = with_labels(layout, table)
    garbled |= unknown | no_numbers
    if raw_times is not None:
        for row in no_times:
            garbled.setdefault(row, f"{layout.columns.timestamp} is {raw_times[row].as_py()!r}, not a time")
    reasons = {**invalid_rows(layout, table), **garbled}
    kept = np.delete(np.arange(block.num_rows), sorted(reasons))
    readable = [name for name in table.column_names if name in layout.numbers]
    quarantined = []
    for i, reason in sorted(reasons.items()):
        row = (table.select(readable) if i in garbled else table).slice(i, 1).to_pylist()[0]
        quarantined.append(QuarantinedRow(block.first_line + i, reason, str(row)[:MAX_TEXT_CHARACTERS]))
    return ParsedRows(table.take(kept) if reasons else table, kept, quarantined)


def parse_objects(layout: Layout, block: Block, read: Callable[[bytes], Any]) -> ParsedRows:
    """Parse a block of one object per line. `read` returns a line's mapping of column to value, or
    raises ValueError.

    An absent column is a missing value, and a list is a multi-hot value.
    """
    schema = _object_schema(layout)
    rows: list[dict[str, Any]] = []
    kept: list[int] = []
    quarantined = []
    lines = block.text.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines):
        try:
            row = _typed_object(layout, schema, read(line))
        except (ValueError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            text = line.decode(errors="replace")[:MAX_TEXT_CHARACTERS]
            quarantined.append(QuarantinedRow(block.first_line + number, reason, text))
        else:
            rows.append(row)
            kept.append(number)
    numbers = np.array(kept, dtype=np.int64)
    whole = Block(0, 0, len(rows), table=pa.Table.from_pylist(rows, schema))
    parsed = parse_table(layout, whole, whole.table)
    refused = [replace(row, line=block.first_line + kept[row.line]) for row in parsed.quarantined]
    return ParsedRows(parsed.table, numbers[parsed.kept], sorted([*quarantined, *refused], key=lambda row: row.line))


def _object_schema(layout: Layout) -> pa.Schema:
    kinds = {name: pa.float64() for name in layout.numbers}
    kinds |= {name: pa.string() for name in layout.numbers if is_text(layout, name)}
    kinds |= {name: pa.list_(pa.string()) for name in layout.columns.lists}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in layout.needed])


def _typed_object(layout: Layout, schema: pa.Schema, row: Any) -> dict[str, Any]:
    """Return the values of a row. Raises ValueError if a value has another type than its column."""
    values = {}
    for field in schema:
        value = row.get(field.name)
        if value is not None and field.type == pa.float64():
            value = _number(layout, field.name, value)
        elif value is not None and field.type == pa.string():
            value = _spelled(field.name, value)
        elif value is not None:
            value = _listed(layout, field.name, value)
        values[field.name] = value
    return values


def _number(layout: Layout, name: str, value: Any) -> float:
    """Return the number. Raises ValueError if it is not one. The rules of rows check infinities."""
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):  # a whole number of 400 digits
        raise ValueError(f"{name} is {repr(value)[:80]}, not {wanted_number(layout, name)}") from None


def _spelled(name: str, value: Any) -> str | None:
    """Return the value as text. Raises ValueError for a list or an object."""
    try:
        return value_to_text(value)
    except ValueError as error:
        raise ValueError(f"{name} has {error}") from None


def _listed(layout: Layout, name: str, value: Any) -> list[str]:
    """Return the values of a list, or of text joined by the separator.

    Raises ValueError for anything else.
    """
    separator = layout.columns.list_separator
    if isinstance(value, str):
        value = (parse_list(value) if separator == JSON else value.split(separator) if value else None) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is {str(value)[:80]!r}, not a list, nor text joined by {separator!r}")
    return [_spelled(name, each) or "" for each in value]  # empty text is a missing value
