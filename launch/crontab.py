"""Render a Workload and a cron expression as a line for crontab: its folder, a lock, a log file."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Optional

from launch.options import option
from launch.resources import this_host
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
    if not command.isprintable():
        raise LaunchError(
            "an override holds a line break or another sign that a crontab cannot have; put it into an experiment file"
        )
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
