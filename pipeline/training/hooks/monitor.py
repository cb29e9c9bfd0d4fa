"""Serve a training's metrics to Prometheus over HTTP (trainer.metrics_port), from rank 0."""

from __future__ import annotations

import time
from typing import Any

from pipeline.config.jobs import TrainJob
from pipeline.config.registry import register
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState
from pipeline.training.runs.folder import Run

PREFIX = "pipeline_training"
ABOUT = {
    "step": "The last whole step", "steps": "Steps of the whole training", "restarts": "Starts of the run after the first",
    "last_checkpoint_timestamp_seconds": "When the last checkpoint was saved; the start before the first",
}  # fmt: skip
logger = get_logger("pipeline.train")


@register("hook", "monitor")
class Monitor(Hook):
    """Gauges: what ABOUT names, pipeline_training_metric{run,split,name} for all that a line of metrics.jsonl holds, and
    pipeline_training_rank{run,rank,name} of every rank at the last log line: step_seconds, input_stall_seconds, comms_seconds,
    peak_memory_bytes and straggler_score.

    A port that is taken costs a warning. The server ends with the training.
    """

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._server: Any = None
        self._saved_step = 0
        self._of_ranks: list[dict[str, float]] = []
        if job.trainer.metrics_port is None:
            return
        try:
            from prometheus_client import CollectorRegistry, Gauge
        except ImportError as error:
            raise ConfigError(
                "trainer.metrics_port needs prometheus-client: pip install 'torchrec-pipeline[serve]', or leave it out"
            ) from error
        self.registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"{PREFIX}_{name}", text, ["run"], registry=self.registry).labels(job.name)
            for name, text in ABOUT.items()
        }
        self._metric = Gauge(
            f"{PREFIX}_metric", "A number of metrics.jsonl", ["run", "split", "name"], registry=self.registry
        )
        self._rank = Gauge(
            f"{PREFIX}_rank", "Of one rank at the last log line", ["run", "rank", "name"], registry=self.registry
        )

    def on_train_start(self, state: TrainingState) -> None:
        if self.job.trainer.metrics_port is None or self.parts.writer is None:
            return
        from prometheus_client import start_http_server

        self._gauges["steps"].set(state.total_steps)
        self._gauges["step"].set(state.step)
        self._gauges["restarts"].set(max(0, len(Run(self.job.run_dir).starts) - 1))
        self._gauges["last_checkpoint_timestamp_seconds"].set(time.time())
        self._saved_step = state.saved_step
        self.parts.writer.mirrors.append(self)
        try:
            self._server, _ = start_http_server(self.job.trainer.metrics_port, registry=self.registry)
        except OSError as error:
            logger.warning("no metrics are served: trainer.metrics_port=%d: %s", self.job.trainer.metrics_port, error)
        else:
            logger.info("metrics     http://%s:%d/metrics", self._server.server_name, self._server.server_port)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._metric.labels(self.job.name, kind, name).set(value)

    def on_step_end(self, state: TrainingState) -> None:
        if self._server is None:
            return
        self._gauges["step"].set(state.step)
        if state.of_ranks is not self._of_ranks:
            self._of_ranks = state.of_ranks
            for rank, values in enumerate(state.of_ranks):
                for name, value in values.items():
                    self._rank.labels(self.job.name, str(rank), name).set(value)
        if state.saved_step != self._saved_step:
            self._saved_step = state.saved_step
            self._gauges["last_checkpoint_timestamp_seconds"].set(time.time())

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
