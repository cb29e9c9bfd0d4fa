"""Show several runs side by side as one HTML page."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from pipeline.runtime.pages.charts import line_chart
from pipeline.runtime.pages.html import document, figure, legend, table
from pipeline.training.runs.compare import Comparison, describe
from pipeline.training.runs.report_curves import COLOURS, curve


def metric_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def render_comparison(comparison: Comparison) -> str:
    """Of several runs: each variant a colour, its runs' curves over each other."""
    variants = comparison.variants
    colours = {variant.letter: COLOURS[index % len(COLOURS)] for index, variant in enumerate(variants)}
    body = [f"<h1>{len(variants)} variants, {sum(len(each.runs) for each in variants)} runs</h1>"]
    body.append(legend((colours[each.letter], each.label) for each in variants))
    letters = [each.letter for each in variants]
    if comparison.config:
        rows = [[key, *values] for key, values in comparison.config.items()]
        body += ["<h2>What was configured otherwise</h2>", table(("key", *letters), rows, label="config")]
    body.append(f"<h2>The {escape(comparison.split)} split</h2>")
    body.append(table(("metric", *letters, f"against {letters[0]}"), [
        [row.name, *(metric_text(None if math.isnan(mean) else mean) for mean in row.means),
         "; ".join(describe(row.name, letter, found) for letter, found in zip(letters, row.differences, strict=True) if found)]
        for row in comparison.metrics
    ], range(1, len(letters) + 1), "metrics"))  # fmt: skip
    if comparison.notes:
        body.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in comparison.notes)}</ul>')
    drawn = []
    for kind, title, metric in (
        ("validation", "Validation NE", "ne"), ("validation", "Validation AUC", "auc"), ("train", "Training NE", "ne"),
        ("train", "Samples a second", "samples_per_s"),
    ):  # fmt: skip
        lines = [
            curve(run, kind, metric, colours[each.letter], marks=kind == "validation")
            for each in variants
            for run in each.runs
        ]
        if chart := line_chart(f"{title} over steps", metric, lines):
            drawn.append(figure(title, chart))
    body += ["<h2>Curves</h2>", f'<div class="charts">{"".join(drawn)}</div>'] if drawn else []
    others: list[Any] = [[key, *values] for key, values in comparison.others.items()]
    body += ["<h2>Also</h2>", table(("", *letters), others, label="cost, data set, code, plan")]
    return document("Comparison of runs", body)
