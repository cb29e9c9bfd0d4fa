"""Find the windows of a folder of partitions or of one growing source, and report which are ready,
waiting or late.

A window's name is its path below the source (dt=2026-11-20/hour=03) or the time at which it begins.
A missing window counts as waiting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pipeline.config.data import DataConfig
from pipeline.config.retraining import WindowsConfig
from pipeline.data.sql import sql_path, sql_text
from pipeline.runtime.errors import RetrainingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import atomic, storage

if TYPE_CHECKING:
    import duckdb

READY, WAITING, LATE = "ready", "waiting", "late"
MAX_GAP = 10_000  # missing windows in a row; more mean that the pattern or the length is wrong
UNITS = {"s": 1, "ms": 1000, "us": 1_000_000}
# clocks and time zones: a time may be this much later than this machine's clock
CLOCKS_DIFFER_S = 86_400
FIRST_SECOND = -62_135_596_800  # of the year 1
_STILL_OPEN = "no row of a later window"
logger = get_logger(__name__)


@dataclass(frozen=True)
class Window:
    """A window. `source` is what prepare reads. `is_there`: the window has data.

    `why`: the reason for waiting.
    """

    name: str
    begin: datetime
    end: datetime
    source: str
    is_there: bool = True
    state: str = READY
    why: str = ""


def find_windows(
    config: WindowsConfig, source: str, data: DataConfig, now: datetime, after: datetime | None, done: Iterable[str]
) -> list[Window]:
    """Return windows that begin after `after` and are not `done`, oldest first, each ready, waiting
    or late.

    Raises:
        RetrainingError: `source` has no window.
    """
    first = parse_time(config.first) if config.first else None
    begin = max(filter(None, (after, first)), default=None)
    if config.kind == "partitions":
        found = _partitions(config, source, data, begin)
    else:
        found = _spans(config, source, data, begin, now)
    skipped = set(done)
    windows = _with_gaps([window for window in found if first is None or window.begin >= first], config)
    return [_judged(window, config, data, now) for window in windows if window.name not in skipped]


def _partitions(config: WindowsConfig, source: str, data: DataConfig, after: datetime | None) -> list[Window]:
    windows = []
    paths = [""]
    parts = config.pattern.strip("/").split("/")
    for depth, part in enumerate(parts):
        oldest = _parse(after.strftime(part), part) if after and depth == 0 and "%Y" in part else None
        deeper = []
        for path in paths:
            for name in storage.list_folder(storage.join(source, path) if path else source):
                begin = _parse(name, part)
                if begin is not None and (oldest is None or begin >= oldest):
                    deeper.append(storage.join(path, name) if path else name)
        paths = deeper
    for path in paths:
        begin = _parse(path, config.pattern.strip("/"))
        if begin is not None:
            windows.append(Window(path, begin, begin + _length(config), storage.join(source, path)))
    here = ", ".join(storage.list_folder(source)[:5]) if not windows else ""
    if not windows and (after is None or not here):
        here = here or "nothing"
        raise RetrainingError(
            f"source={source} has no folder like windows.pattern={config.pattern} (it has {here}); fix one of the two"
        )
    return sorted(
        (window for window in windows if after is None or window.begin >= after), key=lambda window: window.begin
    )


def _parse(text: str, pattern: str) -> datetime | None:
    try:
        return datetime.strptime(text, pattern).replace(tzinfo=UTC)
    except ValueError:
        return None


def _length(config: WindowsConfig) -> timedelta:
    return timedelta(hours=config.length_hours)


def _with_gaps(windows: list[Window], config: WindowsConfig) -> list[Window]:
    """Add the windows that are missing between existing windows."""
    if not config.lateness_hours:
        return windows
    filled: list[Window] = []
    for window in windows:
        before = filled[-1] if filled else None
        missing = 0
        while before is not None and before.begin + _length(config) < window.begin:
            missing += 1
            begin = before.begin + _length(config)
            name = begin.strftime(config.pattern.strip("/")) if config.kind == "partitions" else time_name(begin)
            before = Window(name, begin, begin + _length(config), "", is_there=False)
            filled.append(before)
            if missing > MAX_GAP:
                raise RetrainingError(
                    f"{missing:,} windows are missing before {window.name}: is windows.length_hours={config.length_hours:g} "
                    f"right? windows.first={window.begin:%Y-%m-%dT%H} begins there"
                )
        filled.append(window)
    return filled


def _judged(window: Window, config: WindowsConfig, data: DataConfig, now: datetime) -> Window:
    why = window.why or _lacks(window, config, data)
    if not why:
        return window
    deadline = window.end + timedelta(hours=config.lateness_hours)
    if why == _STILL_OPEN and not config.lateness_hours:
        return replace(window, state=WAITING)
    if now < deadline:
        return replace(window, state=WAITING, why=f"{why}; waiting until {deadline:%Y-%m-%d %H:%M} UTC")
    # its time is over: the source has paused, or writes a day's rows after that day
    if why == _STILL_OPEN:
        return replace(window, why="")
    if config.late == "use" and window.is_there:
        return replace(window, why=f"{why}; used as it is")
    return replace(window, state=LATE, why=f"{why} {config.lateness_hours:g} h after its end")


def _lacks(window: Window, config: WindowsConfig, data: DataConfig) -> str:
    """Return what a window still lacks; empty if it is complete."""
    if not window.is_there:
        return "not there"
    if config.kind == "partitions" and config.marker and not storage.exists(storage.join(window.source, config.marker)):
        return f"no {config.marker}"
    if config.min_rows:
        from pipeline.data.raw.source import find_sources
        from pipeline.retraining.row_sketch import count_rows

        try:
            rows = count_rows(find_sources(window.source), data, 1)
        except ValueError:
            return "no files"
        if rows < config.min_rows:
            return f"{rows:,} of at least {config.min_rows:,} rows"
    return ""


def _spans(config: WindowsConfig, source: str, data: DataConfig, after: datetime | None, now: datetime) -> list[Window]:
    """Return windows of a growing source, cut at multiples of the length.

    The newest windows are still open.
    """
    from pipeline.data.prepare.vocabulary import open_engine

    seconds = int(config.length_hours * 3600)
    with closing(open_engine(os.devnull, 512 << 20, 1)) as engine, _growing(engine, source, data) as table:
        rows = engine.execute(
            f"SELECT span, count(*) FROM (SELECT {_seconds(config)} // {seconds} AS span FROM {table}) "
            "WHERE span IS NOT NULL GROUP BY span ORDER BY span"
        ).fetchall()
    if not rows:
        raise RetrainingError(
            f"source={source} has no row with a time in windows.timestamp_column={config.timestamp_column}: name the column "
            "that has the times of rows"
        )
    windows = []
    rows = _without_strays(config, source, rows, now)
    newest = max(int(span) for span, _ in rows)
    for span, count in rows:
        begin = datetime.fromtimestamp(int(span) * seconds, UTC)
        why = _STILL_OPEN if int(span) == newest else ""
        if count < config.min_rows and (not why or config.lateness_hours):
            why = f"{count:,} of at least {config.min_rows:,} rows"
        windows.append(Window(time_name(begin), begin, begin + _length(config), source, why=why))
    return [window for window in windows if after is None or window.begin >= after]


def _without_strays(
    config: WindowsConfig, source: str, rows: list[tuple[int, int]], now: datetime
) -> list[tuple[int, int]]:
    """Return (span, count) without times in the future or without a date, because one bad row would
    end the newest window.

    Raises:
        RetrainingError: nothing is left.
    """
    seconds = int(config.length_hours * 3600)
    latest = now.timestamp() + max(seconds, CLOCKS_DIFFER_S)
    sound = [(span, count) for span, count in rows if FIRST_SECOND <= span * seconds <= latest]
    if len(sound) == len(rows):
        return sound
    count = sum(count for _, count in rows) - sum(count for _, count in sound)
    span = next(span for span, _ in reversed(rows) if not FIRST_SECOND <= span * seconds <= latest)
    text = (
        f"{count:,} rows of {source} have a time in "
        f"windows.timestamp_column={config.timestamp_column} that is in the future or not a date "
        f"(now: {now:%Y-%m-%d %H:%M} UTC); one is {span * seconds:,} s after 1970"
    )
    if not sound:
        raise RetrainingError(
            f"{text}. Is windows.timestamp_unit={config.timestamp_unit} right, and this machine's clock?"
        )
    logger.warning("%s. They belong to no window", text)
    return sound


def extract_rows(window: Window, config: WindowsConfig, data: DataConfig, target: str) -> str:
    """Write the window's rows of a growing source to a file in `target`, in the source's format.

    A file that is there is taken as it is: what comes to a window after it was begun is left out.

    Raises:
        SourceChangedError: the source did anything but grow meanwhile.
    """
    from pipeline.data.prepare.vocabulary import open_engine
    from pipeline.data.raw.layout import find_format

    path = os.path.join(target, f"rows.{data.format}")
    if os.path.exists(path):
        return path
    os.makedirs(target, exist_ok=True)
    how = find_format(data.format).sql_copy
    begin, end = int(window.begin.timestamp()), int(window.end.timestamp())
    with (
        closing(open_engine(os.path.join(target, "spill"), 1 << 30, 1)) as engine,
        _growing(engine, window.source, data) as table,
    ):
        engine.execute("SET preserve_insertion_order = true")
        engine.execute(
            f"COPY (SELECT * FROM {table} WHERE {_seconds(config)} >= {begin} AND "
            f"{_seconds(config)} < {end}) TO {sql_text(path + '.partial')} ({how})"
        )
    atomic.publish_file(path + ".partial", path)
    return path


def outside_share(window: Window, config: WindowsConfig, data: DataConfig) -> float | None:
    """Return the share of a partition's rows whose timestamp is outside the window; None without
    such a column.
    """
    if config.kind != "partitions" or not config.timestamp_column:
        return None
    from pipeline.data.prepare.vocabulary import open_engine

    begin, end = int(window.begin.timestamp()), int(window.end.timestamp())
    with closing(open_engine(os.devnull, 512 << 20, 1)) as engine:
        (share,) = engine.execute(
            f"SELECT avg(CASE WHEN time >= {begin} AND time < {end} THEN 0.0 ELSE 1.0 END) FROM "
            f"(SELECT {_seconds(config)} AS time FROM {_table(data, _paths(window.source))})"
        ).fetchone() or (None,)
    return None if share is None else float(share)


@contextmanager
def _growing(engine: duckdb.DuckDBPyConnection, source: str, data: DataConfig) -> Iterator[str]:
    """A table of `engine` with the rows that a growing source has now: of a local text file, of its whole lines.

    Raises:
        RetrainingError: there is no whole line yet.
        SourceChangedError: in the end, for a file that did anything but grow meanwhile.
    """
    from pipeline.data.raw.layout import find_format
    from pipeline.retraining.growing_files import GrowingFiles

    paths = _paths(source)
    if not (storage.is_local(source) and find_format(data.format).is_lines):
        yield _table(data, paths)
        return
    growing = GrowingFiles([path for path in paths if not path.endswith(".gz")])
    names = [*growing.register(engine), *(path for path in paths if path.endswith(".gz"))]
    if not names:
        raise RetrainingError(f"source={source} has no whole line yet: its rows must end in line ends")
    yield _table(data, names)
    growing.check()


def _paths(source: str) -> list[str]:
    from pipeline.data.raw.source import find_sources

    return [os.path.abspath(storage.local_path(file.path)) for file in find_sources(source)]


def _table(data: DataConfig, paths: Iterable[str]) -> str:
    """A DuckDB table of the rows in files; text files keep every value as it is written."""
    from pipeline.data.raw.layout import find_format

    table = find_format(data.format).sql_table(", ".join(map(sql_path, paths)))
    if not table:
        raise RetrainingError(f"data.format={data.format} has no time column: put each window into a separate folder")
    return table


def _seconds(config: WindowsConfig) -> str:
    """Return whole seconds since 1970 of the timestamp column: numbers of the unit, or ISO 8601, by
    default in UTC.
    """
    column = '"' + str(config.timestamp_column).replace('"', '""') + '"::VARCHAR'
    number = f"TRY_CAST({column} AS BIGINT) // {UNITS[config.timestamp_unit]}"
    return f"coalesce({number}, epoch(TRY_CAST({column} AS TIMESTAMP))::BIGINT)"


def parse_time(text: str) -> datetime:
    """Parse `2026-11-20` or `2026-11-20T03` as UTC. Raises RetrainingError for anything else."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise RetrainingError(f"{text!r} is not a time; write 2026-11-20 or 2026-11-20T03:00") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def time_name(begin: datetime) -> str:
    return begin.strftime("%Y-%m-%dT%H:%M")


def file_name(window: str) -> str:
    """Return a window's name as the name of a folder."""
    return window.replace("/", "__").replace(":", "")
