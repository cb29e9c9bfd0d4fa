"""Tables' optimizers on CPU are torch's on the rows that a batch touches, for every sharding type and number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.config.training import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.ranks import RankPool
from tests.training.tiny import TinyModel, TinyTable, batches, build, full_weights

SEED, NUM_STEPS, LR = 3, 20, 0.001
KINDS = (
    "table_wise", "row_wise", "column_wise", "data_parallel", "table_column_wise", "table_row_wise", "grid_shard",
)  # fmt: skip
TABLES = [TinyTable(kind, kind, "mean" if kind == "table_wise" else "sum") for kind in KINDS]
SPARSE = {
    # SparseAdam adds eps before its correction of the second moment: small, or rows of tiny gradients would tell it.
    "adam": SparseOptimizerConfig("adam", lr=LR, eps=1e-14),
    "adamw": SparseOptimizerConfig("adamw", lr=LR, weight_decay=0.5),
    "partial_rowwise_adam": SparseOptimizerConfig("partial_rowwise_adam", lr=LR, weight_decay=0.5),
}


def step_touched_rows(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> None:
    """A step of a dense optimizer of torch, undone on the rows without a gradient, their state too."""
    before = [weight.detach().clone() for weight in weights]
    states = [{name: value.clone() for name, value in optimizer.state[weight].items()} for weight in weights]
    optimizer.step()
    for weight, value, state in zip(weights, before, states, strict=True):
        assert weight.grad is not None
        untouched = (weight.grad == 0).all(dim=1)
        weight.data[untouched] = value[untouched]
        for name in optimizer.state[weight].keys() - {"step"}:
            optimizer.state[weight][name][untouched] = state[name][untouched] if state else 0.0


def reference(name: str, tables: list[TinyTable]) -> dict[str, torch.Tensor]:
    """The weights after NUM_STEPS of torch's own optimizers in one process."""
    model = TinyModel(tables, torch.device("cpu"))
    initialize_tables(model, SEED)
    weights: list[Any] = list(model.embedding_bag_collection.parameters())
    dense = torch.optim.Adam(model.over.parameters(), lr=0.01, eps=1e-8)
    if name == "sparse_adam":
        tables_optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(weights, lr=LR, eps=1e-14)
    else:
        tables_optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=SPARSE[name].weight_decay)
    for features, labels in batches(tables, NUM_STEPS):
        dense.zero_grad()
        tables_optimizer.zero_grad()
        model(features, labels)[0].backward()
        if name == "sparse_adam":
            for weight in weights:
                rows = (weight.grad != 0).any(dim=1).nonzero().flatten()
                weight.grad = torch.sparse_coo_tensor(rows[None], weight.grad[rows], weight.shape)
            tables_optimizer.step()
        else:
            step_touched_rows(tables_optimizer, weights)
        dense.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def trained(rank: int, name: str, tables: list[TinyTable], local_size: int = 0) -> dict[str, torch.Tensor]:
    config = OptimizerConfig(SPARSE[name], DenseOptimizerConfig("adam", lr=0.01))
    model, optimizer = build(rank, tables, config, local_size=local_size, seed=SEED)
    for features, labels in batches(tables, NUM_STEPS, rank, dist.get_world_size()):
        optimizer.zero_grad()
        model(features, labels)[0].backward()
        optimizer.step()
    return full_weights(model)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("ranks_used", [1, 2])
@pytest.mark.parametrize(("name", "torchs"), [("adam", "sparse_adam"), ("adamw", "adamw")])
def test_adam_is_torchs_on_touched_rows_for_every_sharding_type(
    ranks: RankPool, name: str, torchs: str, ranks_used: int
) -> None:
    expected = reference(torchs, TABLES)
    found = ranks.run(ranks_used, trained, name, TABLES)[0]
    distance = furthest(expected, found)
    print(
        f"{name} after {NUM_STEPS} steps, {ranks_used} rank(s), {len(KINDS)} sharding types: {distance:.1e} from torch's {torchs}"
    )
    assert distance < 1e-6
