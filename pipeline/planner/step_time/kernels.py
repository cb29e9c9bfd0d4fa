"""Predict what one operation takes, by a machine's measurements, or by its data sheet where there are none.

Products: a roofline fitted to the measurements, and a correction of its logarithm that shapes alike share. Operations that move
bytes: a line through the measured sizes, in logarithms. Tables: a sum of rates (ids, rows, bytes, misses of the cache), with a correction that amounts alike share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
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
MOST_CORRECTION = 1.2  # natural logarithm
# How far likeness of products reaches: doublings of a size, a size that fits no block, another layout or precision, another setup
REACH, ODD, APART, SETUPS = 2.0, 3.0, 1.5, 2.0
AMOUNTS = 3.0  # the same for tables: doublings of an amount
NOISE = 0.2  # beside the roofline's error, of 1
ProductGroup: TypeAlias = tuple[str, str, str, str]  # kind, layout, precision, setup
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
    def _products(self) -> _ProductTimes:
        return _ProductTimes([row for row in self._all.rows if row.kind in ("gemm", "bmm")])

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
        other = {"dropout": "math", "batch_norm": "norm", "batch_norm_backward": "norm"}.get(
            kind, "add"
        )  # of old calibrations
        lines = self._by_bytes
        line = lines.get((kind, dtype)) or lines.get((other, dtype)) or lines["add", "fp32"]
        moved = (
            operation.in_bytes
            if kind in ("sum", "sum_rows", "sum_columns")
            else operation.in_bytes + operation.out_bytes
        )
        if kind == "inplace":
            moved = 2 * operation.out_bytes
        if kind in ("dropout", "batch_norm", "batch_norm_backward"):
            moved = 2 * max(operation.out_bytes, operation.in_bytes // 2)
        if kind == "fill":
            moved = operation.out_bytes
        return line.us(moved)

    def dense_update_us(self, optimizer: str, numbers: float) -> float:
        """Of gradients of so many numbers: zeroed, and applied by a layers' optimizer."""
        line = (
            self._optimizers.get(optimizer) or self._optimizers.get("adagrad") or next(iter(self._optimizers.values()))
        )
        fill = self._by_bytes.get(("fill", "fp32"))
        return line.us(numbers) + (fill.us(4 * numbers) if fill else 0.0)

    def _product_us(self, operation: Operation) -> float:
        first, second = operation.shapes[-2:] if len(operation.shapes) > 2 else operation.shapes
        kind = "bmm" if len(first) == 3 else "gemm"
        layout = operation.layout if len(operation.layout) == 2 else "nn"
        dtype = operation.dtype if operation.dtype in ("fp32", "bf16") else "fp32"
        return self.product_us(kind, layout, dtype, first[0] if kind == "bmm" else 1, first[-2], second[-1], first[-1])

    def product_us(self, kind: str, layout: str, dtype: str, *sizes: float) -> float:
        """Of a `gemm` or `bmm`; sizes: products, rows, columns, inner."""
        here = [group for group in self._products.groups() if group[3] == self.setup and group[0] == kind]
        wanted = (kind, layout, dtype, self.setup)
        group = wanted if wanted in here else next(each for each in here if each[2] == dtype)
        return self._products.us(group, *sizes)

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
    """Of all kinds, layouts, precisions and setups that were measured: a roofline for each, and a correction that neighbours share.

    The correction of the logarithm is a Gaussian process over shapes (kriging): what is slow about a shape is so in other layouts
    and setups too, the more alike, the more.
    """

    def __init__(self, rows: Sequence[Measurement]) -> None:
        groups: dict[ProductGroup, list[Measurement]] = {}
        for row in rows:
            groups.setdefault(_group(row), []).append(row)
        self._rates = {group: self._roofline(of_group) for group, of_group in groups.items()}
        self._points = np.array([_place(_group(row), *_product_shape(row)) for row in rows])
        base = [self._base(_group(row), *_product_shape(row)) for row in rows]
        residual = np.log(np.array([row.us for row in rows]) / np.array(base))
        likeness = _likeness(self._points, self._points) + NOISE**2 * np.eye(len(rows))
        self._weights = np.linalg.solve(likeness, residual)

    @staticmethod
    def _roofline(rows: Sequence[Measurement]) -> Floats:
        times = np.array([row.us for row in rows])
        terms = np.array([_roofline_terms(*_product_shape(row)) for row in rows])
        rates, _ = nnls(terms / times[:, None], np.ones(len(times)))
        return np.asarray(rates)

    def groups(self) -> Iterable[ProductGroup]:
        return self._rates.keys()

    def us(self, group: ProductGroup, batch: float, rows: float, columns: float, inner: float) -> float:
        place = np.array([_place(group, batch, rows, columns, inner)])
        correction = float((_likeness(place, self._points) @ self._weights)[0])
        base = self._base(group, batch, rows, columns, inner)
        return base * math.exp(max(-MOST_CORRECTION, min(MOST_CORRECTION, correction)))

    def _base(self, group: ProductGroup, *shape: float) -> float:
        return max(float(np.array(_roofline_terms(*shape)) @ self._rates[group]), LEAST_US)


def _group(row: Measurement) -> ProductGroup:
    return row.kind, str(row.shape["layout"]), str(row.shape["dtype"]), row.setup


def _likeness(places: Floats, others: Floats) -> Floats:
    """[places, others] Matern 3/2 of their distances, which are in units of how far likeness reaches."""
    squares = (places**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * places @ others.T
    distances = math.sqrt(3) * np.sqrt(np.maximum(squares, 0.0))
    likeness: Floats = (1 + distances) * np.exp(-distances)
    return likeness


def _product_shape(row: Measurement) -> tuple[float, float, float, float]:
    shape = row.shape
    return float(shape.get("b", 1)), float(shape["m"]), float(shape["n"]), float(shape["k"])


def _roofline_terms(batch: float, rows: float, columns: float, inner: float) -> tuple[float, ...]:
    """A call, its products one by one, its multiplications, its numbers, and what whole blocks of 16 columns would take."""
    blocks = batch * rows * math.ceil(columns / 16) * 16 * inner
    return 1.0, batch, batch * rows * columns * inner, batch * (rows * inner + inner * columns + rows * columns), blocks


def _place(group: ProductGroup, batch: float, rows: float, columns: float, inner: float) -> tuple[float, ...]:
    """Where in the space of shapes and groups: doublings by REACH, sizes that no block fits by ODD, groups by APART."""
    kind, layout, dtype, setup = group
    sizes = (math.log2(size) / REACH for size in (batch, rows, columns, inner))
    odd = (
        columns == 1,
        inner == 1,
        columns % 16 != 0,
        inner % 16 != 0,
        rows % 16 != 0,
        columns % 2 != 0,
        inner % 2 != 0,
    )
    apart = (layout == "nt", layout == "nn", layout == "tn", dtype == "bf16", kind == "bmm")
    ranks, _, threads = setup.partition("x")
    return (
        *sizes,
        *(float(each) / ODD for each in odd),
        *(float(each) / APART for each in apart),
        math.log2(float(ranks)) / SETUPS,
        math.log2(float(threads)) / SETUPS,
    )


@dataclass(frozen=True)
class Rates:
    """A sum of amounts, each at its rate; `cache_mib`: the size of cache whose misses explain the measurements best."""

    names: tuple[str, ...]
    us_each: Floats
    cache_mib: int
    error: float  # mean of the relative errors' absolute values
    places: Floats  # of the measurements: their amounts' doublings, in units of how far likeness reaches
    weights: Floats  # of their likeness, in the correction of the logarithm

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
                best = Rates(names, rates, size, error, *_correction(names, rows, np.log(terms @ rates)))
        assert best is not None
        return best

    def us(self, amounts: Mapping[str, float]) -> float:
        base = self.us_each[0] + sum(
            rate * amounts[name] for rate, name in zip(self.us_each[1:], self.names, strict=True)
        )
        correction = float((_likeness(_doublings(self.names, [amounts]), self.places) @ self.weights)[0])
        return float(base) * math.exp(max(-MOST_CORRECTION, min(MOST_CORRECTION, correction)))


def _doublings(names: Sequence[str], rows: Sequence[Mapping[str, float]]) -> Floats:
    return np.log2(1.0 + np.array([[row[name] for name in names] for row in rows])) / AMOUNTS


def _correction(names: Sequence[str], rows: Sequence[Mapping[str, float]], log_ratio: Floats) -> tuple[Floats, Floats]:
    """Places and weights of a Gaussian process over amounts, as products have one over shapes. `log_ratio`: fitted by measured."""
    places = _doublings(names, rows)
    likeness = _likeness(places, places) + NOISE**2 * np.eye(len(rows))
    return places, np.asarray(np.linalg.solve(likeness, -log_ratio), dtype=np.float64)
