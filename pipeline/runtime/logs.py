"""Write log lines, progress bars and metric files, and keep the libraries' noise out of them."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

from pipeline.runtime.event_files import EventFiles
from pipeline.runtime.json_values import finite
from pipeline.runtime.masking import for_log, mask
from pipeline.runtime.process.processes import ELASTIC_JOB
from pipeline.runtime.storage import storage

QUIET_AFTER_S = 2.0  # what ends sooner needs no progress bar
PLAIN_LINE_EVERY_S = 5.0  # without a terminal a bar becomes a line now and then

# Messages that TorchRec 1.6 to 1.9 and torch print about their own internals. Each was seen; none asks the user for
# anything. "autograd kernel was not registered" is about FBGEMM's dense lookup on CPU, an autograd function below the
# dispatcher's CPU key; its gradients equal torch's (tests/sharding/test_cpu_tables.py).
NOISY_WARNINGS = (
    "broadcast_buffers", "reduce_scatter_tensor", "all_gather_into_tensor", "_all_gather_base", "_reduce_scatter_base",
    "ShardedTensor", "HeuristicalStorageReservation", "dense_embedding_codegen_lookup_function",
    "_get_pg_default_device", "Multiple backends are registered", "Please use DTensor",
    "torch.jit.script", "TorchScript", "autograd kernel was not registered",
)  # fmt: skip
NOISY_LOGGERS = (
    "torch.fx._symbolic_trace", "torchrec.distributed.planner", "torchrec.distributed.utils", "torchrec.distributed.comm",
    "torchrec.distributed.train_pipeline", "torchrec.distributed.model_parallel", "torchrec.metrics", "fbgemm_gpu",
    "torch.distributed.checkpoint",
)  # fmt: skip


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is at that moment: a progress bar puts itself in its place, to stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _DropNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.name == "root" and "Sharding spec not found" in record.getMessage())


def attempt() -> str:
    """Which start of the job this is: the scheduler's requeues and the agent's restarts, 0.0 for the first."""
    return ".".join(os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def job_id() -> str:
    """The scheduler's or the launcher's name of the job; empty for a process that was started by hand."""
    return next(filter(None, map(os.environ.get, (ELASTIC_JOB, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"))), "")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """`extra` of a log line: what it says as names and values, for logs of JSON."""
    return {"fields": values}


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, for whatever collects logs; a line's own fields() stand beside its message."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._about = {"job": job_id(), "attempt": attempt(), "host": socket.gethostname(), "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), **self._about, "logger": record.name,
            "message": mask(record.getMessage()), **getattr(record, "fields", {}),
        }  # fmt: skip
        if record.exc_info:
            values["traceback"] = mask(self.formatException(record.exc_info))
        return json.dumps(values)


class _MaskedFormatter(logging.Formatter):
    """Hide credentials, which libraries put into messages with whole URLs, and escape control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return for_log(super().format(record))


def _full_formatter(rank: int) -> logging.Formatter:
    about = f"job={job_id() or '-'} attempt={attempt()} rank={rank}".replace("%", "%%")
    return _MaskedFormatter(f"%(asctime)s %(levelname)s {about} %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")


def configure_logging(rank: int = 0, log_format: str = "text") -> None:
    """Rank 0 logs from INFO, the others from WARNING with their rank; libraries only what asks for an action.

    log_format: text, full (with date, zone, level, job, attempt and rank) or json.
    """
    handler = _StderrHandler()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    text = _MaskedFormatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S")
    made: dict[str, logging.Formatter] = {"json": _JsonFormatter(rank), "full": _full_formatter(rank)}
    handler.setFormatter(made.get(log_format, text))
    handler.addFilter(_DropNoise())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pipeline").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    silence_libraries()


@contextmanager
def log_file(path: str | None) -> Iterator[None]:
    """While it lasts the package's lines go to the end of this file too, with date and zone; None: nowhere else."""
    if path is None:
        yield
        return
    handler = logging.FileHandler(path, delay=True)
    formatter = _MaskedFormatter("%(asctime)sZ %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    package = logging.getLogger("pipeline")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()


def silence_libraries() -> None:
    """Drop the libraries' messages about their own insides; call it before importing them."""
    for message in NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}.*")
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


class Progress(Protocol):
    def advance(self, count: float) -> None: ...


class _PlainProgress:
    """A log line now and then, for output that goes to a file or through a launcher."""

    def __init__(self, description: str, total: float | None) -> None:
        self._description, self._total, self._done = description, total, 0.0
        self._started = self._last = time.monotonic()

    def advance(self, count: float) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._started < QUIET_AFTER_S or now - self._last < PLAIN_LINE_EVERY_S:
            return
        self._last = now
        share = f" {100 * self._done / self._total:.0f} %" if self._total else f" {self._done:,.0f}"
        print(f"{self._description}:{share} after {now - self._started:.0f} s", file=sys.stderr, flush=True)


class _BarProgress:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, count: float) -> None:
        self._bar.advance(self._task, count)


class _NoProgress:
    def advance(self, count: float) -> None:
        pass


@contextmanager
def progress(description: str, total: float | None = None, visible: bool = True) -> Iterator[Progress]:
    """A progress bar on stderr where that is a terminal, else a plain line now and then; nothing unless `visible`."""
    if not visible:
        yield _NoProgress()
        return
    if not sys.stderr.isatty():
        yield _PlainProgress(description, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        yield _BarProgress(bar, bar.add_task(description, total=total))


def to_json(values: Any, indent: int | None = None) -> str:
    """JSON has no NaN and no infinity: they become null."""
    return json.dumps(finite(values), indent=indent, allow_nan=False)


class Mirror(Protocol):
    """Is given each line of metrics.jsonl too; it must neither wait nor raise."""

    def write(self, kind: str, step: int, values: dict[str, float]) -> None: ...


class MetricsWriter:
    """Append one JSON object a line to metrics.jsonl, and the same numbers to TensorBoard if wanted; only rank 0 writes.

    A resumed run drops the lines after the step it resumes from, so that every step stands there once. config: by dotted key, for
    TensorBoard.
    """

    def __init__(
        self, folder: str, resume_step: int = 0, tensorboard: bool = True, config: Mapping[str, object] | None = None
    ) -> None:
        storage.make_folder(folder)
        self.path = storage.join(folder, "metrics.jsonl")
        self.mirrors: list[Mirror] = []
        self._keep_up_to(resume_step)
        self._event_files = (
            EventFiles(storage.join(folder, "tensorboard"), resume_step, config or {}) if tensorboard else None
        )

    def _keep_up_to(self, step: int) -> None:
        """A file that holds nothing later is left as it is."""
        kept = "".join(_lines_up_to(self.path, step) if step else [])
        if not step and (lost := _newest_step(self.path)):
            get_logger(__name__).warning(
                "%s has steps up to %d, and no checkpoint of them is there: training starts from step 0, and they are dropped",
                self.path,
                lost,
            )
        if not storage.exists(self.path) or storage.read_text(self.path) != kept:
            storage.publish_text(self.path, kept)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        line = to_json({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        with open(self.path, "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        for mirror in self.mirrors:
            mirror.write(kind, step, values)
        if self._event_files is not None:
            self._event_files.write(kind, step, values)

    def drop_after(self, step: int) -> None:
        """Forget the lines after `step`, for a run that goes on from there."""
        storage.publish_text(self.path, "".join(_lines_up_to(self.path, step)))
        if self._event_files is not None:
            self._event_files.close(after_step=step)

    def close(self) -> None:
        if self._event_files is not None:
            self._event_files.close()


def _lines_up_to(path: str, step: int) -> list[str]:
    """The whole lines of steps up to `step`. A full disk or a lost power supply leaves a torn line: it is dropped."""
    if not storage.exists(path):
        return []
    lines = storage.read_text(path).splitlines()
    steps = [_step_of(line) for line in lines]
    if torn := sum(number is None for number in steps):
        get_logger(__name__).warning("%s: dropped %d line(s) that were blank or cut off", path, torn)
    return [line + "\n" for line, number in zip(lines, steps, strict=True) if number is not None and number <= step]


def _newest_step(path: str) -> int:
    """0 where there is no file, or no step in it."""
    lines = storage.read_text(path).splitlines() if storage.exists(path) else []
    return max((step for line in lines if (step := _step_of(line)) is not None), default=0)


def _step_of(line: str) -> int | None:
    """None for a line that is not a whole JSON object with a step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None
