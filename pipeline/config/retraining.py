"""Define retraining: windows of new data, their checks, the gate for a challenger, the registry
(stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.registry import find
from pipeline.config.serving import (
    DENSE_PRECISIONS,
    CalibrationConfig,
    CardConfig,
    ParityConfig,
    PruningConfig,
    check_onnx,
    check_precisions,
)
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within
from pipeline.runtime.process.processes import PRIORITIES

WINDOW_KINDS = ("partitions", "timestamps")
LATE_POLICIES = ("skip", "use")
TIMESTAMP_UNITS = ("s", "ms", "us")
DENSE_POLICIES = ("load", "fresh", "matching")


@dataclass
class WindowsConfig:
    """How `source` is divided into windows of `length_hours`, and when a window is complete.

    partitions: one folder per window; `pattern` (strptime) reads its start from its path below
    `source`. timestamps: rows of one growing source, by `timestamp_column` (whole numbers of
    `timestamp_unit`, or ISO 8601).

    A window is ready if its folder has the file `marker` and it has `min_rows` rows. With an empty
    marker a folder is ready at once; with timestamps a window is ready if a row of a later window
    exists. A window that is not ready blocks later windows until `lateness_hours` after its end;
    then it is skipped, or used as it is. With lateness_hours=0 nothing waits for a missing window.
    """

    kind: str = "partitions"
    pattern: str = "dt=%Y-%m-%d"
    length_hours: float = 24.0
    marker: str = "_SUCCESS"
    min_rows: int = 0
    lateness_hours: float = 24.0
    late: str = "skip"
    timestamp_column: str | None = None
    timestamp_unit: str = "s"
    # ignore windows before this one, such as `2026-11-20` or `2026-11-20T03`
    first: str | None = None

    def __post_init__(self) -> None:
        check_choice("windows.kind", self.kind, WINDOW_KINDS)
        check_choice("windows.late", self.late, LATE_POLICIES)
        check_choice("windows.timestamp_unit", self.timestamp_unit, TIMESTAMP_UNITS)
        check_above("windows.length_hours", self.length_hours, 0.0)
        check_at_least("windows.min_rows", self.min_rows, 0)
        check_at_least("windows.lateness_hours", self.lateness_hours, 0.0)
        if self.kind == "timestamps" and not self.timestamp_column:
            raise ConfigError("windows.kind=timestamps needs windows.timestamp_column=<column>")
        if self.kind == "partitions" and "%" not in self.pattern:
            raise ConfigError(
                f"windows.pattern={self.pattern!r} has no time; use strptime's letters, for example dt=%Y-%m-%d/hour=%H"
            )


@dataclass
class GrowthConfig:
    """How vocabularies, tables and optimizer state change from window to window.

    A value's count is its count in the window plus `count_decay` times its earlier count. Ids are
    sorted by descending count. Values below data.ids.min_frequency or beyond data.ids.max_size lose
    their row. Tables have one row per id; rows move with their values, and new rows are
    initialized.

    anneal: learning rates that schedule.* leaves constant fall to 0 over each window, because a
    model is judged after its last steps. At a constant rate the last few batches change its
    calibration by percents.
    """

    count_decay: float = 1.0
    # share of a window's rows that are measured during training and not trained on
    validation_fraction: float = 0.02
    anneal: bool = True
    reset_optimizer: bool = False
    dense: str = "load"  # for a model whose layers have changed: as warm_start.dense

    def __post_init__(self) -> None:
        check_within("growth.count_decay", self.count_decay, 0.0, 1.0)
        check_within("growth.validation_fraction", self.validation_fraction, 0.001, 0.5)
        check_choice("growth.dense", self.dense, DENSE_POLICIES)


@dataclass
class DataChecksConfig:
    """Limits for a window before it is used, compared with the median of the accepted windows
    before it.

    None disables a check. A comparison with the past needs `min_history` windows and uses the newest
    `trailing`. Limits that use the champion (unknown ids, NE) apply per window that it has not seen,
    including this one. first: windows before it are not compared with, for a permanent change of the data.
    """

    first: str | None = None  # as windows.first
    trailing: int = 14
    min_history: int = 2
    row_count_change: float | None = 0.3
    label_rate_change: float | None = 0.3
    # for any feature: share of rows without an id that the champion knows
    unknown_share_rise: float | None = 0.1
    # between any feature's values and the window before; 0: equal, 1: nothing in common
    distance_rise: float | None = 0.2
    # rows that an earlier window also has, above the trailing median
    repeated_share: float | None = 0.1
    # relative; finds labels that are partly wrong, and unusual days
    champion_ne_rise: float | None = 0.05
    # rows with a timestamp outside the window, if there is a timestamp column
    outside_share: float | None = 0.01
    remember: int = 60  # number of windows whose rows are compared with a new window

    def __post_init__(self) -> None:
        check_at_least("checks.trailing", self.trailing, 1)
        check_at_least("checks.min_history", self.min_history, 1)
        if self.trailing < self.min_history:
            raise ConfigError(
                f"checks.trailing={self.trailing} windows are fewer than checks.min_history={self.min_history}, so no window would ever be "
                "checked: raise checks.trailing or lower checks.min_history"
            )
        check_at_least("checks.remember", self.remember, 1)
        for name in ("row_count_change", "label_rate_change", "unknown_share_rise", "distance_rise", "repeated_share",
                     "champion_ne_rise", "outside_share"):  # fmt: skip
            check_at_least(f"checks.{name}", getattr(self, name), 0.0, allow_none=True)


@dataclass
class ExportGateConfig:
    """The artifact of a challenger's version, with the settings of `export`. Beyond `parity`'s
    limits nothing is promoted. If it is not enabled, versions have no artifact, and no artifact is
    compared with the trained model."""

    enabled: bool = True
    precision: str = "int8"
    tables: dict[str, str] = field(default_factory=dict)
    ne_budget: float = 0.0005
    dense: str = "fp32"
    compiled: bool = False
    onnx: bool = False
    feature_tables: dict[str, str] = field(default_factory=dict)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    card: CardConfig = field(default_factory=CardConfig)

    def __post_init__(self) -> None:
        check_precisions(self.precision, self.tables)
        check_choice("gate.export.dense", self.dense, DENSE_PRECISIONS)
        check_onnx("gate.export.", self.onnx, self.dense)
        check_at_least("gate.export.ne_budget", self.ne_budget, 0.0)


@dataclass
class GateConfig:
    """Conditions for a challenger on the next window, on the same rows as the champion.

    ne_tolerance: NE of the challenger may be the champion's times 1 + this, at the upper bound of a
    paired bootstrap (one-sided, `confidence`). slices: feature -> how much worse (relative) the NE
    of any of its values may be; this uses values with at least `slice_min_rows` rows that have both
    labels. max_ne limits the first version, which has no champion to compare with.

    For a model with several labels, `task` is the binary label of these conditions; None is the
    main label. held: label -> how much its NE may rise (relative) at the bootstrap's upper bound;
    for a regression its squared error.

    policy: as in `evaluate`. What serving by the challenger would earn must exceed what serving by
    the champion would earn by more than policy_gain, at the lower bound of `confidence`.
    """

    task: str | None = None
    held: dict[str, float] = field(default_factory=dict)
    ne_tolerance: float = 0.001
    confidence: float = 0.95
    bootstrap_samples: int = 1000
    calibration_min: float = 0.97
    calibration_max: float = 1.03
    slices: dict[str, float] = field(default_factory=dict)
    slice_min_rows: int = 1000
    min_rows: int = 1000
    max_ne: float = 1.0
    policy: dict[str, Any] = field(default_factory=dict)
    policy_gain: float = 0.0
    export: ExportGateConfig = field(default_factory=ExportGateConfig)

    def __post_init__(self) -> None:
        check_at_least("gate.ne_tolerance", self.ne_tolerance, 0.0)
        check_within("gate.confidence", self.confidence, 0.5, 0.9999)
        check_at_least("gate.bootstrap_samples", self.bootstrap_samples, 100)
        check_above("gate.calibration_min", self.calibration_min, 0.0)
        check_at_least("gate.calibration_max", self.calibration_max, self.calibration_min)
        check_at_least("gate.slice_min_rows", self.slice_min_rows, 1)
        check_at_least("gate.min_rows", self.min_rows, 1)
        check_above("gate.max_ne", self.max_ne, 0.0)
        for name, limit in self.slices.items():
            check_at_least(f"gate.slices.{name}", limit, 0.0)
        for name, limit in self.held.items():
            check_at_least(f"gate.held.{name}", limit, 0.0)


@dataclass
class RegistryConfig:
    """Where versions are stored and how many. The champion and the version before it are always
    kept."""

    path: str = "${paths.registry}/${name}"  # a folder or s3://bucket/prefix
    keep: int = 5
    mlflow: str | None = None  # tracking URI of a copy, which is never read
    # a challenger that passes the gate answers this share of the keys first; None: it is promoted at once
    canary_share: float | None = None

    def __post_init__(self) -> None:
        check_at_least("registry.keep", self.keep, 2)
        if self.canary_share is not None:
            check_within("registry.canary_share", self.canary_share, 0.0, 1.0)


REGISTRY_COMMANDS = ("list", "history", "verify", "rollback", "unpin", "add")


STARTS = ("earliest", "latest")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass
class NewValuesConfig:
    """How values that are not in the vocabularies get ids. spare=0: they are unknown.

    spare: a table starts with this many additional rows per existing row, and grows by the same
    number when it is full. The step is then saved, and the tables are allocated again in the same
    process. A table does not grow beyond max_rows. admit_probability: probability that an unknown
    value gets a row at each batch that holds it; 1 means at once.
    """

    spare: float = 0.0
    admit_probability: float = 1.0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_within("stream.new_values.spare", self.spare, 0.0, 100.0)
        check_above("stream.new_values.admit_probability", self.admit_probability, 0.0)
        check_within("stream.new_values.admit_probability", self.admit_probability, 0.0, 1.0)
        check_at_least("stream.new_values.max_rows", self.max_rows, 1, allow_none=True)


@dataclass
class StreamConfig:
    """How `source` is followed: a folder with new and growing files, a Kafka topic, or a plugin's
    kind of stream.

    Rows are lines of text in data.format. They wait until there are enough for a step.
    event_time_column is a column of the rows, in whole numbers of event_time_unit since 1970 or ISO
    8601; the log and the metrics then report the age of rows.
    """

    kind: str = "folder"
    poll_s: float = 1.0
    # end after this time without a row; None: follow until SIGTERM or Ctrl-C
    idle_s: float | None = None
    start: str = "earliest"  # where a run without a saved step starts
    event_time_column: str | None = None
    event_time_unit: str = "s"
    # low or idle: other programs on the machine, for example a server, have priority
    priority: str = "normal"
    # true: the columns of data.joins are joined to each row as of its time; false: rows hold them
    join: bool = False
    new_values: NewValuesConfig = field(default_factory=NewValuesConfig)
    # for kafka: settings of librdkafka, including bootstrap.servers
    options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_above("stream.poll_s", self.poll_s, 0.0)
        if self.idle_s is not None:
            check_above("stream.idle_s", self.idle_s, 0.0)
        check_choice("stream.start", self.start, STARTS)
        check_choice("stream.priority", self.priority, PRIORITIES)
        check_choice("stream.event_time_unit", self.event_time_unit, tuple(UNITS))
        if self.kind == "kafka" and "bootstrap.servers" not in self.options:
            raise ConfigError("stream.kind=kafka needs stream.options={bootstrap.servers: 'host:9092'}")

    def check_kind(self) -> None:
        """Raise ConfigError if nothing registers this kind."""
        find("stream", self.kind, "stream.kind")
