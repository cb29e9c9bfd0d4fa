"""Read rows of Parquet files, starting at a row, one row group at a time. A file is read when its footer is written."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.raw.layout import Layout, check_columns
from pipeline.extras.stream.source import WHOLE, Range, TableRows
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.storage import Stamp, difference, stamp_of

MAGIC = b"PAR1"  # first and last bytes of a file
MIN_BYTES = 12


class ParquetFiles:
    """The Parquet files of one folder.

    An offset is a row number; after the last row WHOLE is added, so the file is not opened again.
    """

    def __init__(self, folder: str, layout: Layout) -> None:
        """layout: the columns to read."""
        self._folder, self._layout = folder, layout
        self._num_rows: dict[str, int] = {}  # of files that are partly read
        self._stamps: dict[str, Stamp] = {}  # of files that are partly read
        # (file, its first row, rows) of the last read
        self._group: tuple[str, int, pa.Table] | None = None

    def path(self, name: str) -> str:
        return storage.join(self._folder, name)

    def num_unread(self, name: str, size: int, begin: int) -> int:
        """Return the number of unread bytes. For a partly read file it is estimated from
        its rows.
        """
        if begin >= WHOLE:
            return 0
        rows = self._num_rows.get(name)
        return size if not rows else max(1, size * (rows - begin) // rows)

    def end(self, name: str, size: int) -> int:
        return WHOLE

    def read(self, name: str, begin: int, end: int, most_lines: int) -> TableRows | None:
        """Read rows. Returns None if the file is not complete yet."""
        if end < MIN_BYTES or (name not in self._num_rows and not self._has_footer(name, end)):
            return None
        found = self._rows(name, begin, most_lines)
        if found.is_last:
            self._num_rows.pop(name)
            self._stamps.pop(name, None)
        return found

    def _has_footer(self, name: str, size: int) -> bool:
        with storage.open_file(self.path(name), "rb") as file:
            file.seek(size - len(MAGIC))
            return bool(file.read(len(MAGIC)) == MAGIC)

    def _rows(self, name: str, begin: int, most: int) -> TableRows:
        """Return the rows from row `begin` to the end of its row group."""
        if self._group is not None and self._group[0] == name:
            first, table = self._group[1:]
            if first <= begin < first + table.num_rows and name in self._num_rows:
                return self._slice(name, begin, most, first, table)
        path = self.path(name)
        now = stamp_of(path)
        if text := difference(self._stamps.setdefault(name, now), now):
            raise DataError(f"{path} has changed since it was begun: {text}; files of a stream are never written anew")
        try:
            with storage.open_file(path, "rb") as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
                check_columns(self._layout, tuple(file.schema_arrow.names), path)
                metadata = file.metadata
                self._num_rows[name] = metadata.num_rows
                if begin > metadata.num_rows:
                    raise DataError(
                        f"{path} has {metadata.num_rows:,} rows, but {begin:,} were read: files "
                        "of a stream must not be rewritten"
                    )
                group, first = 0, 0
                while group + 1 < metadata.num_row_groups and first + metadata.row_group(group).num_rows <= begin:
                    first += metadata.row_group(group).num_rows
                    group += 1
                table = (
                    file.read_row_group(group, columns=self._layout.needed)
                    if metadata.num_row_groups
                    else file.schema_arrow.empty_table().select(self._layout.needed)
                )
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())[:300]})") from None
        self._group = (name, first, table)
        return self._slice(name, begin, most, first, table)

    def _slice(self, name: str, begin: int, most: int, first: int, table: pa.Table) -> TableRows:
        own = table.slice(begin - first, most)
        return TableRows(name, begin, own, begin + own.num_rows >= self._num_rows[name])

    def reread(self, wanted: Range) -> TableRows:
        end, begin = wanted.end % WHOLE, wanted.begin
        parts: list[pa.Table] = []
        while begin < end:
            part = self._rows(wanted.partition, begin, end - begin)
            if not part.num_rows:
                raise DataError(
                    f"{self.path(wanted.partition)} has {begin:,} rows, but {end:,} were read: "
                    "files of a stream must not be rewritten"
                )
            parts.append(part.table)
            begin += part.num_rows
        table = pa.concat_tables(parts) if parts else self._rows(wanted.partition, wanted.begin, 0).table
        return TableRows(wanted.partition, wanted.begin, table, wanted.end >= WHOLE)
