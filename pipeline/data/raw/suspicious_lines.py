"""Find the lines of a text block that may be unreadable by checking columns, so that few lines are
checked one by one.

Naming a valid line only costs time. A missed line only costs time too: rows that pyarrow refuses
are found by bisection.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parse_cells import is_time, parse_timestamps
from pipeline.data.raw.value_text import to_text

WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
NUMBER = r"^\s*([+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(?i:inf|infinity)|(?i:nan))\s*$"


def broken_lines(layout: Layout, lines: list[bytes]) -> set[int]:
    """Return lines that are empty, not UTF-8, contain a carriage return, or use quotes inside a
    cell."""
    whole = b"\n".join(lines)
    found = {i for i, line in enumerate(lines) if not line}
    if not _is_utf8(whole):
        found |= {i for i, line in enumerate(lines) if not _is_utf8(line)}
    if b"\r" in whole:
        found |= {i for i, line in enumerate(lines) if b"\r" in line}
    if layout.quoted and b'"' in whole:
        well_quoted = _well_quoted(layout.delimiter)
        found |= {i for i, line in enumerate(lines) if not well_quoted.fullmatch(line)}
    return found


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache
def _well_quoted(delimiter: str) -> re.Pattern[bytes]:
    """Return the pattern of lines whose cells have no quote or are completely quoted.

    It is possessive and never backtracks.
    """
    mark = re.escape(delimiter.encode())
    cell = rb'(?:"[^"]*+(?:""[^"]*+)*+"|[^"' + mark + rb"]*+)"
    return re.compile(cell + rb"(?:" + mark + cell + rb")*+")


def read_texts(
    layout: Layout, header: tuple[str, ...], lines: list[bytes]
) -> tuple[pa.Table, np.ndarray, set[int]] | None:
    """Return the needed columns as text, which of `lines` are its rows, and the lines with another
    number of columns.

    Return None if pyarrow reads another number of rows.
    """
    wrong: set[int] = set()

    def note(row: pa.csv.InvalidRow) -> str:
        wrong.add(row.number - 1)
        return "skip"

    text = b"\n".join(lines) + b"\n"
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(text),
            pa.csv.ReadOptions(use_threads=False, column_names=list(header), block_size=len(text) + 1),
            pa.csv.ParseOptions(
                delimiter=layout.delimiter,
                quote_char='"' if layout.quoted else False,
                ignore_empty_lines=False,
                invalid_row_handler=note,
            ),
            pa.csv.ConvertOptions(
                column_types=dict.fromkeys(layout.needed, pa.string()),
                include_columns=layout.needed,
                null_values=["", *layout.columns.null_values],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:
        return None
    rows = np.array([i for i in range(len(lines)) if i not in wrong], dtype=np.int64)
    return (table, rows, wrong) if table.num_rows == len(rows) else None


def with_numbers(table: pa.Table, names: list[str]) -> tuple[pa.Table, set[int]]:
    """Convert text columns to float64, null if a text is not a number.

    Return also the rows with such a text.
    """
    found: set[int] = set()
    for name in names:
        column = table[name]
        try:
            numbers = column.cast(pa.float64())
        except pa.ArrowInvalid:
            good = pc.match_substring_regex(column, NUMBER)
            found |= set(np.flatnonzero(pc.fill_null(pc.invert(good), False).to_numpy()).tolist())
            numbers = pc.ascii_trim_whitespace(pc.if_else(good, column, None)).cast(pa.float64())
        table = table.set_column(table.schema.get_field_index(name), name, numbers)
    return table, found


def _times_of(texts: pa.Array) -> pa.Array:
    """Parse texts that are times, with or without a zone."""
    try:
        return parse_timestamps(texts)
    except pa.ArrowInvalid:
        alone = {text: parse_timestamps(pa.array([text]))[0].as_py() for text in texts.unique().to_pylist() if text}
        return pa.array([alone.get(text) for text in texts.to_pylist()], pa.int64())


def with_times(layout: Layout, table: pa.Table) -> tuple[pa.Table, set[int]]:
    """Convert the column of times to int64, null if a value is not a time.

    Return also the rows with such a value.
    """
    name = layout.columns.timestamp
    if not name:
        return table, set()
    column = table[name].combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found: set[int] = set()
    try:
        times = parse_timestamps(column)
    except pa.ArrowInvalid:
        column = to_text(column)
        texts = column.to_pylist()
        good = np.array([text is not None and is_time(text) for text in texts], dtype=bool)
        # Whole numbers and dates have different units, so a column has either whole numbers or
        # dates.
        whole = np.array([text is not None and WHOLE.fullmatch(text) is not None for text in texts], dtype=bool)
        good &= whole if 2 * (good & whole).sum() > good.sum() else ~whole
        found = set(np.flatnonzero(~good).tolist())
        times = pa.nulls(len(texts), pa.int64())
        if good.any():
            times = _times_of(pc.if_else(pa.array(good), column, None))
    if layout.time_column != name:
        return table.append_column(layout.time_column, times), found
    return table.set_column(table.schema.get_field_index(name), name, times), found
