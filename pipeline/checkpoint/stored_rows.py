"""A tensor whose rows lie in a store outside memory: a checkpoint reads and writes it a block of rows at a time.

Such a tensor stands where a whole table or its optimizer's state would stand in a state_dict. It has their shape and no memory.
Slices by rows, copies to and from it, and index_copy_ work; any other operation reads what it is applied to, if that is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoint.first_weights import FirstWeights, held_groups, rows_a_group

BLOCK_BYTES = 8 << 20
LARGEST_READ_BYTES = 256 << 20  # of an operation that knows nothing of stores
aten = torch.ops.aten


class RowSource(Protocol):
    """What holds the rows of a table's shard: column 0 are the weights, the others the optimizer's states."""

    def read_rows(self, column: int, rows: NDArray[np.int64]) -> torch.Tensor:
        """Of rows [n], ascending and distinct: [n, width], or [n] of a state that is one number a row."""

    def write_rows(self, column: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [n], ascending and distinct; values [n, width] or [n]."""

    def first_weights(self) -> FirstWeights:
        """What rows that have not changed have in column 0; in the others they have zeros."""

    def changed_rows(self) -> NDArray[np.uint8]:
        """Those that may be other than they began, and no others: a bit each, as numpy.packbits(bitorder="little") has them."""

    def begin(self, first_weights: FirstWeights) -> None:
        """Forget all that was trained or loaded; rows begin by `first_weights`."""


class StoredRows(torch.Tensor):
    """Rows first_row.. of a column of `source`; `shape` is [rows, width] or [rows]."""

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
        """In memory: rows first..first + count of these."""
        end = len(self) if count is None else first + count
        return self.read_rows(np.arange(first, end))

    def read_rows(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """In memory: of these rows, ascending and distinct."""
        return self.source.read_rows(self.column, self.first_row + rows)

    def write(self, first: int, values: torch.Tensor) -> None:
        rows = torch.arange(self.first_row + first, self.first_row + first + len(values))
        self.source.write_rows(self.column, rows, values)

    @property
    def rows_a_block(self) -> int:
        width = int(torch.Size(self.shape[1:]).numel())
        return max(1, BLOCK_BYTES // (4 * width))

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows), ascending."""
        for first in range(0, len(self), self.rows_a_block):
            yield first, self.read(first, min(self.rows_a_block, len(self) - first))

    @property
    def row_bytes(self) -> int:
        return 4 * int(torch.Size(self.shape[1:]).numel())

    def changed_rows(self) -> NDArray[np.bool_]:
        """[rows]: those that may be other than they began."""
        return held_groups(self.source.changed_rows(), self.first_row, len(self), 1)

    def held_groups(self) -> NDArray[np.bool_]:
        """Which groups of first_weights.rows_a_group rows hold one that has changed."""
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
    aten.uniform_.default: lambda rows, *_, **__: rows,  # TorchRec's own first weights: table_init's are in their place
    aten.is_pinned.default: lambda *_, **__: False,
}
