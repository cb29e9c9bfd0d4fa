"""Define serving: the server, its batches, limits of requests, and memory of an artifact (stdlib
only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given, check_within

MEMORIES = ("ram", "ssd")


def check_memory(memory: str) -> None:
    """Raise ConfigError unless `memory` is ram or ssd."""
    check_choice("memory", memory, MEMORIES)


@dataclass
class SsdConfig:
    """memory=ssd: tables stay on disk, and their most frequent rows are cached in memory.

    cache_gb None: the smallest cache for which the 99th percentile of a request's reads is within
    `p99_target_ms`. This uses the data set's frequency curves and reads of the artifact's files that are
    timed while it is loaded. `request_rows` is the number of rows of such a request, `io_threads` the number
    of concurrent reads.
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
    """The server binds to loopback unless `host` is set. Without tokens it answers every client.

    token_file has one token per line, and token_env names an environment variable with one token.
    A request then needs one of them as `Authorization: Bearer <token>`. tls_cert and tls_key are
    PEM files, with which the server uses HTTPS.

    allowed_hosts: names that are allowed in a request's Host header; empty means this machine's
    names on loopback, and any name otherwise. watch_s: interval of checks for a newer artifact.
    shutdown_delay_s: how long requests are still accepted after SIGTERM while /health/ready fails;
    drain_s: how long running requests may then take.
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

    A batch takes all waiting requests, at most `max_rows` rows. After a batch with several requests
    the next batch waits up to `max_delay_ms` for as many requests; a single request does not wait.
    Requests that would wait longer than `latency_budget_ms`, or exceed `queue_rows` rows of the
    queue, get 503 and Retry-After.
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
                "lower batching.max_delay_ms, or raise batching.latency_budget_ms"
            )
        if self.queue_rows < self.max_rows:
            raise ConfigError(
                f"batching.queue_rows={self.queue_rows} is smaller than a batch of batching.max_rows={self.max_rows}: raise it"
            )


@dataclass
class LimitsConfig:
    """Limits of one request. header_timeout_s and body_timeout_s limit how long its header and body
    may take to arrive.

    For /retrieve: at most `k` items per row, and at most `filter_ids` ids in a list of allowed or
    excluded items.
    A client is an IPv4 address, or 64 bits of an IPv6 address; clients behind a proxy are one.
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
