"""Start one process for each rehearsed rank, and describe the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pipeline.config.jobs.job import job_of
from pipeline.config.jobs.train import PlanJob, PublishingConfig, TrainJob
from pipeline.config.saved_jobs import job_to_yaml
from pipeline.config.training import LoggerConfig
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import ConfigError, TrainingError, check_at_least
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.training.preflight import check_geometry, load_or_describe, validate_job


@job_of("rehearse")
@dataclass
class RehearseJob(PlanJob):
    """A PlanJob, which needs no data set: generated rows replace a missing one. ranks: the ranks to
    rehearse, always including rank 0, because other ranks use its plan. steps: the number of
    steps of each rank. output: a JSON file for the counts.
    """

    ranks: list[int] = field(default_factory=lambda: [0])
    steps: int = 2
    output: str | None = None
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("steps", self.steps, 2)  # the first step builds what later steps use
        if bad := [rank for rank in self.ranks if not 0 <= rank < self.world_size]:
            raise ConfigError(f"ranks={bad} of world_size={self.world_size}: ranks are 0 to {self.world_size - 1}")


MAX_SEARCH_S = 15.0  # CPU-seconds for a plan
MAX_PROBLEMS = 4  # of a rank, printed
MAX_LISTED = 24  # collectives of a step, printed
UNKNOWN = (
    "a rehearsal cannot show: speed, the numbers and faults of CUDA kernels, NCCL itself, fragmentation, memory of "
    "libraries (about 1 to 2 GiB), CUDA graphs, drivers"
)
logger = get_logger("pipeline.rehearse")


class RehearsalError(TrainingError):
    """A rank of the job did not finish its steps."""

    code = "rehearsal"


@dataclass
class Rehearsal:
    """The results: one record for each rank, in the form that rehearsal.rank writes."""

    job: RehearseJob
    made_up: bool  # there was no data set
    ranks: list[dict[str, Any]] = field(default_factory=list)


def check_job(job: RehearseJob) -> None:
    """Raise UserError for mistakes that are visible without torch."""
    if job.hardware.compute_device == "cpu":
        raise TrainingError(
            f"hardware={job.hardware.name} has no GPU: rehearse with hardware=h100_80gb or another card"
        )
    check_geometry(job, job.world_size)
    if storage.is_file(storage.join(job.data.path, "dataset.json")):
        validate_job(job, job.world_size)


def rehearse(job: RehearseJob) -> Rehearsal:
    """Run each rank in a separate process. Rank 0 is first; other ranks get its broadcasts.

    Raises UserError if a rank ended with a UserError. Otherwise raises RehearsalError with the end
    of the rank's output.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        tried, made_up = _tried_job(job, folder)
        result = Rehearsal(job, made_up)
        for rank in sorted({0, *job.ranks}):
            logger.info("rank %d of %d", rank, job.world_size)
            result.ranks.append(_run_rank(tried, job.timeout_s, rank, Path(folder)))
    if job.output:
        storage.publish_text(job.output, json.dumps({"ranks": result.ranks, "made_up_data": made_up}, indent=1))
    return result


def _tried_job(job: RehearseJob, folder: str) -> tuple[TrainJob, bool]:
    """Return the job for a few steps in `folder`, and True if its data set was generated there."""
    trainer = replace(
        job.trainer, max_steps=job.steps, epochs=1, evaluate_max_batches=1, evaluate_every_steps=0,
        evaluate_every_epochs=0, log_every_steps=1, hooks=[*job.trainer.hooks, "rehearsal"],
    )  # fmt: skip
    # Any plan is sufficient. `plan` searches longer, and planner=file uses its result.
    planner = replace(job.planner, timeout_s=min(job.planner.timeout_s, MAX_SEARCH_S))
    plain = TrainJob(**{each.name: getattr(job, each.name) for each in fields(TrainJob)})
    tried = replace(
        plain, run_dir=f"{folder}/run", trainer=trainer, planner=planner, profile=None, warm_start=None,
        checkpoint=replace(job.checkpoint, save_every_steps=0, save_every_minutes=None, sign_key=None),
        logger=LoggerConfig(tensorboard=False, report=False), publishing=PublishingConfig(),
    )  # fmt: skip
    if storage.is_file(storage.join(job.data.path, "dataset.json")):
        return tried, False
    from pipeline.extras.shadow.rehearsal.stand_in import write_stand_in

    batch = max(trainer.evaluate_batch_size or 0, trainer.global_batch_size)
    rows = {"train": job.steps * trainer.global_batch_size, "validation": batch}
    write_stand_in(load_or_describe(job), f"{folder}/data", rows)
    return replace(tried, data=replace(job.data, path=f"{folder}/data")), True


def _run_rank(job: TrainJob, timeout_s: float, rank: int, folder: Path) -> dict[str, Any]:
    saved, found, log = folder / "job.yaml", folder / f"rank{rank}.json", folder / f"rank{rank}.log"
    saved.write_text(job_to_yaml(job))
    if os.path.exists(job.run_dir):  # of the previous rank; each rank starts the run again
        os.rename(job.run_dir, f"{job.run_dir}.before_{rank}")
    words = [sys.executable, "-m", "pipeline.extras.shadow.rehearsal.rank", str(saved), str(rank), str(folder)]
    environ = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    with log.open("w") as out:
        try:
            subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                           env=environ, timeout=timeout_s, check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RehearsalError(f"rank {rank} took more than timeout_s={timeout_s:g}; {_end_of(log)}") from None
    record: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    if error := record.get("user_error"):
        raise RehearsalError(f"rank {rank}: {error}")
    if not record or record.get("error"):
        raise RehearsalError(f"rank {rank} failed: {record.get('error', 'its process ended')}\n{_end_of(log)}")
    return record


def _end_of(log: Path) -> str:
    return "\n".join(["it printed:", *log.read_text(errors="replace").splitlines()[-15:]])


def describe(result: Rehearsal) -> str:
    """Return the rehearsal as text for a terminal."""
    job, first = result.job, result.ranks[0]
    data = "generated rows, because there is no data set here" if result.made_up else job.data.path
    lines = [
        f"rehearsed   {len(result.ranks)} of {job.world_size} ranks of {job.hardware.name}, {job.steps} steps on {data}"
    ]
    for record in result.ranks:
        parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in record["memory"].items() if size)
        lines.append(
            f"rank {record['rank']:<6} started; memory peak {show_bytes(record['peak_bytes'])} of "
            f"{show_bytes(record['card_bytes'])}: {parts}"
        )
        if record["not_saved_bytes"]:
            lines.append(
                f"  saved     all except {show_bytes(record['not_saved_bytes'])} of tables that were reserved only"
            )
        problems = record["problems"]
        for each in problems[:MAX_PROBLEMS]:
            lines.append(f"  problem   {each['kind']} at {each['place']} ({each['count']}x): {each['text']}")
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"  and {len(problems) - MAX_PROBLEMS} more; output=FILE has all")
    counts = first["step"]
    lines.append(
        f"a step      {counts['launches']:,} launches, {counts['syncs']} host syncs, "
        f"{counts['copies']} copies between host and device ({show_bytes(counts['copied_bytes'])})"
    )
    lines += [f"  sync      {place} ({count}x)" for place, count in first["step_syncs"].items()]
    lines += _collectives(first["collectives"])
    different = [record["rank"] for record in result.ranks[1:] if record["order"] != first["order"]]
    if len(result.ranks) > 1:
        same = f"NOT the same on rank(s) {different}" if different else "the same on all of them"
        lines.append(f"order       of {len(first['order'])} collectives: {same}")
    return "\n".join([*lines, f"not known   {UNKNOWN}"])


def _collectives(step: list[dict[str, Any]]) -> list[str]:
    """List the collectives of the last step in their order. Equal neighbours share one line."""
    runs: list[list[dict[str, Any]]] = []
    for each in step:
        key = (each["op"], len(each["ranks"]))
        if runs and (runs[-1][0]["op"], len(runs[-1][0]["ranks"])) == key:
            runs[-1].append(each)
        else:
            runs.append([each])
    total = sum(each["bytes"] for each in step)
    lines = [f"collectives {len(step)} per step, {show_bytes(total)} of this rank, in this order:"]
    for run in runs[:MAX_LISTED]:
        size = show_bytes(sum(each["bytes"] for each in run))
        lines.append(
            f"  {len(run):>3} x {run[0]['op']:<24} {size:>12}  {len(run[0]['ranks'])} ranks  {run[0]['place']}"
        )
    return lines + ([f"  and {len(runs) - MAX_LISTED} more"] if len(runs) > MAX_LISTED else [])
