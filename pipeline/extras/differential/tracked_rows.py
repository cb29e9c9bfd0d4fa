"""Track which rows of a model's tables change, for checkpoints and publications that store only
changes.

Each shard has a bitmap that its updates set, and a bitmap for each consumer, which take() clears.
The CPU kernels set a row's bit when they update it. If FBGEMM updates the rows (on a GPU, with
weighted ids, or with sharding.fast_cpu=false), every row that a batch looks up counts as changed.
Replicated tables are marked by their averaged gradient, so all ranks mark the same rows. A row of a
managed table also changes if another id gets it. No changed row is missing. A row whose gradient is
zero may be marked although it did not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType

from pipeline.checkpoint.changes import CHECKPOINT, Rows, ShardPlace, ShardRows
from pipeline.config.training import CheckpointConfig
from pipeline.extras.differential.links import Differential
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.torchrec.cpu_tables import FastLookup
from pipeline.sharding.torchrec.sharder import ShardedTables
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer

Bits = NDArray[np.uint8]


class TrackedRows:
    """Track the changed rows of this rank's shards of a sharded model.

    Implements checkpoint.changes.ChangedRows.

    Tracking starts when the object is made. Earlier changes are not reported.
    """

    def __init__(
        self, model: nn.Module, replicated: ReplicatedTablesOptimizer | None, consumers: Iterable[str]
    ) -> None:
        """Raises ShardingError for a table whose updates cannot be tracked."""
        self._shards = dict(_shards(model, replicated))
        self._taken = {
            consumer: {place: np.zeros_like(shard.no_bits) for place, shard in self._shards.items()}
            for consumer in consumers
        }
        for module in model.modules():
            if isinstance(module, ShardedTables) and module.managed:
                module.managed.watch_initialized(self._mark)

    @property
    def places(self) -> list[ShardPlace]:
        return sorted(self._shards)

    def take(self, consumer: str) -> ShardRows:
        for place, shard in self._shards.items():
            changed = shard.read_and_clear()
            for of_consumer in self._taken.values():
                of_consumer[place] |= changed
        own = self._taken[consumer]
        rows = {place: _rows_of(own[place], shard.num_rows) for place, shard in self._shards.items()}
        for bits in own.values():
            bits[:] = 0
        return rows

    def put_back(self, consumer: str, rows: ShardRows) -> None:
        for place, own in rows.items():
            _set(self._taken[consumer][place], own)

    def _mark(self, place: ShardPlace, rows: torch.Tensor) -> None:
        for bits in self._taken.values():
            _set(bits[place], rows.cpu().numpy().astype(np.int64))


def differential_saves(
    model: nn.Module, replicated: ReplicatedTablesOptimizer | None, config: CheckpointConfig
) -> Differential:
    """Begin to track changed rows, and return how checkpoints save them."""
    rows = TrackedRows(model, replicated, [CHECKPOINT])
    return Differential(rows, config.max_links, is_packed=config.compress_links)


class _Shard:
    """The rows of a shard.

    `read_and_clear` returns the bitmap of the rows updated since the last call.
    """

    def __init__(self, num_rows: int, read_and_clear: Callable[[], Bits]) -> None:
        self.num_rows, self.read_and_clear = num_rows, read_and_clear
        self.no_bits = np.zeros(-(-num_rows // 8), np.uint8)


def _of_bits(num_rows: int, bits: Bits) -> _Shard:
    def read_and_clear() -> Bits:
        found = bits.copy()
        bits[:] = 0
        return found

    return _Shard(num_rows, read_and_clear)


def _unchanged(num_rows: int) -> _Shard:
    return _of_bits(num_rows, np.zeros(-(-num_rows // 8), np.uint8))


def _of_device_bits(num_rows: int, bits: torch.Tensor) -> _Shard:
    def read_and_clear() -> Bits:
        found = bits.to("cpu", copy=True).numpy()
        bits.zero_()
        return found

    return _Shard(num_rows, read_and_clear)


def _of_numbers(numbers: torch.Tensor) -> _Shard:
    """Make a shard from numbers [rows], which are not 0 if the row was updated."""

    def read_and_clear() -> Bits:
        found = np.packbits(numbers.cpu().numpy() != 0, bitorder="little")
        numbers.zero_()
        return found

    return _Shard(len(numbers), read_and_clear)


def _rows_of(bits: Bits, num_rows: int) -> Rows:
    """Return the rows whose bit is set, ascending. Reads only bytes that are not zero."""
    (places,) = bits.nonzero()
    unpacked = np.unpackbits(bits[places], bitorder="little").reshape(-1, 8)
    within, columns = unpacked.nonzero()
    rows: Rows = places[within] * 8 + columns
    return rows[rows < num_rows]


def _set(bits: Bits, rows: Rows) -> None:
    np.bitwise_or.at(bits, rows >> 3, np.left_shift(1, rows & 7).astype(np.uint8))


def _shards(model: nn.Module, replicated: ReplicatedTablesOptimizer | None) -> Iterator[tuple[ShardPlace, _Shard]]:
    if replicated is not None:
        for name, numbers in replicated.track_rows().items():
            yield ShardPlace(name, 0, 0), _of_numbers(numbers)
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            yield from _fused_shards(module)
        if isinstance(module, ShardedTables):
            yield from _frozen_replicated(module)


def _frozen_replicated(tables: ShardedTables) -> Iterator[tuple[ShardPlace, _Shard]]:
    """Iterate over the frozen tables that every rank holds. No optimizer has them."""
    for name, updates in tables.row_updates.items():
        if updates.frozen and tables.module_sharding_plan[name].sharding_type == ShardingType.DATA_PARALLEL.value:
            yield ShardPlace(name, 0, 0), _unchanged(len(tables.embedding_bags[name].weight))


def _fused_shards(sharded: ShardedEmbeddingBagCollection) -> Iterator[tuple[ShardPlace, _Shard]]:
    """Iterate over the tables that FBGEMM's modules hold on this rank."""
    for lookup in sharded._lookups:
        for kernel in getattr(lookup, "_emb_modules", []):
            fbgemm = kernel.emb_module
            tables = kernel.config.embedding_tables
            if not hasattr(fbgemm, "split_optimizer_states"):
                if any(table.local_metadata is not None for table in tables):
                    raise ShardingError(
                        f"table {tables[0].name!r} is stored in {type(fbgemm).__name__}, which "
                        "does not report changed rows; set checkpoint.differential=false and do "
                        "not publish deltas during training"
                    )
                continue  # replicated
            places = [ShardPlace(table.name, *_offsets(table)) for table in tables]
            if getattr(fbgemm, "is_frozen", False):
                yield from ((place, _unchanged(table.local_rows)) for place, table in zip(places, tables, strict=True))
                continue
            yield from zip(places, _track(fbgemm, [table.local_rows for table in tables]), strict=True)


def _offsets(table: Any) -> tuple[int, int]:
    row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
    return row, column


def _track(fbgemm: SplitTableBatchedEmbeddingBagsCodegen, rows: list[int]) -> list[_Shard]:
    held = [spec[0] for spec in fbgemm.embedding_specs]
    if held != rows:
        raise ShardingError(
            f"{type(fbgemm).__name__} holds {held} rows of tables with {rows} rows, so the "
            "changed rows are unknown; set checkpoint.differential=false and do not publish "
            "deltas during training"
        )
    if isinstance(fbgemm.forward, FastLookup):
        return [_of_bits(count, bits) for count, bits in zip(rows, fbgemm.forward.track_rows(), strict=True)]
    if not isinstance(fbgemm.forward, _MarkingForward):
        fbgemm.forward = _MarkingForward(fbgemm)
    return [_of_device_bits(count, bits) for count, bits in zip(rows, fbgemm.forward.bitmaps(), strict=True)]


class _MarkingForward:
    """Replace the module's forward: in training, mark the rows that are looked up, because backward
    updates them.

    A row takes one bit of the device's memory. Marking does not wait for the device.
    """

    def __init__(self, fbgemm: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._forward, self._fbgemm = fbgemm.forward, fbgemm
        rows = torch.tensor([spec[0] for spec in fbgemm.embedding_specs])
        device = fbgemm.current_device
        self._sizes = -(-rows // 8)  # bytes of each table
        self._bits = torch.zeros(int(self._sizes.sum()), dtype=torch.uint8, device=device)
        tables = torch.tensor(fbgemm.feature_table_map)
        # first bit of each feature's table
        self._first_bits = 8 * (self._sizes.cumsum(0) - self._sizes)[tables].to(device)
        self._num_rows = rows[tables].to(device)
        self._bags: list[int] = []
        self._ends = torch.empty(0, device=device)

    def bitmaps(self) -> list[torch.Tensor]:
        """Return a bitmap for each table, with the first row in the lowest bit."""
        return list(self._bits.split(self._sizes.tolist()))

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._mark(indices.long(), offsets.long(), keywords.get("batch_size_per_feature_per_rank"))
        return self._forward(indices, offsets, *arguments, **keywords)

    def _mark(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: list[list[int]] | None) -> None:
        """Mark the rows of ids. An id out of range becomes row 0 if FBGEMM does not raise."""
        num_features = len(self._num_rows)
        bags = [(len(offsets) - 1) // num_features] * num_features if sizes is None else [sum(one) for one in sizes]
        if bags != self._bags:
            self._bags, self._ends = bags, torch.tensor(bags).cumsum(0).to(offsets.device)
        places = torch.arange(len(indices), device=indices.device)
        ends = offsets[self._ends]
        features = torch.searchsorted(ends, places, right=True).clamp_(max=num_features - 1)
        is_row = (indices >= 0) & (indices < self._num_rows[features]) & (places < ends[-1])
        self._set(self._first_bits[features] + torch.where(is_row, indices, 0))

    def _set(self, bits: torch.Tensor) -> None:
        """Set the bits. Adding equals setting, because each unset bit is added once."""
        bits = bits.sort().values
        is_first = torch.ones_like(bits, dtype=torch.bool)
        is_first[1:] = bits[1:] != bits[:-1]
        places, within = bits >> 3, bits & 7
        is_new = is_first & ((self._bits[places] >> within) & 1 == 0)
        self._bits.index_add_(0, places, (is_new.long() << within).to(torch.uint8))
