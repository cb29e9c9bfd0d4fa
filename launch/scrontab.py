"""Render a Workload and a cron expression as a line for Slurm's scrontab, with its queueing options.

Slurm submits a line's next tick once the one before has ended: two never run at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Optional

from launch.options import option
from launch.slurm import SlurmOptions, environment, meeting_lines, placed, sbatch_lines, srun_words
from launch.workload import Workload
from pipeline.runtime.errors import LaunchError

NOT_OF_A_TICK = ("--requeue", "--no-requeue")  # a tick that fails is followed by the next one


@dataclass(frozen=True)
class ScrontabOptions(SlurmOptions):
    """What scrontab takes beside what sbatch does."""

    folder: Optional[str] = option(None, "folder to run in, on every node; else this one")


def render_scrontab(workload: Workload, cron: str, options: ScrontabOptions) -> str:
    """A comment, #SCRON lines and a line of the crontab. Raises LaunchError for what these cannot hold."""
    workload, folder = placed(workload, options), os.path.abspath(options.folder or ".")
    wanted = [*sbatch_lines(workload, options), f"--chdir={folder}"]
    lines = [line for line in wanted if line not in NOT_OF_A_TICK]
    for line in lines:
        if not line.isprintable() or any(sign in line for sign in " \"'"):
            raise LaunchError(f"{line}: scrontab reads no blanks and no quotes in an option; leave them out")
    command = "; ".join(_steps(workload, options))
    if not command.isprintable():
        raise LaunchError(
            "an override holds a line break or another sign that a crontab cannot have; put it into an experiment file"
        )
    head = f"# {workload.verb}. The next tick is queued once the one before has ended."
    return "\n".join([head, *(f"#SCRON {line}" for line in lines), f"{cron} {command}"]) + "\n"


def _steps(workload: Workload, options: ScrontabOptions) -> list[str]:
    """The commands of the script that launch.slurm writes, up to srun, which takes the shell's place."""
    script = "\n".join([*environment(workload, options), *meeting_lines(workload)]).splitlines()
    steps = [line.partition("  # ")[0] for line in script]
    return [*steps, "exec " + " ".join(srun_words(workload))]
