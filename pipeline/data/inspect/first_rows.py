"""Read the first rows of a raw file as text, with the readers and the table of types that prepare uses."""

from __future__ import annotations

import codecs
import csv
import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.columns import ColumnsConfig
from pipeline.config.transforms import LIST, TEXT
from pipeline.data.raw.formats.criteo_tsv import criteo_columns
from pipeline.data.raw.layout import BACKSLASH, Layout
from pipeline.data.raw.lines import escaped_quote, read_texts, split_cells, why_no_row, with_doubled_quotes
from pipeline.data.raw.parquet_rows import ParquetReader
from pipeline.data.raw.parse_cells import parse_numbers
from pipeline.data.raw.source import TextReader, find_sources, utf16_of
from pipeline.data.raw.value_types import FRACTIONS, is_list, kind_of, spelled, value_to_text, why_not_read
from pipeline.runtime.errors import DataError

BLOCK_BYTES = 1 << 22
DELIMITERS = ("\t", ",", ";", "|", "::", "\x01")
SNIFFED_LINES = 200
SHARE = 0.9  # of the lines have as many cells as the first
LEAST_VECTOR = 4  # numbers a row


@dataclass
class FirstRows:
    """The first rows of a file. `table` has the columns c0, c1, ... as text; lists are joined by |.

    header: the columns' names, if no line of the file names them. unusable: number of a column ->
    why prepare would refuse it.
    """

    format: str
    names: list[str]
    table: pa.Table
    delimiter: str | None = None
    encoding: str = "utf-8"
    quotes: str = "doubled"
    header: list[str] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)


def read_first_rows(path: str, max_rows: int) -> FirstRows:
    """Return at most about `max_rows` rows. Raises DataError if the file cannot be read."""
    suffix = path.removesuffix(".gz").rpartition(".")[2].lower()
    found = (
        _parquet(path, max_rows)
        if suffix in ("parquet", "pq")
        else _json_lines(path, max_rows)
        if suffix in ("jsonl", "ndjson", "json")
        else _text(path, max_rows)
    )
    for name, count in Counter(found.names).items():
        if count > 1:
            numbers = [number for number, each in enumerate(found.names) if each == name]
            found.unusable |= dict.fromkeys(numbers, f"{count} columns have this name: rename all but one")
    found.table = found.table.rename_columns([f"c{number}" for number in range(len(found.names))]).slice(0, max_rows)
    return found


def _parquet(path: str, max_rows: int) -> FirstRows:
    (source,) = find_sources(path)
    with ParquetReader(source, [], BLOCK_BYTES) as probe:
        schema = probe.schema()
    unusable, columns = {}, []
    for number, column in enumerate(schema):
        if problem := why_not_read(column.type, LIST if is_list(column.type) else TEXT):
            unusable[number] = f"type {column.type}: {problem}"
    readable = [name for number, name in enumerate(schema.names) if number not in unusable]
    tables, count = [], 0
    with ParquetReader(source, readable, BLOCK_BYTES) as reader:
        for block in reader.blocks():
            tables.append(block.table)
            count += block.num_rows
            if count >= max_rows:
                break
    rows = pa.concat_tables([each for each in tables if each is not None]) if tables else schema.empty_table()
    for number, column in enumerate(schema):
        if number in unusable:
            columns.append(pa.nulls(rows.num_rows, pa.string()))
        elif not is_list(column.type):
            is_fraction = kind_of(column.type) == FRACTIONS  # NaN is a missing value
            values = (
                pc.if_else(pc.is_nan(rows[column.name]), None, rows[column.name]) if is_fraction else rows[column.name]
            )
            columns.append(spelled(values, TEXT))
        else:
            lists = spelled(rows[column.name], LIST)
            lengths = pc.unique(pc.list_value_length(lists).drop_null())
            if kind_of(column.type) == FRACTIONS and len(lengths) == 1 and lengths[0].as_py() >= LEAST_VECTOR:
                unusable[number] = (
                    f"a vector of {lengths[0]} numbers a row: to read it, add columns.vectors={{{column.name}: {lengths[0]}}}"
                )
            columns.append(pc.binary_join(lists, "|"))
    return FirstRows("parquet", schema.names, pa.table(columns, names=schema.names), unusable=unusable)


def _json_lines(path: str, max_rows: int) -> FirstRows:
    (source,) = find_sources(path)
    rows: list[dict[str, Any]] = []
    with TextReader(source, BLOCK_BYTES) as reader:
        for block in reader.blocks():
            for line in block.text.split(b"\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # prepare quarantines it
                rows += [row] if isinstance(row, dict) else []
            if len(rows) >= max_rows:
                break
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise DataError(
            f"no line of {path} is a JSON object: write one object in each line; jq -c '.[]' converts a list"
        )
    unusable: dict[int, str] = {}

    def text(number: int, value: Any) -> str | None:
        try:
            return (
                "|".join(value_to_text(each) or "" for each in value)
                if isinstance(value, list)
                else value_to_text(value)
            )
        except ValueError as error:
            unusable[number] = f"{error}: give text, numbers, or lists of them"
            return None

    columns = [
        pa.array([text(number, row.get(name)) for row in rows], pa.string()) for number, name in enumerate(names)
    ]
    return FirstRows("jsonl", names, pa.table(columns, names=names), unusable=unusable)


def _text(path: str, max_rows: int) -> FirstRows:
    (source,) = find_sources(path)
    encoding = _encoding(path)
    with TextReader(source, BLOCK_BYTES, encoding) as reader:
        reader.header()  # it refuses lines that end in a carriage return alone
    with TextReader(source, BLOCK_BYTES, encoding) as reader:
        block = next(reader.blocks(), None)
    lines = block.text.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").split(b"\n") if block else []
    sample = [line.decode(errors="replace") for line in lines[:SNIFFED_LINES] if line]
    if not sample:
        raise DataError(f"source={path} holds no rows: give a file that has some below its line of names")
    delimiter = _delimiter(sample)
    kind = "tsv" if delimiter == "\t" else "csv"
    quotes = BACKSLASH if kind == "csv" and any(map(escaped_quote(delimiter).search, sample)) else "doubled"
    layout = Layout(ColumnsConfig(label=""), kind, quoted=kind == "csv").written(delimiter, encoding, quotes)
    sample = [with_doubled_quotes(layout, line.encode()).decode() for line in sample]
    cells = [split_cells(layout, line.replace(layout.separator or "\0", layout.delimiter)) for line in sample]
    names, header = cells[0], []
    has_header = _has_header(cells)
    if not has_header and delimiter == "\t" and len(names) == len(criteo_columns().dense + criteo_columns().sparse) + 1:
        kind, names = "criteo_tsv", ["label", *criteo_columns().dense, *criteo_columns().sparse]
    elif not has_header:
        names = header = [f"column_{number}" for number in range(len(names))]
    numbered = tuple(f"c{number}" for number in range(len(names)))
    layout = Layout(ColumnsConfig(label=""), kind, carried=numbered, quoted=layout.quoted).written(
        delimiter, encoding, quotes
    )
    tables: list[pa.Table] = []
    count, bad = 0, ""
    with TextReader(source, BLOCK_BYTES, encoding, layout.separator) as reader:
        if has_header:
            reader.header()
        for block in reader.blocks():
            text = with_doubled_quotes(layout, block.text).replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
            whole = [line for line in text if len(split_cells(layout, line.decode(errors="replace"))) == len(names)]
            bad = bad or next(filter(None, (why_no_row(layout, numbered, line) for line in text[:SNIFFED_LINES])), "")
            if whole and (table := read_texts(layout, numbered, whole)) is not None:
                tables.append(table)
            count += block.num_rows
            if count >= max_rows:
                break
    if count and not tables:
        raise DataError(
            f"{path}: none of {count:,} lines is a row like its first line, which has {len(names)} cells; a line has {bad or 'other cells'}. "
            "Give a file that begins with the line of names and has a row in each line"
        )
    empty = pa.table({name: pa.array([], pa.string()) for name in numbered})
    shown = None if delimiter in ("\t", ",") else delimiter
    return FirstRows(kind, names, pa.concat_tables([empty, *tables]), shown, encoding, quotes, header)


def _encoding(path: str) -> str:
    """Return a text file's encoding: UTF-8, UTF-16 or UTF-32 by its mark or its zero bytes, otherwise Latin-1, which reads all
    bytes.
    """
    import gzip

    from pipeline.runtime.storage import storage

    try:
        with storage.open_file(path, "rb") as raw:
            begin = (gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw).read(1 << 16)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return "utf-8"  # the reader of rows reports the damaged file
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if encoding := utf16_of(begin):
        return encoding
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return "latin-1" if not any(begin.count(byte) for byte in range(9)) else "utf-8"
    return "utf-8"


def _delimiter(lines: list[str]) -> str:
    """Return the delimiter that gives most lines as many cells as the first line; a comma if there is none."""
    best, most = ",", 1
    for delimiter in DELIMITERS:
        if len(delimiter) > 1 or delimiter == "\t":
            counts = [line.count(delimiter) + 1 for line in lines]
        else:
            counts = [len(row) for row in csv.reader(lines, delimiter=delimiter)]
        alike = sum(count == counts[0] for count in counts)
        if counts[0] > most and alike >= SHARE * len(counts):
            best, most = delimiter, counts[0]
    return best


def _has_header(cells: list[list[str]]) -> bool:
    """Return True if the first line has names: no numbers, and no cell that a later line repeats in its column."""
    first, rest = cells[0], cells[1:]
    if any(not parse_numbers(pa.chunked_array([[cell]]))[1] for cell in first if cell.strip()):
        return False
    later = [{row[number] for row in rest if number < len(row)} for number in range(len(first))]
    return bool(rest) and not any(cell and cell in seen for cell, seen in zip(first, later, strict=True))
