"""Ids without bound share a table of as many rows as it has: those in use have one each, and give it back clean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.tables import CompressionConfig, ConstraintConfig
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.compression.kind import Bags
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import IDS_A_BUCKET, Table
from pipeline.extras.managed_collision.kind import ManagedCollision
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.sharder import ShardedTables
from tests.embeddings.compressed import as_features, table_of
from tests.embeddings.split_tables import build, optimizers, split
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool
from tests.training.tiny import full_weights

BUCKETS, ROWS, INTERVAL = 4, 32, 2
FAR = 10**15  # ids are anywhere below it
WEIGHT = "embeddings.embedding_bag_collection.embedding_bags.m__managed.weight"


def managed(policy: str = "lfu", **settings: Any) -> CompressionConfig:
    given = {"num_rows": ROWS, "buckets": BUCKETS, "eviction_interval": INTERVAL, **settings}
    return CompressionConfig("managed_collision", policy=policy, **given)


def make_tables(policy: str = "lfu") -> list[Table]:
    """A managed one, one whose cold tail is managed, so that bags are uneven, and a plain one."""
    return [
        table_of("m", managed(policy), num_ids=FAR),
        table_of("s", split(20, tail=managed("lru")), "mean", num_ids=FAR),
        table_of("p", None),
    ]


def draw(tables: list[Table], step: int, trend: int = 0) -> tuple[Any, torch.Tensor]:
    """This rank's part of a global batch: a few ids that come always, other ones in each trend, and others once."""
    generator = np.random.default_rng(step)
    bags = {}
    for table in tables:
        for feature, longest in zip(table.feature_names, table.max_ids, strict=True):
            often = (generator.integers(0, 6, (32, longest or 1)) + 6 * trend) * 1_000_003
            once = generator.integers(0, table.num_embeddings, often.shape)
            ids = np.where(generator.random(often.shape) < 0.7, often, once) % table.num_embeddings
            bags[feature] = [row[: generator.integers(0, len(row) + 1)].tolist() for row in ids]
    share = 32 // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    features = IdSplitter(tables, skip_empty_bags=True)(as_features(bags, mine))
    return features, torch.from_numpy(generator.integers(0, 2, 32).astype(np.float32))[mine]


def train(model: Any, optimizer: Any, tables: list[Table], steps: range, trend: int = 0) -> list[float]:
    losses = []
    model.train()
    for step in steps:
        features, labels = draw(tables, step, trend)
        optimizer.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded_tables(model: Any) -> ShardedTables:
    return next(one for one in model.modules() if isinstance(one, ShardedTables))


def rows_and_states(model: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Of the managed table's rows on this rank: global row -> weights, optimizer state."""
    one = sharded_tables(model).managed._tables.get("m__managed")
    if one is None:
        return {}
    first = one.first_bucket * one.managed.rows_a_bucket
    return {first + row: (one._weight[row].clone(), one._states[0][row].clone()) for row in range(len(one._weight))}


def evictions(rank: int, kind: str, policy: str) -> dict[str, Any]:
    """Collective: what one eviction did to the rows that another id has now, and to those that it left."""
    tables = make_tables(policy)
    model, optimizer = build(tables, kind, optimizers("rowwise_adagrad"))
    train(model, optimizer, tables, range(3))  # an odd number: the next step evicts
    one = sharded_tables(model).managed._tables.get("m__managed")
    if one is None:
        train(model, optimizer, tables, range(3, 4), trend=1)
        return {}
    before, ids = rows_and_states(model), one.state["sorted_ids"].clone()
    renewed, had_state = [], []  # type: list[int], list[bool]
    initialize_rows = one._initialize_rows

    def watched(rows: torch.Tensor, bucket: int, step: int) -> None:
        initialize_rows(rows, bucket, step)
        first = one.first_bucket * one.managed.rows_a_bucket
        for row in rows.tolist():
            weights, state = one._weight[row].clone(), one._states[0][row].clone()
            renewed.append(first + row)
            old_weights, old_state = before[first + row]
            assert state == 0, "the next id would inherit its optimizer state"
            assert not torch.equal(weights, old_weights) and weights.abs().max() > 0
            had_state.append(bool(old_state > 0))

    one._initialize_rows = watched
    train(model, optimizer, tables, range(3, 4), trend=1)
    changed = int((one.state["sorted_ids"] != ids).sum())
    return {"renewed": renewed, "changed": changed, "had_state": sum(had_state)}


@pytest.mark.long
def test_an_evicted_row_is_initialized_anew_and_has_no_optimizer_state(ranks: RankPool) -> None:
    for world_size, kind, policy in ((2, "row_wise", "lfu"), (2, "row_wise", "lru"), (1, "table_wise", "distance_lfu")):
        found = ranks.run(world_size, evictions, kind, policy)
        renewed = [row for one in found for row in one["renewed"]]
        assert renewed and len(set(renewed)) == len(renewed), (kind, policy)
        assert all(one["changed"] for one in found)
        assert sum(one["had_state"] for one in found) > 0, "no row had anything to lose"


def remapped(rank: int, kind: str) -> dict[str, Any]:
    """Collective: which rows ids that come often have after training, and what evaluation changes."""
    tables = make_tables()
    model, optimizer = build(tables, kind, optimizers("adagrad"))
    train(model, optimizer, tables, range(8))
    before = {name: value.clone() for name, value in full_weights(model).items() if "managed_rows" not in name}
    state = {name: one.clone() for name, one in local_state(model).items()}
    model.eval()
    with torch.no_grad():
        for step in range(20, 24):
            model(*draw(tables, step))
    after = full_weights(model)
    same = all(torch.equal(after[name], value) for name, value in before.items())
    return {"same": same and all(torch.equal(value, local_state(model)[name]) for name, value in state.items())}


def local_state(model: Any) -> dict[str, torch.Tensor]:
    tables = sharded_tables(model).managed._tables
    return {f"{name}.{key}": value for name, one in tables.items() for key, value in one.state.items()}


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_evaluation_counts_nothing_and_evicts_nothing(ranks: RankPool, kind: str) -> None:
    assert all(one["same"] for one in ranks.run(2, remapped, kind))


def resumed(rank: int, folder: str, kinds: tuple[str, str]) -> tuple[list[float], list[float], bool]:
    """Collective: losses of steps 5..9 without and with a stop amid a history, and whether all state is the same."""
    context, tables, config = init_distributed(), make_tables(), optimizers("rowwise_adagrad")
    model, optimizer = build(tables, kinds[0], config)
    train(model, optimizer, tables, range(5))
    Checkpointer(folder, model, optimizer, context).save(5, {})
    losses = train(model, optimizer, tables, range(5, 10))
    other, other_optimizer = build(tables, kinds[1], config)
    Checkpointer(folder, other, other_optimizer, context).restore_latest()
    again = train(other, other_optimizer, tables, range(5, 10))
    left, right = full_weights(model), full_weights(other)
    close = all(torch.allclose(left[name].float(), right[name].float(), atol=1e-5) for name in left)
    exact = all(torch.equal(left[name], right[name]) for name in left)
    return losses, again, exact if kinds[0] == kinds[1] else close


@pytest.mark.long
def test_a_resumed_run_goes_on_bit_by_bit_history_and_all(ranks: RankPool, tmp_path: Path) -> None:
    for losses, again, same in ranks.run(2, resumed, str(tmp_path / "same"), ("row_wise", "row_wise")):
        assert losses == again and same


@pytest.mark.long
def test_another_plan_takes_rows_and_maps_along(ranks: RankPool, tmp_path: Path) -> None:
    for losses, again, same in ranks.run(2, resumed, str(tmp_path / "other"), ("row_wise", "table_wise")):
        assert again == pytest.approx(losses, abs=1e-5) and same


def saved(rank: int, folder: str) -> dict[str, torch.Tensor]:
    context, tables = init_distributed(), make_tables()
    model, optimizer = build(tables, "row_wise", optimizers("rowwise_adagrad"))
    train(model, optimizer, tables, range(5))
    Checkpointer(folder, model, optimizer, context).save(5, {})
    return full_weights(model)


def restored(rank: int, folder: str) -> dict[str, torch.Tensor]:
    context, tables = init_distributed(), make_tables()
    model, optimizer = build(tables, "row_wise", optimizers("rowwise_adagrad"))
    Checkpointer(folder, model, optimizer, context).restore_latest()
    return full_weights(model)


def test_two_ranks_checkpoint_is_the_same_table_on_one(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "steps")
    left, right = ranks.run(2, saved, folder)[0], ranks.run(1, restored, folder)[0]
    assert left.keys() == right.keys() and any("managed_rows" in name for name in left)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_hashed_ids_are_spread_over_the_buckets_and_told_apart() -> None:
    table = table_of("m", managed(), num_ids=FAR)
    ids = np.arange(40_000, dtype=np.int64) * 25_000_000_003
    ((name, bags),) = ManagedCollision(table).split(0)(Bags(ids, np.ones(len(ids), np.int32)))
    assert name == "m_one__managed" and len(np.unique(bags.ids)) == len(ids)
    counts = np.bincount(bags.ids // IDS_A_BUCKET, minlength=BUCKETS)
    assert len(counts) == BUCKETS and counts.min() > 9_500
    other = table_of("m", managed(seed=1), num_ids=FAR)
    assert not np.array_equal(
        next(ManagedCollision(other).split(0)(Bags(ids, np.ones(len(ids), np.int32))))[1].ids, bags.ids
    )


@pytest.mark.parametrize(
    ("settings", "sharding", "message"),
    [
        ({"num_rows": None}, [], "num_rows"),
        ({"num_rows": 7}, [], "2 8"),
        ({}, ["data_parallel"], "row_wise table_wise"),
    ],
)
def test_settings_that_make_no_table_are_refused(settings: dict[str, Any], sharding: list[str], message: str) -> None:
    table = replace(table_of("m", managed(**settings)), sharding=ConstraintConfig(sharding))
    with pytest.raises(ConfigError, match=names(message)):
        physical_tables([table])


def uneven(rank: int) -> str:
    tables = [table_of("m", managed(buckets=3), num_ids=FAR)]
    with pytest.raises(ValueError) as error:
        build(tables, "row_wise", optimizers("adagrad"))
    return str(error.value)


def test_a_bucket_on_two_ranks_is_refused(ranks: RankPool) -> None:
    assert mentions(ranks.run(2, uneven)[0], "3 buckets 2 ranks")
