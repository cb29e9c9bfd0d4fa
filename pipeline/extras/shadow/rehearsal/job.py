"""Define the config of `rehearse`: the train job, and which of its ranks are rehearsed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.jobs.job import job_of
from pipeline.config.jobs.train import PlanJob
from pipeline.runtime.errors import ConfigError, check_at_least


@job_of("rehearse")
@dataclass
class RehearseJob(PlanJob):
    """A PlanJob, which needs no data set: a missing one is replaced by generated rows.

    ranks: to rehearse, always including rank 0, because other ranks get its plan. steps: of each rank.
    output: a JSON file for the counts.
    """

    ranks: list[int] = field(default_factory=lambda: [0])
    steps: int = 2
    output: str | None = None
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("steps", self.steps, 2)  # the first step builds what later steps use
        if bad := [rank for rank in self.ranks if not 0 <= rank < self.world_size]:
            raise ConfigError(f"ranks={bad} of world_size={self.world_size}: ranks are 0 to {self.world_size - 1}")
