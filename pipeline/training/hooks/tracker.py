"""Send a run's config and numbers to MLflow or W&B too (logger.tracker); nothing is read from there.

A thread of its own sends them, so that a tracker that is slow costs no step. One that is away costs a warning, and gets no more.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState
from pipeline.training.runs.folder import flat

FILE = "tracker.json"  # of the run folder: the tracker's own name of the run, for a resume
CLOSE_S = 20.0  # for what is still in the queue at the end
MOST_PARAMETER_CHARACTERS = 500  # what MLflow takes
logger = get_logger("pipeline.train")


class Tracker(Protocol):
    def begin(self) -> None: ...

    def write(self, kind: str, step: int, values: dict[str, float]) -> None: ...

    def end(self) -> None: ...


class MlflowTracker:
    """A run of the experiment `logger.project` at `logger.tracker_uri`."""

    def __init__(self, job: TrainJob) -> None:
        self._job = job

    def begin(self) -> None:
        from mlflow.tracking import MlflowClient

        job = self._job
        self._client = MlflowClient(tracking_uri=job.logger.tracker_uri)
        earlier = _earlier(job, "mlflow")
        if earlier:
            self._id = earlier
            return
        project = job.logger.project or job.data.name
        found = self._client.get_experiment_by_name(project)
        number = found.experiment_id if found else self._client.create_experiment(project)
        self._id = self._client.create_run(number, run_name=job.name, tags={"run_dir": job.run_dir}).info.run_id
        for key, value in flat(job).items():
            self._client.log_param(self._id, key.replace("*", "_all"), str(value)[:MOST_PARAMETER_CHARACTERS])
        _remember(job, "mlflow", self._id)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._client.log_metric(self._id, f"{kind}/{name}", float(value), step=step)

    def end(self) -> None:
        self._client.set_terminated(self._id)


class WandbTracker:
    """A run of the project `logger.project`; WANDB_MODE=offline writes it into the run folder alone."""

    def __init__(self, job: TrainJob) -> None:
        self._job = job

    def begin(self) -> None:
        import wandb

        job = self._job
        self._run = wandb.init(
            project=job.logger.project or job.data.name, name=job.name, id=_earlier(job, "wandb") or None, resume="allow",
            dir=job.run_dir, config=flat(job), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        _remember(job, "wandb", self._run.id)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"step": step})

    def end(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrainJob], Tracker]] = {
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}  # and their packages


class Forwarder:
    """Hands lines to a tracker in a thread; write() never waits. The first error is said, and ends it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._lines: queue.SimpleQueue[tuple[str, int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._forward, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._lines.put((kind, step, dict(values)))

    def _forward(self) -> None:
        try:
            self._tracker.begin()
            while (line := self._lines.get()) is not None:
                self._tracker.write(*line)
            self._tracker.end()
        except Exception as error:  # whatever a server, its client or the network says
            logger.warning(
                "the tracker %s gets nothing more of this run: %s: %s", self._name, type(error).__name__, error
            )

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "the tracker %s has not taken all within %.0f s; the rest of this run is not there", self._name, CLOSE_S
            )


@register("hook", "tracker")
class Track(Hook):
    """Does nothing with logger.tracker=none."""

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._forwarder: Forwarder | None = None
        if job.logger.tracker != "none" and find_spec(package := job.logger.tracker) is None:
            raise ConfigError(
                f"logger.tracker={job.logger.tracker} needs the package {package}: pip install 'torchrec-pipeline[{package}]', "
                "or logger.tracker=none"
            )

    def on_train_start(self, state: TrainingState) -> None:
        if self.job.logger.tracker == "none" or self.parts.writer is None:
            return
        self._forwarder = Forwarder(self.job.logger.tracker, TRACKERS[self.job.logger.tracker](self.job))
        self.parts.writer.mirrors.append(self._forwarder)

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None


def _earlier(job: TrainJob, tracker: str) -> str:
    path = storage.join(job.run_dir, FILE)
    if not storage.is_file(path):
        return ""
    try:
        return str(json.loads(storage.read_text(path)).get(tracker, ""))
    except ValueError:
        return ""


def _remember(job: TrainJob, tracker: str, run: str) -> None:
    storage.publish_text(storage.join(job.run_dir, FILE), json.dumps({tracker: run}))
