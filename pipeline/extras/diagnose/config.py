"""Define the job of `diagnose` (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job
from pipeline.runtime.errors import check_given


@dataclass
class DiagnoseJob(Job):
    """Diagnose run folder `run`."""

    run: str = "???"

    def __post_init__(self) -> None:
        check_given("run", self.run)
