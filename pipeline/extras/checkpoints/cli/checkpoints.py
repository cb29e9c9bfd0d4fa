"""List the checkpoints of a run:  python -m pipeline checkpoints runs/quickstart

    python -m pipeline checkpoints verify RUN [STEP]            read every byte (exit code 0, or 1 if a step is damaged)
    python -m pipeline checkpoints show RUN [STEP]              tables, plan, config and data set of a step (the newest)
    python -m pipeline checkpoints export RUN [STEP] table=cat_3 output=cat_3.parquet
                                                                one table as Parquet: row, value, vector
                                                                (optimizer_state=true: also its state)

RUN may also be given as run=RUN, STEP as step=300. This needs no ranks, and memory does not grow with the tables.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from pipeline.cli.command_line import Command
from pipeline.cli.verb import verb
from pipeline.config.tables import table_name
from pipeline.config.training import CheckpointConfig
from pipeline.extras.checkpoints.config import CHECKPOINT_COMMANDS, CheckpointsJob
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.errors import ConfigError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.stdout import write_out
from pipeline.runtime.storage.signature import requiring
from pipeline.training.run_state import config_of, folder_of

DAMAGED = 1  # exit code of verify
SHOWN = ("ne", "auc", "mse", "recall_at_10", "mrr")
logger = get_logger("pipeline.checkpoints")  # as a command, __name__ is different


def list_checkpoints(job: CheckpointsJob) -> list[str]:
    """Return one line per step, oldest first. Raises ConfigError if there is no step."""
    from pipeline.checkpoint.retention import is_higher_better, metric_of
    from pipeline.checkpoint.steps import list_steps
    from pipeline.extras.checkpoints.survey import StepSummary, summarize_step

    folder = folder_of(job.run)
    found = [summarize_step(folder, step) for step in list_steps(folder)]
    if not found:
        raise ConfigError(f"{folder} holds no checkpoint; run=<the run_dir of a training>")
    try:
        trained = config_of(job.run)
    except ConfigError:  # without the plugin of its model the run is listed by its own metric, or NE
        trained = None
    config = trained.checkpoint if trained else CheckpointConfig()
    metric = trained.best_metric if trained else config.best_metric or "ne"
    sign = -1.0 if is_higher_better(metric) else 1.0
    measured = [step for step in found if metric in step.metrics and not step.problem]
    best = min(measured, key=lambda step: sign * step.metrics[metric]).step if measured else None
    last = {step.step for step in found[-config.keep_last_n :]}

    def line(summary: StepSummary) -> str:
        metrics = [f"{name} {value:.4f}" for name, value in summary.metrics.items() if metric_of(name) in SHOWN]
        metrics += [f"best {metric}"] if summary.step == best else []
        metrics += [f"changes since step {summary.base}"] if summary.base is not None else []
        metrics += ["kept as best"] if config.keep_best_n and summary in measured and summary.step not in last else []
        return (
            f"{summary.step:>10}  {_age(summary.age_s):>10}  {show_size(summary.size_bytes):>10}  {summary.world_size:>5}  "
            f"{summary.problem or '  '.join(metrics) or 'not evaluated'}"
        )

    header = f"{'step':>10}  {'saved':>10}  {'size':>10}  {'ranks':>5}  validation"
    return [header, *(line(step) for step in found), f"files        {folder}; `verify {job.run}` reads every byte"]


def verify_checkpoints(job: CheckpointsJob) -> dict[int, str]:
    """Return step -> "" or its problem. Raises ConfigError if there is no such step."""
    from pipeline.checkpoint.steps import list_steps
    from pipeline.extras.checkpoints.survey import verify_step

    folder = folder_of(job.run)
    steps = list_steps(folder)
    if not steps or (job.step is not None and job.step not in steps):
        raise ConfigError(
            f"there is no step {'' if job.step is None else job.step} in {folder}; there are steps {', '.join(map(str, steps)) or 'none'}"
        )
    return {step: verify_step(folder, step) for step in (steps if job.step is None else [job.step])}


def show_checkpoint(job: CheckpointsJob) -> list[str]:
    """Describe the content of a step. Raises ConfigError if there is none, or it cannot be read."""
    from pipeline.checkpoint.chains import open_step
    from pipeline.extras.checkpoints.survey import describe_step

    return describe_step(*open_step(folder_of(job.run), job.step))


def export_checkpoint(job: CheckpointsJob) -> list[str]:
    """Write one table to job.output and describe it.

    Raises ConfigError for an unknown or damaged step or table.
    """
    from pipeline.checkpoint.chains import open_step
    from pipeline.checkpoint.tables import inventory_of_step
    from pipeline.checkpoint.vocabularies import features_of, id_space, trained_dataset
    from pipeline.extras.checkpoints.export import export_table
    from pipeline.extras.checkpoints.survey import verify_step

    folder = folder_of(job.run)
    step, manifest, tensors = open_step(folder, job.step)
    tables = inventory_of_step(tensors).tables
    # A table that is split by frequency is one table: rows of its head, then rows of its tail.
    name = job.table if job.table in tables else table_name(job.table)
    parts = [tables[part] for part in (f"{name}__hot", f"{name}__cold") if part in tables]
    found = [replace(table, name=job.table) for table in ([tables[name]] if name in tables else parts)]
    if not found:
        raise ConfigError(
            f"step {step} has no table {job.table!r} among {len(tables)}{did_you_mean(job.table, tables)}; `show` lists them"
        )
    if problem := verify_step(folder, step):
        raise ConfigError(
            f"step {step} is damaged: {problem}; export another: python -m pipeline checkpoints {job.run}"
        )
    dataset, where = trained_dataset(manifest, job.data_path)
    vocabulary, without_values = None, where
    if dataset is not None:
        ids = id_space(dataset, where, features_of(manifest["config"], name))
        vocabulary = ids.vocabulary
        without_values = "its ids are hashes of values" if ids.hashed else ids.reason
    size = export_table(tensors, found, job.output, with_state=job.optimizer_state, vocabulary=vocabulary)
    num_rows = sum(table.rows for table in found)
    lines = [
        f"table {job.table!r} of step {step}: {num_rows:,} rows x {found[0].dim} in {job.output} ({show_size(size)})"
    ]
    return lines if vocabulary else [*lines, f"without raw values: {without_values}"]


def export_table_of_run(run: str, step: int | None, table: str, output: str) -> None:
    """Write one table of a step (None: the newest). Raises as export_checkpoint."""
    export_checkpoint(CheckpointsJob(run=run, command="export", step=step, table=table, output=output))


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def run(job: CheckpointsJob) -> list[str]:
    """Return what the command prints. A damaged step ends the process with DAMAGED."""
    with requiring(job.require_signature):
        if job.command == "verify":
            problems = verify_checkpoints(job)
            lines = [f"step {step}: {problem or 'intact'}" for step, problem in problems.items()]
            if any(problems.values()):
                write_out("\n".join(lines))
                sys.exit(DAMAGED)
            return lines
        commands = {"list": list_checkpoints, "show": show_checkpoint, "export": export_checkpoint}
        return commands[job.command](job)


COMMANDS = tuple(Command(name, ("run", "step"), {"step": r"\d+"}) for name in CHECKPOINT_COMMANDS)
main = verb("checkpoints", CheckpointsJob, describe="\n".join, commands=COMMANDS, default="list")(run)
