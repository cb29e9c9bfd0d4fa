"""Show several runs next to each other as one HTML page."""

from __future__ import annotations

import math

from pipeline.extras.pages.charts import line_chart
from pipeline.extras.runs.compare import Comparison, MetricRow, describe, labels_of
from pipeline.extras.runs.report import COLOURS, curve, metric_text
from pipeline.runtime.pages.html import render

CURVES = (
    ("validation", "Validation NE", "ne"),
    ("validation", "Validation AUC", "auc"),
    ("validation", "Validation MSE", "mse"),
    ("train", "Training NE", "ne"),
)
SPEED = ("train", "Samples a second", "samples_per_s")


def render_comparison(comparison: Comparison) -> str:
    """Render the page. Each variant has a colour; the curves of its runs are drawn over
    each other.
    """
    variants = comparison.variants
    letters = [each.letter for each in variants]
    colours = {letter: COLOURS[index % len(COLOURS)] for index, letter in enumerate(letters)}
    charts = []
    labels = labels_of([run for each in variants for run in each.runs])
    of_labels = [(label, *each) for label in labels for each in CURVES]
    for label, kind, title, metric in [*of_labels, ("", *SPEED)]:
        title = f"{label}: {title}" if label and len(labels) > 1 else title
        lines = [
            curve(run, kind, metric, colours[each.letter], label, marks=kind == "validation")
            for each in variants
            for run in each.runs
        ]
        charts.append((title, line_chart(f"{title} over steps", metric, lines)))
    return render(
        "extras/runs/comparison.html",
        "Comparison of runs",
        heading=f"{len(variants)} variants, {sum(len(each.runs) for each in variants)} runs",
        variants=[(colours[each.letter], each.label) for each in variants],
        letters=letters,
        config=[[key, *values] for key, values in comparison.config.items()],
        split=comparison.split,
        metrics=[_metric_row(row, letters) for row in comparison.metrics],
        notes=comparison.notes,
        charts=[(title, chart) for title, chart in charts if chart],
        others=[[key, *values] for key, values in comparison.others.items()],
    )


def _metric_row(row: MetricRow, letters: list[str]) -> list[str]:
    found = zip(letters, row.differences, strict=True)
    described = "; ".join(describe(row.name, letter, difference) for letter, difference in found if difference)
    return [row.name, *(metric_text(None if math.isnan(mean) else mean) for mean in row.means), described]
