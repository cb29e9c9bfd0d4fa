"""Describe the work of our layers' kernels in amounts that their time grows with: DLRM's products of rows, and narrow stacks of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipeline.planner.step_time.measurements import Measurement
from pipeline.planner.step_time.record import Operation
from pipeline.planner.step_time.table_work import LEAST_SHARE

DOTS = ("dots", "dots_backward")  # pipeline.devices.cpu.kernels.dots
STACKS = ("layer_stack", "layer_stack_backward")  # pipeline.models.layers.stack
WIDEST_BF16 = 16  # of pipeline.models.layers.interaction: of wider rows in bf16 pairs of numbers are multiplied
BEYOND_BYTES = 1 << 20  # of rows: more do not stay in a core's own cache from one call to the next
REACH = 2.0  # of likeness, in doublings
# Of pipeline.models.layers.stack: samples of a block, blocks that are summed together, groups of a batch, rows of gradients of a thread
BLOCK, LEAST_GROUP, MOST_GROUPS, LEAST_LINES = 128, 2, 32, 128
LANES = 16


def dots_amounts(batch: int, rows: int, dim: int, threads: int, dtype: str = "fp32") -> dict[str, float]:
    """Of the slowest thread: samples, their numbers, their pairs, and multiplications in whole blocks of 4 rows and 16 columns.

    Wide rows in bf16 have another kernel, whose numbers are laid out in pairs and whose blocks have 8 rows.
    """
    shares = max(1, min(threads, batch // LEAST_SHARE))
    samples = batch / shares
    in_pairs = dtype == "bf16" and dim > WIDEST_BF16
    block, kind = (8, "pair_") if in_pairs else (4, "")
    rows_b, rows_16, dim_16 = (-(-size // of) * of for size, of in ((rows, block), (rows, 16), (dim, 16)))
    return {
        "samples": samples,
        "rows": samples * rows,
        "numbers": samples * rows * dim,
        "pairs": samples * rows * (rows - 1) / 2,
        "pair_numbers": samples * rows * dim * in_pairs,
        f"{kind}products": samples * rows_b * rows_16 * dim,
        f"{kind}products_back": samples * rows_b * rows * dim_16,
        "beyond": max(0.0, 4.0 * batch * rows * dim - BEYOND_BYTES),
        "other_threads": shares - 1.0,
    }


def dots_place(amounts: Mapping[str, float]) -> tuple[float, ...]:
    sizes = (amounts["samples"], amounts["rows"] / amounts["samples"], amounts["numbers"] / amounts["rows"])
    return (*(math.log2(size) / REACH for size in sizes), amounts["other_threads"])


def stack_amounts(sizes: Sequence[int], batch: int, threads: int, for_inputs: bool = True) -> dict[str, float]:
    """Forward and backward of a stack whose inputs and layers' outputs are `sizes` wide, of the slowest thread.

    for_inputs: backward gives the inputs' gradient too.
    """
    blocks = -(-batch // BLOCK)
    groups = min(-(-blocks // LEAST_GROUP), MOST_GROUPS)
    shares, shares_back = min(threads, max(blocks // LEAST_GROUP, 1)), min(threads, groups)
    layers = [(wide, down, _padded(wide), _padded(down)) for wide, down in pairwise(sizes)]
    packed = sum(wide * down for _, _, wide, down in layers)
    samples, samples_back = batch / shares, -(-groups // shares_back) / groups * batch
    to_inputs = layers if for_inputs else layers[1:]
    return {
        "layers": float(len(layers)),
        "packed": float(packed),
        "samples": samples,
        "products": samples * sum(wide * down for wide, _, _, down in layers),
        "single_products": samples * sum(wide * LANES for wide, _, _, down in layers if down // LANES % 2),
        "numbers": samples * (sizes[0] + sum(down for _, _, _, down in layers)),
        "samples_back": samples_back,
        "weight_products": samples_back * packed,
        "input_products": samples_back * sum(wide * down for _, down, wide, _ in to_inputs),
        "numbers_back": samples_back * (sizes[0] + sum(down for _, _, _, down in layers)),
        "group_sums": float(groups * packed),
        "other_threads": shares_back - 1.0,
    }


def stack_place(amounts: Mapping[str, float]) -> tuple[float, ...]:
    sizes = (amounts["samples"], amounts["packed"], amounts["numbers"] / amounts["samples"])
    return (*(math.log2(size) / REACH for size in sizes), amounts["layers"] / REACH, amounts["other_threads"])


def _padded(size: int) -> int:
    return -(-size // LANES) * LANES


def amounts_of(row: Measurement, threads: int) -> dict[str, float]:
    """Of a measured kernel of DOTS or STACKS."""
    if row.kind in DOTS:
        batch, rows, dim = (int(row.shape[name]) for name in ("b", "m", "k"))
        return dots_amounts(batch, rows, dim, threads, str(row.shape["dtype"]))
    return stack_amounts([int(size) for size in str(row.shape["sizes"]).split()], int(row.shape["b"]), threads)


def recorded_amounts(operation: Operation, threads: int) -> dict[str, float]:
    """Of a recorded kernel of DOTS or STACKS."""
    if operation.name in DOTS:
        batch, rows, dim = operation.shapes[0]
        return dots_amounts(batch, rows, dim, threads, operation.dtype)
    sizes, batch = stack_sizes(operation)
    for_inputs = operation.name == "layer_stack" or operation.shapes[-1][0] > 0
    return stack_amounts(sizes, batch, threads, for_inputs)


def stack_sizes(operation: Operation) -> tuple[list[int], int]:
    """Widths of a recorded stack's inputs and of each layer's outputs, and the batch."""
    _, (batch, into), *weights, _ = operation.shapes
    return [into, *(shape[0] for shape in weights[::2])], batch
