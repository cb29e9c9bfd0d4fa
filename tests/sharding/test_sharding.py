"""A sharded step equals the unsharded step, whatever the plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig, LRSchedule, ScheduleConfig
from pipeline.embeddings.collection import Normal, Uniform
from pipeline.sharding.torchrec.sharding import shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.exchange_paths import PATHS, PathPool
from tests.support.ranks import RankPool
from tests.training.tiny import TinyModel, TinyTable, batches, build, context, full_weights, plan_of
from tests.training.tiny_training import distance, train_sharded, train_unsharded

TOLERANCE = 1e-5
ON_ONE_HOST = ["table_wise", "row_wise", "column_wise", "table_column_wise", "data_parallel"]
ON_TWO_HOSTS = ["table_row_wise", "grid_shard"]
BY_COLUMNS = {"column_wise", "table_column_wise", "grid_shard"}
LR = {"sgd": 8.0, "adagrad": 0.1, "rowwise_adagrad": 0.1}


def optimizer_config(name: str) -> OptimizerConfig:
    return OptimizerConfig(SparseOptimizerConfig(name, lr=LR[name]), DenseOptimizerConfig("adam", lr=0.01))


def alone(kind: str, pooling: str) -> list[TinyTable]:
    """Two tables of one type and pooling, one of them under two features."""
    return [TinyTable("a", kind, pooling), TinyTable("b", kind, pooling, ("b1", "b2"), num_embeddings=31)]


def mix(kinds: list[str]) -> list[TinyTable]:
    """Every type with both poolings in one collection; the first is under two features."""
    shared = TinyTable("shared", kinds[0], "mean", ("s1", "s2"))
    return [shared, *(TinyTable(f"{kind}_{pooling}", kind, pooling) for pooling in ("sum", "mean") for kind in kinds)]


def distances(
    rank: int, suites: dict[str, list[TinyTable]], config: OptimizerConfig, local_size: int
) -> dict[str, tuple[float, float]]:
    found = {}
    for name, tables in suites.items():
        sharded = train_sharded(rank, tables, config, local_size=local_size)
        weights, losses, moved = train_unsharded(tables, config)
        found[name] = (distance(sharded, (weights, losses)), moved)
    return found


def check(found: dict[str, tuple[float, float]]) -> None:
    for name, (difference, moved) in found.items():
        print(f"{name:28s} differs by {difference:.1e}, the least-moved table moved by {moved:.2f}")
    for name, (difference, moved) in found.items():
        assert moved > 0.02, f"{name}: too little training to tell"
        assert difference < TOLERANCE, f"{name} differs by {difference}"


@pytest.mark.parametrize(
    ("optimizer", "path"),
    [
        ("sgd", "shared_memory"),
        ("rowwise_adagrad", "gloo"),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (("adagrad", "gloo"), ("rowwise_adagrad", "shared_memory"))
        ),
    ],
)
def test_sharded_steps_equal_unsharded_steps(ranks: RankPool, optimizer: str, path: str) -> None:
    kinds = [kind for kind in ON_ONE_HOST if optimizer != "rowwise_adagrad" or kind not in BY_COLUMNS]
    suites = {f"{kind} {pooling}": alone(kind, pooling) for kind in kinds for pooling in ("sum", "mean")}
    suites["mix"] = mix(kinds)
    check(PathPool(ranks, PATHS[path]).run(2, distances, suites, optimizer_config(optimizer), 0)[0])


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.campaign), "rowwise_adagrad"])
def test_steps_sharded_over_two_hosts_equal_unsharded_steps(ranks: RankPool, optimizer: str) -> None:
    kinds = [kind for kind in ON_TWO_HOSTS if optimizer != "rowwise_adagrad" or kind not in BY_COLUMNS]
    suites = {f"{kind} {pooling}": alone(kind, pooling) for kind in kinds for pooling in ("sum", "mean")}
    suites["mix"] = mix([*kinds, "table_wise", "row_wise", "data_parallel"])
    check(ranks.run(4, distances, suites, optimizer_config(optimizer), 2, local_world_size=2)[0])


def distance_with_schedule_and_clipping(rank: int) -> tuple[float, float]:
    tables, config = mix(["table_wise", "row_wise", "data_parallel"]), optimizer_config("rowwise_adagrad")
    schedule = ScheduleConfig(LRSchedule("poly", 2, 2, 6), LRSchedule("cosine", 3, 3, 4))
    sharded = train_sharded(rank, tables, config, schedule=schedule, clip=0.05)
    weights, losses, _ = train_unsharded(tables, config, schedule, clip=0.05)
    unclipped, other_losses, _ = train_unsharded(tables, config, schedule)
    return distance(sharded, (weights, losses)), distance(sharded, (unclipped, other_losses))


def test_schedules_and_gradient_clipping_act_as_they_do_unsharded(ranks_each_way: RankPool) -> None:
    difference, from_unclipped = ranks_each_way.run(2, distance_with_schedule_and_clipping)[0]
    print(f"differs by {difference:.1e} from the unsharded one, by {from_unclipped:.1e} from one without clipping")
    assert difference < TOLERANCE < from_unclipped


def first_tables(kinds: list[str]) -> list[TinyTable]:
    """By Philox, and by an init_fn of other code."""
    inits = (Uniform(0.5), Normal(0.5), None)
    return [
        TinyTable(f"t{i}", kind, num_embeddings=5000, init=init)
        for i, (kind, init) in enumerate(zip(kinds, inits, strict=True))
    ]


def first_weights(rank: int, kinds: list[str], seed: int) -> dict[str, torch.Tensor]:
    tables = first_tables(kinds)
    torch.manual_seed(rank)  # the caller's random state must not matter, nor differ afterwards
    before = torch.get_rng_state()
    model, _ = build(rank, tables, optimizer_config("sgd"), seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    return full_weights(model)


@pytest.mark.long
def test_first_weights_depend_on_the_seed_and_not_on_plan_or_world_size(ranks: RankPool) -> None:
    by_table = ranks.run(2, first_weights, ["table_wise", "table_wise", "table_wise"], 5)[0]
    by_row = ranks.run(2, first_weights, ["row_wise", "column_wise", "data_parallel"], 5)[1]
    on_one = ranks.run(1, first_weights, ["row_wise", "column_wise", "data_parallel"], 5)[0]
    other_seed = ranks.run(1, first_weights, ["row_wise", "column_wise", "data_parallel"], 6)[0]
    unsharded = TinyModel(first_tables(["table_wise"] * 3), torch.device("cpu"))
    initialize_tables(unsharded, 5)
    for name, weight in unsharded.state_dict().items():
        assert all(torch.equal(weight, weights[name]) for weights in (by_table, by_row, on_one)), name
    for i in range(3):
        name = f"embedding_bag_collection.embedding_bags.t{i}.weight"
        assert not torch.equal(by_row[name], other_seed[name])
        assert len(by_row[name].unique(dim=0)) == 5000, "rows repeat"


def dense_layers_on_meta(rank: int) -> list[torch.Tensor]:
    tables = [TinyTable("a"), TinyTable("b", "row_wise")]
    model = TinyModel(tables)
    model.over = torch.nn.Sequential(torch.nn.Linear(16, 8, device="meta"), torch.nn.Linear(8, 1, device="meta"))
    apply_sparse_optimizer(model, optimizer_config("sgd").sparse)
    torch.manual_seed(100 + rank)
    sharded = shard_model(model, plan_of(model, tables), CommsConfig(), context(rank), seed=4)
    return [weight.detach().clone() for name, weight in sharded.named_parameters() if "over" in name]


def test_dense_layers_on_meta_are_drawn_from_the_seed_alike_on_all_ranks(ranks: RankPool) -> None:
    on_two, on_one = ranks.run(2, dense_layers_on_meta), ranks.run(1, dense_layers_on_meta)
    torch.manual_seed(4)
    expected = torch.nn.Linear(16, 8)
    assert torch.equal(on_two[0][0], expected.weight)
    for one, other, alone_weight in zip(on_two[0], on_two[1], on_one[0], strict=True):
        assert torch.equal(one, other) and torch.equal(one, alone_weight)


def trained_digest(rank: int) -> list[torch.Tensor]:
    kinds = ["table_wise", "row_wise", "data_parallel"]
    return list(train_sharded(rank, mix(kinds), optimizer_config("rowwise_adagrad"))[0].values())


def test_the_same_seed_trains_to_the_same_bits_twice(ranks: RankPool) -> None:
    first, second = ranks.run(2, trained_digest)[0], ranks.run(2, trained_digest)[1]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def skipped_step_then_trained(rank: int) -> bool:
    """What a non-finite loss does under `skip`: a backward that touches no parameter."""
    tables = mix(["table_wise", "row_wise", "data_parallel"])
    model, optimizer = build(rank, tables, optimizer_config("rowwise_adagrad"))
    moved = []
    for step, (features, labels) in enumerate(batches(tables, 4, rank, dist.get_world_size())):
        before = full_weights(model)
        optimizer.zero_grad()
        loss, _ = model(features, labels)
        loss = torch.zeros(()).requires_grad_() if step in (0, 2) else loss
        loss.backward()
        optimizer.step()
        after = full_weights(model)
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
    return moved == [False, True, False, True]


def test_a_step_whose_backward_touches_nothing_changes_nothing_and_training_goes_on(ranks_each_way: RankPool) -> None:
    assert ranks_each_way.run(2, skipped_step_then_trained) == [True, True]
