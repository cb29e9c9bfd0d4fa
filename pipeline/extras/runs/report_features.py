"""Describe the features of a run for its page, and the values with bad calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pipeline.data.dataset import Dataset, SparseFeature
from pipeline.data.vocabulary_files import find_vocabulary
from pipeline.extras.pages.charts import Bar, bar_chart
from pipeline.extras.runs.evaluation_stats import EvaluationStats, Slice
from pipeline.extras.runs.folder import Run
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.pages.html import fixed
from pipeline.runtime.storage import storage

MAX_SLICES = 12
MAX_BARS = 15
MIN_SLICE_ROWS = 100
logger = get_logger(__name__)
FEATURE_HEADINGS = (
    "feature", "importance", "ids", "updated rows", "norm", "coverage", "unknown", "its calibration", "ids a row", "top id", "top 1 %",
    "distinct values",
)  # fmt: skip


def importance_charts(run: Run) -> list[tuple[str, str]]:
    """Return a caption and a chart for each label whose importance was measured."""
    several, charts = len(run.labels) > 1, []
    for label, features in run.importances.items():
        ranked = sorted(features.items(), key=lambda item: -item[1][0])[:MAX_BARS]
        bars = [Bar(name, rise, 2 * error) for name, (rise, error) in ranked]
        whose = f" of {label}" if several else ""
        chart = bar_chart("importance of each feature" + (f" for {label}" if several else ""), bars)
        charts.append((f"Importance: by how much NE{whose} rises without it", chart))
    return charts


def feature_rows(dataset: Dataset, stats: EvaluationStats | None, run: Run) -> list[list[str]]:
    """Return one row per feature, the most important first.

    A dense feature has only an importance.
    """
    unknown = {each.feature: each for each in stats.slices if each.id == 0} if stats else {}
    measured = {each.feature for each in stats.slices} if stats else set()
    total = float(stats.blocks.weight.sum()) if stats else 0.0
    rows = []
    for feature in dataset.sparse_features:
        curve, none = feature.frequency_curve, unknown.get(feature.name)
        share = (none.weight if none else 0) / total if feature.name in measured and total else None
        table = run.table_of(feature.name)
        updated, size = table.get("updated"), table.get("rows")
        rows.append([
            feature.name, _importance(run, feature.name), f"{feature.cardinality:,}",
            f"{updated:,.0f} ({updated / size:.0%})" if updated is not None and size else "-",
            fixed(table.get("norm"), ".3g"), fixed(None if share is None else 1 - share, ".2%"), fixed(share, ".2%"),
            f"{none.calibration:.3f}" if none and none.rows >= MIN_SLICE_ROWS and none.labels else "-",
            f"{feature.mean_pooling_factor:.3g}", f"{curve.shares[0]:.1%}" if curve.shares else "-",
            _share_of_head(feature), f"{feature.num_distinct:,}" if feature.num_distinct else "-",
        ])  # fmt: skip
    if found := run.importance:
        rows += [[name, _importance(run, name), *"-" * (len(FEATURE_HEADINGS) - 2)] for name in dataset.dense_features]
        rows.sort(key=lambda row: -found.get(row[0], (math.inf, 0.0))[0])
    return rows


def _importance(run: Run, feature: str) -> str:
    value = run.importance.get(feature)
    return "-" if value is None else f"{value[0]:z.4f} ± {2 * value[1]:z.4f}"


def _share_of_head(feature: SparseFeature) -> str:
    """Return the share of lookups that the most frequent 1 % of ids have."""
    wanted, curve = max(1, feature.cardinality // 100), feature.frequency_curve
    below = [share for rank, share in zip(curve.ranks, curve.shares, strict=True) if rank <= wanted]
    return f"{below[-1]:.1%}" if below else "-"


def _finite(value: float, form: str) -> str:
    return fixed(value if math.isfinite(value) else None, form)


def slice_rows(dataset: Dataset | None, stats: EvaluationStats | None, run: Run) -> list[list[str]]:
    worst = worst_slices(stats.slices) if stats else []
    folder = str(run.config["data"]["path"])
    values = {
        name: value_names(folder, dataset, name, [each.id for each in worst if each.feature == name])
        for name in {each.feature for each in worst}
    }
    return [
        [
            each.feature, values[each.feature].get(each.id, "unknown or rare" if each.id == 0 else f"id {each.id}"),
            f"{each.rows:,}", f"{each.label_rate:.4f}", f"{each.mean_prediction:.4f}",
            _finite(each.calibration, ".3f"), _finite(each.ne, ".4f"), f"{deviations(each):+z.1f}",
        ]
        for each in worst
    ]  # fmt: skip


def worst_slices(slices: Sequence[Slice]) -> list[Slice]:
    """Return slices whose miscalibration is more than chance, the most certain slices first."""
    known = [each for each in slices if each.rows >= MIN_SLICE_ROWS]
    return sorted(known, key=lambda each: -abs(deviations(each)))[:MAX_SLICES]


def deviations(each: Slice) -> float:
    """Return the mean prediction minus the label rate, in standard deviations of a mean of
    independent rows.
    """
    rate = min(max(each.mean_prediction, 1e-9), 1 - 1e-9)
    return (each.mean_prediction - each.label_rate) / math.sqrt(rate * (1 - rate) / each.effective_rows)


def value_names(folder: str, dataset: Dataset | None, feature: str, ids: Iterable[int]) -> dict[int, str]:
    """Return id -> raw value of these ids; empty if the vocabulary is missing or damaged."""
    import pyarrow.parquet as pq

    if dataset is None or feature not in dataset.sparse_feature_names:
        return {}
    described = dataset.sparse_feature(feature)
    if described.vocabulary is None or not storage.is_file(storage.join(folder, described.vocabulary)):
        return {}
    try:
        path = find_vocabulary(folder, described)
    except DataError as error:
        logger.warning("%s: ids are shown in the place of values", error)
        return {}
    found = pq.read_table(path, columns=["id", "value"], filters=[("id", "in", sorted(set(ids)))])
    return dict(zip(found["id"].to_pylist(), map(str, found["value"].to_pylist()), strict=True))
