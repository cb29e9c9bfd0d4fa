"""Train one model:  python -m pipeline.train experiment=quickstart

On several ranks:  torchx run -s local_cwd pipeline.train -j 1x2 -- experiment=quickstart
A run folder that holds a checkpoint is resumed; another run_dir starts anew.
SIGTERM saves at the next training step and ends with exit code 75; the same command goes on (docs/reliability.md).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline import storage, watchdog
from pipeline.checkpoint.config import WarmStartConfig
from pipeline.config import TrainJob, load_saved_job, run_verb, save_job
from pipeline.embeddings.config import TableConfig
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.signatures import signatures
from pipeline.exit_codes import REQUEUE
from pipeline.garbage import none_while_importing
from pipeline.training.config import CheckpointConfig

if TYPE_CHECKING:
    from torch import nn
    from torchrec.optim.keyed import KeyedOptimizer

    from pipeline.assembly import Assembly
    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.checkpoint.replicas import Replicas
    from pipeline.data.dataset import Dataset
    from pipeline.distributed import DistributedContext
    from pipeline.training.trainer import FitResult

SUMMARY = "summary.json"


@dataclass
class TrainSummary:
    """What a finished run leaves behind; `validation` are the last evaluation's metrics."""

    run_dir: str
    checkpoint: str
    step: int
    stopped_early: bool = False
    throughput: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    bayes_auc: float | None = None
    num_bad_rows: int = 0  # quarantined in training, on all ranks; run_dir/quarantine lists them
    compression: dict[str, Any] = field(
        default_factory=dict
    )  # of each compressed table: its parts, bytes and collisions


def train(job: TrainJob) -> TrainSummary:
    """Collective: build, shard, resume, fit. Rank 0 writes the run folder.

    Raises:
        ValueError: the job does not fit the data, the hardware or the checkpoint in its run folder.
    """
    # Imported here, for a typo in the command line must fail before torch is loaded.
    with none_while_importing():
        from pipeline.assembly import assemble, open_reader, settle_heads
        from pipeline.checkpoint.random_state import seed_random_state
        from pipeline.checkpoint.steps import step_path
        from pipeline.data.dataset import load_dataset
        from pipeline.distributed import describe_threads, init_distributed
        from pipeline.embeddings.describe import as_json, describe_savings, savings_of
        from pipeline.logs import MetricsWriter, get_logger, to_json
        from pipeline.planner.explain import summarize
        from pipeline.planner.planfile import encode_record, write_plan
        from pipeline.run_folder import take_run_folder
        from pipeline.training.allocator import keep_freed_memory
        from pipeline.training.compiled import DenseCompiler
        from pipeline.training.config import profiled_steps
        from pipeline.training.embedding_sync import TableReplicas
        from pipeline.training.input_watch import on_all_ranks
        from pipeline.training.memory import MemoryWatch
        from pipeline.training.optimizer import build_optimizer
        from pipeline.training.step_profile import StepProfiler
        from pipeline.training.trainer import Trainer

    context = init_distributed(job.comms.backend, job.comms.timeout_s)
    if job.world_size != context.world_size:
        raise ValueError(f"world_size={job.world_size}, but {context.world_size} rank(s) run; leave it to the launcher")
    get_logger("pipeline.train").info(describe_threads(context))
    lease = take_run_folder(job.run_dir, context, job.trainer.lease_ttl_s)
    watchdog.beat(phase="loading")
    seed_random_state(job.trainer.seed, context.rank)
    dataset = load_dataset(job.data.path)
    settle_heads(job, dataset, context, _earlier_tables(job))
    # Before memory is allocated: a missing shard shows here.
    reader, validation_reader = (
        on_all_ranks(partial(open_reader, job, dataset, split, context), context) for split in ("train", "validation")
    )
    if context.device.type == "cpu":
        keep_freed_memory()
    memory = MemoryWatch(context)
    assembly = assemble(job, dataset, context)
    get_logger("pipeline.train").info(summarize(assembly.plan))
    savings = savings_of(assembly.tables) if context.is_main else []
    for line in describe_savings(savings):
        get_logger("pipeline.train").info("%s", line)
    if job.trainer.compile:
        DenseCompiler().compile(assembly.task.model)
    optimizer = build_optimizer(assembly.model, job.optimizer)
    data_order = describe_data_order(job, dataset.fingerprint())
    about = describe_job(job, dataset, data_order, json.loads(encode_record(assembly.plan)))
    about["compression"] = signatures(assembly.tables)
    replicas = TableReplicas(assembly.model, optimizer, job.parallel, context) if assembly.replicated else None
    fence = lease.check if lease else None
    checkpointer = open_checkpoints(job, assembly.model, optimizer, context, about, fence, replicas)
    restored = resume(job, checkpointer, data_order, about["compression"])
    if restored is None and job.warm_start is not None:
        start_warm(job, job.warm_start, assembly, optimizer, context, dataset)
    writer = None
    if context.is_main:
        writer = MetricsWriter(job.run_dir, restored["step"] if restored else 0)
        save_job(job, f"{job.run_dir}/config.yaml")
        write_plan(f"{job.run_dir}/plan.json", assembly.plan)
    trainer = Trainer(
        job.trainer,
        job.schedule,
        job.checkpoint,
        model=assembly.model,
        task=assembly.task,
        optimizer=optimizer,
        reader=reader,
        validation_reader=validation_reader,
        checkpointer=checkpointer,
        writer=writer,
        context=context,
        after_first_step=lambda: memory.report(assembly.plan),
        replicas=replicas,
        profiler=StepProfiler(*profiled_steps(job.profile), f"{job.run_dir}/profile", context) if job.profile else None,
    )
    result = trainer.fit(restored)
    if writer:
        writer.close()
    if lease:
        lease.release()
    if result.preempted:
        get_logger("pipeline.train").info("stopped by SIGTERM at step %d, saved; the same command goes on", result.step)
        sys.exit(REQUEUE)
    checkpoint = step_path(checkpointer.folder, result.step)
    summary = summarize_fit(job.run_dir, checkpoint, result, dataset.bayes_auc.get("validation"))
    summary.compression = as_json(savings)
    if writer and result.throughput:  # a run that had nothing left to train keeps the summary of the one that had
        storage.publish_text(f"{job.run_dir}/{SUMMARY}", to_json(asdict(summary), indent=1))
    return summary


def _earlier_tables(job: TrainJob) -> dict[str, TableConfig]:
    """Those of the run that this one goes on with; none for a fresh run folder."""
    earlier = config_of(job.run_dir) if job.checkpoint.resume else None
    return earlier.tables if earlier else {}


def open_checkpoints(
    job: TrainJob,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    context: DistributedContext,
    about: dict[str, Any],
    fence: Callable[[], None] | None,
    replicas: Replicas | None = None,
) -> Checkpointer:
    """The run's checkpoints by checkpoint.*; `fence` raises where the run has lost its folder to another."""
    from pipeline.checkpoint.checkpointer import Checkpointer

    return Checkpointer(
        checkpoint_folder(job.run_dir, job.checkpoint),
        model,
        optimizer,
        context,
        keep_last_n=job.checkpoint.keep_last_n,
        keep_best_n=job.checkpoint.keep_best_n,
        best_metric=job.checkpoint.best_metric or job.model.metrics[0],
        asynchronous=job.checkpoint.asynchronous,
        staging=f"{job.run_dir}/staging",
        average_row_state=job.checkpoint.row_state_across_columns == "average",
        about=about,
        fence=fence,
        replicas=replicas,
    )


def summarize_fit(run_dir: str, checkpoint: str, result: FitResult, bayes_auc: float | None) -> TrainSummary:
    return TrainSummary(
        run_dir=run_dir,
        checkpoint=checkpoint,
        step=result.step,
        stopped_early=result.stopped_early,
        throughput=result.throughput,
        validation=result.metrics,
        bayes_auc=bayes_auc,
        num_bad_rows=result.num_bad_rows,
    )


def checkpoint_folder(run_dir: str, config: CheckpointConfig) -> str:
    return config.folder or f"{run_dir}/checkpoints"


def describe_data_order(job: TrainJob, dataset_fingerprint: str) -> dict[str, Any]:
    """All that decides which rows step g trains on; a resumed run must not change it."""
    return {
        "dataset": dataset_fingerprint,
        "trainer.seed": job.trainer.seed,
        "trainer.global_batch_size": job.trainer.global_batch_size,
        "trainer.gradient_accumulation_steps": job.trainer.gradient_accumulation_steps,
        "data.reader.num_streams": job.data.reader.num_streams,
        "data.reader.shuffle": job.data.reader.shuffle,
    }


def describe_job(job: TrainJob, dataset: Dataset, data_order: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """What every checkpoint says of the run; the hashes tell at a glance whether two steps are of the same one."""
    config = asdict(job)
    hashes = {
        "config": _hash(config),
        "schema": dataset.schema_hash(),
        "plan": _hash(plan["plan"]),
        "plan_fingerprint": plan["fingerprint_sha256"],
    }
    return {"data_order": data_order, "config": config, "plan": plan, "hashes": hashes}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def resume(
    job: TrainJob, checkpointer: Any, data_order: dict[str, Any], compression: dict[str, str]
) -> dict[str, Any] | None:
    """Collective: the manifest of the step that was restored, None for a fresh run folder.

    Raises:
        ValueError: the run folder holds a run over other data or with tables compressed in another way, or any run at
            all with checkpoint.resume=false.
    """
    from pipeline.checkpoint.steps import list_steps

    if not job.checkpoint.resume:
        if steps := list_steps(checkpointer.folder):
            raise ValueError(
                f"checkpoint.resume=false, but {checkpointer.folder} holds {len(steps)} checkpoint(s), the newest at "
                f"step {steps[-1]}; choose another run_dir, or delete that folder"
            )
        return None

    def check(found: dict[str, Any]) -> None:
        for key, now in data_order.items():
            then = found["data_order"].get(key)
            if then != now:
                raise ValueError(
                    f"{job.run_dir} was trained to step {found['step']} with {key}={then}, this job has {now}: step "
                    f"{found['step']} would not be followed by the rows that come next; keep the value, or choose "
                    "another run_dir"
                )
        before = found.get("compression", {})
        for table in sorted(before.keys() | compression.keys()):
            if (then := before.get(table, "whole")) != (now := compression.get(table, "whole")):
                raise ValueError(
                    f"{job.run_dir} was trained to step {found['step']} with table {table!r} as {then}, this job has {now}: "
                    "its rows would stand for other ids; keep tables.*.compression, or choose another run_dir"
                )

    found: dict[str, Any] | None = checkpointer.restore_latest(check)
    checkpointer.clear_after(found["step"] if found else -1)
    return found


def start_warm(
    job: TrainJob, config: WarmStartConfig, assembly: Assembly, optimizer: Any, context: Any, dataset: Dataset
) -> None:
    """Collective: first weights from another run; what became of each table goes to the log and warm_start.json.

    Raises:
        ValueError: there is no such checkpoint, or a policy of `config` refuses what it holds.
    """
    from pipeline.checkpoint.warm_start import NewData, report_json, warm_start
    from pipeline.logs import get_logger, to_json

    by_name = {table.name: table for table in assembly.tables}
    parts = {part.name: part.config_name for part in physical_tables(assembly.tables)}
    data = NewData(
        dataset,
        job.data.path,
        {name: by_name[whole].feature_names for name, whole in [*parts.items(), *((name, name) for name in by_name)]},
        {name: whole for name, whole in parts.items() if name != whole},
        signatures(assembly.tables),
    )
    folder = None if config.run is None else folder_of(config.run)
    report = warm_start(config, folder, assembly.model, optimizer, context, data)
    for line in report.lines():
        get_logger("pipeline.train").info("%s", line)
    if context.is_main:
        storage.publish_text(f"{job.run_dir}/warm_start.json", to_json(report_json(report), indent=1))


def config_of(run: str) -> TrainJob | None:
    """The config that another run has saved; None where there is none. Raises ValueError for a config of no job."""
    path = storage.join(run, "config.yaml")
    return load_saved_job(TrainJob, path) if storage.is_file(path) else None


def folder_of(run: str) -> str:
    """Where another run keeps its checkpoints, as its saved config says. Raises ValueError as config_of."""
    job = config_of(run)
    return checkpoint_folder(run, job.checkpoint if job else CheckpointConfig())


def describe(summary: TrainSummary) -> str:
    """What a person wants to know at the end: where things lie, how good, how fast, what next."""
    lines = [f"trained to step {summary.step}{' (stopped early)' if summary.stopped_early else ''}"]
    if summary.validation:
        lines.append(f"validation  {describe_quality(summary.validation, summary.bayes_auc)}")
    if summary.num_bad_rows:
        lines.append(
            f"quarantine  {summary.num_bad_rows:,} bad row(s) left out, listed in {summary.run_dir}/quarantine"
        )
    lines += describe_run(summary.run_dir, summary.checkpoint, summary.throughput)
    lines.append(f"next        python -m pipeline.evaluate run={summary.run_dir} split=test")
    return "\n".join(lines)


def describe_run(run_dir: str, checkpoint: str, throughput: dict[str, float]) -> list[str]:
    from pipeline.training.throughput import describe_comms_wait

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
            f"{describe_comms_wait(throughput)}, {throughput['peak_memory_gb']:.2f} GiB a rank"
        )
    return lines


def describe_quality(metrics: dict[str, float], bayes_auc: float | None) -> str:
    if "auc" not in metrics:
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if not isinstance(value, int))
    text = f"AUC {metrics['auc']:.4f}"
    if bayes_auc is not None:
        share = (metrics["auc"] - 0.5) / (bayes_auc - 0.5)
        text += f" of {bayes_auc:.4f}, the best that the data allows ({100 * share:.1f} % of the lift over 0.5)"
    return f"{text}, NE {metrics['ne']:.4f}, calibration {metrics['calibration']:.3f}"


if __name__ == "__main__":
    run_verb(TrainJob, train, __doc__, describe)
