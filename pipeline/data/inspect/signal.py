"""Measure how well one column of a raw file alone predicts the label."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.data.quality import Floats, auc

NUM_FOLDS = 2
MANY_VALUES = 10_000  # of a column: which of them has one label is not named
# the same as in diagnose: the share of the rows, and how many rows of the other label were expected
DETERMINED_SHARE, DETERMINED_ROWS = 0.01, 20.0


@dataclass(frozen=True)
class Signal:
    """Measure what one column says of the label.

    auc: of predicting the label from this column, out of fold. determined: which of its values has
    one label alone, "" if there is none. determined_share: share of the rows with such a value.
    """

    auc: float
    determined: str = ""
    determined_share: float = 0.0


def measure_signal(connection: duckdb.DuckDBPyConnection, column: str, is_fraction: bool, labels: Floats) -> Signal:
    """Measure a column of the table raw. A fraction scores a row by its rank, in the better direction.
    Another value scores a row by its label rate in the other fold. labels: 0, 1 or NaN, [rows].
    """
    known = ~np.isnan(labels)
    found = connection.execute(f"SELECT coalesce({column}, '') <> '' AS v FROM raw").fetchnumpy()["v"].astype(np.int64)
    determined = _determined(found, ["row without a value", "row with a value"], labels)
    if is_fraction:
        values = connection.execute(f"SELECT try_cast({column} AS DOUBLE) AS v FROM raw").fetchnumpy()["v"]
        values = np.ma.filled(values.astype(np.float64), np.nan)
        values = np.where(np.isnan(values), np.nanmean(values) if np.isfinite(values).any() else 0.0, values)
        area = auc(values[known], labels[known])
        return Signal(max(area, 1 - area), *determined)
    codes = connection.execute(
        f"SELECT dense_rank() OVER (ORDER BY coalesce({column}, '')) - 1 AS c FROM (SELECT *, row_number() OVER () AS r FROM raw) ORDER BY r"
    ).fetchnumpy()["c"]
    codes = np.asarray(codes, np.int64)
    if not determined[0]:
        distinct = f"SELECT DISTINCT coalesce({column}, '') AS v FROM raw ORDER BY 1"
        texts = connection.execute(distinct).fetchnumpy()["v"] if codes.max() < MANY_VALUES else []
        determined = _determined(codes, [f"row with {str(text)!r}" for text in texts], labels)
    folds, scores = np.arange(len(codes)) % NUM_FOLDS, np.zeros(len(codes))
    base = float(np.nanmean(labels))
    for fold in range(NUM_FOLDS):
        others = (folds != fold) & known
        sums = np.bincount(codes[others], weights=labels[others], minlength=codes.max() + 1)
        counts = np.bincount(codes[others], minlength=codes.max() + 1)
        scores[folds == fold] = ((sums + base) / (counts + 1))[codes[folds == fold]]
    return Signal(auc(scores[known], labels[known]), *determined)


def _determined(codes: NDArray[np.int64], shown: list[str], labels: Floats) -> tuple[str, float]:
    """Return which value has one label alone in over 1 % of the rows, where many rows of the other label were
    expected, and the share of all rows with such values. `shown` describes the value of each code.
    """
    known = ~np.isnan(labels)
    counts = np.bincount(codes[known], minlength=int(codes.max()) + 1)
    if np.count_nonzero(counts) < 2:
        return "", 0.0
    positives = np.bincount(codes[known], labels[known], len(counts))
    rate = positives.sum() / counts.sum()
    found: dict[int, int] = {}
    for label, expected in ((1, counts * (1 - rate)), (0, counts * rate)):
        same = (positives == counts * label) & (expected >= DETERMINED_ROWS)
        found |= dict.fromkeys(np.flatnonzero(same & (counts >= DETERMINED_SHARE * counts.sum())).tolist(), label)
    if not found:
        return "", 0.0
    code = max(found, key=lambda each: int(counts[each]))
    what = shown[code] if shown else "row with one value"
    return (
        f"every {what} has label {found[code]} ({counts[code]:,} rows, label rate {rate:.3f})",
        float(sum(counts[each] for each in found) / counts.sum()),
    )
