"""Turn `source=<file, folder or glob>` into files, and a file into blocks of whole lines or rows.

Blocks are small enough to be parsed side by side in bounded memory, and say at which line they start.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.raw.criteo import TEACHER_SUFFIX
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.storage import storage

MAX_BLOCK_ROWS = 65_535  # codes of a block's values fit 16 bits, 0 being the missing value
MAX_LINE_BYTES = 64 << 20
PAGE_BUFFER_BYTES = 1 << 18
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 64


@dataclass(frozen=True)
class Source:
    """One raw file. `digest` covers 64 evenly spaced pieces of 64 KiB: all of a file up to 4 MiB."""

    path: str
    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Block:
    """Whole rows in source order: `text` of a text file, or `table` of a Parquet file.

    `first_line` counts from 1, a header included; `first_row` from 0, without it.
    """

    first_line: int
    first_row: int
    num_rows: int
    text: bytes = b""
    table: pa.Table | None = None


def find_sources(source: str) -> list[Source]:
    """Files in natural order (day_2 before day_10). Raises DataError where there is none."""
    if any(sign in source for sign in "*?["):
        folder, pattern = storage.dirname(source), source.rpartition("/")[2]
        local = storage.is_local(source)
        paths = glob.glob(source) if local else [storage.join(folder, n) for n in _names(folder, pattern)]
    elif storage.is_file(source):
        paths = [source]
    else:
        paths = [storage.join(source, name) for name in _names(source, "*")]
    paths = [path for path in paths if storage.is_file(path) and not path.endswith((TEACHER_SUFFIX, ".partial"))]
    if not paths:
        siblings = storage.list_folder(storage.dirname(source))
        hint = did_you_mean(source.rpartition("/")[2], siblings)
        raise DataError(f"source={source!r} names no file{hint}; give a file, a folder or a quoted glob")
    return [_describe(path) for path in sorted(paths, key=_natural)]


def _names(folder: str, pattern: str) -> list[str]:
    """Without hidden files, and those that Spark and Hive write beside the data (_SUCCESS)."""
    return [name for name in fnmatch.filter(storage.list_folder(folder), pattern) if not name.startswith((".", "_"))]


def _natural(path: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _describe(path: str) -> Source:
    digest = hashlib.sha256()
    with storage.open_file(path, "rb") as file:
        size = file.seek(0, 2)
        for i in range(NUM_SAMPLES):
            file.seek(max(0, (size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1)))
            digest.update(file.read(SAMPLE_BYTES))
    return Source(path, path.rpartition("/")[2], size, digest.hexdigest())


class TextReader:
    """The lines of a text file, plain or .gz. `position` is how many of the file's bytes were read."""

    def __init__(self, source: Source, block_bytes: int) -> None:
        self._source, self._block_bytes = source, block_bytes
        self._file: IO[bytes] = storage.open_file(source.path, "rb")
        self._stream: Any = gzip.GzipFile(fileobj=self._file) if source.name.endswith(".gz") else self._file
        self._line, self._row = 1, 0

    @property
    def position(self) -> int:
        return self._file.tell()

    def __enter__(self) -> TextReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def header(self) -> bytes:
        """The first line, which then is in no block."""
        self._line += 1
        with self._whole_gzip():
            line = bytes(self._stream.readline(MAX_LINE_BYTES)).removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            raise DataError(f"{self._source.path} begins with an empty line, or is empty: the first names the columns")
        return line

    def blocks(self) -> Iterator[Block]:
        """At most about `block_bytes` and MAX_BLOCK_ROWS lines each."""
        rest = b""
        while chunk := self._read():
            cut = chunk.rfind(b"\n") + 1
            if not cut and len(rest) + len(chunk) > MAX_LINE_BYTES:
                raise DataError(
                    f"{self._source.path} has no line end for {MAX_LINE_BYTES >> 20} MiB after line {self._line}: "
                    "is it a text file? data.format says so"
                )
            if cut:
                yield from self._cut(rest + chunk[:cut])
                rest = chunk[cut:]
            else:
                rest += chunk
        if rest:
            yield from self._cut(rest)

    def _read(self) -> bytes:
        with self._whole_gzip():
            return bytes(self._stream.read(self._block_bytes))

    @contextmanager
    def _whole_gzip(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self._source.path} is not a whole gzip file ({error}): fetch it again") from error

    def _cut(self, text: bytes) -> Iterator[Block]:
        num_lines = text.count(b"\n") + (not text.endswith(b"\n"))
        if num_lines <= MAX_BLOCK_ROWS:
            yield self._block(text, num_lines)
            return
        ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n")) + 1
        begin = first = 0
        for piece in range(num_pieces := -(-num_lines // MAX_BLOCK_ROWS)):
            last = num_lines * (piece + 1) // num_pieces
            end = ends[last - 1] if last < num_lines else len(text)
            yield self._block(text[begin:end], last - first)
            begin, first = end, last

    def _block(self, text: bytes, num_lines: int) -> Block:
        self._line, self._row = self._line + num_lines, self._row + num_lines
        return Block(self._line - num_lines, self._row - num_lines, num_lines, text)


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
