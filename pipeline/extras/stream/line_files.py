"""Read lines of text files, starting at a byte. A line is read when its line end is written, or
when its file no longer grows.
"""

from __future__ import annotations

import os
from typing import IO

from pipeline.data.raw.layout import Layout, check_columns, find_format
from pipeline.extras.stream.source import Lines, Range
from pipeline.retraining.growing_files import end_of_lines
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

READ_BYTES = 1 << 20  # at a time
REMOTE_BYTES = 8 << 20  # per request
MAX_LINE_BYTES = 64 << 20
TAIL_BYTES = 4096  # of what was read of a file, compared when it is read on
NEVER_ANEW = "files of a stream grow, and are never written anew; give new rows a file of their own"


class LineFiles:
    """The text files of one folder. An offset is a number of bytes in a file."""

    def __init__(self, folder: str, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._has_header = bool(find_format(layout.format).header_lines) and layout.header is None
        self._names: dict[str, tuple[str, ...]] = {}
        self._grows = storage.is_local(folder)  # an object appears with all its bytes
        self._read: dict[str, tuple[int, int, bytes]] = {}  # file -> inode, offset, and the bytes before it
        self._at_once = READ_BYTES if self._grows else REMOTE_BYTES

    def path(self, name: str) -> str:
        return storage.join(self._folder, name)

    def num_unread(self, name: str, size: int, begin: int) -> int:
        """Return the number of unread bytes.

        Raises DataError if a file has become shorter than what was read.
        """
        if size < begin:
            raise DataError(f"{self.path(name)} has {size:,} bytes, and {begin:,} were read of it: {NEVER_ANEW}")
        return size - begin

    def end(self, name: str, size: int) -> int:
        """Return the offset after the last complete row of a file with this size. An incomplete row is not counted."""
        return end_of_lines(self.path(name), size) if self._grows else size

    def read(self, name: str, begin: int, end: int, most_lines: int) -> Lines | None:
        """Read lines. Returns None if there is no complete line yet."""
        with storage.open_file(self.path(name), "rb") as file:
            if self._has_header and begin == 0:
                header = _first_line(file.read(min(self._at_once, end)))
                if header is None:
                    return None
                begin = len(header)
            names = self._header_of(name)
            self._check_same(name, file, begin)
            file.seek(begin)
            content = file.read(min(self._at_once, end - begin))
            while b"\n" not in content and begin + len(content) < end:
                if len(content) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{self.path(name)} has no line end for {len(content) >> 20} MiB after "
                        f"byte {begin:,}; check that it is text"
                    )
                content += file.read(self._at_once)
            inode = os.fstat(file.fileno()).st_ino if self._grows else 0
        is_whole = not self._grows and begin + len(content) >= end
        lines: list[bytes] = []
        ends: list[int] = []
        at = 0
        while len(lines) < most_lines and at < len(content):
            stop = content.find(b"\n", at)
            if stop < 0 and not is_whole:
                break
            stop = len(content) if stop < 0 else stop
            lines.append(content[at:stop])
            ends.append(begin + min(stop + 1, len(content)))
            at = stop + 1
        if lines and self._grows:
            self._read[name] = (inode, ends[-1], content[max(0, at - TAIL_BYTES) : at])
        return Lines(name, begin, lines, ends, names) if lines else None

    def _check_same(self, name: str, file: IO[bytes], begin: int) -> None:
        """Raise DataError if the file is not the one that was read up to `begin`. If an earlier
        process read it, only check that a row begins at `begin`.
        """
        if not self._grows:
            return
        inode, offset, tail = self._read.get(name, (0, -1, b""))
        now = os.fstat(file.fileno()).st_ino
        if inode and now != inode:
            raise DataError(f"{self.path(name)} is another file than before (inode {inode}, now {now}): {NEVER_ANEW}")
        tail = tail if offset == begin else b"\n"
        file.seek(max(0, begin - len(tail)))
        if begin and file.read(len(tail)) != tail:
            raise DataError(f"the bytes before byte {begin:,} of {self.path(name)} have changed: {NEVER_ANEW}")

    def _header_of(self, name: str) -> tuple[str, ...]:
        if not self._has_header:
            return self._layout.header or ()
        if name not in self._names:
            from pipeline.data.raw.lines import split_cells

            with storage.open_file(self.path(name), "rb") as file:
                line = (_first_line(file.read(READ_BYTES)) or b"").removeprefix(b"\xef\xbb\xbf")
            self._names[name] = tuple(split_cells(self._layout, line.decode(errors="replace").rstrip("\r\n")))
            check_columns(self._layout, self._names[name], self.path(name))
        return self._names[name]

    def reread(self, wanted: Range) -> Lines:
        path = self.path(wanted.partition)
        with storage.open_file(path, "rb") as file:
            self._check_same(wanted.partition, file, wanted.begin)
            file.seek(wanted.begin)
            content = b""
            while len(content) < wanted.end - wanted.begin and (
                part := file.read(wanted.end - wanted.begin - len(content))
            ):
                content += part
        if len(content) < wanted.end - wanted.begin:
            raise DataError(f"{path} is shorter than it was: {wanted.end:,} bytes were read of it")
        if self._grows and content and not content.endswith(b"\n"):
            raise DataError(f"no row of {path} ends at byte {wanted.end:,} any more: {NEVER_ANEW}")
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        ends, at = [], wanted.begin
        for line in lines:
            at = min(at + len(line) + 1, wanted.end)
            ends.append(at)
        return Lines(wanted.partition, wanted.begin, lines, ends, self._header_of(wanted.partition))


def _first_line(content: bytes) -> bytes | None:
    """Return the first line with its end, or None if the end is missing."""
    stop = content.find(b"\n")
    return None if stop < 0 else content[: stop + 1]
