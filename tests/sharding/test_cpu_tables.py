"""The faster backward of CPU tables makes the same tables as FBGEMM's, bit for bit alike on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from pipeline.sharding.torchrec import cpu_tables
from pipeline.sharding.torchrec.cpu_tables import partition_tables, speed_up_cpu_tables
from pipeline.sharding.torchrec.fbgemm_lookups import divide_weights_of_means

ROWS, DIMS = (1, 7, 300, 20_000), (4, 8, 20, 64)
BATCH = 96
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _lookup(
    optimizer: EmbOptimType, pooling: PoolingMode = PoolingMode.SUM, precision: SparseType = SparseType.FP32
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Five features: the last two share the last table."""
    specs = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in zip(ROWS, DIMS, strict=True)]
    lookup = SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        feature_table_map=[0, 1, 2, 3, 3],
        optimizer=optimizer,
        pooling_mode=pooling,
        learning_rate=0.3,
        eps=1e-8,
        weights_precision=precision,
    )
    torch.manual_seed(0)
    for weights in lookup.split_embedding_weights():
        weights.copy_(torch.randn_like(weights.float()))
    return lookup


def _inputs(most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags of 0 to `most` ids, rows drawn so that many recur."""
    torch.manual_seed(seed)
    features = [*ROWS, ROWS[-1]]
    lengths = torch.randint(0, most + 1, (len(features), BATCH))
    ids = [
        (torch.rand(int(count)) ** 4 * rows).long() for count, rows in zip(lengths.sum(dim=1), features, strict=True)
    ]
    return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])


def _train(
    lookup: SplitTableBatchedEmbeddingBagsCodegen, most: int, num_steps: int = 4, weighted: bool = False
) -> list[torch.Tensor]:
    """Pooled outputs, then tables and states."""
    outputs = []
    for seed in range(num_steps):
        ids, offsets = _inputs(most, seed)
        pooled = lookup(ids, offsets, torch.randn(len(ids)) if weighted else None)
        outputs.append(pooled.detach().clone())
        pooled.backward(torch.randn(pooled.shape, generator=torch.Generator().manual_seed(seed)))
    states = [state for table in lookup.split_optimizer_states() for state in table]
    return [*outputs, *lookup.split_embedding_weights(), *states]


@pytest.mark.parametrize("most", [1, 9], ids=["one_hot", "multi_hot"])
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_states_and_outputs_equal_fbgemms(optimizer: str, pooling: PoolingMode, most: int) -> None:
    theirs, ours = (_lookup(OPTIMIZERS[optimizer], pooling) for _ in range(2))
    assert speed_up_cpu_tables([ours]) == 1
    for expected, found in zip(_train(theirs, most), _train(ours, most), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert not torch.equal(
        theirs.split_embedding_weights()[3], _lookup(OPTIMIZERS[optimizer]).split_embedding_weights()[3]
    )


@pytest.mark.parametrize("most", [1, 9], ids=["one_hot", "multi_hot"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sums_of_weighted_ids_equal_fbgemms(optimizer: str, most: int) -> None:
    theirs, ours = (_lookup(OPTIMIZERS[optimizer]) for _ in range(2))
    assert speed_up_cpu_tables([ours]) == 1
    expected, found = (_train(lookup, most, weighted=True) for lookup in (theirs, ours))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert not torch.equal(found[0], _train(_lookup(OPTIMIZERS[optimizer]), most, 1)[0])


@pytest.mark.parametrize("kind", ["fused", "dense"])
def test_a_mean_of_weighted_ids_is_divided_by_their_number_and_so_is_its_gradient(kind: str) -> None:
    """FBGEMM's own backward on CPU does not divide."""
    ids, offsets = torch.tensor([2, 5, 5, 3]), torch.tensor([0, 3, 3, 4])
    weights = torch.tensor([0.5, -1.0, 3.0, 4.0])
    tables: list[torch.Tensor] = []
    for fast in (False, True):
        if kind == "dense":
            lookup = DenseTableBatchedEmbeddingBagsCodegen([(6, 4)], use_cpu=True, pooling_mode=PoolingMode.MEAN)
            table = lookup.weights.data.view(6, 4)
        else:
            spec = (6, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
            lookup = SplitTableBatchedEmbeddingBagsCodegen(
                [spec], optimizer=EmbOptimType.EXACT_SGD, pooling_mode=PoolingMode.MEAN, learning_rate=1.0
            )
            table = lookup.split_embedding_weights()[0]
        table.copy_(torch.arange(6.0).unsqueeze(1).expand(6, 4))
        divide_weights_of_means([lookup])
        speed_up_cpu_tables([lookup] if fast else [])
        pooled = lookup(ids, offsets, weights)
        torch.testing.assert_close(pooled[:, 0].tolist(), [(0.5 * 2 - 5 + 3 * 5) / 3, 0.0, 12.0])
        torch.testing.assert_close(lookup(ids, offsets)[:, 0].tolist(), [4.0, 0.0, 3.0])  # without weights, as ever
        pooled.sum().backward()
        tables.append(-lookup.weights.grad.view(6, 4) if kind == "dense" else table.clone())
    expected = torch.tensor([0.0, 0.0, 0.5 / 3, 4.0, 0.0, 2.0 / 3])
    for table in tables:
        moved = -table[:, 0] if kind == "dense" else torch.arange(6.0) - table[:, 0]
        torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize(("mode", "pooling"), [("sum", PoolingMode.SUM), ("mean", PoolingMode.MEAN)])
def test_gradients_of_fbgemms_dense_lookup_are_torchs_although_torch_warns(mode: str, pooling: PoolingMode) -> None:
    """TorchRec looks replicated tables up by it. `autograd kernel was not registered` is filtered (pipeline.runtime.logs)."""
    lookup = DenseTableBatchedEmbeddingBagsCodegen([(6, 4)], use_cpu=True, pooling_mode=pooling)
    expected = torch.nn.EmbeddingBag.from_pretrained(torch.rand(6, 4), freeze=False, mode=mode)
    lookup.weights.data.copy_(expected.weight.data.view(-1))
    ids, offsets = torch.tensor([2, 5, 5, 3]), torch.tensor([0, 3, 3, 4])
    weights = torch.rand(3, 4)  # of the outputs in the loss
    found = lookup(ids, offsets)
    torch.testing.assert_close(found, expected(ids, offsets[:-1]))
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        (found * weights).sum().backward()
    (expected(ids, offsets[:-1]) * weights).sum().backward()
    torch.testing.assert_close(lookup.weights.grad.view(6, 4), expected.weight.grad)


@pytest.mark.long
@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16])
def test_any_number_of_threads_gives_the_same_bits(precision: SparseType) -> None:
    found = []
    for num_threads in (1, 2, 3, 8):
        torch.set_num_threads(num_threads)
        lookup = _lookup(EmbOptimType.EXACT_ROWWISE_ADAGRAD, precision=precision)
        speed_up_cpu_tables([lookup])
        found.append(_train(lookup, 5, weighted=precision == SparseType.FP16))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp16_tables_stay_within_a_rounding_of_fp32s_a_step(optimizer: str) -> None:
    whole, half = (_lookup(OPTIMIZERS[optimizer], precision=one) for one in (SparseType.FP32, SparseType.FP16))
    for exact, rounded in zip(whole.split_embedding_weights(), half.split_embedding_weights(), strict=True):
        exact.copy_(rounded.float())
    assert speed_up_cpu_tables([whole, half]) == 2
    _train(whole, 5, num_steps=1)
    _train(half, 5, num_steps=1)
    for exact, rounded in zip(whole.split_embedding_weights(), half.split_embedding_weights(), strict=True):
        neighbours = exact.abs().clamp(min=2**-14).log2().floor().sub(10).exp2()  # how far apart
        assert ((rounded.float() - exact).abs() <= neighbours * 1.001).all()


def test_updates_too_small_for_fp16_arrive_in_the_mean_where_fbgemm_loses_them() -> None:
    """100 updates of 1/16 of the distance between neighbours."""
    drifts = []
    for fast in (False, True):
        lookup = _lookup(EmbOptimType.EXACT_SGD, precision=SparseType.FP16)
        table = lookup.split_embedding_weights()[3]
        table.fill_(1.5)
        lookup.set_learning_rate(2.0**-14)
        speed_up_cpu_tables([lookup] if fast else [])
        ids = torch.arange(BATCH).repeat(len(ROWS) + 1) % torch.tensor([*ROWS, ROWS[-1]]).repeat_interleave(BATCH)
        ids[-BATCH:] = 5000 + torch.arange(BATCH)
        for step in range(100):
            if fast:
                lookup.forward.step = step
            lookup(ids, torch.arange(len(ids) + 1)).sum().backward()
        drifts.append(1.5 - float(table[:BATCH].float().mean()))
    assert drifts[0] == 0.0
    assert drifts[1] == pytest.approx(
        100 * 2.0**-14, rel=0.02
    )  # 6,144 rows' numbers: 0.3 % is the mean's own deviation


def test_a_new_learning_rate_is_taken_at_once() -> None:
    lookup = _lookup(EmbOptimType.EXACT_SGD)
    speed_up_cpu_tables([lookup])
    before = lookup.split_embedding_weights()[2].clone()
    lookup.set_learning_rate(0.0)
    _train(lookup, 3)
    assert torch.equal(lookup.split_embedding_weights()[2], before)


def test_what_it_cannot_do_stays_fbgemms() -> None:
    eight = _lookup(EmbOptimType.EXACT_SGD, precision=SparseType.INT8)
    assert speed_up_cpu_tables([eight]) == 0
    learning = _lookup(EmbOptimType.EXACT_SGD)  # the weights of its ids
    speed_up_cpu_tables([learning])
    ids, offsets = _inputs(3, 0)
    weights = torch.ones(len(ids), requires_grad=True)
    learning(ids, offsets, weights).sum().backward()
    assert weights.grad is not None and (weights.grad != 0).any()


def test_an_id_out_of_range_is_still_found() -> None:
    lookup = _lookup(EmbOptimType.EXACT_SGD)
    lookup.bounds_check_mode_int = 0  # fatal
    speed_up_cpu_tables([lookup])
    ids, offsets = _inputs(3, 0)
    ids[-1] = ROWS[-1]
    with pytest.raises(RuntimeError):
        lookup(ids, offsets)


def _units(work: list[int], threads: int, **options: Any) -> list[tuple[int, int, int]]:
    torch.set_num_threads(threads)
    first_ids, dims = torch.tensor([0, *work]).cumsum(0).numpy(), torch.full((len(work),), 16).numpy()
    return [tuple(unit) for unit in partition_tables(first_ids, dims, **options).tolist()]


def test_the_largest_tables_come_first_and_each_once() -> None:
    assert _units([10, 10, 500, 300, 250], 2) == [(2, 0, 1), (3, 0, 1), (4, 0, 1), (0, 0, 1), (1, 0, 1)]


def test_a_table_with_more_than_half_of_a_threads_work_is_split_by_its_rows() -> None:
    work = [60_000, 10_000, 15_000, 15_000]
    assert [unit for unit in _units(work, 2) if unit[0] == 0] == [(0, part, 4) for part in range(4)]
    assert sorted(unit[0] for unit in _units(work, 2)) == [0, 0, 0, 0, 1, 2, 3]
    every = np.array([60_000, 0, 0, 0])
    for whole in (_units(work, 1), _units(work, 2, can_split=False), _units(work, 2, every=every)):
        assert whole == [(0, 0, 1), (2, 0, 1), (3, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
def test_a_split_table_has_the_bits_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, pooling: PoolingMode
) -> None:
    torch.set_num_threads(2)
    whole, split = (_lookup(OPTIMIZERS[optimizer], pooling) for _ in range(2))
    assert speed_up_cpu_tables([whole, split]) == 2
    expected = _train(whole, 9)
    units: list[list[int]] = []
    monkeypatch.setattr(cpu_tables, "MIN_UNIT", 1)
    monkeypatch.setattr(cpu_tables, "SHARES", 20)
    kept = partition_tables
    monkeypatch.setattr(
        cpu_tables, "partition_tables", lambda *a, **k: units.extend((u := kept(*a, **k)).tolist()) or u
    )
    assert all(torch.equal(one, two) for one, two in zip(expected, _train(split, 9), strict=True))
    assert {parts for _, _, parts in units} == {4, 8, 32}


@pytest.mark.parametrize(("most", "num_shares"), [(1, 1), (39, 3)], ids=["one_hot", "multi_hot"])
def test_a_batch_of_many_ids_is_looked_up_in_shares(
    monkeypatch: pytest.MonkeyPatch, most: int, num_shares: int
) -> None:
    """Of 96 samples, which are not worth a second thread with an id each."""
    torch.set_num_threads(2)
    lookup, found = _lookup(EmbOptimType.EXACT_SGD), []
    speed_up_cpu_tables([lookup])
    kept = cpu_tables.on_all_threads

    def noted(kernel: Any, arguments: Any, count: int, least_share: int) -> bool:
        found.append(max(count // least_share, 1))
        return kept(kernel, arguments, count, least_share)

    monkeypatch.setattr(cpu_tables, "on_all_threads", noted)
    lookup(*_inputs(most, 0), None)
    assert found == [num_shares]
