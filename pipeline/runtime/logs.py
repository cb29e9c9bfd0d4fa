"""Write log lines, progress bars and metric files, and suppress the libraries' noise."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from pipeline.runtime.json_values import finite
from pipeline.runtime.masking import for_log, mask
from pipeline.runtime.process.processes import ELASTIC_JOB
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SYSTEM = {
    "samples_per_s", "samples_per_cpu_s", "input_stall_percent", "comms_percent", "peak_memory_gb", "num_skipped_steps",
    "num_bad_rows", "embedding_syncs", "embedding_sync_bytes", "embedding_sync_s",
    "tier_stall_percent", "tier_hit_percent", "tier_row_hit_percent", "tier_read_mb_per_step", "tier_written_mb_per_step",
}  # fmt: skip
LEARNING_RATE = "lr_"
COMPARED = "validation"  # the kind of line that HParams are written with


def tag_of(name: str) -> str:
    """Return the tag of a number of metrics.jsonl, which begins with TensorBoard's group."""
    if name in SYSTEM:
        return f"system/{name}"
    if name.startswith(LEARNING_RATE):
        return f"learning_rate/{name.removeprefix(LEARNING_RATE)}"
    return name if "/" in name else f"quality/{name}"  # metrics of several labels, such as label/ne


class EventFiles:
    """Write a folder of TensorBoard's event files for each kind of line; the first line opens it.

    TensorBoard shows a folder as a run, and runs with the same tag in one chart, so training and
    validation are two folders. config: dotted key -> value, shown as text and, with validation, as
    HParams.
    """

    def __init__(self, folder: str, after_step: int, config: Mapping[str, object]) -> None:
        import torch.utils.tensorboard  # noqa: F401  # costs a second; here, for what is imported may draw random numbers

        self.folder, self._config, self._after_step = folder, config, after_step
        self._writers: dict[str, SummaryWriter] = {}

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        writer = self._writers.get(kind) or self._begin(kind, values)
        for name, value in values.items():
            writer.add_scalar(tag_of(name), value, step)

    def _begin(self, kind: str, values: Mapping[str, float]) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        purge_step = self._after_step + 1 if self._after_step else None
        writer = SummaryWriter(storage.join(self.folder, kind), purge_step=purge_step)
        self._writers[kind] = writer
        if self._config and kind == COMPARED:
            told = {key: _plain(value) for key, value in self._config.items()}
            assert writer.file_writer is not None
            for summary in hparams(told, {tag_of(name): value for name, value in values.items()}):
                writer.file_writer.add_summary(summary)
        elif self._config:
            writer.add_text("config", "\n".join(f"    {key}: {_plain(value)}" for key, value in self._config.items()))
        return writer

    def close(self, after_step: int | None = None) -> None:
        """Close the files. after_step: the run continues after this step; TensorBoard drops later numbers."""
        for writer in self._writers.values():
            writer.close()
        if self._writers and after_step is not None:
            # TensorBoard reads files in the order of their names. A name begins with the second, and then has a number
            # that does not sort: 10 is before 9.
            time.sleep(1.0 - time.time() % 1.0)
        self._writers = {}
        self._after_step = self._after_step if after_step is None else after_step


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float)) else mask(str(value))


PLAIN_LINE_EVERY_S = 5.0  # without a terminal a bar becomes a line from time to time
ONE_LINE_EVERY_S = 0.2

# Loggers of libraries. Their lines are about internals, and none asks the user for anything.
NOISY_LOGGERS = (
    "torch.fx._symbolic_trace", "torchrec.distributed.planner", "torchrec.distributed.utils", "torchrec.distributed.comm",
    "torchrec.distributed.train_pipeline", "torchrec.distributed.model_parallel", "torchrec.metrics", "fbgemm_gpu",
    "torch.distributed.checkpoint",
)  # fmt: skip


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class _StderrHandler(logging.StreamHandler):
    """Write to the current sys.stderr, which a progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _DropNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.name == "root" and "Sharding spec not found" in record.getMessage())


_DROP_NOISE = _DropNoise()


def attempt() -> str:
    """Return which start of the job this is, as "<requeues>.<restarts by the agent>"; the first is 0.0."""
    return ".".join(os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def job_id() -> str:
    """Return the job's name from the scheduler or the launcher; "" if there is none."""
    return next(filter(None, map(os.environ.get, (ELASTIC_JOB, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"))), "")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the argument `extra` for a log call, with these values by name, for JSON logs."""
    return {"fields": values}


class _JsonFormatter(logging.Formatter):
    """Write one JSON object per line; the line's fields() are next to its message."""

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
    """Log from INFO on rank 0, and from WARNING with the rank on other ranks.

    log_format: text, full (with date, zone, level, job, attempt and rank) or json.
    """
    handler = _StderrHandler()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    text = _MaskedFormatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S")
    made: dict[str, logging.Formatter] = {"json": _JsonFormatter(rank), "full": _full_formatter(rank)}
    handler.setFormatter(made.get(log_format, text))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pipeline").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    _hide_library_messages()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide messages of libraries, for a caller that has not called configure_logging."""
    noisy, root = [logging.getLogger(name) for name in NOISY_LOGGERS], logging.getLogger()
    levels, was_dropping = [each.level for each in noisy], _DROP_NOISE in root.filters
    with warnings.catch_warnings():
        _hide_library_messages()
        try:
            yield
        finally:
            for each, level in zip(noisy, levels, strict=True):
                each.setLevel(level)
            if not was_dropping:
                root.removeFilter(_DROP_NOISE)


class _ToRoot(logging.Handler):
    """Pass records to the root's handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        if root.handlers:
            root.callHandlers(record)


@contextmanager
def own_logging(verbose: bool) -> Iterator[None]:
    """Log for a caller in whose process the package is a library. Its lines go to log_file() and,
    by the caller's own levels, to the caller's handlers. verbose: also to stderr."""
    package = logging.getLogger("pipeline")
    level, propagate = package.level, package.propagate
    handler: logging.Handler = _StderrHandler() if verbose else _ToRoot(package.getEffectiveLevel())
    handler.setFormatter(_MaskedFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        with quiet_libraries():
            yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


def _hide_library_messages() -> None:
    """Hide log lines of libraries, and warnings about a line of an installed library or of this
    package: they ask a user for nothing. Warnings about a user's own code are shown. `python -W
    default` shows all warnings.
    """
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_DROP_NOISE)
    folders = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
    libraries = tuple(os.path.realpath(folder) + os.sep for folder in folders)

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if os.path.exists(filename) and not os.path.realpath(filename).startswith(libraries):
            print(warnings.formatwarning(message, category, filename, lineno), file=sys.stderr, end="")

    if not sys.warnoptions:
        warnings.showwarning = show


@contextmanager
def log_file(path: str | None) -> Iterator[None]:
    """Also append the package's lines to this file, with date and zone. None: no file."""
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


@dataclass(frozen=True)
class Progress:
    advance: Callable[[float], object]


class _PlainProgress:
    """Write a log line every few seconds, for output to a file or through a launcher."""

    def __init__(self, description: str, total: float | None) -> None:
        self._description, self._total, self._done = description, total, 0.0
        self._started = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="progress", daemon=True).start()

    def advance(self, count: float) -> None:
        self._done += count

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        """Write from a thread, because one call of a solver can take a minute."""
        while not self._ended.wait(PLAIN_LINE_EVERY_S):
            share = f" {100 * self._done / self._total:.0f} %" if self._total else f" {self._done:,.0f}"
            seconds = time.monotonic() - self._started
            print(f"{self._description}:{share} after {seconds:.0f} s", file=sys.stderr, flush=True)


class _OneLine:
    """Rewrite one line, for a notebook, which is not a terminal."""

    def __init__(self, description: str, total: float | None) -> None:
        self._description, self._total, self._done = description, total, 0.0
        self._started = time.monotonic()
        self._shown_at = -math.inf

    def advance(self, count: float) -> None:
        self._done += count
        if (now := time.monotonic()) - self._shown_at >= ONE_LINE_EVERY_S:
            self._shown_at = now
            share = f"{100 * self._done / self._total:3.0f} %" if self._total else f"{self._done:,.0f}"
            print(f"\r{self._description} {share}, {now - self._started:.0f} s  ", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print("\r" + " " * (len(self._description) + 24) + "\r", end="", file=sys.stderr, flush=True)


class _ToFile(_OneLine):
    """Write description, done and total to a file, for another process that shows them."""

    def advance(self, count: float) -> None:
        self._done += count
        if (now := time.monotonic()) - self._shown_at >= ONE_LINE_EVERY_S:
            self._shown_at = now
            storage.publish_text(_style, json.dumps([self._description, self._done, self._total]))

    def close(self) -> None:
        storage.remove(_style)


AUTO, BAR, NONE = "auto", "bar", "none"  # a bar on a terminal, otherwise lines; always a bar; nothing
_style = AUTO


@contextmanager
def progress_as(style: str) -> Iterator[None]:
    """Show the progress of everything in this context as AUTO, BAR or NONE, or write it to the file `style`."""
    global _style
    before, _style = _style, style
    try:
        yield
    finally:
        _style = before


def shows_bar() -> bool:
    return _style != NONE and (_style != AUTO or sys.stderr.isatty())


def _plain_progress(description: str, total: float | None) -> _PlainProgress | _OneLine:
    if _style == AUTO:
        return _PlainProgress(description, total)
    return (_OneLine if _style == BAR else _ToFile)(description, total)


@contextmanager
def progress(description: str, total: float | None = None, visible: bool = True) -> Iterator[Progress]:
    """Show a progress bar on a terminal, otherwise a line from time to time."""
    if not visible or _style == NONE:
        yield Progress(lambda count: None)
        return
    if _style not in (AUTO, BAR) or not sys.stderr.isatty():
        plain = _plain_progress(description, total)
        try:
            yield Progress(plain.advance)
        finally:
            plain.close()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        yield Progress(partial(bar.advance, bar.add_task(description, total=total)))


def to_json(values: Any, indent: int | None = None) -> str:
    """Return JSON with null for NaN and infinity, which JSON lacks."""
    return json.dumps(finite(values), indent=indent, allow_nan=False)


class Mirror(Protocol):
    """Receive each line of metrics.jsonl too. It must neither wait nor raise."""

    def write(self, kind: str, step: int, values: dict[str, float]) -> None: ...


class MetricsWriter:
    """Append one JSON object per line to metrics.jsonl, and to TensorBoard if configured.

    Only rank 0 writes. A resumed run drops the lines after the step it resumes from.
    config: by dotted key, for TensorBoard.
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
        """Drop the lines after `step`. A file without later lines is not written."""
        kept = "".join(_lines_up_to(self.path, step) if step else [])
        if not step and (lost := _newest_step(self.path)):
            get_logger(__name__).warning(
                "%s has steps up to %d, but there is no checkpoint of them: training starts from "
                "step 0, and they are dropped",
                self.path,
                lost,
            )
        if not storage.exists(self.path) or storage.read_text(self.path) != kept:
            storage.publish_text(self.path, kept)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        line = to_json({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        size = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        storage.retry_once(lambda: self._append(line, size), self.path)
        for mirror in self.mirrors:
            mirror.write(kind, step, values)
        if self._event_files is not None:
            self._event_files.write(kind, step, values)

    def _append(self, line: str, size: int) -> None:
        """Write the line after byte `size`, because an earlier attempt may have written a part of it."""
        with open(self.path, "a") as file:
            file.truncate(size)
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def drop_after(self, step: int) -> None:
        """Drop the lines after `step`, for a run that continues from there."""
        storage.publish_text(self.path, "".join(_lines_up_to(self.path, step)))
        if self._event_files is not None:
            self._event_files.close(after_step=step)

    def close(self) -> None:
        if self._event_files is not None:
            self._event_files.close()


def _lines_up_to(path: str, step: int) -> list[str]:
    """Return the complete lines of steps up to `step`. A full disk may leave a partial line."""
    if not storage.exists(path):
        return []
    lines = storage.read_text(path).splitlines()
    steps = [_step_of(line) for line in lines]
    if torn := sum(number is None for number in steps):
        get_logger(__name__).warning("%s: dropped %d line(s) that were blank or incomplete", path, torn)
    return [line + "\n" for line, number in zip(lines, steps, strict=True) if number is not None and number <= step]


def _newest_step(path: str) -> int:
    """Return the highest step in the file; 0 if there is no file or no step."""
    lines = storage.read_text(path).splitlines() if storage.exists(path) else []
    return max((step for line in lines if (step := _step_of(line)) is not None), default=0)


def _step_of(line: str) -> int | None:
    """Return the step of a line, or None if the line is not a complete JSON object with a step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None
