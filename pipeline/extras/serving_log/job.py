"""The jobs of the verbs skew and join_labels (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.jobs.job import Job, job_of
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_given, check_within


@job_of("skew")
@dataclass
class SkewJob(Job):
    """Compare a serving log with what training makes of the same rows. artifact: one, a registry, or a
    folder of artifacts. rows: Parquet files with the training rows of the same requests. data_path:
    the prepared data set whose training split features are compared with. reference: a file that is
    read if there is a log, and written otherwise. The limits decide the exit status.
    """

    artifact: str = "???"
    log: str | None = None
    rows: str | None = None
    id_column: str = "request_id"
    row_column: str = "row"
    data_path: str | None = None
    reference: str | None = None
    reference_rows: int = 100_000
    output: str | None = None
    max_differing: float = 0.0
    max_psi: float = 0.2

    def __post_init__(self) -> None:
        check_given("artifact", self.artifact)
        if self.log is None and self.reference is None:
            raise ConfigError("skew needs log=<folder of observers.log>, or reference=<a file to write> without a log")
        if self.log is None and (self.rows is not None or self.output is not None):
            raise ConfigError("rows and output are for a log: give log=<folder of observers.log>")
        check_within("max_differing", self.max_differing, 0.0, 1.0)
        check_above("max_psi", self.max_psi, 0.0)
        check_at_least("reference_rows", self.reference_rows, 100)


@job_of("join_labels")
@dataclass
class JoinLabelsJob(Job):
    """Join labels to logged rows by request id. labels: Parquet or CSV files with the columns
    id_column, label_column, time_column, and row_column if a request has several rows. A label counts if it comes at
    most window_s after its request. negatives: rows without a label are 0 when their window is over.
    """

    log: str = "???"
    labels: str = "???"
    output: str = "???"
    window_s: float = 86_400.0
    negatives: bool = True
    now: float | None = None
    label: str = "label"
    timestamp: str = "timestamp"
    id_column: str = "request_id"
    row_column: str = "row"
    label_column: str = "label"
    time_column: str = "time"

    def __post_init__(self) -> None:
        for name in ("log", "labels", "output", "label", "timestamp", "id_column", "label_column", "time_column"):
            check_given(name, getattr(self, name))
        check_above("window_s", self.window_s, 0.0)
