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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

PREFIX = "log."
REQUEST_ID, ROW, TIME, ARTIFACT, DELTA, REASON, DENSE, BATCH_ROWS, BATCH_ROW = (
    PREFIX + name
    for name in ("request_id", "row", "time", "artifact", "delta", "reason", "dense", "batch_rows", "batch_row")
)
IDS = PREFIX + "ids."
ABOUT = b"pipeline.serving_log"
FORMAT_VERSION = 1
SUFFIX, UNFINISHED = ".parquet", ".unfinished"


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
    """Yield path, description and rows of each file. A file is left out if it was removed meanwhile, or if all its rows
    were erased.
    """
    for path in log_paths(log):
        try:
            about, table = read_file(path)
            if table.num_rows:
                yield path, about, table
        except DataError:
            if os.path.exists(path):
                raise


def raw_columns(table: pa.Table) -> pa.Table:
    return table.select([name for name in table.column_names if not name.startswith(PREFIX)])


def score_names(names: Sequence[str]) -> list[str]:
    return [PREFIX + name for name in names]
