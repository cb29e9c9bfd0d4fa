"""Send a training's gauges to an OpenTelemetry collector (logger.otlp_endpoint), from rank 0."""

from __future__ import annotations

import socket
from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import job_id

TIMEOUT_S = 5.0  # of one request; within this time the SDK retries, then it drops the values
METRICS_PATH = "/v1/metrics"


class OtlpGauges:
    """Gauges sent by OTLP over HTTP in a thread of the SDK. If the collector is down, the SDK warns
    and training continues.

    Headers, for instance the key of a hosted collector, come from OTEL_EXPORTER_OTLP_HEADERS in the
    environment.
    """

    def __init__(self, job: TrainJob) -> None:
        assert job.logger.otlp_endpoint is not None
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(
                "logger.otlp_endpoint needs OpenTelemetry: pip install 'torchrec-pipeline[otlp]', or leave it out"
            ) from error
        about = {
            "service.name": "torchrec-pipeline",
            "service.instance.id": job.name,
            "host.name": socket.gethostname(),
        }
        if job_id():
            about["job.id"] = job_id()
        exporter = OTLPMetricExporter(endpoint=job.logger.otlp_endpoint.rstrip("/") + METRICS_PATH, timeout=TIMEOUT_S)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * job.logger.otlp_every_s)
        self._provider = MeterProvider([reader], resource=Resource.create(about), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("pipeline.training")
        self._gauges: dict[str, Any] = {}

    def set(self, name: str, value: float, /, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        self._gauges[name].set(value, labels)

    def close(self) -> None:
        """Send the remaining values and stop the thread."""
        self._provider.shutdown(timeout_millis=1000 * TIMEOUT_S)
