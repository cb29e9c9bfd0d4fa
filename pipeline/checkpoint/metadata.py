"""Load the tensors of a step without running code that its files name. Every byte that is used was verified."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pipeline.checkpoint.archives import read_tensor, values_offset
from pipeline.checkpoint.metadata_pickle import decode_metadata
from pipeline.checkpoint.owners import HEADER_BYTES, check_metadata, check_shard
from pipeline.checkpoint.steps import METADATA, file_path, is_packed, read_manifest
from pipeline.checkpoint.stored_rows import Mask, SampledPiece
from pipeline.config.registry import from_extra
from pipeline.devices.base import in_host_memory
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.checksums import VerifiedFile, read_verified

IN_PLACE_BYTES = 1 << 20  # of a tensor; smaller ones are read whole and copied
BLOCK_BYTES = 64 << 20  # of one read for a GPU's tensor


class _VerifiedFiles(FileSystem):
    """The files of one step. Each read is verified by checksums. The owner of each file is checked once."""

    def __init__(self, path: str, manifest: dict[str, Any]) -> None:
        self._path, self._manifest = path, manifest
        self._known: set[str] = set()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        name = Path(path).name
        if mode != "rb" or name not in self._manifest["files"]:
            raise DamagedError(f"{self._path}: .metadata names the file {name!r}, the manifest does not")
        where = file_path(self._path, self._manifest, name)
        with VerifiedFile(where, self._manifest["files"][name], keep_pages=False) as file:
            if name not in self._known:
                check_shard(where, self._manifest, name, file.read(HEADER_BYTES))
                file.seek(0)
                self._known.add(name)
            if is_packed(self._manifest):
                size = int(self._manifest["files"][name]["size_bytes"])
                yield from_extra("packed_file", f"{where}, a compressed file,")(file, size, where)
            else:
                yield file


class TensorsOnlyReader(FileSystemReader):
    """Reads the step at `path`, local or remote. dcp.load raises its errors on every rank.

    Raises:
        DamagedError: a file that is opened or read differs from the manifest.
        pickle.UnpicklingError: .metadata contains more than tensors.
    """

    def __init__(self, path: str, manifest: dict[str, Any] | None = None) -> None:
        super().__init__(".")
        self.step_path, self.manifest = path, manifest or read_manifest(path)
        self.fs: FileSystem = _VerifiedFiles(path, self.manifest)
        self._metadata: Metadata | None = None
        self._stored_groups: dict[SampledPiece, Mask] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            if METADATA not in self.manifest["files"]:
                raise DamagedError(f"the manifest of {self.step_path} names no {METADATA}")
            where = file_path(self.step_path, self.manifest, METADATA)
            content = read_verified(where, self.manifest["files"][METADATA])
            try:
                metadata = decode_metadata(content)
            except pickle.UnpicklingError as error:
                raise pickle.UnpicklingError(f"{where} is refused: {error}") from None
            check_metadata(where, self.manifest, metadata)
            self._metadata = metadata
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def overlay(self, key: str, offsets: Sequence[int], values: torch.Tensor, with_sampled: bool = True) -> None:
        """Write into `values` the rows that the step leaves out, which have their initial weights.
        `values` is the stored block of tensor `key` that begins at `offsets`.
        """
        for piece in self.sampled.get(key, ()) if with_sampled else ():
            piece.overlay(self.stored_groups(piece), offsets, values)

    @cached_property
    def sampled(self) -> dict[str, list[SampledPiece]]:
        """Return the mapping key -> pieces, for the tensors of which the step leaves out rows."""
        found: dict[str, list[SampledPiece]] = {}
        try:
            for entry in self.manifest.get("sampled", ()):
                piece = SampledPiece.of(entry)
                found.setdefault(piece.key, []).append(piece)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                f"the manifest of {self.step_path} lists rows to be sampled that cannot be read: {repr(error)[:200]}"
            ) from None
        return found

    def stored_groups(self, piece: SampledPiece) -> Mask:
        """Return which groups of rows of a piece are stored. Raises DamagedError if the stored bits
        are invalid.
        """
        if piece not in self._stored_groups:
            with self.fs.create_stream(piece.file, "rb") as file:
                file.seek(piece.begin)
                content = file.read(piece.num_bytes)
            try:
                self._stored_groups[piece] = piece.unpack(content)
            except ValueError as error:
                raise DamagedError(f"{self.step_path}: the bits of rows that {piece.key} leaves out: {error}") from None
        return self._stored_groups[piece]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items in the order of the files. Each block is read once, and only one stored
        shard is in memory at a time.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset):
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self.fs.create_stream(name, "rb") as stream:
                for item in items:
                    self._read_item(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, stream: io.IOBase, item: ReadItem, planner: LoadPlanner) -> None:
        """Read one item and release its memory. DCP's own loop keeps a shard while it reads the
        next shard.
        """
        if item.type == LoadItemType.BYTE_IO:
            raise pickle.UnpicklingError(f"{item.storage_index.fqn} is asked for as a pickled value, not a tensor")
        target = planner.resolve_tensor(item).detach()
        if self._read_in_place(stream, item, target):
            planner.commit_tensor(item, target)
            return
        place, sizes = self.storage_data[item.storage_index], self._stored_sizes(item) or None
        dtype = self._entry(item).properties.dtype
        try:
            stored = read_tensor(stream, place.offset, place.length, sizes, dtype)
        except RuntimeError as error:
            raise DamagedError(f"{self.step_path}: {item.storage_index.fqn} cannot be read: {error}") from None
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        part = stored[tuple(slice(begin, begin + length) for begin, length in ends)]
        self.overlay(item.storage_index.fqn, _begins(item), part)
        if target.size() != part.size():
            raise DamagedError(
                f"{self.step_path}: {item.storage_index.fqn} has {list(part.size())}, not {list(target.size())}"
            )
        target.copy_(part)
        planner.commit_tensor(item, target)

    def _read_in_place(self, stream: io.IOBase, item: ReadItem, target: torch.Tensor) -> bool:
        """Read complete rows directly into `target`, and return True. Return False if the item is
        not a range of complete rows. A GPU's tensor is filled in blocks, so host memory never
        holds a full table.
        """
        place, sizes = self.storage_data[item.storage_index], self._stored_sizes(item)
        is_plain = not in_host_memory(target) or (type(target) is torch.Tensor and target.is_contiguous())
        if not is_plain or target.nbytes < IN_PLACE_BYTES or tuple(target.shape) != tuple(item.lengths):
            return False
        if not sizes or tuple(item.lengths[1:]) != sizes[1:]:
            return False
        try:
            begin = values_offset(stream, place.offset, place.length, sizes, target.dtype)
        except RuntimeError:
            return False
        row_bytes = target.nbytes // len(target)
        stream.seek(begin + item.storage_offsets[0] * row_bytes)
        first_row, *others = _begins(item)
        rows_at_once = len(target) if in_host_memory(target) else max(1, BLOCK_BYTES // row_bytes)
        for first in range(0, len(target), rows_at_once):
            own = target[first : first + rows_at_once]
            rows = own if in_host_memory(own) else torch.empty(own.shape, dtype=own.dtype)
            if not _fill(rows, stream):
                raise DamagedError(f"{self.step_path}: {place.relative_path} ends within {item.storage_index.fqn}")
            self.overlay(item.storage_index.fqn, [first_row + first, *others], rows)
            if rows is not own:
                own.copy_(rows)
        return True

    def _stored_sizes(self, item: ReadItem) -> tuple[int, ...]:
        """Return the shape of the stored piece that the item reads from, or () if .metadata does not state it."""
        offset = tuple(item.storage_index.offset or ())
        return next((tuple(one.sizes) for one in self._entry(item).chunks if tuple(one.offsets) == offset), ())

    def _entry(self, item: ReadItem) -> TensorStorageMetadata:
        entry = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry


def _fill(rows: torch.Tensor, stream: io.IOBase) -> bool:
    """Read the values of `rows`, a contiguous tensor on the CPU. Return False if the stream ends
    too early.
    """
    values = memoryview(rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while len(values):
        count = stream.readinto(values)  # type: ignore[attr-defined]
        if not count:
            return False
        values = values[count:]
    return True


def _begins(item: ReadItem) -> list[int]:
    """Return the offsets, in the complete tensor, of the block to read."""
    first = item.storage_index.offset or (0,) * len(item.storage_offsets)
    return [a + b for a, b in zip(first, item.storage_offsets, strict=True)]
