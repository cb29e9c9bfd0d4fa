"""Read lines of text files from a byte on.

A line counts if its end is written, or if its file no longer grows.
"""

from __future__ import annotations

from pipeline.config.data import DataConfig
from pipeline.data.raw.layout import check_columns, find_format, layout_of
from pipeline.extras.stream.source import Lines, Range
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

READ_BYTES = 1 << 20  # at a time
REMOTE_BYTES = 8 << 20  # per request
MAX_LINE_BYTES = 64 << 20


class LineFiles:
    """The text files of one folder. An offset counts a file's bytes."""

    def __init__(self, folder: str, data: DataConfig) -> None:
        self._folder, self._layout = folder, layout_of(data)
        self._has_header = bool(find_format(data.format).header_lines) and self._layout.header is None
        self._names: dict[str, tuple[str, ...]] = {}
        self._grows = storage.is_local(folder)  # an object appears with all its bytes
        self._at_once = READ_BYTES if self._grows else REMOTE_BYTES

    def path(self, name: str) -> str:
        return storage.join(self._folder, name)

    def num_unread(self, name: str, size: int, begin: int) -> int:
        """Return the number of unread bytes.

        Raises DataError if a file has become shorter than what was read.
        """
        if size < begin:
            raise DataError(
                f"{self.path(name)} has {size:,} bytes, but {begin:,} were read: files of a "
                "stream may grow, but must not be rewritten; write new rows to a new file"
            )
        return size - begin

    def end(self, size: int) -> int:
        """Return the offset after the last row of a file with this many bytes."""
        return size

    def read(self, name: str, begin: int, end: int, most_lines: int) -> Lines | None:
        """Read lines. Returns None if there is no complete line yet."""
        with storage.open_file(self.path(name), "rb") as file:
            if self._has_header and begin == 0:
                header = _first_line(file.read(min(self._at_once, end)))
                if header is None:
                    return None
                begin = len(header)
            names = self._header_of(name)
            file.seek(begin)
            content = file.read(min(self._at_once, end - begin))
            while b"\n" not in content and begin + len(content) < end:
                if len(content) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{self.path(name)} has no line end for {len(content) >> 20} MiB after "
                        f"byte {begin:,}; check that it is text"
                    )
                content += file.read(self._at_once)
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
        return Lines(name, begin, lines, ends, names) if lines else None

    def _header_of(self, name: str) -> tuple[str, ...]:
        if not self._has_header:
            return self._layout.header or ()
        if name not in self._names:
            from pipeline.data.raw.row_rules import split_cells

            with storage.open_file(self.path(name), "rb") as file:
                line = (_first_line(file.read(READ_BYTES)) or b"").removeprefix(b"\xef\xbb\xbf")
            self._names[name] = tuple(split_cells(self._layout, line.decode(errors="replace").rstrip("\r\n")))
            check_columns(self._layout, self._names[name], self.path(name))
        return self._names[name]

    def reread(self, wanted: Range) -> Lines:
        path = self.path(wanted.partition)
        with storage.open_file(path, "rb") as file:
            file.seek(wanted.begin)
            content = b""
            while len(content) < wanted.end - wanted.begin and (
                part := file.read(wanted.end - wanted.begin - len(content))
            ):
                content += part
        if len(content) < wanted.end - wanted.begin:
            raise DataError(f"{path} has become shorter: {wanted.end:,} bytes of it were read before")
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
