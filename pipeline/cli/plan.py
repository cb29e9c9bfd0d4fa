"""Plan how embedding tables are sharded:  python -m pipeline plan experiment=quickstart world_size=2

The hardware need not be at hand:  python -m pipeline plan experiment=... hardware=h100_80gb world_size=64
With its step predicted for more ranks:   python -m pipeline plan experiment=... hardware=h100_80gb world_size=[8,16,32,64]
With settings changed one by one:         python -m pipeline plan experiment=... what_if=true
The smallest of conf/hardware for a rate:  python -m pipeline plan experiment=... target.epochs_per_day=1
The plan goes to planner.plan_file, a page with its pictures beside it, and training with planner=file uses it.
Where the data set is absent, tables that say their num_embeddings are enough.

    python -m pipeline plan show FILE                  what a plan file says
    python -m pipeline plan diff A B                   what moved from plan A to plan B, and what it costs
    python -m pipeline plan check FILE experiment=...  whether it still holds for a job (exit code 0, else 1)
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

import pipeline
from pipeline.cli.arguments import Arguments, Command
from pipeline.cli.command_line import parse_command_line, validate_train
from pipeline.cli.compose import config_folders
from pipeline.cli.verb import verb
from pipeline.config.jobs.train import PlanJob
from pipeline.config.planner import HardwareConfig
from pipeline.config.registry import from_extra, if_installed
from pipeline.data.dataset import check_multi_hot
from pipeline.embeddings.table import Table
from pipeline.planner.resolved_job import SPLIT_KEY, ResolvedJob, resolve_job
from pipeline.runtime.errors import ConfigError, check_choice
from pipeline.runtime.logs import configure_logging, get_logger
from pipeline.runtime.masking import mask
from pipeline.runtime.process.stdout import write_out
from pipeline.runtime.storage import storage
from pipeline.sharding.compat import allow_untested_versions
from pipeline.training.preflight import check_resolved, load_or_describe

if TYPE_CHECKING:
    from pipeline.planner.request import PlannedJob, PlanRequest

STALE = 1  # exit code of check
FOR_PLANS_ALONE = ("planner=", "brief=", "target.", "scale_to=", "what_if=", "threads=")  # what training does not know
logger = get_logger("pipeline.plan")  # run as a command, __name__ is another


@dataclass
class PlanSummary:
    plan_file: str
    page: str | None  # None: the plan was read from its file, or the extra `pages` is not installed
    planner: str
    hardware: str
    world_size: int
    ranks_per_host: int
    max_rank_ms: float
    critical_path_ms: float
    seconds: float
    explanation: str
    forecast: str = ""  # what the step is predicted to take, or why it is not


def _made() -> str:
    """When and by which command, without credentials, for the foot of the page."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{when} by `{mask(shlex.join(['python', *sys.orig_argv[1:]]))}`, pipeline {pipeline.__version__}"


def plan(job: PlanJob) -> PlanSummary:
    """Build the model on meta, plan for `world_size` ranks of `hardware`, and write planner.plan_file and its page.

    Raises:
        ConfigError: no plan holds the tables, or the job does not fit the data or the number of ranks.
    """
    started = time.monotonic()
    found: list[str] = []
    if job.target.is_set:
        train = load_or_describe(job).splits.get("train")
        samples = train.num_rows if train else None
        reach_target = from_extra("reach_target", "target")
        job, found = reach_target(job, samples, _hardware_to_try(job), prepare)
    resolved = resolve(job)
    _say_without_data(resolved)
    if job.planner.kind != "file":
        _check_writable(job.planner.plan_file)
    request = build_request(resolved)
    # Imported here, for a mistake in the job must fail before torch is loaded.
    from pipeline.embeddings.describe import describe_savings, savings_of
    from pipeline.planner.explain import explain, summarize
    from pipeline.planner.plan_codec import write_plan
    from pipeline.planner.planner import make_plan
    from pipeline.planner.request import PlannedJob

    record = make_plan(job.planner, request)
    planned = PlannedJob(resolved, request, record)
    lines, forecasts, in_tiers = _predict(job, planned) if job.planner.predict_step else ([], [], [])
    page = None
    if job.planner.kind != "file":
        write_plan(job.planner.plan_file, record)
        if write_page := if_installed("write_plan_page"):
            title = f"{job.name} on {job.world_size} x {record.hardware}"
            page = write_page(job.planner.plan_file, title, record, _made(), forecasts, in_tiers)
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
        explanation="\n".join(
            [summarize(record) if job.brief else explain(record), *describe_savings(savings_of(resolved.tables))]
        ),
        forecast="\n".join([*found, *([""] if found else []), *lines]),
    )


def _check_writable(path: str) -> None:
    """Raises OSError before a search that may take minutes."""
    if not storage.is_local(path):
        return
    try:
        os.makedirs(storage.dirname(path) or ".", exist_ok=True)
        with tempfile.TemporaryFile(dir=storage.dirname(path) or "."):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _hardware_to_try(job: PlanJob) -> dict[str, HardwareConfig]:
    """target.hardware, or the options of conf/hardware and the job's own that have a calibration, or state peaks and memory."""
    files = {file.stem: file for file in sorted(config_folders()[0].glob("hardware/*.yaml"))}
    for name in job.target.hardware:
        if name != job.hardware.name:
            check_choice("target.hardware", name, files.keys())
    found = {name: HardwareConfig(**yaml.safe_load(file.read_text())) for name, file in files.items()}
    found[job.hardware.name] = job.hardware
    if job.target.hardware:
        return {name: found[name] for name in job.target.hardware}
    usable = {
        name: option
        for name, option in found.items()
        if option.calibration or (option.tflops_fp32 and option.tflops_bf16 and option.ddr_cap_gb)
    }
    if not usable:
        raise ConfigError(
            "no option of conf/hardware states tflops_fp32 and tflops_bf16: name some by target.hardware=[...]"
        )
    return usable


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
    """The job with its tables, and what a plan is made for."""
    resolved = resolve(job)
    return resolved, build_request(resolved)


def resolve(job: PlanJob) -> ResolvedJob:
    """The job with its tables, checked against the data set, or against the config where that is absent."""

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
    """Where there is no data set: what was assumed instead."""
    dataset = resolved.dataset
    if not dataset.splits:
        logger.info(
            "no data set at %s: planned from the config alone, %d features, %g ids a sample, lookups assumed even over rows",
            resolved.job.data.path,
            len(dataset.sparse_features),
            sum(sum(table.pooling_factors) for table in resolved.tables),
        )


def build_request(resolved: ResolvedJob) -> PlanRequest:
    """The model on meta, its tables and hardware."""
    if resolved.job.sharding.allow_untested_versions:
        allow_untested_versions()
    from pipeline.planner.constraints import TableOptimizer
    from pipeline.planner.hardware import resolve_hardware
    from pipeline.planner.request import PlanRequest, cost_of_steps
    from pipeline.sharding.torchrec.sharding import make_sharders
    from pipeline.training.build import build_task

    job = resolved.job
    hardware = resolve_hardware(job.hardware, job.world_size)
    if job.parallel.has_replicas:  # a host's ranks hold all tables
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
    """What the plan file at `path` says. Raises ConfigError where there is none, or none that can be read."""
    from pipeline.planner.explain import explain
    from pipeline.planner.fingerprint import describe_hosts
    from pipeline.planner.plan_file import read_view

    description = read_view(path).description
    topology, sparse = (description.fingerprint[key] for key in ("topology", "sparse_optimizer"))
    return (
        f"{path}: {len(description.tables)} tables on {topology['world_size']} rank(s) of {description.hardware}, "
        f"{describe_hosts(topology)}, batch {description.fingerprint['batch_size']} a rank, "
        f"{sparse['name']}; by {description.planner}\n\n{explain(description)}"
    )


def diff(a: str, b: str) -> str:
    """What moved from the plan in file `a` to that in `b`. Raises ConfigError as `show`."""
    from pipeline.planner.plan_file import read_view

    compare: Callable[..., str] = from_extra("compare_plans", "plan diff")
    return compare(read_view(a).description, read_view(b).description)


def check(path: str, job: PlanJob) -> list[str]:
    """Why the plan in `path` does not hold for the job; empty where it does. Raises ConfigError as `show` and `plan`."""
    from pipeline.planner.plan_file import COMMAND, find_plan_file

    found = find_plan_file(path, COMMAND)
    request = build_request(resolve(job))
    from pipeline.planner.plan_codec import read_plan
    from pipeline.planner.planner import explain_misfit

    return explain_misfit(read_plan(found), job.planner, request)


def train_command(summary: PlanSummary, overrides: list[str]) -> str:
    """The training that replays the plan, with the overrides that it was made with."""
    kept = [shlex.quote(word) for word in overrides if not word.startswith(FOR_PLANS_ALONE)]
    if any(word.startswith("target.") for word in overrides):  # what was found stands for what was asked
        kept = [word for word in kept if not word.startswith(("hardware=", "world_size="))]
        kept.append(f"hardware={summary.hardware}")
    arguments = " ".join([*kept, "planner=file"])
    if summary.world_size == 1:
        return f"python -m pipeline train {arguments}"
    hosts = summary.world_size // summary.ranks_per_host
    scheduler = "local_cwd" if hosts == 1 else "<scheduler>"
    return f"torchx run -s {scheduler} pipeline.train -j {hosts}x{summary.ranks_per_host} -- {arguments}"


def describe(summary: PlanSummary) -> str:
    lines = [
        summary.explanation + ("\n" if "\n" in summary.explanation else ""),
        *([summary.forecast + ("\n" if "\n\n" in summary.forecast else "")] if summary.forecast else []),
        f"plan        {summary.plan_file} ({summary.planner}, {summary.world_size} rank(s) of {summary.hardware}, "
        f"{summary.seconds:.1f} s)",
        *([f"pictures    {summary.page}"] if summary.page else []),
        f"next        {train_command(summary, sys.argv[1:])}",
    ]
    return "\n".join(lines)


def _show(words: Arguments) -> None:
    write_out(show(words.values["file"]))


def _diff(words: Arguments) -> None:
    write_out(diff(words.values["a"], words.values["b"]))


def _check(words: Arguments) -> None:
    job = parse_command_line(PlanJob, __doc__, words.remaining())
    configure_logging()
    path = words.values["file"]
    if lines := check(path, job):
        print(f"{path} does not hold for this job:", *(f"  {line}" for line in lines), sep="\n")
        sys.exit(STALE)
    print(f"{path} holds for this job")


COMMANDS = (
    Command("make"),
    Command("show", ("file",), run=_show),
    Command("diff", ("a", "b"), run=_diff),
    Command("check", ("file",), run=_check),
)
_main = verb(
    "plan", PlanJob, describe=describe, validate=validate_train, commands=COMMANDS, default="make",
    written_to=lambda job: job.planner.plan_file,
)(plan)  # fmt: skip


def with_sizes(words: list[str]) -> list[str]:
    """world_size=[8,16,32] is a plan for 8 ranks, and predictions for the others."""
    found = []
    for word in words:
        name, _, value = word.partition("=")
        sizes = value.strip("[]").split(",")
        if name == "world_size" and value.startswith("[") and all(size.strip().isdigit() for size in sizes):
            first, *others = sorted(int(size) for size in sizes)
            found += [f"world_size={first}", f"scale_to=[{','.join(map(str, others))}]"]
        else:
            found.append(word)
    return found


def main() -> None:
    sys.argv[1:] = with_sizes(sys.argv[1:])
    _main()


main.verb = _main.verb  # type: ignore[attr-defined]
