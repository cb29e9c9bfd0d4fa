"""Export training metrics from rank 0: a Prometheus endpoint (trainer.metrics_port) and
OpenTelemetry (logger.otlp_endpoint)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.extras.monitoring.otlp import OtlpGauges
from pipeline.extras.runs.folder import Run
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import attempt, get_logger
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

PREFIX = "pipeline_training"
ABOUT = {
    "step": "The last complete step",
    "steps": "Steps of the complete training",
    "restarts": "Starts of the run after the first",
    "last_checkpoint_timestamp_seconds": "When the last checkpoint was saved; the start before the first",
    "heartbeat_timestamp_seconds": "When the last step ended",
    "finished": "1 once the training has ended as it should",
}
LABELS = {
    "metric": ("A number of metrics.jsonl", ["split", "name"]),
    "rank": ("Of one rank at the last log line", ["rank", "name"]),
}
MAX_WAIT_S = 60.0  # at the end, for one more request of a Prometheus that has asked before
logger = get_logger("pipeline.train")


class Gauges(Protocol):
    """A receiver of values. Its methods must not wait and must not raise exceptions."""

    def set(self, name: str, value: float, /, **labels: str) -> None: ...

    def close(self) -> None: ...


class Scrapes:
    """Records the times of Prometheus' requests, so that a training can wait until Prometheus has
    read its last values.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app, self._answered = app, threading.Condition()
        self._times: list[float] = []  # the start times of the last two requests

    def __call__(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        began = time.monotonic()
        yield from self._app(environ, start_response)
        with self._answered:  # the server continues here after it has sent the response
            self._times = [*self._times[-1:], began]
            self._answered.notify_all()

    def wait_for_next(self, most_s: float) -> None:
        """Wait for one more request, at most as long as the interval of the last two requests plus
        a second.

        If fewer than two requests have come, return at once.
        """
        now = time.monotonic()  # a request that started earlier does not have the newest values
        with self._answered:
            if len(self._times) < 2:
                return
            before, last = self._times
            apart = min(last - before + 1.0, most_s)
            self._answered.wait_for(lambda: self._times[-1] > now, max(0.0, last + apart - now))


class ServedGauges:
    """A Prometheus registry that an HTTP server exposes from serve() to close()."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge
        except ImportError as error:
            raise ConfigError(
                "trainer.metrics_port needs prometheus-client: pip install 'torchrec-pipeline[serve]', or leave it out"
            ) from error
        self.registry = CollectorRegistry()
        self.server: Any = None
        self.scrapes: Scrapes | None = None
        known: dict[str, tuple[str, list[str]]] = {**{name: (text, []) for name, text in ABOUT.items()}, **LABELS}
        self._gauges: dict[str, Any] = {
            f"{PREFIX}_{name}": Gauge(f"{PREFIX}_{name}", text, ["run", *labels], registry=self.registry)
            for name, (text, labels) in known.items()
        }

    def serve(self, port: int) -> None:
        """Start the server. If the port is in use, log a warning."""
        from prometheus_client import start_http_server

        try:
            self.server, _ = start_http_server(port, registry=self.registry)
        except OSError as error:
            logger.warning("no metrics are served: trainer.metrics_port=%d: %s", port, error)
        else:
            self.scrapes = Scrapes(self.server.get_app())
            self.server.set_app(self.scrapes)
            logger.info("metrics     http://%s:%d/metrics", self.server.server_name, self.server.server_port)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        self._gauges[name].labels(**labels).set(value)

    def close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


@register("hook", "monitor")
class Monitor(Hook):
    """Exports gauges: the names of ABOUT, and pipeline_training_metric{run,split,name} for each
    value in metrics.jsonl.

    pipeline_training_rank{run,rank,name} has values of every rank at the last log line:
    step_seconds, input_stall_seconds and peak_memory_bytes, and with gloo also comms_seconds and
    straggler_score. The gauges disappear when the training ends. If Prometheus has asked at least
    twice, the hook waits for one more request, so that Prometheus can distinguish a finished
    training from a lost one.
    """

    runs_after = "rollback"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._saved_step = 0
        self._of_ranks: list[dict[str, float]] = []
        self.served = ServedGauges() if job.trainer.metrics_port is not None else None
        self._gauges: list[Gauges] = [self.served] if self.served else []
        if job.logger.otlp_endpoint is not None and parts.writer is not None:
            self._gauges.append(OtlpGauges(job))

    def on_train_start(self, state: TrainingState) -> None:
        if not self._gauges or self.parts.writer is None:
            return
        self._set("steps", state.total_steps)
        self._set("step", state.step)
        # A run that had nothing to resume from starts its own count at 0, so also use the count of
        # the scheduler and the agent.
        counted = sum(int(number) for number in attempt().split("."))
        self._set("restarts", max(counted, len(Run(self.job.run_dir).starts) - 1))
        self._set("last_checkpoint_timestamp_seconds", time.time())
        self._set("heartbeat_timestamp_seconds", time.time())
        self._set("finished", 0)
        self._saved_step = state.saved_step
        self.parts.writer.mirrors.append(self)
        if self.served and self.job.trainer.metrics_port is not None:
            self.served.serve(self.job.trainer.metrics_port)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._set("metric", value, split=kind, name=name)

    def on_step_end(self, state: TrainingState) -> None:
        if not self._gauges or self.parts.writer is None:
            return
        self._set("step", state.step)
        self._set("heartbeat_timestamp_seconds", time.time())
        if state.of_ranks is not self._of_ranks:
            self._of_ranks = state.of_ranks
            for rank, values in enumerate(state.of_ranks):
                for name, value in values.items():
                    self._set("rank", value, rank=str(rank), name=name)
        if state.saved_step != self._saved_step:
            self._saved_step = state.saved_step
            self._set("last_checkpoint_timestamp_seconds", time.time())

    def on_fit_end(self, state: TrainingState) -> None:
        if not self._gauges or self.parts.writer is None or state.preempted:
            return
        self._set("finished", 1)
        if self.served is not None and self.served.scrapes is not None:
            # the other ranks have finished and wait no longer than this
            patience_s = self.job.trainer.hang_timeout_s / 4
            self.served.scrapes.wait_for_next(min(MAX_WAIT_S, patience_s or MAX_WAIT_S))

    def _set(self, gauge: str, value: float, **labels: str) -> None:
        for each in self._gauges:
            each.set(f"{PREFIX}_{gauge}", value, run=self.job.name, **labels)

    def close(self) -> None:
        for each in self._gauges:
            each.close()
        self._gauges = []
