"""Define the Parquet files of a serving log: one row for each row of an answered request.

    <raw column>...                     as the server parsed it
    log.request_id, log.row, log.time   the request, the row's number in it, and when it was answered
    log.artifact, log.delta             version of the artifact, and the last delta that was applied (0: none)
    log.score, or log.score_<task>...   float32; null if the row has no score, and log.reason says why
    log.dense, log.ids.<feature>...     what the row was encoded as
    log.batch_rows, log.batch_row       how many rows were scored together, and the row's place among them

The file's metadata names features, torch's version and threads. So one file and the artifact
suffice to compute every score again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import publish_file

PREFIX = "log."
REQUEST_ID, ROW, TIME, ARTIFACT, DELTA, REASON, DENSE, BATCH_ROWS, BATCH_ROW = (
    PREFIX + name
    for name in ("request_id", "row", "time", "artifact", "delta", "reason", "dense", "batch_rows", "batch_row")
)
IDS = PREFIX + "ids."
ABOUT = b"pipeline.serving_log"
FORMAT_VERSION = 1
SUFFIX, UNFINISHED = ".parquet", ".unfinished"
ABANDONED_S = 3600.0  # an unfinished file that is older belongs to a process that was killed


@dataclass(frozen=True)
class About:
    """Describe all rows of a file. name: of the run that the artifact was made from. raw: columns.
    scores: names of the scores' columns. compiled: the layers ran as an AOTInductor package.
    """

    artifact: str
    name: str
    raw: list[str]
    features: list[str]
    dense: list[str]
    scores: list[str]
    torch: str = ""
    threads: int = 1
    cpu: str = ""
    compiled: bool = False
    format_version: int = FORMAT_VERSION


def read_about(schema: pa.Schema, path: str) -> About:
    """Return what a file says about its rows. Raises DataError if it is not a file of a serving log."""
    try:
        values = json.loads((schema.metadata or {})[ABOUT])
        if values["format_version"] != FORMAT_VERSION:
            raise DataError(f"{path} is a serving log of format {values['format_version']}: this release reads 1")
        return About(**values)
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} is not a file of a serving log: give log=<the folder of observers.log>") from None


def log_paths(log: str) -> list[str]:
    """Return the files of a log, a folder or one file, oldest first. Raises DataError if there are none."""
    if storage.is_file(log):
        return [log]
    found = sorted(name for name in (os.listdir(log) if os.path.isdir(log) else []) if name.endswith(SUFFIX))
    if not found:
        raise DataError(f"log={log} has no {SUFFIX} files: give the folder that observers.log.folder names")
    return [storage.join(log, name) for name in found]


def read_file(path: str) -> tuple[About, pa.Table]:
    """Return the rows of a file. Raises DataError if it cannot be read."""
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    return read_about(table.schema, path), table


def read_log(log: str) -> Iterator[tuple[str, About, pa.Table]]:
    """Yield path, description and rows of each file. A file that was removed meanwhile is left out."""
    for path in log_paths(log):
        try:
            yield path, *read_file(path)
        except DataError:
            if os.path.exists(path):
                raise


@dataclass
class LogWriter:
    """Collects rows and writes them to new files of `folder`. A file appears completely or not at all.

    The oldest files are removed if all take more than max_bytes.
    """

    folder: str
    rows_per_file: int
    flush_s: float
    max_bytes: int
    num_removed: int = 0
    num_bytes: int = 0
    _waiting: list[pa.Table] = field(default_factory=list)
    _since: float = 0.0
    _number: int = 0

    def __post_init__(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        for name in os.listdir(self.folder):  # of a process that was killed while it wrote
            path = os.path.join(self.folder, name)
            if name.endswith(UNFINISHED) and time.time() - os.path.getmtime(path) > ABANDONED_S:
                os.remove(path)
        self._remove_oldest()

    def add(self, about: About, table: pa.Table) -> None:
        """Add rows; rows of another schema than the waiting rows begin a new file."""
        table = table.replace_schema_metadata({ABOUT: json.dumps(asdict(about))})
        if self._waiting and not self._waiting[0].schema.equals(table.schema, check_metadata=True):
            self.flush()
        self._since = self._since if self._waiting else time.monotonic()
        self._waiting.append(table)

    def flush_if_due(self) -> None:
        num_rows = sum(table.num_rows for table in self._waiting)
        if num_rows >= self.rows_per_file or (num_rows and time.monotonic() - self._since >= self.flush_s):
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows. If that fails, they are lost, so that memory stays bounded."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._number += 1
        name = f"{time.time_ns() // 1000:017d}-{socket.gethostname()}-{os.getpid()}-{self._number:06d}{SUFFIX}"
        path = os.path.join(self.folder, name)
        try:
            table = pa.concat_tables(waiting)
            pq.write_table(table, path + UNFINISHED, compression="zstd", compression_level=1)
            publish_file(path + UNFINISHED, path)
        finally:
            if os.path.exists(path + UNFINISHED):
                os.remove(path + UNFINISHED)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        sizes: dict[str, int] = {}
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(SUFFIX):
                sizes[os.path.join(self.folder, name)] = os.path.getsize(os.path.join(self.folder, name))
        self.num_bytes = sum(sizes.values())
        for path in list(sizes)[:-1]:
            if self.num_bytes <= self.max_bytes:
                return
            os.remove(path)
            self.num_bytes -= sizes[path]
            self.num_removed += 1


def list_column(values: NDArray[np.generic], lengths: NDArray[np.int64], kind: pa.DataType, kept: pa.Array) -> pa.Array:
    """Return a column of lists. kept: for each row the number of its list, null for a row without one."""
    offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind)).take(kept)


def raw_columns(table: pa.Table) -> pa.Table:
    return table.select([name for name in table.column_names if not name.startswith(PREFIX)])


def score_names(names: Sequence[str]) -> list[str]:
    return [PREFIX + name for name in names]
