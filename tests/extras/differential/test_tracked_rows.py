"""The rows that are tracked are those that really change, on any number of ranks, under any sharding, for any kind of table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.checkpoint.changes import CHECKPOINT, ShardPlace
from pipeline.checkpoint.tables import (
    MODEL,
    STATE,
    TABLE_STATE,
    TABLE_WEIGHT,
    Piece,
    flatten,
    inventory_of_state,
    local_chunks,
)
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import CompressionConfig
from pipeline.extras.differential.tracked_rows import TrackedRows, _MarkingForward
from pipeline.sharding.torchrec.cpu_tables import fast_lookups
from pipeline.training.optimizer import TrainingOptimizer
from tests.embeddings.compressed import table_of
from tests.embeddings.split_tables import build as build_compressed
from tests.embeddings.split_tables import train as train_compressed
from tests.extras.managed_collision.test_managed_collision import make_tables as managed_tables
from tests.extras.managed_collision.test_managed_collision import train as train_managed
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, draw_batches, train_steps
from tests.support.waits import Waits

KINDS = {"a": "table_wise", "b": "row_wise", "c": "column_wise", "d": "data_parallel"}
SMALL = dict.fromkeys(KINDS, "row_wise")


def optimizers(name: str, update_rows: str = "touched") -> OptimizerConfig:
    """Weight decay, where there is any, is not on rows that no batch touches."""
    return OptimizerConfig(SparseOptimizerConfig(name, lr=0.1, update_rows=update_rows), DenseOptimizerConfig("adam"))


def values_by_shard(
    model: DistributedModelParallel, optimizer: TrainingOptimizer
) -> dict[ShardPlace, list[torch.Tensor]]:
    """Of each shard on this rank a copy of its weights and states, all [rows, numbers]."""
    found: dict[ShardPlace, list[torch.Tensor]] = {}
    pieces: dict[tuple[str, int], Piece] = {}
    flat = flatten({MODEL.rstrip("."): model.state_dict(), "optimizer": optimizer.state_dict()})
    tables = inventory_of_state(flat).tables
    for name, table in tables.items():
        pieces |= {(name, piece.state_offset): piece for piece in table.pieces}
    for key, value in flat.items():
        weight, state = TABLE_WEIGHT.fullmatch(key), TABLE_STATE.fullmatch(key)
        match = weight if key.startswith(MODEL) else state if key.startswith(STATE) else None
        if match is None or match["table"] not in tables:
            continue
        for part, offsets in local_chunks(value):
            if not part.numel():
                continue
            name = match["table"]
            if part.dim() == 2:
                place = ShardPlace(name, offsets[0], offsets[1])
            else:
                piece = pieces[name, offsets[0]]
                place = ShardPlace(name, piece.row, piece.column)
            found.setdefault(place, []).append(part.detach().reshape(len(part), -1).clone())
    return found


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[int]:
    differs = torch.zeros(len(before[0]), dtype=torch.bool)
    for old, new in zip(before, after, strict=True):
        differs |= (old != new).any(dim=1)
    return differs.nonzero().flatten().tolist()


def compare(tracked: dict[ShardPlace, Any], before: dict[ShardPlace, Any], after: dict[ShardPlace, Any]) -> int:
    """The number of changed rows; all are tracked, and no others."""
    assert {place for place, rows in tracked.items() if len(rows)} <= set(before)
    total = 0
    for place in before:
        expected = changed(before[place], after[place])
        assert tracked[place].tolist() == expected, place
        total += len(expected)
    return total


def _steps(rank: int, kinds: dict[str, str], name: str, update_rows: str, batch_size: int) -> list[int]:
    _, model, optimizer, context = build_sharded(kinds, optimizers(name, update_rows))
    rows = TrackedRows(model, optimizer.replicated, (CHECKPOINT, "other"))
    world_size, first, totals = context.world_size, values_by_shard(model, optimizer), []
    for start in (0, 1, 4):
        before = values_by_shard(model, optimizer)
        batches = draw_batches(rank, world_size, 1 + start // 2, start, batch_size)
        train_steps(model, optimizer, batches)
        totals.append(compare(rows.take(CHECKPOINT), before, values_by_shard(model, optimizer)))
    totals.append(compare(rows.take("other"), first, values_by_shard(model, optimizer)))
    assert not any(len(own) for own in rows.take("other").values())
    _evaluate(model, rank, world_size)
    assert not any(len(own) for own in rows.take(CHECKPOINT).values()), "an evaluation changes no row"
    return totals


def _evaluate(model: DistributedModelParallel, rank: int, world_size: int) -> None:
    model.eval()
    with torch.no_grad():
        for batch in draw_batches(rank, world_size, 2, start=50):
            model(batch)
    model.train()


@pytest.mark.parametrize(("world_size", "name"), [(1, "rowwise_adagrad"), (2, "adagrad"), (2, "adam"), (1, "sgd")])
def test_tracked_rows_are_those_that_change(ranks: RankPool, world_size: int, name: str) -> None:
    found = ranks.run(world_size, _steps, KINDS, name, "touched", 8)
    few, all_rows = sum(totals[0] for totals in found), sum(totals[-1] for totals in found)
    assert 0 < few < all_rows, "later steps change other rows too"


def test_where_every_row_is_updated_every_row_is_tracked(ranks: RankPool) -> None:
    """Moments are zero until a row's first gradient, so that rows without one do not change; they count all the same."""
    ((tracked, sizes),) = ranks.run(1, _all_rows, KINDS)
    assert tracked == sizes and set(KINDS) == {place.table for place in sizes}


def _all_rows(rank: int, kinds: dict[str, str]) -> tuple[dict[ShardPlace, int], dict[ShardPlace, int]]:
    """The number of tracked rows of each shard after a step, and how many it has."""
    _, model, optimizer, _ = build_sharded(kinds, optimizers("adam", "all"))
    rows = TrackedRows(model, optimizer.replicated, (CHECKPOINT,))
    sizes = {place: len(values[0]) for place, values in values_by_shard(model, optimizer).items()}
    train_steps(model, optimizer, draw_batches(rank, 1, 1, 0, 4))
    return {place: len(own) for place, own in rows.take(CHECKPOINT).items()}, sizes


def _compressed(rank: int, kind: str) -> list[int]:
    kinds = {
        "q": CompressionConfig("quotient_remainder"),
        "m": CompressionConfig("mixed_dimension", dims=[16, 8, 4]),
        "h": CompressionConfig("hash", num_rows=9),
        "f": CompressionConfig("frequency_split", head_rows="20"),
    }
    tables = [table_of(name, config) for name, config in kinds.items()]
    model, optimizer = build_compressed(tables, kind, optimizers("rowwise_adagrad"))
    rows, totals = TrackedRows(model, optimizer.replicated, (CHECKPOINT,)), []
    for step in range(3):
        before = values_by_shard(model, optimizer)
        train_compressed(model, optimizer, tables, range(step, step + 1))
        totals.append(compare(rows.take(CHECKPOINT), before, values_by_shard(model, optimizer)))
    return totals


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_rows_of_compressed_tables_are_tracked(ranks: RankPool, kind: str) -> None:
    assert all(all(totals) for totals in ranks.run(2, _compressed, kind))


def _managed(rank: int, kind: str) -> list[int]:
    tables = managed_tables("lfu")
    model, optimizer = build_compressed(tables, kind, optimizers("rowwise_adagrad"))
    rows, totals = TrackedRows(model, optimizer.replicated, (CHECKPOINT,)), []
    for step in range(6):
        before = values_by_shard(model, optimizer)
        train_managed(model, optimizer, tables, range(step, step + 1), trend=step // 3)
        totals.append(compare(rows.take(CHECKPOINT), before, values_by_shard(model, optimizer)))
    return totals


def test_rows_of_managed_tables_are_tracked_where_another_id_gets_them(ranks: RankPool) -> None:
    assert all(sum(totals) for totals in ranks.run(2, _managed, "row_wise"))


def _put_back(rank: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each shard: rows of the first step, which were put back; rows taken after the second; all since the start."""
    _, model, optimizer, _ = build_sharded(SMALL)
    rows = TrackedRows(model, optimizer.replicated, (CHECKPOINT, "other"))
    train_steps(model, optimizer, draw_batches(rank, 1, 1, 0, 4))
    first = rows.take(CHECKPOINT)
    rows.put_back(CHECKPOINT, first)
    train_steps(model, optimizer, draw_batches(rank, 1, 1, 1, 4))
    both, other = rows.take(CHECKPOINT), rows.take("other")
    return [(first[place].tolist(), own.tolist(), other[place].tolist()) for place, own in both.items()]


def test_what_was_taken_in_vain_is_taken_again(ranks: RankPool) -> None:
    (shards,) = ranks.run(1, _put_back)
    assert all(first and set(first) <= set(both) and both == other for first, both, other in shards) and shards


def _by_fbgemm(rank: int) -> list[int]:
    """Collective. As _steps, updated by FBGEMM: what is looked up counts, so nothing that changes is missing."""
    _, model, optimizer, context = build_sharded(KINDS, optimizers("rowwise_adagrad"))
    for lookup in fast_lookups(model):
        del lookup._lookup.forward
    rows = TrackedRows(model, optimizer.replicated, (CHECKPOINT,))
    before = values_by_shard(model, optimizer)
    train_steps(model, optimizer, draw_batches(rank, context.world_size, 2, 0, 8))
    return [compare(rows.take(CHECKPOINT), before, values_by_shard(model, optimizer))]


def test_rows_that_fbgemm_updates_are_tracked_by_their_ids(ranks: RankPool) -> None:
    assert all(totals[0] for totals in ranks.run(2, _by_fbgemm))


def test_a_looked_up_row_takes_one_bit_and_marking_it_waits_for_no_gpu() -> None:
    rows = [13, 8, 21]
    lookup = SplitTableBatchedEmbeddingBagsCodegen(
        [(count, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in rows], feature_table_map=[0, 1, 2, 2]
    )
    forward = _MarkingForward(lookup)
    assert [len(bits) for bits in forward.bitmaps()] == [2, 1, 3]
    marked: list[set[int]] = [set(), set(), set()]
    for step in range(3):
        ids = [[12, 3, 3], [7, step], [20, 8, 1000], [step + 2, 20]]  # the third feature has one out of range
        lengths = torch.tensor([[2, 1], [1, 1], [0, 3], [2, 0]])  # 2 bags of each feature
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        indices = torch.tensor([one for each in ids for one in each])
        with Waits() as waits:
            forward._mark(indices, offsets, None)
        assert not waits.found
        for table, own in zip(lookup.feature_table_map, ids, strict=True):
            marked[table] |= {one if one < rows[table] else 0 for one in own}
    found = [np.unpackbits(bits.numpy(), bitorder="little").nonzero()[0] for bits in forward.bitmaps()]
    assert [set(each.tolist()) for each in found] == marked
