"""Count what the server does, for Prometheus to fetch from /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "pipeline_serving"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ServerMetrics:
    """Of one server; each has a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", about, labels, registry=registry)

        self.requests = counter("requests", "Requests answered", "path", "status")
        self.request_seconds = Histogram(
            f"{PREFIX}_request_seconds", "From header to answer", ["path"], buckets=SECONDS, registry=registry
        )
        self.rows = counter("rows", "Rows scored")
        self.bad_rows = counter("bad_rows", "Rows without a score")
        self.values = counter("values", "Values of features with a vocabulary", "feature")
        self.unknown_values = counter(
            "unknown_values", "Those of them that the model does not know, or missing", "feature"
        )
        self.batch_rows = Histogram(f"{PREFIX}_batch_rows", "Rows scored at once", buckets=ROWS, registry=registry)
        self.batch_seconds = Histogram(
            f"{PREFIX}_batch_seconds", "A batch in the model", buckets=SECONDS, registry=registry
        )
        self.queue_rows = Gauge(f"{PREFIX}_queue_rows", "Rows that wait for a batch", registry=registry)
        self.overloads = counter("overloads", "Requests answered with 503, for the queue was full or slow")
        self.artifact = Gauge(f"{PREFIX}_artifact", "1 for the artifact that serves", ["version"], registry=registry)
        self.artifact_loaded = Gauge(
            f"{PREFIX}_artifact_loaded_timestamp_seconds", "When it was loaded", registry=registry
        )
        self.switches = counter("artifact_switches", "Changes to another artifact")
        self.refusals = counter("artifact_refusals", "Artifacts that could not be loaded: the one before goes on")
        self.delta_sequence = Gauge(
            f"{PREFIX}_delta_sequence", "Number of the delta that serves; 0: the artifact itself", registry=registry
        )
        self.embedding_age = Gauge(
            f"{PREFIX}_embedding_age_seconds", "Since the step that serves was saved", registry=registry
        )
        self.event_age = Gauge(
            f"{PREFIX}_event_age_seconds",
            "Since the newest event that the delta which serves was trained on; 0: not known",
            registry=registry,
        )
        self.delta_refusals = counter("delta_refusals", "Deltas that were not taken: what served before goes on")
        self.items = Gauge(f"{PREFIX}_items", "Items that /retrieve finds among", registry=registry)
        self.retrieved_items = counter("retrieved_items", "Items in the answers of /retrieve")
        self.table_lookups = counter("table_lookups", "Rows of tables on SSD that were asked for")
        self.table_hits = counter("table_cache_hits", "Those of them that were in memory")
        self.cache_bytes = Gauge(
            f"{PREFIX}_table_cache_bytes", "Hot rows of tables on SSD in memory", registry=registry
        )
