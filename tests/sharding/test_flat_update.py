"""Replicated tables updated by one kernel become what torch's optimizers make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import optim
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from pipeline.config.optimizers import SparseOptimizerConfig
from pipeline.sharding.torchrec.flat_update import flat_update
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer

SHAPES = [(1, 4), (7, 20), (300, 16)]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": optim.RowWiseAdagrad,
}


def _tables() -> tuple[nn.Parameter, dict[str, nn.Parameter]]:
    """A flat parameter of three tables, and its slices."""
    torch.manual_seed(0)
    flat = nn.Parameter(torch.randn(sum(rows * dim for rows, dim in SHAPES)))
    slices: dict[str, nn.Parameter] = {}
    begin = 0
    for index, (rows, dim) in enumerate(SHAPES):
        slices[f"model.embedding_bags.t{index}.weight"] = TableBatchedEmbeddingSlice(
            flat, begin, begin + rows * dim, rows, dim
        )
        begin += rows * dim
    return flat, slices


def _gradient(flat: nn.Parameter, seed: int) -> torch.Tensor:
    """Most rows have none."""
    torch.manual_seed(seed)
    return torch.randn_like(flat) * (torch.rand(len(flat) // 4).repeat_interleave(4) < 0.2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_equal_torchs(name: str) -> None:
    kwargs: dict[str, Any] = {"lr": 0.3} | ({} if name == "sgd" else {"eps": 1e-8})
    expected_flat, expected = _tables()
    theirs = OPTIMIZERS[name](list(expected.values()), **kwargs)
    flat, tables = _tables()
    ours = ReplicatedTablesOptimizer(tables, SparseOptimizerConfig(name, lr=0.3, eps=1e-8))
    assert ours._flat is not None
    before = flat.detach().clone()
    for step in range(5):
        expected_flat.grad, flat.grad = _gradient(flat, step), _gradient(flat, step)
        if step == 3:  # a schedule's
            theirs.param_groups[0]["lr"] = ours.param_groups[0]["lr"] = 0.1
        theirs.step()
        ours.step()
    torch.testing.assert_close(flat, expected_flat, rtol=1e-5, atol=1e-6)
    assert not torch.equal(flat, before)
    if name != "sgd":
        for key in tables:
            state = ours.state_dict()["state"][key][f"{key.split('.')[-2]}.momentum1"]
            torch.testing.assert_close(state, theirs.state[expected[key]]["sum"].view(state.shape))


def test_a_loaded_state_is_what_the_next_step_starts_from() -> None:
    config = SparseOptimizerConfig("rowwise_adagrad", lr=0.3, eps=1e-8)
    (flat, tables), (other_flat, others) = _tables(), _tables()
    ours, other = ReplicatedTablesOptimizer(tables, config), ReplicatedTablesOptimizer(others, config)
    flat.grad = _gradient(flat, 0)
    ours.step()
    other.load_state_dict(ours.state_dict())
    other_flat.data.copy_(flat)
    flat.grad, other_flat.grad = _gradient(flat, 1), _gradient(flat, 1)
    ours.step()
    other.step()
    assert torch.equal(flat, other_flat)


def test_what_the_kernel_does_not_do_is_left_to_torch() -> None:
    _, tables = _tables()
    weights = list(tables.values())
    assert flat_update(tables, torch.optim.Adam(weights)) is None
    assert flat_update(tables, torch.optim.SGD(weights, momentum=0.9)) is None
    assert flat_update(tables, optim.RowWiseAdagrad(weights, weight_decay=0.1)) is None
    some = dict(list(tables.items())[1:])
    assert flat_update(some, torch.optim.SGD(list(some.values()), lr=0.1)) is None  # a part of the flat parameter
    plain = {"weight": nn.Parameter(torch.zeros(3, 4))}
    assert flat_update(plain, torch.optim.SGD(plain.values(), lr=0.1)) is None


def test_a_step_without_gradients_changes_nothing() -> None:
    flat, tables = _tables()
    optimizer = ReplicatedTablesOptimizer(tables, SparseOptimizerConfig("rowwise_adagrad", lr=0.3, eps=1e-8))
    before = flat.detach().clone()
    flat.grad = torch.ones_like(flat)
    optimizer.zero_grad()
    assert all(table.grad is None for table in tables.values())
    optimizer.step()
    assert torch.equal(flat, before)
