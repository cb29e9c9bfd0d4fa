"""Report progress from rank 0 to a monitor outside the cluster (logger.heartbeat_url). The monitor
raises an alarm if no report comes.

This detects failures that nothing inside the cluster can report: a job that was never restarted, a
scheduler or a Prometheus that is down.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from datetime import UTC, datetime
from urllib.parse import urlsplit

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.runtime.logs import attempt, get_logger, job_id
from pipeline.runtime.process import watchdog
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

TIMEOUT_S = 5.0  # of one request
logger = get_logger("pipeline.train")


class Heartbeat:
    """POSTs a JSON object from a separate thread: at the start, and every `every_s` while there is
    progress.

    If the receiver does not answer, one warning is logged and training continues.
    """

    def __init__(self, url: str, every_s: float, about: dict[str, object]) -> None:
        self._url, self._every_s, self._about = url, every_s, about
        self._ended = threading.Event()
        self._answers = True
        self.step, self.state = 0, "started"
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, step: int) -> None:
        self.step = step
        self._thread.start()

    def end(self, state: str) -> None:
        """Send the final state and stop the thread."""
        self.state = state
        self._ended.set()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        seen = self._progress()
        self._send()
        while not self._ended.wait(self._every_s):
            if (now := self._progress()) != seen:
                seen = now
                self._send()
        self._send()

    def _progress(self) -> tuple[int, float]:
        """Return a value that changes with each step. Under a watchdog it also changes with each
        evaluation batch and stage.
        """
        return self.step, watchdog.progress_at()

    def _send(self) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        body = {**self._about, "state": self.state, "step": self.step, "time": now}
        headers = {"Content-Type": "application/json", "User-Agent": "torchrec-pipeline"}
        try:
            request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                self._answers = True
        except (OSError, ValueError) as error:
            if self._answers:
                # The path of the address may be a secret, so the message names only the host.
                host = urlsplit(self._url).hostname
                logger.warning("no heartbeat reaches %s: %s: %s", host, type(error).__name__, error)
            self._answers = False


@register("hook", "heartbeat")
class SendHeartbeat(Hook):
    """Sends heartbeats if logger.heartbeat_url is set."""

    runs_after = "rollback"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._heartbeat: Heartbeat | None = None
        self._state = "failed"  # until on_fit_end is called

    def on_train_start(self, state: TrainingState) -> None:
        url = self.job.logger.heartbeat_url
        if url is None or self.parts.writer is None:
            return
        about: dict[str, object] = {"run": self.job.name, "run_dir": self.job.run_dir, "host": socket.gethostname()}
        about |= {"steps": state.total_steps, "attempt": attempt()} | ({"job": job_id()} if job_id() else {})
        self._heartbeat = Heartbeat(url, self.job.logger.heartbeat_every_s, about)
        self._heartbeat.start(state.step)

    def on_step_end(self, state: TrainingState) -> None:
        if self._heartbeat is not None:
            # before the step, because the thread checks the step
            self._heartbeat.state = "training"
            self._heartbeat.step = state.step

    def on_fit_end(self, state: TrainingState) -> None:
        self._state = "stopped" if state.preempted else "finished"

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end(self._state)
            self._heartbeat = None
