"""Follow a folder, or the prefix of an object store: find new files, and continue to read files
whose lines grow.

A partition is a file, named by its path below the folder. An offset counts its bytes, or the rows
of a Parquet file. Files whose names end in .parquet are read as Parquet, also next to text. Files are
read in the order of their names, each to its end, so that a writer that names files by time gets the
same order of rows at any time. A file that is shorter than what was read is an error: files must not
be rewritten.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pipeline.config.data import DataConfig
from pipeline.config.registry import register
from pipeline.config.retraining import StreamConfig
from pipeline.extras.stream.source import Offsets, Range, Rows
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from pipeline.extras.stream.line_files import LineFiles
    from pipeline.extras.stream.parquet_files import ParquetFiles

LEFT_OUT = (".", "_")  # hidden files, and marks that writers put next to their data
UNFINISHED = (".partial", ".tmp", ".gz", ".crc")
PARQUET = ".parquet"
LOOK_S = 30.0  # between two listings of an object store while there is data to read
logger = get_logger("pipeline.train")


@register("stream", "folder")
class FolderSource:
    unit = "bytes"

    def __init__(self, folder: str, config: StreamConfig, data: DataConfig) -> None:
        """Raises DataError if there is no such folder, or if files of data.format cannot be
        followed.
        """
        self._is_local = storage.is_local(folder)
        if self._is_local and not os.path.isdir(folder):
            raise DataError(
                f"source={folder} is not a folder: stream.kind=folder follows a folder, or a prefix of an object store"
            )
        self._folder, self._poll_s = folder.rstrip("/"), config.poll_s
        self._text, self._tables = _files_of(self._folder, config, data)
        self._listed: list[tuple[str, int]] = []
        self._listed_at = -LOOK_S
        if not self._files():
            logger.warning("source=%s has no file yet", folder)

    def read(self, offsets: Offsets, most_lines: int) -> Rows | None:
        for again in (False, True):
            for name, size in self._files(again):
                begin = offsets.get(name, 0)
                contents = self._contents(name)
                if contents.num_unread(name, size, begin):
                    rows = contents.read(name, begin, size, most_lines)
                    if rows is not None and rows.num_rows:
                        return rows
                    if rows is not None:  # a file without rows
                        offsets[name] = rows.range.end
            if self._is_local:
                break
        time.sleep(self._poll_s)
        return None

    def _contents(self, name: str) -> LineFiles | ParquetFiles:
        return self._tables if self._text is None or name.endswith(PARQUET) else self._text

    def _files(self, anew: bool = False) -> list[tuple[str, int]]:
        """Return (path below the folder, bytes) of the files, in the order of reading."""
        if self._is_local or anew or time.monotonic() - self._listed_at > LOOK_S:
            self._listed = [(name, size) for name, size in storage.list_files(self._folder) if _is_followed(name)]
            self._listed_at = time.monotonic()
        return self._listed

    def reread(self, wanted: Range) -> Rows:
        try:
            return self._contents(wanted.partition).reread(wanted)
        except FileNotFoundError:
            raise DataError(
                f"{storage.join(self._folder, wanted.partition)} no longer exists, but {wanted.begin:,} "
                f"to {wanted.end:,} of it must be read again"
            ) from None

    def behind(self, offsets: Offsets) -> int:
        return sum(self._contents(name).num_unread(name, size, offsets.get(name, 0)) for name, size in self._files())

    def newest(self) -> Offsets:
        return {name: self._contents(name).end(name, size) for name, size in self._files(anew=True)}

    def close(self) -> None:
        """Close nothing, because nothing is open."""


def _is_followed(name: str) -> bool:
    return not any(part.startswith(LEFT_OUT) for part in name.split("/")) and not name.endswith(UNFINISHED)


def _files_of(folder: str, config: StreamConfig, data: DataConfig) -> tuple[LineFiles | None, ParquetFiles]:
    from pipeline.data.raw.layout import find_format
    from pipeline.extras.stream.joined import rows_of
    from pipeline.extras.stream.line_files import LineFiles
    from pipeline.extras.stream.parquet_files import ParquetFiles

    is_lines = find_format(data.format).is_lines
    if not is_lines and data.format != "parquet":
        raise DataError(
            f"data.format={data.format} cannot be followed: a stream supports csv, tsv, jsonl, criteo_tsv and parquet"
        )
    layout = rows_of(data, config)
    return LineFiles(folder, layout) if is_lines else None, ParquetFiles(folder, layout)
