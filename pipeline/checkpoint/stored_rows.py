"""Define a tensor whose rows are in a store outside memory. A checkpoint reads and writes it one
block of rows at a time.

In a state_dict it replaces a complete table or optimizer state. It has the shape but no memory.
Slices by rows, copies to and from it, and index_copy_ work. Any other operation reads the complete
tensor into memory, if it is small.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.devices.philox import fill_normal, fill_uniform
from pipeline.runtime.storage.storage import unpack_zlib

NORMAL, UNIFORM = "normal", "uniform"
LOW = 0xFFFFFFFF
# size of a group of neighbouring rows, which a step stores or leaves out together
GROUP_BYTES = 16 << 10
AT_ONCE = 1 << 16  # rows sampled in one call
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class FirstWeights:
    """Initial weights of a shard that begins at (row, column) of a table with `width` columns. They
    are the same as table_init's. If kind is "", they are zeros.
    """

    kind: str = ""
    key: int = 0
    # as in philox.py: the std of normal numbers, or 2^-23 of the bound of uniform numbers
    unit: float = 0.0
    width: int = 0
    row: int = 0
    column: int = 0

    def sample(self, rows: Rows, slots: Rows, weights: NDArray[np.float32]) -> None:
        """Fill weights[slots] with the initial weights of the shard's `rows`."""
        if not self.kind:
            weights[slots] = 0
        elif find_spec("numba") is not None:
            from pipeline.devices.cpu.kernels.philox import sample_rows

            sample_rows(
                rows, slots, self.row, self.column, self.width, np.uint64(self.key & LOW), np.uint64(self.key >> 32),
                self.kind == NORMAL, np.float32(self.unit), weights,
            )  # fmt: skip
        else:
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                weights[slot] = self._row(row)[self.column : self.column + weights.shape[1]]

    def _row(self, row: int) -> NDArray[np.float32]:
        numbers = torch.empty(self.width)
        if self.kind == NORMAL:
            fill_normal(numbers, self.key, (self.row + row) * self.width, self.unit)
        else:
            fill_uniform(numbers, self.key, (self.row + row) * self.width, self.unit * 2.0**23)
        return numbers.numpy()


def rows_a_group(row_bytes: int) -> int:
    return max(1, GROUP_BYTES // max(row_bytes, 1))


def held_groups(changed: NDArray[np.uint8], first_row: int, num_rows: int, group: int) -> Mask:
    """Return which groups of `group` rows, from first_row on, contain a changed row. `changed` has
    one bit per row (bitorder "little").
    """
    low, high = first_row // 8, -(-(first_row + num_rows) // 8)
    bits = np.unpackbits(changed[low:high], bitorder="little")[first_row - 8 * low :][:num_rows]
    padded = np.zeros(-(-num_rows // group) * group, np.uint8)
    padded[:num_rows] = bits
    held: Mask = padded.reshape(-1, group).max(axis=1) > 0
    return held


def pack(held: Mask) -> bytes:
    return zlib.compress(np.packbits(held, bitorder="little").tobytes(), 1)


@dataclass(frozen=True)
class SampledPiece:
    """A stored piece of a tensor [rows, columns], with groups of rows that were never updated.
    `first` has the initial weights from the piece's row 0 on.
    """

    key: str
    offsets: tuple[int, int]
    sizes: tuple[int, int]
    rows_a_group: int
    first: FirstWeights
    file: str
    begin: int
    num_bytes: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> SampledPiece:
        """Read an entry of a manifest. Raises KeyError, TypeError or ValueError if it is
        invalid."""
        fields = {**entry, "offsets": tuple(map(int, entry["offsets"])), "sizes": tuple(map(int, entry["sizes"]))}
        return cls(**fields | {"first": FirstWeights(**entry["first"])})

    def entry(self) -> dict[str, Any]:
        return asdict(self)

    def unpack(self, content: bytes) -> Mask:
        """Return which groups are stored, from the bytes in the file. Raises ValueError if the
        bytes were not written by pack().
        """
        count = -(-self.sizes[0] // self.rows_a_group)
        bits = np.frombuffer(unpack_zlib(content, -(-count // 8)), np.uint8)
        if len(bits) != -(-count // 8):
            raise ValueError(f"{len(bits)} bytes of bits for {count} groups")
        return np.unpackbits(bits, bitorder="little")[:count].astype(np.bool_)

    def whole(self) -> FirstWeights:
        """Return the initial weights of the complete tensor, starting at its row 0 and column 0."""
        return replace(self.first, row=self.first.row - self.offsets[0], column=self.first.column - self.offsets[1])

    def held(self, stored: Mask, first_row: int, num_rows: int) -> Mask:
        """Return bool [num_rows]: which of the tensor's rows from first_row on are stored. All
        these rows must be in this piece.
        """
        rows = np.arange(first_row, first_row + num_rows) - self.offsets[0]
        held: Mask = stored[rows // self.rows_a_group]
        return held

    def overlay(self, stored: Mask, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Write the initial weights of rows that are not `stored` into `values`, which is a block
        of the tensor that begins at `offsets`.
        """
        if not self.first.kind:
            return  # a hole is zeros
        low = [max(a, b) for a, b in zip(offsets, self.offsets, strict=True)]
        ends = zip(offsets, values.shape, self.offsets, self.sizes, strict=True)
        high = [min(a + m, b + n) for a, m, b, n in ends]
        if low[0] >= high[0] or low[1] >= high[1]:
            return
        first = replace(self.whole(), column=self.whole().column + low[1])
        for begin in range(low[0], high[0], AT_ONCE):
            count = min(AT_ONCE, high[0] - begin)
            absent = np.flatnonzero(~self.held(stored, begin, count))
            if not len(absent):
                continue
            sampled = np.empty((len(absent), high[1] - low[1]), np.float32)
            first.sample(absent + begin, np.arange(len(absent)), sampled)
            into = values[begin - offsets[0] : begin - offsets[0] + count, low[1] - offsets[1] : high[1] - offsets[1]]
            into[torch.from_numpy(absent)] = torch.from_numpy(sampled)


BLOCK_BYTES = 8 << 20
LARGEST_READ_BYTES = 256 << 20  # limit for an operation that does not support stores
aten = torch.ops.aten


class RowSource(Protocol):
    """The store of the rows of a table's shard. Column 0 of the store holds the weights, the other
    columns hold optimizer states.
    """

    def read_rows(self, column: int, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return [n, width] for rows [n], which are ascending and distinct. Return [n] for a state
        with one number per row.
        """

    def write_rows(self, column: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [n, width] or [n] to rows [n], which are ascending and distinct."""

    def first_weights(self) -> FirstWeights:
        """Return the initial weights, which unchanged rows have in column 0. In the other columns
        unchanged rows have zeros.
        """

    def changed_rows(self) -> NDArray[np.uint8]:
        """Return one bit for each row that may have changed, as numpy.packbits(bitorder="little")
        does."""

    def begin(self, first_weights: FirstWeights) -> None:
        """Drop all values that were trained or loaded. Rows then have the initial weights
        `first_weights`.
        """


class StoredRows(torch.Tensor):
    """The rows from first_row on of one column of the store `source`. `shape` is [rows, width] or [rows]."""

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
        """Read these rows into memory. `rows` must be ascending and distinct."""
        return self.source.read_rows(self.column, self.first_row + rows)

    def write(self, first: int, values: torch.Tensor) -> None:
        rows = torch.arange(self.first_row + first, self.first_row + first + len(values))
        self.source.write_rows(self.column, rows, values)

    @property
    def rows_a_block(self) -> int:
        width = int(torch.Size(self.shape[1:]).numel())
        return max(1, BLOCK_BYTES // (4 * width))

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield blocks (first row, rows), ascending."""
        for first in range(0, len(self), self.rows_a_block):
            yield first, self.read(first, min(self.rows_a_block, len(self) - first))

    @property
    def row_bytes(self) -> int:
        return 4 * int(torch.Size(self.shape[1:]).numel())

    def changed_rows(self) -> NDArray[np.bool_]:
        """Return bool [rows]: True for each row that may have changed."""
        return held_groups(self.source.changed_rows(), self.first_row, len(self), 1)

    def held_groups(self) -> NDArray[np.bool_]:
        """Return which groups of first_weights.rows_a_group rows contain a changed row."""
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
