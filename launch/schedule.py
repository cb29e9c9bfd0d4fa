"""Print what runs a job again and again: a CronJob, a line for Slurm's scrontab or for crontab:

python -m launch.schedule kubernetes|slurm|cron --cron "0 * * * *" [flags] -- experiment=... key=value

The job is `retrain` unless --verb says otherwise; it is composed and validated as the TorchX components do it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.cron import parse_cron
from launch.crontab import CrontabOptions, ScrontabOptions, render_crontab, render_scrontab
from launch.kubernetes_cronjob import CronJobOptions, render_cronjob
from launch.options import from_flags, option, parse_job
from launch.workload import WORKLOADS, Where, Workload, check_one_task, make_workload
from pipeline.cli.command_line import print_user_errors
from pipeline.runtime.errors import LaunchError, check_choice

TARGETS: dict[str, tuple[type, Callable[[Workload, str, Any], str]]] = {
    "kubernetes": (CronJobOptions, render_cronjob),
    "slurm": (ScrontabOptions, render_scrontab),
    "cron": (CrontabOptions, render_crontab),
}


@dataclass(frozen=True)
class Tick:
    """What is run, and when. Raises LaunchError for an expression that no scheduler would take."""

    cron: str = option("", 'when: "0 * * * *", or @hourly, @daily, @weekly, @monthly')
    verb: str = option("retrain", f"what is run: {', '.join(WORKLOADS)}")

    def __post_init__(self) -> None:
        if not self.cron:
            raise LaunchError('--cron is needed, for instance --cron "0 * * * *"')
        check_choice("--verb", self.verb, WORKLOADS)
        object.__setattr__(self, "cron", parse_cron(self.cron))


def schedule(target: str, argv: list[str]) -> str:
    """The text for the words behind the target; --help and errors end the process as in every verb."""
    kind, render_with = TARGETS[target]
    parser = argparse.ArgumentParser(
        prog=f"python -m launch.schedule {target}", allow_abbrev=False,
        usage='%(prog)s --cron "0 * * * *" [flags] -- key=value ...', description=(__doc__ or "").splitlines()[0],
    )  # fmt: skip
    typed, overrides = parse_job(parser, argv, {"the tick": Tick, "the job": Where, target: kind})
    with print_user_errors():
        tick = from_flags(Tick, typed)
        options: Any = from_flags(kind, typed)
        where = from_flags(Where, typed)
    workload = make_workload(tick.verb, __doc__, overrides, where, typed.check_data)
    with print_user_errors():
        if workload.is_elastic:
            check_one_task(workload, "launch.schedule")
        return render_with(workload, tick.cron, options)


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] and argv[0] in TARGETS:
        print(schedule(argv[0], argv[1:]), end="")
        return
    if argv[:1] and not argv[0].startswith("-"):
        with print_user_errors():
            check_choice("the scheduler", argv[0], TARGETS)
    asked = argv[:1] in (["-h"], ["--help"])
    print((__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)


if __name__ == "__main__":
    main()
