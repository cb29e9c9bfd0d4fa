"""Show a run, or several side by side, as one HTML page that opens from disk and prints: curves, calibration, features, slices, plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import yaml

from pipeline.data.dataset import Dataset, SparseFeature, load_dataset
from pipeline.planner.explain import explain
from pipeline.planner.plan_file import read_view
from pipeline.runtime.errors import DataError, PlanError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.pages.charts import Bar, Line, bar_chart, line_chart
from pipeline.runtime.pages.html import cards, document, figure, folded, legend, scrolled, table
from pipeline.runtime.storage import storage
from pipeline.training.runs.compare import Comparison, choose_split, describe
from pipeline.training.runs.details import EvaluationDetails, Slice, read_details
from pipeline.training.runs.folder import PLAN, Run

FILE = "report.html"
logger = get_logger("pipeline.report")
MOST_SLICES = 12
MOST_BARS = 15
LEAST_SLICE_ROWS = 100
COLOURS = tuple(f"run_{number}" for number in range(1, 7))
SPLIT_COLOURS = {"train": "training, over the last log window", "validation": "validation split"}
# Title, metric, unit; lines of training and of the validation split.
QUALITY = (("NE", "ne"), ("Log loss, nats", "logloss"), ("AUC", "auc"), ("Calibration (1 is best)", "calibration"))
MACHINE = (
    ("Samples a second", "samples_per_s"), ("Waiting for input, %", "input_stall_percent"),
    ("Waiting for collectives, %", "comms_percent"), ("Memory of the fullest rank, GiB", "peak_memory_gb"),
)  # fmt: skip


def write_report(run: Run, path: str | None = None) -> str:
    """Of one run, into its folder unless `path` says otherwise; where it was written to."""
    path = path or storage.join(run.path, FILE)
    storage.publish_text(path, render_report(run))
    return path


def try_report(path: str) -> str:
    """Write the page of the run in folder `path` after a training or an evaluation, which must not fail by it; empty for none."""
    try:
        return write_report(Run(path))
    except Exception as error:
        logger.warning(
            "no report (%s: %s); `python -m pipeline.report run=%s` tries again", type(error).__name__, error, path
        )
        return ""


def render_report(run: Run) -> str:
    split = choose_split([run])
    step, metrics = run.metrics(split)
    details = details_of(run, split, step)
    dataset = dataset_of(run)
    sections = (
        _heading(run, split, step, metrics),
        _warnings(run, metrics, details),
        _quality(run),
        _calibration(details, split),
        _machine(run),
        _features(dataset, details, run),
        _slices(dataset, details, run),
        _evaluations(run),
        _plan(run),
        _data(dataset, run),
        _starts(run),
        _config(run),
    )
    return document(f"Run {run.name}", [part for section in sections for part in section])


def details_of(run: Run, split: str, step: int) -> EvaluationDetails | None:
    """None where the evaluation kept nothing, or what it kept cannot be read."""
    try:
        return read_details(run.details[split, step]) if (split, step) in run.details else None
    except UserError:
        return None


def dataset_of(run: Run) -> Dataset | None:
    """What the run was trained on, where that is still there."""
    try:
        return load_dataset(str(run.config.get("data", {}).get("path", "")))
    except DataError:
        return None


def _heading(run: Run, split: str, step: int, metrics: dict[str, float]) -> Iterator[str]:
    model, world_size = run.config.get("model", {}).get("kind", "?"), run.config.get("world_size", 1)
    ranks = run.starts[-1].world_size if run.starts else world_size
    yield f"<h1>{escape(run.name)}</h1>"
    tags = f" Tagged {escape(', '.join(run.tags))}." if run.tags else ""
    note = f" {escape(run.note)}" if run.note else ""
    yield f"<p>{escape(str(model))} on {ranks} rank(s), {run.state} at step {run.step:,}, seed {run.seed}.{tags}{note}</p>"
    best = " (the best)" if run.summary.get("best_step") == step else ""
    of = f"on the {split} split, step {step:,}{best}"
    entries = [
        (f"{metrics[name]:.4f}", f"{title} {of}") for title, name in (("NE", "ne"), ("AUC", "auc")) if name in metrics
    ]
    if (limit := run.summary.get("bayes_auc")) and "auc" in metrics:
        share = (metrics["auc"] - 0.5) / (limit - 0.5)
        entries.append((f"{100 * share:.1f} %", f"of the lift that the data allow: their best AUC is {limit:.4f}"))
    if not entries:
        entries = [(f"{value:.4f}", f"{name} {of}") for name, value in list(metrics.items())[:2]]
    speed = run.summary.get("throughput", {}).get("samples_per_s")
    entries += [(f"{speed:,.0f}", "samples a second")] if speed else []
    entries.append((_duration(run.seconds), f"of training; {run.rank_hours:.3g} rank-hours"))
    yield cards(entries)


def _warnings(run: Run, metrics: dict[str, float], details: EvaluationDetails | None) -> Iterator[str]:
    found = list(warnings_of(run, metrics, details))
    if found:
        yield f'<ul class="notes" aria-label="warnings">{"".join(f"<li>{escape(text)}</li>" for text in found)}</ul>'


def warnings_of(run: Run, metrics: dict[str, float], details: EvaluationDetails | None) -> Iterator[str]:
    """What a colleague would point at."""
    if run.state == "stopped":
        yield f"The run has not ended: it stopped at step {run.step:,}. The same command goes on."
    if not metrics:
        yield "The run has not been evaluated."
    calibration = metrics.get("calibration", 1.0)
    if is_off := math.isfinite(calibration) and not 0.95 <= calibration <= 1.05:
        yield f"Predictions are {abs(calibration - 1):.0%} too {'high' if calibration > 1 else 'low'} on average (calibration {calibration:.3f})."
    throughput = run.summary.get("throughput", {})
    if throughput.get("tier_stall_percent", 0.0) > 20:
        yield (
            f"Training waited for rows on the SSD {throughput['tier_stall_percent']:.0f} % of the time: raise "
            "tables.<name>.tiers.slots, or use a faster disk for sharding.tier_folder."
        )
    if throughput.get("input_stall_percent", 0.0) > 20:
        yield f"Training waited for input {throughput['input_stall_percent']:.0f} % of the time: see data.reader.decode_threads."
    yield from (each for each in run.summary.get("remarks", []) if not (is_off and each.startswith("calibration")))
    if bad := run.summary.get("num_bad_rows"):
        yield f"{bad:,} bad rows were left out; the folder quarantine lists them."
    if run.starts and run.starts[-1].commit.endswith("-dirty"):
        yield f"The code had changes beyond commit {run.starts[-1].commit.removesuffix('-dirty')}: it cannot be had back from git."
    measured = [
        (step, each["ne"]) for (split, step), each in run.evaluations.items() if split == "validation" and "ne" in each
    ]
    if len(measured) > 2 and min(measured, key=lambda pair: pair[1])[0] < max(measured)[0]:
        step, ne = min(measured, key=lambda pair: pair[1])
        if ne < max(measured)[1] - 0.0005:
            yield f"NE on the validation split was best at step {step:,} ({ne:.4f}) and {max(measured)[1]:.4f} at the end: early_stop=auc keeps the best."
    if details is None and metrics:
        yield "The evaluation kept no details: evaluate the run again for calibration by prediction and for slices."


def _quality(run: Run) -> Iterator[str]:
    charts = []
    for title, metric in QUALITY:
        lines = [_curve(run, "train", metric, "train"), _curve(run, "validation", metric, "validation", marks=True)]
        charts.append((title, line_chart(f"{title} over steps", metric, lines)))
    drawn = [figure(title, chart) for title, chart in charts if chart]
    if drawn:
        yield "<h2>Quality</h2>"
        yield legend(SPLIT_COLOURS.items())
        yield f'<div class="charts">{"".join(drawn)}</div>'


def _curve(run: Run, kind: str, metric: str, colour: str, marks: bool = False) -> Line:
    """Of several labels the main one's."""
    found = ((line["step"], _value(line, metric)) for line in run.lines if line["kind"] == kind)
    return Line(kind, colour, [(step, value) for step, value in found if value is not None], marks)


def _value(line: dict[str, Any], metric: str) -> float | None:
    return line.get(metric, next((line[name] for name in line if name.endswith(f"/{metric}")), None))


def _calibration(details: EvaluationDetails | None, split: str) -> Iterator[str]:
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


def _machine(run: Run) -> Iterator[str]:
    rates = sorted({key for line in run.lines if line["kind"] == "train" for key in line if key.startswith("lr_")})
    lines = [
        Line(rate.removeprefix("lr_"), COLOURS[index % len(COLOURS)], _curve(run, "train", rate, "").points)
        for index, rate in enumerate(rates[: len(COLOURS)])
    ]
    drawn = [
        figure(title, chart)
        for title, metric in MACHINE
        if (chart := line_chart(f"{title} over steps", "", [_curve(run, "train", metric, "train")]))
    ]
    if chart := line_chart("learning rates over steps", "", lines, log=True):
        names = legend((line.colour, line.name) for line in lines)
        drawn.insert(0, figure("Learning rates", chart + names))
    if drawn:
        yield f'<h2>Rates, speed and memory</h2><div class="charts">{"".join(drawn)}</div>'


def _features(dataset: Dataset | None, details: EvaluationDetails | None, run: Run) -> Iterator[str]:
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
        yield f'<p class="faint">By how much NE rises without each: <code>python -m pipeline.evaluate run={escape(run.path)} importance_rows=20000</code></p>'
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
    return "-" if value is None else f"{value[0]:.4f} ± {2 * value[1]:.4f}"


def _share_of_head(feature: SparseFeature) -> str:
    """The share of lookups that the most frequent 1 % of ids take."""
    wanted, curve = max(1, feature.cardinality // 100), feature.frequency_curve
    below = [share for rank, share in zip(curve.ranks, curve.shares, strict=True) if rank <= wanted]
    return f"{below[-1]:.1%}" if below else "-"


def _slices(dataset: Dataset | None, details: EvaluationDetails | None, run: Run) -> Iterator[str]:
    worst = worst_slices(details.slices) if details else []
    if not worst:
        return
    values = {name: head_values(run, dataset, name) for name in {each.feature for each in worst}}
    rows = [
        [
            each.feature, values[each.feature].get(each.id, "unknown or rare" if each.id == 0 else f"id {each.id}"),
            f"{each.rows:,}", f"{each.labels / each.rows:.4f}", f"{each.predictions / each.rows:.4f}",
            f"{each.calibration:.3f}", f"{each.ne:.4f}", f"{doubt(each):+.1f}",
        ]
        for each in worst
    ]  # fmt: skip
    yield "<h2>Worst slices</h2>"
    yield (
        "<p>Of each feature's most frequent values those whose predictions are off by more than chance: by so many standard "
        f"deviations of the number of positives. Slices of fewer than {LEAST_SLICE_ROWS} rows are left out.</p>"
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


def _evaluations(run: Run) -> Iterator[str]:
    if not run.evaluations:
        return
    names = list(dict.fromkeys(name for metrics in run.evaluations.values() for name in metrics))
    shown = list(run.evaluations.items())[-40:]
    rows = [[split, f"{step:,}", *(_shown(metrics.get(name)) for name in names)] for (split, step), metrics in shown]
    yield "<h2>Evaluations</h2>"
    yield table(("split", "step", *names), rows, range(1, len(names) + 2), "evaluations")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _plan(run: Run) -> Iterator[str]:
    path = storage.join(run.path, PLAN)
    try:
        plan = read_view(path).description if storage.is_file(path) else None
    except PlanError:
        plan = None
    if plan is None:
        return
    kinds: dict[str, int] = {}
    for choice in plan.tables:
        kinds[choice.sharding_type] = kinds.get(choice.sharding_type, 0) + 1
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield "<h2>Sharding plan</h2>"
    yield f"<p>{len(plan.tables)} tables on {len(plan.ranks)} rank(s) of {escape(plan.hardware)}: {said}. Found by {escape(plan.planner)}.</p>"
    yield folded("Every table, its place and why", scrolled(explain(plan), "plan"))


def _data(dataset: Dataset | None, run: Run) -> Iterator[str]:
    yield "<h2>Data set</h2>"
    path = str(run.config.get("data", {}).get("path", "?"))
    if dataset is None:
        yield f"<p>{escape(path)} is not there any more, or cannot be read from here.</p>"
        return
    yield (
        f"<p>{escape(dataset.name)} at {escape(path)}: {len(dataset.sparse_features)} categorical and {len(dataset.dense_features)} dense "
        f"features, {dataset.accepted_rows:,} of {dataset.source_rows:,} rows. Fingerprint {dataset.fingerprint()[:12]}.</p>"
    )
    rows = [
        [name, f"{split.num_rows:,}", f"{split.num_positives / split.num_rows:.4f}" if split.num_rows else "-",
         f"{dataset.bayes_auc[name]:.4f}" if name in dataset.bayes_auc else "-"]
        for name in ("train", "validation", "test") if (split := dataset.splits.get(name))
    ]  # fmt: skip
    yield table(("split", "rows", "label rate", "best possible AUC"), rows, (1, 2, 3), "splits")


def _starts(run: Run) -> Iterator[str]:
    if not run.starts:
        return
    rows = [
        [
            start.time,
            f"{start.from_step:,}",
            start.host,
            str(start.world_size),
            start.commit or start.version,
            start.command,
        ]
        for start in run.starts
    ]
    yield "<h2>Starts</h2>"
    yield table(("time, UTC", "from step", "host", "ranks", "code", "command"), rows, (1, 3), "starts")


def _config(run: Run) -> Iterator[str]:
    text = yaml.safe_dump(run.config, sort_keys=False, default_flow_style=None, width=100)
    yield f"<h2>Config</h2>{folded('config.yaml, nothing left out', scrolled(text, 'config'))}"
    yield f'<p class="faint">Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {escape(run.path)}.</p>'


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
        [row.name, *(_shown(None if math.isnan(mean) else mean) for mean in row.means),
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
            _curve(run, kind, metric, colours[each.letter], marks=kind == "validation")
            for each in variants
            for run in each.runs
        ]
        if chart := line_chart(f"{title} over steps", metric, lines):
            drawn.append(figure(title, chart))
    body += ["<h2>Curves</h2>", f'<div class="charts">{"".join(drawn)}</div>'] if drawn else []
    others: list[Any] = [[key, *values] for key, values in comparison.others.items()]
    body += ["<h2>Also</h2>", table(("", *letters), others, label="cost, data set, code, plan")]
    return document("Comparison of runs", body)
