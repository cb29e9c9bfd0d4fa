"""Log answered requests as Parquet files:  python -m pipeline serve artifact=A observers.log.folder=logs/serving

Requests are chosen by a hash of their id (share), so every server chooses the same ones, and by
rate (requests_per_s). The log has the raw values of users: protect the folder.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from prometheus_client import Counter, Gauge

from pipeline.config.registry import register
from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.log_files import IDS, PREFIX, About, LogWriter, list_column, score_names
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_given, check_within
from pipeline.runtime.logs import get_logger
from pipeline.serving.http.admission import ClientRates
from pipeline.serving.http.batching import PREFIX as METRICS
from pipeline.serving.http.batching import ServerMetrics
from pipeline.serving.http.observers import Answered
from pipeline.serving.scoring.dense_program import DenseProgram
from pipeline.serving.scoring.encoded import features_of
from pipeline.serving.scoring.scorer import ColumnLists, as_table, concat_rows, schema_of, score_columns, with_text

logger = get_logger(__name__)


@register("observer", "log")
@dataclass
class LogSettings:
    """share: of the requests, by their ids. requests_per_s: at most so many of them; None: no limit.
    flush_s, rows_per_file: when the waiting rows become a file; kill -9 loses the waiting rows.
    max_gb: of all files; the oldest are removed.
    """

    folder: str = "???"
    share: float = 1.0
    requests_per_s: float | None = None
    flush_s: float = 10.0
    rows_per_file: int = 100_000
    max_gb: float = 10.0

    def __post_init__(self) -> None:
        if self.folder != "???":
            check_given("observers.log.folder", self.folder)
            if "://" in self.folder:
                raise ConfigError(f"observers.log.folder={self.folder}: the log is written to a local folder")
        check_within("observers.log.share", self.share, 0.0, 1.0)
        if self.requests_per_s is not None:
            check_above("observers.log.requests_per_s", self.requests_per_s, 0.0)
        check_above("observers.log.flush_s", self.flush_s, 0.0)
        check_at_least("observers.log.rows_per_file", self.rows_per_file, 1)
        check_above("observers.log.max_gb", self.max_gb, 0.0)

    def make(self, metrics: ServerMetrics) -> ServingLog:
        try:
            writer = LogWriter(self.folder, self.rows_per_file, self.flush_s, int(self.max_gb * 2**30))
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(13, "no write permission")
        except OSError as error:
            raise ConfigError(f"observers.log.folder={self.folder} cannot be written to: {error.strerror}") from None
        return ServingLog(self, writer, metrics)


class ServingLog:
    """The observer. wants() runs on the event loop, the other methods on one thread."""

    def __init__(self, settings: LogSettings, writer: LogWriter, metrics: ServerMetrics) -> None:
        self._writer, self._threshold = writer, round(settings.share * 2**32)
        self._rates = None if settings.requests_per_s is None else ClientRates(settings.requests_per_s)
        registry = metrics.registry
        self._rows = Counter(f"{METRICS}_log_rows", "Rows given to the serving log", registry=registry)
        self._lost = Counter(f"{METRICS}_log_lost_requests", "Requests that could not be logged", registry=registry)
        self._bytes = Gauge(f"{METRICS}_log_bytes", "Files of the serving log", registry=registry)
        self._removed = Gauge(f"{METRICS}_log_removed_files", "Oldest files that were removed", registry=registry)

    def wants(self, answered: Answered) -> bool:
        if answered.model.retrieves or not answered.rows.num_rows:
            return False
        if zlib.crc32(answered.request_id.encode()) >= self._threshold:
            return False
        return self._rates is None or not self._rates.take("")

    def take(self, answered: Sequence[Answered]) -> None:
        # Lists of one model become columns together; a table, or a user with items, alone.
        groups: dict[tuple[int, str, int], list[Answered]] = {}
        for number, each in enumerate(answered):
            alone = 0 if isinstance(each.rows, ColumnLists) else 1 + number
            groups.setdefault((id(each.model), each.scored.version, alone), []).append(each)
        for group in groups.values():
            try:
                self._add(group)
            except (ArithmeticError, ValueError, LookupError, TypeError) as error:
                if len(group) > 1:  # text that is not valid Unicode must not cost other requests their rows
                    for each in group:
                        self.take([each])
                    continue
                self._lost.inc()
                logger.warning("request %s is not logged: %s", group[0].request_id, " ".join(str(error).split())[:200])
        self._writer.flush_if_due()
        self._bytes.set(self._writer.num_bytes)
        self._removed.set(self._writer.num_removed)

    def _add(self, group: Sequence[Answered]) -> None:
        about, table = rows_of(group)
        self._writer.add(about, table)
        self._rows.inc(table.num_rows)

    def close(self) -> None:
        self._writer.flush()


def rows_of(group: Sequence[Answered]) -> tuple[About, pa.Table]:
    """Return requests that one version answered as rows of the log."""
    scorer: Any = group[0].model.scorer
    about = _about(scorer)
    rows = concat_rows([each.rows for each in group]) if len(group) > 1 else group[0].rows
    # A user with items has its columns in another order, and the same rows go to the same file.
    raw = with_text(as_table(rows), scorer.columns.sparse).select(about.raw).cast(schema_of(scorer.columns))
    features = features_of([span for each in group for span in each.scored.encoded], len(about.features))
    numbers = np.full(raw.num_rows, -1)
    numbers[features.kept] = np.arange(len(features.kept))
    kept = pa.array(numbers, mask=numbers < 0)
    counts = [each.rows.num_rows for each in group]
    version, _, delta = group[0].scored.version.partition("+")
    reasons: list[str | None] = []
    for each, count in zip(group, counts, strict=True):
        said = {row.row: row.reason for row in each.scored.refused}
        reasons += [said.get(row) for row in range(count)]
    columns: dict[str, Any] = {
        log_files.REQUEST_ID: pa.array(np.repeat(np.array([each.request_id for each in group], object), counts)),
        log_files.ROW: pa.array(np.concatenate([np.arange(count) for count in counts]), pa.int32()),
        log_files.TIME: pa.array(
            np.repeat([round(each.at * 1e6) for each in group], counts), pa.timestamp("us", tz="UTC")
        ),
        log_files.ARTIFACT: pa.repeat(version, raw.num_rows),
        log_files.DELTA: pa.array(np.full(raw.num_rows, int(delta or 0)), pa.int32()),
        log_files.REASON: pa.array(reasons, pa.string()),
        log_files.BATCH_ROWS: pa.array(features.batch[:, 0], pa.int32()).take(kept),
        log_files.BATCH_ROW: pa.array(features.batch[:, 1], pa.int32()).take(kept),
    }
    scores = np.concatenate([each.scored.scores.reshape(len(each.scored.scores), -1) for each in group])
    without = pa.array(np.isin(np.arange(raw.num_rows), [row for row, said in enumerate(reasons) if said is not None]))
    for number, name in enumerate(score_names(about.scores)):
        columns[name] = pa.array(scores[:, number], pa.float32(), mask=without.to_numpy(zero_copy_only=False))
    width = features.dense.shape[1]
    columns[log_files.DENSE] = list_column(
        features.dense.reshape(-1), np.full(len(features.kept), width), pa.float32(), kept
    )
    for name, values, lengths in zip(about.features, features.values, features.lengths, strict=True):
        columns[IDS + name] = list_column(values, lengths, pa.int64(), kept)
    own = pa.table(columns)
    return about, pa.table([*raw.columns, *own.columns], names=[*raw.column_names, *own.column_names])


def _about(scorer: Any) -> About:
    manifest = getattr(scorer, "manifest", None)
    raw = schema_of(scorer.columns).names
    if taken := [name for name in raw if name.startswith(PREFIX)]:
        raise ValueError(f"the raw column {taken[0]!r} begins with {PREFIX}, as the log's own columns")
    schema = getattr(manifest, "schema", None)
    return About(
        scorer.version.partition("+")[0],
        str(manifest.lineage.get("name") or "") if manifest is not None else "",
        raw,
        [feature.name for feature in schema.features] if schema is not None else [],
        list(schema.dense) if schema is not None else [],
        score_columns(scorer.tasks),
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        manifest is not None and not isinstance(scorer.program, DenseProgram),
    )
