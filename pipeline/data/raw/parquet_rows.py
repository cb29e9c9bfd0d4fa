"""Read blocks of rows from Parquet files, and check their text columns, which nobody need have checked."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.raw.source import MAX_BLOCK_ROWS, Block, Source
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

PAGE_BUFFER_BYTES = 1 << 18


class ParquetReader:
    """The rows of a Parquet file; only `columns` are read. `position` is the share of its bytes that its rows stand for."""

    def __init__(self, source: Source, columns: list[str], block_bytes: int) -> None:
        self._source, self._columns, self._block_bytes = source, columns, block_bytes
        self._file = storage.open_file(source.path, "rb")
        self._row = 0
        try:
            # Without the buffer size whole column chunks are held.
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
        """What to raise: a disk's error as it is."""
        if getattr(error, "errno", None) is not None:
            return error
        return DataError(
            f"{self._source.path} is not a whole Parquet file (after row {self._row}: {' '.join(str(error).split())[:300]}): "
            "fetch it again, or leave it out of source; data.format says what is expected"
        )


def with_text(table: pa.Table, names: list[str]) -> pa.Table:
    """Columns of bytes read as text; whether they are is not_text's to say."""
    for name in names:
        kind = table.schema.field(name).type
        as_text = {pa.binary(): pa.string(), pa.large_binary(): pa.large_string()}.get(kind)
        if as_text:
            column = pa.chunked_array([chunk.view(as_text) for chunk in table[name].chunks], as_text)
            table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def not_text(table: pa.Table, names: list[str]) -> dict[int, str]:
    """Row -> reason for text that is not UTF-8, as Parquet files may hold it."""
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
    """The same values with bytes in place of text, which to_pylist() would decode."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.view(pa.binary()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        maker = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
        mask = column.is_null() if column.null_count else None
        return maker.from_arrays(column.offsets, _as_bytes(column.values), mask=mask)
    return column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())


def _is_utf8(value: bytes | list[bytes] | None) -> bool:
    try:
        for part in value if isinstance(value, list) else [value]:
            if part is not None:
                part.decode()
    except UnicodeDecodeError:
        return False
    return True
