"""Tables' optimizers on CPU are torch's on the rows that a batch touches, for every sharding type and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from pipeline import devices
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.limits import COLUMN_SHARDING_TYPES
from pipeline.embeddings.table import RowUpdates
from pipeline.sharding.torchrec.sharding import shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.optimizer import build_optimizer
from tests.support.ranks import RankPool
from tests.training.tiny import TABLES as COLLECTION
from tests.training.tiny import TinyModel, TinyTable, batches, context, full_weights, plan_of

SEED, NUM_STEPS, LR = 3, 20, 0.001
KINDS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "data_parallel",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
)
TABLES = [TinyTable(kind, kind, "mean" if kind == "table_wise" else "sum") for kind in KINDS]
OF_WHOLE_ROWS = [table for table in TABLES if table.kind not in COLUMN_SHARDING_TYPES]
DENSE = DenseOptimizerConfig("adam", lr=0.01)
Make = Callable[[list[Any]], torch.optim.Optimizer]


class PartialRowWiseAdam(torch.optim.Optimizer):
    """FBGEMM's formula (codegen/genscript/optimizers.py, partial_rowwise_adam) on every row."""

    def __init__(self, weights: list[Any], lr: float) -> None:
        super().__init__(weights, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for weight in self.param_groups[0]["params"]:
            state, gradient = self.state[weight], weight.grad
            if not state:
                state |= {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros(len(weight), 1)}
            state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
            state["exp_avg_sq"].mul_(0.999).add_(gradient.square().sum(1, keepdim=True) / weight.shape[1], alpha=0.001)
            spread = state["exp_avg_sq"] / (1 - 0.999**self.num_steps)
            weight -= self.param_groups[0]["lr"] * state["exp_avg"] / (1 - 0.9**self.num_steps) / (spread.sqrt() + 1e-8)


def step_touched_rows(optimizer: torch.optim.Optimizer, weights: list[Any], config: SparseOptimizerConfig) -> None:
    """A step of a dense optimizer of torch, undone on the rows without a gradient, their state too."""
    before = [weight.detach().clone() for weight in weights]
    states = [{name: value.clone() for name, value in optimizer.state[weight].items()} for weight in weights]
    untouched = [(weight.grad == 0).all(dim=1) for weight in weights]
    for weight in weights:
        if config.gradient_clip_value:
            weight.grad.clamp_(-config.gradient_clip_value, config.gradient_clip_value)
        if config.gradient_clip_norm:
            for row in weight.grad:
                row *= min(1.0, config.gradient_clip_norm / max(float(row.norm()), 1e-30))
    optimizer.step()
    for weight, value, state, rows in zip(weights, before, states, untouched, strict=True):
        if config.decouples and config.name != "adamw":  # torch's does it
            weight.data -= config.lr * config.weight_decay * value
        weight.data[rows] = value[rows]
        for name in optimizer.state[weight].keys() - {"step"}:
            optimizer.state[weight][name][rows] = state[name][rows] if state else 0.0


def step_sparse(optimizer: torch.optim.Optimizer, weights: list[Any], config: SparseOptimizerConfig) -> None:
    for weight in weights:
        rows = (weight.grad != 0).any(dim=1).nonzero().flatten()
        weight.grad = torch.sparse_coo_tensor(rows[None], weight.grad[rows], weight.shape, check_invariants=True)
    optimizer.step()


def step_all_rows(optimizer: torch.optim.Optimizer, weights: list[Any], config: SparseOptimizerConfig) -> None:
    optimizer.step()


def reference(make: Make, config: SparseOptimizerConfig, tables: list[TinyTable]) -> dict[str, torch.Tensor]:
    """The weights after NUM_STEPS of torch's own optimizers in one process."""
    model = TinyModel(tables, torch.device("cpu"))
    initialize_tables(model, SEED)
    weights: list[Any] = list(model.embedding_bag_collection.parameters())
    dense, sparse = torch.optim.Adam(model.over.parameters(), lr=DENSE.lr, eps=DENSE.eps), make(weights)
    step = step_sparse if isinstance(sparse, torch.optim.SparseAdam) else step_touched_rows
    if config.update_rows == "all":
        step = step_all_rows
    for features, labels in batches(tables, NUM_STEPS):
        dense.zero_grad()
        sparse.zero_grad()
        model(features, labels)[0].backward()
        step(sparse, weights, config)
        dense.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def trained(
    rank: int,
    sparse: SparseOptimizerConfig,
    tables: list[TinyTable],
    l2: float = 0.0,
    local_size: int = 0,
    fast: bool = True,
) -> dict[str, torch.Tensor]:
    config = OptimizerConfig(sparse, DENSE)
    model = TinyModel(tables)
    apply_sparse_optimizer(model, sparse, {table.name: RowUpdates(l2) for table in tables})
    plan = plan_of(model, tables, local_size)
    with devices.using(devices.named("cpu", plain=not fast)):
        sharded = shard_model(model, plan, CommsConfig(), context(rank), seed=SEED)
        optimizer = build_optimizer(sharded, config)
    for features, labels in batches(tables, NUM_STEPS, rank, dist.get_world_size()):
        optimizer.zero_grad()
        sharded(features, labels)[0].backward()
        optimizer.step()
    return full_weights(sharded)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("ranks_used", [1, 2])
@pytest.mark.parametrize(
    ("config", "make"),
    [
        # SparseAdam adds eps before its correction of the second moment: small here, or tiny gradients would tell it.
        (SparseOptimizerConfig("adam", lr=LR, eps=1e-14), partial(torch.optim.SparseAdam, lr=LR, eps=1e-14)),
        (SparseOptimizerConfig("adamw", lr=LR, weight_decay=0.5), partial(torch.optim.AdamW, lr=LR, weight_decay=0.5)),
    ],
    ids=["SparseAdam", "AdamW"],
)
def test_adam_is_torchs_on_touched_rows_for_every_sharding_type(
    ranks: RankPool, config: SparseOptimizerConfig, make: Make, ranks_used: int
) -> None:
    distance = furthest(reference(make, config, TABLES), ranks.run(ranks_used, trained, config, TABLES)[0])
    print(
        f"{config.name}, {NUM_STEPS} steps, {ranks_used} rank(s), {len(KINDS)} sharding types: {distance:.1e} from torch's"
    )
    assert distance < 1e-6


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "l2", "make"),
    [
        pytest.param(
            SparseOptimizerConfig("sgd", lr=0.5, weight_decay=0.02, gradient_clip_value=0.01), 0.03,
            partial(torch.optim.SGD, lr=0.5, weight_decay=0.05), marks=pytest.mark.campaign,
        ),
        pytest.param(
            SparseOptimizerConfig("adagrad", lr=0.01, weight_decay=0.2, weight_decay_mode="decoupled"), 0.05,
            partial(torch.optim.Adagrad, lr=0.01, eps=1e-8, weight_decay=0.05), marks=pytest.mark.campaign,
        ),
        pytest.param(
            SparseOptimizerConfig("rowwise_adagrad", lr=0.01, weight_decay=0.02, gradient_clip_norm=0.02), 0.03,
            partial(RowWiseAdagrad, lr=0.01, eps=1e-8, weight_decay=0.05), marks=pytest.mark.campaign,
        ),
        (SparseOptimizerConfig("adam", lr=LR, weight_decay=0.02, gradient_clip_value=0.01), 0.03,
         partial(torch.optim.Adam, lr=LR, weight_decay=0.05)),
        (SparseOptimizerConfig("partial_rowwise_adam", lr=LR, weight_decay=0.5), 0.0, partial(PartialRowWiseAdam, lr=LR)),
    ],
    ids=["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"],
)  # fmt: skip
def test_decay_l2_and_clipping_are_torchs_on_touched_rows(
    ranks: RankPool, config: SparseOptimizerConfig, l2: float, make: Make
) -> None:
    by_element = config.name in ("sgd", "adagrad", "adam")
    tables = TABLES if by_element else OF_WHOLE_ROWS
    expected = reference(make, config, tables)
    distance = furthest(expected, ranks.run(2, trained, config, tables, l2)[0])
    print(f"{config.name}, {NUM_STEPS} steps, 2 ranks, {len(tables)} sharding types: {distance:.1e} from torch's")
    assert distance < 2e-6
    plain = replace(config, weight_decay=0.0, gradient_clip_value=None, gradient_clip_norm=None)
    assert furthest(expected, ranks.run(2, trained, plain, tables)[0]) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks_used"),
    [
        ("adam", 2),
        ("adamw", 1),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in (("adam", 1), ("adamw", 2))),
    ],
)
def test_all_rows_are_updated_as_torch_does_where_the_config_says_so(
    ranks: RankPool, name: str, ranks_used: int
) -> None:
    config = SparseOptimizerConfig(name, lr=LR, weight_decay=0.1, update_rows="all")
    make = partial(torch.optim.Adam if name == "adam" else torch.optim.AdamW, lr=LR, weight_decay=0.1)
    expected, found = reference(make, config, TABLES), ranks.run(ranks_used, trained, config, TABLES)[0]
    assert furthest(expected, found) < 1e-6
    lazy = ranks.run(ranks_used, trained, replace(config, update_rows="touched"), TABLES)[0]
    assert furthest(expected, lazy) > 1e-4
    if ranks_used == 1:
        by_torch = ranks.run(1, trained, config, [TinyTable("a", "data_parallel")], 0.0, 0, False)[0]
        assert furthest(reference(make, config, [TinyTable("a", "data_parallel")]), by_torch) < 1e-6


@pytest.mark.long
def test_replicated_tables_follow_the_same_rule_without_our_kernels(ranks: RankPool) -> None:
    tables = [TinyTable("a", "data_parallel"), TinyTable("b", "data_parallel")]
    for config in (
        SparseOptimizerConfig("adamw", lr=0.1, weight_decay=0.5, gradient_clip_value=0.1),
        SparseOptimizerConfig("partial_rowwise_adam", lr=0.1, gradient_clip_norm=0.1),
        SparseOptimizerConfig("adagrad", lr=0.1, weight_decay=0.1),
        SparseOptimizerConfig("rowwise_adagrad", lr=0.1, weight_decay=0.1),
        SparseOptimizerConfig("sgd", lr=0.1, weight_decay=0.1),
    ):
        by_torch, by_kernel = (ranks.run(1, trained, config, tables, 0.1, 0, fast)[0] for fast in (False, True))
        assert furthest(by_torch, by_kernel) < 1e-5


def after_infinite_gradients(rank: int, names: list[str]) -> list[bool]:
    """Whether each optimizer leaves rows that are not finite, as FBGEMM's does, for a report to find."""
    found = []
    for name in names:
        model = TinyModel([TinyTable("a"), TinyTable("b", "data_parallel")])
        sparse = SparseOptimizerConfig(name, lr=0.1)
        apply_sparse_optimizer(model, sparse, {})
        plan = plan_of(model, [TinyTable("a"), TinyTable("b", "data_parallel")], 0)
        sharded = shard_model(model, plan, CommsConfig(), context(rank), seed=SEED)
        optimizer = build_optimizer(sharded, OptimizerConfig(sparse, DENSE))
        for features, labels in batches([TinyTable("a"), TinyTable("b", "data_parallel")], 2):
            optimizer.zero_grad()
            (sharded(features, labels)[0] * float("inf")).backward()
            optimizer.step()
        tables = [value for key, value in full_weights(sharded).items() if key.startswith(COLLECTION)]
        found.append(not any(torch.isfinite(table).all() for table in tables))
    return found


def test_infinite_gradients_end_in_numbers_that_are_not_finite_and_in_no_error(ranks: RankPool) -> None:
    names = ["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"]
    assert ranks.run(1, after_infinite_gradients, names)[0] == [True] * len(names)


@pytest.mark.parametrize("name", ["adam", pytest.param("partial_rowwise_adam", marks=pytest.mark.campaign)])
def test_fp16_tables_train_by_adam_to_within_their_rounding(ranks: RankPool, name: str) -> None:
    config = SparseOptimizerConfig(name, lr=0.01, weight_decay=0.1)
    exact, rounded = (
        ranks.run(2, trained, config, [TinyTable("a", "row_wise", data_type=kind), TinyTable("b", data_type=kind)])[0]
        for kind in (DataType.FP32, DataType.FP16)
    )
    names = [key for key in exact if key.startswith(COLLECTION)]
    assert all(rounded[key].dtype == torch.float16 for key in names)
    assert furthest({key: exact[key] for key in names}, {key: rounded[key].float() for key in names}) < 0.02
