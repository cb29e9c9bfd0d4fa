"""Erase a value from files that no manifest seals: raw rows, logs of requests, predictions, reports.

Rows whose column of the feature is the value are removed from Parquet, JSON lines, and tables of text with a header.
In columns of Parquet that share its values, as histories do, a missing value takes its place, so lists keep their length.
Rows of a serving log leave it in both cases, because their scores could not be computed again.
In other text each occurrence is replaced by the word `erased`.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.extras.erase.scan import PARQUET, found_in, holds, open_text
from pipeline.extras.erase.sequences import is_sequences, without
from pipeline.extras.erase.target import ERASED, Target
from pipeline.extras.serving_log.log_files import ABOUT
from pipeline.runtime.storage import atomic

DELIMITERS = "\t,;|"


def erase_from_file(target: Target, path: str) -> bool:
    """Rewrite a file that contains the value. Return whether it was rewritten."""
    if not found_in(target, path):
        return False
    folder, name = os.path.split(path)
    staged = os.path.join(folder, f".erase.{name}")
    try:
        with open(path, "rb") as file:
            is_parquet = file.read(4) == PARQUET
        changed = _write_parquet(target, path, staged) if is_parquet else _write_text(target, path, staged)
        if changed:
            atomic.publish_file(staged, path)
        return changed
    except pa.ArrowException:  # a file that is not complete: the scan names it
        return False
    finally:
        if os.path.exists(staged):
            os.remove(staged)


def _write_parquet(target: Target, path: str, staged: str) -> bool:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        if not {target.feature, *target.sharing} & set(schema.names) or not file.num_row_groups:
            return False
        codec = file.metadata.row_group(0).column(0).compression
        with pq.ParquetWriter(staged, schema, compression=codec.replace("UNCOMPRESSED", "NONE")) as writer:
            for number in range(file.num_row_groups):
                table = file.read_row_group(number)
                of_rows = {target.feature} | (target.sharing if ABOUT in (schema.metadata or {}) else set())
                for name in of_rows.intersection(schema.names):
                    is_it = [target.is_value(cell) for cell in table[name].to_pylist()]
                    table = table.filter(pa.array(~np.array(is_it, np.bool_)))
                writer.write_table(_without_shared(target, table))
    return True


def _without_shared(target: Target, table: pa.Table) -> pa.Table:
    for name in target.sharing.intersection(table.column_names):
        table = without_value(target, table, name)
    return table


def without_value(target: Target, table: pa.Table, name: str) -> pa.Table:
    """Replace the value by a missing value in the cells and lists of a column."""
    if not holds(target, name, table[name]):
        return table
    field = table.schema.field(name)
    cells = [
        [None if target.is_value(each) else each for each in cell]
        if isinstance(cell, list) else None if target.is_value(cell) else cell
        for cell in table[name].to_pylist()
    ]  # fmt: skip
    return table.set_column(table.column_names.index(name), field, pa.array(cells, field.type))


def _write_text(target: Target, path: str, staged: str) -> bool:
    """Write the lines without the value. Returns False for bytes that are not text in UTF-8."""
    output = staged + (".gz" if path.endswith(".gz") else "")
    try:
        with open_text(path) as file, open_text(output, "wb") as out:
            of_sequences = is_sequences(target, path)
            lines = (without(target, line) for line in file) if of_sequences else _without(target, iter(file))
            for line in lines:
                line.decode()
                out.write(line)
        os.replace(output, staged)
        return True
    except UnicodeDecodeError:
        return False
    finally:
        if output != staged and os.path.exists(output):
            os.remove(output)


def _without(target: Target, lines: Iterator[bytes]) -> Iterator[bytes]:
    first = next(lines, b"")
    header = first.decode(errors="replace").strip("\ufeff\r\n")
    delimiter = next((each for each in DELIMITERS if target.feature in _cells(header, each) and each in header), None)
    column = _cells(header, delimiter).index(target.feature) if delimiter else None
    if delimiter:
        yield first
    record = b"" if delimiter else first
    for line in lines:
        if not delimiter and record:
            yield from _line(target, record)
        record = record + line if delimiter else line
        if delimiter and record.count(b'"') % 2:
            continue  # a line break within quotes
        if delimiter:
            cells = _cells(record.decode(errors="replace").rstrip("\r\n"), delimiter)
            if column is None or len(cells) <= column or cells[column] != target.value:
                yield _redacted(target, record)
            record = b""
    if record:
        yield from _line(target, record)


def _cells(text: str, delimiter: str | None) -> list[str]:
    return next(csv.reader([text], delimiter=delimiter or ","), []) if '"' in text else text.split(delimiter)


def _line(target: Target, line: bytes) -> Iterator[bytes]:
    """Yield the line, unless it is a JSON object of the value."""
    if line.lstrip().startswith(b"{"):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and target.is_value(record.get(target.feature)):
            return
    yield _redacted(target, line)


def _redacted(target: Target, line: bytes) -> bytes:
    return target.pattern.sub(ERASED.encode(), line)
