"""Let DuckDB read the whole lines that local text files have at one moment, while other programs append to them."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime
from typing import Any

import duckdb
from fsspec import AbstractFileSystem

from pipeline.data.raw.source import SourceChangedError, digest_of_samples
from pipeline.runtime.storage.storage import stamp_of

SCHEME = "wholelines://"
PIECE_BYTES = 1 << 16


class GrowingFiles(AbstractFileSystem):
    """A file system of DuckDB. A file in it ends behind the last line end that it has now.

    So half of a row that a writer has not finished is left for later, and all scans of one engine
    see the same rows.
    """

    protocol = SCHEME.removesuffix("://")
    cachable = False

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._stamps = {path: stamp_of(path) for path in paths}
        self._ends = {path: end_of_lines(path, self._stamps[path].size_bytes) for path in paths}
        self._digests = {path: self._digest(path) for path in paths}

    def register(self, engine: duckdb.DuckDBPyConnection) -> list[str]:
        """Return the names of the files in `engine`, without files that have no whole line yet.

        A name is a number, because DuckDB would expand the signs of a glob in a path.
        """
        engine.register_filesystem(self)
        return [f"{SCHEME}{number}" for number, end in enumerate(self._ends.values()) if end]

    def check(self) -> None:
        """Raise SourceChangedError if a file did anything but grow since it was looked at first."""
        for path, then in self._stamps.items():
            try:
                now, what = stamp_of(path), ""
            except FileNotFoundError:
                what = "it is gone"
            else:
                if now.inode != then.inode:
                    what = f"another file has its name (inode {then.inode}, now {now.inode})"
                elif now.size_bytes < then.size_bytes:
                    what = f"it had {then.size_bytes:,} bytes and has {now.size_bytes:,}"
                elif now != then and self._digest(path) != self._digests[path]:
                    what = f"some of its first {self._ends[path]:,} bytes were written again"
            if what:
                raise SourceChangedError(
                    f"{path} was changed while its rows were read: {what}. A growing source may only "
                    "grow: write new rows to its end or to a new file, then run the same command again"
                )

    def _digest(self, path: str) -> str:
        with open(path, "rb") as file:
            return digest_of_samples(file, self._ends[path])

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(SCHEME)

    def _path(self, name: str) -> str:
        return list(self._ends)[int(self._strip_protocol(name))]

    def glob(self, path: str, **_: Any) -> list[str]:
        return [self._strip_protocol(path)]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": self._ends[self._path(path)], "type": "file"}

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self._stamps[self._path(path)].modified_ns / 1e9, UTC)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _Beginning:
        return _Beginning(self._path(path), self._ends[self._path(path)])


class _Beginning(io.RawIOBase):
    """The first `size` bytes of a file."""

    def __init__(self, path: str, size: int) -> None:
        self._file, self.size = open(path, "rb"), size  # noqa: SIM115  # closed by close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(*((offset, whence) if whence != os.SEEK_END else (self.size + offset, os.SEEK_SET)))

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.size - self._file.tell())
        return self._file.read(left if size < 0 else min(size, left))

    def close(self) -> None:
        self._file.close()
        super().close()


def end_of_lines(path: str, size: int) -> int:
    """Behind the last line end among the first `size` bytes; 0 if there is none."""
    with open(path, "rb") as file:
        end = size
        while end:
            begin = max(0, end - PIECE_BYTES)
            file.seek(begin)
            if found := file.read(end - begin).rfind(b"\n") + 1:
                return begin + found
            end = begin
    return 0
