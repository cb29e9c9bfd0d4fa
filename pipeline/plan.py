"""Plan how tables are sharded:  python -m pipeline.plan experiment=quickstart world_size=2

The hardware need not be at hand:  python -m pipeline.plan experiment=... hardware=h100_80gb world_size=64
The plan goes to planner.plan_file, and training with planner=file uses it.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass

from pipeline.config import PlanJob, run_verb
from pipeline.data.dataset import load_dataset
from pipeline.preflight import validate_job


@dataclass
class PlanSummary:
    plan_file: str
    planner: str
    hardware: str
    world_size: int
    local_world_size: int
    max_rank_ms: float
    critical_path_ms: float
    seconds: float
    explanation: str


def plan(job: PlanJob) -> PlanSummary:
    """Build the model on meta, plan for `world_size` ranks of `hardware`, and write planner.plan_file.

    Raises:
        ValueError: no plan holds the tables, or the job does not fit the data or the number of ranks.
    """
    started = time.monotonic()
    tables = validate_job(job, job.world_size)
    # Imported here, for a mistake in the job must be told before torch is loaded.
    from pipeline.assembly import build_task
    from pipeline.planner.constraints import TableOptimizer
    from pipeline.planner.explain import explain
    from pipeline.planner.hardware import resolve_hardware
    from pipeline.planner.planfile import write_plan
    from pipeline.planner.planner import PlanRequest, make_plan
    from pipeline.training.sharding import make_sharders

    hardware = resolve_hardware(job.hardware, job.world_size)
    task = build_task(job, tables, load_dataset(job.data.path))
    request = PlanRequest(
        tables=tables,
        model=task,
        sharders=make_sharders(job.comms, job.trainer.seed),
        hardware=hardware,
        optimizer=TableOptimizer(job.optimizer.sparse.name, job.optimizer.sparse.weight_decay),
        batch_size=job.trainer.global_batch_size // job.world_size,
    )
    record = make_plan(job.planner, request)
    if job.planner.kind != "file":
        write_plan(job.planner.plan_file, record)
    return PlanSummary(
        plan_file=job.planner.plan_file,
        planner=record.planner,
        hardware=hardware.name,
        world_size=hardware.world_size,
        local_world_size=hardware.local_world_size,
        max_rank_ms=record.objective.max_rank_ms,
        critical_path_ms=record.objective.critical_path_ms,
        seconds=time.monotonic() - started,
        explanation=explain(record),
    )


def train_command(summary: PlanSummary, overrides: list[str]) -> str:
    """The training that replays the plan, with the overrides that it was made with."""
    kept = [shlex.quote(word) for word in overrides if not word.startswith("planner=")]
    arguments = " ".join([*kept, "planner=file"])
    if summary.world_size == 1:
        return f"python -m pipeline.train {arguments}"
    hosts = summary.world_size // summary.local_world_size
    scheduler = "local_cwd" if hosts == 1 else "<scheduler>"
    return f"torchx run -s {scheduler} pipeline.train -j {hosts}x{summary.local_world_size} -- {arguments}"


def describe(summary: PlanSummary) -> str:
    return (
        f"{summary.explanation}\n\n"
        f"plan        {summary.plan_file} ({summary.planner}, {summary.world_size} rank(s) of {summary.hardware}, "
        f"{summary.seconds:.1f} s)\n"
        f"next        {train_command(summary, sys.argv[1:])}"
    )


if __name__ == "__main__":
    run_verb(PlanJob, plan, __doc__, describe)
