"""Find the files that `source=<file, folder or glob>` names, and read text files in blocks of
complete lines.

Blocks are small enough to be parsed in parallel in bounded memory. They record the line where they
start.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

import numpy as np

from pipeline.data.raw.blocks import MAX_BLOCK_ROWS, NUM_SAMPLES, SAMPLE_BYTES, Block, Source
from pipeline.data.raw.partitions import FOLDER, RANGE, files_below, in_range, is_data, name_of, partitions_of
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.storage import Stamp, difference, stamp_of

MAX_LINE_BYTES = 64 << 20
# The true probabilities of a generated source are in a file next to it, one for each row.
TEACHER_SUFFIX = ".teacher.parquet"
TEACHER_COLUMN = "probability"
UNPACK, TO_PARQUET = "decompress it, or compress it by gzip", "write it as Parquet, and set data.format=parquet"
TO_UTF16, TO_UTF32 = "set data.encoding=utf-16", "set data.encoding=utf-32"
NO_TEXT = {  # first bytes of a file -> its kind, the fix
    b"\x1f\x8b": ("gzip", "let its name end in .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", UNPACK),
    b"BZh": ("compressed by bzip2", UNPACK),
    b"\xfd7zXZ": ("compressed by xz", UNPACK),
    b"\x04\x22\x4d\x18": ("compressed by lz4", UNPACK),
    b"\xff\x06\x00\x00sNaPpY": ("compressed by snappy", UNPACK),
    b"PK\x03\x04": ("a zip file, as spreadsheets are", "unpack it, or save the sheet as CSV"),
    b"\xd0\xcf\x11\xe0": ("an old spreadsheet", "save the sheet as CSV"),
    b"PAR1": ("Parquet", "set data.format=parquet"),
    b"ORC": ("ORC", TO_PARQUET),
    b"ARROW1": ("an Arrow or Feather file", TO_PARQUET),
    b"\xff\xff\xff\xff": ("an Arrow stream", TO_PARQUET),
    b"Obj\x01": ("Avro", TO_PARQUET),
    b"SEQ\x06": ("a Hadoop sequence file", TO_PARQUET),
    b"\x89HDF": ("HDF5", TO_PARQUET),
    b"\x93NUMPY": ("a NumPy array", TO_PARQUET),
    b"SQLite format 3": ("an SQLite database", TO_PARQUET),
    b"\x80\x04\x95": ("a Python pickle", TO_PARQUET),
    b"version https://git-lfs": ("a pointer of Git LFS instead of the file", "fetch the file by git lfs pull"),
    b"<!DOCTYPE": ("a web page", "fetch the file itself: the server answered with a page"),
    b"<html": ("a web page", "fetch the file itself: the server answered with a page"),
    codecs.BOM_UTF32_LE: ("text in UTF-32", TO_UTF32),  # it begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: ("text in UTF-32", TO_UTF32),
    b"\xff\xfe": ("text in UTF-16", TO_UTF16),
    b"\xfe\xff": ("text in UTF-16", TO_UTF16),
}
LOOKED_AT_BYTES = 4096  # of a file, to see whether it is text
CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1b\x01\x02\x03\x1c\x1d\x1e\x1f"))
INNER_DELIMITER = b"\x1f"  # in blocks, for a delimiter of several characters
GLOB_SIGNS = "*?["


class SourceChangedError(DataError):
    """A source file was changed after it was listed, so it is unknown which rows were read."""


def find_sources(source: str) -> list[Source]:
    """Return the files of `source` in natural order (day_2 before day_10): one file, a folder, or a
    glob.

    An existing file or folder with exactly this name is used, even if the name contains pattern
    characters. `**` matches nested folders, on local paths only. In an object store only the last
    part of a path may be a pattern. A folder's files include its partitions,
    dt=2026-11-01/part-0.parquet. dt={2026-11-01..2026-11-07} names a range of partitions.

    Raises:
        DataError: no file is found, or one of a range is missing.
    """
    return named_apart([_describe(path) for path in _paths(source)])


def stamps_of(source: str) -> dict[str, Stamp]:
    """Return the current stamps of the files of `source`, by path, without reading the files."""
    return {path: stamp_of(path) for path in _paths(source)}


def named_apart(sources: list[Source]) -> list[Source]:
    """Return the same files. If two files have equal names, names become paths below the common folder."""
    if len({each.name for each in sources}) == len(sources):
        return sources
    top = os.path.commonpath([storage.dirname(each.path) for each in sources])  # a/rows.csv and b/rows.csv
    return [replace(each, name=each.path[len(top) :].lstrip("/")) for each in sources]


def _paths(source: str) -> list[str]:
    if RANGE.search(source) and not storage.exists(source) and (each_of := in_range(source)) is not None:
        return [path for each in each_of for path in _paths(each)]
    if storage.is_file(source):
        paths = [source]
    elif any(sign in source for sign in GLOB_SIGNS) and not (storage.is_local(source) and os.path.isdir(source)):
        paths = _matches(source)
    else:
        paths = list(files_below(source))
    paths = [path for path in paths if storage.is_file(path) and not path.endswith((TEACHER_SUFFIX, ".partial"))]
    if not paths and storage.is_local(source) and os.path.isdir(source):
        raise DataError(f"source={source!r} is a folder without data files; names that begin with . or _ are not data")
    if not paths:
        siblings = storage.list_folder(storage.dirname(source))
        hint = did_you_mean(source.rpartition("/")[2], siblings)
        raise DataError(f"source={source!r} names no file{hint}; give a file, a folder or a quoted glob")
    return sorted(set(paths), key=_natural)


def _matches(pattern: str) -> list[str]:
    if storage.is_local(pattern):
        begin = next(at for at, part in enumerate(pattern.split("/")) if any(sign in part for sign in GLOB_SIGNS))
        found = glob.glob(pattern, recursive=True)
        paths = [path for path in found if all(map(is_data, path.split("/")[begin:]))]
        return [file for path in paths for file in (files_below(path) if _is_partition(path) else [path])]
    folder, last = storage.dirname(pattern), pattern.rpartition("/")[2]
    if "**" in last or any(sign in folder for sign in GLOB_SIGNS):
        raise DataError(
            f"source={pattern!r}: of an object store only the last part of a path may be a pattern, of *, ? and [...]; "
            "give a folder, or a pattern in the last part alone"
        )
    names = filter(is_data, fnmatch.filter(storage.list_folder(folder), last))
    paths = [storage.join(folder, name) for name in names]
    return [file for path in paths for file in (files_below(path) if _is_partition(path) else [path])]


def _is_partition(path: str) -> bool:
    return FOLDER.fullmatch(path.rpartition("/")[2]) is not None and not storage.is_file(path)


def _natural(path: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _describe(path: str) -> Source:
    stamp = stamp_of(path)  # before the bytes are read: whoever writes from now on is noticed
    with storage.open_file(path, "rb") as file:
        digest = digest_of_samples(file, stamp.size_bytes)
    return Source(path, name_of(path), stamp.size_bytes, digest, None, partitions_of(path), stamp)


def digest_of_samples(file: IO[bytes], size_bytes: int) -> str:
    """Return the SHA-256 of 64 evenly spaced pieces of the first `size_bytes` bytes: all bytes up to 4 MiB."""
    digest = hashlib.sha256()
    for i in range(NUM_SAMPLES):
        begin = max(0, (size_bytes - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
        file.seek(begin)
        digest.update(file.read(min(SAMPLE_BYTES, size_bytes - begin)))
    return digest.hexdigest()


def check_unchanged(sources: Iterable[Source]) -> None:
    """Raise SourceChangedError for a file that was written to, replaced or removed since it was listed."""
    for source in sources:
        _compare(source, source.stamp)


@contextmanager
def unchanged(source: Source) -> Iterator[None]:
    """Raise SourceChangedError if the file changes during this context, or has changed since it was
    listed.

    An error that the change causes, such as a file that ends too early, is replaced by
    SourceChangedError. The inode is only compared on the machine that listed the file.
    """
    now = _compare(source, source.stamp, same_host=False)
    try:
        yield
    except (DataError, OSError):
        _compare(source, now)
        raise
    _compare(source, now)


def _compare(source: Source, then: Stamp | None, same_host: bool = True) -> Stamp | None:
    """Return the current stamp of the file. Raise SourceChangedError if it differs from `then`."""
    if then is None:
        return None
    try:
        now = stamp_of(source.path)
    except FileNotFoundError:
        raise _changed(source, f"it had {then.size_bytes:,} bytes and is gone") from None
    if text := difference(then, now if same_host else now._replace(inode=then.inode)):
        raise _changed(source, text)
    return now


def _changed(source: Source, what: str) -> SourceChangedError:
    return SourceChangedError(
        f"{source.path} has changed since it was listed: {what}. Wait until its writer has finished, or "
        "give a copy of it as source, then run the same command again"
    )


def _refuse_no_text(begin: bytes, source: Source, is_utf8: bool) -> None:
    """Raise DataError if the first bytes of a file (decompressed if its name ends in .gz) are not
    text.

    The message says how to convert the file.
    """
    found = next((each for signature, each in NO_TEXT.items() if begin.lstrip().startswith(signature)), None)
    if found is None and begin[257:262] == b"ustar":
        found = "a tar archive", "unpack it"
    if found is None and is_utf8 and (encoding := utf16_of(begin)):
        found = "text in UTF-16 without its mark", f"set data.encoding={encoding}"
    if found is None and is_utf8 and len(begin.translate(None, CONTROL)) < 0.95 * len(begin) and not _is_text(begin):
        found = "no text in UTF-8", "decompress it, or write it as text or as Parquet"
    if found and (is_utf8 or found[1] not in (TO_UTF16, TO_UTF32)):
        raise DataError(f"{source.path} is {found[0]}, but is read as text: {found[1]}")


def utf16_of(begin: bytes) -> str:
    """Return the encoding of text in UTF-16 without its mark, by its zero bytes; "" for other bytes."""
    even, odd = begin[::2].count(0), begin[1::2].count(0)
    if max(even, odd) > 0.4 * len(begin) / 2 and min(even, odd) < 0.1 * len(begin) / 2:
        return f"utf-16-{'le' if odd > even else 'be'}"
    return ""


def _is_text(begin: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return False
    return True


class _Transcoded:
    """A stream of text in another encoding, read as UTF-8."""

    def __init__(self, stream: Any, encoding: str) -> None:
        self._text = io.TextIOWrapper(stream, encoding, newline="\n")

    def read(self, size: int) -> bytes:
        return self._text.read(size).encode()

    def readline(self, size: int) -> bytes:
        return self._text.readline(size).encode()


def _end_of_rows(text: bytes, stop: int) -> int:
    """Return the end of the last line in text[:stop] that is not empty; 0 if all lines are empty."""
    if stop > 2 and not text.endswith((b"\n\n", b"\n\r\n"), 0, stop):
        return stop
    rows = text[:stop].rstrip(b"\r\n")
    return text.find(b"\n", len(rows), stop) + 1 or stop if rows else 0


class TextReader:
    """Reads the lines of a text file, plain or .gz, as UTF-8.

    `position` is the number of bytes read from the file. A `separator` of several characters is
    replaced by INNER_DELIMITER.
    """

    def __init__(self, source: Source, block_bytes: int, encoding: str = "utf-8", separator: str = "") -> None:
        self._source, self._block_bytes, self._encoding = source, block_bytes, encoding
        self._separator = separator.encode() if len(separator) > 1 else b""
        self._file: IO[bytes] = storage.open_file(source.path, "rb")
        self._line, self._row = 1, 0
        try:
            self._stream = self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> Any:
        is_utf8 = codecs.lookup(self._encoding).name == "utf-8"
        stream: Any = gzip.GzipFile(fileobj=self._file) if self._source.name.endswith(".gz") else self._file
        with self._readable():
            begin = stream.read(LOOKED_AT_BYTES)
        _refuse_no_text(begin, self._source, is_utf8)
        stream.seek(0)
        return stream if is_utf8 else _Transcoded(stream, self._encoding)

    @property
    def position(self) -> int:
        return self._file.tell()

    def __enter__(self) -> TextReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def schema(self) -> None:
        """Return None, because text has no types."""

    def header(self) -> bytes:
        """Read and return the first line, so that no block contains it; b"" if the file is empty."""
        self._line += 1
        with self._readable():
            line = bytes(self._stream.readline(MAX_LINE_BYTES)).removeprefix(b"\xef\xbb\xbf")
        if line and not line.strip():
            raise DataError(f"{self._source.path} begins with an empty line: its first line must name the columns")
        if num_returns := line.rstrip(b"\r\n").count(b"\r"):
            raise DataError(
                f"{self._source.path} has {num_returns:,} carriage returns inside its first line, which names the columns. Lines that end "
                "in a carriage return alone, as old Macs write them, are not read: convert them by tr '\\r' '\\n' <old >new"
            )
        return self._with_delimiter(line)

    def _with_delimiter(self, text: bytes) -> bytes:
        if not self._separator:
            return text
        if INNER_DELIMITER in text:
            raise DataError(
                f"{self._source.path} holds the character U+001F, which the package uses in place of data.delimiter="
                f"{self._separator.decode()!r}: replace it"
            )
        return text.replace(self._separator, INNER_DELIMITER)

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of about `block_bytes` and at most MAX_BLOCK_ROWS lines.

        Empty lines at the end of the file are skipped.
        """
        remainder = b""
        while chunk := self._read():
            # Empty lines after the last row may be at the end of the file, so they are kept until
            # more rows follow.
            cut = _end_of_rows(chunk, chunk.rfind(b"\n") + 1)
            if not cut and len(remainder) + len(chunk) > MAX_LINE_BYTES:
                raise DataError(
                    f"{self._source.path} has no line end for {MAX_LINE_BYTES >> 20} MiB after line {self._line}: "
                    "is it a text file, as data.format says?"
                )
            if cut:
                yield from self._cut(b"".join((remainder, memoryview(chunk)[:cut])))  # one copy, not two
                remainder = chunk[cut:]
            else:
                remainder += chunk
        if end := _end_of_rows(remainder, len(remainder)):
            yield from self._cut(remainder[:end])
        if self._source.stamp is not None and self.position != self._source.size_bytes:
            raise _changed(
                self._source, f"{self.position:,} bytes of it were read, and it had {self._source.size_bytes:,}"
            )

    def _read(self) -> bytes:
        with self._readable():
            return bytes(self._stream.read(self._block_bytes))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._source.path} is not text in data.encoding={self._encoding} ({error.reason} after line {self._line}): "
                "give the encoding that it is written in, such as utf-8, utf-16 or latin-1"
            ) from error
        except UnicodeError as error:  # UTF-16 without its mark
            raise DataError(f"{self._source.path}: {error}; give data.encoding=utf-16-le or utf-16-be") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self._source.path} is not a complete gzip file ({error}): fetch it again") from error

    def _cut(self, text: bytes) -> Iterator[Block]:
        # Five times as fast as bytes.count, which compares one byte at a time.
        num_lines = int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))) + (not text.endswith(b"\n"))
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
        return Block(self._line - num_lines, self._row - num_lines, num_lines, self._with_delimiter(text))
