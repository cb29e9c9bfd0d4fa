"""Group what the kernels of tables are called with. Numba compiles named tuples of arrays and numbers.

Shapes: F features, B samples, L ids, T tables. Weights and states of all tables lie one after the other in arrays of
one dimension. An array that is not there is empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class IdBags(NamedTuple):
    """The ids of a batch. A table's features are neighbours."""

    indices: Array  # [L]
    offsets: Array  # [F * B + 1] into indices
    factors: Array  # [L]: a weight of each id
    num_samples: np.uint64


class PooledRows(NamedTuple):
    """Rows of features, pooled: fp32, or bf16 as uint16. Sample b begins at b * width, feature f at columns[f] from there."""

    values: Array
    width: np.uint64
    columns: Array  # [F + 1]


class Rows(NamedTuple):
    """The rows of tables that are looked up, flat. A feature's table begins at begins [F] and has num_rows [F]."""

    values: Array
    begins: Array
    num_rows: Array
    is_mean: bool


class TableStates(NamedTuple):
    """Weights and states of an optimizer. Those of feature f's table begin at the begins [F]."""

    weights: Array  # fp32
    halves: Array  # fp16 as uint16, instead of weights
    is_half: bool
    weight_begins: Array
    states: Array
    state_begins: Array
    squares: Array
    square_begins: Array


class Update(NamedTuple):
    """How rows are updated; `numbers`: as kernels.optimizer's LR and the places after it say."""

    kind: int
    numbers: Array
    l2s: Array  # [T]: a touched row's gradient gains l2 * its weights
    every: Array  # [T]: the table's rows, if untouched rows are updated too, as by a gradient of 0; else 0
    is_mean: bool
    step: np.uint64


class Tables(NamedTuple):
    """feature_begins [T + 1]: the first feature of each table; marks: a bitmap of updated rows from byte mark_begins [T + 1]."""

    feature_begins: Array
    marks: Array
    mark_begins: Array


class FlatTables(NamedTuple):
    """Small tables of `rows` [T] times `dims` [T], in fp32, and their states: a number a weight, or a row."""

    weights: Array
    states: Array
    squares: Array
    rows: Array
    dims: Array
