"""Compute a row's initial weights from seed and row number, and find the rows of a step that were never updated.

A row of a table in tiers that was never looked up is not stored: not in memory, not in a row store, and not
in a step. A step's file has a hole for groups of such rows. The manifest says how they are sampled. It
names one bit per group, and these bits are stored after the rank's tensors:

    "sampled": [{"key": ..., "offsets": [row, column], "sizes": [rows, columns], "rows_a_group": 64, "file": "__0_0.distcp",
                 "begin": ..., "num_bytes": ..., "first": {"kind": "uniform", "key": ..., ...}}]
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.devices.philox import fill_normal, fill_uniform
from pipeline.runtime.storage.unpack import unpack_zlib

NORMAL, UNIFORM = "normal", "uniform"
LOW = 0xFFFFFFFF
# size of a group of neighbouring rows, which a step stores or leaves out together
GROUP_BYTES = 16 << 10
AT_ONCE = 1 << 16  # rows sampled in one call
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class FirstWeights:
    """Initial weights of a shard that begins at (row, column) of a table with `width` columns, as
    table_init fills it.

    kind "" means zeros.
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
    """Return which groups of the rows from first_row on contain a changed row.

    `changed` has one bit per row (bitorder "little").
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
    """A stored piece of a tensor [rows, columns] with groups of rows that were never updated.

    `first` belongs to its row 0.
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
        """Read an entry of a manifest.

        Raises KeyError, TypeError or ValueError if it is invalid.
        """
        fields = {**entry, "offsets": tuple(map(int, entry["offsets"])), "sizes": tuple(map(int, entry["sizes"]))}
        return cls(**fields | {"first": FirstWeights(**entry["first"])})

    def entry(self) -> dict[str, Any]:
        return asdict(self)

    def unpack(self, content: bytes) -> Mask:
        """Return which groups are stored, from the bytes in the file.

        Raises ValueError if pack() did not write them.
        """
        count = -(-self.sizes[0] // self.rows_a_group)
        bits = np.frombuffer(unpack_zlib(content, -(-count // 8)), np.uint8)
        if len(bits) != -(-count // 8):
            raise ValueError(f"{len(bits)} bytes of bits for {count} groups")
        return np.unpackbits(bits, bitorder="little")[:count].astype(np.bool_)

    def whole(self) -> FirstWeights:
        """Return the initial weights of the complete tensor, from its row 0 and column 0."""
        return replace(self.first, row=self.first.row - self.offsets[0], column=self.first.column - self.offsets[1])

    def held(self, stored: Mask, first_row: int, num_rows: int) -> Mask:
        """Return [num_rows]: which of the tensor's rows from first_row on are stored.

        All must be in this piece.
        """
        rows = np.arange(first_row, first_row + num_rows) - self.offsets[0]
        held: Mask = stored[rows // self.rows_a_group]
        return held

    def overlay(self, stored: Mask, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Write the sampled rows that are not stored into `values`, a box of the tensor that begins
        at `offsets`."""
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
