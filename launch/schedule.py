"""Print what runs a job regularly: a CronJob, or a line for Slurm's scrontab or for crontab:

    python -m launch.schedule kubernetes|slurm|cron --cron "0 * * * *" [flags] -- experiment=... key=value

The job is `retrain` unless --verb names another verb.
"""

from __future__ import annotations

import argparse
import zoneinfo
from dataclasses import dataclass
from typing import Optional

from launch.cron import parse_cron
from launch.kubernetes import headless_service
from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import JOB_NAME, job_spec, metadata, pod_template
from launch.manifest import given, of_kind, patched, to_yaml
from launch.options import main_of, option, parse_job
from launch.targets import Target, register, registered
from launch.workload import WORKLOADS, Where, Workload, check_one_task, make_workload
from pipeline.cli.command_line import print_user_errors
from pipeline.runtime.errors import LaunchError, check_at_least, check_choice, check_within, did_you_mean

CONCURRENCY = ("Forbid", "Replace")
# The controller checks every 10 s. If 100 starts were missed in this time, it would never start one
# again.
START_WITHIN_S = (10, 5940)


@dataclass(frozen=True)
class CronJobOptions(KubernetesOptions):
    time_zone: Optional[str] = option(None, "time zone of the expression, such as Europe/Berlin; "
                                            "default: the control plane's, often UTC")  # fmt: skip
    concurrency: str = option("Forbid", "Forbid: a run waits for the previous run; Replace: it ends the previous run")
    start_within_s: int = option(
        600, "seconds by which a run may be late, while another run is active or the cluster is down"
    )
    keep_succeeded: int = option(3, "how many finished runs stay visible")
    keep_failed: int = option(3, "how many failed runs stay visible")
    deadline_s: int = option(86400, "seconds after which a run is ended, because it delays later runs; 0: never")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("--concurrency", self.concurrency, CONCURRENCY)
        check_within("--start-within-s", self.start_within_s, *START_WITHIN_S)
        check_at_least("--keep-succeeded", self.keep_succeeded, 0)
        check_at_least("--keep-failed", self.keep_failed, 0)
        known = zoneinfo.available_timezones()  # empty if the system has no list
        if self.time_zone is not None and known and self.time_zone not in known:
            raise LaunchError(f"--time-zone {self.time_zone} is not a time zone{did_you_mean(self.time_zone, known)}")
        if self.attempt or self.owner:
            raise LaunchError("a CronJob names its Jobs: remove --attempt and --owner")
        if self.kind != "job":
            raise LaunchError(f"--kind {self.kind}: a CronJob makes only Jobs; remove --kind")


def render_cronjob(workload: Workload, cron: str, options: CronJobOptions) -> str:
    """Return YAML for `kubectl apply -f -`. Raises LaunchError."""
    many = workload.nodes > 1
    head = f"{JOB_NAME}-0.{workload.name}" if many else "localhost"
    template = pod_template(workload, options, head, workload.name if many else "")
    spec = {
        "schedule": cron,
        **given(timeZone=options.time_zone),
        "concurrencyPolicy": options.concurrency,
        "startingDeadlineSeconds": options.start_within_s,
        "successfulJobsHistoryLimit": options.keep_succeeded,
        "failedJobsHistoryLimit": options.keep_failed,
        "jobTemplate": {
            "metadata": {"labels": metadata(workload, options, queued=True)["labels"]},
            "spec": job_spec(workload, options, template),
        },
    }
    job = of_kind("batch/v1", "CronJob", metadata(workload, options), spec)
    comment = f"{workload.verb} at {cron}, {options.time_zone or 'in the time zone of the control plane'}."
    objects = [headless_service(workload, options), job] if many else [job]
    return to_yaml(patched(objects, options.patch), comment)


register("schedule", "kubernetes", Target(CronJobOptions, render_cronjob))


@dataclass(frozen=True)
class Tick:
    """A verb and the cron expression of its runs. Raises LaunchError if no scheduler accepts the expression."""

    cron: str = option("", 'when: "0 * * * *", or @hourly, @daily, @weekly, @monthly')
    verb: str = option("retrain", f"the verb to run: {', '.join(WORKLOADS)}")

    def __post_init__(self) -> None:
        if not self.cron:
            raise LaunchError('give --cron, for instance --cron "0 * * * *"')
        check_choice("--verb", self.verb, WORKLOADS)
        object.__setattr__(self, "cron", parse_cron(self.cron))


def schedule(target: str, argv: list[str]) -> str:
    """Return the text for the command line's words after the target. --help and errors end the process."""
    kind = registered("schedule")[target].options
    parser = argparse.ArgumentParser(
        prog=f"python -m launch.schedule {target}", allow_abbrev=False,
        usage='%(prog)s --cron "0 * * * *" [flags] -- key=value ...', description=(__doc__ or "").splitlines()[0],
    )  # fmt: skip
    kinds = {"the tick": Tick, "the job": Where, target: kind}
    typed, overrides, (tick, where, options) = parse_job(parser, argv, kinds)
    workload = make_workload(tick.verb, __doc__, overrides, where, typed.check_data)
    with print_user_errors():
        if workload.is_elastic:
            check_one_task(workload, "launch.schedule")
        return str(registered("schedule")[target].render(workload, tick.cron, options))


def main() -> None:
    main_of(__doc__ or "", "the scheduler", registered("schedule"), schedule)


if __name__ == "__main__":
    main()
