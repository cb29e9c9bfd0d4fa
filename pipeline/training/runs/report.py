"""Show a run as one HTML page that opens from disk and prints: curves, calibration, features, slices, plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape

import yaml

from pipeline.data.dataset import Dataset, load_dataset
from pipeline.planner.explain import explain
from pipeline.planner.plan_file import read_view
from pipeline.runtime.errors import DataError, PlanError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.pages.html import cards, document, folded, scrolled, table
from pipeline.runtime.storage import storage
from pipeline.training.runs.compare import choose_split
from pipeline.training.runs.details import EvaluationDetails, read_details
from pipeline.training.runs.folder import PLAN, Run
from pipeline.training.runs.report_comparison import metric_text
from pipeline.training.runs.report_curves import quality, rates_and_speed, reliability
from pipeline.training.runs.report_features import features_section, slices_section

FILE = "report.html"
logger = get_logger("pipeline.report")


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
            "no report (%s: %s); `python -m pipeline report run=%s` tries again", type(error).__name__, error, path
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
        quality(run),
        reliability(details, split),
        rates_and_speed(run),
        features_section(dataset, details, run),
        slices_section(dataset, details, run),
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
    remarks = [each for each in run.summary.get("remarks", []) if not (is_off and each.startswith("calibration"))]
    yield from (f"{each[:1].upper()}{each[1:]}." for each in remarks)
    if bad := run.summary.get("num_bad_rows"):
        yield f"{bad:,} bad rows were left out; the folder quarantine lists them."
    if run.starts and run.starts[-1].commit.endswith("-dirty"):
        yield f"The code had changes beyond commit {run.starts[-1].commit.removesuffix('-dirty')}: git cannot restore it."
    measured = [
        (step, each["ne"]) for (split, step), each in run.evaluations.items() if split == "validation" and "ne" in each
    ]
    if len(measured) > 2 and min(measured, key=lambda pair: pair[1])[0] < max(measured)[0]:
        step, ne = min(measured, key=lambda pair: pair[1])
        if ne < max(measured)[1] - 0.0005:
            yield f"NE on the validation split was best at step {step:,} ({ne:.4f}) and {max(measured)[1]:.4f} at the end: early_stop=auc keeps the best."
    if details is None and metrics:
        yield "The evaluation kept no details: evaluate the run again for calibration by prediction and for slices."


def _evaluations(run: Run) -> Iterator[str]:
    if not run.evaluations:
        return
    names = list(dict.fromkeys(name for metrics in run.evaluations.values() for name in metrics))
    shown = list(run.evaluations.items())[-40:]
    rows = [
        [split, f"{step:,}", *(metric_text(metrics.get(name)) for name in names)] for (split, step), metrics in shown
    ]
    yield "<h2>Evaluations</h2>"
    yield table(("split", "step", *names), rows, range(1, len(names) + 2), "evaluations")


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
    text = yaml.safe_dump(run.config, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)
    yield f"<h2>Config</h2>{folded('config.yaml, nothing left out', scrolled(text, 'config'))}"
    yield f'<p class="faint">Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {escape(run.path)}.</p>'


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
