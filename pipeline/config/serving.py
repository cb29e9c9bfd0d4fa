"""Define export and serving: pruning, parity limits, the server and its requests (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.data import SPLITS
from pipeline.config.registry import find
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_given, check_within

PRECISIONS = ("fp32", "fp16", "int8", "int4", "int2")  # of tables, from the largest to the smallest
AUTO = "auto"
DENSE_PRECISIONS = ("fp32", "bf16", "int8")
PRUNINGS = ("none", "untrained", "frequency")
CALIBRATIONS = ("none", "platt", "isotonic")


@dataclass
class PruningConfig:
    """Which rows of a table the artifact leaves out. The unknown row (0) replaces each of them.

    untrained: rows whose optimizer state is at most `state_at_most` (0: never trained). With
    `fraction` also the least trained rows, up to that share of all tables' rows. frequency: the
    rarest `fraction` of all tables' rows; or in each table the rows after the most frequent rows
    that cover `keep_lookups` of its training lookups. Tables of hashed ids are not pruned, because
    their ids are not sorted by frequency.
    """

    kind: str = "none"
    fraction: float | None = None
    state_at_most: float = 0.0
    keep_lookups: float | None = None

    def __post_init__(self) -> None:
        check_choice("pruning.kind", self.kind, PRUNINGS)
        check_at_least("pruning.state_at_most", self.state_at_most, 0.0)
        for name in ("fraction", "keep_lookups"):
            if getattr(self, name) is not None:
                check_within(f"pruning.{name}", getattr(self, name), 0.0, 1.0)
        given = [name for name in ("fraction", "keep_lookups") if getattr(self, name) is not None]
        if self.kind == "frequency" and len(given) != 1:
            raise ConfigError(
                "pruning.kind=frequency needs one of pruning.fraction and pruning.keep_lookups, each in [0, 1]"
            )
        if self.kind != "frequency" and self.keep_lookups is not None:
            raise ConfigError(f"pruning.keep_lookups needs pruning.kind=frequency, not {self.kind}")
        if self.kind == "none" and given:
            raise ConfigError(
                f"pruning.{given[0]} prunes nothing under pruning.kind=none; choose untrained or frequency"
            )
        if self.kind != "untrained" and self.state_at_most:
            raise ConfigError(f"pruning.state_at_most needs pruning.kind=untrained, not {self.kind}")


@dataclass
class ParityConfig:
    """How the artifact is compared with the trained model: the rows, and the allowed differences.
    Uses the first `max_rows` rows of each split. An artifact that exceeds a limit on any split is
    refused."""

    splits: list[str] = field(default_factory=lambda: list(SPLITS))
    max_rows: int = 100_000
    max_ne_increase: float = 0.001
    max_auc_decrease: float = 0.001
    # for any single row; the certificate states the mean and the maximum
    max_score_difference: float = 0.25

    def __post_init__(self) -> None:
        for split in self.splits:
            check_choice("parity.splits", split, SPLITS)
        if "validation" not in self.splits:
            raise ConfigError(f"parity.splits={self.splits} must contain validation, which the certificate describes")
        check_at_least("parity.max_rows", self.max_rows, 1)
        check_at_least("parity.max_ne_increase", self.max_ne_increase, 0.0)
        check_at_least("parity.max_auc_decrease", self.max_auc_decrease, 0.0)
        check_within("parity.max_score_difference", self.max_score_difference, 0.0, 1.0)


@dataclass
class CardConfig:
    """What a model card says that the code cannot know, and by which features it measures. None and
    [] mean that it is not known; the card then says so.

    window: the time of the training rows; retrain sets it to the name of its window.
    """

    license: str | None = None
    contact: str | None = None
    intended_use: str | None = None
    window: str | None = None
    limits: list[str] = field(default_factory=list)
    slices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if twice := [name for name in self.slices if self.slices.count(name) > 1]:
            raise ConfigError(f"card.slices={self.slices} names {twice[0]} twice: name each once")


@dataclass
class CalibrationConfig:
    """Map the scores of binary labels to probabilities that fit the labels of the validation rows
    (the rows of `parity`). The map is strictly increasing, so rows keep their order.

    platt: a line between logits, fitted by log loss. isotonic: any increasing curve. `by` names a
    categorical feature: each of its values with at least `min_rows` validation rows has its own
    curve, so rows of different values can change their order.
    """

    kind: str = "none"
    by: str | None = None
    min_rows: int = 1000

    def __post_init__(self) -> None:
        check_choice("calibration.kind", self.kind, CALIBRATIONS)
        check_at_least("calibration.min_rows", self.min_rows, 1)
        if self.by is not None and self.kind == "none":
            raise ConfigError(
                f"calibration.by={self.by} calibrates nothing under calibration.kind=none: choose platt or isotonic"
            )


@dataclass
class RetrievalConfig:
    """How the artifact of a two-tower model finds items. Other models do not use it.

    index: `auto` compares with every item (exact) below 100,000 items and uses hnsw above. hnsw and
    flat need faiss. catalogue: raw rows of the items to find; None means every item of the data
    set, with the other item features of its last training row. neighbours, build_search and search
    are settings of hnsw: links per item, and candidates while building and searching.
    min_index_recall compares the index with exact search, max_recall_decrease compares the artifact
    with the trained model, both for validation users. If either limit fails, nothing is written.
    """

    index: str = AUTO
    catalogue: str | None = None
    neighbours: int = 32
    build_search: int = 100
    search: int = 256
    max_recall_decrease: float = 0.01
    min_index_recall: float = 0.95

    def __post_init__(self) -> None:
        if self.index != AUTO:
            find("index", self.index, "retrieval.index")
        if self.catalogue is not None:
            check_given("retrieval.catalogue", self.catalogue)
        check_within("retrieval.neighbours", self.neighbours, 2, 512)
        check_at_least("retrieval.build_search", self.build_search, 1)
        check_at_least("retrieval.search", self.search, 1)
        check_within("retrieval.max_recall_decrease", self.max_recall_decrease, 0.0, 1.0)
        check_within("retrieval.min_index_recall", self.min_index_recall, 0.0, 1.0)


TOWERS = ("user", "item")


@dataclass
class RetrieveConfig:
    """What predict writes for a two-tower's artifact: the `k` best items per user row, or `vectors`
    of the `tower`."""

    k: int = 100
    vectors: bool = False
    tower: str = "user"

    def __post_init__(self) -> None:
        check_at_least("retrieve.k", self.k, 1)
        check_choice("retrieve.tower", self.tower, TOWERS)
        if self.tower == "item" and not self.vectors:
            raise ConfigError("retrieve.tower=item gives vectors, not best items: set retrieve.vectors=true")


def check_precisions(precision: str, tables: dict[str, str]) -> None:
    """Raise ConfigError for an unknown precision. `tables` has the precisions of single tables."""
    check_choice("precision", precision, (*PRECISIONS, AUTO))
    for name, value in tables.items():
        check_choice(f"tables.{name}", value, PRECISIONS)


def check_onnx(group: str, onnx: bool, dense: str) -> None:
    """Raise ConfigError if ONNX is asked for layers that are not fp32."""
    if onnx and dense != "fp32":
        raise ConfigError(
            f"{group}onnx=true writes layers in fp32, and {group}dense={dense}: leave out {group}dense, or {group}onnx"
        )


LOOPBACK_URLS = ("http://127.0.0.1:", "http://localhost:", "http://[::1]:")
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
    PEM files, with which the server uses HTTPS. jwks is the URL or file of an identity provider's
    public keys: tokens that it signed for jwt_audience are then accepted too.

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
    jwks: str | None = None
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
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
        if len({bool(value) for value in (self.jwks, self.jwt_issuer, self.jwt_audience)}) > 1:
            raise ConfigError(
                "signed tokens need server.jwks, server.jwt_issuer and server.jwt_audience: set all three"
            )
        if self.jwks and self.jwks.startswith("http://") and not self.jwks.startswith(LOOPBACK_URLS):
            raise ConfigError(f"server.jwks={self.jwks} could be changed on its way: use https://, or a file")


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
