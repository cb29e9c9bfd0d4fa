"""Plan how embedding tables are sharded:  python -m pipeline plan experiment=quickstart world_size=2

For hardware that is not here:            python -m pipeline plan experiment=... hardware=h100_80gb world_size=64
With the step predicted for more ranks:   python -m pipeline plan experiment=... hardware=h100_80gb world_size=[8,16,32,64]
With settings changed one by one:         python -m pipeline plan experiment=... what_if=true
The smallest of conf/hardware for a rate: python -m pipeline plan experiment=... target.epochs_per_day=1
The plan is written to planner.plan_file, with a page of charts next to it. Training with planner=file uses it.
Without a data set, tables must set num_embeddings.

    python -m pipeline plan show FILE                  describe a plan file
    python -m pipeline plan diff A B                   show what moved from plan A to plan B, and its cost
    python -m pipeline plan check FILE experiment=...  check that it is valid for a job (exit code 0, else 1)
"""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from functools import partial

import yaml

import pipeline
from pipeline.cli.command_line import Arguments, Command, parse_command_line, validate_train
from pipeline.cli.compose import config_folders
from pipeline.cli.verb import verb
from pipeline.config.jobs.train import PlanJob
from pipeline.config.planner import HardwareConfig
from pipeline.runtime.errors import ConfigError, check_choice
from pipeline.runtime.logs import configure_logging, get_logger
from pipeline.runtime.masking import mask
from pipeline.runtime.process.stdout import write_out
from pipeline.training.plan_job import PlanSummary, check, diff, plan_job, show

STALE = 1  # exit code of check
# settings that training does not know
ONLY_FOR_PLANS = ("planner=", "brief=", "target.", "scale_to=", "what_if=", "threads=")
logger = get_logger("pipeline.plan")  # as a command, __name__ is different


def _made() -> str:
    """Return time and command, without credentials, for the foot of the page."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{when} by `{mask(shlex.join(['python', *sys.orig_argv[1:]]))}`, pipeline {pipeline.__version__}"


def plan(job: PlanJob) -> PlanSummary:
    """Plan the job with the hardware of this machine. Raises as plan_job does."""
    return plan_job(job, partial(_hardware_to_try, job), _made())


def _hardware_to_try(job: PlanJob) -> dict[str, HardwareConfig]:
    """Return target.hardware; or the job's hardware and the options of conf/hardware that can be
    predicted. An option can be predicted if it has a calibration, or states peaks and memory."""
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


def train_command(summary: PlanSummary, overrides: list[str]) -> str:
    """Return the training command that uses the plan, with the overrides of this command."""
    kept = [shlex.quote(word) for word in overrides if not word.startswith(ONLY_FOR_PLANS)]
    # use the found hardware instead of the target
    if any(word.startswith("target.") for word in overrides):
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
    """Replace world_size=[8,16,32] by a plan for 8 ranks and predictions for the other sizes."""
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
