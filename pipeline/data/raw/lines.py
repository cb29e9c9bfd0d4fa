"""Split lines of text into cells, and find the lines that are not valid rows."""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.csv

from pipeline.data.raw.layout import Layout
from pipeline.data.raw.source import MAX_LINE_BYTES

csv.field_size_limit(MAX_LINE_BYTES)  # 128 KiB by default
ESCAPED_QUOTE = re.compile(rb'(?<!\\)((?:\\\\)*)\\"')


def with_doubled_quotes(layout: Layout, text: bytes) -> bytes:
    """Return the text with quotes inside cells doubled instead of escaped. Other backslashes stay."""
    return ESCAPED_QUOTE.sub(rb'\1""', text) if layout.escaped else text


def read_csv(
    layout: Layout, header: tuple[str, ...], text: bytes, types: dict[str, pa.DataType], **options: Any
) -> pa.Table:
    """Return the needed columns of lines of cells, with these types. Raises pa.ArrowInvalid.

    Empty text and data.columns.null_values are missing values.
    """
    if not text:
        return pa.table({name: pa.array([], types[name]) for name in layout.needed})
    return pa.csv.read_csv(
        pa.BufferReader(text),
        pa.csv.ReadOptions(use_threads=False, column_names=list(header), block_size=len(text) + 1),
        pa.csv.ParseOptions(
            delimiter=layout.delimiter,
            quote_char='"' if layout.quoted else False,
            ignore_empty_lines=False,
            **options,
        ),
        pa.csv.ConvertOptions(
            column_types=types,
            include_columns=layout.needed,
            null_values=["", *layout.columns.null_values],
            strings_can_be_null=True,
        ),
    )


def read_texts(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> pa.Table | None:
    """Return the needed columns of complete lines as text; None if pyarrow would read other rows than these lines."""
    text = b"\n".join(lines) + b"\n" if lines else b""
    try:
        table = read_csv(layout, header, text, dict.fromkeys(layout.needed, pa.string()))
    except pa.ArrowInvalid:
        return None
    return table if table.num_rows == len(lines) else None


def broken_lines(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> dict[int, str]:
    """Return line -> reason, for lines that are not valid rows. A line is checked separately if
    pyarrow cannot split it, or if it is empty, not UTF-8, or has quotes inside a cell.
    """
    whole = b"\n".join(lines)
    found = {i for i, line in enumerate(lines) if not line}
    if not _is_utf8(whole):
        found |= {i for i, line in enumerate(lines) if not _is_utf8(line)}
    if b"\r" in whole:
        found |= {i for i, line in enumerate(lines) if b"\r" in line}
    if layout.quoted and b'"' in whole:
        well_quoted = _well_quoted(layout.delimiter)
        found |= {i for i, line in enumerate(lines) if b'\\"' in line or not well_quoted.fullmatch(line)}
    rest = [i for i in range(len(lines)) if i not in found]
    found |= {rest[i] for i in _of_other_width(layout, header, [lines[i] for i in rest])}
    reasons = {i: why_no_row(layout, header, lines[i]) for i in sorted(found)}
    return {i: reason for i, reason in reasons.items() if reason}


def _of_other_width(layout: Layout, header: tuple[str, ...], lines: list[bytes]) -> list[int]:
    """Return the lines with a wrong number of columns. Return all lines if it is unknown which lines have it."""
    wrong: list[int] = []

    def note(row: pa.csv.InvalidRow) -> str:
        wrong.append(row.number - 1)
        return "skip"

    text = b"\n".join(lines) + b"\n" if lines else b""
    try:
        types = dict.fromkeys(layout.needed, pa.string())
        table = read_csv(layout, header, text, types, invalid_row_handler=note)
    except pa.ArrowInvalid:
        return list(range(len(lines)))
    return wrong if table.num_rows + len(wrong) == len(lines) else list(range(len(lines)))


def why_no_row(layout: Layout, header: tuple[str, ...], line: bytes) -> str:
    """Return the reason why a line (text without its line end) is not a valid row; "" if it is valid."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8; data.encoding=latin-1, or the encoding that the file has, reads it"
    if "\r" in text:
        return "a carriage return inside the row"
    if layout.quoted and not layout.escaped and escaped_quote(layout.delimiter).search(text):
        return "a backslash before a quote inside a quoted cell, as Spark writes it; data.quotes=backslash reads it"
    cells = split_cells(layout, text)
    if not cells:
        return "no columns" if not text else "a quote that is not closed in its line"
    return "" if len(cells) == len(header) else f"{len(cells)} columns, not {len(header)}"


def split_cells(layout: Layout, text: str) -> list[str]:
    """Split a line into cells.

    Return [] if a quote is not closed: rows over several lines are not supported.
    """
    if not layout.quoted:
        return text.split(layout.delimiter)
    reader = csv.reader([text + "\n", "\n"], delimiter=layout.delimiter)
    try:
        cells = next(reader)
    except csv.Error:  # a carriage return inside the row
        return []
    return cells if reader.line_num == 1 else []


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache
def _well_quoted(delimiter: str) -> re.Pattern[bytes]:
    """Return a pattern for lines in which each cell has no quotes, or is completely quoted. The
    pattern is possessive and never backtracks.
    """
    mark = re.escape(delimiter.encode())
    cell = rb'(?:"[^"]*+(?:""[^"]*+)*+"|[^"' + mark + rb"]*+)"
    return re.compile(cell + rb"(?:" + mark + cell + rb")*+")


@lru_cache
def escaped_quote(delimiter: str) -> re.Pattern[str]:
    r"""Return a pattern for a quoted cell in which text follows \", neither its end nor a doubled quote."""
    mark = re.escape(delimiter)
    return re.compile(rf'(?:^|{mark})"(?:[^"\\]|\\[^"]|"")*\\"(?:[^"{mark}]|"(?:{mark}|$))')
