"""Define retraining: windows of new data, their checks, the gate for a challenger, the registry
(stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.serving import DENSE_PRECISIONS, ParityConfig, PruningConfig, check_precisions
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within

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
    limits nothing is promoted.

    If it is not enabled, versions have no artifact, and no artifact is compared with the trained
    model.
    """

    enabled: bool = True
    precision: str = "int8"
    tables: dict[str, str] = field(default_factory=dict)
    ne_budget: float = 0.0005
    dense: str = "fp32"
    compiled: bool = False
    pruning: PruningConfig = field(default_factory=PruningConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)

    def __post_init__(self) -> None:
        check_precisions(self.precision, self.tables)
        check_choice("gate.export.dense", self.dense, DENSE_PRECISIONS)
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
    """Where versions are stored and how many.

    The champion and the version before it are always kept.
    """

    path: str = "${paths.registry}/${name}"  # a folder or s3://bucket/prefix
    keep: int = 5
    mlflow: str | None = None  # tracking URI of a copy, which is never read

    def __post_init__(self) -> None:
        check_at_least("registry.keep", self.keep, 2)


REGISTRY_COMMANDS = ("list", "history", "verify", "rollback", "unpin", "add")
