"""Evaluate a trained model:  python -m pipeline evaluate run=runs/quickstart split=test

resolve -> read -> build -> plan -> shard -> restore -> measure -> summarize, on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from torch.nn import Module

from pipeline import devices
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import step_path
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import HardwareConfig
from pipeline.config.registry import from_extra
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.raw.layout import feature_names
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import main_label
from pipeline.devices.process_group import init_for
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import quiet_libraries
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring
from pipeline.sharding.compat import allow_untested_versions
from pipeline.training.evaluation import Collector, evaluate_model, open_stats
from pipeline.training.preflight import check_metric_features, checkpoint_folder
from pipeline.training.readers import on_all_ranks, open_reader
from pipeline.training.run_state import chosen_step, load_trained_job
from pipeline.training.sharded_model import ShardedModel, build_sharded_model, open_replicas, resolve
from pipeline.training.summary import SUMMARY, EvaluateSummary, file_name, write_evaluation


@quiet_libraries()
def evaluate(job: EvaluateJob) -> EvaluateSummary:
    """Restore a checkpoint under a plan for this world size and measure a split. Collective. Raises
    TrainingError if the folder is not a run, has no such step, or the data set is not the run's
    data set."""
    trained = for_devices_here(load_trained_job(job))
    if trained.sharding.allow_untested_versions:
        allow_untested_versions()
    watchdog.use(trained.trainer.limits())
    context = init_for(trained)
    watchdog.beat(phase="loading")
    dataset = load_dataset(trained.data.path)
    fingerprint = dataset.fingerprint()
    if job.other_data:
        dataset = dataset.with_features(*feature_names(trained.data))
    columns = trained.data.columns
    if job.policy:
        from_extra("check_policy", "policy")(job.policy, "policy", columns.propensity, dataset.group_column)
    resolved = resolve(trained, dataset, context)
    check_metric_features(trained, resolved.dataset)
    aside = columns.logged if job.policy else []
    reader = on_all_ranks(
        lambda: open_reader(resolved, job.split, context, job.global_batch_size, every_row=True, aside=aside), context
    )
    sharded = build_sharded_model(resolved, context, initialize=False)
    restored, is_best = _restore(job, trained, sharded, context)

    is_other_data = restored["data_order"]["dataset"] != fingerprint
    check_data(job, trained.data.path, is_other_data)
    tables, step = describe_tables(job, restored, context.world_size // context.local_world_size), restored["step"]

    at, named = trained.trainer.group_metrics_at, trained.trainer.metrics
    title, name = f"evaluate {job.split}", file_name(job, step, fingerprint if is_other_data else "")
    with _collectors(job, name, sharded.model, reader, context, resolved) as collectors:
        metrics = evaluate_model(sharded.model, reader, context, job.max_batches, title, at, collectors, named)
        computed = [each.compute(job.split, step, metrics) for each in collectors]
    collected = [each for each in computed if each is not None]
    summary = EvaluateSummary(
        job.run,
        job.split,
        step,
        step_path(checkpoint_folder(job.run, trained.checkpoint), step),
        metrics,
        resolved.dataset.best_auc(job.split, main_label(columns, resolved.dataset)),
        path=storage.join(job.run, name),
        throughput=_throughput(job.run),
        tables=tables,
        importance=_importance(job, sharded.model, reader, context, resolved.dataset, step),
        best_by=trained.best_metric if is_best else "",
        details=[line for each in collected for line in each.lines()],
    )
    if context.is_main:
        write_evaluation(summary, collected)
    return summary


def _restore(
    job: EvaluateJob, trained: TrainJob, sharded: ShardedModel, context: DistributedContext
) -> tuple[dict[str, Any], bool]:
    """Fill the model from the chosen step. Return its manifest, and whether it is the run's best
    step. Collective."""
    replicas = open_replicas(sharded, None, trained.parallel, context)
    folder = checkpoint_folder(job.run, trained.checkpoint)
    checkpointer = Checkpointer(folder, sharded.model, None, context, replicas=replicas)
    with requiring(job.require_signature):
        chosen = on_all_ranks(lambda: chosen_step(job.run, trained, job.step, job.which), context)
        restored = checkpointer.restore_latest() if chosen is None else checkpointer.restore(chosen)
    if restored is None:
        raise TrainingError(
            f"{job.run} holds no checkpoint yet; train first: python -m pipeline train {word('run_dir', job.run)} ..."
        )
    return restored, job.step is None and chosen is not None


def _throughput(run: str) -> dict[str, float]:
    """Return the throughput of the run's training, {} if the run has no summary."""
    path = storage.join(run, SUMMARY)
    found: dict[str, float] = json.loads(storage.read_text(path))["throughput"] if storage.exists(path) else {}
    return found


@contextmanager
def _collectors(
    job: EvaluateJob,
    name: str,
    model: Module,
    reader: ShardReader,
    context: DistributedContext,
    resolved: ResolvedJob,
) -> Iterator[list[Collector]]:
    """Yield what collects statistics, and slices and rows if the job asks for them. `name` is the
    evaluation's. Collective."""
    stats, dataset = open_stats(reader, context), resolved.dataset
    found = [stats] if stats else []
    if job.slices:
        slice_rows: Callable[..., Collector] = from_extra("slice_rows", "slices")
        found.append(slice_rows(job.slices, resolved.job, dataset, reader, context))
    if job.policy:
        policy_rows: Callable[..., Collector] = from_extra("policy_rows", "policy")
        found.append(policy_rows(job.policy, resolved, model, reader, context))
    if job.predictions is None:
        yield found
        return
    row_file: Callable[..., AbstractContextManager[Collector]] = from_extra("row_file", "predictions")
    about = {"run": job.run, "evaluation": name.removesuffix(".json")}
    has_weights = bool(dataset.weight_column or (job.split == "train" and dataset.negative_sampling))
    with row_file(job.predictions, about, model, reader, context, has_weights) as rows:
        yield [*found, rows]


def _importance(
    job: EvaluateJob, model: Module, reader: ShardReader, context: DistributedContext, dataset: Dataset, step: int
) -> dict[str, Any]:
    """Measure the importance of each feature, if the job asks for it. Collective."""
    if not job.importance_rows:
        return {}
    permutation_importance = from_extra("permutation_importance", "importance_rows")
    found = permutation_importance(model, reader, context, list(dataset.dense_features), job.importance_rows)
    return {"split": job.split, "step": step, **found}


def check_data(job: EvaluateJob, path: str, is_other_data: bool) -> None:
    """Raise TrainingError if the run was trained on other data, unless the job allows other data."""
    if is_other_data and not job.other_data:
        raise TrainingError(
            f"{path} is not the data set that {job.run} was trained on: if its vocabularies differ, ids mean other values "
            "and the metrics mean nothing; set other_data=true if its vocabularies are the same"
        )


def describe_tables(job: EvaluateJob, restored: dict[str, Any], num_hosts: int) -> str:
    """Describe which tables were evaluated; "" if all ranks of the run always had the same tables.
    Raises TrainingError if tables=own, but the step does not hold separate tables for each of
    `num_hosts` hosts."""
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


def for_devices_here(trained: TrainJob) -> TrainJob:
    """Plan for the devices of this host, if the run names a device that this host does not have."""
    asked = trained.hardware.compute_device
    if asked == "auto" or devices.kinds()[asked].is_available():
        return trained
    # These two figures of a preset describe the host and cannot be probed.
    known = {name: getattr(trained.hardware, name) for name in ("ddr_gb_per_s", "inter_host_gb_per_s")}
    return replace(trained, hardware=HardwareConfig(name="auto", **known), comms=replace(trained.comms, backend="auto"))
