"""Bags whose ids have weights: what is trained sharded is what plain torch trains, by every way that we have."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig
from pipeline.extras.frequency_split.variable_batches import leave_out_empty_bags
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.ranks import RankPool
from tests.training.tiny import TinyModel, TinyTable, batches, build, full_weights
from tests.training.tiny_training import NUM_STEPS, SEED, distance

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
OPTIMIZERS = {"sgd": 2.0, "rowwise_adagrad": 0.1, "adam": 0.01}
Case = tuple[str, str, str]  # optimizer, pooling, path
ALL_CASES = list(product(OPTIMIZERS, ("sum", "mean"), ("shared_memory", "gloo")))


def _tables(kinds: tuple[str, ...], pooling: str) -> list[TinyTable]:
    """The first is under two features."""
    return [
        TinyTable(kind, kind, pooling, ("a1", "a2") if not number else (), weighted=True)
        for number, kind in enumerate(kinds)
    ]


def _config(optimizer: str) -> OptimizerConfig:
    sparse = SparseOptimizerConfig(optimizer, lr=OPTIMIZERS[optimizer], eps=1e-14 if optimizer == "adam" else 1e-8)
    return OptimizerConfig(sparse, DenseOptimizerConfig("sgd", lr=0.05))


def _pool(weight: torch.Tensor, bags: KeyedJaggedTensor, feature: str, pooling: str) -> torch.Tensor:
    """The sum of each bag's rows, each times its weight; a mean divides that by the number of ids."""
    own = bags[feature]
    weights, lengths = own.weights(), own.lengths()
    if pooling == "mean":
        weights = weights / lengths.repeat_interleave(lengths)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()
    return F.embedding_bag(
        own.values(), weight, offsets, mode="sum", sparse=True, per_sample_weights=weights, include_last_offset=True
    )


def _train_unsharded(tables: list[TinyTable], config: OptimizerConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = TinyModel(tables, torch.device("cpu"))
    initialize_tables(model, SEED)
    bags = model.embedding_bag_collection.embedding_bags
    weights, settings = list(bags.parameters()), config.sparse
    by_rows = settings.name == "rowwise_adagrad"
    sparse: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(weights, lr=settings.lr),
        "rowwise_adagrad": lambda: RowWiseAdagrad(weights, lr=settings.lr, eps=settings.eps),
        "adam": lambda: torch.optim.SparseAdam(weights, lr=settings.lr, eps=settings.eps),
    }[settings.name]()
    dense = torch.optim.SGD(model.over.parameters(), lr=config.dense.lr)
    losses = []
    for features, labels in batches(tables, NUM_STEPS):
        sparse.zero_grad()
        dense.zero_grad()
        pooled = [_pool(bags[t.name].weight, features, f, t.pooling) for t in tables for f in t.feature_names]
        loss = F.binary_cross_entropy_with_logits(4 * model.over(torch.cat(pooled, dim=1)).squeeze(1), labels)
        loss.backward()
        for weight in weights if by_rows else ():
            weight.grad = weight.grad.to_dense()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses


def _train_sharded(
    rank: int, tables: list[TinyTable], config: OptimizerConfig, comms: CommsConfig, leave_out: bool = False
) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, steps = build(rank, tables, config, comms, seed=SEED)
    losses = []
    for features, labels in batches(tables, NUM_STEPS, rank, dist.get_world_size()):
        steps.zero_grad()
        if leave_out:
            features = leave_out_empty_bags(features, {tables[0].feature_names[0]})
        loss, _ = model(features, labels)
        loss.backward()
        steps.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return full_weights(model), losses


def _differences(rank: int, cases: list[Case]) -> dict[Case, float]:
    found = {}
    for optimizer, pooling, path in cases:
        # Row-wise states of a part of the columns are not those of whole rows.
        kinds = tuple(kind for kind in KINDS if (optimizer, kind) != ("rowwise_adagrad", "column_wise"))
        tables, config = _tables(kinds, pooling), _config(optimizer)
        sharded = _train_sharded(rank, tables, config, CommsConfig(shared_memory=path == "shared_memory"))
        found[optimizer, pooling, path] = distance(sharded, _train_unsharded(tables, config))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(2, [("rowwise_adagrad", "sum", "shared_memory"), ("adam", "mean", "gloo")], id="2_ranks"),
        pytest.param(1, ALL_CASES, id="1_rank_all", marks=pytest.mark.campaign),
        pytest.param(2, ALL_CASES, id="2_ranks_all", marks=pytest.mark.campaign),
    ],
)
def test_weighted_bags_train_sharded_as_plain_torch_trains_them(
    ranks: RankPool, num_ranks: int, cases: list[Case]
) -> None:
    found = ranks.run(num_ranks, _differences, cases)[0]
    for case, difference in found.items():
        print(f"{num_ranks} rank(s), {' '.join(case):36s} differs by {difference:.1e}")
    assert max(found.values()) < 1e-6


def _special_ways(rank: int) -> list[float]:
    """One table on one rank is one lookup; bags without ids are left out on two."""
    if dist.get_world_size() == 1:
        whole, config = _tables(("table_wise",), "sum"), _config("adam")
        sharded = _train_sharded(rank, whole, config, CommsConfig())
        return [distance(sharded, _train_unsharded(whole, config))]
    left_out, config = _tables(("row_wise", "table_wise"), "mean"), _config("sgd")
    sharded = _train_sharded(rank, left_out, config, CommsConfig(), leave_out=True)
    return [distance(sharded, _train_unsharded(left_out, config))]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_lookup_of_all_and_batches_without_empty_bags_have_weights_too(ranks: RankPool, num_ranks: int) -> None:
    assert max(ranks.run(num_ranks, _special_ways)[0]) < 1e-6


def _by_hand(rank: int) -> list[list[float]]:
    """Row r of the table is [r, r, r, r]."""
    pooled = []
    for kind in KINDS:
        for pooling in ("sum", "mean"):
            rows = lambda weight: weight.copy_(torch.arange(len(weight)).unsqueeze(1).expand_as(weight))  # noqa: E731
            table = TinyTable("t", kind, pooling, embedding_dim=4, init=rows, weighted=True)
            model, _ = build(rank, [table], _config("sgd"))
            # Bags {2: .5, 10: -1, 10: 3}, {}, {7: 0} and {4: -2}.
            ids, lengths = torch.tensor([2, 10, 10, 7, 4]), torch.tensor([3, 0, 1, 1], dtype=torch.int32)
            features = KeyedJaggedTensor(["f_t"], ids, torch.tensor([0.5, -1.0, 3.0, 0.0, -2.0]), lengths=lengths)
            with torch.no_grad():
                looked_up = model.module.embedding_bag_collection(features)["f_t"]
            trained = model.module.embedding_bag_collection(features)["f_t"]
            assert torch.equal(looked_up, trained.detach())
            pooled.append(looked_up[:, 0].tolist())
    return pooled


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sums_and_means_are_those_computed_by_hand(ranks: RankPool, num_ranks: int) -> None:
    total = 0.5 * 2 - 1 * 10 + 3 * 10  # 21
    for pooled in ranks.run(num_ranks, _by_hand):
        for sums, means in zip(pooled[::2], pooled[1::2], strict=True):
            assert sums == [total, 0.0, 0.0, -8.0]
            assert means == [total / 3, 0.0, 0.0, -8.0]  # by the number of ids, as FBGEMM has it, not by 2.5
