"""Sections of a run's page on its features, and on the values whose predictions are off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from pipeline.data.dataset import Dataset, SparseFeature
from pipeline.runtime.pages.charts import Bar, bar_chart
from pipeline.runtime.pages.html import figure, table
from pipeline.runtime.storage import storage
from pipeline.training.runs.details import EvaluationDetails, Slice
from pipeline.training.runs.folder import Run

MOST_SLICES = 12
MOST_BARS = 15
LEAST_SLICE_ROWS = 100


def features_section(dataset: Dataset | None, details: EvaluationDetails | None, run: Run) -> Iterator[str]:
    if dataset is None or not (dataset.sparse_features or dataset.dense_features):
        return
    found, (split, step, rows) = run.importance, run.importance_of
    yield "<h2>Features</h2>"
    if found:
        ranked = sorted(found, key=lambda name: -found[name][0])
        bars = [Bar(name, found[name][0], 2 * found[name][1]) for name in ranked[:MOST_BARS]]
        yield figure("Importance: by how much NE rises without it", bar_chart("importance of each feature", bars))
        yield (
            f'<p class="faint">Each feature\'s values were shuffled between rows: {rows:,} rows of the {escape(split)} split, step {step:,}. '
            "Lines are two standard errors. Of features that say the same each looks less important than it is alone.</p>"
        )
    else:
        yield f'<p class="faint">By how much NE rises without each: <code>python -m pipeline evaluate run={escape(run.path)} importance_rows=20000</code></p>'
    headings, cells = _feature_rows(dataset, details, run)
    yield (
        '<p class="faint">Ids, and the share of lookups that the top id and the top 1 % of them take, are of the training split; coverage, '
        "the share of rows whose id is known, and unknown are of the rows that were evaluated. Updated rows are those of the feature's table "
        "that training has changed, and their norm is the root mean square of their lengths.</p>"
    )
    yield table(headings, cells, range(1, len(headings)), "features")


def _feature_rows(
    dataset: Dataset, details: EvaluationDetails | None, run: Run
) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings, and a row a feature, the important ones first where that is known; dense ones have an importance alone."""
    unknown = {each.feature: each for each in details.slices if each.id == 0} if details else {}
    total = float(details.blocks.rows.sum()) if details else 0.0
    rows = []
    for feature in dataset.sparse_features:
        curve, none = feature.frequency_curve, unknown.get(feature.name)
        measured = details is not None and any(each.feature == feature.name for each in details.slices)
        share = (none.rows if none else 0) / total if measured and total else math.nan
        facts = run.table_of(feature.name)
        updated, size, norm = facts.get("updated"), facts.get("rows"), facts.get("norm")
        rows.append([
            feature.name, _importance(run, feature.name), f"{feature.cardinality:,}",
            f"{updated:,.0f} ({updated / size:.0%})" if updated is not None and size else "-", f"{norm:.3g}" if norm is not None else "-",
            "-" if math.isnan(share) else f"{1 - share:.2%}", "-" if math.isnan(share) else f"{share:.2%}",
            f"{none.calibration:.3f}" if none and none.rows >= LEAST_SLICE_ROWS and none.labels else "-",
            f"{feature.mean_pooling_factor:.3g}", f"{curve.shares[0]:.1%}" if curve.shares else "-",
            _share_of_head(feature), f"{feature.num_distinct:,}" if feature.num_distinct else "-",
        ])  # fmt: skip
    headings = (
        "feature", "importance", "ids", "updated rows", "norm", "coverage", "unknown", "its calibration", "ids a row", "top id", "top 1 %",
        "distinct values",
    )  # fmt: skip
    if found := run.importance:
        rows += [[name, _importance(run, name), *"-" * (len(headings) - 2)] for name in dataset.dense_features]
        rows.sort(key=lambda row: -found.get(row[0], (math.inf, 0.0))[0])
    return headings, rows


def _importance(run: Run, feature: str) -> str:
    value = run.importance.get(feature)
    return "-" if value is None else f"{value[0]:z.4f} ± {2 * value[1]:z.4f}"


def _share_of_head(feature: SparseFeature) -> str:
    """The share of lookups that the most frequent 1 % of ids take."""
    wanted, curve = max(1, feature.cardinality // 100), feature.frequency_curve
    below = [share for rank, share in zip(curve.ranks, curve.shares, strict=True) if rank <= wanted]
    return f"{below[-1]:.1%}" if below else "-"


def _known(value: float, places: int) -> str:
    return f"{value:.{places}f}" if math.isfinite(value) else "-"


def slices_section(dataset: Dataset | None, details: EvaluationDetails | None, run: Run) -> Iterator[str]:
    worst = worst_slices(details.slices) if details else []
    if not worst:
        return
    values = {name: head_values(run, dataset, name) for name in {each.feature for each in worst}}
    rows = [
        [
            each.feature, values[each.feature].get(each.id, "unknown or rare" if each.id == 0 else f"id {each.id}"),
            f"{each.rows:,}", f"{each.labels / each.rows:.4f}", f"{each.predictions / each.rows:.4f}",
            _known(each.calibration, 3), _known(each.ne, 4), f"{doubt(each):+z.1f}",
        ]
        for each in worst
    ]  # fmt: skip
    yield "<h2>Worst slices</h2>"
    yield (
        "<p>Of each feature's most frequent values those whose predictions are furthest off, in standard deviations of the number "
        f"of positives: more than 3 are hardly chance. Slices of fewer than {LEAST_SLICE_ROWS} rows are left out.</p>"
    )
    headings = ("feature", "value", "rows", "label rate", "mean prediction", "calibration", "NE", "deviations")
    yield table(headings, rows, range(2, len(headings)), "worst slices")


def worst_slices(slices: Sequence[Slice]) -> list[Slice]:
    """Those that are miscalibrated beyond chance, the surest first."""
    known = [each for each in slices if each.rows >= LEAST_SLICE_ROWS]
    return sorted(known, key=lambda each: -abs(doubt(each)))[:MOST_SLICES]


def doubt(each: Slice) -> float:
    """Predicted less true positives, in standard deviations of a sum of as many coin tosses."""
    rate = min(max(each.predictions / each.rows, 1e-9), 1 - 1e-9)
    return (each.predictions - each.labels) / math.sqrt(each.rows * rate * (1 - rate))


def head_values(run: Run, dataset: Dataset | None, feature: str) -> dict[int, str]:
    """Id -> raw value of the most frequent ones; empty where the vocabulary is not there, or ids are hashes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if dataset is None or feature not in dataset.sparse_feature_names:
        return {}
    vocabulary = dataset.sparse_feature(feature).vocabulary
    path = storage.join(str(run.config["data"]["path"]), vocabulary) if vocabulary else ""
    if not path or not storage.is_file(path):
        return {}
    try:
        with storage.open_file(path, "rb") as file:
            batch = next(pq.ParquetFile(file).iter_batches(64, columns=["id", "value"]))
    except (pa.ArrowException, StopIteration):
        return {}
    return dict(zip(batch["id"].to_pylist(), map(str, batch["value"].to_pylist()), strict=True))
