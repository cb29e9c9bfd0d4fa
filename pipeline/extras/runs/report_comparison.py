"""Show several runs next to each other as one HTML page."""

from __future__ import annotations

from dataclasses import replace

from pipeline.extras.pages.charts import Line, line_chart, style
from pipeline.extras.runs.compare import Comparison, labels_of
from pipeline.extras.runs.folder import Run
from pipeline.extras.runs.report import curve
from pipeline.runtime.pages.html import render

CURVES = (
    ("validation", "Validation NE", "ne"),
    ("validation", "Validation AUC", "auc"),
    ("validation", "Validation MSE", "mse"),
    ("train", "Training NE", "ne"),
)
SPEED = ("train", "Samples a second", "samples_per_s")


def render_comparison(comparison: Comparison) -> str:
    """Render the page. Each variant has a colour and a dash; the curves of its runs are drawn over
    each other.
    """
    variants = comparison.variants
    letters = [each.letter for each in variants]
    styles = {letter: style(index) for index, letter in enumerate(letters)}
    charts = []
    labels = labels_of([run for each in variants for run in each.runs])
    of_labels = [(label, *each) for label in labels for each in CURVES]
    for label, kind, title, metric in [*of_labels, ("", *SPEED)]:
        title = f"{label}: {title}" if label and len(labels) > 1 else title
        lines = [
            by_samples(run, replace(curve(run, kind, metric, colour, label, marks=kind == "validation"), dash=dash))
            for each in variants
            for colour, dash in [styles[each.letter]]
            for run in each.runs
        ]
        charts.append((title, line_chart(f"{title} over samples", metric, lines, "samples")))
    return render(
        "extras/runs/comparison.html",
        f"{len(variants)} variants, {sum(len(each.runs) for each in variants)} runs",
        comparison=comparison,
        letters=letters,
        legend=[(styles[letter][0], letter, styles[letter][1]) for letter in letters],
        ranking=[
            [str(place), f"{each.letter}  {each.paths}", value, difference]
            for place, (each, value, difference) in enumerate(comparison.ranking, 1)
        ],
        shared=[[key, *values] for key, values in comparison.shared_config().items()],
        facts=[[key, *values] for key, values in comparison.differing_facts().items()],
        charts=[(title, chart) for title, chart in charts if chart],
    )


def by_samples(run: Run, line: Line) -> Line:
    """Return the line over samples, because a step of each run may have another number of samples."""
    return replace(line, points=[(step * run.samples_a_step, value) for step, value in line.points])
