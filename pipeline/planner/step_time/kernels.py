"""Predict what one operation takes, by a machine's measurements, or by its data sheet where there are none.

Products: a roofline fitted to the measurements, and a correction of its logarithm that shapes alike share. Operations that move
bytes: a line through the measured sizes, in logarithms. Tables: a sum of rates (ids, rows, bytes, misses of the cache), with such a correction too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pipeline.planner.step_time.measurements import Measurement, Measurements
from pipeline.planner.step_time.record import Operation
from pipeline.planner.step_time.table_work import LEAST_SHARE, TableSample, TableWork, work_of
from pipeline.runtime.errors import ConfigError

Floats = NDArray[np.float64]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
DOTS = ("dots", "dots_backward")  # pipeline.models.layers.dots_kernels
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
AMOUNTS, SHARES = 3.0, 0.75  # the same for tables: doublings of an amount, shares of the ids
ROUNDS, LEAST_FITTED = 4, 0.2  # of fit_rates
NOISE = 0.2  # beside the roofline's error, of 1
ProductGroup: TypeAlias = tuple[str, str, str, str]  # kind, layout, precision, setup
Place: TypeAlias = Callable[[Mapping[str, float]], tuple[float, ...]]
LEAST_US = 0.3
BEYOND_BYTES = 1 << 20  # of rows: more do not stay in a core's own cache from one call to the next


class OperationTimes(Protocol):
    """Microseconds on one rank."""

    def operation_us(self, operation: Operation) -> float: ...

    def lookup_us(self, work: TableWork) -> float: ...

    def update_us(self, work: TableWork) -> float: ...


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

    @property
    def threads(self) -> int:
        return int(self.setup.partition("x")[2])

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
    def _optimizers(self) -> dict[str, dict[float, _Line]]:
        """By name, and by the number of tensors measured."""
        groups: dict[str, dict[float, list[Measurement]]] = {}
        for row in self._rows("optimizer"):
            of_name = groups.setdefault(str(row.shape["name"]), {})
            of_name.setdefault(float(row.shape["tensors"]), []).append(row)
        return {
            name: {tensors: _Line.through(rows, "numbers") for tensors, rows in of_name.items()}
            for name, of_name in groups.items()
        }

    def _optimizer_us(self, name: str, numbers: float, tensors: float) -> float:
        """Each tensor has a part of its own: a line through the numbers of tensors that were measured, or in proportion to one."""
        lines = self._optimizers.get(name) or self._optimizers.get("adagrad") or next(iter(self._optimizers.values()))
        few, many = min(lines), max(lines)
        least = lines[few].us(numbers)
        if few == many:
            return least
        return max(least / 2, least + (lines[many].us(numbers) - least) * (tensors - few) / (many - few))

    @cached_property
    def _tables(self) -> dict[str, Rates]:
        """Of `lookup` and of `update`: all optimizers together, for most of what an update does is the same under each."""
        found = {}
        for kind in ("lookup", "update"):
            if rows := self._rows(kind):
                found[kind] = Rates.fit([self.amounts_of(row) for row in rows], [row.us for row in rows])
        return found

    def operation_us(self, operation: Operation) -> float:
        if operation.is_view or operation.name in NOTHING:
            return 0.0
        if operation.name in PRODUCTS:
            return self._product_us(operation)
        if operation.name.startswith("optimizer:"):
            (numbers,), (tensors,) = operation.shapes
            return self._optimizer_us(operation.name.partition(":")[2], numbers, tensors)
        if operation.name in DOTS:
            return self._dots_us(operation)
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
        fill = self._by_bytes.get(("fill", "fp32"))
        return self._optimizer_us(optimizer, numbers, 1) + (fill.us(4 * numbers) if fill else 0.0)

    @cached_property
    def _dots(self) -> dict[tuple[str, str], Rates]:
        """By kernel and precision."""
        rows = {
            (kind, dtype): [row for row in self._rows(kind) if row.shape["dtype"] == dtype]
            for kind in DOTS
            for dtype in ("fp32", "bf16")
        }
        return {
            key: Rates.fit([self.dots_amounts(row) for row in of_key], [row.us for row in of_key], _dots_place)
            for key, of_key in rows.items()
            if of_key
        }

    def dots_amounts(self, row: Measurement) -> dict[str, float]:
        """Of a measured kernel of DOTS."""
        return _dots_amounts(*(int(row.shape[name]) for name in ("b", "m", "k")), threads=self.threads)

    def dots_us(self, kind: str, dtype: str, amounts: Mapping[str, float]) -> float | None:
        """None where a calibration of before these kernels has none of them."""
        rates = self._dots.get((kind, dtype))
        return None if rates is None else rates.us(amounts)

    def _dots_us(self, operation: Operation) -> float:
        batch, rows, dim = operation.shapes[0]
        found = self.dots_us(operation.name, operation.dtype, _dots_amounts(batch, rows, dim, threads=self.threads))
        if found is not None:
            return found
        layout, columns, inner = ("nt", rows, dim) if operation.name == "dots" else ("nn", dim, rows)
        product = self.product_us("bmm", layout, operation.dtype, batch, rows, columns, inner)
        take = self._by_bytes.get(("take", operation.dtype))
        return product + (take.us(operation.in_bytes + operation.out_bytes) if take else 0.0)

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
        sample = TableSample(**json.loads(str(row.shape["sample"])))
        work = work_of(sample.shapes, str(row.shape["optimizer"]), int(row.shape["number_bytes"]), self.threads)
        return work.lookup if row.kind == "lookup" else work.update

    def table_us(self, kind: str, amounts: Mapping[str, float]) -> float:
        """Of a `lookup` or `update` whose amounts (TableWork) are given."""
        return self._rates(kind).us(amounts)

    def lookup_us(self, work: TableWork) -> float:
        return self._rates("lookup").us(work.lookup)

    def update_us(self, work: TableWork) -> float:
        return self._rates("update").us(work.update)

    def _rates(self, kind: str) -> Rates:
        if not self._tables:
            raise ConfigError(
                f"calibration {self._all.name!r} has no tables' kernels: was Numba there when it was made?"
            )
        return self._tables[kind]

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
    """A sum of amounts, each at its rate, and a correction of its logarithm that amounts alike share."""

    rates: dict[str, float]
    error: float  # mean of the relative errors' absolute values, of the sum alone
    places: Floats  # of the measurements
    weights: Floats  # of their likeness, in the correction of the logarithm
    place: Place

    @staticmethod
    def fit(rows: Sequence[Mapping[str, float]], microseconds: Sequence[float], place: Place | None = None) -> Rates:
        """No rate is below zero. `place`: of amounts, _table_place where it is None."""
        place = place or _table_place
        names = ("call", *dict.fromkeys(name for row in rows for name in row))
        times = np.array(microseconds)
        terms = np.array([[1.0, *(row.get(name, 0.0) for name in names[1:])] for row in rows])
        solved = fit_rates(terms, times)
        fitted = np.maximum(terms @ solved, 1e-3)
        places = np.array([place(row) for row in rows])
        likeness = _likeness(places, places) + NOISE**2 * np.eye(len(rows))
        weights = np.asarray(np.linalg.solve(likeness, np.log(times / fitted)), dtype=np.float64)
        rates = dict(zip(names, map(float, solved), strict=True))
        return Rates(rates, float(np.abs(fitted / times - 1).mean()), places, weights, place)

    def us(self, amounts: Mapping[str, float]) -> float:
        base = sum(rate * amounts.get(name, 0.0) for name, rate in self.rates.items()) + self.rates["call"]
        correction = float((_likeness(np.array([self.place(amounts)]), self.places) @ self.weights)[0])
        return max(base, LEAST_US) * math.exp(max(-MOST_CORRECTION, min(MOST_CORRECTION, correction)))


def fit_rates(terms: Floats, times: Floats, drawn: Floats | None = None, wanted: Floats | None = None) -> Floats:
    """Rates [terms], none below zero, of a sum [times, terms] that is as often too long as too short, in proportion.

    Least squares of relative errors would rather be too short: each round weighs by what the round before came to. Further
    rows `drawn`, of which `wanted` is expected, count as they are.
    """
    weights = np.ones(len(times))
    solved = np.zeros(terms.shape[1])
    more, more_wanted = (
        (np.empty((0, terms.shape[1])), np.empty(0)) if drawn is None or wanted is None else (drawn, wanted)
    )
    for _ in range(ROUNDS):
        matrix = np.vstack([terms / times[:, None] * weights[:, None], more])
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
        found, _ = nnls(matrix / scale, np.concatenate([weights, more_wanted]))
        solved = found / scale
        weights = np.sqrt(1 / np.maximum(terms @ solved / times, LEAST_FITTED))
    return solved


def _table_place(amounts: Mapping[str, float]) -> tuple[float, ...]:
    """Where a lookup or update is among others: doublings of its ids and their likes, and shares of them, by their reach."""
    ids, bags = max(amounts["ids"], 1e-9), max(amounts["bags"], 1e-9)
    sizes = (ids, amounts["row_bytes"] / ids, amounts["tables"], ids / bags, amounts["pooled_bytes"] / bags)
    shares = (amounts["distinct"], amounts["missed_rows_1"], amounts["missed_rows_16"])
    return (
        *(math.log2(1 + size) / AMOUNTS for size in sizes),
        *(share / ids / SHARES for share in shares),
        amounts["other_threads"] / AMOUNTS,
    )


def _dots_amounts(batch: int, rows: int, dim: int, *, threads: int) -> dict[str, float]:
    """Of the slowest thread: samples, their numbers, their pairs, and multiplications in whole blocks of 4 rows and 16 columns."""
    shares = max(1, min(threads, batch // LEAST_SHARE))
    samples = batch / shares
    rows_4, rows_16, dim_16 = (-(-size // block) * block for size, block in ((rows, 4), (rows, 16), (dim, 16)))
    return {
        "samples": samples,
        "rows": samples * rows,
        "numbers": samples * rows * dim,
        "pairs": samples * rows * (rows - 1) / 2,
        "products": samples * rows_4 * rows_16 * dim,
        "products_back": samples * rows_4 * rows * dim_16,
        "beyond": max(0.0, 4.0 * batch * rows * dim - BEYOND_BYTES),
        "other_threads": shares - 1.0,
    }


def _dots_place(amounts: Mapping[str, float]) -> tuple[float, ...]:
    sizes = (amounts["samples"], amounts["rows"] / amounts["samples"], amounts["numbers"] / amounts["rows"])
    return (*(math.log2(size) / REACH for size in sizes), amounts["other_threads"])
