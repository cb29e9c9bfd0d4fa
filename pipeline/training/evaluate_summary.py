"""Summarize an evaluation for the run folder and for the terminal (without torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.registry import from_extra, if_installed
from pipeline.runtime.logs import to_json
from pipeline.runtime.storage import storage
from pipeline.training.result_warnings import undefined
from pipeline.training.summary import describe_quality, describe_run

REPORT = "report.html"
IMPORTANCE = "importance.json"
MAX_FEATURES = 10  # printed on the terminal
CLICK_METRICS = ("ne", "logloss", "auc", "gauc", "auprc", "calibration", "label_rate")  # in this order on the terminal


@dataclass
class EvaluateSummary:
    run: str
    split: str
    step: int
    checkpoint: str
    metrics: dict[str, float] = field(default_factory=dict)
    bayes_auc: float | None = None
    path: str = ""
    throughput: dict[str, float] = field(default_factory=dict)  # of the training, if it is known
    tables: str = ""  # which tables were evaluated, if hosts trained separate tables
    report: str = ""  # path of the run's page, if there is one
    # of features, if the job sets importance_rows
    importance: dict[str, Any] = field(default_factory=dict)
    # the metric that chose this step as the best of the run; empty if the step was not chosen so
    best_by: str = ""


def file_name(job: EvaluateJob, step: int, other_data: str) -> str:
    """Name the file so that an evaluation of a part of a split, or of other data, does not overwrite another."""
    part = f".first_{job.max_batches}_batches" if job.max_batches is not None else ""
    data = f".data_{other_data[:8]}" if other_data else ""
    tables = ".own_tables" if job.tables == "own" else ""
    return f"evaluation.{job.split}.step_{step}{part}{data}{tables}.json"


def write_summary(summary: EvaluateSummary, stats: object | None) -> None:
    """Write the metrics as JSON, and the statistics of the evaluation to a file next to it."""
    if stats is not None:
        from_extra("write_stats", "evaluation")(summary.path, stats)
    tables = {"tables": summary.tables} if summary.tables else {}
    why = {"undefined": reason} if (reason := undefined(summary.metrics)) else {}
    written = {"split": summary.split, "step": summary.step, **tables, **summary.metrics, **why}
    storage.publish_text(summary.path, to_json(written, indent=1))
    if summary.importance:
        storage.publish_text(storage.join(summary.run, IMPORTANCE), to_json(summary.importance, indent=1))
    try_report = if_installed("try_report")
    if try_report and storage.exists(storage.join(summary.run, REPORT)):
        summary.report = try_report(summary.run)


def describe(summary: EvaluateSummary) -> str:
    best = f" (best by {summary.best_by})" if summary.best_by else ""
    lines = [f"{summary.split} split at step {summary.step}{best} of {summary.run}"]
    width = max(12, *(len(name) + 2 for name in summary.metrics))
    first = [name for name in CLICK_METRICS if name in summary.metrics]
    for name in [*first, *(name for name in summary.metrics if name not in first)]:
        value = summary.metrics[name]
        lines.append(f"  {name:<{width}}" + (f"{value:,}" if isinstance(value, int) else f"{value:.6g}"))
    if summary.importance:
        features = summary.importance["features"]
        best_first = sorted(features, key=lambda name: -features[name]["ne_increase"])[:MAX_FEATURES]
        lines.append(
            "importance  NE rises by " + ", ".join(f"{features[name]['ne_increase']:.4f} {name}" for name in best_first)
        )
    if summary.tables:
        lines.append(f"tables      {summary.tables}")
    lines.append(f"quality     {describe_quality(summary.metrics, summary.bayes_auc)}")
    lines += describe_run(summary.run, summary.checkpoint, summary.throughput)
    lines += [f"report      {summary.report}"] if summary.report else []
    lines.append(f"written to  {summary.path}")
    return "\n".join(lines)
