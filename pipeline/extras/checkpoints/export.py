"""Export one table of a checkpoint to a Parquet file, one block of rows at a time, under any
sharding plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.checkpoint.tables import StoredTable
from pipeline.checkpoint.tensors import StepTensors
from pipeline.checkpoint.vocabularies import read_values
from pipeline.runtime.logs import progress
from pipeline.runtime.storage import atomic, storage

ARROW_TYPES = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.float64: pa.float64()}


def export_table(
    tensors: StepTensors,
    tables: list[StoredTable],
    output: str,
    *,
    with_state: bool = False,
    vocabulary: str | None = None,
) -> int:
    """Write `output` atomically and return its bytes. A row group is one block of about 8 MiB.

    Several `tables` with equal columns are written as one table, one after the other.

    Columns: row (int64), value (string of the vocabulary; null for row 0 and rows without one),
    vector (fixed-size list of embedding_dim), and with `with_state` each optimizer state: one
    number per row, or a list with one number per column block or column.
    """
    folder = (os.path.dirname(output) or ".") if storage.is_local(output) else tempfile.gettempdir()
    storage.make_folder(folder)
    handle, staged = tempfile.mkstemp(suffix=".parquet.tmp", dir=folder)
    os.close(handle)
    try:
        schema = _schema(tables[0], with_state, vocabulary is not None)
        values = _Values(vocabulary) if vocabulary else None
        num_rows = sum(table.rows for table in tables)
        with pq.ParquetWriter(staged, schema, compression="lz4") as writer, progress("exporting", num_rows) as bar:
            done = 0
            for table, (first, rows) in ((part, block) for part in tables for block in tensors.row_blocks(part.key)):
                columns: list[pa.Array] = [pa.array(np.arange(done, done + len(rows)))]
                if values:
                    columns.append(pa.array(values.of_rows(done, len(rows)), pa.string()))
                columns.append(_as_arrow(rows))
                for state in sorted(table.states) if with_state else ():
                    columns.append(_as_arrow(_state_rows(tensors, table, state, first, len(rows))))
                writer.write_table(pa.table(columns, schema=schema), row_group_size=len(rows))
                done += len(rows)
                bar.advance(len(rows))
        size = os.path.getsize(staged)
        atomic.publish_file(staged, output)
        return size
    finally:
        if os.path.exists(staged):
            os.remove(staged)


def _schema(table: StoredTable, with_state: bool, with_values: bool) -> pa.Schema:
    fields = [pa.field("row", pa.int64())]
    if with_values:
        fields.append(pa.field("value", pa.string()))
    fields.append(pa.field("vector", pa.list_(ARROW_TYPES[table.dtype], table.dim)))
    for state in sorted(table.states) if with_state else ():
        kind = ARROW_TYPES[table.states[state].dtype]
        width = len(table.column_blocks) if table.is_row_wise(state) else table.dim
        fields.append(pa.field(state, kind if table.is_row_wise(state) and width == 1 else pa.list_(kind, width)))
    return pa.schema(fields, metadata={"table": table.name})


def _state_rows(tensors: StepTensors, table: StoredTable, state: str, first: int, count: int) -> torch.Tensor:
    """Return the rows of a state: [count], [count, column blocks] or [count, dim]."""
    key = table.states[state].key
    if not table.is_row_wise(state):
        return tensors.read(key, [first, 0], [count, table.dim])
    blocks = torch.empty(count, len(table.column_blocks), dtype=table.states[state].dtype)
    for piece in table.pieces:
        begin, end = max(first, piece.row), min(first + count, piece.row + piece.num_rows)
        if begin < end:
            column = table.column_blocks.index((piece.column, piece.num_columns))
            part = tensors.read(key, [piece.state_offset + begin - piece.row], [end - begin])
            blocks[begin - first : end - first, column] = part
    return blocks.squeeze(1) if blocks.shape[1] == 1 else blocks


def _as_arrow(values: torch.Tensor) -> pa.Array:
    flat = pa.array(values.contiguous().view(-1).numpy())
    return flat if values.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


class _Values:
    """A vocabulary's values by row, for successive blocks of rows."""

    def __init__(self, path: str) -> None:
        self._batches: Iterator[tuple[int, list[str]]] = read_values(path)
        self._first, self._held = 0, [None]  # type: tuple[int, list[str | None]]

    def of_rows(self, first: int, count: int) -> list[str | None]:
        del self._held[: first - self._first]
        self._first = first
        while len(self._held) < count and (batch := next(self._batches, None)):
            self._held.extend(batch[1])
        found = self._held[:count]
        return found + [None] * (count - len(found))
