"""Predict operations that move bytes, by a line in logarithms through the sizes that were measured of the kind that they are like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planner.step_time.correction import Floats
from pipeline.planner.step_time.measurements import Measurement
from pipeline.planner.step_time.record import Operation

NOTHING = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}
# Operation -> what of training.calibration.dense.BY_BYTES it is like; others are like `add`.
LIKE = {
    **dict.fromkeys(("relu_", "mul_", "add_", "div_", "sub_", "clamp_", "relu", "neg", "abs"), "inplace"),
    **dict.fromkeys(("copy_", "clone", "index_select", "gather", "index", "embedding", "permute_copy", "slice_backward"), "copy"),
    **dict.fromkeys(("_to_copy",), "cast"),
    **dict.fromkeys(
        ("sigmoid", "exp", "log", "tanh", "softplus", "log_sigmoid_forward", "log_sigmoid_backward", "log1p", "pow", "rsqrt",
         "sqrt", "binary_cross_entropy_with_logits", "erf", "gelu", "silu"), "math",
    ),
    **dict.fromkeys(("threshold_backward", "where", "sigmoid_backward", "tanh_backward", "native_dropout_backward"), "where"),
    **dict.fromkeys(("native_dropout", "bernoulli_", "rand_like", "bernoulli"), "dropout"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "batch_norm_stats"), "batch_norm"),
    **dict.fromkeys(("native_batch_norm_backward",), "batch_norm_backward"),
    **dict.fromkeys(("cat", "stack"), "cat"),
    **dict.fromkeys(("zeros", "zeros_like", "ones_like", "ones", "fill_", "zero_", "full", "full_like", "new_zeros"), "fill"),
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "_log_softmax"), "softmax"),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward"), "norm",
    ),
    **dict.fromkeys(("sum", "mean", "amax", "count_nonzero", "all", "any", "max", "min"), "sum"),
}  # fmt: skip
# Of calibrations that lack a kind
OTHERS = {"sum_middle": "sum_rows", "dropout": "math", "batch_norm": "norm", "batch_norm_backward": "norm"}


def bytes_kind(operation: Operation) -> str:
    """What of the measured operations by bytes this one is like."""
    if operation.name == "sum" and len(operation.shapes) > 1 and len(operation.shapes[0]) > 1:
        into, out = operation.shapes[0], operation.shapes[-1]
        kept = [size for size in out if size != 1]
        if len(into) == 3 and kept == [into[0], into[2]]:
            return "sum_middle"
        if kept and math.prod(kept) > 1:
            return "sum_rows" if kept[-1] == into[-1] else "sum_columns"
    kind = LIKE.get(operation.name, "add")
    return "spread" if kind == "add" and _is_spread(operation) else kind


def _is_spread(operation: Operation) -> bool:
    """Whether an input of a product or sum of blocks [B, N, D] is one number for several, within the block."""
    *inputs, out = operation.shapes or ((),)
    return len(out) == 3 and any(
        len(each) == 3 and any(size == 1 < whole for size, whole in zip(each[1:], out[1:], strict=True))
        for each in inputs
    )


def moved_bytes(operation: Operation, kind: str) -> int:
    """As the sizes of measurements of that kind are counted."""
    if kind in ("sum", "sum_rows", "sum_columns", "sum_middle"):
        return operation.in_bytes
    if kind == "inplace":
        return 2 * operation.out_bytes
    if kind in ("dropout", "batch_norm", "batch_norm_backward"):
        return 2 * max(operation.out_bytes, operation.in_bytes // 2)
    return operation.out_bytes if kind == "fill" else operation.in_bytes + operation.out_bytes


@dataclass(frozen=True)
class Line:
    """Through measured points, straight in logarithms; beyond the last in proportion."""

    at: Floats
    log_us: Floats

    @staticmethod
    def through(rows: Sequence[Measurement], axis: str = "bytes") -> Line:
        by_size: dict[float, list[float]] = {}
        for row in rows:
            by_size.setdefault(float(row.shape[axis]), []).append(math.log(max(row.us, 1e-3)))
        sizes = sorted(by_size)
        if len(sizes) > 40:  # measured at many sizes: their neighbours together
            sizes = sizes[:: len(sizes) // 20]
        return Line(np.log(np.array(sizes)), np.array([float(np.mean(by_size[size])) for size in sizes]))

    def us(self, amount: float) -> float:
        at = math.log(max(amount, 1.0))
        if at > self.at[-1]:
            return float(math.exp(self.log_us[-1] + at - self.at[-1]))
        return float(math.exp(np.interp(at, self.at, self.log_us)))
