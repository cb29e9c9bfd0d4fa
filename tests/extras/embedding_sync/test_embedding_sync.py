"""Tables that each host trains by itself: averaged when due, the same as plain sharding where averaged at every step."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan

from pipeline import devices
from pipeline.checkpoint.tables import flatten
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig, ParallelConfig
from pipeline.devices.base import Device
from pipeline.devices.process_group import init_distributed
from pipeline.extras.embedding_sync import replicas as embedding_sync
from pipeline.extras.embedding_sync.replicas import TableReplicas, average_in_place, replicates
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import build_optimizer
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.training.tiny import TABLES, TinyModel, TinyTable, batches
from tests.training.tiny_training import NUM_STEPS, SEED, train_unsharded

KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise"]
TINY = [TinyTable(f"t_{kind}", kind, pooling) for kind, pooling in zip(KINDS, ["sum", "mean"] * 3, strict=False)]


def _optimizers(name: str) -> OptimizerConfig:
    return OptimizerConfig(
        SparseOptimizerConfig(name, lr=8.0 if name == "sgd" else 0.1), DenseOptimizerConfig("adam", lr=0.01)
    )


def _host_plan(model: TinyModel) -> ShardingPlan:
    """For the two ranks of a host."""
    makers = {
        "table_wise": lambda: sharding_plan.table_wise(rank=1),
        "row_wise": sharding_plan.row_wise,
        "column_wise": lambda: sharding_plan.column_wise(ranks=[1, 0]),
        "data_parallel": sharding_plan.data_parallel,
        "table_row_wise": lambda: sharding_plan.table_row_wise(host_index=0),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        model.get_submodule(TABLES),
        {table.name: makers[table.kind]() for table in TINY},
        sharder=make_sharders(CommsConfig())[0],
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    return ShardingPlan({TABLES: plan})


def _trained(rank: int, optimizer: str, sync: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """This host's weights and optimizer states, whole; the losses; how far replicas were apart after each step."""
    context, config = init_distributed(), _optimizers(optimizer)
    assert replicates(ParallelConfig(sync), context)
    model = TinyModel(TINY)
    apply_sparse_optimizer(model, config.sparse)
    sharded = shard_model(model, _host_plan(model), CommsConfig(), context, seed=SEED, replicated=True)
    steps = build_optimizer(sharded, config)
    replicas = TableReplicas(sharded, steps, ParallelConfig(sync), context)
    losses, apart = [], []
    for step, (features, labels) in enumerate(batches(TINY, NUM_STEPS, rank, 4), start=1):
        steps.zero_grad()
        loss, _ = sharded(features, labels)
        loss.backward()
        steps.step()
        replicas.after_step(step)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / 4)
        apart.append(_distance_between_hosts(sharded.state_dict() | flatten(steps.state_dict())))
        assert replicas.equal == (apart[-1] == 0.0) or not apart[-1]
    return _whole(sharded.state_dict()), losses, apart


def _distance_between_hosts(state: dict[str, object]) -> float:
    """Collective: the largest difference of any number between the hosts' replicas, dense layers among them."""
    parts = []
    for value in flatten(state).values():
        if isinstance(value, ShardedTensor):
            parts += [shard.tensor.detach().float().flatten() for shard in value.local_shards()]
        elif isinstance(value, torch.Tensor):
            parts.append(value.detach().float().flatten())
    flat = torch.cat(parts)
    everyone: list[torch.Tensor] = [flat] * 4
    dist.all_gather_object(everyone, flat)
    mine, other = everyone[dist.get_rank()], everyone[(dist.get_rank() + 2) % 4]
    assert len(mine) == len(other)
    return float((mine - other).abs().max())


def _whole(state: dict[str, object]) -> dict[str, torch.Tensor]:
    """Collective: every tensor of this host, whole."""
    found = {}
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            whole = torch.zeros(value.size())
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole[row : row + rows, column : column + columns] = shard.tensor.detach()
            dist.all_reduce(whole, group=value._process_group)
            found[name] = whole
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach().clone()
    return found


@pytest.mark.long
def test_averaging_at_every_step_equals_the_global_batch(ranks: RankPool) -> None:
    weights, losses, apart = ranks.run(4, _trained, "sgd", "every_1_steps", local_world_size=2)[0]
    expected, expected_losses, moved = train_unsharded(TINY, _optimizers("sgd"))
    difference = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    print(f"differs by {difference:.1e}, the least-moved table moved by {moved:.2f}")
    assert moved > 0.02 and difference < 1e-6 and max(apart) == 0.0
    assert losses == pytest.approx(expected_losses, abs=1e-6)


def test_replicas_are_apart_until_they_are_averaged_state_included(ranks: RankPool) -> None:
    answers = ranks.run(4, _trained, "rowwise_adagrad", "every_3_steps", local_world_size=2)
    assert [one > 1e-3 for one in answers[0][2]] == [True, True, False, True, True]
    assert answers[0][2][2] == 0.0  # bit for bit


@pytest.mark.long
def test_never_averaged_tables_go_their_own_way_and_dense_layers_do_not(ranks: RankPool) -> None:
    answers = ranks.run(4, _trained, "rowwise_adagrad", "never", local_world_size=2)
    one, other = answers[0][0], answers[2][0]
    for name in one:
        if "embedding_bags" in name and "data_parallel" not in name:
            assert float((one[name] - other[name]).abs().max()) > 1e-3, name
        else:
            assert torch.equal(one[name], other[name]), name
    assert all(torch.equal(one[name], answers[1][0][name]) for name in one)  # the other rank of the host


def _averages(rank: int) -> list[float]:
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 10.0 * rank, dtype=torch.float16), torch.zeros(0)]
    average_in_place(tensors, None, 2)
    return [float(tensor.mean()) for tensor in tensors[:2]]


def test_many_tensors_of_several_dtypes_become_their_mean(ranks: RankPool) -> None:
    assert ranks.run(2, _averages) == [[0.5, 5.0]] * 2


class Busy(Device):
    """A device that works for a second after what it was last given, on a clock that stands still meanwhile."""

    device_type, now = "cpu", 0.0

    def synchronize(self) -> None:
        self.now += 1.0


def _seconds(rank: int) -> float:
    replicas = TableReplicas.__new__(TableReplicas)
    replicas._tensors, replicas._group, replicas.num_hosts = [torch.ones(3)], None, 2
    replicas.num_syncs, replicas.payload_bytes, replicas.seconds = 0, 0, 0.0
    with devices.using(busy := Busy()), patch.object(embedding_sync.time, "perf_counter", lambda: busy.now):
        replicas.average()
    return replicas.report()["embedding_sync_s"]


def test_the_time_of_an_average_ends_when_a_gpu_has_done_it(ranks: RankPool) -> None:
    assert ranks.run(2, _seconds) == [1.0] * 2


@pytest.mark.parametrize("text", ["every_step", "every_1_steps", "every_100_steps", "never"])
def test_what_embedding_sync_may_say(text: str) -> None:
    config = ParallelConfig(text)
    assert config.has_replicas == (text != "every_step")
    if config.has_replicas:
        assert config.sync_every_steps == {"every_1_steps": 1, "every_100_steps": 100, "never": 0}[text]


@pytest.mark.parametrize("text", ["every_0_steps", "always", "every: 100", "nevr"])
def test_anything_else_is_refused_with_what_it_may_say(text: str) -> None:
    with pytest.raises(ConfigError, match=names("parallel.embedding_sync every_step every_<n>_steps")):
        ParallelConfig(text)


def _replicates(rank: int, local: int) -> bool:
    return replicates(ParallelConfig("never"), replace(init_distributed(), local_world_size=local))


def test_one_host_has_nothing_to_average_and_uneven_hosts_are_refused(ranks: RankPool) -> None:
    assert ranks.run(2, _replicates, 2) == [False, False]
    assert ranks.run(2, _replicates, 1) == [True, True]
    with pytest.raises(RuntimeError, match=names("2 3")):
        ranks.run(2, _replicates, 3)
