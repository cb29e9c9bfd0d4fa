"""Compress a link's shard files without loss: per block, the bytes of 32-bit numbers in planes, each by zstd if it shrinks.

    <line with the file's owner> <block 0> <block 1> ... <index, as JSON> <length of the index, 8 bytes>

A block is BLOCK_BYTES of the uncompressed file after that line. The index has the four lengths of each
block's planes. Readers see the uncompressed file at the offsets that .metadata gives, and unpack only
the blocks that they read. Signs, exponents and leading bits of neighbouring numbers are similar, and
their other bits are not. Planes separate them.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from pipeline.checkpoint.owners import HEADER_BYTES
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.seekable import PositionedReader

BLOCK_BYTES = 1 << 20
PLANES = 4  # bytes per number
LENGTH_BYTES = 8
LEVEL = 3
CACHED_BLOCKS = 4


class _Writer(Protocol):
    def write(self, data: Any, /) -> int | None: ...


class PackedWriter(io.RawIOBase):
    """Packs what is written after the first line, which the file already has. finish() writes the
    index."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._waiting = bytearray()
        self._position = HEADER_BYTES
        self._blocks: list[tuple[int, list[int]]] = []  # bytes, and the stored bytes of each plane
        self._codec = pa.Codec("zstd", LEVEL)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._waiting += view
        self._position += len(view)
        while len(self._waiting) >= BLOCK_BYTES:
            self._pack(BLOCK_BYTES)
        return len(view)

    def tell(self) -> int:
        """Return the position in the uncompressed file."""
        return self._position

    def _pack(self, size: int) -> None:
        block = np.frombuffer(bytes(self._waiting[:size]), np.uint8)
        del self._waiting[:size]
        lengths = []
        for first in range(PLANES):
            plane = block[first::PLANES].tobytes()
            packed: bytes = self._codec.compress(plane, asbytes=True) if plane else plane
            kept = packed if len(packed) < len(plane) else plane
            self._writer.write(kept)
            lengths.append(len(kept))
        self._blocks.append((size, lengths))

    def finish(self) -> None:
        if self._waiting:
            self._pack(len(self._waiting))
        index = json.dumps(self._blocks, separators=(",", ":")).encode()
        self._writer.write(index + len(index).to_bytes(LENGTH_BYTES, "little"))


class PackedFile(PositionedReader):
    """The uncompressed content of `file`, which has `size_bytes` bytes and is verified as it is
    read. Raises DamagedError."""

    def __init__(self, file: io.RawIOBase, size_bytes: int, path: str) -> None:
        self._file, self._path, self._position = file, path, 0
        self._codec = pa.Codec("zstd")
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()
        file.seek(max(0, size_bytes - LENGTH_BYTES))
        length = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        if not 0 < length <= size_bytes - HEADER_BYTES - LENGTH_BYTES:
            raise DamagedError(f"{path} does not end with the index of a packed file")
        file.seek(size_bytes - LENGTH_BYTES - length)
        try:
            blocks = [(int(size), [int(each) for each in own]) for size, own in json.loads(self._exactly(length))]
        except (ValueError, TypeError) as error:
            raise DamagedError(f"{path}: its index cannot be read ({repr(error)[:200]})") from None
        if any(len(own) != PLANES or not 0 < size <= BLOCK_BYTES for size, own in blocks) or any(
            size != BLOCK_BYTES for size, _ in blocks[:-1]
        ):
            raise DamagedError(f"{path}: its index is not that of a packed file")
        ends = np.cumsum([HEADER_BYTES, *(sum(own) for _, own in blocks)]).tolist()
        if ends[-1] != size_bytes - LENGTH_BYTES - length:
            raise DamagedError(f"{path}: its index does not fit its {size_bytes} bytes")
        self._blocks = [(begin, size, own) for begin, (size, own) in zip(ends, blocks, strict=False)]
        self._size = HEADER_BYTES + sum(size for size, _ in blocks)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._position)]
        done = 0
        while done < len(view):
            if self._position < HEADER_BYTES:
                self._file.seek(self._position)
                part = memoryview(self._exactly(min(HEADER_BYTES - self._position, len(view) - done)))
            else:
                index, within = divmod(self._position - HEADER_BYTES, BLOCK_BYTES)
                part = memoryview(self._block(index))[within : within + len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return done

    def _block(self, index: int) -> bytes:
        if index not in self._unpacked:
            self._unpacked[index] = self._unpack(*self._blocks[index])
            while len(self._unpacked) > CACHED_BLOCKS:
                self._unpacked.popitem(last=False)
        self._unpacked.move_to_end(index)
        return self._unpacked[index]

    def _unpack(self, begin: int, size: int, lengths: list[int]) -> bytes:
        block = np.empty(size, np.uint8)
        self._file.seek(begin)
        try:
            for first, length in enumerate(lengths):
                plane, kept = block[first::PLANES], self._exactly(length)
                if length != len(plane):
                    kept = self._codec.decompress(kept, decompressed_size=len(plane), asbytes=True)
                plane[:] = np.frombuffer(kept, np.uint8)
        except (OSError, ValueError, pa.ArrowException) as error:
            if isinstance(error, DamagedError):
                raise
            raise DamagedError(f"{self._path} cannot be unpacked: {error}") from None
        return block.tobytes()

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        view, done = memoryview(content), 0
        while done < count:
            read = self._file.readinto(view[done:])
            if not read:
                raise DamagedError(f"{self._path} ends {count - done} bytes too soon")
            done += read
        return bytes(content)
