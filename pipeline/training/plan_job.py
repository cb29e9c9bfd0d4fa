"""Plan a job without its hardware, for the verb `plan`: search for a plan, predict its step, and
write the file and the page. Importing it does not import torch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.train import PlanJob
from pipeline.config.planner import HardwareConfig
from pipeline.config.registry import from_extra, if_installed
from pipeline.data.dataset import check_multi_hot
from pipeline.embeddings.table import Table
from pipeline.planner.resolved_job import SPLIT_KEY, ResolvedJob, resolve_job
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.sharding.compat import allow_untested_versions
from pipeline.training.preflight import check_resolved, load_or_describe

if TYPE_CHECKING:
    from pipeline.planner.request import PlannedJob, PlanRequest


logger = get_logger("pipeline.plan")


@dataclass
class PlanSummary:
    plan_file: str
    # None if the plan was read from its file, or the extra `pages` is not installed
    page: str | None
    planner: str
    hardware: str
    world_size: int
    ranks_per_host: int
    max_rank_ms: float
    critical_path_ms: float
    seconds: float
    explanation: str
    forecast: str = ""  # the predicted time of a step, or why there is none


def plan_job(job: PlanJob, hardware_options: Callable[[], dict[str, HardwareConfig]], made: str) -> PlanSummary:
    """Build the model on meta, plan for `world_size` ranks of `hardware`, and write
    planner.plan_file and its page. hardware_options: returns the hardware that a target may choose.
    made: time and command, for the page. Raises ConfigError if no plan holds the tables, or the job
    does not fit the data or the number of ranks."""
    started = time.monotonic()
    found: list[str] = []
    if job.target.is_set:
        train = load_or_describe(job).splits.get("train")
        samples = train.num_rows if train else None
        reach_target = from_extra("reach_target", "target")
        job, found = reach_target(job, samples, hardware_options(), prepare)
    resolved = resolve(job)
    _say_without_data(resolved)
    if job.planner.kind != "file":
        _check_writable(job.planner.plan_file)
    request = build_request(resolved)
    # Imported here, so that a mistake in the job fails before torch is loaded.
    from pipeline.planner.explain import explain, summarize
    from pipeline.planner.plan_codec import write_plan
    from pipeline.planner.planner import make_plan
    from pipeline.planner.request import PlannedJob

    record = make_plan(job.planner, request)
    planned = PlannedJob(resolved, request, record)
    lines, forecasts, in_tiers = _predict(job, planned) if job.planner.predict_step else ([], [], [])
    report_savings = if_installed("report_savings")
    savings = report_savings(resolved.tables)[0] if report_savings else []
    page = None
    if job.planner.kind != "file":
        write_plan(job.planner.plan_file, record)
        if write_page := if_installed("write_plan_page"):
            title = f"{job.name} on {job.world_size} x {record.hardware}"
            page = write_page(job.planner.plan_file, title, record, made, forecasts, in_tiers)
    return PlanSummary(
        plan_file=job.planner.plan_file,
        page=page,
        planner=record.planner,
        hardware=record.hardware,
        world_size=request.hardware.world_size,
        ranks_per_host=request.hardware.ranks_per_host,
        max_rank_ms=record.objective.max_rank_ms,
        critical_path_ms=record.objective.critical_path_ms,
        seconds=time.monotonic() - started,
        explanation="\n".join([summarize(record) if job.brief else explain(record), *savings]),
        forecast="\n".join([*found, *([""] if found else []), *lines]),
    )


def _check_writable(path: str) -> None:
    """Raise OSError before a search that may take minutes, if the plan file cannot be written."""
    if not storage.is_local(path):
        return
    try:
        os.makedirs(storage.dirname(path) or ".", exist_ok=True)
        with tempfile.TemporaryFile(dir=storage.dirname(path) or "."):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _predict(job: PlanJob, planned: PlannedJob) -> tuple[list[str], list[Any], list[str]]:
    """Return lines for the terminal, the forecasts for the page, and its lines about tiers."""
    asked = "what_if=true" if job.what_if else "world_size=[...]" if job.scale_to else ""
    foresee = from_extra("foresee", asked) if asked else if_installed("foresee")
    if foresee is None:
        return [], [], []
    found = foresee(job, planned, prepare)
    if not found.forecasts:
        return found.lines, [], []
    in_tiers: list[str] = []
    if any(choice.tiers is not None for choice in planned.record.tables):
        in_tiers = from_extra("tier_outlook", "tables.*.tiers")(job, planned.record, found.forecasts[0].step_ms)
    return found.lines + in_tiers, found.forecasts, in_tiers


def prepare(job: PlanJob) -> tuple[ResolvedJob, PlanRequest]:
    """Return the job with its tables, and the request for a plan."""
    resolved = resolve(job)
    return resolved, build_request(resolved)


def resolve(job: PlanJob) -> ResolvedJob:
    """Return the job with its tables, checked against the data set, or against the config if
    there is none."""

    def choose(tables: list[Table], auto: list[Table]) -> dict[str, int]:
        from pipeline.planner.hardware import available_memory, resolve_hardware  # loads torch

        room = available_memory(job.planner, resolve_hardware(job.hardware, job.world_size))
        choose_heads = from_extra("choose_heads", SPLIT_KEY)
        heads: dict[str, int] = choose_heads(job, tables, auto, dataset, job.world_size, room)
        return heads

    def choose_tiers(whole: ResolvedJob) -> Any:
        from pipeline.planner.hardware import resolve_hardware

        slots_for = from_extra("slots_for", "sharding.tiers=auto")
        return slots_for(whole, resolve_hardware(job.hardware, job.world_size))

    dataset = load_or_describe(job)
    check_multi_hot(dataset, job.data.synthetic_multi_hot)
    resolved = resolve_job(job, dataset, job.world_size, choose, choose_tiers)
    check_resolved(resolved)
    return resolved


def _say_without_data(resolved: ResolvedJob) -> None:
    """Log what was assumed if there is no data set."""
    dataset = resolved.dataset
    if not dataset.splits:
        logger.info(
            "no data set at %s: planned from the config alone, %d features, %g ids a sample, lookups assumed even over rows",
            resolved.job.data.path,
            len(dataset.sparse_features),
            sum(sum(table.pooling_factors) for table in resolved.tables),
        )


def build_request(resolved: ResolvedJob) -> PlanRequest:
    """Build the model on meta and return the request for a plan."""
    if resolved.job.sharding.allow_untested_versions:
        allow_untested_versions()
    from pipeline.planner.hardware import resolve_hardware
    from pipeline.planner.request import PlanRequest, TableOptimizer, cost_of_steps
    from pipeline.sharding.torchrec.sharding import make_sharders
    from pipeline.training.sharded_model import build_task

    job = resolved.job
    hardware = resolve_hardware(job.hardware, job.world_size)
    if job.parallel.has_replicas:  # one host's ranks hold all tables
        hardware = resolve_hardware(job.hardware, hardware.ranks_per_host)
    return PlanRequest(
        tables=resolved.plain_tables,
        model=build_task(resolved, job.hardware.compute_device),
        sharders=make_sharders(job.comms, job.trainer.seed),
        hardware=hardware,
        optimizer=TableOptimizer(job.optimizer.sparse.name, job.optimizer.sparse.weight_decay),
        batch_size=job.trainer.micro_batch_size // job.world_size,
        step_cost=partial(cost_of_steps, resolved),
        calibration=job.hardware.calibration,
    )


def show(path: str) -> str:
    """Describe the plan file at `path`. Raises ConfigError if there is none, or it cannot be
    read."""
    from pipeline.planner.explain import explain
    from pipeline.planner.plan_record import describe_hosts, read_view

    description = read_view(path).description
    topology, sparse = (description.fingerprint[key] for key in ("topology", "sparse_optimizer"))
    return (
        f"{path}: {len(description.tables)} tables on {topology['world_size']} rank(s) of {description.hardware}, "
        f"{describe_hosts(topology)}, batch {description.fingerprint['batch_size']} a rank, "
        f"{sparse['name']}; by {description.planner}\n\n{explain(description)}"
    )


def diff(a: str, b: str) -> str:
    """Describe what moved from the plan in file `a` to the plan in `b`. Raises ConfigError as
    `show` does."""
    from pipeline.planner.plan_record import read_view

    compare: Callable[..., str] = from_extra("compare_plans", "plan diff")
    return compare(read_view(a).description, read_view(b).description)


def check(path: str, job: PlanJob) -> list[str]:
    """Return why the plan in `path` is invalid for the job; [] if it is valid. Raises ConfigError
    as `show` and `plan_job` do."""
    from pipeline.planner.plan_record import COMMAND, find_plan_file

    found = find_plan_file(path, COMMAND)
    request = build_request(resolve(job))
    from pipeline.planner.plan_codec import read_plan
    from pipeline.planner.planner import explain_misfit

    return explain_misfit(read_plan(found), job.planner, request)
