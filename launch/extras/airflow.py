"""Render a chain as a DAG of Airflow 2 or 3. Each stage is one task, run by Slurm or on the worker."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Optional

from launch.cron import parse_cron
from launch.options import option
from launch.slurm import SlurmOptions, render_sbatch
from launch.targets import Target, register
from launch.workload import Stage, check_one_task
from pipeline.runtime.errors import LaunchError, check_choice

BY = ("slurm", "worker")
HEAD = '''"""{title}"""

from datetime import datetime, timedelta, timezone

try:
    from airflow.sdk import DAG
except ImportError:  # Airflow 2
    from airflow import DAG

from airflow.providers.standard.operators.bash import BashOperator

with DAG(
    dag_id={dag_id},
    description={title_text},
    schedule={schedule},
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    tags=["torchrec-pipeline"],
) as dag:
    tasks = {{}}
'''
TASK = """    tasks[{name}] = BashOperator(
        task_id={name}, bash_command={command}, retries={retries}, retry_delay=timedelta(minutes=1), append_env=True
    )
"""


@dataclass(frozen=True)
class AirflowOptions(SlurmOptions):
    by: str = option("slurm", "slurm: the worker submits and waits; worker: the stages run on the worker itself")
    cron: Optional[str] = option(None, 'when it runs: "0 * * * *", or @daily, ...; default: by hand')
    folder: str = option("", "working folder of the stages on the worker; Airflow's folder is temporary")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("--by", self.by, BY)
        if not self.folder.startswith("/"):
            raise LaunchError(
                f"--folder {self.folder}: give the working folder of the stages as a path that begins with /"
            )
        if self.cron is not None:
            object.__setattr__(self, "cron", parse_cron(self.cron))


def render_dag(name: str, stages: list[Stage], options: AirflowOptions) -> str:
    """Return a Python file for Airflow's dags folder. Raises LaunchError."""
    title = f"{name}: {' -> '.join(stage.name for stage in stages)}"
    head = HEAD.format(title=title, title_text=json.dumps(title), dag_id=json.dumps(name), schedule=repr(options.cron))
    tasks = [_task(stage, options) for stage in stages]
    arrows = [f"    tasks[{name!r}] >> tasks[{stage.name!r}]\n" for stage in stages for name in stage.after]
    return head + "".join(tasks) + "".join(arrows)


def _task(stage: Stage, options: AirflowOptions) -> str:
    # Slurm retries jobs itself. Jinja would interpret braces in a command; raw prevents it.
    retries = stage.workload.max_retries if options.by == "worker" else 0
    command = "{% raw %}" + _command(stage, options) + "{% endraw %}"
    return TASK.format(name=repr(stage.name), command=repr(command), retries=retries)


def _command(stage: Stage, options: AirflowOptions) -> str:
    workload, enter = stage.workload, f"cd {shlex.quote(options.folder)}\n"
    if options.by == "slurm":
        wait = "" if stage.is_service else " --wait"
        return f"{enter}sbatch --parsable{wait} << 'END_OF_SCRIPT'\n{render_sbatch(workload, options)}END_OF_SCRIPT\n"
    check_one_task(workload, "a worker of Airflow")
    if stage.is_service or workload.nodes > 1:
        raise LaunchError(
            f"stages.{stage.name}: a worker runs only stages on one host that end; remove the stage, or give --by slurm"
        )
    exports = [f"export {key}={shlex.quote(value)}\n" for key, value in workload.env.items()]
    return f"{enter}{''.join(exports)}exec {workload.shell_line('localhost', workload.name)}\n"


register("chain", "airflow", Target(AirflowOptions, render_dag))
