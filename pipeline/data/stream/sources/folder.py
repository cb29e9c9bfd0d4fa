"""A folder of text files: new ones are found, and those that grow are read on from where they were.

A partition is a file, by its path below the folder, and an offset counts its bytes. Files are read in the order of their names, each to
its end before the next, so that a writer which names files in the order of time gives the same order of rows whenever they are
read. A line counts once its line end is there. A file that is shorter than what was read of it is an error: files are never
written anew.
"""

from __future__ import annotations

import os
import time

from pipeline.config.data import DataConfig
from pipeline.config.registry import register
from pipeline.config.stream import StreamConfig
from pipeline.data.stream.source import Lines, Offsets, Range
from pipeline.runtime.errors import DataError

READ_BYTES = 1 << 20  # at once
MOST_LINE_BYTES = 64 << 20
LEFT_OUT = (".", "_")  # hidden files, and marks that writers leave beside their data
UNFINISHED = (".partial", ".tmp", ".gz")


@register("stream", "folder")
class FolderSource:
    unit = "bytes"

    def __init__(self, folder: str, config: StreamConfig, data: DataConfig) -> None:
        """Raises DataError where there is no such folder, or rows of data.format are no lines."""
        from pipeline.data.raw.layout import find_format, layout_of

        if not os.path.isdir(folder):
            raise DataError(f"source={folder} is no folder: stream.kind=folder follows one on a local path")
        kind = find_format(data.format)
        if not kind.is_lines:
            raise DataError(
                f"data.format={data.format} is not read line by line: a stream takes csv, tsv, jsonl or criteo_tsv"
            )
        self._layout = layout_of(data)
        self._has_header = bool(kind.header_lines) and self._layout.header is None
        self._folder, self._poll_s = folder, config.poll_s
        self._names: dict[str, tuple[str, ...]] = {}

    def read(self, offsets: Offsets, most_lines: int) -> Lines | None:
        for name, size in self._files():
            begin = offsets.get(name, 0)
            if size < begin:
                raise DataError(
                    f"{os.path.join(self._folder, name)} has {size:,} bytes, and {begin:,} were read of it: files of a stream grow, "
                    "and are never written anew; give new rows a file of their own"
                )
            if size > begin and (lines := self._lines(name, begin, size, most_lines)) is not None:
                return lines
        time.sleep(self._poll_s)
        return None

    def _files(self) -> list[tuple[str, int]]:
        """(path below the folder, bytes), in the order of reading."""
        found = []
        for at, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(LEFT_OUT)]
            for name in names:
                if not name.startswith(LEFT_OUT) and not name.endswith(UNFINISHED):
                    path = os.path.join(at, name)
                    found.append((os.path.relpath(path, self._folder), os.path.getsize(path)))
        return sorted(found)

    def _lines(self, name: str, begin: int, end: int, most_lines: int) -> Lines | None:
        """None where there is no whole line yet."""
        with open(os.path.join(self._folder, name), "rb") as file:
            if self._has_header and begin == 0:
                header = file.readline(MOST_LINE_BYTES)
                if not header.endswith(b"\n"):
                    return None
                begin = len(header)
            names = self._header_of(name)
            file.seek(begin)
            content = file.read(min(READ_BYTES, end - begin))
            while b"\n" not in content and begin + len(content) < end:
                if len(content) > MOST_LINE_BYTES:
                    raise DataError(
                        f"{file.name} has no line end for {len(content) >> 20} MiB after byte {begin:,}: is it text?"
                    )
                content += file.read(READ_BYTES)
        lines: list[bytes] = []
        ends: list[int] = []
        at = 0
        while len(lines) < most_lines and (stop := content.find(b"\n", at)) >= 0:
            lines.append(content[at:stop])
            ends.append(begin + stop + 1)
            at = stop + 1
        return Lines(name, begin, lines, ends, names) if lines else None

    def _header_of(self, name: str) -> tuple[str, ...]:
        if not self._has_header:
            return self._layout.header or ()
        if name not in self._names:
            from pipeline.data.raw.layout import check_columns
            from pipeline.data.raw.rows import split_cells

            path = os.path.join(self._folder, name)
            with open(path, "rb") as file:
                line = file.readline(MOST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
            self._names[name] = tuple(split_cells(self._layout, line.decode(errors="replace").rstrip("\r\n")))
            check_columns(self._layout, self._names[name], path)
        return self._names[name]

    def reread(self, wanted: Range) -> Lines:
        path = os.path.join(self._folder, wanted.partition)
        try:
            with open(path, "rb") as file:
                file.seek(wanted.begin)
                content = file.read(wanted.end - wanted.begin)
        except FileNotFoundError:
            raise DataError(
                f"{path} is gone, and bytes {wanted.begin:,} to {wanted.end:,} of it are to be read once more"
            ) from None
        if len(content) < wanted.end - wanted.begin:
            raise DataError(f"{path} is shorter than it was: {wanted.end:,} bytes were read of it")
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        ends, at = [], wanted.begin
        for line in lines:
            at += len(line) + 1
            ends.append(at)
        return Lines(wanted.partition, wanted.begin, lines, ends, self._header_of(wanted.partition))

    def behind(self, offsets: Offsets) -> int:
        return sum(max(0, size - offsets.get(name, 0)) for name, size in self._files())

    def newest(self) -> Offsets:
        return dict(self._files())

    def close(self) -> None:
        """Nothing is open."""
