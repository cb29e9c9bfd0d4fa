"""Bags without ids that are not sent: training stays the same, whatever the plan, and bytes fall."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.wiretap import wiretap
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig, all_optimizers
from pipeline.config.training import CommsConfig
from pipeline.extras.frequency_split.variable_batches import leave_out_empty_bags, takes_variable_batches
from tests.support.ranks import RankPool
from tests.training.tiny import TinyModel, TinyTable, batches, build, full_weights
from tests.training.tiny_training import NUM_STEPS, SEED, distance, train_unsharded

ON_ONE_HOST = ["table_wise", "row_wise", "column_wise", "data_parallel"]
FP16 = CommsConfig("fp16", "fp16")


def without_empty(
    tables: list[TinyTable], num_steps: int, rank: int
) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
    """Every other table's empty bags are left out."""
    names = {feature for table in tables[::2] for feature in table.feature_names}
    for features, labels in batches(tables, num_steps, rank, dist.get_world_size()):
        yield leave_out_empty_bags(features, names), labels


def difference(
    rank: int, kinds: list[str], optimizer: str, comms: CommsConfig | None = None, local_size: int = 0
) -> float:
    """Of 5 steps with empty bags left out from 5 unsharded steps with all bags: largest of weights and losses."""
    config = OptimizerConfig(SparseOptimizerConfig(optimizer, lr=0.1), DenseOptimizerConfig("adam", lr=0.01))
    both = chain.from_iterable((kind, kind) for kind in kinds)
    tables = [
        TinyTable(f"t{index}", kind, pooling, (f"a{index}", f"b{index}") if index % 3 else ())
        for index, (kind, pooling) in enumerate(zip(both, ["sum", "mean"] * len(kinds), strict=True))
    ]
    tables = sorted(tables, key=lambda table: table.pooling)
    model, steps = build(rank, tables, config, comms, local_size, SEED)
    losses = []
    for features, labels in without_empty(tables, NUM_STEPS, rank):
        steps.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        steps.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return distance((full_weights(model), losses), train_unsharded(tables, config)[:2])


def differences(rank: int) -> tuple[float, float]:
    return difference(rank, ON_ONE_HOST, "adagrad"), difference(rank, ["row_wise", "table_wise"], "sgd", FP16)


def test_training_does_not_notice_that_empty_bags_are_left_out(ranks: RankPool) -> None:
    exact, fp16_on_the_wire = ranks.run(2, differences)[0]
    assert exact < 1e-6
    assert 1e-6 < fp16_on_the_wire < 1e-2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_hosts_of_two_ranks_do_not_notice_that_empty_bags_are_left_out(ranks: RankPool, kind: str) -> None:
    """TorchRec has had grid_shard's part of it since 1.9."""
    assert ranks.run(4, difference, [kind, "table_wise"], "sgd", None, 2, local_world_size=2)[0] < 1e-6


def fbgemm_refuses_variable_batches(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    try:
        lookup._generate_vbe_metadata(torch.tensor([0, 1]), [[1]])
    except AssertionError:
        return True
    return False


def test_a_gpu_pads_exactly_the_optimizers_whose_variable_batches_fbgemm_refuses() -> None:
    lookup = SplitTableBatchedEmbeddingBagsCodegen([(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)])
    assert not takes_variable_batches(lookup)
    lookup.use_cpu = False  # of a GPU, only this flag and the optimizer's kind matter here
    refused = set()
    for name, entry in all_optimizers().items():
        if entry.fbgemm:
            lookup.optimizer = EmbOptimType[entry.fbgemm]
            assert takes_variable_batches(lookup) is not fbgemm_refuses_variable_batches(lookup), name
            refused |= set() if takes_variable_batches(lookup) else {name}
    assert refused == {"adagrad", "partial_rowwise_adam", "lamb"}


def sent_bytes(rank: int, kind: str, share_filled: float) -> tuple[int, int]:
    """Bytes that this rank gives to collectives in a step without the bags that are empty, and with them."""
    table = TinyTable("t", kind, embedding_dim=16)
    config = OptimizerConfig(SparseOptimizerConfig("sgd"), DenseOptimizerConfig("sgd"))
    lengths = (torch.rand(512, generator=torch.Generator().manual_seed(rank)) < share_filled).int()
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    features = KeyedJaggedTensor(["f_t"], ids, lengths=lengths)
    counted = []
    for one in (leave_out_empty_bags(features, ["f_t"]), features):
        # TorchRec's collectives are made for one kind of batch.
        model, _ = build(rank, [table], config, CommsConfig(shared_memory=False))
        with wiretap() as sent:
            model(one, torch.zeros(512))[0].backward()
        counted.append(sum(sent.values()))
    return counted[0], counted[1]


def all_sent_bytes(rank: int) -> dict[str, tuple[int, int]]:
    return {kind: sent_bytes(rank, kind, 0.1) for kind in ("table_wise", "row_wise")}


def test_a_tenth_of_the_bags_is_a_tenth_of_the_bytes(ranks: RankPool) -> None:
    on_ranks = ranks.run(2, all_sent_bytes)
    for kind in on_ranks[0]:
        few, all_bags = (sum(found[kind][i] for found in on_ranks) for i in (0, 1))
        assert 0.08 < few / all_bags < 0.17, (kind, few, all_bags)


def test_unsharded_collections_read_what_is_left() -> None:
    tables = [TinyTable("a"), TinyTable("b", pooling="mean")]
    model = TinyModel(tables, torch.device("cpu"))
    features, _ = next(batches(tables, 1))
    left = leave_out_empty_bags(features, ["f_a", "f_b"])
    assert left.lengths().numel() < features.lengths().numel()
    assert torch.equal(left.values(), features.values())
    expected, got = (model.embedding_bag_collection(one) for one in (features, left))
    for key in ("f_a", "f_b"):
        assert torch.equal(got[key], expected[key])
