"""Write a sharded state in the format of torch.distributed.checkpoint: one file per rank, and one
.metadata.

DCP's planner decides which rank writes which shard (replicated tensors once). It plans once, and
again only if the state has changed its shape. Writing needs no collective, so it can run in a
thread during training.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from pipeline import devices
from pipeline.checkpoint.owners import Owner, header_of_shard, shard_name, storage_meta
from pipeline.checkpoint.steps import METADATA
from pipeline.checkpoint.stored_rows import SampledPiece, StoredRows, pack, rows_a_group
from pipeline.config.registry import from_extra
from pipeline.devices.base import in_host_memory
from pipeline.runtime.errors import CheckpointError, UserError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import ChecksummedWriter, FileEntry

BLOCK_BYTES = 256 << 20
PINNED_BYTES = 2 * BLOCK_BYTES  # maximum of one save


def host_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the rows of a GPU's tensor in order, in pinned memory. A block is valid until the next
    block is requested. While the caller uses a block, the next block is copied.
    """
    rows = tensor.detach() if tensor.dim() else tensor.detach()[None]
    rows_at_once = max(1, BLOCK_BYTES // max(1, rows[:1].nbytes))
    parts = rows.split(rows_at_once) if len(rows) else ()
    pinned = [
        torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts[:2]
    ]  # torch keeps pinned memory for the next save
    coming: list[tuple[torch.Tensor, torch.Event]] = []
    for number, part in enumerate(parts):
        block = pinned[number % 2][: len(part)]
        block.copy_(part, non_blocking=True)
        coming.append((block, devices.current().record_event()))
        if len(coming) == 2:
            yield _arrived(*coming.pop(0))
    for block, copied in coming:
        yield _arrived(block, copied)


def _arrived(block: torch.Tensor, copied: torch.Event) -> torch.Tensor:
    copied.synchronize()
    return block


@dataclass
class HostCopy:
    """Copies a state to host memory for a save that runs during training. The next save uses the
    same memory again.
    """

    buffers: list[torch.Tensor] = field(default_factory=list)

    def fill(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of `tensors`. They overwrite the copies of the previous call."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if shapes != [(buffer.shape, buffer.dtype) for buffer in self.buffers]:
            self.buffers = []  # freed before as much is allocated again
            self.buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if in_host_memory(tensor):
                buffer.copy_(tensor)
                continue
            rows, done = buffer if buffer.dim() else buffer[None], 0
            for block in host_blocks(tensor):
                rows[done : done + len(block)] = block
                done += len(block)
        return self.buffers


MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; Python names it from 3.12 on
Tensors = list[torch.Tensor]  # in the order of ShardPlan.items
Places = dict[MetadataIndex, _StorageInfo]
Sampled = list[dict[str, Any]]  # entries of first_weights.SampledPiece
_Out = ChecksummedWriter | io.RawIOBase
MIN_BLOCKS_BYTES = 1 << 20  # a smaller tensor is copied from a GPU in one piece


@dataclass
class ShardPlan:
    """The items that this rank writes. Only rank 0 has `metadata`."""

    items: list[WriteItem]
    metadata: Metadata | None


class ShardPlanner:
    """Plans saves. Collective over `group`, which may be a separate, slow group."""

    def __init__(self, context: DistributedContext, group: dist.ProcessGroup) -> None:
        self._context, self._group = context, group
        self._local: SavePlan | None = None
        self._plan: ShardPlan | None = None
        self._planner = DefaultSavePlanner()

    def plan(self, state: dict[str, Any]) -> ShardPlan:
        """Plan a state. Raises CheckpointError if the state does not cover its tensors, or contains
        values that are not tensors.
        """
        self._planner.set_up_planner(state, StorageMeta(), self._context.is_main)
        local = self._planner.create_local_plan()
        changed = torch.tensor([self._local is None or local.items != self._local.items], dtype=torch.int32)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if self._plan is None or changed.item():
            self._local, self._plan = local, self._agree(local)
        return self._plan

    def tensors(self) -> Tensors:
        """Return the tensors of the last planned state, in the order of its items. They are views."""
        assert self._plan is not None
        return [cast(torch.Tensor, self._planner.resolve_data(item)).detach() for item in self._plan.items]

    def _agree(self, local: SavePlan) -> ShardPlan:
        world_size = self._context.world_size
        answers: list[Any] = []
        plans: list[Any] | None = [None] * world_size if self._context.is_main else None
        dist.gather_object(local, plans, dst=0, group=self._group)
        if plans is not None:
            try:
                made, metadata = self._planner.create_global_plan(plans)
                for item in (item for plan in made for item in plan.items):
                    _check_is_tensor(item)
                answers = [ShardPlan(plan.items, None) for plan in made]
                answers[0].metadata = metadata
            except (ValueError, AssertionError) as error:
                answers = [f"this state cannot be saved: {error}"] * world_size
        answer: list[Any] = [None]
        dist.scatter_object_list(answer, answers or None, src=0, group=self._group)
        if isinstance(answer[0], str):
            raise CheckpointError(answer[0])
        return cast(ShardPlan, answer[0])


def _check_is_tensor(item: WriteItem) -> None:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is no tensor, and pickled values are not loaded again")


def write_shards(
    folder: str, owner: Owner, items: list[WriteItem], tensors: Tensors, read_back: bool, is_packed: bool = False
) -> tuple[dict[str, FileEntry], Places, Sampled]:
    """Write this rank's file into a local folder. Return its entry by name, the place of each
    shard, and the left-out rows. is_packed: the file is compressed; places are offsets in the
    uncompressed content.

    Raises:
        OSError: the file cannot be written; the message has the path and the bytes.
        DamagedError: with `read_back`, reading it back gives other bytes.
    """
    if not items:
        return {}, {}, []
    name, places = shard_name(owner.rank), Places()
    left_out: list[tuple[SampledPiece, bytes]] = []
    writer = ChecksummedWriter(storage.join(folder, name), read_back)
    with writer, _without_zip_checksums():
        writer.write(header_of_shard(owner))
        packed = from_extra("packed_writer", "checkpoint.compress_links")(writer) if is_packed else None
        out: _Out = writer if packed is None else packed
        for item, tensor in zip(items, tensors, strict=True):
            begin = out.tell()
            try:
                if isinstance(tensor, StoredRows):
                    assert out is writer, "a link holds rows, no store of them"
                    held = _save_stored(tensor, writer)
                    if tensor.column == 0 and not held.all():
                        left_out.append((_sampled_piece(item, tensor, name), pack(held)))
                elif not in_host_memory(tensor) and tensor.nbytes >= MIN_BLOCKS_BYTES:
                    _save_from_gpu(tensor, out)
                else:
                    torch.save(_exact(tensor), out)  # type: ignore[arg-type]
            except RuntimeError:
                if writer.failure is not None:
                    raise writer.failure from None
                raise
            places[item.index] = _StorageInfo(name, begin, out.tell() - begin)
        if packed is not None:
            packed.finish()
        sampled = []
        for piece, bits in left_out:
            sampled.append(replace(piece, begin=writer.tell(), num_bytes=len(bits)).entry())
            writer.write(bits)
    return {name: writer.entry()}, places, sampled


def _sampled_piece(item: WriteItem, rows: StoredRows, file: str) -> SampledPiece:
    assert item.index.offset is not None
    first = rows.source.first_weights()
    row, column = item.index.offset
    return SampledPiece(
        item.index.fqn, (row, column), (rows.shape[0], rows.shape[1]), rows_a_group(rows.row_bytes),
        replace(first, row=first.row + rows.first_row), file, 0, 0,
    )  # fmt: skip


def bytes_to_write(tensors: Tensors) -> int:
    """Return the bytes on a disk that supports sparse files. Of tables in a row store only changed rows count."""
    return sum(
        int(tensor.held_groups().sum()) * rows_a_group(tensor.row_bytes) * tensor.row_bytes
        if isinstance(tensor, StoredRows)
        else tensor.nbytes
        for tensor in tensors
    )


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Disable the checksums of torch's zip files, because the writer has its own, which loading
    verifies."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _ValuesWriter(io.RawIOBase):
    """Forwards what torch.save writes, but calls `write_values` when torch.save writes the values
    of an empty tensor.
    """

    def __init__(self, out: _Out, write_values: Callable[[], None], empty: torch.Tensor) -> None:
        self._out, self._write_values = out, write_values
        self._address, self._num_bytes = empty.data_ptr(), empty.nbytes
        self.is_done = not empty.nbytes
        self.failure: UserError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes == self._num_bytes and np.frombuffer(view, np.uint8).ctypes.data == self._address:
            try:
                self._write_values()
            except UserError as error:  # torch.save would replace it by another error
                self.failure = error
                raise
            self.is_done = True
            return view.nbytes
        return self._out.write(view)


def _save_by_blocks(shape: torch.Size, dtype: torch.dtype, out: _Out, write_values: Callable[[], None]) -> None:
    """Write the bytes that torch.save would write for a tensor in memory. `write_values` writes the
    values to `out`."""
    count = shape.numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    # never accessed, so it takes no memory
    addresses = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=flags)
    empty = torch.frombuffer(addresses, dtype=dtype, count=count).view(shape)
    target = _ValuesWriter(out, write_values, empty)
    try:
        torch.save(empty, target)  # type: ignore[arg-type]
    except RuntimeError:
        if target.failure is not None:
            raise RuntimeError(str(target.failure)) from None
        raise
    if not target.is_done:
        raise RuntimeError("torch.save did not write the values of a tensor as one piece")


def _save_from_gpu(tensor: torch.Tensor, out: _Out) -> None:
    def write_values() -> None:
        for block in host_blocks(tensor):
            out.write(memoryview(block.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]

    _save_by_blocks(tensor.shape, tensor.dtype, out, write_values)


def _save_stored(rows: StoredRows, writer: ChecksummedWriter) -> NDArray[np.bool_]:
    """Write the rows of a row store in blocks, as torch.save would, with a hole for each group of
    unchanged rows. Return which groups are written.
    """
    held = rows.held_groups()
    _save_by_blocks(rows.shape, rows.dtype, writer, partial(_write_rows, writer, rows, held))
    return held


def _write_rows(writer: ChecksummedWriter, rows: StoredRows, is_held: NDArray[np.bool_]) -> None:
    """Write blocks of rows. While a block is written, the next block is read."""
    group, done = rows_a_group(rows.row_bytes), 0
    held = np.flatnonzero(is_held)
    groups_a_block = max(1, rows.rows_a_block // group)
    blocks = [held[first : first + groups_a_block] for first in range(0, len(held), groups_a_block)]
    with ThreadPoolExecutor(1) as reader:
        reads = (reader.submit(_read_groups, rows, own) for own in blocks)
        coming = next(reads, None)
        for own in blocks:
            assert coming is not None
            values, coming = coming.result(), next(reads, None)
            breaks = np.flatnonzero(np.diff(own) != 1) + 1
            for begin, end in pairwise([0, *breaks.tolist(), len(own)]):
                first, last = int(own[begin]) * group, min(int(own[end - 1] + 1) * group, len(rows))
                if first > done:
                    writer.write_zeros((first - done) * rows.row_bytes)
                writer.write(values[begin * group : begin * group + last - first])
                done = last
    if done < len(rows):
        writer.write_zeros((len(rows) - done) * rows.row_bytes)


def _read_groups(rows: StoredRows, groups: NDArray[np.int64]) -> NDArray[np.float32]:
    group = rows_a_group(rows.row_bytes)
    numbers = (groups[:, None] * group + np.arange(group)).reshape(-1)
    values: NDArray[np.float32] = rows.read_rows(numbers[numbers < len(rows)]).contiguous().numpy()
    return values


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU with a storage of exactly its size: torch.save writes the complete storage."""
    tensor = tensor.cpu()
    if tensor.untyped_storage().size() == tensor.nbytes:
        return tensor
    if tensor.is_contiguous() and tensor.dtype in (
        torch.float32,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
    ):
        return torch.from_numpy(tensor.numpy())  # shares the memory
    return tensor.clone()


def write_metadata(
    folder: str, owner: Owner, metadata: Metadata, places: list[Places], read_back: bool
) -> dict[str, FileEntry]:
    """Write .metadata. Rank 0 only. Raises OSError and DamagedError as write_shards does."""
    metadata.storage_data = {index: place for part in places for index, place in part.items()}
    metadata.storage_meta = storage_meta(owner)
    if hasattr(metadata, "version"):
        metadata.version = CURRENT_DCP_VERSION
    return write_bytes(folder, METADATA, pickle.dumps(metadata), read_back)


def write_bytes(folder: str, name: str, content: bytes, read_back: bool) -> dict[str, FileEntry]:
    with ChecksummedWriter(storage.join(folder, name), read_back) as writer:
        writer.write(content)
    return {name: writer.entry()}
