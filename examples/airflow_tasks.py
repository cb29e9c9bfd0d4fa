"""Prepare, train and export each day with Airflow: tasks that call functions instead of commands.

A `UserError` fails the task without a retry, because the same call would fail again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException

import pipeline


def prepare_day(day: str, source: str) -> str:
    """Return the folder of the day's data set."""
    job = pipeline.compose("prepare", {"data": "quickstart", "source": source, "data.path": f"datasets/{day}"})
    return pipeline.prepare(job).path


def train_day(day: str, data: str) -> str:
    """Return the run folder. A retry resumes the run."""
    job = pipeline.compose("train", {"experiment": "quickstart", "data.path": data, "run_dir": f"runs/{day}"})
    return pipeline.train(job).run_dir


def export_day(run: str) -> str:
    """Return the artifact's folder."""
    return pipeline.export(run, precision="int8").artifact


def checked(call: Any) -> Any:
    """Return a task of the function."""

    def run(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except pipeline.UserError as error:
            raise AirflowFailException(str(error)) from error

    return task(task_id=call.__name__)(run)


@dag(schedule="@daily", start_date=datetime(2026, 1, 1), catchup=False)
def clicks() -> None:
    data = checked(prepare_day)("{{ ds }}", "raw/{{ ds }}.tsv")
    checked(export_day)(checked(train_day)("{{ ds }}", data))


clicks()
