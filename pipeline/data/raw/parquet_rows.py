"""Read blocks of rows from Parquet files, and check their text."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.raw.blocks import MAX_BLOCK_ROWS, Block, Source
from pipeline.data.raw.value_types import lists_like
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

PAGE_BUFFER_BYTES = 1 << 18


class ParquetReader:
    """Reads `columns` of a Parquet file.

    `position` is the size of the file in bytes times the share of rows that were read.
    """

    def __init__(self, source: Source, columns: list[str], block_bytes: int) -> None:
        self._source, self._columns, self._block_bytes = source, columns, block_bytes
        self._file = storage.open_file(source.path, "rb")
        self._row = 0
        try:
            # Without the buffer size pyarrow keeps complete column chunks in memory.
            self._parquet = pq.ParquetFile(self._file, buffer_size=PAGE_BUFFER_BYTES, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            self._file.close()
            raise self._unreadable(error) from error

    @property
    def position(self) -> int:
        return self._source.size_bytes * self._row // max(self._parquet.metadata.num_rows, 1)

    def __enter__(self) -> ParquetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def column_names(self) -> tuple[str, ...]:
        return tuple(self._parquet.schema_arrow.names)

    def blocks(self) -> Iterator[Block]:
        metadata = self._parquet.metadata
        num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        rows = self._block_bytes * metadata.num_rows // max(num_bytes, 1)
        batches = self._parquet.iter_batches(max(1, min(rows, MAX_BLOCK_ROWS)), columns=self._columns)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, pa.ArrowException) as error:
                raise self._unreadable(error) from error
            if batch is None:
                return
            yield Block(self._row + 1, self._row, batch.num_rows, table=pa.Table.from_batches([batch]))
            self._row += batch.num_rows

    def schema(self) -> pa.Schema:
        return self._parquet.schema_arrow

    def _unreadable(self, error: Exception) -> Exception:
        """Return the exception to raise for an unreadable file. An error of the disk is returned unchanged."""
        if getattr(error, "errno", None) is not None:
            return error
        return DataError(
            f"{self._source.path} is not a complete Parquet file (after row {self._row}: {' '.join(str(error).split())[:300]}): "
            "fetch it again, or leave it out of source; data.format says what is expected"
        )


def not_text(table: pa.Table, names: list[str]) -> dict[int, str]:
    """Return row -> reason for text that is not valid UTF-8. Parquet files may contain such text."""
    reasons: dict[int, str] = {}
    for name in names:
        column = table[name].combine_chunks()
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            for row, value in enumerate(_as_bytes(column).to_pylist()):
                if not _is_utf8(value):
                    reasons.setdefault(row, f"{name} is not UTF-8")
    return reasons


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return the same values as bytes instead of text, so that to_pylist() does not decode them."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.view(pa.binary()))
    if pa.types.is_list(kind):
        return lists_like(column, _as_bytes(column.flatten()))
    return column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())


def _is_utf8(value: bytes | list[bytes] | None) -> bool:
    try:
        for part in value if isinstance(value, list) else [value]:
            if part is not None:
                part.decode()
    except UnicodeDecodeError:
        return False
    return True
