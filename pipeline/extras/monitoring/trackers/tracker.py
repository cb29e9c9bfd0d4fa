"""What a tracker is: a service that gets a run's config and numbers too (logger.tracker). It is written to and never read.

@register("tracker", "my_tracker")
class MyTracker(Tracker):
    requires = "my_client"  # a package; its absence is an error before training

    def begin(self): ...
    def write(self, kind, step, values): ...
    def end(self): ...
"""

from __future__ import annotations

import json
from typing import ClassVar

from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.storage import storage

FILE = "tracker.json"  # of the run folder: the tracker's own name of the run, for a resume


class Tracker:
    """Rank 0 makes one of the job, and calls it in a thread of its own. What it raises is a warning, and it gets no more."""

    requires: ClassVar[str] = ""
    install: ClassVar[str] = ""  # what pip installs it by; empty: `requires`

    def __init__(self, job: TrainJob) -> None:
        self.job = job

    @property
    def project(self) -> str:
        return self.job.logger.project or self.job.data.name

    def begin(self) -> None:
        """Once, before the first write: begin a run, or go on with the one that was begun before a resume."""

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """A line of metrics.jsonl; kind: train, validation, test. A value may be a text, or not finite."""
        raise NotImplementedError(f"{type(self).__name__} has no write")

    def end(self) -> None:
        """After the last write of a run that was not killed."""

    def begun_run(self, tracker: str) -> str:
        """What remember_run was given before a resume; empty for a new run."""
        path = storage.join(self.job.run_dir, FILE)
        if not storage.is_file(path):
            return ""
        try:
            return str(json.loads(storage.read_text(path)).get(tracker, ""))
        except ValueError:
            return ""

    def remember_run(self, tracker: str, run: str) -> None:
        """`run`: the tracker's own name of it."""
        storage.publish_text(storage.join(self.job.run_dir, FILE), json.dumps({tracker: run}))
