"""Track which rows of a model's tables training changes, for checkpoints and publications that hold changes alone.

Each shard has a bitmap that its updates fill, and a bitmap a consumer, which a take() empties. The CPU kernels set a row's
bit when they update it. Where FBGEMM updates (a GPU, weighted ids, sharding.fast_cpu=false) every row that a batch looks up
counts as changed. Replicated tables are marked by their averaged gradient, so all ranks mark the same rows. A managed table's
row also changes where another id gets it. A row is never missing; one whose gradient happens to be zero may be among them.
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

from pipeline.checkpoint.changes import Rows, ShardPlace, ShardRows
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.torchrec.cpu_tables import FastLookup
from pipeline.sharding.torchrec.managed_collision import ManagedTables
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer

Bits = NDArray[np.uint8]


class TrackedRows:
    """The tables of a sharded model, by the shards that lie on this rank. It is a checkpoint.changes.ChangedRows.

    It begins to track when it is made: what changed before is nobody's.
    """

    def __init__(
        self, model: nn.Module, replicated: ReplicatedTablesOptimizer | None, consumers: Iterable[str]
    ) -> None:
        """Raises ShardingError for a table whose updates cannot be followed."""
        self._shards = dict(_shards(model, replicated))
        self._taken = {
            consumer: {place: np.zeros_like(shard.no_bits) for place, shard in self._shards.items()}
            for consumer in consumers
        }
        for module in model.modules():
            if isinstance(managed := getattr(module, "managed", None), ManagedTables):
                managed.watch_initialized(self._mark)

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


class _Shard:
    """`read_and_clear` gives the bitmap of the rows updated since the last call."""

    def __init__(self, num_rows: int, read_and_clear: Callable[[], Bits]) -> None:
        self.num_rows, self.read_and_clear = num_rows, read_and_clear
        self.no_bits = np.zeros(-(-num_rows // 8), np.uint8)


def _of_bits(num_rows: int, bits: Bits) -> _Shard:
    def read_and_clear() -> Bits:
        found = bits.copy()
        bits[:] = 0
        return found

    return _Shard(num_rows, read_and_clear)


def _of_device_bits(num_rows: int, bits: torch.Tensor) -> _Shard:
    def read_and_clear() -> Bits:
        found = bits.to("cpu", copy=True).numpy()
        bits.zero_()
        return found

    return _Shard(num_rows, read_and_clear)


def _of_numbers(numbers: torch.Tensor) -> _Shard:
    """`numbers`: [rows], not 0 where a row was updated."""

    def read_and_clear() -> Bits:
        found = np.packbits(numbers.cpu().numpy() != 0, bitorder="little")
        numbers.zero_()
        return found

    return _Shard(len(numbers), read_and_clear)


def _rows_of(bits: Bits, num_rows: int) -> Rows:
    """Ascending; looks at the bytes that hold a bit."""
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


def _fused_shards(sharded: ShardedEmbeddingBagCollection) -> Iterator[tuple[ShardPlace, _Shard]]:
    """Of the tables that FBGEMM's modules on this rank hold."""
    for lookup in sharded._lookups:
        for kernel in getattr(lookup, "_emb_modules", []):
            fbgemm = kernel.emb_module
            tables = kernel.config.embedding_tables
            if not hasattr(fbgemm, "split_optimizer_states"):
                if any(table.local_metadata is not None for table in tables):
                    raise ShardingError(
                        f"table {tables[0].name!r} lies in {type(fbgemm).__name__}, whose changed rows are not known; set "
                        "checkpoint.differential=false and publish nothing while it trains"
                    )
                continue  # replicated
            places = [ShardPlace(table.name, *_offsets(table)) for table in tables]
            yield from zip(places, _track(fbgemm, [table.local_rows for table in tables]), strict=True)


def _offsets(table: Any) -> tuple[int, int]:
    row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
    return row, column


def _track(fbgemm: SplitTableBatchedEmbeddingBagsCodegen, rows: list[int]) -> list[_Shard]:
    held = [spec[0] for spec in fbgemm.embedding_specs]
    if held != rows:
        raise ShardingError(
            f"{type(fbgemm).__name__} holds {held} rows of tables that have {rows}: the rows that change are not known; set "
            "checkpoint.differential=false and publish nothing while it trains"
        )
    if isinstance(fbgemm.forward, FastLookup):
        return [_of_bits(count, bits) for count, bits in zip(rows, fbgemm.forward.track_rows(), strict=True)]
    if not isinstance(fbgemm.forward, _MarkingForward):
        fbgemm.forward = _MarkingForward(fbgemm)  # type: ignore[method-assign]
    return [_of_device_bits(count, bits) for count, bits in zip(rows, fbgemm.forward.bitmaps(), strict=True)]


class _MarkingForward:
    """In place of the module's forward: in training it marks the rows that are looked up, for backward will update them.

    A row takes one bit of the device's memory, and marking does not wait for the device.
    """

    def __init__(self, fbgemm: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._forward, self._fbgemm = fbgemm.forward, fbgemm
        rows = torch.tensor([spec[0] for spec in fbgemm.embedding_specs])
        device = fbgemm.current_device
        self._sizes = -(-rows // 8)  # bytes of each table
        self._bits = torch.zeros(int(self._sizes.sum()), dtype=torch.uint8, device=device)
        tables = torch.tensor(fbgemm.feature_table_map)
        self._first_bits = 8 * (self._sizes.cumsum(0) - self._sizes)[tables].to(device)  # of each feature's table
        self._num_rows = rows[tables].to(device)
        self._bags: list[int] = []
        self._ends = torch.empty(0, device=device)

    def bitmaps(self) -> list[torch.Tensor]:
        """Of each table, the first row in the lowest bit."""
        return list(self._bits.split(self._sizes.tolist()))

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._mark(indices.long(), offsets.long(), keywords.get("batch_size_per_feature_per_rank"))
        return self._forward(indices, offsets, *arguments, **keywords)  # type: ignore[no-any-return]

    def _mark(self, indices: torch.Tensor, offsets: torch.Tensor, sizes: list[list[int]] | None) -> None:
        """Ids out of range become row 0 where FBGEMM does not raise."""
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
        """Adding is as setting, because each bit that is not set yet is added once."""
        bits = bits.sort().values
        is_first = torch.ones_like(bits, dtype=torch.bool)
        is_first[1:] = bits[1:] != bits[:-1]
        places, within = bits >> 3, bits & 7
        is_new = is_first & ((self._bits[places] >> within) & 1 == 0)
        self._bits.index_add_(0, places, (is_new.long() << within).to(torch.uint8))
