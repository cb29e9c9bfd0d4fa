"""Write the files of a serving log in a process that runs only on idle cores, so that no request waits for it.

The server sends messages (records.py) to its standard input, and reads reports from its standard
output. The process ends at the end of its input: if the server is killed, what was sent is still written.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.log_files import ABOUT, IDS, SUFFIX, UNFINISHED, About, score_names
from pipeline.extras.serving_log.records import (
    Batch,
    Message,
    Model,
    Report,
    Request,
    Requests,
    Settings,
    cut_of,
    read_messages,
)
from pipeline.runtime.logs import configure_logging, get_logger
from pipeline.runtime.process.processes import lower_priority
from pipeline.runtime.storage.atomic import publish_file
from pipeline.serving.scoring.encoded import join

ABANDONED_S = 3600.0  # an unfinished file that is older belongs to a process that was killed
TABLE_ROWS, TABLE_S = 4096, 1.0  # requests wait for each other, because a small table costs as much as a large one
READ_BYTES = 1 << 20
NICE = 19
logger = get_logger(__name__)


@dataclass
class LogWriter:
    """Collects rows and writes them to new files of `folder`. A file appears completely or not at all.

    The oldest files are removed if all take more than max_bytes. Each model has files of its own.
    """

    folder: str
    rows_per_file: int
    flush_s: float
    max_bytes: int
    report: Report = field(default_factory=Report)
    _waiting: dict[str, list[pa.Table]] = field(default_factory=dict)  # by the description of their rows
    _since: dict[str, float] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        for name in os.listdir(self.folder):  # of a process that was killed while it wrote
            path = os.path.join(self.folder, name)
            if name.endswith(UNFINISHED) and time.time() - os.path.getmtime(path) > ABANDONED_S:
                os.remove(path)
        self._remove_oldest()

    def add(self, about: About, table: pa.Table) -> None:
        described = json.dumps(asdict(about))
        self._since.setdefault(described, time.monotonic())
        self._waiting.setdefault(described, []).append(table)

    def flush_if_due(self) -> None:
        for described, since in list(self._since.items()):
            num_rows = sum(table.num_rows for table in self._waiting[described])
            if num_rows >= self.rows_per_file or time.monotonic() - since >= self.flush_s:
                self._write(described)

    def flush(self) -> None:
        for described in list(self._waiting):
            self._write(described)

    def _write(self, described: str) -> None:
        """Write the waiting rows of a model. If that fails, they are lost, so that memory stays bounded."""
        table = pa.concat_tables(self._waiting.pop(described)).replace_schema_metadata({ABOUT: described})
        self._since.pop(described)
        self._number += 1
        name = f"{time.time_ns() // 1000:017d}-{socket.gethostname()}-{os.getpid()}-{self._number:06d}{SUFFIX}"
        path = os.path.join(self.folder, name)
        try:
            pq.write_table(table, path + UNFINISHED, compression="zstd", compression_level=1)
            publish_file(path + UNFINISHED, path)
            self.report.written += _num_requests(table)
            self._remove_oldest()
        except (OSError, pa.ArrowException) as error:
            if not os.path.exists(path):
                self.lose(_num_requests(table), error)
        finally:
            with suppress(FileNotFoundError):
                os.remove(path + UNFINISHED)

    def lose(self, num_requests: int, error: Exception) -> None:
        self.report.lost += num_requests
        logger.warning("%d requests are not logged: %s", num_requests, " ".join(str(error).split())[:200])

    def _remove_oldest(self) -> None:
        sizes: dict[str, int] = {}
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(SUFFIX):
                sizes[os.path.join(self.folder, name)] = os.path.getsize(os.path.join(self.folder, name))
        self.report.num_bytes = sum(sizes.values())
        for path in list(sizes)[:-1]:
            if self.report.num_bytes <= self.max_bytes:
                return
            os.remove(path)
            self.report.num_bytes -= sizes[path]
            self.report.removed += 1


def _num_requests(table: pa.Table) -> int:
    return int(pc.sum(pc.equal(table[log_files.ROW], 0)).as_py() or 0)


def table_of(model: Model, sent: Sequence[Requests]) -> pa.Table:
    """Return requests that one model answered as rows of the log."""
    about, requests = model.about, [each for one in sent for each in one.requests]
    raw = _raw_rows(pa.ipc.read_schema(pa.py_buffer(model.schema)), requests)
    cuts, num_rows = [], 0
    for one in sent:
        own = [cut_of(each, len(about.features)) for each in one.batch.cuts]
        row_of = np.full(1 + max((int(each.kept[-1]) for each in own), default=-1), -1)  # of a row of the batch
        for request in one.requests:
            end = min(request.begin + request.num_rows, len(row_of))
            row_of[request.begin : end] = np.arange(num_rows, num_rows + end - request.begin)
            num_rows += request.num_rows
        cuts += [each._replace(kept=row_of[each.kept]) for each in own]
    features = join(cuts, len(about.features))
    numbers, is_wanted = np.full(raw.num_rows, -1), features.kept >= 0
    numbers[features.kept[is_wanted]] = np.flatnonzero(is_wanted)
    kept = pa.array(numbers, mask=numbers < 0)
    counts = np.array([each.num_rows for each in requests])
    begins = counts.cumsum() - counts
    reasons: list[str | None] = [None] * raw.num_rows
    for begin, each in zip(begins.tolist(), requests, strict=True):
        for row, reason in each.refused:
            reasons[begin + row] = reason
    columns: dict[str, Any] = {
        log_files.REQUEST_ID: pa.array(np.repeat(np.array([each.request_id for each in requests], object), counts)),
        log_files.ROW: pa.array(np.arange(raw.num_rows) - np.repeat(begins, counts), pa.int32()),
        log_files.TIME: pa.array(np.repeat([each.at_us for each in requests], counts), pa.timestamp("us", tz="UTC")),
        log_files.ARTIFACT: pa.repeat(about.artifact, raw.num_rows),
        log_files.DELTA: pa.array(np.repeat([each.delta for each in requests], counts), pa.int32()),
        log_files.REASON: pa.array(reasons, pa.string()),
        log_files.BATCH_ROWS: pa.array(features.batch[:, 0], pa.int32()).take(kept),
        log_files.BATCH_ROW: pa.array(features.batch[:, 1], pa.int32()).take(kept),
    }
    scores = np.concatenate([np.frombuffer(each.scores, np.float32) for each in requests]).reshape(raw.num_rows, -1)
    without = np.array([reason is not None for reason in reasons])
    for number, name in enumerate(score_names(about.scores)):
        columns[name] = pa.array(scores[:, number], mask=without)
    width = np.full(len(features.kept), features.dense.shape[1])
    columns[log_files.DENSE] = _list_column(features.dense.reshape(-1), width, pa.float32(), kept)
    for name, values, lengths in zip(about.features, features.values, features.lengths, strict=True):
        columns[IDS + name] = _list_column(values, lengths, pa.int64(), kept)
    logged = pa.table(columns)
    return pa.table([*raw.columns, *logged.columns], names=[*raw.column_names, *logged.column_names])


def _raw_rows(schema: pa.Schema, requests: Sequence[Request]) -> pa.Table:
    tables = []
    for is_stream, run in groupby(requests, lambda each: isinstance(each.rows, bytes)):
        if is_stream:  # its columns may be in another order, and have whole numbers instead of text
            tables += [pa.ipc.open_stream(each.rows).read_all().select(schema.names).cast(schema) for each in run]
            continue
        columns = zip(*(each.rows for each in run), strict=True)
        values = [
            pa.array(list(chain.from_iterable(column)), kind.type) for column, kind in zip(columns, schema, strict=True)
        ]
        tables.append(pa.table(values, schema=schema))
    return pa.concat_tables(tables)


def _list_column(
    values: NDArray[np.generic], lengths: NDArray[np.int64], kind: pa.DataType, kept: pa.Array
) -> pa.Array:
    """Return a column of lists. kept: for each row the number of its list, null for a row without one."""
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind)).take(kept)


class Collector:
    """Collects requests until they become rows of a table, which goes to the files."""

    def __init__(self, files: LogWriter) -> None:
        self._files, self._table_s = files, min(TABLE_S, files.flush_s / 2)
        self._models: dict[int, Model] = {}
        self._batch = Batch([])
        self._waiting: dict[int, list[Requests]] = {}
        self._num_rows, self._made = 0, time.monotonic()

    def take(self, message: Message) -> None:
        if isinstance(message, Model):
            self._models[message.number] = message
        elif isinstance(message, Batch):
            self._batch = message
        else:
            waiting = self._waiting.setdefault(message.model, [])
            if not waiting or waiting[-1].batch is not self._batch:
                waiting.append(Requests(self._batch, []))
            waiting[-1].requests.append(message)
            self._num_rows += message.num_rows
            if self._num_rows >= TABLE_ROWS:
                self.make_tables()

    def make_tables_if_due(self) -> None:
        if time.monotonic() - self._made >= self._table_s:
            self.make_tables()

    def make_tables(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._num_rows, self._made = 0, time.monotonic()
        for number, sent in waiting.items():
            self._add(self._models[number], sent)

    def _add(self, model: Model, sent: Sequence[Requests]) -> None:
        try:
            self._files.add(model.about, table_of(model, sent))
        except (ArithmeticError, ValueError, LookupError, TypeError) as error:
            parts = sent if len(sent) > 1 else [Requests(sent[0].batch, [each]) for each in sent[0].requests]
            if len(parts) == 1:
                self._files.lose(len(parts[0].requests), error)
                return
            for each in parts:  # values that no column can hold must not cost other requests their rows
                self._add(model, [each])


def run(files: LogWriter, source: int, target: int) -> None:
    """Write what comes from the file descriptor `source` until it ends."""
    collector, buffer = Collector(files), bytearray()
    wait_s, said = min(TABLE_S, files.flush_s) / 2, b""
    while True:
        is_end = False
        if select.select([source], [], [], wait_s)[0]:
            read = os.read(source, READ_BYTES)
            is_end = not read
            buffer += read
            for message in read_messages(buffer):
                collector.take(message)
        if is_end:
            collector.make_tables()
            files.flush()
        else:
            collector.make_tables_if_due()
            files.flush_if_due()
        if (line := msgspec.json.encode(files.report) + b"\n") != said:
            said = line
            with suppress(OSError):  # the server has ended
                os.write(target, line)
        if is_end:
            return


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group: the server sends its last requests
        signal.signal(number, signal.SIG_IGN)
    try:
        lower_priority("idle")
    except OSError:  # some sandboxes forbid it
        os.nice(NICE)
    configure_logging()
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    run(LogWriter(settings.folder, settings.rows_per_file, settings.flush_s, settings.max_bytes), 0, 1)


if __name__ == "__main__":
    main()
