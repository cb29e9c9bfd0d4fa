"""Sections of a run's page with curves: quality, reliability, rates, speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.runtime.pages.charts import Line, line_chart
from pipeline.runtime.pages.html import figure, folded, legend, table
from pipeline.training.runs.details import EvaluationDetails
from pipeline.training.runs.folder import Run

COLOURS = tuple(f"run_{number}" for number in range(1, 7))
SPLIT_COLOURS = {"train": "training, over the last log window", "validation": "validation split"}
# Title, metric, unit; lines of training and of the validation split.
QUALITY = (("NE", "ne"), ("Log loss, nats", "logloss"), ("AUC", "auc"), ("Calibration (1 is best)", "calibration"))
MACHINE = (
    ("Samples a second", "samples_per_s"), ("Waiting for input, %", "input_stall_percent"),
    ("Waiting for collectives, %", "comms_percent"), ("Memory of the fullest rank, GiB", "peak_memory_gb"),
)  # fmt: skip


def quality(run: Run) -> Iterator[str]:
    charts = []
    for title, metric in QUALITY:
        lines = [curve(run, "train", metric, "train"), curve(run, "validation", metric, "validation", marks=True)]
        charts.append((title, line_chart(f"{title} over steps", metric, lines)))
    drawn = [figure(title, chart) for title, chart in charts if chart]
    if drawn:
        yield "<h2>Quality</h2>"
        yield legend(SPLIT_COLOURS.items())
        yield f'<div class="charts">{"".join(drawn)}</div>'


def curve(run: Run, kind: str, metric: str, colour: str, marks: bool = False) -> Line:
    """Of several labels the main one's."""
    found = ((line["step"], _value(line, metric)) for line in run.lines if line["kind"] == kind)
    return Line(kind, colour, [(step, value) for step, value in found if value is not None], marks)


def _value(line: dict[str, Any], metric: str) -> float | None:
    return line.get(metric, next((line[name] for name in line if name.endswith(f"/{metric}")), None))


def reliability(details: EvaluationDetails | None, split: str) -> Iterator[str]:
    if details is None or not details.reliability:
        return
    points = [(each.prediction, each.label_rate) for each in details.reliability]
    chart = line_chart(
        "label rate over mean prediction", "label rate", [Line(split, "validation", points, marks=True)], "mean prediction",
        diagonal=True,
    )  # fmt: skip
    rows = [
        [
            f"{each.rows:,}",
            f"{each.prediction:.4f}",
            f"{each.label_rate:.4f}",
            f"{each.prediction / each.label_rate:.3f}" if each.label_rate else "-",
        ]
        for each in details.reliability
    ]
    yield "<h2>Reliability</h2>"
    yield (
        f"<p>The {split} split in {len(points)} parts with equally many rows, by prediction. On the dashed line predictions are "
        "what comes true; below it they are too high.</p>"
    )
    numbers = table(("rows", "mean prediction", "label rate", "calibration"), rows, range(4), "reliability")
    yield f'<div class="charts">{figure("Label rate by prediction", chart)}{folded("Its numbers", numbers)}</div>'


def rates_and_speed(run: Run) -> Iterator[str]:
    rates = sorted({key for line in run.lines if line["kind"] == "train" for key in line if key.startswith("lr_")})
    lines = [
        Line(rate.removeprefix("lr_"), COLOURS[index % len(COLOURS)], curve(run, "train", rate, "").points)
        for index, rate in enumerate(rates[: len(COLOURS)])
    ]
    drawn = [
        figure(title, chart)
        for title, metric in MACHINE
        if (chart := line_chart(f"{title} over steps", "", [curve(run, "train", metric, "train")]))
    ]
    if chart := line_chart("learning rates over steps", "", lines, log=True):
        names = legend((line.colour, line.name) for line in lines)
        drawn.insert(0, figure("Learning rates", chart + names))
    if drawn:
        yield f'<h2>Rates, speed and memory</h2><div class="charts">{"".join(drawn)}</div>'
