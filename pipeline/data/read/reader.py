"""Read this rank's Batches from Parquet shards, from any step on. Global batches are the same at
any world size.

data.streams chooses the rows, data.decode makes Blocks of row groups, and data.assemble makes
Batches of Blocks. All run on a background thread (data.prefetch), or on config.decode_threads
threads.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.data import ReaderConfig, check_batch_geometry
from pipeline.config.registry import from_extra
from pipeline.data.dataset import Dataset, check_multi_hot, check_split
from pipeline.data.read.assemble import BatchAssembler, Piece
from pipeline.data.read.batch import Batch, ExtraRows
from pipeline.data.read.decode import Block, Shards
from pipeline.data.read.positions import batch_positions
from pipeline.data.read.prefetch import Prefetcher
from pipeline.data.read.quarantine import Quarantine
from pipeline.data.read.streams import EpochOrder, Segment, num_steps
from pipeline.data.read.target_columns import TargetColumns
from pipeline.data.targets import Target
from pipeline.runtime.errors import DataError

CHUNK_ROWS = 16_384  # batches are made from about this many rows at once


class ShardReader:
    """Reads batches of one split for one rank. Local: every rank builds a reader with equal arguments.

    drop_last=True: all ranks have equally many steps; an epoch leaves out fewer than
    global_batch_size rows (different rows in each epoch if shuffled). drop_last=False: every row is
    read exactly once. After the end of a stream, the batch is filled with rows of weight 0 without
    ids, so all ranks have equal steps and batch sizes. multi_hot: feature -> ids per sample,
    sampled from the one-hot id (data.read.multi_hot). targets: the labels of batches, with their
    masks; None: the data set's main label. aside: the label columns in Batch.aside. split_ids: a
    function applied to the ids of every batch (embeddings.id_splitter), on the prefetch thread.
    extra_rows: called before split_ids. pin: copies a batch to pinned memory; called
    on the threads that assemble batches. with_groups: batches have the groups of rows, if the data
    set has groups. config.shuffle=groups applies if drop_last; otherwise it is row_groups. quarantine_path: file of the rows that config.on_bad_rows=quarantine leaves out;
    None: only logged.

    Memory: one row group per stream of the rank (two with several decode threads), up to 2 *
    config.prefetch_batches batches, or more with several decode threads and small batches, and all
    of a split whose columns take at most config.keep_mib.
    """

    # Readers of training and of evaluation differ in each of these parameters, so grouping them
    # would not help.
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
        with_groups: bool = False,
        pin: Callable[[Batch], Batch] | None = None,
        quarantine_path: str | None = None,
        split_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] | None = None,
        extra_rows: ExtraRows | None = None,
        targets: Sequence[Target] | None = None,
        aside: Sequence[str] = (),
    ) -> None:
        check_batch_geometry(global_batch_size, config.num_streams, world_size)
        if not 0 <= rank < world_size:
            raise DataError(f"rank={rank} must lie within [0, {world_size - 1}]")
        check_split(dataset, split, global_batch_size if drop_last else 1)
        check_multi_hot(dataset, multi_hot or {})
        self.config = config
        self.drop_last = drop_last
        self.global_batch_size = global_batch_size
        self.batch_size = global_batch_size // world_size
        self.num_rows = dataset.splits[split].num_rows
        self.steps_per_epoch = num_steps(self.num_rows, global_batch_size, config.num_streams, drop_last)
        # time that next() has waited, including the first batch of each epoch
        self.stall_seconds = 0.0
        self._seed = seed
        self._pin, self._split_ids, self._extra_rows = pin, split_ids, extra_rows
        self.dataset_fingerprint = dataset.fingerprint()
        split_features: frozenset[str] = getattr(split_ids, "features", frozenset())
        self.plain_features = [name for name in dataset.sparse_feature_names if name not in split_features]
        self._identity = [self.dataset_fingerprint, split, seed, config.num_streams, config.shuffle, global_batch_size]
        streams = config.num_streams // world_size
        self._streams = range(rank * streams, (rank + 1) * streams)
        quarantine = Quarantine(quarantine_path) if config.on_bad_rows == "quarantine" else None
        together = config.shuffle == "groups" and drop_last
        self.has_groups = (with_groups or together) and dataset.group_column is not None
        keep_bytes = config.keep_mib << 20
        own = dataset.without_side_columns
        self._shards = Shards(folder, own, dataset.splits[split], quarantine, self.has_groups, keep_bytes, together)
        if config.verify == "checksum":
            self._shards.files.verify_checksums(range(rank, len(dataset.splits[split].files), world_size))
        columns = TargetColumns(dataset, targets, split=split, for_training=drop_last, aside=aside)
        self._assembler = BatchAssembler(
            dataset, multi_hot or {}, streams, global_batch_size // config.num_streams, columns, self.has_groups,
            from_extra("side_columns", f"the data set in {folder}")(folder, dataset) if dataset.side_tables else None,
        )  # fmt: skip

    @property
    def order_fingerprint(self) -> str:
        """Return a hash of the reading order. It is equal only if (epoch, step) means the same rows.

        The position in a checkpoint is only valid for an equal hash.
        """
        return hashlib.sha256(json.dumps(self._identity).encode()).hexdigest()

    def batches(self, epoch: int, start_step: int = 0) -> Prefetcher[Batch]:
        """Return batches start_step .. steps_per_epoch - 1 of an epoch. Call close() on the
        iterator to stop its threads early.
        """
        if epoch < 0 or not 0 <= start_step <= self.steps_per_epoch:
            raise DataError(
                f"epoch={epoch}, start_step={start_step}: epochs count from 0, and an epoch has "
                f"{self.steps_per_epoch} steps; was the checkpoint made with other data or another batch size?"
            )
        return Prefetcher(
            self._read(epoch, start_step), self.config.prefetch_batches, f"reader-epoch-{epoch}", self._add_stall
        )

    def locate(self, epoch: int, step: int, rows: list[int]) -> list[tuple[str, int]]:
        """Return for each of these rows of this rank's batch its shard (as named in dataset.json)
        and its row in the shard, from 0.
        """
        per_stream, shuffled = self._assembler.rows_per_stream, self._is_shuffled
        order = EpochOrder(self._shards.row_group_sizes, self.config.num_streams, self._seed, epoch, shuffled)
        positions = []
        for row in rows:
            stream, within = divmod(row, per_stream)
            segment = next(order.segments(self._streams[stream], step * per_stream + within), None)
            if segment is None:  # padding at the end of an evaluation
                continue
            group, row = segment.row_group, segment.start
            if shuffled:
                row = int(self._shards.order(group, self._seed, epoch, shuffled)[row])
            positions.append(self._shards.locate(group, row))
        return positions

    def positions(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """Yield [batch_size] for each batch of an epoch: the positions of the batch's rows in the
        split's files (data.read.positions).
        """
        order = EpochOrder(self._shards.row_group_sizes, self.config.num_streams, self._seed, epoch, self._is_shuffled)
        return batch_positions(order, self._streams, self._assembler.rows_per_stream, self.steps_per_epoch)

    @property
    def _is_shuffled(self) -> bool:
        return self.config.shuffle != "none"

    def empty_batch(self) -> Batch:
        """Return a batch in which no row counts, for a rank that has nothing to read while other
        ranks continue."""
        return self._split(next(self._assembler.assemble([], 1)), 0, 0)

    def _add_stall(self, seconds: float) -> None:
        self.stall_seconds += seconds

    def _read(self, epoch: int, start_step: int) -> Generator[Batch, None, None]:
        shuffled = self._is_shuffled
        order = EpochOrder(self._shards.row_group_sizes, self.config.num_streams, self._seed, epoch, shuffled)
        rows_per_stream = self._assembler.rows_per_stream
        steps_at_once = max(1, min(self.config.prefetch_batches, CHUNK_ROWS // self.batch_size))
        with ExitStack() as stack:
            submit = workers(self.config.decode_threads, stack)

            def decode(segment: Segment) -> Callable[[], Block]:
                return submit(self._shards.decode, segment, self._seed, epoch, shuffled)

            streams = [
                BlockStream(order.segments(stream, start_step * rows_per_stream), decode) for stream in self._streams
            ]
            assemble = self._assemble if self.config.decode_threads == 1 else self._assemble_all
            chunks: deque[Callable[[], Iterable[Batch]]] = deque()
            for begin in range(start_step, self.steps_per_epoch, steps_at_once):
                num_steps = min(steps_at_once, self.steps_per_epoch - begin)
                rows = num_steps * rows_per_stream
                pieces = [piece for i, stream in enumerate(streams) for piece in stream.take(rows, i * rows)]
                chunks.append(submit(assemble, pieces, num_steps, epoch, begin))
                if len(chunks) == self.config.decode_threads:
                    yield from chunks.popleft()()
            for chunk in chunks:
                yield from chunk()

    def _assemble(self, pieces: list[Piece], num_steps: int, epoch: int, first_step: int) -> Iterator[Batch]:
        """Make one batch at a time: the memory of a batch that was used is still in the CPU's cache for the next."""
        for step, batch in enumerate(self._assembler.assemble(pieces, num_steps), first_step):
            batch = self._split(batch, epoch, step)
            yield batch if self._pin is None else self._pin(batch)

    def _assemble_all(self, pieces: list[Piece], num_steps: int, epoch: int, first_step: int) -> list[Batch]:
        return list(self._assemble(pieces, num_steps, epoch, first_step))

    def _split(self, batch: Batch, epoch: int, step: int) -> Batch:
        if self._split_ids is None and self._extra_rows is None:
            return batch
        ids = batch.sparse_features
        if self._extra_rows is not None:
            ids = self._extra_rows(ids, epoch, step)
        return replace(batch, sparse_features=ids if self._split_ids is None else self._split_ids(ids))


def workers(num_threads: int, stack: ExitStack) -> Callable[..., Callable[[], Any]]:
    """Return a function submit(function, *args), which returns a function result(). With one thread
    the work runs when result() is called.
    """
    if num_threads == 1:
        return partial
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="reader-decode")
    stack.callback(pool.shutdown, cancel_futures=True)
    return lambda function, *args: pool.submit(function, *args).result


class BlockStream:
    """The rows of one stream. While a block is in use, the next block is being decoded."""

    def __init__(self, segments: Iterator[Segment], decode: Callable[[Segment], Callable[[], Block]]) -> None:
        self._segments = segments
        self._decode = decode
        self._next: Callable[[], Block] | None = None
        self._block: Block | None = None
        self._used = 0
        self._read_ahead()

    def take(self, num_rows: int, offset: int) -> Iterator[Piece]:
        """Yield the next `num_rows` rows as pieces that start at row `offset` of the chunk; fewer
        rows at the end of the stream.
        """
        while num_rows:
            if self._block is None or self._used == len(self._block.labels):
                if self._next is None:
                    return
                self._block, self._used = self._next(), 0
                self._read_ahead()
            count = min(num_rows, len(self._block.labels) - self._used)
            yield Piece(self._block, self._used, self._used + count, offset)
            self._used, offset, num_rows = self._used + count, offset + count, num_rows - count

    def _read_ahead(self) -> None:
        segment = next(self._segments, None)
        self._next = self._decode(segment) if segment else None
