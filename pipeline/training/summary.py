"""Summarize a finished training for its run folder and for the terminal (without torch)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.training.result_warnings import undefined
from pipeline.training.run_state import best_step

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.data.dataset import Dataset
    from pipeline.embeddings.describe import Savings
    from pipeline.training.trainer import FitResult

SUMMARY = "summary.json"


@dataclass
class TrainSummary:
    """The result of a finished run.

    `checkpoint` and `validation` belong to the best step if the run keeps it, otherwise to the last step.
    """

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


def summarize(
    job: TrainJob, checkpointer: Checkpointer, result: FitResult, dataset: Dataset, savings: list[Savings]
) -> TrainSummary:
    from pipeline.checkpoint.steps import step_path
    from pipeline.embeddings.describe import as_json

    best = best_step(job.run_dir, job)
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
        bayes_auc=dataset.bayes_auc.get("validation"),
        num_bad_rows=result.num_bad_rows,
        compression=as_json(savings),
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
    if summary.num_bad_rows:
        lines.append(
            f"quarantine  {summary.num_bad_rows:,} bad row(s) left out, listed in {summary.run_dir}/quarantine"
        )
    lines += [f"worth a look  {remark}" for remark in summary.remarks]
    lines += describe_run(summary.run_dir, summary.checkpoint, summary.throughput)
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
    """Describe the metrics in one line.

    `bayes_auc` is the best possible AUC of the label, or of the main label.
    """
    if labels := list(dict.fromkeys(name.rpartition("/")[0] for name in metrics if "/" in name)):
        prefixes = [f"{label}/" for label in labels]
        parts = [
            {name.removeprefix(each): metrics[name] for name in metrics if name.startswith(each)} for each in prefixes
        ]
        texts = [describe_quality(part, None if number else bayes_auc) for number, part in enumerate(parts)]
        return "; ".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=True))
    if reason := undefined(metrics):
        return f"undefined: {reason}; logloss {metrics['logloss']:.4f}"
    if "auc" not in metrics:
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if not isinstance(value, int))
    text = f"AUC {metrics['auc']:.4f}"
    if bayes_auc is not None:
        share = (metrics["auc"] - 0.5) / (bayes_auc - 0.5)
        text += f" of {bayes_auc:.4f}, the best that the data allows ({100 * share:.1f} % of the lift over 0.5)"
    return f"{text}, NE {metrics['ne']:.4f}, calibration {metrics['calibration']:.3f}"
