"""Schemas of serving: the server, its batches, limits on a request, and what of an artifact stays in memory (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given, check_within

MEMORIES = ("ram", "ssd")


def check_memory(memory: str) -> None:
    """Raise ConfigError unless `memory` is ram or ssd."""
    check_choice("memory", memory, MEMORIES)


@dataclass
class SsdConfig:
    """memory=ssd: tables stay on disk, their most frequent rows are copied into memory.

    cache_gb None: as little as keeps the 99th percentile of a request's reads within `p99_target_ms`, by the data set's
    frequency curves and by reads of the artifact's own files that are timed while it is loaded. `request_rows` are the
    rows of a request that has to meet it, `io_threads` the reads that are under way at once.
    """

    cache_gb: float | None = None
    p99_target_ms: float = 5.0
    request_rows: int = 64
    io_threads: int = 8

    def __post_init__(self) -> None:
        check_at_least("ssd.cache_gb", self.cache_gb, 0.0, allow_none=True)
        check_above("ssd.p99_target_ms", self.p99_target_ms, 0.0)
        check_at_least("ssd.request_rows", self.request_rows, 1)
        check_at_least("ssd.io_threads", self.io_threads, 1)


@dataclass
class ServerConfig:
    """Loopback unless `host` says otherwise. Without tokens the server answers everybody who reaches it.

    token_file has a token in each line, and token_env names an environment variable with one: a request then needs one
    of them as `Authorization: Bearer <token>`. tls_cert and tls_key are files as PEM: the server then speaks HTTPS.
    allowed_hosts: names that a request's Host header may give; empty means this machine's own names on loopback, and
    any elsewhere. watch_s: how often `artifact` is looked at for a newer one. shutdown_delay_s: after SIGTERM, how long
    requests are still taken while /health/ready already says no; drain_s: how long those under way may then take.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: list[str] = field(default_factory=list)
    token_file: str | None = None
    token_env: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    watch_s: float = 2.0
    shutdown_delay_s: float = 0.0
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        check_given("server.host", self.host)
        check_within("server.port", self.port, 0, 65535)
        check_above("server.watch_s", self.watch_s, 0.0)
        check_at_least("server.shutdown_delay_s", self.shutdown_delay_s, 0.0)
        check_above("server.drain_s", self.drain_s, 0.0)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("HTTPS needs server.tls_cert and server.tls_key: set both, or neither")


@dataclass
class BatchingConfig:
    """Requests that arrive together are scored together.

    A batch takes what waits, at most `max_rows` rows. Right behind a batch of several requests the next one is held back, at
    most `max_delay_ms`, until as many have come again; a lone request is not. What would wait longer than
    `latency_budget_ms`, or does not fit into a queue of `queue_rows` rows, is answered with 503 and Retry-After.
    """

    max_rows: int = 1024
    max_delay_ms: float = 1.0
    latency_budget_ms: float = 1000.0
    queue_rows: int = 32_768

    def __post_init__(self) -> None:
        check_at_least("batching.max_rows", self.max_rows, 1)
        check_at_least("batching.max_delay_ms", self.max_delay_ms, 0.0)
        check_above("batching.latency_budget_ms", self.latency_budget_ms, 0.0)
        if self.max_delay_ms >= self.latency_budget_ms:
            raise ConfigError(
                f"batching.max_delay_ms={self.max_delay_ms:g} uses up batching.latency_budget_ms={self.latency_budget_ms:g}: "
                "lower the first, or raise the second"
            )
        if self.queue_rows < self.max_rows:
            raise ConfigError(
                f"batching.queue_rows={self.queue_rows} holds no batch of batching.max_rows={self.max_rows}: raise it"
            )


@dataclass
class LimitsConfig:
    """What one request may be. header_timeout_s and body_timeout_s: how long its header and its body may take to arrive.

    Of /retrieve: `k` items a row at most, and `filter_ids` in a list of allowed or excluded ones. A client is an IPv4
    address, or 64 bits of an IPv6 address; clients behind a proxy are one.
    """

    body_mb: float = 8.0
    rows: int = 4096
    values_per_cell: int = 1000
    k: int = 1000
    filter_ids: int = 10_000
    header_bytes: int = 16_384
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    connections: int = 1000
    client_connections: int | None = 500
    client_requests_per_s: float | None = None

    def __post_init__(self) -> None:
        check_above("limits.body_mb", self.body_mb, 0.0)
        check_at_least("limits.rows", self.rows, 1)
        check_at_least("limits.values_per_cell", self.values_per_cell, 1)
        check_at_least("limits.k", self.k, 1)
        check_at_least("limits.filter_ids", self.filter_ids, 1)
        check_at_least("limits.header_bytes", self.header_bytes, 1024)
        check_above("limits.header_timeout_s", self.header_timeout_s, 0.0)
        check_above("limits.body_timeout_s", self.body_timeout_s, 0.0)
        check_at_least("limits.connections", self.connections, 1)
        check_at_least("limits.client_connections", self.client_connections, 1, allow_none=True)
        if self.client_requests_per_s is not None:
            check_above("limits.client_requests_per_s", self.client_requests_per_s, 0.0)

    @property
    def body_bytes(self) -> int:
        return int(self.body_mb * 2**20)
