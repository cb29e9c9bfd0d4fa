"""Quantize float rows to the format of FBGEMM's inference lookup, and dequantize them.

A quantized row opens with its scale and bias, each fp16, then its numbers, 8, 4 or 2 bits each
(fbgemm_gpu/docs, IntNBitTableBatchedEmbeddingBagsCodegen; post-training 4-bit rows: arXiv 1911.02079).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipeline.config.serving import PRECISIONS
from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage.checksums import FileEntry, write_blocks

SCALE_BIAS_BYTES = 4
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}


def row_bytes(dim: int, precision: str) -> int:
    """Bytes of a row of `dim` numbers. Raises ServingError where FBGEMM has no such rows."""
    if not fits(dim, precision):
        raise ServingError(
            f"rows of {dim} numbers cannot be {precision}: that wants a multiple of {16 // BITS[precision]}"
        )
    return dim * BITS[precision] // 8 + (SCALE_BIAS_BYTES if precision.startswith("int") else 0)


def fits(dim: int, precision: str) -> bool:
    """FBGEMM packs 4 and 2 bits into pairs of bytes."""
    return BITS[precision] >= 8 or dim * BITS[precision] % 16 == 0


def nearest(dim: int, precision: str) -> str:
    """The precision, or the next larger one that rows of `dim` numbers can have."""
    return next(name for name in reversed(PRECISIONS[: PRECISIONS.index(precision) + 1]) if fits(dim, name))


def quantize_rows(rows: torch.Tensor, precision: str) -> torch.Tensor:
    """[n, dim] float -> [n, row_bytes] uint8. Each row is quantized by itself. Raises ServingError for NaN and infinities."""
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
    """[n, row_bytes] uint8 -> [n, dim] float32: the numbers that the lookup adds up."""
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
