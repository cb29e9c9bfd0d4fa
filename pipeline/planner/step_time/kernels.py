"""Predict what one operation takes, by a machine's measurements, or by its data sheet where there are none.

Products: a roofline fitted to the measurements, and between them a smooth correction of its logarithm. Operations that move
bytes: a line through the measured sizes, in logarithms. Tables: a sum of rates (ids, rows, bytes, misses of the cache).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator
from scipy.optimize import nnls

from pipeline.planner.step_time.measurements import Measurement, Measurements
from pipeline.planner.step_time.record import Operation
from pipeline.planner.step_time.table_work import CACHE_MIB, TableSample, TableWork, work_of
from pipeline.runtime.errors import ConfigError

Floats = NDArray[np.float64]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
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
         "sqrt", "binary_cross_entropy_with_logits", "native_dropout", "bernoulli_", "erf", "gelu", "silu"), "math",
    ),
    **dict.fromkeys(("threshold_backward", "where", "sigmoid_backward", "tanh_backward", "native_dropout_backward"), "where"),
    **dict.fromkeys(("cat", "stack"), "cat"),
    **dict.fromkeys(("zeros", "zeros_like", "ones_like", "ones", "fill_", "zero_", "full", "full_like", "new_zeros"), "fill"),
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "_log_softmax"), "softmax"),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward",
         "_native_batch_norm_legit", "cudnn_batch_norm", "batch_norm_stats"), "norm",
    ),
    **dict.fromkeys(("sum", "mean", "amax", "count_nonzero", "all", "any", "max", "min"), "sum"),
}  # fmt: skip
SMOOTHING = 0.02
MOST_CORRECTION = 1.2  # natural logarithm
LEAST_US = 0.3


class OperationTimes(Protocol):
    """Microseconds on one rank."""

    def operation_us(self, operation: Operation) -> float: ...

    def lookup_us(self, work: TableWork, optimizer: str) -> float: ...

    def update_us(self, work: TableWork, optimizer: str) -> float: ...


def bytes_kind(operation: Operation) -> str:
    """What of the measured operations by bytes this one is like."""
    if operation.name == "sum" and len(operation.shapes) > 1 and len(operation.shapes[0]) > 1:
        into, out = operation.shapes[0], operation.shapes[-1]
        kept = [size for size in out if size != 1]
        if kept and math.prod(kept) > 1:
            return "sum_rows" if kept[-1] == into[-1] else "sum_columns"
    return LIKE.get(operation.name, "add")


class MeasuredTimes:
    """Of one setup of a calibration. Raises ConfigError where it lacks the kinds that a model needs."""

    def __init__(self, measurements: Measurements, setup: str) -> None:
        self._all, self.setup = measurements, setup
        if setup not in measurements.setups:
            raise ConfigError(
                f"calibration {measurements.name!r} has measured {', '.join(measurements.setups)} (ranks x threads) and not "
                f"{setup}; measure it too: python -m pipeline.calibrate setups=[{setup}]"
            )

    def _rows(self, kind: str) -> list[Measurement]:
        return self._all.of(kind, self.setup)

    @cached_property
    def _products(self) -> dict[tuple[str, str, str], _ProductTimes]:
        groups: dict[tuple[str, str, str], list[Measurement]] = {}
        for kind in ("gemm", "bmm"):
            for row in self._rows(kind):
                groups.setdefault((kind, str(row.shape["layout"]), str(row.shape["dtype"])), []).append(row)
        return {key: _ProductTimes(rows) for key, rows in groups.items()}

    @cached_property
    def _by_bytes(self) -> dict[tuple[str, str], _Line]:
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for row in self._all.rows:
            if row.setup == self.setup and set(row.shape) == {"dtype", "bytes"}:
                groups.setdefault((row.kind, str(row.shape["dtype"])), []).append(row)
        return {key: _Line.through(rows) for key, rows in groups.items()}

    @cached_property
    def _optimizers(self) -> dict[str, _Line]:
        names = {str(row.shape["name"]) for row in self._rows("optimizer")}
        return {
            name: _Line.through([row for row in self._rows("optimizer") if row.shape["name"] == name], "numbers")
            for name in names
        }

    @cached_property
    def _tables(self) -> dict[tuple[str, str], Rates]:
        found = {}
        for kind in ("lookup", "update"):
            rows = self._rows(kind)
            for name in {str(row.shape["optimizer"]) for row in rows}:
                # A lookup does not depend on the optimizer, but for what its state takes of the cache.
                of_name = rows if kind == "lookup" else [row for row in rows if row.shape["optimizer"] == name]
                found[kind, name] = Rates.fit([self.amounts_of(row) for row in of_name], [row.us for row in of_name])
        return found

    def operation_us(self, operation: Operation) -> float:
        if operation.is_view or operation.name in NOTHING:
            return 0.0
        if operation.name in PRODUCTS:
            return self._product_us(operation)
        if operation.name.startswith("optimizer:"):
            name = operation.name.partition(":")[2]
            line = self._optimizers.get(name) or next(iter(self._optimizers.values()))
            return line.us(operation.shapes[0][0])
        kind = operation.name if operation.name == "take" else bytes_kind(operation)
        dtype = operation.dtype if operation.dtype in ("fp32", "bf16") else "fp32"
        line = self._by_bytes.get((kind, dtype)) or self._by_bytes["add", "fp32"]
        moved = (
            operation.in_bytes
            if kind in ("sum", "sum_rows", "sum_columns")
            else operation.in_bytes + operation.out_bytes
        )
        if kind == "inplace":
            moved = 2 * operation.out_bytes
        if kind == "fill":
            moved = operation.out_bytes
        return line.us(moved)

    def _product_us(self, operation: Operation) -> float:
        first, second = operation.shapes[-2:] if len(operation.shapes) > 2 else operation.shapes
        kind = "bmm" if len(first) == 3 else "gemm"
        layout = operation.layout if len(operation.layout) == 2 else "nn"
        dtype = operation.dtype if operation.dtype in ("fp32", "bf16") else "fp32"
        return self.product_us(kind, layout, dtype, first[0] if kind == "bmm" else 1, first[-2], second[-1], first[-1])

    def product_us(self, kind: str, layout: str, dtype: str, *sizes: float) -> float:
        """Of a `gemm` or `bmm`; sizes: products, rows, columns, inner."""
        options = [key for key in self._products if key[0] == kind and key[2] == dtype]
        key = (kind, layout, dtype) if (kind, layout, dtype) in self._products else options[0]
        return self._products[key].us(*sizes)

    def amounts_of(self, row: Measurement) -> dict[str, float]:
        """Of a measured `lookup` or `update`."""
        sample, threads = TableSample(**json.loads(str(row.shape["sample"]))), int(self.setup.partition("x")[2])
        work = work_of(sample.shapes, str(row.shape["optimizer"]), int(row.shape["number_bytes"]), threads)
        return work.lookup if row.kind == "lookup" else work.update

    def table_us(self, kind: str, optimizer: str, amounts: Mapping[str, float]) -> float:
        """Of a `lookup` or `update` whose amounts (TableWork) are given."""
        return self._rates(kind, optimizer).us(amounts)

    def lookup_us(self, work: TableWork, optimizer: str) -> float:
        return self._rates("lookup", optimizer).us(work.lookup)

    def update_us(self, work: TableWork, optimizer: str) -> float:
        return self._rates("update", optimizer).us(work.update)

    def _rates(self, kind: str, optimizer: str) -> Rates:
        if not self._tables:
            raise ConfigError(
                f"calibration {self._all.name!r} has no tables' kernels: was Numba there when it was made?"
            )
        return self._tables.get((kind, optimizer)) or self._tables[kind, "rowwise_adagrad"]

    def collective_us(self, kind: str, num_bytes: float) -> float | None:
        """None where this collective was not measured."""
        rows = self._rows(kind)
        return _Line.through(rows).us(num_bytes) if rows else None


@dataclass(frozen=True)
class _Line:
    """Through measured points, straight in logarithms; beyond the last in proportion."""

    at: Floats
    log_us: Floats

    @staticmethod
    def through(rows: Sequence[Measurement], axis: str = "bytes") -> _Line:
        by_size: dict[float, list[float]] = {}
        for row in rows:
            by_size.setdefault(float(row.shape[axis]), []).append(math.log(max(row.us, 1e-3)))
        sizes = sorted(by_size)
        if len(sizes) > 40:  # measured at many sizes: their neighbours together
            sizes = sizes[:: len(sizes) // 20]
        return _Line(np.log(np.array(sizes)), np.array([float(np.mean(by_size[size])) for size in sizes]))

    def us(self, amount: float) -> float:
        at = math.log(max(amount, 1.0))
        if at > self.at[-1]:
            return float(math.exp(self.log_us[-1] + at - self.at[-1]))
        return float(math.exp(np.interp(at, self.at, self.log_us)))


class _ProductTimes:
    """Of one kind, layout and precision."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        shapes = [_product_shape(row) for row in rows]
        times = np.array([row.us for row in rows])
        terms = np.array([_roofline_terms(*shape) for shape in shapes])
        self._rates, _ = nnls(terms / times[:, None], np.ones(len(times)))
        self._points = np.array([_logs(*shape) for shape in shapes])
        residual = np.log(times / np.maximum(terms @ self._rates, LEAST_US))
        self._correction = (
            RBFInterpolator(self._points, residual, kernel="linear", smoothing=SMOOTHING, neighbors=min(24, len(rows)))
            if len(rows) >= 8
            else None
        )
        self._limits = self._points.min(axis=0), self._points.max(axis=0)

    def us(self, batch: float, rows: float, columns: float, inner: float) -> float:
        base = max(float(np.array(_roofline_terms(batch, rows, columns, inner)) @ self._rates), LEAST_US)
        if self._correction is None:
            return base
        point = np.clip(np.array([_logs(batch, rows, columns, inner)]), *self._limits)
        return base * math.exp(float(np.clip(self._correction(point)[0], -MOST_CORRECTION, MOST_CORRECTION)))


def _product_shape(row: Measurement) -> tuple[float, float, float, float]:
    shape = row.shape
    return float(shape.get("b", 1)), float(shape["m"]), float(shape["n"]), float(shape["k"])


def _roofline_terms(batch: float, rows: float, columns: float, inner: float) -> tuple[float, ...]:
    """A call, its products one by one, its multiplications, its numbers, and what whole blocks of 16 columns would take."""
    blocks = batch * rows * math.ceil(columns / 16) * 16 * inner
    return 1.0, batch, batch * rows * columns * inner, batch * (rows * inner + inner * columns + rows * columns), blocks


def _logs(batch: float, rows: float, columns: float, inner: float) -> tuple[float, ...]:
    """Where in the space of shapes; the last numbers tell shapes that no block fits from those that one does."""
    uneven = 0.35 * float(columns % 16 != 0) + 0.35 * float(columns == 1)
    return math.log(batch), math.log(rows), math.log(columns), math.log(inner), uneven, 0.35 * float(inner % 16 != 0)


@dataclass(frozen=True)
class Rates:
    """A sum of amounts, each at its rate; `cache_mib`: the size of cache whose misses explain the measurements best."""

    names: tuple[str, ...]
    us_each: Floats
    cache_mib: int
    error: float  # mean of the relative errors' absolute values

    @staticmethod
    def fit(rows: Sequence[Mapping[str, float]], microseconds: Sequence[float]) -> Rates:
        """Least squares of relative errors, no rate below zero."""
        best: Rates | None = None
        times = np.array(microseconds)
        for size in CACHE_MIB:
            names = tuple(name for name in rows[0] if not name.startswith("missed") or name.endswith(f"_{size}"))
            terms = np.array([[1.0, *(row[name] for name in names)] for row in rows]) / times[:, None]
            scale = np.maximum(terms.max(axis=0), 1e-30)
            solved, _ = nnls(terms / scale, np.ones(len(times)))
            rates = solved / scale
            error = float(np.abs(terms @ rates - 1).mean())
            if best is None or error < best.error:
                best = Rates(names, rates, size, error)
        assert best is not None
        return best

    def us(self, amounts: Mapping[str, float]) -> float:
        return float(
            self.us_each[0] + sum(rate * amounts[name] for rate, name in zip(self.us_each[1:], self.names, strict=True))
        )
