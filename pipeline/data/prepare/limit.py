"""Refuse sources with too many unreadable rows as soon as it is certain: even if all later rows are
readable, the share of unreadable rows exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import TEXT_FORMATS, DataConfig
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import layout_of
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage

logger = get_logger(__name__)

MANY_BAD_ROWS = 100  # below this number no file is refused early
HOPELESS_ROWS = 1000  # a file with more than half unreadable rows is refused after this many rows
GZIP, PARQUET = ".gz", (".parquet", ".pq")
# later compressed bytes may hold up to this many times as many rows as earlier ones
GZIP_MARGIN = 10


class ReadFile(Protocol):
    """The numbers of rows that were read from one source file."""

    @property
    def num_source_rows(self) -> int: ...
    @property
    def num_quarantined(self) -> int: ...
    @property
    def first_quarantined(self) -> str: ...


def refuse_files(config: DataConfig, sources: Sequence[Source], files: Sequence[ReadFile]) -> None:
    """Warn of each file without rows.

    Raises DataError if no file has rows, or too many rows are quarantined.
    """
    rows, quarantined = sum(file.num_source_rows for file in files), sum(file.num_quarantined for file in files)
    if not rows:
        what = f"{sources[0].path} ({sources[0].size_bytes:,} bytes)"
        what = f"{what} holds" if len(sources) == 1 else f"{what} and {len(sources) - 1} more hold"
        has_names = config.format in TEXT_FORMATS and not config.header
        below = ", below a first line that names the columns (data.header=[...] where it does not)" if has_names else ""
        raise DataError(f"{what} no rows: give source=<file, folder or glob> with some{below}")
    for source, file in zip(sources, files, strict=True):
        if not file.num_source_rows:
            logger.warning("%s has no rows (%s bytes)", source.path, f"{source.size_bytes:,}")
    worst = [f"{s.path}, {f.first_quarantined}" for s, f in zip(sources, files, strict=True) if f.num_quarantined]
    refuse(config, quarantined, rows, worst[0] if worst else "")


def refuse(config: DataConfig, quarantined: int, rows: int, example: str) -> None:
    """Raise DataError if more rows are quarantined than the config allows."""
    if quarantined > config.max_quarantined_fraction * rows:
        is_label = ", not 0 or 1" in example
        label = (
            " For a label of other values there are data.columns.label_values and label_threshold." if is_label else ""
        )
        raise DataError(
            f"{quarantined:,} of {rows:,} rows ({quarantined / rows:.2%}) cannot be read and "
            f"data.max_quarantined_fraction allows {config.max_quarantined_fraction:.2%}; the first is {example}. "
            f"Check data.format and data.columns, correct the source, or allow more.{label}"
        )


def refuse_early(config: DataConfig, sources: Sequence[Source], files: Sequence[ReadFile], position: int) -> None:
    """Raise DataError if the share of unreadable rows must exceed the limit, even if all later rows
    are readable.

    `files` are the files staged so far. The last one is being read; its rows come from at least the
    first `position` bytes of its source.
    """
    source, staged = sources[len(files) - 1], files[-1]
    example = f"{source.path}, {staged.first_quarantined}"
    refuse_hopeless(config, source, staged)
    bad, rows = sum(file.num_quarantined for file in files), sum(file.num_source_rows for file in files)
    if bad <= MANY_BAD_ROWS or bad <= config.max_quarantined_fraction * rows:
        return
    row_bytes = max(1, len(layout_of(config).needed))
    to_come = most_rows_to_come(source, sources[len(files) :], staged.num_source_rows, position, row_bytes)
    if to_come is not None and bad > config.max_quarantined_fraction * (rows + to_come):
        refuse(config, bad, rows, example)


def refuse_hopeless(config: DataConfig, source: Source, staged: ReadFile) -> None:
    """Raise DataError if more than half of a file's rows so far are unreadable, regardless of
    other files."""
    if staged.num_quarantined > max(HOPELESS_ROWS, staged.num_source_rows / 2):
        example = f"{source.path}, {staged.first_quarantined}"
        refuse(config, staged.num_quarantined, staged.num_source_rows, example)


def most_rows_to_come(
    source: Source, later: Sequence[Source], num_rows: int, position: int, row_bytes: int
) -> float | None:
    """Return the maximum number of rows that follow the first `num_rows` rows; None if unknown. The
    first rows used at least `position` bytes.

    A row of text takes at least `row_bytes`, one byte per column. Parquet files store their number
    of rows. For a .gz file the rows per byte are at most GZIP_MARGIN times those of the part that
    was read.
    """
    in_a_byte = GZIP_MARGIN * num_rows / max(position, 1) if source.name.endswith(GZIP) else None
    parts = [_rows_of(source, source.size_bytes - position, row_bytes, in_a_byte)]
    if source.name.endswith(PARQUET) and parts[0] is not None:
        parts[0] -= num_rows
    parts += [_rows_of(each, each.size_bytes, row_bytes, in_a_byte) for each in later]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _rows_of(source: Source, num_bytes: int, row_bytes: int, in_a_byte: float | None) -> float | None:
    """Return the maximum number of rows in these bytes; for a Parquet file the rows of the complete file."""
    if source.name.endswith(PARQUET):
        return _parquet_rows(source)
    if source.name.endswith(GZIP):
        return None if in_a_byte is None else num_bytes * in_a_byte
    return num_bytes / row_bytes


@lru_cache(maxsize=4096)
def _parquet_rows(source: Source) -> int | None:
    """Return the number of rows, or None for an unreadable file; reading the file later reports the error."""
    try:
        with storage.open_file(source.path, "rb") as file:
            return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException):
        return None
