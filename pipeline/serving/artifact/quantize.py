"""Quantize float rows to the format of FBGEMM's inference lookup, and dequantize them.

A quantized row starts with its scale and bias, each fp16. Its numbers follow, 8, 4 or 2 bits each
(fbgemm_gpu/docs, IntNBitTableBatchedEmbeddingBagsCodegen; post-training 4-bit rows: arXiv
1911.02079).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.serving import PRECISIONS
from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage.checksums import FileEntry, write_blocks

SCALE_BIAS_BYTES = 4
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}


def row_bytes(dim: int, precision: str) -> int:
    """Return the bytes of a row of `dim` numbers. Raises ServingError if FBGEMM does not support such rows."""
    if not fits(dim, precision):
        raise ServingError(
            f"rows of {dim} numbers cannot be {precision}: that wants a multiple of {16 // BITS[precision]}"
        )
    return dim * BITS[precision] // 8 + (SCALE_BIAS_BYTES if precision.startswith("int") else 0)


def fits(dim: int, precision: str) -> bool:
    """Return True if a row of `dim` numbers can have this precision: FBGEMM packs 4 and 2 bits into pairs of bytes."""
    return BITS[precision] >= 8 or dim * BITS[precision] % 16 == 0


def nearest(dim: int, precision: str) -> str:
    """Return the precision, or the next larger precision that rows of `dim` numbers can have."""
    return next(name for name in reversed(PRECISIONS[: PRECISIONS.index(precision) + 1]) if fits(dim, name))


def quantize_rows(rows: torch.Tensor, precision: str) -> torch.Tensor:
    """Quantize [n, dim] float to [n, row_bytes] uint8 row by row. Raises ServingError for NaN and infinities."""
    if not bool(rows.isfinite().all()):
        raise ServingError("a row holds NaN or an infinity")
    if precision == "fp32":
        return rows.float().contiguous().view(torch.uint8)
    if precision == "fp16":
        return rows.half().contiguous().view(torch.uint8)
    dim = rows.shape[1]
    if precision == "int8":
        fused = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.float().contiguous())
        numbers, scale_bias = fused[:, :dim], fused[:, -8:].contiguous().view(torch.float32).half().view(torch.uint8)
    else:
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows.float().contiguous(), BITS[precision])
        numbers, scale_bias = fused[:, : dim * BITS[precision] // 8], fused[:, -SCALE_BIAS_BYTES:]
    return torch.cat([scale_bias, numbers], dim=1)


def dequantize_rows(rows: torch.Tensor, dim: int, precision: str) -> torch.Tensor:
    """Convert [n, row_bytes] uint8 to [n, dim] float32, the numbers that the lookup adds up."""
    if precision in ("fp32", "fp16"):
        return rows.contiguous().view({"fp32": torch.float32, "fp16": torch.float16}[precision]).float()
    bits = BITS[precision]
    scale, bias = rows[:, :SCALE_BIAS_BYTES].contiguous().view(torch.float16).float().unbind(dim=1)
    shifts = torch.arange(8 // bits, dtype=torch.uint8) * bits
    packed = rows[:, SCALE_BIAS_BYTES:]
    numbers = (packed.unsqueeze(2) >> shifts & (2**bits - 1)).reshape(len(rows), dim)
    return numbers.float() * scale[:, None] + bias[:, None]


def write_rows(path: str, blocks: Iterable[torch.Tensor], precision: str) -> FileEntry:
    """Write a new file of quantized rows. Return its checksums."""
    return write_blocks(path, (quantize_rows(rows, precision).contiguous().numpy() for rows in blocks))


WORD_BITS = 64


class KeptRows:
    """`words` [ceil(num_rows / 64)] uint64: bit i % 64 of word i // 64 is 1 if row i is kept. Row 0 is always kept."""

    def __init__(self, num_rows: int, words: NDArray[np.uint64]) -> None:
        """Raises ServingError if `words` do not fit a table of `num_rows`, or row 0 is not kept."""
        if len(words) != -(-num_rows // WORD_BITS) or not num_rows or not int(words[0]) & 1:
            raise ServingError(f"{len(words)} words do not say which of {num_rows} rows are kept, row 0 among them")
        self.num_rows, self.words = num_rows, words
        counts = np.bitwise_count(words)
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.uint32)
        if int(np.sum(counts, dtype=np.int64)) >= 2**32:
            raise ServingError("more than 2^32 rows of a table are kept")

    @property
    def num_kept(self) -> int:
        return int(self._before[-1])

    def remap(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each row's position among the kept rows, or 0 if the row is not kept. Rows are in [0, num_rows)."""
        index, bit = rows >> 6, (rows & 63).astype(np.uint64)
        words = self.words[index]
        is_kept = words >> bit & np.uint64(1)
        below = words & ((np.uint64(1) << bit) - np.uint64(1))
        positions = self._before[index].astype(np.int64) + np.bitwise_count(below)
        return np.where(is_kept, positions, 0)

    def num_kept_below(self, row: int) -> int:
        """Return how many of rows 0, 1, ..., `row` - 1 are kept. `row` is at most num_rows."""
        if row == self.num_rows:
            return self.num_kept
        index, bit = row >> 6, np.uint64(row & 63)
        below = self.words[index] & ((np.uint64(1) << bit) - np.uint64(1))
        return int(self._before[index]) + int(np.bitwise_count(below))

    def contains(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a bool for each row: True if the row is kept."""
        return (self.words[rows >> 6] >> (rows & 63).astype(np.uint64) & np.uint64(1)).astype(np.bool_)

    def mask(self, first: int, count: int) -> NDArray[np.bool_]:
        """Return [count] bool: True if row first + i is kept. `first` is a multiple of 64."""
        assert first % WORD_BITS == 0
        words = self.words[first // WORD_BITS : -(-(first + count) // WORD_BITS)]
        return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].astype(np.bool_)


class RowMask:
    """Collects which rows of a table are kept, in any order."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._bytes = np.zeros(-(-num_rows // WORD_BITS) * 8, np.uint8)
        self.add(np.zeros(1, np.int64))

    def add(self, rows: NDArray[np.int64]) -> None:
        np.bitwise_or.at(self._bytes, rows >> 3, (1 << (rows & 7)).astype(np.uint8))

    def set_block(self, first: int, kept: NDArray[np.bool_]) -> None:
        """Set for rows first, first + 1, ... if they are kept. `first` is a multiple of 8."""
        assert first % 8 == 0
        packed = np.packbits(kept, bitorder="little")
        self._bytes[first // 8 : first // 8 + len(packed)] |= packed

    def finish(self) -> KeptRows:
        return KeptRows(self._num_rows, self._bytes.view(np.uint64))
