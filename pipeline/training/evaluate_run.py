"""Evaluate a trained model:  python -m pipeline evaluate run=runs/quickstart split=test

Any step of the run (step=300), any split, on any number of ranks:
torchx run -s local_cwd pipeline.evaluate -j 1x2 -- run=runs/quickstart split=validation
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import HardwareConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.config.training import ParallelConfig
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import to_json
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.garbage import none_while_importing
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring
from pipeline.sharding.compat import allow_untested_versions
from pipeline.training.data_order import checkpoint_folder
from pipeline.training.remarks import undefined
from pipeline.training.run_state import chosen_step
from pipeline.training.summary import SUMMARY, describe_quality, describe_run

if TYPE_CHECKING:
    from torch.nn import Module

    from pipeline.data.dataset import Dataset
    from pipeline.data.read.reader import ShardReader
    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.runs.evaluation_stats import EvaluationStats

REPORT = "report.html"
IMPORTANCE = "importance.json"
MOST_FEATURES = 10  # named on the terminal
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
    throughput: dict[str, float] = field(default_factory=dict)  # of the training, where it is known
    tables: str = ""  # whose, where hosts trained tables of their own
    report: str = ""  # the run's page, where it has one
    importance: dict[str, Any] = field(default_factory=dict)  # of features, where importance_rows asked for it
    best_by: str = ""  # the metric by which the step is the best of the run; empty where it was not chosen so


def evaluate(job: EvaluateJob) -> EvaluateSummary:
    """Collective: restore a checkpoint under a plan for this world size and measure a split.

    Raises:
        TrainingError: the run folder holds no run, or no such step; or the data are not those of the run.
    """
    trained = load_trained_job(job)
    if trained.sharding.allow_untested_versions:
        allow_untested_versions()
    # Imported here, for a typo in the command line must fail before torch is loaded.
    with none_while_importing():
        from pipeline.checkpoint.checkpointer import Checkpointer
        from pipeline.checkpoint.steps import step_path
        from pipeline.data.dataset import load_dataset
        from pipeline.devices.process_group import init_for
        from pipeline.sharding.torchrec.embedding_sync import TableReplicas
        from pipeline.training.evaluation import evaluate_model
        from pipeline.training.input_watch import on_all_ranks
        from pipeline.training.readers import open_reader
        from pipeline.training.resolve import resolve
        from pipeline.training.sharded_model import build_sharded_model
        from pipeline.training.stats_collector import StatsCollector
    watchdog.use(trained.trainer.limits())
    trained = for_devices_here(trained)
    context = init_for(trained)
    watchdog.beat(phase="loading")
    resolved = resolve(trained, load_dataset(trained.data.path), context)
    dataset = resolved.dataset
    reader = on_all_ranks(
        lambda: open_reader(resolved, job.split, context, job.global_batch_size, every_row=True), context
    )
    assembly = build_sharded_model(resolved, context, initialize=False)
    replicas = TableReplicas(assembly.model, None, trained.parallel, context) if assembly.replicated else None
    checkpointer = Checkpointer(
        checkpoint_folder(job.run, trained.checkpoint), assembly.model, None, context, replicas=replicas
    )
    with requiring(job.require_signature):
        chosen = on_all_ranks(lambda: chosen_step(job.run, trained, job.step, job.which), context)
        restored = checkpointer.restore_latest() if chosen is None else checkpointer.restore(chosen)
    if restored is None:
        raise TrainingError(
            f"{job.run} holds no checkpoint yet; train first: python -m pipeline train {word('run_dir', job.run)} ..."
        )
    tables = describe_tables(job, restored, context.world_size // context.local_world_size)
    is_other_data = restored["data_order"]["dataset"] != dataset.fingerprint()
    check_data(job, trained.data.path, is_other_data)
    at, named = trained.trainer.group_metrics_at, trained.trainer.metrics
    collector, title = StatsCollector(reader, context), f"evaluate {job.split}"
    metrics = evaluate_model(assembly.model, reader, context, job.max_batches, title, at, collector, named)
    step = restored["step"]
    checkpoint = step_path(checkpointer.folder, step)
    best_by = trained.best_metric if job.step is None and chosen is not None else ""
    summary = EvaluateSummary(job.run, job.split, step, checkpoint, metrics, dataset.bayes_auc.get(job.split))
    summary.tables, summary.best_by = tables, best_by
    summary.path = storage.join(job.run, file_name(job, step, dataset.fingerprint() if is_other_data else ""))
    if storage.exists(trained_summary := storage.join(job.run, SUMMARY)):
        summary.throughput = json.loads(storage.read_text(trained_summary))["throughput"]
    stats = collector.compute(job.split, step, metrics)
    summary.importance = _importance(job, assembly.model, reader, context, dataset, step)
    if context.is_main:
        write_summary(summary, stats)
    return summary


def _importance(
    job: EvaluateJob, model: Module, reader: ShardReader, context: DistributedContext, dataset: Dataset, step: int
) -> dict[str, Any]:
    """Collective: of each feature, where the job asks for it."""
    if not job.importance_rows:
        return {}
    from pipeline.training.permutation import permutation_importance

    found = permutation_importance(model, reader, context, list(dataset.dense_features), job.importance_rows)
    return {"split": job.split, "step": step, **found}


def write_summary(summary: EvaluateSummary, stats: EvaluationStats | None) -> None:
    """The metrics as JSON, and beside them what the evaluation saw."""
    if stats is not None:
        from pipeline.training.runs.evaluation_stats import stats_path, write_stats  # loads numpy

        write_stats(stats_path(summary.path), stats)
    tables = {"tables": summary.tables} if summary.tables else {}
    why = {"undefined": reason} if (reason := undefined(summary.metrics)) else {}
    said = {"split": summary.split, "step": summary.step, **tables, **summary.metrics, **why}
    storage.publish_text(summary.path, to_json(said, indent=1))
    if summary.importance:
        storage.publish_text(storage.join(summary.run, IMPORTANCE), to_json(summary.importance, indent=1))
    if storage.exists(storage.join(summary.run, REPORT)):
        from pipeline.training.runs.report import try_report

        summary.report = try_report(summary.run)


def check_data(job: EvaluateJob, path: str, is_other_data: bool) -> None:
    """Raises TrainingError for other data than the run's, where the job does not allow them."""
    if is_other_data and not job.other_data:
        raise TrainingError(
            f"{path} is not the data set that {job.run} was trained on: where its vocabularies differ, ids mean other values "
            "and the metrics mean nothing; set other_data=true if its vocabularies are the same"
        )


def file_name(job: EvaluateJob, step: int, other_data: str) -> str:
    """An evaluation of a part of a split, or of other data, does not overwrite that of the whole split."""
    part = f".first_{job.max_batches}_batches" if job.max_batches is not None else ""
    data = f".data_{other_data[:8]}" if other_data else ""
    tables = ".own_tables" if job.tables == "own" else ""
    return f"evaluation.{job.split}.step_{step}{part}{data}{tables}.json"


def describe_tables(job: EvaluateJob, restored: dict[str, Any], num_hosts: int) -> str:
    """Whose tables were evaluated; empty for a run whose tables were one model all along.

    Raises:
        TrainingError: tables=own, and the step does not hold tables of each of `num_hosts` hosts.
    """
    stored = restored.get("replicas")
    if job.tables == "own" and (not stored or not stored["apart"] or stored["num_hosts"] != num_hosts):
        held = f"tables of each of {stored['num_hosts']} hosts" if stored and stored["apart"] else "one model's tables"
        raise TrainingError(
            f"tables=own, but step {restored['step']} of {job.run} holds {held} and this evaluation runs on {num_hosts} "
            "host(s); run it on as many hosts as the training, or leave out tables=own"
        )
    if not stored:
        return ""
    if not stored["apart"]:
        return f"of all {stored['num_hosts']} hosts, just averaged ({stored['embedding_sync']})"
    whose = "each host's own" if job.tables == "own" else "averaged"
    return f"{whose}, of {stored['num_hosts']} hosts ({stored['embedding_sync']})"


def load_trained_job(job: EvaluateJob) -> TrainJob:
    """The run's own config, planned anew for the ranks at hand. Raises ConfigError where its model has none of job.metrics."""
    path = storage.join(job.run, "config.yaml")
    if not storage.exists(path):
        raise TrainingError(f"{job.run} is no run folder: {path} is missing; run=<the run_dir of a training>")
    trained = load_saved_job(TrainJob, path)
    return replace(
        trained,
        planner=replace(trained.planner, kind="search"),  # its plan file may be for other ranks
        trainer=replace(trained.trainer, metrics=list(dict.fromkeys([*trained.trainer.metrics, *job.metrics]))),
        parallel=ParallelConfig() if job.tables == "averaged" else trained.parallel,
        world_size=job.world_size,
        run_dir=job.run,  # it may have been moved
        data=replace(trained.data, path=job.data_path or trained.data.path),
    )


def for_devices_here(trained: TrainJob) -> TrainJob:
    """Plan for the devices of this host, if the run names a device that this host does not have."""
    from pipeline import devices

    asked = trained.hardware.compute_device
    if asked == "auto" or devices.kinds()[asked].is_available():
        return trained
    # Of a preset, only these two figures describe the host, and they cannot be probed.
    known = {name: getattr(trained.hardware, name) for name in ("ddr_gb_per_s", "inter_host_gb_per_s")}
    return replace(trained, hardware=HardwareConfig(name="auto", **known), comms=replace(trained.comms, backend="auto"))


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
        best_first = sorted(features, key=lambda name: -features[name]["ne_increase"])[:MOST_FEATURES]
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
