"""Turn Parquet shards into this rank's Batches: the same global batches at any world size, from any step on.

Streams (data.streams) say which rows, row groups become Blocks (data.decode) on decode threads, one ahead of need,
and a prefetch thread puts the batches together in large numpy copies, so that it seldom holds the GIL.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.batch import Batch, keyed_jagged_tensor
from pipeline.data.config import ReaderConfig, check_batch_geometry
from pipeline.data.dataset import Dataset, check_multi_hot, check_split
from pipeline.data.decode import Block, Shards
from pipeline.data.multi_hot import draw_bags
from pipeline.data.prefetch import Prefetcher
from pipeline.data.streams import EpochOrder, Segment, num_steps


class ShardReader:
    """Batches of one split for one rank. Local: no collective; every rank makes its own with equal arguments.

    drop_last=True: equal steps on every rank; fewer than global_batch_size rows (other ones each epoch when
    shuffled) are left out of an epoch.
    drop_last=False: every row exactly once; where a stream has run dry, rows of weight 0 without ids fill up,
    so that ranks keep equal steps and equal batch sizes.
    multi_hot: feature -> ids a sample, drawn from the one-hot id (data.multi_hot).
    pin_memory: hand out batches in pinned memory, copied on the prefetch thread.

    Held in memory: two row groups for each of the rank's streams, and config.prefetch_batches batches.
    """

    def __init__(
        self,
        folder: str,
        dataset: Dataset,
        split: str,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        config: ReaderConfig,
        seed: int,
        multi_hot: dict[str, int] | None = None,
        drop_last: bool = True,
        pin_memory: bool = False,
    ) -> None:
        check_batch_geometry(global_batch_size, config.num_streams, world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie within [0, {world_size - 1}]")
        check_split(dataset, split, global_batch_size if drop_last else 1)
        check_multi_hot(dataset, multi_hot or {})
        self.config = config
        self.drop_last = drop_last
        self.global_batch_size = global_batch_size
        self.batch_size = global_batch_size // world_size
        self.num_rows = dataset.splits[split].num_rows
        self.steps_per_epoch = num_steps(self.num_rows, global_batch_size, config.num_streams, drop_last)
        self.stall_seconds = 0.0  # time that next() has waited, the first batch of each epoch included
        self._seed = seed
        self._pin_memory = pin_memory
        self._identity = [dataset.fingerprint(), split, seed, config.num_streams, config.shuffle, global_batch_size]
        streams = config.num_streams // world_size
        self._streams = range(rank * streams, (rank + 1) * streams)
        self._shards = Shards(folder, dataset, dataset.splits[split])
        self._assembler = BatchAssembler(dataset, multi_hot or {}, self.batch_size)

    @property
    def order_fingerprint(self) -> str:
        """Equal only where (epoch, step) means the same rows: a checkpoint's position is worth nothing elsewhere."""
        return hashlib.sha256(json.dumps(self._identity).encode()).hexdigest()

    def batches(self, epoch: int, start_step: int = 0) -> Prefetcher[Batch]:
        """Batches start_step .. steps_per_epoch - 1 of an epoch; close() the iterator to end its threads early."""
        if epoch < 0 or not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(
                f"epoch={epoch}, start_step={start_step}: epochs count from 0, and an epoch has "
                f"{self.steps_per_epoch} steps; was the checkpoint made with other data or another batch size?"
            )
        return Prefetcher(
            self._read(epoch, start_step), self.config.prefetch_batches, f"reader-epoch-{epoch}", self._add_stall
        )

    def _add_stall(self, seconds: float) -> None:
        self.stall_seconds += seconds

    def _read(self, epoch: int, start_step: int) -> Generator[Batch, None, None]:
        shuffled = self.config.shuffle == "row_groups"
        order = EpochOrder(self._shards.row_group_sizes, self.config.num_streams, self._seed, epoch, shuffled)
        rows_of_a_stream = self.global_batch_size // self.config.num_streams
        with ExitStack() as stack:
            pool = ThreadPoolExecutor(self.config.decode_threads, thread_name_prefix="reader-decode")
            stack.callback(pool.shutdown, cancel_futures=True)

            def decode(segment: Segment) -> Future[Block]:
                return pool.submit(self._shards.decode, segment, self._seed, epoch, shuffled)

            streams = [
                BlockStream(order.segments(stream, start_step * rows_of_a_stream), decode) for stream in self._streams
            ]
            for _ in range(start_step, self.steps_per_epoch):
                pieces = [
                    piece
                    for i, stream in enumerate(streams)
                    for piece in stream.take(rows_of_a_stream, i * rows_of_a_stream)
                ]
                batch = self._assembler.assemble(pieces)
                yield batch.pin_memory() if self._pin_memory else batch


class Piece(NamedTuple):
    """Rows [start, stop) of a block, which become rows [place, place + stop - start) of the batch."""

    block: Block
    start: int
    stop: int
    place: int


class BlockStream:
    """The rows of one stream; the block after the current one is always being decoded."""

    def __init__(self, segments: Iterator[Segment], decode: Callable[[Segment], Future[Block]]) -> None:
        self._segments = segments
        self._decode = decode
        self._next: Future[Block] | None = None
        self._block: Block | None = None
        self._used = 0
        self._read_ahead()

    def take(self, num_rows: int, place: int) -> Iterator[Piece]:
        """The next `num_rows` rows, to lie from `place` on in the batch; fewer at the end of the stream."""
        while num_rows:
            if self._block is None or self._used == len(self._block.labels):
                if self._next is None:
                    return
                self._block, self._used = self._next.result(), 0
                self._read_ahead()
            count = min(num_rows, len(self._block.labels) - self._used)
            yield Piece(self._block, self._used, self._used + count, place)
            self._used, place, num_rows = self._used + count, place + count, num_rows - count

    def _read_ahead(self) -> None:
        segment = next(self._segments, None)
        self._next = self._decode(segment) if segment else None


@dataclass(frozen=True)
class _Column:
    """Where a feature's ids come from: row `index` of the one-hot ids, or of the bags; `size` ids drawn for each."""

    name: str
    cardinality: int
    multi_hot: bool
    index: int
    size: int


class BatchAssembler:
    """Puts pieces of blocks together into a Batch; rows that no piece covers are padding."""

    def __init__(self, dataset: Dataset, multi_hot: dict[str, int], batch_size: int) -> None:
        self.batch_size = batch_size
        self.num_dense = len(dataset.dense_features)
        self.keys = dataset.sparse_feature_names
        counts = {True: 0, False: 0}
        self._columns: list[_Column] = []
        for feature in dataset.sparse_features:
            index, size = counts[feature.multi_hot], multi_hot.get(feature.name, 1)
            self._columns.append(_Column(feature.name, feature.cardinality, feature.multi_hot, index, size))
            counts[feature.multi_hot] += 1
        self._num_one_hot = counts[False]
        self._all_one_hot = not counts[True] and all(column.size == 1 for column in self._columns)

    def assemble(self, pieces: list[Piece]) -> Batch:
        num_rows = sum(piece.stop - piece.start for piece in pieces)
        dense = np.zeros((self.batch_size, self.num_dense), np.float32)
        labels = np.zeros(self.batch_size, np.float32)
        weights = np.zeros(self.batch_size, np.float32)
        ids = np.empty((self._num_one_hot, num_rows), np.int64)
        begin = 0
        for block, start, stop, place in pieces:
            end = place + stop - start
            dense[place:end] = block.dense[start:stop]
            labels[place:end] = block.labels[start:stop]
            weights[place:end] = 1.0
            ids[:, begin : begin + stop - start] = block.one_hot[:, start:stop]
            begin += stop - start
        values, lengths, length_per_key = self._sparse(pieces, ids, weights > 0)
        sparse = keyed_jagged_tensor(
            self.keys, torch.from_numpy(values), torch.from_numpy(lengths), self.batch_size, length_per_key
        )
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels), torch.from_numpy(weights))

    def _sparse(
        self, pieces: list[Piece], ids: NDArray[np.int64], present: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], list[int]]:
        """values [total], lengths [num_features * batch], ids a feature; `present` marks the rows that are no padding."""
        lengths = np.empty((len(self._columns), self.batch_size), np.int32)
        if self._all_one_hot:
            lengths[:] = present
            return ids.reshape(-1), lengths.reshape(-1), [ids.shape[1]] * len(self._columns)
        values: list[NDArray[np.int64]] = []
        for i, column in enumerate(self._columns):
            if column.multi_hot:
                values.append(_gather_bags(pieces, column.index, lengths[i]))
            else:
                bags = draw_bags(ids[column.index], column.name, column.cardinality, column.size)
                values.append(bags.reshape(-1))
                lengths[i] = present * np.int32(column.size)
        return np.concatenate(values), lengths.reshape(-1), [len(column) for column in values]


def _gather_bags(pieces: list[Piece], index: int, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """The ids of a list-valued feature; fills its [batch] lengths."""
    lengths[:] = 0
    values: list[NDArray[np.integer]] = [np.empty(0, np.int64)]
    for block, start, stop, place in pieces:
        bags = block.bags[index]
        lengths[place : place + stop - start] = np.diff(bags.offsets[start : stop + 1])
        values.append(bags.ids[bags.offsets[start] : bags.offsets[stop]])
    return np.concatenate(values, dtype=np.int64)
