"""A table's own learning rate, warm-up, weight decay and frozen rows, for every sharding type and number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from pipeline import devices
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig, LRSchedule, ScheduleConfig
from pipeline.embeddings.table import RowUpdates
from pipeline.sharding.torchrec.sharding import shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.optimizer import apply_schedule, build_optimizer
from tests.support.ranks import RankPool
from tests.training.tiny import TABLES as COLLECTION
from tests.training.tiny import TinyModel, TinyTable, batches, context, full_weights, plan_of

KINDS = ("table_wise", "row_wise", "data_parallel", "data_parallel", "column_wise", "table_wise")
NAMES = ("plain", "slow", "warm", "decayed", "slow_too", "frozen")
TABLES = [TinyTable(name, kind) for name, kind in zip(NAMES, KINDS, strict=True)]
UPDATES = {
    "slow": RowUpdates(lr_factor=0.25),
    "slow_too": RowUpdates(lr_factor=0.25, l2=0.1),
    "warm": RowUpdates(warmup_steps=4, lr_factor=0.5),
    "decayed": RowUpdates(weight_decay=0.5),
    "frozen": RowUpdates(frozen=True, l2=0.3, weight_decay=0.5),
}
LR, NUM_STEPS, SEED = 0.05, 8, 3
SCHEDULE = ScheduleConfig(sparse=LRSchedule(warmup_steps=2))
DENSE = DenseOptimizerConfig("adam", lr=0.01)


def trained(
    rank: int,
    sparse: SparseOptimizerConfig,
    tables: list[TinyTable],
    updates: dict[str, RowUpdates],
    fast: bool = True,
    last_factor: float = 1.0,
) -> tuple[dict[str, torch.Tensor], set[str], list[str]]:
    """The weights after NUM_STEPS, the tables of which a bit has changed on this rank, and the keys of the optimizer's
    state. `last_factor` multiplies the last loss."""
    model = TinyModel(tables)
    apply_sparse_optimizer(model, sparse, updates)
    with devices.using(devices.named("cpu", plain=not fast)):
        sharded = shard_model(model, plan_of(model, tables), CommsConfig(), context(rank), seed=SEED)
        optimizer = build_optimizer(sharded, OptimizerConfig(sparse, DENSE))
    before = _bits(sharded)
    for step, (features, labels) in enumerate(batches(tables, NUM_STEPS, rank, dist.get_world_size())):
        apply_schedule(optimizer, SCHEDULE, step)
        optimizer.zero_grad()
        (sharded(features, labels)[0] * (last_factor if step == NUM_STEPS - 1 else 1.0)).backward()
        optimizer.step()
    changed = {name for name, bits in _bits(sharded).items() if not torch.equal(bits, before[name])}
    return full_weights(sharded), changed, list(optimizer.state_dict()["state"])


def _bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Table -> the bits of this rank's shards."""
    found = {}
    for key, value in model.state_dict().items():
        shards = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        if "embedding_bags" in key and shards:
            found[key.split(".")[-2]] = torch.cat([shard.detach().flatten() for shard in shards]).view(torch.int32)
    return found


def expected(sparse: SparseOptimizerConfig) -> dict[str, torch.Tensor]:
    """The weights after NUM_STEPS of torch's SGD in one process, with one group for each table."""
    model = TinyModel(TABLES, torch.device("cpu"))
    initialize_tables(model, SEED)
    groups: list[dict[str, Any]] = []
    for table in TABLES:
        own = UPDATES.get(table.name, RowUpdates())
        decay = sparse.weight_decay if own.weight_decay is None else own.weight_decay
        weight = model.get_parameter(f"{COLLECTION}.embedding_bags.{table.name}.weight")
        if not own.frozen:
            groups.append({"params": [weight], "weight_decay": own.l2 + decay, "own": own})
    tables = torch.optim.SGD(groups, lr=LR)
    dense = torch.optim.Adam(model.over.parameters(), lr=DENSE.lr, eps=DENSE.eps)
    for step, (features, labels) in enumerate(batches(TABLES, NUM_STEPS)):
        for group in tables.param_groups:
            own = group["own"]
            group["lr"] = LR * min(1.0, (step + 1) / 2) * own.lr_factor
            group["lr"] *= min(1.0, (step + 1) / own.warmup_steps) if own.warmup_steps else 1.0
        tables.zero_grad()
        dense.zero_grad()
        model(features, labels)[0].backward()
        before = [weight.detach().clone() for group in tables.param_groups for weight in group["params"]]
        tables.step()
        for group, values in zip(tables.param_groups, before, strict=True):
            (weight,) = group["params"]
            untouched = (weight.grad == 0).all(dim=1)
            weight.data[untouched] = values[untouched]
        dense.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("ranks_used", [1, 2])
def test_each_table_trains_by_its_own_settings(ranks: RankPool, ranks_used: int) -> None:
    sparse = SparseOptimizerConfig("sgd", lr=LR, weight_decay=0.02)
    found, _, _ = ranks.run(ranks_used, trained, sparse, TABLES, UPDATES)[0]
    wanted = expected(sparse)
    assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) < 1e-6
    same, _, _ = ranks.run(ranks_used, trained, sparse, TABLES, {})[0]
    for name in UPDATES:
        key = f"{COLLECTION}.embedding_bags.{name}.weight"
        assert float((same[key] - wanted[key]).abs().max()) > 1e-4, name


@pytest.mark.long
@pytest.mark.parametrize("fast", [True, False])
def test_frozen_rows_are_unchanged_to_the_bit_and_have_no_state(ranks: RankPool, fast: bool) -> None:
    """An update by a rate of 0 would change -0.0 to 0.0. The last gradients are huge."""
    kinds = ("table_wise", "row_wise", "column_wise", "data_parallel")
    frozen = [TinyTable(f"frozen_{kind}", kind, init=_signed) for kind in kinds]
    trains = [
        TinyTable(f"trains_{kind}", kind) for kind in kinds[: 3 if fast else 4]
    ]  # without DDP where none is trained
    sparse, updates = SparseOptimizerConfig("adagrad", lr=LR), {table.name: RowUpdates(frozen=True) for table in frozen}
    for ranks_used in (1, 2):
        results = ranks.run(ranks_used, trained, sparse, [*frozen, *trains], updates, fast, 1e30)
        expected_names = {table.name for table in trains}
        assert set.union(*(changed for _, changed, _ in results)) == expected_names
        states = {name.split(".")[-2] for _, _, state in results for name in state if "embedding_bags" in name}
        assert states == expected_names


@torch.no_grad()
def _signed(weight: torch.Tensor) -> torch.Tensor:
    weight.uniform_(-0.5, 0.5)
    weight[:, ::2] = -0.0
    return weight
