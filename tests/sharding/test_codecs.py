"""Quantized collectives: what is on the wire, and how exact what arrives is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.wiretap import Kind, wiretap
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.limits import check_batch_fits_comms, describe_comms
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import PlanError
from pipeline.sharding.torchrec.sharding import make_codecs
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.training.tiny import TinyTable, batches, build
from tests.training.tiny_training import distance, train_sharded

SGD = OptimizerConfig(SparseOptimizerConfig("sgd", lr=8.0), DenseOptimizerConfig("sgd", lr=0.1))
BATCH_SIZE, DIM, NUM_FEATURES = 64, 16, 2
VALUES = BATCH_SIZE // 2 * NUM_FEATURES * DIM  # pooled values of one rank of two
# The largest relative error of a value (of its row of 32, for int8) at each precision.
PRECISION = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 2**-8}


def of_values(sent: Counter[Kind]) -> dict[tuple[str, torch.dtype], int]:
    """Bytes by (collective, dtype), ids and lengths left out."""
    return {(kind.collective, kind.dtype): count for kind, count in sent.items() if not kind.is_ids}


def one_step(
    rank: int, kind: str, comms: CommsConfig
) -> tuple[torch.Tensor, dict[tuple[str, torch.dtype], int], dict[tuple[str, torch.dtype], int]]:
    """(pooled embeddings, bytes by collective and dtype forward, and backward) of this rank."""
    tables = [TinyTable("a", kind, embedding_dim=DIM), TinyTable("b", kind, embedding_dim=DIM)]
    model, _ = build(rank, tables, SGD, comms)
    features, _ = next(batches(tables, 1, rank, dist.get_world_size(), BATCH_SIZE))
    with wiretap() as forward:
        pooled = model.module.embedding_bag_collection(features)
        values = torch.cat([pooled[key] for key in ("f_a", "f_b")], dim=1)
    with wiretap() as backward:
        (values * torch.linspace(-1, 1, values.shape[1])).sum().backward()
    assert not any(kind.in_backward for kind in forward)
    assert all(kind.in_backward for kind in backward)
    return values.detach(), of_values(forward), of_values(backward)


def bytes_of(sent: dict[tuple[str, torch.dtype], int], dtype: torch.dtype) -> int:
    return sum(count for (_, used), count in sent.items() if used == dtype)


ON_THE_WIRE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
BYTES_A_VALUE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": (32 + 8) / 32}


def all_steps(rank: int, kind: str, configs: list[CommsConfig]) -> list[Any]:
    return [one_step(rank, kind, comms) for comms in configs]


@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_all_to_all_carries_each_precision_and_no_more_bytes_than_it_needs(ranks: RankPool, kind: str) -> None:
    precisions = list(ON_THE_WIRE)
    found = ranks.run(2, all_steps, kind, [CommsConfig(name, name, shared_memory=False) for name in precisions])[0]
    exact = found[0][0]
    for name, (values, forward, backward) in zip(precisions, found, strict=True):
        error = float((values - exact).abs().max() / exact.abs().max())
        print(f"{kind} {name}: {forward}, {backward}, largest error {error:.1e} of the largest value")
        for sent in (forward, backward):
            assert bytes_of(sent, ON_THE_WIRE[name]) == VALUES * BYTES_A_VALUE[name]
            assert sum(sent.values()) == VALUES * BYTES_A_VALUE[name]
        assert error <= PRECISION[name]
        assert (error > 0) == (name != "fp32")


def test_reduce_scatter_gets_fp16_for_int8_and_bf16_for_bf16(ranks: RankPool) -> None:
    asked = ["fp32", "fp16", "bf16", "int8"]
    found = ranks.run(2, all_steps, "row_wise", [CommsConfig(name, name, shared_memory=False) for name in asked])[0]
    for name, (values, forward, backward) in zip(asked, found, strict=True):
        got = "fp16" if name == "int8" else name
        error = float((values - found[0][0]).abs().max() / found[0][0].abs().max())
        print(f"row_wise {name}: {forward}, {backward}, largest error {error:.1e} of the largest value")
        assert {dtype for _, dtype in forward} == {dtype for _, dtype in backward} == {ON_THE_WIRE[got]}
        assert bytes_of(forward, ON_THE_WIRE[got]) == 2 * VALUES * BYTES_A_VALUE[got]  # its part for every rank
        assert bytes_of(backward, ON_THE_WIRE[got]) == VALUES * BYTES_A_VALUE[got]
        assert error <= 3 * PRECISION[got]  # two parts are rounded, and so is their sum


def test_forward_and_backward_precision_are_apart(ranks: RankPool) -> None:
    comms = CommsConfig(forward_precision="bf16", backward_precision="fp32")
    _, forward, backward = ranks.run(2, one_step, "table_wise", comms)[0]
    assert {dtype for _, dtype in forward} == {torch.bfloat16}
    assert {dtype for _, dtype in backward} == {torch.float32}


def trained_distance(rank: int, tables: list[TinyTable], precisions: list[str], local_size: int) -> dict[str, float]:
    exact = train_sharded(rank, tables, SGD, local_size=local_size)
    return {
        name: distance(train_sharded(rank, tables, SGD, CommsConfig(name, name), local_size), exact)
        for name in precisions
    }


# Weights and losses are of order 1: fp16 keeps 11 bits of a value, bf16 and int8 (of a row's range) 8.
BOUNDS = {"fp16": 5e-4, "bf16": 4e-3, "int8": 4e-3}


def test_training_over_quantized_comms_stays_within_their_precision(ranks: RankPool) -> None:
    kinds = ["table_wise", "row_wise", "column_wise", "data_parallel", "table_column_wise"]
    found = ranks.run(2, trained_distance, [TinyTable(kind, kind) for kind in kinds], list(BOUNDS), 0)[0]
    print(found)
    assert all(0 < difference < BOUNDS[name] for name, difference in found.items()), found


@pytest.mark.campaign
def test_training_over_quantized_comms_between_and_within_hosts_stays_within_their_precision(ranks: RankPool) -> None:
    tables = [TinyTable(kind, kind, "mean") for kind in ("table_row_wise", "grid_shard", "table_wise")]
    found = ranks.run(4, trained_distance, tables, list(BOUNDS), 2, local_world_size=2)[0]
    print(found)
    assert all(0 < difference < BOUNDS[name] for name, difference in found.items()), found


def test_description_says_what_each_collective_got() -> None:
    assert describe_comms(CommsConfig("int8", "fp16")) == {
        "all_to_all": "int8 forward / fp16 backward",
        "reduce_scatter": "fp16 forward / fp16 backward",
        "all_reduce": "fp32",
    }
    assert describe_comms(CommsConfig("bf16", "int8"))["reduce_scatter"] == "bf16 forward / fp16 backward"


def test_fp32_needs_no_codecs() -> None:
    assert make_codecs(CommsConfig()) is None


def int8_table(*sharding_types: str) -> Table:
    return Table("a", 10, 8, ["a"], "sum", "fp32", InitConfig(), ConstraintConfig(list(sharding_types)), [1.0])


def test_batch_that_int8_cannot_cut_into_rows_is_refused_before_the_first_step() -> None:
    int8 = CommsConfig("int8", "fp32")
    with pytest.raises(PlanError, match=names("batch_size=101")):
        check_batch_fits_comms(int8, 101, [int8_table()])
    with pytest.raises(PlanError, match=names("batch_size=6")):
        check_batch_fits_comms(int8, 6, [int8_table("table_wise")])
    with pytest.raises(PlanError, match=names("batch_size=4")):
        check_batch_fits_comms(int8, 4, [int8_table("table_wise", "column_wise")])
    check_batch_fits_comms(int8, 4, [int8_table("table_wise", "row_wise")])  # 4 * 8 is a multiple of 32
    check_batch_fits_comms(int8, 8, [int8_table()])
    check_batch_fits_comms(CommsConfig("fp16", "bf16"), 101, [int8_table()])
