"""Send a training's gauges to an OpenTelemetry collector (logger.otlp_endpoint), from rank 0."""

from __future__ import annotations

from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import job_id
from pipeline.runtime.process.processes import hostname

TIMEOUT_S = 5.0  # of one request; the SDK tries again within it, and drops what does not arrive
METRICS_PATH = "/v1/metrics"


class OtlpGauges:
    """OTLP over HTTP, by a thread of the SDK: a collector that is away costs the SDK's own warnings, and no step.

    Headers, for instance of a hosted collector's key, come from OTEL_EXPORTER_OTLP_HEADERS in the environment.
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
        about = {"service.name": "torchrec-pipeline", "service.instance.id": job.name, "host.name": hostname()}
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
        """Send what is left."""
        self._provider.shutdown(timeout_millis=1000 * TIMEOUT_S)
