"""Read parts of a committed step's tensors: any rows and columns, without a process group and
without full shards in memory.

torch.distributed.checkpoint loads a complete stored shard to copy a few of its rows. Its files are
uncompressed archives of torch.save, so the rows of a shard are contiguous at an offset in the
archive.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from pipeline.checkpoint.archives import values_offset
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.stored_rows import FirstWeights, Mask
from pipeline.runtime.errors import CheckpointError

BLOCK_BYTES = 8 << 20  # size of one read


@dataclass(frozen=True)
class StoredChunk:
    """One stored piece of a tensor: its offsets in the complete tensor, its shape, and its index."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    index: MetadataIndex


class StepTensors:
    """The tensors of the step folder `path`, by their keys in the checkpoint. chains.open_tensors
    opens any step. Raises CheckpointError if .metadata is missing, damaged, or contains more than
    tensors."""

    def __init__(self, path: str, reader: TensorsOnlyReader | None = None) -> None:
        self.path = path
        self._reader = reader or TensorsOnlyReader(path)
        try:
            metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, OSError) as error:
            raise CheckpointError(f"{path}/.metadata cannot be used: {error}") from None
        self.entries: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata  # type: ignore[assignment]
        self._storage = metadata.storage_data
        self._data_offsets: dict[MetadataIndex, int] = {}
        self._kept_open: tuple[ExitStack, dict[str, Any]] | None = None

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.entries[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.entries[key].properties.dtype

    def chunks(self, key: str) -> list[StoredChunk]:
        """Return the pieces of tensor `key` that are not empty, ordered by their offsets."""
        found = [
            StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), MetadataIndex(key, chunk.offsets))
            for chunk in self.entries[key].chunks
        ]
        return sorted((chunk for chunk in found if 0 not in chunk.sizes), key=lambda chunk: chunk.offsets)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep files open in this context, and cache the last verified blocks so that they are not read again."""
        with ExitStack() as stack:
            self._kept_open = stack, {}
            try:
                yield
            finally:
                self._kept_open = None

    def read(
        self, key: str, offsets: Sequence[int], sizes: Sequence[int], *, with_sampled: bool = True
    ) -> torch.Tensor:
        """Return the block of tensor `key` that begins at `offsets` and has the shape `sizes`.
        with_sampled=False: rows that the step leaves out are zeros. Raises CheckpointError if a
        part of the block is not stored, or cannot be read.
        """
        result = torch.empty(tuple(sizes), dtype=self.dtype(key))
        covered = 0
        for chunk in self.chunks(key):
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
            if any(begin >= end for begin, end in zip(low, high, strict=True)):
                continue
            into = result[tuple(slice(b - a, e - a) for a, b, e in zip(offsets, low, high, strict=True))]
            within = [begin - first for begin, first in zip(low, chunk.offsets, strict=True)]
            self._read_chunk(chunk, within, into)
            covered += into.numel()
        if covered != result.numel():
            raise CheckpointError(f"{self.path} holds {covered} of the {result.numel()} values asked of {key}")
        try:
            self._reader.overlay(key, offsets, result, with_sampled)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {key} cannot be read: {error}") from None
        return result

    def place_of(self, chunk: StoredChunk) -> tuple[str, int]:
        """Return the file of a chunk in the step's folder, and the offset of its values in the uncompressed file."""
        with self._open(chunk) as (_, begin):
            return str(self._storage[chunk.index].relative_path), begin

    def first_weights(self, key: str) -> FirstWeights | None:
        """Return the initial weights, starting at the tensor's row 0 and column 0. None if the step
        stores all rows.
        """
        pieces = self._reader.sampled.get(key, [])
        found = {piece.whole() for piece in pieces}
        return found.pop() if len(found) == 1 else None

    def held_rows(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Mask:
        """Return a bool array [sizes[0]] that is true for each row that the step stores.

        The block of rows begins at `offsets`.
        """
        held, columns = np.zeros(sizes[0], np.bool_), np.zeros(sizes[0], np.int64)
        for piece in self._reader.sampled.get(key, ()):
            low = max(offsets[0], piece.offsets[0])
            high = min(offsets[0] + sizes[0], piece.offsets[0] + piece.sizes[0])
            width = min(offsets[1] + sizes[1], piece.offsets[1] + piece.sizes[1]) - max(offsets[1], piece.offsets[1])
            if low < high and width > 0:
                rows = slice(low - offsets[0], high - offsets[0])
                held[rows] |= piece.held(self._reader.stored_groups(piece), low, high - low)
                columns[rows] += width
        return held | (columns < sizes[1])

    def row_blocks(self, key: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows) of rows begin..end in blocks of about BLOCK_BYTES, ascending."""
        shape = self.shape(key)
        end = shape[0] if end is None else min(end, shape[0])
        row_bytes = max(1, self.dtype(key).itemsize * int(torch.Size(shape[1:]).numel()))
        step = max(1, BLOCK_BYTES // row_bytes)
        for first in range(begin, end, step):
            count = min(step, end - first)
            yield first, self.read(key, [first, *[0] * (len(shape) - 1)], [count, *shape[1:]])

    def _read_chunk(self, chunk: StoredChunk, within: list[int], into: torch.Tensor) -> None:
        """Fill `into` with the block of the same shape that begins at `within` in the chunk."""
        try:
            with self._open(chunk) as (file, begin):
                if into.dim() == 0:
                    into.copy_(_read_values(file, begin, 1, into.dtype).reshape(()))
                    return
                width = int(torch.Size(chunk.sizes[1:]).numel())
                rows_at_once = max(1, BLOCK_BYTES // max(1, width * into.element_size()))
                columns = tuple(
                    slice(first, first + size) for first, size in zip(within[1:], into.shape[1:], strict=True)
                )
                for done in range(0, len(into), rows_at_once):
                    count = min(rows_at_once, len(into) - done)
                    offset = begin + (within[0] + done) * width * into.element_size()
                    rows = _read_values(file, offset, count * width, into.dtype).view(count, *chunk.sizes[1:])
                    into[done : done + count] = rows[(slice(None), *columns)]
        except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}: {chunk.index.fqn} cannot be read: {error}") from None

    @contextmanager
    def _open(self, chunk: StoredChunk) -> Iterator[tuple[Any, int]]:
        """Yield the file of a chunk, and the offset of the chunk's values in it."""
        info = self._storage[chunk.index]
        fs = self._reader.fs  # use the reader's file system, because it may verify what is read
        with self._stream(str(fs.concat_path(self._reader.path, info.relative_path))) as file:
            if chunk.index not in self._data_offsets:
                dtype = self.entries[chunk.index.fqn].properties.dtype
                self._data_offsets[chunk.index] = values_offset(file, info.offset, info.length, chunk.sizes, dtype)
            yield file, self._data_offsets[chunk.index]

    @contextmanager
    def _stream(self, path: str) -> Iterator[Any]:
        if self._kept_open is None:
            with self._reader.fs.create_stream(path, "rb") as file:
                yield file
            return
        stack, files = self._kept_open
        if path not in files:
            files[path] = stack.enter_context(self._reader.fs.create_stream(path, "rb"))
        yield files[path]


def _read_values(file: Any, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Read values. Raises EOFError if the file ends too early."""
    buffer = bytearray(count * dtype.itemsize)
    file.seek(offset)
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        count_read = file.readinto(view[filled:])
        if not count_read:
            raise EOFError(f"the file ends {len(buffer) - filled} bytes too soon")
        filled += count_read
    return torch.frombuffer(buffer, dtype=dtype) if count else torch.empty(0, dtype=dtype)
