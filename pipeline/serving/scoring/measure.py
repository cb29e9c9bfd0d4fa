"""Measure scores of labelled raw rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config.data import DataConfig
from pipeline.data.quality import log_losses_of_scores
from pipeline.data.raw.blocks import Block
from pipeline.data.raw.layout import check_columns, layout_of
from pipeline.data.raw.rows import parse_block
from pipeline.runtime.errors import DataError
from pipeline.serving.artifact.task_quality import quality


def measure_rows(
    data: DataConfig, rows: pa.Table, labels: Sequence[str], predict: Callable[[pa.Table], NDArray[np.float32]]
) -> dict[str, float]:
    """Return the metrics of predict's scores. data: says what the raw columns are. labels: of the columns of
    scores; empty: the main label. Raises DataError if a column is missing or a row cannot be read."""
    layout = replace(layout_of(data), format="parquet")
    check_columns(layout, tuple(rows.column_names), "the frame")
    parsed = parse_block(layout, tuple(rows.column_names), Block(1, 0, rows.num_rows, table=rows))
    if parsed.quarantined:
        bad = parsed.quarantined[0]
        raise DataError(f"row {bad.line - 1} of {rows.num_rows:,} cannot be read: {bad.reason}")
    scores = predict(rows).reshape(rows.num_rows, -1).astype(np.float64)
    columns = data.columns
    found: dict[str, float] = {}
    weights = np.ones(rows.num_rows) if columns.weight is None else _numbers(parsed.table, columns.weight)
    for number, name in enumerate(labels or [columns.label]):
        kind = columns.all_labels[name].kind if name in columns.all_labels else "binary"
        values = _measure(kind, scores[:, number], _numbers(parsed.table, name), weights)
        found |= {f"{name}/{metric}" if len(labels) > 1 else metric: value for metric, value in values.items()}
    return found


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    return np.asarray(table[name].to_numpy(), np.float64)


def _measure(
    kind: str, scores: NDArray[np.float64], labels: NDArray[np.float64], weights: NDArray[np.float64]
) -> dict[str, float]:
    ne, auc = quality(kind, scores, labels, weights).ne, quality(kind, scores, labels, weights).auc
    if kind != "binary":
        return {"mse": float(np.average(np.square(scores - labels), weights=weights)), "num_samples": len(labels)}
    rate = float(np.average(labels, weights=weights))
    return {
        "ne": ne,
        "auc": auc,
        "logloss": float(np.average(log_losses_of_scores(scores, labels), weights=weights)),
        "calibration": float(np.average(scores, weights=weights)) / rate if rate else float("nan"),
        "label_rate": rate,
        "num_samples": len(labels),
    }
