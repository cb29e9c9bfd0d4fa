"""Render a run as one HTML page that opens from disk and prints: curves, calibration, features,
slices, plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape

import yaml

from pipeline.data.dataset import Dataset
from pipeline.extras.pages.charts import Line, line_chart, style
from pipeline.extras.price.cost import describe_cost
from pipeline.extras.runs.compare import choose_split
from pipeline.extras.runs.evaluation_stats import EvaluationStats, read_stats
from pipeline.extras.runs.folder import PLAN, Run
from pipeline.extras.runs.report_features import (
    FEATURE_HEADINGS,
    MIN_SLICE_ROWS,
    feature_rows,
    importance_charts,
    slice_rows,
)
from pipeline.extras.runs.slices import SUFFIX as SLICES
from pipeline.extras.runs.slices import read_slices
from pipeline.planner.explain import explain
from pipeline.planner.plan_record import PlanDescription, read_view
from pipeline.runtime.errors import PlanError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.pages.html import cards, document, figure, fixed, legend, render
from pipeline.runtime.storage import storage

FILE = "report.html"
MAX_EVALUATIONS = 40  # the last ones, shown on the page
TITLES = {
    "ne": "NE",
    "logloss": "Log loss, nats",
    "auc": "AUC",
    "calibration": "Calibration (1 is best)",
    "mse": "Mean squared error",
    "mae": "Mean absolute error",
    "r2": "R²",
}
MACHINE = (
    ("Samples a second", "samples_per_s"),
    ("Waiting for input, %", "input_stall_percent"),
    ("Waiting for collectives, %", "comms_percent"),
    ("Memory of the fullest rank, GiB", "peak_memory_gb"),
)
Charts = list[tuple[str, str]]  # caption and SVG
logger = get_logger("pipeline.report")


def write_report(run: Run, path: str | None = None) -> str:
    """Write the page into the run's folder, or to `path`. Return the path."""
    path = path or storage.join(run.path, FILE)
    storage.publish_text(path, render_report(run))
    return path


def try_report(path: str, has_ended: bool = False) -> str:
    """Write the page of the run in folder `path` and return its path. Return "" if that fails, so
    that training does not fail. has_ended: as in Run.
    """
    try:
        return write_report(Run(path, has_ended))
    except Exception as error:
        logger.warning(
            "no report (%s: %s); `python -m pipeline report run=%s` tries again", type(error).__name__, error, path
        )
        return ""


def render_report(run: Run) -> str:
    split = choose_split([run])
    step, metrics = run.metrics(split)
    found, dataset, plan = stats_of(run, split, step), run.dataset, _plan_of(run)
    of_labels = {label: stats for label in run.labels if found and (stats := found.of_label(label))}
    measured, stats = next(iter(of_labels.items()), ("", None))  # of the main label, if it is binary
    rates = _rates(run)
    several = len(run.labels) > 1
    has_features = dataset is not None and (dataset.sparse_features or dataset.dense_features)
    return render(
        "extras/runs/report.html",
        f"Run {run.name}",
        run=run,
        split=split,
        num_ranks=run.starts[-1].world_size if run.starts else run.config.get("world_size", 1),
        several=several,
        measured=measured,
        not_learnt=[each.name for each in dataset.all_labels if each.name not in run.labels and each.kind != "classes"] if dataset else [],
        cards=_cards(run, split, step, metrics),
        warnings=list(warnings_of(run, metrics, found)),
        quality=[(label, charts) for label in run.labels if (charts := _quality(run, label))],
        reliability=[
            (label if several else "", chart, bins)
            for label, each in of_labels.items() for chart, bins in [_reliability(each, split)] if bins
        ],
        rates=line_chart("learning rates over steps", "", rates, log=True),
        rate_names=[(line.colour, line.name, line.dash) for line in rates],
        machine=_machine(run),
        features=feature_rows(dataset, stats, run) if dataset is not None and has_features else [],
        FEATURE_HEADINGS=FEATURE_HEADINGS,
        importance=importance_charts(run),
        slices=[
            [*([label] if several else []), *row]
            for label, each in of_labels.items() for row in slice_rows(dataset, each, run)
        ],
        MIN_SLICE_ROWS=MIN_SLICE_ROWS,
        chosen_slices=read_slices(storage.join(run.path, f"evaluation.{split}.step_{step}{SLICES}")),
        evaluations=[(label, *_evaluations(run, label)) for label in run.labels] if run.evaluations else [],
        plan=plan,
        sharding_types=_sharding_types(plan) if plan else "",
        explained=explain(plan) if plan else "",
        dataset=dataset,
        data_path=str(run.config.get("data", {}).get("path", "?")),
        splits=_splits(dataset, run.labels[0]) if dataset else [],
        starts=[
            [each.time, f"{each.from_step:,}", each.host, str(each.world_size), each.commit or each.version]
            for each in run.starts
        ],
        commands="\n".join(dict.fromkeys(each.command for each in run.starts)) + "\n",
        config=yaml.safe_dump(run.config, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )  # fmt: skip


def render_tile(run: Run) -> str:
    """Return a small page for a notebook: the figures and the quality curves of the run's page."""
    split = choose_split([run])
    charts = [figure(title, chart) for label in run.labels for title, chart in _quality(run, label)]
    return document(
        f"Run {run.name}",
        [
            f"<p>{escape(run.name)}: {run.state} at step {run.step:,}</p>",
            cards(_cards(run, split, *run.metrics(split))),
            legend([("train", "training"), ("validation", "validation split")]),
            '<div class="charts">',
            *charts,
            "</div>",
        ],
    )


def metric_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def stats_of(run: Run, split: str, step: int) -> EvaluationStats | None:
    """Return the statistics; None if the evaluation stored no statistics, or their file cannot be read."""
    try:
        return read_stats(run.stats[split, step]) if (split, step) in run.stats else None
    except UserError:
        return None


def _plan_of(run: Run) -> PlanDescription | None:
    path = storage.join(run.path, PLAN)
    try:
        return read_view(path).description if storage.is_file(path) else None
    except PlanError:
        return None


def _cards(run: Run, split: str, step: int, metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return pairs of a large figure and its description."""
    cards = []
    best = " (the best)" if run.summary.get("best_step") == step else ""
    for label in run.labels:
        measured, whose = run.of_label(metrics, label), f"{label}: " if len(run.labels) > 1 else ""
        titles = [(title, name) for title, name in (("NE", "ne"), ("AUC", "auc")) if name in measured]
        titles = titles or [(TITLES.get(name, name), name) for name in list(measured)[:2]]
        of = f"on the {split} split, step {step:,}{best}"
        cards += [(f"{measured[name]:.4f}", f"{whose}{title} {of}") for title, name in titles]
        limit = run.dataset.best_auc(split, label) if run.dataset else None
        if limit and "auc" in measured:
            share = (measured["auc"] - 0.5) / (limit - 0.5)
            text = f"{whose}of the lift that the data allow: their best AUC is {limit:.4f}"
            cards.append((f"{100 * share:.1f} %", text))
    if speed := run.summary.get("throughput", {}).get("samples_per_s"):
        cards.append((f"{speed:,.0f}", "samples a second"))
    return [
        *cards,
        (
            _duration(run.seconds),
            f"of training; {describe_cost(run.cost) if run.cost else f'{run.rank_hours:.3g} rank-hours'}",
        ),
    ]


def warnings_of(run: Run, metrics: dict[str, float], stats: EvaluationStats | None) -> Iterator[str]:
    """Yield warnings about the run."""
    if run.state == "stopped":
        yield f"The run has not ended: it stopped at step {run.step:,}. Run the same command again to resume."
    if not metrics:
        yield "The run has not been evaluated."
    is_off = False
    for label in run.labels:
        calibration = run.of_label(metrics, label).get("calibration", 1.0)
        if math.isfinite(calibration) and not 0.95 <= calibration <= 1.05:
            side, is_off = "high" if calibration > 1 else "low", True
            whose = f"Predictions of {label}" if len(run.labels) > 1 else "Predictions"
            yield f"{whose} are {abs(calibration - 1):.0%} too {side} on average (calibration {calibration:.3f})."
    throughput = run.summary.get("throughput", {})
    if throughput.get("tier_stall_percent", 0.0) > 20:
        yield (
            f"Training waited for rows on the SSD {throughput['tier_stall_percent']:.0f} % of the time: raise "
            "tables.<name>.tiers.slots, or use a faster disk for sharding.tier_folder."
        )
    if (stall := throughput.get("input_stall_percent", 0.0)) > 20:
        yield f"Training waited for input {stall:.0f} % of the time: see data.reader.decode_threads."
    names = tuple(run.labels) if len(run.labels) > 1 else ()
    for each in run.summary.get("remarks", []):
        if not (is_off and "predictions are too" in each):
            yield f"{each if each.startswith(names) else each[:1].upper() + each[1:]}."
    if bad := run.summary.get("num_bad_rows"):
        yield f"{bad:,} bad rows were left out; the folder quarantine lists them."
    if run.starts and (commit := run.starts[-1].commit).endswith("-dirty"):
        yield f"The code had changes beyond commit {commit.removesuffix('-dirty')}: git cannot restore it."
    yield from _rising_loss(run)
    if stats is None and any(run.of_label(metrics, label).keys() & {"auc", "calibration"} for label in run.labels):
        yield "The evaluation has no statistics: evaluate the run again to see calibration by prediction and slices."


def _rising_loss(run: Run) -> Iterator[str]:
    for label in run.labels:
        found = {
            step: run.of_label(each, label) for (split, step), each in run.evaluations.items() if split == "validation"
        }
        measured = {step: each["ne"] for step, each in found.items() if "ne" in each}
        if len(measured) > 2:
            best, last = min(measured, key=lambda step: measured[step]), max(measured)
            if best < last and measured[best] < measured[last] - 0.0005:
                yield (
                    f"NE {f'of {label} ' if len(run.labels) > 1 else ''}on the validation split was best at step {best:,} "
                    f"({measured[best]:.4f}) and {measured[last]:.4f} at the end: set early_stop=auc to keep the best step."
                )


def curve(run: Run, kind: str, metric: str, colour: str, label: str = "", marks: bool = False) -> Line:
    """Return a metric as a curve over steps. label: whose metric it is, if it is a label's."""
    name = run.name_of(metric, label) if label else metric
    found = ((line["step"], line.get(name)) for line in run.lines if line["kind"] == kind)
    return Line(kind, colour, [(step, value) for step, value in found if value is not None], marks)


def _evaluations(run: Run, label: str) -> tuple[list[str], list[list[str]]]:
    """Return the names of the label's metrics, and a row for each evaluation."""
    rows = [(where, run.of_label(values, label)) for where, values in list(run.evaluations.items())[-MAX_EVALUATIONS:]]
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    return names, [
        [split, f"{step:,}", *(metric_text(values.get(name)) for name in names)] for (split, step), values in rows
    ]


def _reliability(stats: EvaluationStats, split: str) -> tuple[str, list[list[str]]]:
    """Return the chart, and its numbers as rows."""
    points = [(each.prediction, each.label_rate) for each in stats.reliability]
    lines = [Line(split, "validation", points, marks=True)]
    chart = line_chart("label rate over mean prediction", "label rate", lines, "mean prediction", diagonal=True)
    return chart, [
        [f"{each.rows:,}", fixed(each.prediction), fixed(each.label_rate),
         fixed(each.prediction / each.label_rate, ".3f") if each.label_rate else "-"]
        for each in stats.reliability
    ]  # fmt: skip


def _quality(run: Run, label: str) -> Charts:
    charts = []
    for metric, title in TITLES.items():
        lines = [
            curve(run, "train", metric, "train", label),
            curve(run, "validation", metric, "validation", label, marks=True),
        ]
        charts.append((title, line_chart(f"{title} over steps", metric, lines)))
    return [(title, chart) for title, chart in charts if chart]


def _rates(run: Run) -> list[Line]:
    keys = sorted({key for line in run.lines if line["kind"] == "train" for key in line if key.startswith("lr_")})
    return [
        Line(key.removeprefix("lr_"), colour, curve(run, "train", key, "").points, dash=dash)
        for key, (colour, dash) in zip(keys, map(style, range(len(keys))), strict=True)
    ]


def _machine(run: Run) -> Charts:
    charts = [
        (title, line_chart(f"{title} over steps", "", [curve(run, "train", metric, "train")]))
        for title, metric in MACHINE
    ]
    return [(title, chart) for title, chart in charts if chart]


def _sharding_types(plan: PlanDescription) -> str:
    kinds: dict[str, int] = {}
    for choice in plan.tables:
        kinds[choice.sharding_type] = kinds.get(choice.sharding_type, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _splits(dataset: Dataset, label: str) -> list[list[str]]:
    """Return the rows of each split. The label rate is of the data set's main label."""
    return [
        [name, f"{split.num_rows:,}", fixed(split.label_rate) if split.num_rows else "-",
         fixed(dataset.best_auc(name, label))]
        for name in ("train", "validation", "test") if (split := dataset.splits.get(name))
    ]  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
