"""Read rows of Parquet files from a row on, a row group at a time. A file counts once it has its footer."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.raw.layout import Layout, check_columns
from pipeline.extras.stream.source import WHOLE, Range, TableRows
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

MAGIC = b"PAR1"  # a file's first and last bytes
MIN_BYTES = 12


class ParquetFiles:
    """Of one folder. An offset is a row's number, and WHOLE besides behind the last: such a file is not opened again."""

    def __init__(self, folder: str, layout: Layout) -> None:
        """layout: what of the columns is read."""
        self._folder, self._layout = folder, layout
        self._num_rows: dict[str, int] = {}  # of files that are begun
        self._group: tuple[str, int, pa.Table] | None = None  # (file, its first row, rows) that were read last

    def path(self, name: str) -> str:
        return storage.join(self._folder, name)

    def num_unread(self, name: str, size: int, begin: int) -> int:
        """Bytes, of a begun file by its rows."""
        if begin >= WHOLE:
            return 0
        rows = self._num_rows.get(name)
        return size if not rows else max(1, size * (rows - begin) // rows)

    def end(self, size: int) -> int:
        return WHOLE

    def read(self, name: str, begin: int, end: int, most_lines: int) -> TableRows | None:
        """None where the file is not whole yet."""
        if end < MIN_BYTES or (name not in self._num_rows and not self._has_footer(name, end)):
            return None
        found = self._rows(name, begin, most_lines)
        if found.is_last:
            self._num_rows.pop(name)
        return found

    def _has_footer(self, name: str, size: int) -> bool:
        with storage.open_file(self.path(name), "rb") as file:
            file.seek(size - len(MAGIC))
            return bool(file.read(len(MAGIC)) == MAGIC)

    def _rows(self, name: str, begin: int, most: int) -> TableRows:
        """From row `begin` on up to the end of its row group."""
        if self._group is not None and self._group[0] == name:
            first, table = self._group[1:]
            if first <= begin < first + table.num_rows and name in self._num_rows:
                return self._slice(name, begin, most, first, table)
        path = self.path(name)
        try:
            with storage.open_file(path, "rb") as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
                check_columns(self._layout, tuple(file.schema_arrow.names), path)
                metadata = file.metadata
                self._num_rows[name] = metadata.num_rows
                if begin > metadata.num_rows:
                    raise DataError(
                        f"{path} has {metadata.num_rows:,} rows, and {begin:,} were read of it: files of a stream are never written anew"
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
                    f"{self.path(wanted.partition)} has {begin:,} rows, and {end:,} were read of it: files of a stream are never written anew"
                )
            parts.append(part.table)
            begin += part.num_rows
        table = pa.concat_tables(parts) if parts else self._rows(wanted.partition, wanted.begin, 0).table
        return TableRows(wanted.partition, wanted.begin, table, wanted.end >= WHOLE)
