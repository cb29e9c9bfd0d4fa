"""Compute CRC-32s of blocks while files are written, and verify them while files are read.

A block of 8 MiB has a CRC of its own, so a rank that reads a part of a file verifies that part and no more, and the
bytes that are verified are the bytes that are used. CRC-32 finds every flip of one, two or 32 neighbouring bits in a
block; docs/adr/0009 says why not SHA-256.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import OrderedDict
from typing import IO, Any

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.seekable import PositionedReader

BLOCK_BYTES = 8 << 20
PIECE_BYTES = 1 << 20  # still in the processor's cache between checksum and write
CACHED_BLOCKS = 2  # torch.load reads the end of an item, then its beginning

FileEntry = dict[str, Any]  # what a manifest says of a file: size_bytes, block_bytes, crc32 (a list of 8 hex digits)


class ChecksummedWriter(io.RawIOBase):
    """Writes a new local file and keeps the checksums of what was handed to it; close() makes the bytes durable.

    `failure` is the first OSError: torch.save replaces it by an error of its own.
    """

    def __init__(self, path: str) -> None:
        self.path, self.size_bytes = path, 0
        self.failure: OSError | None = None
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # closed by close()
        self._full: list[str] = []
        self._crc = self._filled = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any) -> int:
        """Raises OSError that names the file, the bytes wanted and the bytes written so far."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self._add(piece)
            while len(piece):
                try:
                    written = self._file.write(piece)
                except OSError as error:
                    self.failure = self.failure or OSError(
                        error.errno, f"{error.strerror} after {self.size_bytes:,} bytes, with {len(view):,} to write", self.path
                    )  # fmt: skip
                    raise self.failure from None
                self.size_bytes += written
                piece = piece[written:]
        return len(view)

    def _add(self, piece: memoryview) -> None:
        while len(piece):
            part = piece[: BLOCK_BYTES - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            piece = piece[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._full.append(f"{self._crc:08x}")
                self._crc = self._filled = 0

    def entry(self) -> FileEntry:
        rest = [f"{self._crc:08x}"] if self._filled else []
        return {"size_bytes": self.size_bytes, "block_bytes": BLOCK_BYTES, "crc32": [*self._full, *rest]}

    def close(self) -> None:
        if not self.closed:
            try:
                if self.failure is None:
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()
                super().close()


class VerifiedFile(PositionedReader):
    """Reads a file, local or remote, as its entry describes it. Raises DamagedError instead of handing out other bytes."""

    def __init__(self, path: str, entry: FileEntry) -> None:
        self.path, self._entry, self._position = path, entry, 0
        self._size, self._block_bytes = int(entry["size_bytes"]), int(entry["block_bytes"])
        self._blocks: OrderedDict[int, bytearray] = OrderedDict()
        if len(entry["crc32"]) != -(-self._size // self._block_bytes):
            raise DamagedError(f"{path}: its manifest gives {len(entry['crc32'])} checksums for {self._size} bytes")
        if problem := size_problem(path, entry):
            raise DamagedError(problem)
        self._file: IO[bytes] = storage.open_raw(path)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._position)]
        done = 0
        while done < len(view):
            index, within = divmod(self._position, self._block_bytes)
            whole = (len(view) - done) // self._block_bytes
            if within == 0 and whole and index not in self._blocks:
                count = self._read_blocks(index, view[done : done + whole * self._block_bytes])
            else:
                part = memoryview(self._block(index))[within : within + len(view) - done]
                view[done : done + len(part)] = part
                count = len(part)
            done += count
            self._position += count
        return done

    def _block(self, index: int) -> bytearray:
        if index in self._blocks:
            self._blocks.move_to_end(index)
            return self._blocks[index]
        begin = index * self._block_bytes
        block = bytearray(min(self._block_bytes, self._size - begin))
        self._read_blocks(index, memoryview(block))
        self._blocks[index] = block
        while len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return block

    def _read_blocks(self, first: int, target: memoryview) -> int:
        """Fill `target`, which begins with block `first` and ends with a block; verified before it is used."""
        self._file.seek(first * self._block_bytes)
        for offset in range(0, len(target), self._block_bytes):
            block = target[offset : offset + self._block_bytes]
            filled = 0
            while filled < len(block):
                count = self._file.readinto(block[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise DamagedError(f"{self.path} ends before byte {self._size}")
                filled += count
            index = first + offset // self._block_bytes
            if f"{zlib.crc32(block):08x}" != self._entry["crc32"][index]:
                begin = index * self._block_bytes
                raise DamagedError(f"{self.path} does not match its checksum in bytes {begin} to {begin + len(block)}")
        return len(target)

    def close(self) -> None:
        if not self.closed:
            if hasattr(self, "_file"):
                self._file.close()
            self._blocks.clear()
            super().close()


def checksums_of(path: str) -> FileEntry:
    """The entry of a local file that is there already."""
    with open(path, "rb") as file:
        blocks = [f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
        return {"size_bytes": file.tell(), "block_bytes": BLOCK_BYTES, "crc32": blocks}


def copy_file(source: str, target: str) -> FileEntry:
    """Copy a local file to a new, durable one, and return the entry of the bytes that were copied."""
    with open(source, "rb") as file, ChecksummedWriter(target) as writer:
        while piece := file.read(BLOCK_BYTES):
            writer.write(piece)
    return writer.entry()


def read_verified(path: str, entry: FileEntry) -> bytes:
    """The whole of a small file. Raises DamagedError."""
    with VerifiedFile(path, entry) as file:
        return file.read()


def size_problem(path: str, entry: FileEntry) -> str:
    """Empty for a file, local or remote, of the size that its entry gives, else what is wrong."""
    if not storage.is_file(path):
        return f"{path} is missing"
    found = storage.size_bytes(path)
    return "" if found == entry["size_bytes"] else f"{path} has {found} bytes, its manifest says {entry['size_bytes']}"


def damage(path: str, entry: FileEntry) -> str:
    """Empty for a file of the size and checksums that its entry gives, else what is wrong. Reads all of it."""
    try:
        with VerifiedFile(path, entry) as file:
            buffer = bytearray(BLOCK_BYTES)
            while file.readinto(buffer):
                pass
    except (DamagedError, OSError, KeyError, TypeError, ValueError) as error:
        return str(error) or repr(error)
    return ""
