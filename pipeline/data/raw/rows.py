"""Parse a block of raw rows into typed columns, and list the rows that cannot be read for the quarantine.

The fast path lets pyarrow read the whole block. In a block with something wrong in it, suspects.py finds by whole columns
which lines may be at fault; those alone are looked at one by one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from pipeline.config.labels import LabelConfig
from pipeline.data.raw.cells import LARGEST_FLOAT32, is_number, is_time, parse_timestamps
from pipeline.data.raw.json_lists import JSON, is_json_list, json_lists, parse_list
from pipeline.data.raw.label_cells import is_text, label_number, wanted_text, with_labels
from pipeline.data.raw.layout import Layout, check_columns, find_format
from pipeline.data.raw.parquet_rows import not_text, with_text
from pipeline.data.raw.partitions import with_partitions
from pipeline.data.raw.sequences import cell_length, uneven, uneven_rows
from pipeline.data.raw.source import MAX_LINE_BYTES, Block, RowReader, Source
from pipeline.data.raw.spelling import spell_value
from pipeline.data.raw.suspects import broken_lines, read_texts, with_numbers, with_times
from pipeline.data.raw.weighted import bad_cell, bad_weights
from pipeline.runtime.errors import DataError

MAX_TEXT_CHARACTERS = 500
WANTED_WEIGHT = "a finite number of 0 at least"
csv.field_size_limit(MAX_LINE_BYTES)  # 128 KiB by default


def open_source(layout: Layout, source: Source, block_bytes: int) -> tuple[RowReader, tuple[str, ...]]:
    """A reader of the source's blocks, and the names of its columns. Raises DataError where a needed one is missing."""
    form = find_format(layout.format)
    opened, names = form.open(source, layout, block_bytes)
    reader, names = with_partitions(layout, source, opened, names, has_cells=form.has_cells)
    check_columns(layout, names, source.path)
    return reader, names


@dataclass(frozen=True)
class QuarantinedRow:
    """A row that was left out: `line` counts from 1, a header included; in Parquet files it is the row."""

    line: int
    reason: str
    text: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class ParsedRows:
    """`table` has the needed columns: numbers as float64, timestamp int64; `kept` are row numbers in the block."""

    table: pa.Table
    kept: np.ndarray
    quarantined: list[QuarantinedRow]


def parse_block(layout: Layout, header: tuple[str, ...], block: Block) -> ParsedRows:
    """len(kept) + len(quarantined) == block.num_rows."""
    if block.table is not None:
        return parse_table(layout, block, block.table)
    return find_format(layout.format).parse(layout, header, block)


def parse_text(layout: Layout, header: tuple[str, ...], block: Block) -> ParsedRows:
    """Lines of cells."""
    # pyarrow takes a lone carriage return for a line end, and Windows ends lines with both.
    text = block.text.replace(b"\r\n", b"\n") if b"\r" in block.text else block.text
    table = None if b"\r" in text else _read_typed(layout, header, text)
    if table is not None and table.num_rows == block.num_rows and not _invalid_rows(layout, table):
        return ParsedRows(table, np.arange(block.num_rows), [])
    lines = text.removesuffix(b"\n").split(b"\n")
    assert len(lines) == block.num_rows
    reasons = [""] * len(lines)
    for i in _suspects(layout, header, lines):
        reasons[i] = _why_unreadable(layout, header, lines[i])
    kept = [i for i, reason in enumerate(reasons) if not reason]
    table = _read_rows(layout, header, [lines[i] for i in kept])
    if table is None:  # a line that only pyarrow takes offence at
        for i in _refused(layout, header, lines, kept):
            reasons[i] = "its values cannot be read"
        kept = [i for i in kept if not reasons[i]]
        table = _read_rows(layout, header, [lines[i] for i in kept])
    if table is None:
        raise DataError(
            f"lines {block.first_line} to {block.first_line + block.num_rows - 1} cannot be read, and none of them alone is at fault"
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


def _suspects(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> list[int]:
    """The lines that may be unreadable; all of them where their rows cannot be told apart."""
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
    bad = no_numbers | garbled.keys() | unknown.keys() | no_times | _invalid_rows(layout, table).keys()
    return sorted(found | {whole[i] for i in wrong} | {whole[rows[i]] for i in bad})


def _read_rows(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> pa.Table | None:
    """None unless every line becomes a row with nothing wrong in it."""
    table = _read_typed(layout, header, b"\n".join(lines) + b"\n" if lines else b"")
    return None if table is None or table.num_rows != len(lines) or _invalid_rows(layout, table) else table


def _refused(layout: Layout, header: tuple[str, ...], lines: list[bytes], rows: list[int]) -> list[int]:
    """Those of `rows` whose lines cannot be read, found by halves."""
    if _read_rows(layout, header, [lines[i] for i in rows]) is not None:
        return []
    if len(rows) == 1:
        return rows
    half = len(rows) // 2
    return _refused(layout, header, lines, rows[:half]) + _refused(layout, header, lines, rows[half:])


def _read_typed(layout: Layout, header: tuple[str, ...], text: bytes) -> pa.Table | None:
    """None where a row has another number of columns, or a value another type."""
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
    """Text of multi-hot columns read as JSON where the layout says so, and row -> reason where it is none."""
    reasons: dict[int, str] = {}
    for name in layout.columns.lists if layout.columns.list_separator == JSON else ():
        if pa.types.is_string(table.schema.field(name).type) or pa.types.is_large_string(table.schema.field(name).type):
            lists, bad = json_lists(table[name])
            reasons |= dict.fromkeys(bad, f"{name} is no JSON list")
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


def _invalid_rows(layout: Layout, table: pa.Table) -> dict[int, str]:
    """Row -> reason, of what types alone do not catch."""
    reasons: dict[int, str] = {}

    def note(column: str, invalid: pa.ChunkedArray, wanted: str) -> None:
        if pc.any(invalid).as_py():
            for row in np.flatnonzero(invalid.to_numpy()):
                reasons.setdefault(int(row), f"{column} is {table[column][int(row)].as_py()!r}, not {wanted}")

    for name, label in layout.columns.all_labels.items():
        column, invalid = table[name], invalid_labels(label, table[name])
        if label.mask is not None:  # a missing value is one where it counts
            counts = pc.fill_null(pc.equal(table[label.mask], 1.0), False)
            invalid = pc.if_else(pc.is_null(column, nan_is_null=True), counts, invalid)
        note(name, pc.fill_null(invalid, True), wanted_label(label))
    for name in layout.weights:
        note(name, pc.fill_null(pc.invert(_within(table[name], 0.0, LARGEST_FLOAT32)), True), WANTED_WEIGHT)
    for name in layout.columns.dense:
        # NaN compares false: it is a missing value, as pandas writes it.
        ends = pc.min_max(table[name]).as_py().values()
        if any(end is not None and abs(end) > LARGEST_FLOAT32 for end in ends):
            note(name, pc.fill_null(pc.greater(pc.abs(table[name]), LARGEST_FLOAT32), False), "a finite 32-bit number")
    if layout.columns.timestamp:
        note(layout.columns.timestamp, pc.is_null(table[layout.time_column]), "a time")
    for row, reason in (*uneven_rows(layout.columns, table), *bad_weights(layout.columns, table)):
        reasons.setdefault(row, reason)
    return reasons


def _within(column: pa.ChunkedArray, low: float, high: float) -> pa.ChunkedArray:
    """NaN is within nothing."""
    return pc.and_(pc.greater_equal(column, low), pc.less_equal(column, high))


def invalid_labels(label: LabelConfig, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Of float64 values, which are none of that label; null where a value is."""
    if label.kind == "binary":
        return pc.invert(pc.is_in(column, pa.array([0.0, 1.0])))
    if label.kind == "regression":
        return pc.invert(_within(column, -LARGEST_FLOAT32, LARGEST_FLOAT32))
    is_whole = pc.equal(pc.floor(column), column)
    return pc.invert(pc.and_(is_whole, _within(column, 0.0, float((label.num_buckets or 0) - 1))))


def wanted_label(label: LabelConfig) -> str:
    if label.values:
        return wanted_text(label)
    if label.threshold is not None:
        return "a number"
    if label.kind == "ordinal":
        return f"a whole number from 0 to {(label.num_buckets or 0) - 1}"
    return "0 or 1" if label.kind == "binary" else "a finite 32-bit number"


def _why_no_label(label: LabelConfig, cell: str, counts: bool) -> str:
    """Empty, or what the text of a cell should be; where it does not count, it may be missing."""
    value = label_number(label, cell)
    if math.isnan(value) and (not cell or (is_number(cell) and not label.values)) and label.mask is not None:
        return wanted_label(label) if counts else ""
    return "" if _is_label(label, value) else wanted_label(label)


def _is_label(label: LabelConfig, value: float) -> bool:
    """As invalid_labels has it, of one value; NaN is none."""
    if label.kind == "binary":
        return value in (0.0, 1.0)
    if label.kind == "regression":
        return abs(value) <= LARGEST_FLOAT32
    return 0.0 <= value <= (label.num_buckets or 0) - 1 and value.is_integer()


def _why_unreadable(layout: Layout, header: tuple[str, ...], line: bytes) -> str:
    """Empty where the line is sound."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    if "\r" in text:
        return "a carriage return inside the row"
    cells = split_cells(layout, text)
    if not cells:
        return "no columns" if not text else "a quote that is not closed in its line"
    if len(cells) != len(header):
        return f"{len(cells)} columns, not {len(header)}"
    values = dict(zip(header, cells, strict=True))
    labels = layout.columns.all_labels
    for name, label in labels.items():
        cell = "" if values[name] in layout.columns.null_values else values[name]
        counts = label.mask is None or label_number(labels[label.mask], values[label.mask]) == 1.0
        if problem := _why_no_label(label, cell, counts):
            return f"{name} is {values[name]!r}, not {problem}"
    for name in layout.weights:
        if not is_number(values[name]) or not 0.0 <= float(values[name]) <= LARGEST_FLOAT32:
            return f"{name} is {values[name]!r}, not {WANTED_WEIGHT}"
    for name in layout.columns.dense:
        if values[name] and values[name] not in layout.columns.null_values and not is_number(values[name]):
            return f"{name} is {values[name]!r}, not a finite 32-bit number"
    for name in layout.columns.lists if layout.columns.list_separator == JSON else ():
        if values[name] not in layout.columns.null_values and not is_json_list(values[name]):
            return f"{name} is no JSON list"
    if problem := _why_uneven(layout, values):
        return problem
    for name in layout.columns.weighted:
        if problem := bad_cell(layout.columns, name, values[name]):
            return problem
    if layout.columns.timestamp and not is_time(values[layout.columns.timestamp]):
        return f"{layout.columns.timestamp} is {values[layout.columns.timestamp]!r}, not a time"
    return ""


def _why_uneven(layout: Layout, values: dict[str, str]) -> str:
    """Empty, or which sequence of a line is not as long as the one that it describes."""
    for name, sequence in layout.columns.sequence.items():
        if sequence.beside is not None:
            own, leader = (cell_length(values[each], layout.columns) for each in (name, sequence.beside))
            if own != leader:
                return uneven(name, own, sequence.beside, leader)
    return ""


def split_cells(layout: Layout, text: str) -> list[str]:
    """Empty where a quote is not closed in its line: rows over several lines are not read."""
    if not layout.quoted:
        return text.split(layout.delimiter)
    reader = csv.reader([text + "\n", "\n"], delimiter=layout.delimiter)
    try:
        cells = next(reader)
    except csv.Error:  # a carriage return inside the row
        return []
    return cells if reader.line_num == 1 else []


def parse_table(layout: Layout, block: Block, table: pa.Table) -> ParsedRows:
    """A block that is typed, by its file or its reader: values may still be null or out of range."""
    for name in layout.numbers:
        if not is_text(layout, name):
            table = table.set_column(table.schema.get_field_index(name), name, _as_numbers(name, table[name]))
    categorical = [*layout.columns.sparse, *layout.columns.lists]
    table = with_text(table, categorical)
    raw_times = table[layout.columns.timestamp] if layout.columns.timestamp else None
    table, no_times = with_times(layout, table)
    garbled = not_text(table, categorical)
    if not garbled:
        table, garbled = _with_json_lists(layout, table)
    table, unknown = with_labels(layout, table)
    garbled |= unknown
    if raw_times is not None:
        for row in no_times:
            garbled.setdefault(row, f"{layout.columns.timestamp} is {raw_times[row].as_py()!r}, not a time")
    reasons = {**_invalid_rows(layout, table), **garbled}
    kept = np.delete(np.arange(block.num_rows), sorted(reasons))
    readable = [name for name in table.column_names if name in layout.numbers]
    quarantined = []
    for i, reason in sorted(reasons.items()):
        row = (table.select(readable) if i in garbled else table).slice(i, 1).to_pylist()[0]
        quarantined.append(QuarantinedRow(block.first_line + i, reason, str(row)[:MAX_TEXT_CHARACTERS]))
    return ParsedRows(table.take(kept) if reasons else table, kept, quarantined)


def parse_objects(layout: Layout, block: Block, read: Callable[[bytes], Any]) -> ParsedRows:
    """The rows of a block whose lines `read` turns into mappings of columns to values, or refuses by a ValueError.

    For formats of one object a line: an absent column is a missing value, a list is one of a multi-hot column.
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
    """Raises ValueError or TypeError for a value of another type than its column's."""
    values = {}
    for field in schema:
        value = row.get(field.name)
        if value is not None and field.type == pa.float64():
            value = float(value)
        elif value is not None and field.type == pa.string():
            value = _spelled(field.name, value)
        elif value is not None:
            value = _listed(layout, field.name, value)
        values[field.name] = value
    return values


def _spelled(name: str, value: Any) -> str | None:
    """Raises ValueError for a list or an object."""
    try:
        return spell_value(value)
    except ValueError as error:
        raise ValueError(f"{name} has {error}") from None


def _listed(layout: Layout, name: str, value: Any) -> list[str]:
    """Of a list, or of text joined by the separator, as in the other formats. Raises ValueError for anything else."""
    separator = layout.columns.list_separator
    if isinstance(value, str):
        value = (parse_list(value) if separator == JSON else value.split(separator) if value else None) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is {str(value)[:80]!r}, not a list, nor text joined by {separator!r}")
    return [_spelled(name, each) or "" for each in value]  # empty text is a missing value


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
