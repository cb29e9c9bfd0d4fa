"""Define a tensor whose rows are in a store outside memory. A checkpoint reads and writes it one
block of rows at a time.

In a state_dict it replaces a complete table or optimizer state. It has the shape but no memory.
Slices by rows, copies to and from it, and index_copy_ work. Any other operation reads the tensor,
if it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoint.first_weights import FirstWeights, held_groups, rows_a_group

BLOCK_BYTES = 8 << 20
LARGEST_READ_BYTES = 256 << 20  # limit for an operation that does not support stores
aten = torch.ops.aten


class RowSource(Protocol):
    """The store of a table shard's rows.

    Column 0 holds the weights, the other columns hold optimizer states.
    """

    def read_rows(self, column: int, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return [n, width] for rows [n], ascending and distinct; or [n] for a state with one
        number per row."""

    def write_rows(self, column: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [n, width] or [n] to rows [n], ascending and distinct."""

    def first_weights(self) -> FirstWeights:
        """Return the initial weights that unchanged rows have in column 0.

        In other columns they have zeros.
        """

    def changed_rows(self) -> NDArray[np.uint8]:
        """Return one bit for each row that may have changed, as numpy.packbits(bitorder="little")
        does."""

    def begin(self, first_weights: FirstWeights) -> None:
        """Drop everything that was trained or loaded.

        Rows then have the initial weights `first_weights`.
        """


class StoredRows(torch.Tensor):
    """Rows from first_row on of a column of `source`. `shape` is [rows, width] or [rows]."""

    source: RowSource
    column: int
    first_row: int

    @staticmethod
    def __new__(cls, source: RowSource, column: int, first_row: int, shape: torch.Size) -> StoredRows:
        made: StoredRows = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=torch.device("cpu")
        )
        made.source, made.column, made.first_row = source, column, first_row
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredRows(column {self.column}, rows {self.first_row}..{self.first_row + len(self)})"

    def read(self, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Read rows first..first + count into memory."""
        end = len(self) if count is None else first + count
        return self.read_rows(np.arange(first, end))

    def read_rows(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Read these rows into memory. They are ascending and distinct."""
        return self.source.read_rows(self.column, self.first_row + rows)

    def write(self, first: int, values: torch.Tensor) -> None:
        rows = torch.arange(self.first_row + first, self.first_row + first + len(values))
        self.source.write_rows(self.column, rows, values)

    @property
    def rows_a_block(self) -> int:
        width = int(torch.Size(self.shape[1:]).numel())
        return max(1, BLOCK_BYTES // (4 * width))

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows), ascending."""
        for first in range(0, len(self), self.rows_a_block):
            yield first, self.read(first, min(self.rows_a_block, len(self) - first))

    @property
    def row_bytes(self) -> int:
        return 4 * int(torch.Size(self.shape[1:]).numel())

    def changed_rows(self) -> NDArray[np.bool_]:
        """Return [rows]: True for each row that may have changed."""
        return held_groups(self.source.changed_rows(), self.first_row, len(self), 1)

    def held_groups(self) -> NDArray[np.bool_]:
        """Return which groups of first_weights.rows_a_group rows hold a changed row."""
        return held_groups(self.source.changed_rows(), self.first_row, len(self), rows_a_group(self.row_bytes))

    def is_same(self, other: StoredRows) -> bool:
        mine, others = ((each.column, each.first_row, each.shape) for each in (self, other))
        return self.source is other.source and mine == others

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if handler := HANDLERS.get(func):
            return handler(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.endswith("_"):
            raise NotImplementedError(f"{func} would change rows that lie in a store; copy_ and index_copy_ can")
        return func(*map(_in_memory, args), **(kwargs or {}))


def _in_memory(value: Any) -> Any:
    if not isinstance(value, StoredRows):
        return value
    if value.numel() * 4 > LARGEST_READ_BYTES:
        raise NotImplementedError(f"{value} is too large to be read whole; go over its blocks")
    return value.read()


def _alias(rows: StoredRows, *_: Any, **__: Any) -> StoredRows:
    return StoredRows(rows.source, rows.column, rows.first_row, rows.shape)


def _view(rows: StoredRows, shape: Any) -> StoredRows:
    wanted = torch.Size(shape)
    if wanted != rows.shape and (len(wanted), wanted[1:]) != (rows.dim(), rows.shape[1:]):
        raise NotImplementedError(f"{rows} of shape {list(rows.shape)} cannot be seen as {list(wanted)}")
    return _alias(rows)


def _slice(rows: StoredRows, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    begin, stop, _ = slice(start, end).indices(rows.shape[dim])
    if dim == 0 and step == 1:
        shape = torch.Size([max(stop - begin, 0), *rows.shape[1:]])
        return StoredRows(rows.source, rows.column, rows.first_row + begin, shape)
    if (begin, stop, step) == (0, rows.shape[dim], 1):
        return _alias(rows)
    return _in_memory(rows).narrow(dim, begin, stop - begin)


def _copy(target: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
    if not isinstance(target, StoredRows):
        assert isinstance(values, StoredRows)
        for first, block in values.blocks():
            target[first : first + len(block)].copy_(block)
    elif not isinstance(values, StoredRows):
        for first in range(0, len(target), target.rows_a_block):
            block = values[first : first + target.rows_a_block] if values.dim() else values.expand(target.shape)
            target.write(first, block)
    elif not target.is_same(values):
        for first, block in values.blocks():
            target.write(first, block)
    return target


def _index_copy(target: StoredRows, dim: int, rows: torch.Tensor, values: torch.Tensor) -> StoredRows:
    assert dim == 0
    order = torch.argsort(rows)
    target.source.write_rows(target.column, target.first_row + rows[order], values[order])
    return target


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.copy_.default: _copy,
    aten.index_copy_.default: _index_copy,
    # TorchRec's initial weights are ignored: table_init provides them
    aten.uniform_.default: lambda rows, *_, **__: rows,
    aten.is_pinned.default: lambda *_, **__: False,
}
