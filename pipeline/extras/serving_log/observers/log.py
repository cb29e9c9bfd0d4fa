"""Log answered requests as Parquet files:  python -m pipeline serve artifact=A observers.log.folder=logs/serving

Requests are chosen by a hash of their id (share), so every server chooses the same ones, and by
rate (requests_per_s). The server only sends what it has to a process, which makes and writes the files
on idle cores (writer.py). The log has the raw values of users: protect the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_SETPIPE_SZ, fcntl
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import torch
from prometheus_client import Counter, Gauge

from pipeline.config.registry import register
from pipeline.extras.serving_log.log_files import PREFIX, About
from pipeline.extras.serving_log.records import Batch, Model, Report, Request, Settings, cut_bytes, encode
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_given, check_within
from pipeline.runtime.logs import get_logger
from pipeline.serving.http.admission import ClientRates
from pipeline.serving.http.batching import PREFIX as METRICS
from pipeline.serving.http.batching import ServerMetrics
from pipeline.serving.http.observers import Answered
from pipeline.serving.http.switching import ServedModel
from pipeline.serving.scoring.dense_program import DenseProgram
from pipeline.serving.scoring.encoded import Encoded, EncodedSpan
from pipeline.serving.scoring.scorer import ColumnLists, UserItems, as_table, schema_of, score_columns

WRITER = "pipeline.extras.serving_log.writer"
SMALL_ROWS = (
    64  # of a request that the event loop handles, and of a batch that is sent whole, once for all its requests
)
SENT_REQUESTS = 64  # at once: the interpreter's lock is held about 0.2 ms, and then let go
PIPE_BYTES = 1 << 20
RESTART_S = 10.0
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
            os.makedirs(self.folder, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(13, "no write permission")
        except OSError as error:
            raise ConfigError(f"observers.log.folder={self.folder} cannot be written to: {error.strerror}") from None
        return ServingLog(self, metrics)


class Packed(NamedTuple):
    """A request as it waits for the thread. message: the request. spans: its batch. parts: of the batch, if all its requests
    share one message; otherwise None.
    """

    model: Model
    message: bytes
    num_rows: int
    spans: Sequence[EncodedSpan]
    parts: Sequence[Encoded] | None

    def batch(self) -> bytes:
        return encode(Batch(cut_bytes(self.spans)))


class Packer:
    """Makes messages of requests; of large ones also in another thread."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}  # by the version of the artifact
        self._numbers = count()

    def pack(self, answered: Answered) -> Packed:
        """Raises ArithmeticError, ValueError, LookupError or TypeError for values that cannot be sent."""
        version, _, delta = answered.scored.version.partition("+")
        if (model := self._models.get(version)) is None:
            model = self._models.setdefault(version, model_of(next(self._numbers), answered.model))
        scored, num_rows = answered.scored, answered.rows.num_rows
        spans: Sequence[EncodedSpan] = scored.encoded
        begin, parts = 0, None
        if len(spans) == 1 and sum(len(part.kept) for part in spans[0].parts) <= SMALL_ROWS:
            parts, begin, _ = spans[0]
            spans = (EncodedSpan(parts, 0, sys.maxsize),)
        request = Request(
            model.number, int(delta or 0), answered.request_id, round(answered.at * 1e6), num_rows, begin,
            _raw_rows(answered.rows, model.about.raw), [(row.row, row.reason) for row in scored.refused],
            np.asarray(scored.scores, np.float32).tobytes(),
        )  # fmt: skip
        return Packed(model, encode(request), num_rows, spans, parts)


class ServingLog:
    """The observer. wants() runs on the event loop, the other methods on one thread.

    The event loop makes the messages of small requests: the values of many requests that wait for the thread
    make the garbage collector run more often, and the thread holds the interpreter's lock for longer. The
    thread makes the messages of batches, because tensors let go of the lock, and the event loop waits for it.
    """

    def __init__(self, settings: LogSettings, metrics: ServerMetrics) -> None:
        self._threshold = round(settings.share * 2**32)
        self._rates = None if settings.requests_per_s is None else ClientRates(settings.requests_per_s)
        written = Settings(settings.folder, settings.rows_per_file, settings.flush_s, int(settings.max_gb * 2**30))
        self._process, self._packer = WriterProcess(written), Packer()
        self._told: set[int] = set()  # models that the process knows
        self._parts: Sequence[Encoded] | None = None  # of the batch that was sent last
        self._failures, registry = metrics.observer_failures.labels("log"), metrics.registry
        self._rows = Counter(f"{METRICS}_log_rows", "Rows given to the serving log", registry=registry)
        self._bytes = Gauge(f"{METRICS}_log_bytes", "Files of the serving log", registry=registry)
        self._removed = Counter(f"{METRICS}_log_removed_files", "Oldest files that were removed", registry=registry)

    def wants(self, answered: Answered) -> Packed | bool | None:
        if answered.model.retrieves or not answered.rows.num_rows:
            return False
        if zlib.crc32(answered.request_id.encode()) >= self._threshold:
            return False
        if self._rates is not None and self._rates.take(""):
            return False
        return answered.rows.num_rows > SMALL_ROWS or self._pack(answered)

    def _pack(self, answered: Answered) -> Packed | None:
        try:
            return self._packer.pack(answered)
        except (ArithmeticError, ValueError, LookupError, TypeError) as error:
            self._failures.inc()
            logger.warning("request %a is not logged: %s", answered.request_id, " ".join(str(error).split())[:200])
            return None

    def take(self, taken: Sequence[Packed | Answered]) -> None:
        self._count(self._process.new_report())
        if taken and not self._process.is_running():
            self._count(self._process.restart())
            self._told, self._parts = set(), None
        for begin in range(0, len(taken), SENT_REQUESTS):
            packed = (
                each if isinstance(each, Packed) else self._pack(each) for each in taken[begin : begin + SENT_REQUESTS]
            )
            self._send([each for each in packed if each is not None])

    def _send(self, packed: Sequence[Packed]) -> None:
        messages = []
        for each in packed:
            if each.model.number not in self._told:
                self._told.add(each.model.number)
                messages.append(encode(each.model))
            if each.parts is None or each.parts is not self._parts:
                self._parts = each.parts
                messages.append(each.batch())
            messages.append(each.message)
        self._process.send(b"".join(messages), len(packed))
        self._rows.inc(sum(each.num_rows for each in packed))

    def _count(self, report: Report) -> None:
        self._failures.inc(report.lost)
        self._removed.inc(report.removed)
        self._bytes.set(report.num_bytes)

    def close(self) -> None:
        self._process.close()


def model_of(number: int, model: ServedModel) -> Model:
    scorer = model.scorer
    return Model(number, _about(scorer), schema_of(scorer.columns).serialize().to_pybytes())


def _raw_rows(rows: Any, names: Sequence[str]) -> Any:
    """Return the columns in the order of `names`, or an Arrow stream if they are not lists."""
    if isinstance(rows, ColumnLists):
        return rows.columns
    if isinstance(rows, UserItems) and isinstance(rows.user, ColumnLists) and isinstance(rows.items, ColumnLists):
        of_user = {
            name: list(value) * rows.num_rows
            for name, value in zip(rows.user.schema.names, rows.user.columns, strict=True)
        }
        columns = of_user | dict(zip(rows.items.schema.names, rows.items.columns, strict=True))
        return [columns[name] for name in names]
    table, sink = as_table(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


class WriterProcess:
    """The process that writes the files."""

    def __init__(self, settings: Settings) -> None:
        self._command = [sys.executable, "-m", WRITER, msgspec.json.encode(settings).decode()]
        self._start()

    def _start(self) -> None:
        self._num_sent, self._unread, self._last = 0, b"", Report()  # requests; a part of a line
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Not a session of its own: Linux (autogroup) would give it as much of a busy core as the whole server.
        self._process = process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._started = time.monotonic()
        os.set_blocking(self._output.fileno(), False)
        with suppress(OSError):  # the limit of a user without rights may be reached
            fcntl(self._input.fileno(), F_SETPIPE_SZ, PIPE_BYTES)

    def send(self, message: bytes, num_requests: int = 0) -> None:
        """Send, and wait if the process is slow; then requests wait in the observer's queue. Raises OSError."""
        self._input.write(message)
        self._input.flush()
        self._num_sent += num_requests

    def new_report(self) -> Report:
        """Return what has been done since the last call."""
        with suppress(BlockingIOError):
            self._unread += os.read(self._output.fileno(), 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        last, self._last = self._last, msgspec.json.decode(lines[-1], type=Report) if lines else self._last
        return Report(
            self._last.written - last.written, self._last.lost - last.lost, self._last.removed - last.removed, self._last.num_bytes
        )  # fmt: skip

    def is_running(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> Report:
        """Start a process that has ended. Return what was lost with it. Raises OSError if it started a moment ago."""
        ended = f"the process that writes the log ended with exit code {self._process.returncode}"
        if time.monotonic() - self._started < RESTART_S:
            raise OSError(ended)
        logger.warning("%s, and is started again", ended)
        lost = self._num_sent - self._last.written - self._last.lost
        self._end_input()
        self._output.close()
        self._start()
        return Report(lost=lost)

    def _end_input(self) -> None:
        with suppress(OSError):
            self._input.close()

    def close(self) -> None:
        """End the input, and wait until all is written."""
        self._end_input()
        self._process.wait()


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
        str(torch.__version__),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        manifest is not None and not isinstance(scorer.program, DenseProgram),
    )
