"""Define the job that selects features (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job
from pipeline.runtime.errors import ConfigError, check_at_least, check_given, check_within


@dataclass
class SelectFeaturesJob(Job):
    """Train run folder `run` again without its `drop` least important features. drop=None: without
    all features whose shuffling does not raise NE by more than two standard errors.
    """

    run: str = "???"
    drop: int | None = None
    rows: int = 20_000
    seeds: int = 1
    confidence: float = 0.98
    run_dir: str | None = None  # None: <run>_selected
    world_size: int = 1

    def __post_init__(self) -> None:
        check_given("run", self.run)
        if "://" in self.run or "://" in (self.run_dir or ""):
            raise ConfigError(f"run={self.run} run_dir={self.run_dir}: features are selected in local folders")
        check_at_least("drop", self.drop, 1, allow_none=True)
        check_at_least("rows", self.rows, 100)
        check_at_least("seeds", self.seeds, 1)
        check_within("confidence", self.confidence, 0.5, 0.9999)

    @property
    def folder(self) -> str:
        return self.run_dir or f"{self.run.rstrip('/')}_selected"
