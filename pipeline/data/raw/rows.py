"""Parse a block of raw rows into typed columns, and list unreadable rows for the quarantine.

The fast path lets pyarrow read the complete block. If that fails, valid lines are read as text, and
parse_table() finds the wrong values of each column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.config.transforms import LIST, NUMBER, TEXT, VECTOR
from pipeline.data.raw.blocks import Block, ParsedRows, QuarantinedRow, RowReader, Source
from pipeline.data.raw.json_lists import JSON, json_lists, parse_list
from pipeline.data.raw.label_cells import is_text, with_labels
from pipeline.data.raw.layout import Layout, check_columns, find_format, layout_of
from pipeline.data.raw.lines import broken_lines, read_csv, read_texts, with_doubled_quotes
from pipeline.data.raw.parquet_rows import not_text
from pipeline.data.raw.parse_cells import parse_times
from pipeline.data.raw.partitions import with_partitions
from pipeline.data.raw.row_rules import invalid_rows, wanted_number, with_numbers
from pipeline.data.raw.value_types import VIEWS, is_list, plain, value_to_text, why_not_read
from pipeline.data.raw.vectors import with_vectors
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


def names_in(source: Source, config: DataConfig) -> list[str]:
    """Return the names of the columns in a file, and of the folders above it."""
    reader, names = find_format(config.format).open(source, layout_of(config), 1 << 20)
    with reader:
        return [*names, *(name for name, _ in source.partitions if name not in names)]


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
    text = with_doubled_quotes(layout, text)
    doubtful = b"\r" in text or (layout.quoted and not layout.escaped and b'\\"' in text)
    table = None if doubtful else _read_typed(layout, header, text)
    if table is not None and table.num_rows == block.num_rows and not invalid_rows(layout, table):
        return ParsedRows(table, np.arange(block.num_rows), [])
    lines = text.removesuffix(b"\n").split(b"\n")
    assert len(lines) == block.num_rows
    reasons = broken_lines(layout, header, lines)
    whole = [i for i in range(len(lines)) if i not in reasons]
    while (table := read_texts(layout, header, [lines[i] for i in whole])) is None:
        # pyarrow and the csv module split a line differently
        reasons |= dict.fromkeys(_refused(layout, header, lines, whole), "its values cannot be read")
        whole = [i for i in whole if i not in reasons]
    parsed = parse_table(layout, Block(0, 0, len(whole), table=table), table)
    reasons |= {whole[row.line]: row.reason for row in parsed.quarantined}
    quarantined = [
        QuarantinedRow(block.first_line + i, reasons[i], lines[i].decode(errors="replace")[:MAX_TEXT_CHARACTERS])
        for i in sorted(reasons)
    ]
    return ParsedRows(parsed.table, np.array(whole, dtype=np.int64)[parsed.kept], quarantined)


def _refused(layout: Layout, header: tuple[str, ...], lines: list[bytes], rows: list[int]) -> list[int]:
    """Return the rows among `rows` whose lines cannot be read. The function bisects the rows."""
    if read_texts(layout, header, [lines[i] for i in rows]) is not None:
        return []
    if len(rows) == 1:
        return rows
    half = len(rows) // 2
    return _refused(layout, header, lines, rows[:half]) + _refused(layout, header, lines, rows[half:])


def _read_typed(layout: Layout, header: tuple[str, ...], text: bytes) -> pa.Table | None:
    """Return the typed table; None if a row has a wrong number of columns, or a value has a wrong
    type.
    """
    types = {name: pa.float64() for name in layout.numbers if not is_text(layout, name)}
    types |= {name: pa.dictionary(pa.int32(), pa.string()) for name in layout.columns.sparse}
    types = {name: types.get(name, pa.string()) for name in layout.needed}
    try:
        table, reasons = _typed(layout, read_csv(layout, header, text, types))
        return None if reasons else table
    except pa.ArrowInvalid:
        return None


def _typed(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return the table with numbers as float64, times as int64 and lists of text. Also return row
    -> reason for rows with a value that is not a number or time.
    """
    columns, found = layout.columns, []
    table, reasons = with_numbers(layout, table)
    found.append(reasons)
    if columns.timestamp:
        raw = table[columns.timestamp]
        times, rows = parse_times(raw)
        found.append({row: f"{columns.timestamp} is {_shown(raw[row])}, not a time" for row in rows})
        place = table.schema.get_field_index(columns.timestamp)
        if layout.time_column != columns.timestamp:
            table = table.append_column(layout.time_column, times)
        else:
            table = table.set_column(place, columns.timestamp, times)
    for name in columns.raw_lists if columns.list_separator == JSON else ():
        if not is_list(table.schema.field(name).type):
            lists, rows = json_lists(table[name])
            found.append(dict.fromkeys(rows, f"{name} is not a JSON list"))
            table = table.set_column(table.schema.get_field_index(name), name, lists)
    for read in (with_labels, with_vectors):
        table, reasons = read(layout, table)
        found.append(reasons)
    return table, {row: reason for each in reversed(found) for row, reason in each.items()}


def parse_table(layout: Layout, block: Block, table: pa.Table) -> ParsedRows:
    """Parse a block of typed columns. Only this function defines what a raw value means.

    Text files and JSON lines that cannot be read fast become tables of text, and are parsed here
    too.
    """
    for name, role in layout.roles.items():
        if problem := why_not_read(table.schema.field(name).type, role):
            raise DataError(f"column {name!r} has type {table.schema.field(name).type}: {problem}")
        column = plain(table[name])
        if role == LIST and pa.types.is_null(column.type):
            column = column.cast(pa.list_(pa.string()))
        table = table.set_column(table.schema.get_field_index(name), name, column)
    for name in layout.carried:  # Arrow cannot select rows of views and runs
        if table.schema.field(name).type.id in VIEWS:
            table = table.set_column(table.schema.get_field_index(name), name, plain(table[name]))
    garbled = not_text(table, list(layout.roles))
    sound = np.delete(np.arange(table.num_rows), sorted(garbled)) if garbled else None
    raw = table if sound is None else table.take(sound)
    typed, unread = _typed(layout, raw)
    unread = invalid_rows(layout, typed, raw) | unread
    reasons = garbled | {row if sound is None else int(sound[row]): reason for row, reason in unread.items()}
    kept = np.delete(np.arange(table.num_rows), sorted(reasons))
    readable = [name for name in table.column_names if name in layout.numbers]
    quarantined = []
    for i, reason in sorted(reasons.items()):
        row = (table.select(readable) if i in garbled else table).slice(i, 1).to_pylist()[0]
        quarantined.append(QuarantinedRow(block.first_line + i, reason, str(row)[:MAX_TEXT_CHARACTERS]))
    good = np.delete(np.arange(typed.num_rows), sorted(unread))
    return ParsedRows(typed.take(good) if unread else typed, kept, quarantined)


def parse_objects(layout: Layout, block: Block, read: Callable[[bytes], Any]) -> ParsedRows:
    """Parse a block with one object per line. `read` returns the mapping column -> value of a line,
    or raises ValueError.

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
    kinds = dict.fromkeys(layout.columns.lists, pa.list_(pa.string()))
    kinds |= dict.fromkeys(layout.columns.vectors, pa.list_(pa.float64()))
    return pa.schema([(name, kinds.get(name, pa.string())) for name in layout.needed])


def _typed_object(layout: Layout, schema: pa.Schema, row: Any) -> dict[str, Any]:
    """Return the values of a row as text. Raises ValueError if a value has another type than its column."""
    values, roles = {}, layout.roles
    for name in schema.names:
        value = row.get(name)
        if value is not None:
            value = READ_AS.get(roles.get(name, TEXT), _spelled)(layout, name, value)
        values[name] = value
    return values


def _spelled(layout: Layout, name: str, value: Any) -> str | None:
    """Return one value as text. Raises ValueError for a list or an object."""
    try:
        is_number = layout.roles.get(name) == NUMBER
        return value_to_text(int(value) if is_number and isinstance(value, bool) else value)
    except ValueError as error:
        if is_number:
            raise ValueError(f"{name} is {repr(value)[:80]}, not {wanted_number(layout, name)}") from None
        raise ValueError(f"{name} has {error}") from None


def _listed(layout: Layout, name: str, value: Any) -> list[str]:
    """Return the elements of a list, or of a text in which the separator joins elements.

    Raises ValueError for any other value.
    """
    separator = layout.columns.list_separator
    if isinstance(value, str):
        value = (parse_list(value) if separator == JSON else value.split(separator) if value else None) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is {str(value)[:80]!r}, not a list, nor text joined by {separator!r}")
    return [_spelled(layout, name, each) or "" for each in value]  # empty text is a missing value


def _vector(layout: Layout, name: str, value: Any) -> list[float]:
    """Return the numbers of a list or of a text, NaN for null. Raises ValueError for any other value."""
    values = value if isinstance(value, list) else _listed(layout, name, value)
    try:
        return [math.nan if each is None else float(each) for each in values]
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} is {repr(value)[:80]}, not a list of finite 32-bit numbers") from None


READ_AS = {LIST: _listed, VECTOR: _vector}  # values of an object


def _shown(value: pa.Scalar) -> str:
    return repr(value.as_py())[:80]
