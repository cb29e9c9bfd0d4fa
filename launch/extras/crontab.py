"""Render a Workload as a line for crontab (with folder, lock and log file) or Slurm's scrontab.

Slurm submits the next run of a line when the previous run has ended, so two runs never overlap.
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

LONGEST_COMMAND = 998  # the limit of Vixie cron and Debian's cron


@dataclass(frozen=True)
class CrontabOptions:
    folder: Optional[str] = option(None, "working folder; default: the current folder")
    log: Optional[str] = option(None, "file to append the output to; default: logs/<name>.log in the folder")


def render_crontab(workload: Workload, cron: str, options: CrontabOptions) -> str:
    """Return a comment and a line of the crontab. Raises LaunchError if cron cannot run the job."""
    if workload.nodes > 1:
        raise LaunchError(f"-j {workload.shape}: cron starts a job on one node, the host of cron; "
                          "use slurm or kubernetes")  # fmt: skip
    if workload.image or workload.mounts:
        raise LaunchError("--image and --mount: cron starts no container; remove them, or write the line by hand")
    folder = os.path.abspath(options.folder or ".")
    log = options.log or f"logs/{workload.name}.log"
    command = _command(workload, folder, log)
    _check_printable(command)
    if "\\" in command:
        raise LaunchError(
            "an override contains a backslash, which versions of cron read differently; put it into an experiment file"
        )
    # cron reads a bare % as a line break, and passes the text after it to stdin.
    line = command.replace("%", r"\%")
    if len(line) > LONGEST_COMMAND:
        raise LaunchError(
            f"the command has {len(line)} characters, and cron accepts at most {LONGEST_COMMAND}; "
            "put overrides into an experiment file"
        )
    return f"# {workload.verb}. A run that starts while another run is active does nothing.\n{cron} {line}\n"


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


NOT_OF_A_TICK = ("--requeue", "--no-requeue")  # the next run follows a run that fails


@dataclass(frozen=True)
class ScrontabOptions(SlurmOptions):
    folder: Optional[str] = option(None, "working folder on every node; default: the current folder")


def render_scrontab(workload: Workload, cron: str, options: ScrontabOptions) -> str:
    """Return a comment, #SCRON lines and a line of the crontab. Raises LaunchError."""
    workload, folder = placed(workload, options), os.path.abspath(options.folder or ".")
    wanted = [*sbatch_lines(workload, options), f"--chdir={folder}"]
    lines = [line for line in wanted if line not in NOT_OF_A_TICK]
    for line in lines:
        if not line.isprintable() or any(sign in line for sign in " \"'"):
            raise LaunchError(f"{line}: scrontab supports no blanks and quotes in an option; remove them")
    command = "; ".join(_steps(workload, options))
    _check_printable(command)
    head = f"# {workload.verb}. The next run is queued when the previous run has ended."
    return "\n".join([head, *(f"#SCRON {line}" for line in lines), f"{cron} {command}"]) + "\n"


def _steps(workload: Workload, options: ScrontabOptions) -> list[str]:
    """Return the commands of launch.slurm's script before srun. srun then replaces the shell."""
    script = "\n".join([*environment(workload, options), *meeting_lines(workload)]).splitlines()
    steps = [line.partition("  # ")[0] for line in script]
    return [*steps, "exec " + " ".join(srun_words(workload))]


def _check_printable(command: str) -> None:
    if not command.isprintable():
        raise LaunchError(
            "an override contains a line break or another character that a crontab cannot have; "
            "put it into an experiment file"
        )


register("schedule", "slurm", Target(ScrontabOptions, render_scrontab))
register("schedule", "cron", Target(CrontabOptions, render_crontab))
