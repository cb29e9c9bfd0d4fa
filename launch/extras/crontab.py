"""Render a Workload and a cron expression as a line for crontab (a folder, a lock, a log file) or for Slurm's scrontab.

Slurm submits a line's next tick once the one before has ended: two never run at once.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Optional

from launch.options import option
from launch.resources import this_host
from launch.slurm import SlurmOptions, environment, meeting_lines, placed, sbatch_lines, srun_words
from launch.targets import Target, register
from launch.workload import Workload
from pipeline.runtime.errors import LaunchError

LONGEST_COMMAND = 998  # Vixie cron's, Debian's too


@dataclass(frozen=True)
class CrontabOptions:
    """What a line of a crontab needs beside the command; cron itself knows neither folder nor log nor lock."""

    folder: Optional[str] = option(None, "folder to run in; else this one")
    log: Optional[str] = option(None, "file that the output is appended to; else logs/<name>.log in the folder")


def render_crontab(workload: Workload, cron: str, options: CrontabOptions) -> str:
    """A comment and a line. Raises LaunchError for what cron cannot run."""
    if workload.nodes > 1:
        raise LaunchError(f"-j {workload.shape}: cron starts a job on its own host, one node; take slurm or kubernetes")  # fmt: skip
    if workload.image or workload.mounts:
        raise LaunchError("--image and --mount: cron starts no container; leave them out, or write the line by hand")
    folder = os.path.abspath(options.folder or ".")
    log = options.log or f"logs/{workload.name}.log"
    command = _command(workload, folder, log)
    _check_printable(command)
    if "\\" in command:
        raise LaunchError("an override holds a backslash, which crons read differently; put it into an experiment file")
    # A bare % is a line break to cron, and what follows it goes to stdin.
    line = command.replace("%", r"\%")
    if len(line) > LONGEST_COMMAND:
        raise LaunchError(
            f"the command has {len(line)} characters and cron takes {LONGEST_COMMAND}; put overrides into an experiment file"
        )
    return f"# {workload.verb}. A tick that finds another one running does nothing.\n{cron} {line}\n"


def _command(workload: Workload, folder: str, log: str) -> str:
    log_folder, lock = os.path.dirname(log), f"{log}.lock"
    env = workload.whole_env(this_host().cpu)
    steps = [f"cd {shlex.quote(folder)}"]
    if log_folder:
        steps.append(f"mkdir -p {shlex.quote(log_folder)}")
    words = ["env", *(f"{name}={shlex.quote(value)}" for name, value in env.items())] if env else []
    run = " ".join([*words, workload.shell_line("localhost", workload.name)])
    steps.append(f"flock --nonblock --conflict-exit-code 0 {shlex.quote(lock)} {run} >> {shlex.quote(log)} 2>&1")
    return " && ".join(steps)


NOT_OF_A_TICK = ("--requeue", "--no-requeue")  # a tick that fails is followed by the next one


@dataclass(frozen=True)
class ScrontabOptions(SlurmOptions):
    """Options of scrontab in addition to those of sbatch."""

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
    _check_printable(command)
    head = f"# {workload.verb}. The next tick is queued once the one before has ended."
    return "\n".join([head, *(f"#SCRON {line}" for line in lines), f"{cron} {command}"]) + "\n"


def _steps(workload: Workload, options: ScrontabOptions) -> list[str]:
    """The commands of the script that launch.slurm writes, up to srun, which takes the shell's place."""
    script = "\n".join([*environment(workload, options), *meeting_lines(workload)]).splitlines()
    steps = [line.partition("  # ")[0] for line in script]
    return [*steps, "exec " + " ".join(srun_words(workload))]


def _check_printable(command: str) -> None:
    if not command.isprintable():
        raise LaunchError(
            "an override holds a line break or another sign that a crontab cannot have; put it into an experiment file"
        )


register("schedule", "slurm", Target(ScrontabOptions, render_scrontab))
register("schedule", "cron", Target(CrontabOptions, render_crontab))
