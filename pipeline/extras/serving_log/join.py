"""Join labels to logged rows by request id within a window, and write the rows as a source of prepare.

Each file of the log becomes one file of the same name, once the window of its last row is over. The
files are never changed. So `prepare source=<output>` and `retrain source=<output> follow=true` read
each row once, with its final label, raw columns as they were served, and the time of the request.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.compare_rows import keys_of
from pipeline.extras.serving_log.job import JoinLabelsJob
from pipeline.extras.serving_log.log_files import UNFINISHED, About, raw_columns, read_log, score_names
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import publish_file

SUMMARY = "_summary.json"  # followers of the folder leave out names with _
RECENT_ROWS = 100_000
SCORE = "log.score"


@dataclass
class Joined:
    """Counts of one call. late: labels after the window. early: labels before their request. unlogged:
    labels of requests that the log lacks, which is usual if it has a share of the requests.
    """

    files: int = 0
    rows: int = 0
    labelled: int = 0
    pending_rows: int = 0
    late: int = 0
    early: int = 0
    matched: int = 0
    unlogged: int = 0
    output: str = ""

    def __str__(self) -> str:
        return (
            f"{self.output}: {self.files:,} new files with {self.rows:,} rows, {self.labelled:,} of them with a label\n"
            f"{self.pending_rows:,} rows wait until their window is over; labels: {self.late:,} too late, "
            f"{self.early:,} before their request, {self.unlogged:,} of requests that are not in these files"
        )


@dataclass
class Labels:
    """keys, values and times (seconds since 1970) of all labels. has_rows: they name a request's row."""

    keys: pa.Array
    values: np.ndarray
    times: np.ndarray
    has_rows: bool
    used: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.used = np.zeros(len(self.values), np.bool_)


def join_labels(job: JoinLabelsJob) -> Joined:
    """Join what can be joined by now. Raises DataError."""
    labels, found = read_labels(job), Joined(output=job.output)
    now = time.time() if job.now is None else job.now
    try:
        os.makedirs(job.output, exist_ok=True)
    except OSError as error:
        raise DataError(f"output={job.output} cannot be made: {error.strerror}") from None
    for path, about, table in read_log(job.log):
        target = os.path.join(job.output, os.path.basename(path))
        last = np.asarray(table[log_files.TIME].cast(pa.int64())).max() / 1e6
        if os.path.exists(target):
            labels.used |= np.asarray(pa.compute.is_in(labels.keys, value_set=_row_keys(table, labels)))
            continue
        if last + job.window_s > now:
            found.pending_rows += table.num_rows
            continue
        rows = _join(job, about, table, labels, found)
        pq.write_table(rows, target + UNFINISHED + ".tmp", compression="zstd", compression_level=1)
        publish_file(target + UNFINISHED + ".tmp", target)
        found.files, found.rows = found.files + 1, found.rows + rows.num_rows
    found.unlogged = int((~labels.used).sum())
    storage.publish_text(os.path.join(job.output, SUMMARY), json.dumps(_summary(job, found, now), indent=1) + "\n")
    return found


def _row_keys(table: pa.Table, labels: Labels) -> pa.Array:
    return keys_of(table, log_files.REQUEST_ID, log_files.ROW if labels.has_rows else None)


def _join(job: JoinLabelsJob, about: About, table: pa.Table, labels: Labels, found: Joined) -> pa.Table:
    for name in (job.label, job.timestamp):
        if name in about.raw:
            raise DataError(f"the rows have a raw column {name!r} already: choose another label= or timestamp=")
    keys = _row_keys(table, labels)
    rows = np.asarray(pa.compute.index_in(labels.keys, value_set=keys).fill_null(-1), np.int64)
    is_here = rows >= 0
    if not labels.has_rows and is_here.any():
        several = set(table.filter(pa.compute.greater(table[log_files.ROW], 0))[log_files.REQUEST_ID].to_pylist())
        ids = table[log_files.REQUEST_ID].take(pa.array(rows[is_here])).to_pylist()
        if doubtful := next((each for each in ids if each in several), None):
            raise DataError(
                f"request {doubtful!r} has several rows, and labels={job.labels} has no column {job.row_column!r} that "
                "says which one a label is for (numbers from 0): add it, or set row_column"
            )
    labels.used |= is_here
    served_at = np.asarray(table[log_files.TIME].cast(pa.int64())) / 1e6
    delay = np.where(is_here, labels.times - served_at[rows], 0.0)
    is_early, is_late = is_here & (delay < 0), is_here & (delay > job.window_s)
    found.early, found.late = found.early + int(is_early.sum()), found.late + int(is_late.sum())
    counted = is_here & ~is_early & ~is_late
    values = np.full(table.num_rows, -np.inf)
    np.maximum.at(values, rows[counted], labels.values[counted])  # of several labels the largest
    has_label = np.isfinite(values)
    found.labelled += int(has_label.sum())
    values[~has_label] = 0.0
    columns = {
        job.label: pa.array(values, pa.float64()),
        job.timestamp: table[log_files.TIME],
        **{name: table[name] for name in (log_files.REQUEST_ID, log_files.ROW, log_files.ARTIFACT, log_files.DELTA)},
        **{name: table[name] for name in score_names(about.scores)},
    }
    raw = raw_columns(table)
    joined = pa.table([*raw.columns, *columns.values()], names=[*raw.column_names, *columns])
    return joined if job.negatives else joined.filter(pa.array(has_label))


def read_labels(job: JoinLabelsJob) -> Labels:
    """Read all labels. Raises DataError: no file, a missing column, or a value that is not a number or time."""
    tables, has_rows = [], True
    for path in _label_paths(job.labels):
        try:
            table = pa.csv.read_csv(path) if path.endswith(".csv") else pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"labels={path} cannot be read: {' '.join(str(error).split())[:150]}") from None
        wanted = {"id_column": job.id_column, "label_column": job.label_column, "time_column": job.time_column}
        for key, name in wanted.items():
            if name not in table.column_names:
                hint = did_you_mean(name, table.column_names)
                raise DataError(f"labels={path} has no column {name!r}{hint}: set {key}")
        has_rows &= job.row_column in table.column_names
        tables.append((path, table))
    keys, values, times = [], [], []
    for path, table in tables:
        keys.append(keys_of(table, job.id_column, job.row_column if has_rows else None))
        try:
            values.append(np.asarray(table[job.label_column].cast(pa.float64()).fill_null(np.nan)))
            times.append(_seconds(table[job.time_column]))
        except pa.ArrowException as error:
            raise DataError(f"labels={path}: {job.label_column!r} is a number, and {job.time_column!r} is seconds since 1970 or a time: {error}") from None  # fmt: skip
        if not (np.isfinite(values[-1]).all() and np.isfinite(times[-1]).all()):
            raise DataError(f"labels={path} has a label or a time that is missing or not finite: leave such rows out")
    return Labels(pa.concat_arrays(keys), np.concatenate(values), np.concatenate(times), has_rows)


def _seconds(column: pa.ChunkedArray) -> np.ndarray:
    """Return seconds since 1970. A time without a zone is UTC."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
        return np.asarray(column.cast(pa.float64()).fill_null(np.nan)) / 1e6
    return np.asarray(column.cast(pa.float64()).fill_null(np.nan))


def _label_paths(labels: str) -> list[str]:
    if os.path.isfile(labels):
        return [labels]
    names = sorted(os.listdir(labels)) if os.path.isdir(labels) else []
    found = [
        os.path.join(labels, name) for name in names if name.endswith((".parquet", ".csv")) and name[0] not in "._"
    ]
    if not found:
        raise DataError(f"labels={labels} is no .parquet or .csv file, and no folder with such files")
    return found


def _summary(job: JoinLabelsJob, joined: Joined, now: float) -> dict[str, Any]:
    """Return what the newest joined rows say about calibration: label rate and mean score."""
    scores, labels = np.zeros(0), np.zeros(0)
    for table in _newest(job.output):
        if len(scores) >= RECENT_ROWS or SCORE not in table.column_names or job.label not in table.column_names:
            break
        has_score = table[SCORE].is_valid().to_numpy()
        scores = np.concatenate([scores, table[SCORE].to_numpy()[has_score]])
        labels = np.concatenate([labels, table[job.label].to_numpy()[has_score]])
    rates = {"label_rate": float(labels.mean()), "mean_score": float(scores.mean())} if len(scores) else {}
    return {**asdict(joined), "joined_at": now, "recent_rows": len(scores), **rates}


def _newest(output: str) -> Iterator[pa.Table]:
    for name in sorted(os.listdir(output), reverse=True):
        if name.endswith(".parquet"):
            yield pq.ParquetFile(os.path.join(output, name)).read()
