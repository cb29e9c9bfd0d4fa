"""Write a table of a checkpoint as a file of quantized rows, a block at a time, so that memory never holds the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pipeline.checkpoint.tables import StoredTable
from pipeline.checkpoint.tensors import BLOCK_BYTES, StepTensors
from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage.checksums import ChecksummedWriter, FileEntry
from pipeline.serving.artifact.kept_rows import WORD_BITS, KeptRows
from pipeline.serving.artifact.quantize import quantize_rows


def block_rows(row_bytes: int) -> int:
    """Rows of one block: about BLOCK_BYTES, whole words of KeptRows."""
    return max(1, BLOCK_BYTES // max(1, row_bytes) // WORD_BITS) * WORD_BITS


def checkpoint_rows(tensors: StepTensors, table: StoredTable, kept: KeptRows | None = None) -> Iterator[torch.Tensor]:
    """[n, dim] float32, the rows that are kept, ascending. What no kept row lies in is not read.

    Raises:
        ServingError: a row holds NaN or an infinity, or the checkpoint is damaged.
    """
    rows_at_once = block_rows(table.dim * table.dtype.itemsize)
    for first in range(0, table.rows, rows_at_once):
        count = min(rows_at_once, table.rows - first)
        mask = None if kept is None else kept.mask(first, count)
        if mask is not None and not mask.any():
            continue
        rows = tensors.read(table.key, [first, 0], [count, table.dim]).float()
        rows = rows if mask is None else rows[torch.from_numpy(mask)]
        if not bool(rows.isfinite().all()):
            raise ServingError(
                f"table {table.name!r} holds NaN or an infinity in rows {first} to {first + count - 1}: "
                "export an earlier step (step=<number>)"
            )
        yield rows


def file_rows(path: str, num_rows: int, dim: int) -> Iterator[torch.Tensor]:
    """[n, dim] float32, of a file of fp32 rows."""
    rows_at_once = block_rows(4 * dim)
    with open(path, "rb") as file:
        for first in range(0, num_rows, rows_at_once):
            count = min(rows_at_once, num_rows - first)
            yield torch.from_numpy(np.fromfile(file, np.float32, count * dim).reshape(count, dim))


def write_rows(path: str, blocks: Iterable[torch.Tensor], precision: str) -> tuple[FileEntry, int]:
    """Write a new file; its checksums, and how many rows it has."""
    num_rows = 0
    with ChecksummedWriter(path) as writer:
        for rows in blocks:
            writer.write(quantize_rows(rows, precision).contiguous().numpy())
            num_rows += len(rows)
        writer.close()
        return writer.entry(), num_rows


def write_bytes(path: str, content: bytes | memoryview) -> FileEntry:
    with ChecksummedWriter(path) as writer:
        writer.write(content)
        writer.close()
        return writer.entry()
