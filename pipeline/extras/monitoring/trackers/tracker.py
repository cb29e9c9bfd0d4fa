"""Define a tracker: a service that receives a run's config and metrics (logger.tracker).

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

FILE = "tracker.json"  # in the run folder: the tracker's id of the run, for a resume


class Tracker:
    """Base class of trackers. Rank 0 makes one tracker and calls it in a separate thread. After the
    first error it is not called again.
    """

    requires: ClassVar[str] = ""
    install: ClassVar[str] = ""  # the pip requirement; empty: `requires`

    def __init__(self, job: TrainJob) -> None:
        self.job = job

    @property
    def project(self) -> str:
        return self.job.logger.project or self.job.data.name

    def begin(self) -> None:
        """Start a run, or continue the run that was started before a resume.

        Called once, before the first write.
        """

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Send a line of metrics.jsonl.

        `kind` is train, validation or test. A value may be text or not finite.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write")

    def end(self) -> None:
        """End the run. Called after the last write, unless the run was killed."""

    def begun_run(self, tracker: str) -> str:
        """Return the run id that remember_run stored before the job resumed; "" for a new run."""
        path = storage.join(self.job.run_dir, FILE)
        if not storage.is_file(path):
            return ""
        try:
            return str(json.loads(storage.read_text(path)).get(tracker, ""))
        except ValueError:
            return ""

    def remember_run(self, tracker: str, run: str) -> None:
        """Store `run`, the id that the tracker gave to the run."""
        storage.publish_text(storage.join(self.job.run_dir, FILE), json.dumps({tracker: run}))
