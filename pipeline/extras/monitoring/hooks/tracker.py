"""Send a run's config and metrics to the tracker that logger.tracker names (for example MLflow).
Nothing is read back.

A separate thread sends them, so a slow tracker does not slow steps. After the first error the
tracker gets nothing more and one warning is logged.
"""

from __future__ import annotations

import queue
import threading
from importlib.util import find_spec

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import find, register
from pipeline.extras.monitoring.trackers.tracker import Tracker
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

CLOSE_S = 20.0  # seconds to send the rest of the queue at the end
logger = get_logger("pipeline.train")


class Forwarder:
    """Passes lines to a tracker in a thread. write() never waits.

    The first error is logged and ends the thread.
    """

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
        except Exception as error:  # any error of a server, its client or the network
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
    """Send metrics unless logger.tracker=none."""

    runs_after = "rollback"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._forwarder: Forwarder | None = None
        self._kind: type[Tracker] | None = None
        if (name := job.logger.tracker) == "none":
            return
        self._kind = find("tracker", name, "logger.tracker")
        if (package := self._kind.requires) and find_spec(package) is None:
            raise ConfigError(
                f"logger.tracker={name} needs the package {package}: pip install '{self._kind.install or package}', "
                "or logger.tracker=none"
            )

    def on_train_start(self, state: TrainingState) -> None:
        if self._kind is None or self.parts.writer is None:
            return
        self._forwarder = Forwarder(self.job.logger.tracker, self._kind(self.job))
        self.parts.writer.mirrors.append(self._forwarder)

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None
