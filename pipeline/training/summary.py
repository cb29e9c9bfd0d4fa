"""Summarize a training or an evaluation for its run folder and for the terminal (without torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra, if_installed
from pipeline.data.targets import main_label
from pipeline.runtime.logs import to_json
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.training.run_state import best_step

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.data.dataset import Dataset
    from pipeline.training.evaluation import Collected
    from pipeline.training.trainer import FitResult


def undefined(metrics: Mapping[str, float]) -> str:
    """Say why NE and AUC are NaN, for each label; "" if they are defined. They need labels of both
    kinds."""
    reasons = []
    for name, rate in metrics.items():
        label, slash, measure = name.rpartition("/")
        if measure == "label_rate" and rate in (0.0, 1.0):
            whose, rows = f"{label}: " if label else "", metrics.get(f"{label}{slash}num_samples", 0)
            reasons.append(f"{whose}all {rows:,} labels are {rate:.0f}: NE and AUC need both kinds")
    return "; ".join(reasons)


def by_label(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return label -> its metrics by their plain names, the main label first. If the run has one
    label, the metrics' names have no label, and the result's only key is ""."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        label, slash, metric = name.rpartition("/")
        if slash:
            found.setdefault(label, {})[metric] = value
    return found or {"": dict(metrics)}


SUMMARY = "summary.json"


@dataclass
class TrainSummary:
    """The result of a finished run. `checkpoint` and `validation` belong to the best step if the
    run keeps it, otherwise to the last step."""

    run_dir: str
    checkpoint: str
    step: int
    stopped_early: bool = False
    # by best_metric, among the stored checkpoints; None if the run keeps no best step
    best_step: int | None = None
    best_metric: str = ""
    throughput: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    bayes_auc: float | None = None
    # warnings about results that are probably unintended
    remarks: list[str] = field(default_factory=list)
    num_bad_rows: int = 0  # quarantined in training, on all ranks; run_dir/quarantine lists them
    # of each compressed table: its parts, bytes and collisions
    compression: dict[str, Any] = field(default_factory=dict)
    report: str = ""  # path of the run's page, if one was written
    # the main label, and labels of the data set that the model does not learn
    label: str = ""
    not_learnt: list[str] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)  # of all attempts (extras/price)


def summarize(
    job: TrainJob, checkpointer: Checkpointer, result: FitResult, dataset: Dataset, savings: dict[str, Any]
) -> TrainSummary:
    from pipeline.checkpoint.steps import step_path

    best, main = best_step(job.run_dir, job), main_label(job.data.columns, dataset)
    others = [label.name for label in dataset.all_labels if label.name != main]
    step, metrics = best or (result.step, result.metrics)
    return TrainSummary(
        run_dir=job.run_dir,
        checkpoint=step_path(checkpointer.folder, step),
        step=result.step,
        stopped_early=result.stopped_early,
        best_step=best[0] if best else None,
        best_metric=job.best_metric if best else "",
        throughput=result.throughput,
        validation=metrics,
        bayes_auc=dataset.best_auc("validation", main),
        num_bad_rows=result.num_bad_rows,
        compression=savings,
        label=main,
        cost=cost_of_run(job.run_dir) if (cost_of_run := if_installed("cost_of_run")) else {},
        not_learnt=[] if job.model.learns_all else [name for name in others if name not in job.trainer.loss.columns],
    )


def write_summary(summary: TrainSummary) -> None:
    from pipeline.runtime.logs import to_json

    storage.publish_text(f"{summary.run_dir}/{SUMMARY}", to_json(asdict(summary), indent=1))


def describe(summary: TrainSummary) -> str:
    """Return the summary as text for a terminal: files, quality, speed, and the next command."""
    best = f", best step {summary.best_step} by {summary.best_metric}" if summary.best_step is not None else ""
    trained = "trained to" if summary.throughput else f"nothing was left to train: {summary.run_dir} is at"
    lines = [f"{trained} step {summary.step}{' (stopped early)' if summary.stopped_early else ''}{best}"]
    if summary.validation:
        lines.append(f"validation  {describe_quality(summary.validation, summary.bayes_auc)}")
    if summary.not_learnt:
        lines.append(f"labels      {summary.label} only; the model does not learn {', '.join(summary.not_learnt)}")
    if summary.num_bad_rows:
        lines.append(
            f"quarantine  {summary.num_bad_rows:,} bad row(s) left out, listed in {summary.run_dir}/quarantine"
        )
    lines += [f"worth a look  {remark}" for remark in summary.remarks]
    lines += describe_run(summary.run_dir, summary.checkpoint, summary.throughput)
    if summary.cost:
        lines.append(f"cost        {from_extra('describe_cost', 'cost')(summary.cost)}")
        lines += [f"ended by    {why}"] if (why := summary.cost["ended_by"]) else []
    if summary.report:
        lines.append(f"report      {summary.report}")
    lines.append(f"next        python -m pipeline evaluate {word('run', summary.run_dir)} split=test")
    return "\n".join(lines)


def describe_run(run_dir: str, checkpoint: str, throughput: dict[str, float]) -> list[str]:
    from pipeline.training.hooks.throughput import describe_comms_wait, describe_tiers

    lines = [
        f"model       {checkpoint}",
        f"plan        {run_dir}/plan.json",
        f"metrics     {run_dir}/metrics.jsonl",
        f"plots       tensorboard --logdir {run_dir}/tensorboard",
    ]
    if throughput:
        lines.append(
            f"speed       {throughput['samples_per_s']:,.0f} samples/s in training, "
            f"{throughput['input_stall_percent']:.1f} % of the time waiting for input, "
            f"{describe_comms_wait(throughput)}, {describe_tiers(throughput).replace('  ', ', ')}{throughput['peak_memory_gb']:.2f} GiB a rank"
        )
    return lines


def describe_quality(metrics: dict[str, float], bayes_auc: float | None) -> str:
    """Describe the metrics in one line, or in a line for each label. `bayes_auc` is the best
    possible AUC of the label, or of the main label."""
    of_labels = by_label(metrics)
    if list(of_labels) != [""]:
        texts = [
            describe_quality(part, None if number else bayes_auc) for number, part in enumerate(of_labels.values())
        ]
        return f"\n{'':<12}".join(f"{label}: {text}" for label, text in zip(of_labels, texts, strict=True))
    if reason := undefined(metrics):
        return f"undefined: {reason}; logloss {metrics['logloss']:.4f}"
    if "auc" not in metrics:
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if not isinstance(value, int))
    text = f"AUC {metrics['auc']:.4f}"
    if bayes_auc is not None:
        share = (metrics["auc"] - 0.5) / (bayes_auc - 0.5)
        text += f" of {bayes_auc:.4f}, the best that the data allows ({100 * share:.1f} % of the lift over 0.5)"
    return f"{text}, NE {metrics['ne']:.4f}, calibration {metrics['calibration']:.3f}"


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
    # lines about what was collected in addition to metrics
    details: list[str] = field(default_factory=list)


def file_name(job: EvaluateJob, step: int, other_data: str) -> str:
    """Name the file so that an evaluation of a part of a split, or of other data, does not overwrite another."""
    part = f".first_{job.max_batches}_batches" if job.max_batches is not None else ""
    data = f".data_{other_data[:8]}" if other_data else ""
    tables = ".own_tables" if job.tables == "own" else ""
    return f"evaluation.{job.split}.step_{step}{part}{data}{tables}.json"


def write_evaluation(summary: EvaluateSummary, collected: Sequence[Collected]) -> None:
    """Write the metrics as JSON, and what was collected to files next to it."""
    for each in collected:
        each.write(summary.path)
    tables = {"tables": summary.tables} if summary.tables else {}
    why = {"undefined": reason} if (reason := undefined(summary.metrics)) else {}
    written = {"split": summary.split, "step": summary.step, **tables, **summary.metrics, **why}
    storage.publish_text(summary.path, to_json(written, indent=1))
    if summary.importance:
        storage.publish_text(storage.join(summary.run, IMPORTANCE), to_json(summary.importance, indent=1))
    try_report = if_installed("try_report")
    if try_report and storage.exists(storage.join(summary.run, REPORT)):
        summary.report = try_report(summary.run)


def describe_evaluation(summary: EvaluateSummary) -> str:
    best = f" (best by {summary.best_by})" if summary.best_by else ""
    lines = [f"{summary.split} split at step {summary.step}{best} of {summary.run}"]
    width = max(12, *(len(name) + 2 for name in summary.metrics))
    first = [name for name in CLICK_METRICS if name in summary.metrics]
    for name in [*first, *(name for name in summary.metrics if name not in first)]:
        value = summary.metrics[name]
        lines.append(f"  {name:<{width}}" + (f"{value:,}" if isinstance(value, int) else f"{value:.6g}"))
    if summary.importance:
        main = summary.importance.get("label", "")
        for label, found in {main: summary.importance, **summary.importance.get("others", {})}.items():
            features = found["features"]
            best_first = sorted(features, key=lambda name: -features[name]["ne_increase"])[:MAX_FEATURES]
            rises = ", ".join(f"{features[name]['ne_increase']:.4f} {name}" for name in best_first)
            lines.append(f"importance  NE {f'of {label} ' if label else ''}rises by {rises}")
    if summary.tables:
        lines.append(f"tables      {summary.tables}")
    lines.append(f"quality     {describe_quality(summary.metrics, summary.bayes_auc)}")
    lines += summary.details
    lines += describe_run(summary.run, summary.checkpoint, summary.throughput)
    lines += [f"report      {summary.report}"] if summary.report else []
    lines.append(f"written to  {summary.path}")
    return "\n".join(lines)
