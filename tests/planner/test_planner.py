from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.optimizers import SparseOptimizerConfig, find_optimizer, table_optimizers
from pipeline.config.planner import PlannerConfig
from pipeline.config.tables import ConstraintConfig
from pipeline.config.training import CommsConfig
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.table import ManagedRows, Table
from pipeline.planner import planner
from pipeline.planner.estimator import shard_state_bytes
from pipeline.planner.explain import explain, summarize
from pipeline.planner.hardware import GIB
from pipeline.planner.plan_codec import encode_record, write_plan
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import load_or_search_plan, make_plan
from pipeline.planner.request import PlanRequest, TableOptimizer
from pipeline.runtime.errors import PlanError
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from tests.planner.plans import assert_capacity_kept
from tests.planner.problems import (
    DLRMV2_ROWS,
    DLRMV2_SIZES,
    KAGGLE_ROWS,
    TinyModel,
    make_tables,
    on,
    preset,
    request,
)
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

CONFIG = PlannerConfig(kind="torchrec", plan_file="unused.json")


def kinds_of(record: PlanRecord) -> Counter[str]:
    return Counter(choice.sharding_type for choice in record.tables)


def test_kaggle_on_two_cpu_ranks() -> None:
    asked = request(make_tables(KAGGLE_ROWS, 16), on("cpu", 2, ddr_cap_gb=8.0))
    record = make_plan(CONFIG, asked)
    assert_capacity_kept(record, asked)
    assert len(record.tables) == len(record.plan.plan["sparse.tables"]) == 26
    for choice in record.tables:
        assert choice.compute_kernel == ("dense" if choice.sharding_type == "data_parallel" else "fused")
    assert max(load.cost_ms for load in record.ranks) == record.objective.max_rank_ms > 0
    assert "26" not in summarize(record).split(":")[0] and "2 rank(s) of cpu" in summarize(record)


@pytest.mark.long
def test_dlrmv2_on_sixteen_h100_from_a_machine_without_gpu() -> None:
    tables = make_tables(DLRMV2_ROWS, 128, DLRMV2_SIZES)
    asked = request(tables, on("h100_80gb", 16), batch_size=4096)
    record = make_plan(CONFIG, asked)
    assert_capacity_kept(record, asked)
    placements = {
        str(shard.placement)
        for sharding in record.plan.plan["sparse.tables"].values()
        if sharding.sharding_spec
        for shard in sharding.sharding_spec.shards
    }
    assert placements <= {f"rank:{rank}/cuda:{rank % 8}" for rank in range(16)} and "rank:9/cuda:1" in placements
    assert record.objective.max_rank_ms == pytest.approx(2.191, abs=0.001)  # where TorchRec's walk ends
    assert record.objective.max_rank_ms <= record.objective.critical_path_ms


def test_a_table_is_spread_over_the_hosts_that_nvlink_joins() -> None:
    """table_row_wise keeps a table's rows within a domain; a placement names the GPU by its number on its host."""
    tables = make_tables([40_000_000, 40_000_000], 128, sharding=ConstraintConfig(["table_row_wise"]))
    asked = request(tables, on("gb300", 32, hosts_per_nvlink_domain=4), batch_size=4096)
    for kind in ("torchrec", "search"):
        record = make_plan(replace(CONFIG, kind=kind), asked)
        for sharding in record.plan.plan["sparse.tables"].values():
            placements = [str(shard.placement) for shard in sharding.sharding_spec.shards]
            first = sharding.ranks[0]
            assert first in (0, 16)
            assert placements == [f"rank:{rank}/cuda:{rank % 4}" for rank in range(first, first + 16)]
    on_hosts = make_plan(CONFIG, request(tables, on("h100_80gb", 16)))
    assert "hosts_per_nvlink_domain" not in on_hosts.fingerprint["topology"]


@pytest.mark.parametrize("hbm_cap_gb", [8.0, 9.0, 12.0, 40.0])
def test_capacity_is_never_exceeded(hbm_cap_gb: float) -> None:
    tables = make_tables([4_000_000, 3_000_000, 2_000_000, 500_000, 1000], 256, [3, 1, 20, 2, 1])
    asked = request(tables, on("h100_80gb", 2, hbm_cap_gb=hbm_cap_gb, ddr_cap_gb=16.0), "adagrad")
    record = make_plan(CONFIG, asked)
    assert_capacity_kept(record, asked)
    in_host_memory = [choice for choice in record.tables if "uvm" in choice.compute_kernel]
    assert bool(in_host_memory) == (hbm_cap_gb < 12)  # 18.1 GiB of weights and state
    assert all(mentions(choice.reason, "host memory HBM") for choice in in_host_memory)


def test_memory_kept_free_and_the_dense_part_lower_what_tables_may_take() -> None:
    tables = make_tables([1000], 16)
    model = TinyModel(tables, num_dense=1000)
    record = make_plan(
        PlannerConfig(kind="torchrec", plan_file="unused.json", reserved_memory_fraction=0.25),
        request(tables, on("cpu", 1, ddr_cap_gb=1.0), model=model),
    )
    assert record.usable_ddr_bytes == 0.75 * GIB - 6 * 4 * (1000 * 1000 + 1000)
    with pytest.raises(PlanError, match=names("22.91")):
        make_plan(CONFIG, request(tables, on("cpu", 1, ddr_cap_gb=0.025), model=model))


@pytest.mark.long
def test_tables_that_fit_nowhere_are_named_with_sizes_and_ways_out() -> None:
    tables = make_tables(sorted(DLRMV2_ROWS, reverse=True)[:8], 128)
    with pytest.raises(PlanError) as caught:
        make_plan(CONFIG, request(tables, on("a100_40gb", 2, ddr_cap_gb=20.0), "adagrad"))
    text = str(caught.value)
    assert mentions(text, "194.61")
    assert mentions(text, "a100_40gb 100.72")
    assert mentions(text, "t0 38.15 t1")
    assert mentions(text, "39.25 HBM") and mentions(text, "20.00")
    assert "best attempt: rank" in text and "of HBM" in text
    assert mentions(text, "tables.t0 40,000,000")


def test_a_table_too_large_for_its_only_sharding_type_is_named() -> None:
    limited = make_tables([3_000_000], 128, sharding=ConstraintConfig(["table_wise"]))
    with pytest.raises(PlanError) as caught:
        make_plan(CONFIG, request(limited, on("cpu", 4, ddr_cap_gb=1.0)))
    assert mentions(str(caught.value), "t0 table_wise 1.44 0.85")
    assert mentions(str(caught.value), "row_wise tables.t0.sharding.sharding_types")
    with pytest.raises(PlanError) as caught:  # where there is nothing to spread over, no type helps
        make_plan(CONFIG, request(limited, on("cpu", 1, ddr_cap_gb=1.0)))
    assert "add row_wise" not in str(caught.value) and "tables.default.data_type=fp16: fits" in str(caught.value)
    free = make_tables([3_000_000], 128)
    assert kinds_of(make_plan(CONFIG, request(free, on("cpu", 4, ddr_cap_gb=1.0)))) == {"row_wise": 1}


def with_sharding(tables: list[Table], **limits: ConstraintConfig) -> list[Table]:
    return [Table(**{**vars(table), "sharding": limits.get(table.name, table.sharding)}) for table in tables]


def test_a_tables_own_limits_are_kept() -> None:
    tables = with_sharding(
        make_tables([5000] * 5, 64),
        t0=ConstraintConfig(["row_wise"]),
        t1=ConstraintConfig(["column_wise"], min_partition=16),
        t2=ConstraintConfig(["column_wise"]),
        t3=ConstraintConfig(["data_parallel"]),
        t4=ConstraintConfig([], ["fused_uvm"]),
    )
    record = make_plan(CONFIG, request(tables, on("h100_80gb", 2), "sgd"))
    by_name = {choice.name: choice for choice in record.tables}
    assert [by_name[f"t{index}"].sharding_type for index in range(4)] == [
        "row_wise",
        "column_wise",
        "column_wise",
        "data_parallel",
    ]
    assert len(by_name["t1"].ranks) == 4 and len(by_name["t2"].ranks) == 2
    assert by_name["t4"].compute_kernel == "fused_uvm" and by_name["t4"].ddr_bytes == 5000 * 64 * 4
    assert by_name["t0"].reason == "tables.t0.sharding allows nothing else"


def test_limits_that_leave_nothing_are_refused() -> None:
    tables = make_tables([100], 16, sharding=ConstraintConfig(["data_parallel"], ["fused"]))
    with pytest.raises(PlanError, match=names("t0 ['data_parallel'] fused")):
        make_plan(CONFIG, request(tables, on("cpu", 2)))
    tables = make_tables([100], 16, sharding=ConstraintConfig([], ["fused_uvm"]))
    with pytest.raises(PlanError, match=names("['fused_uvm']")):
        make_plan(CONFIG, request(tables, on("cpu", 2)))


def test_rows_that_are_wider_than_the_kernels_of_a_gpu_are_split_or_refused() -> None:
    wide = make_tables([1000], 4096)
    for ranks in (1, 4):
        with pytest.raises(PlanError, match=names("tables.t0.embedding_dim=4096 cuda 2048 column_wise adagrad")):
            make_plan(CONFIG, request(wide, on("h100_80gb", ranks)))
    (choice,) = make_plan(CONFIG, request(wide, on("h100_80gb", 4), "adagrad")).tables
    assert choice.sharding_type == "column_wise" and len(choice.ranks) > 1
    assert make_plan(CONFIG, request(wide, on("cpu", 1))).tables
    assert make_plan(CONFIG, request(make_tables([1000], 2048), on("h100_80gb", 1))).tables


def test_managed_rows_are_never_behind_a_cache() -> None:
    """Eviction writes them in host memory, where the cache in HBM would not notice."""
    (plain,) = make_tables([3_000_000], 128)
    managed = replace(plain, managed=ManagedRows(plain.name, plain.num_embeddings, 2, "lfu", 4))
    hardware = on("h100_80gb", 1, hbm_cap_gb=1.0, ddr_cap_gb=16.0)

    def kernel_of(table: Table) -> str:
        return make_plan(CONFIG, request([table], hardware)).tables[0].compute_kernel

    assert (kernel_of(plain), kernel_of(managed)) == ("fused_uvm_caching", "fused_uvm")
    asked = replace(managed, sharding=ConstraintConfig([], ["fused_uvm_caching"]))
    with pytest.raises(PlanError, match=names("t0 ['fused_uvm_caching'] fused_uvm managed_collision cache")):
        kernel_of(asked)


def test_column_shards_come_only_with_optimizers_that_do_not_notice_or_on_demand() -> None:
    """Row-wise Adagrad on column shards is another optimizer than on the whole table."""
    hardware = on("h100_80gb", 8)
    tables = make_tables([20_000_000] * 2, 512, [40, 40])
    assert kinds_of(make_plan(CONFIG, request(tables, hardware, "sgd")))["column_wise"] == 2
    assert kinds_of(make_plan(CONFIG, request(tables, hardware)))["column_wise"] == 0
    asked = make_tables([20_000_000], 512, sharding=ConstraintConfig(["column_wise"]))
    (choice,) = make_plan(CONFIG, request(asked, hardware)).tables
    assert choice.sharding_type == "column_wise"
    assert mentions(choice.reason, "rowwise_adagrad")


@pytest.mark.parametrize(
    ("optimizer", "data_type"),
    [
        (TableOptimizer("rowwise_adagrad"), "fp16"),
        (TableOptimizer("lamb"), "fp32"),
    ],
)
def test_no_table_is_replicated_that_could_not_train_so(optimizer: TableOptimizer, data_type: str) -> None:
    tables = make_tables([50, 60], 64, data_type=data_type)
    record = make_plan(CONFIG, request(tables, on("h100_80gb", 2), optimizer=optimizer))
    assert kinds_of(record)["data_parallel"] == 0
    replicable = request(make_tables([50, 60], 64), on("h100_80gb", 2))
    assert kinds_of(make_plan(CONFIG, replicable))["data_parallel"] == 2


def test_one_rank_keeps_all_tables_fused() -> None:
    record = make_plan(CONFIG, request(make_tables(KAGGLE_ROWS, 16), on("h200", 1)))
    assert kinds_of(record) == {"table_wise": 26}


def test_optimizer_state_is_counted_however_the_optimizer_is_given() -> None:
    tables = make_tables([10_000_000], 128, sharding=ConstraintConfig(["table_wise"]))
    plain, attached = TinyModel(tables), TinyModel(tables)
    apply_sparse_optimizer(attached, SparseOptimizerConfig("adam"))
    records = [
        make_plan(CONFIG, request(tables, on("h100_80gb", 2), "adam", model=model, batch_size=1))
        for model in (plain, attached)
    ]
    assert encode_record(records[0]) == encode_record(records[1])
    assert sum(load.hbm_bytes for load in records[0].ranks) / GIB == pytest.approx(14.31, abs=0.01)
    classes = vars(attached.collection.embedding_bags["t0"].weight)["_optimizer_classes"]
    assert [kind.__name__ for kind in classes] == ["Adam"]  # planning leaves the optimizer in place


def test_every_sparse_optimizer_has_its_state_counted() -> None:
    for name in table_optimizers():
        entry = find_optimizer(name)
        assert (entry.state_per_element, entry.state_per_row) != (0, 0) or name == "sgd"
    assert shard_state_bytes("rowwise_adagrad", 1000, 64) == 4000
    assert shard_state_bytes("lamb", 1000, 64) == 2 * 4 * 64 * 1000


def test_pooling_factors_of_the_data_weigh_in() -> None:
    hardware = on("h100_80gb", 2)
    costs = [
        make_plan(
            CONFIG, request(make_tables([10**6] * 2, 128, [size] * 2), hardware, batch_size=65536)
        ).objective.max_rank_ms
        for size in (1, 50)
    ]
    assert costs[1] > 5 * costs[0]


def test_weights_of_ids_cost_time_and_memory() -> None:
    tables = make_tables([10**6], 128, [50], sharding=ConstraintConfig(["table_wise"]))
    weighted = [replace(table, is_weighted=True) for table in tables]
    found = [make_plan(CONFIG, request(each, on("h100_80gb", 2), batch_size=4096)) for each in (tables, weighted)]
    assert found[1].objective.max_rank_ms > found[0].objective.max_rank_ms
    more = sum(load.hbm_bytes for load in found[1].ranks) - sum(load.hbm_bytes for load in found[0].ranks)
    assert more == 2 * 4096 * 50 * 4  # a float32 for each id of both ranks' samples


def test_the_explanation_names_every_choice() -> None:
    record = make_plan(CONFIG, request(make_tables(KAGGLE_ROWS, 64), on("cpu", 2, ddr_cap_gb=8.0)))
    text = explain(record)
    for choice in record.tables:
        assert any(choice.name in line and choice.sharding_type in line for line in text.splitlines())
    assert "slowest rank" in text and "critical path" in text
    many = replace(
        record,
        tables=[replace(record.tables[0], name=f"t{index}") for index in range(60)],
        ranks=[replace(record.ranks[0], rank=rank) for rank in range(64)],
    )
    assert "and 20 smaller tables" in explain(many)
    assert "the fullest, emptiest, slowest and fastest of 64 ranks" in explain(many)


HASH_SEED_SCRIPT = """
import hashlib
from tests.planner.test_planner import *
print(hashlib.sha256(encode_record(make_plan(CONFIG, request_with_ties())).encode()).hexdigest())
"""


def request_with_ties() -> PlanRequest:
    """One column shard costs what the whole table costs, so the order of enumeration decides."""
    sharding = ConstraintConfig(["table_wise", "column_wise", "row_wise", "data_parallel"])
    return request(make_tables(DLRMV2_ROWS[:20], 128, sharding=sharding), on("h100_80gb", 8), "sgd")


@pytest.mark.campaign
def test_the_plan_does_not_depend_on_pythonhashseed() -> None:
    """TorchRec enumerates sets of strings, whose order changes from process to process."""
    asked = request_with_ties()
    here = encode_record(make_plan(CONFIG, asked))
    assert here == encode_record(make_plan(CONFIG, asked))
    # Unsorted, these two seeds give different plans.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HASH_SEED_SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for seed in ("1", "3")
    ]
    hashes = {process.communicate(timeout=300)[0].strip().splitlines()[-1] for process in processes}
    assert hashes == {hashlib.sha256(here.encode()).hexdigest()}


def _plan_on_rank(rank: int, config: PlannerConfig, tables: list[Table], ddr_cap_gb: float) -> tuple[str, list[int]]:
    """What this rank goes by, and the numbers of its table weights after sharding by it."""
    context = init_distributed()
    model = TinyModel(tables)
    apply_sparse_optimizer(model, SparseOptimizerConfig())
    record = load_or_search_plan(
        config,
        preset("cpu", ddr_cap_gb=ddr_cap_gb),
        tables,
        model,
        make_sharders(CommsConfig()),
        optimizer=TableOptimizer("rowwise_adagrad"),
        batch_size=64,
        context=context,
    )
    sharded = shard_model(model, record.plan, CommsConfig(), context, tables=tables)
    assert sharded.plan == record.plan
    held = [weight.numel() for name, weight in sharded.named_parameters() if "tables" in name and weight.numel()]
    return encode_record(record), sorted(held)


def test_all_ranks_shard_by_one_plan_and_its_file_replays_it(ranks: RankPool, tmp_path: Path) -> None:
    tables = with_sharding(
        make_tables([50, 700, 901], 16),
        t0=ConstraintConfig(["data_parallel"]),
        t1=ConstraintConfig(["table_wise"]),
        t2=ConstraintConfig(["row_wise"]),
    )
    searched = ranks.run(2, _plan_on_rank, CONFIG, tables, 1.0)
    assert searched[0][0] == searched[1][0]
    assert sum(searched[0][1]) + sum(searched[1][1]) == 16 * (2 * 50 + 700 + 901)
    path = str(tmp_path / "plan.json")
    asked = request(tables, on("cpu", 2, ddr_cap_gb=1.0), batch_size=64)
    write_plan(path, make_plan(CONFIG, asked))
    assert ranks.run(2, _plan_on_rank, PlannerConfig(kind="file", plan_file=path), tables, 1.0) == searched


def _error_on_rank(rank: int, tables: list[Table]) -> str:
    context = init_distributed()
    try:
        load_or_search_plan(
            CONFIG,
            preset("cpu", ddr_cap_gb=0.01),
            tables,
            TinyModel(tables),
            make_sharders(CommsConfig()),
            optimizer=TableOptimizer("sgd"),
            batch_size=64,
            context=context,
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_the_plan_of_a_run_is_taken_up_where_it_holds_and_the_log_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume must not search what it has: of MLPerf's tables on 16 GPUs that took a minute at each start."""
    caplog.set_level("INFO", logger=planner.logger.name)

    def said() -> str:
        return [text for text in caplog.messages if text.startswith("plan  ")][-1]

    path, asked = str(tmp_path / "plan.json"), request(make_tables([1000, 50, 7], 16), on("cpu", 2, ddr_cap_gb=1.0))
    first = make_plan(CONFIG, asked, path)  # of a run that has none yet
    assert mentions(said(), f"searching again {path}")
    write_plan(path, first)
    searched: list[str] = []
    search = planner.SEARCHERS[CONFIG.kind]
    monkeypatch.setitem(planner.SEARCHERS, CONFIG.kind, lambda *given: (searched.append("again"), search(*given))[1])
    assert encode_record(make_plan(CONFIG, asked, path)) == encode_record(first) and not searched
    assert mentions(said(), f"{path} no search")
    others = {
        "num_embeddings 1000 1001": request(make_tables([1001, 50, 7], 16), on("cpu", 2, ddr_cap_gb=1.0)),
        "world_size 2 4": request(make_tables([1000, 50, 7], 16), on("cpu", 4, ddr_cap_gb=1.0)),
        "batch_size": request(make_tables([1000, 50, 7], 16), on("cpu", 2, ddr_cap_gb=1.0), batch_size=64),
    }
    for number, (why, other) in enumerate(others.items(), start=1):
        assert encode_record(make_plan(CONFIG, other, path)) != encode_record(first)
        assert len(searched) == number and mentions(said(), f"searching again {path} {why}")
    (tmp_path / "plan.json").write_text("{")
    make_plan(CONFIG, asked, path)
    assert len(searched) == 4


def test_an_infeasible_plan_is_the_same_error_on_every_rank(ranks: RankPool) -> None:
    texts = ranks.run(2, _error_on_rank, make_tables([10**6], 16))
    assert texts[0] == texts[1]
    assert mentions(texts[0], "no plan")


def test_planning_allocates_no_table() -> None:
    tables = make_tables([100, 200], 16)
    model = TinyModel(tables)
    make_plan(CONFIG, request(tables, on("cpu", 2), model=model))
    assert all(weight.is_meta for weight in model.collection.parameters())
