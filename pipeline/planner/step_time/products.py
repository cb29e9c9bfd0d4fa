"""Predict matrix products: a roofline fitted to the measurements, and a correction that shapes alike share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import nnls

from pipeline.planner.step_time.correction import Correction, Floats
from pipeline.planner.step_time.measurements import Measurement
from pipeline.planner.step_time.rates import LEAST_US

# How far likeness reaches: doublings of a size, a size that fits no block, another layout, precision or library, another setup, a product
# too small for a library. By cross-validation of calibrations over shapes.
REACH, ODD, APART, SETUPS, SMALL = 4.0, 3.0, 1.0, 2.0, 0.5
LEAST_ONEDNN = (
    16**3
)  # multiplications: torch gives bf16 products of more to oneDNN (mkldnn_gemm_min_size), whose calls take 10 us
LEAST_BATCHED = 400  # multiplications of one product: torch.bmm runs fp32 products of fewer in a loop of its own (bmm_out_or_baddbmm_)


class Multiplied(NamedTuple):
    """kind: gemm or bmm; layout: of both inputs, n as they are or t transposed. library: "onednn" where devices.cpu.products takes it
    in the place of torch's own."""

    kind: str
    layout: str
    dtype: str
    library: str = ""


Group: TypeAlias = tuple[Multiplied, str]  # and the setup


class ProductTimes:
    """Of all ways and setups that were measured: a roofline for each, and a correction that they share: what is slow about a shape is so
    in other layouts and setups too, the more alike, the more."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        groups: dict[Group, list[Measurement]] = {}
        for row in rows:
            groups.setdefault(_group(row), []).append(row)
        self._rates = {group: self._roofline(of_group) for group, of_group in groups.items()}
        places = [_place(_group(row), *_product_shape(row)) for row in rows]
        formula = np.array([self._base(_group(row), *_product_shape(row)) for row in rows])
        self._correction = Correction.fit(places, np.array([row.us for row in rows]), formula)

    @staticmethod
    def _roofline(rows: Sequence[Measurement]) -> Floats:
        times = np.array([row.us for row in rows])
        terms = np.array([_roofline_terms(*_product_shape(row)) for row in rows])
        rates, _ = nnls(terms / times[:, None], np.ones(len(times)))
        return np.asarray(rates)

    def us(self, how: Multiplied, setup: str, *sizes: float) -> float:
        """sizes: products, rows, columns, inner. As what is most like it, where it was not measured this way."""
        here = [each for each, of_setup in self._rates if of_setup == setup and each.kind == how.kind]
        nearest = max(here, key=lambda each: (each.dtype == how.dtype, each.layout == how.layout, each == how))
        group = nearest, setup
        return self._base(group, *sizes) * self._correction.factor(_place(group, *sizes))

    def _base(self, group: Group, *shape: float) -> float:
        return max(float(np.array(_roofline_terms(*shape)) @ self._rates[group]), LEAST_US)


def _group(row: Measurement) -> Group:
    shape = row.shape
    how = Multiplied(row.kind, str(shape["layout"]), str(shape["dtype"]), str(shape.get("library", "")))
    return how, row.setup


def _product_shape(row: Measurement) -> tuple[float, float, float, float]:
    shape = row.shape
    return float(shape.get("b", 1)), float(shape["m"]), float(shape["n"]), float(shape["k"])


def _roofline_terms(batch: float, rows: float, columns: float, inner: float) -> tuple[float, ...]:
    """A call, its products one by one, its multiplications, its numbers, what whole blocks of 16 columns would take, and what
    passes over four columns, whole or not."""
    blocks = batch * rows * math.ceil(columns / 16) * 16 * inner
    numbers = batch * (rows * inner + inner * columns + rows * columns)
    passes = batch * rows * 4 * (columns // 4 + _narrow_passes(columns)) * inner
    return 1.0, batch, batch * rows * columns * inner, numbers, blocks, passes


def _narrow_passes(columns: float) -> int:
    """Over what four columns at once leave: one of two columns and one of the last, each as long as one of four.

    Of torch.bmm on one thread of an EPYC, 128 products of [n, 32] by [32, n], in us: n = 20 59, 21 82, 22 85, 23 110, 24 71.
    """
    return (int(columns) >> 1 & 1) + (int(columns) & 1)


def _place(group: Group, batch: float, rows: float, columns: float, inner: float) -> tuple[float, ...]:
    """Where in the space of shapes and groups: doublings by REACH, sizes that no block fits by ODD, groups by APART."""
    how, setup = group
    sizes = (math.log2(size) / REACH for size in (batch, rows, columns, inner))
    odd = (
        columns == 1,
        inner == 1,
        columns % 16 != 0,
        inner % 16 != 0,
        rows % 16 != 0,
        columns % 2 != 0,
        inner % 2 != 0,
        _narrow_passes(columns),
    )
    apart = (
        how.layout == "nt",
        how.layout == "nn",
        how.layout == "tn",
        how.dtype == "bf16",
        how.kind == "bmm",
        how.library == "onednn",
    )
    is_small = how.dtype == "bf16" and batch * rows * columns * inner <= LEAST_ONEDNN
    is_small |= how.kind == "bmm" and how.dtype == "fp32" and rows * columns * inner < LEAST_BATCHED
    ranks, _, threads = setup.partition("x")
    return (
        *sizes,
        *(float(each) / ODD for each in odd),
        *(float(each) / APART for each in apart),
        float(is_small) / SMALL,
        math.log2(float(ranks)) / SETUPS,
        math.log2(float(threads)) / SETUPS,
    )
