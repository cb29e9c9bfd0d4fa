from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Perf, ShardingOption

from pipeline.config.planner import PlannerConfig
from pipeline.config.tables import SHARDING_TYPES, ConstraintConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Positions, Table, by_position
from pipeline.planner import searcher
from pipeline.planner.cost_model import CostModel, StepPerf, hit_rates, shard_shares, wire_of
from pipeline.planner.estimator import CostedEnumerator
from pipeline.planner.hardware import Hardware, Links, build_topology
from pipeline.planner.planner import explain_misfit, make_plan
from pipeline.planner.request import PlanRequest, build_constraints, place_tables
from pipeline.planner.search.portfolio import search
from pipeline.planner.search.problem import SearchProblem
from pipeline.planner.searcher import PHASES
from pipeline.sharding.torchrec.sharding import make_sharders
from tests.planner.problems import make_tables, on, request

KERNELS = ["fused", "fused_uvm", "fused_uvm_caching", "key_value", "dense"]
Estimates = dict[tuple[str, str, str], np.ndarray]


def requested(tables: list[Table], hardware: Hardware, precision: str = "fp32") -> PlanRequest:
    comms = CommsConfig(forward_precision=precision, backward_precision=precision)
    return replace(request(tables, hardware, "sgd"), sharders=make_sharders(comms))


def enumerator(asked: PlanRequest, corrected: bool | None) -> EmbeddingEnumerator:
    """TorchRec's own for None. Every table may have any sharding type and kernel, and column shards of 64."""
    placed = place_tables(asked.tables, asked.model, asked.sharders)
    constraints = build_constraints(placed, asked.hardware, asked.optimizer)
    for given in constraints.values():
        given.sharding_types, given.compute_kernels, given.min_partition = list(SHARDING_TYPES), list(KERNELS), 64
    topology = build_topology(asked.hardware)
    if corrected is None:
        return EmbeddingEnumerator(topology, asked.batch_size, constraints)
    costs = CostModel(asked.hardware, asked.tables, wire_of(asked.sharders), corrected)
    return CostedEnumerator(topology, asked.batch_size, constraints, "sgd", costs)


def estimates(asked: PlanRequest, corrected: bool | None = True) -> Estimates:
    """(table, sharding type, kernel) -> [shards, phases]."""

    def row(perf: Any) -> list[float]:
        return [getattr(perf, phase) for phase in PHASES.values()]

    options: list[ShardingOption] = enumerator(asked, corrected).enumerate(asked.model, asked.sharders)
    return {
        (option.name, option.sharding_type, option.compute_kernel): np.array([row(s.perf) for s in option.shards])
        for option in options
    }


def with_ssd(hardware: Hardware, gb_per_s: float) -> Hardware:
    """The cost model knows SSD as TorchRec does; no job can ask for it yet."""
    return replace(hardware, ssd_cap_bytes=1000 << 30, ssd_gb_per_s=gb_per_s)


# Each hardware and each precision by default, all pairs as a campaign.
DEFAULT = [("h100_80gb", 16, "fp32"), ("h100_80gb", 64, "int8"), ("a100_80gb", 8, "fp16"), ("cpu", 4, "int8")]
PAIRS = [(name, size, precision) for name, size, _ in DEFAULT for precision in ("fp32", "fp16", "int8")]


@pytest.mark.parametrize(
    ("preset", "world_size", "precision"),
    [pytest.param(*pair, marks=[] if pair in DEFAULT else [pytest.mark.campaign]) for pair in PAIRS],
)
def test_without_the_corrections_all_is_as_torchrec_estimates(preset: str, world_size: int, precision: str) -> None:
    tables = make_tables([101, 70_001, 3], 256, [3, 1, 20]) + make_tables([500], 64, [2], data_type="fp16")
    tables[-1] = replace(tables[-1], name="small", feature_names=["small"], pooling_factors=[0.3])
    # 100 MiB/s, which TorchRec assumes of any SSD.
    hardware = on(preset, world_size)
    asked = requested(tables, hardware if preset == "cpu" else with_ssd(hardware, 0.1048576), precision)
    by_torchrec, by_us = estimates(asked, None), estimates(asked, False)
    assert by_torchrec.keys() == by_us.keys()
    kernels = {kernel for _, _, kernel in by_us}
    assert kernels == ({"dense", "fused"} if preset == "cpu" else set(KERNELS))
    assert {kind for _, kind, _ in by_us} >= set(SHARDING_TYPES) - {"grid_shard"}
    for key, expected in by_torchrec.items():
        np.testing.assert_allclose(by_us[key], expected, rtol=1e-6, err_msg=str(key))


ONE = ("t0", "table_wise", "fused")
IDS, FORWARD, FORWARD_COMMS, BACKWARD, BACKWARD_COMMS = range(5)
# Of 1000 rows the first takes half of the lookups, the first ten 0.9, the first hundred all.
SKEWED = RowFrequencies([0, 1, 10, 100, 1000], [0.0, 0.5, 0.9, 1.0, 1.0])


def test_ids_and_lengths_are_sent_before_the_lookup() -> None:
    """16 ranks hand 1024 samples of 3 ids each to the table's: 8 bytes an id, 4 a length; 8/16 over the network."""
    cost = estimates(requested(make_tables([1000], 128, [3]), on("h100_80gb", 16)))[ONE]
    assert cost[0, IDS] == pytest.approx(16 * 1024 * (3 * 8 + 4) * 8 / 16 / 50e6)


def test_weighted_ids_travel_with_their_weights() -> None:
    asked = requested(make_tables([1000], 128, [3]), on("h100_80gb", 16))
    (option,) = [o for o in enumerator(asked, True).enumerate(asked.model, asked.sharders) if key(o) == ONE]
    costs = CostModel(asked.hardware, asked.tables, wire_of(asked.sharders))
    plain = costs.phases_ms(option)
    option.is_weighted = True
    assert costs.phases_ms(option)[0, IDS] - plain[0, IDS] == pytest.approx(16 * 1024 * 3 * 4 * 8 / 16 / 50e6)


def key(option: ShardingOption) -> tuple[str, str, str]:
    return option.name, option.sharding_type, option.compute_kernel


def test_torchrecs_sums_and_total_take_the_input_along() -> None:
    perf = StepPerf(1.0, 2.0, 3.0, 4.0, 5.0)
    assert perf.total == 15
    for added in (Perf(0, 0, 0, 0) + perf, perf + Perf(0, 0, 0, 0), perf + perf):
        assert isinstance(added, StepPerf) and added.total in (15, 30)


def test_bytes_within_a_host_and_between_hosts_go_their_own_ways() -> None:
    links = Links(16, 8, intra=100.0, inter=10.0, launch_ms=0, intra_hop_ms=0, inter_hop_ms=0)
    whole = np.array([1600.0])
    assert links.all_to_all_ms(whole) == 80  # 800 of 1600 bytes by the network; 700 within the host take 7
    fast = replace(links, inter=1000.0)
    assert fast.all_to_all_ms(whole) == 7
    assert links.ring_ms(whole) == 1500 / 80  # eight ports join the hosts
    assert fast.ring_ms(whole) == 1500 / 100
    assert links.host_ring_ms(whole) == 14 and links.across_hosts_ms(whole) == 80
    alone = replace(links, world_size=1, local_world_size=1)
    assert alone.all_to_all_ms(whole) == alone.ring_ms(whole) == 0
    assert replace(links, world_size=4, local_world_size=1).ring_ms(whole) == 120  # nothing goes over NVLink


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        # 16 ranks x 1024 samples x 128 numbers of 4 bytes, 2 hosts of 8; ms at 450 and 50 GB/s
        ("table_wise", 8388608 / 2 / 50e6, 8388608 / 2 / 50e6),
        ("row_wise", 8388608 * 15 / 16 / 400e6, 8388608 * 15 / 16 / 400e6 + 2.455 * 8388608 / 3350e6),
        (
            "table_row_wise",
            8388608 * 7 / 8 / 450e6 + 1048576 / 2 / 50e6,
            8388608 * 7 / 8 / 450e6 + 1048576 / 2 / 50e6 + 2.455 * 8388608 / 3350e6,
        ),
        ("data_parallel", 0.0, 2 * 512000 * 15 / 16 / 400e6 + 9.22 * 512000 / 1675e6),
    ],
)
def test_each_sharding_type_moves_its_bytes_over_the_links_it_takes(kind: str, forward: float, backward: float) -> None:
    kernel = "dense" if kind == "data_parallel" else "fused"
    cost = estimates(requested(make_tables([1000], 128), on("h100_80gb", 16)))["t0", kind, kernel]
    np.testing.assert_allclose(cost[:, FORWARD_COMMS], forward, rtol=1e-9)
    np.testing.assert_allclose(cost[:, BACKWARD_COMMS], backward, rtol=1e-9)


@pytest.mark.parametrize(("precision", "forward"), [("fp16", 0.5), ("bf16", 0.5), ("int8", 1.25 / 4)])
def test_quantized_collectives_carry_fewer_bytes(precision: str, forward: float) -> None:
    """int8 takes a scale and a bias along; what a reduce-scatter adds up goes as fp16; ids and lengths as they are."""
    plain, quantized = (
        estimates(requested(make_tables([1000], 128), on("h100_80gb", 16), p)) for p in ("fp32", precision)
    )
    assert quantized[ONE][0, FORWARD_COMMS] / plain[ONE][0, FORWARD_COMMS] == pytest.approx(forward)
    row_wise = ("t0", "row_wise", "fused")
    assert quantized[row_wise][0, FORWARD_COMMS] / plain[row_wise][0, FORWARD_COMMS] == pytest.approx(0.5)
    assert quantized[ONE][0, IDS] == plain[ONE][0, IDS]
    replicated = ("t0", "data_parallel", "dense")
    assert (quantized[replicated] == plain[replicated]).all()


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "grid_shard"])
def test_the_shard_of_the_hottest_rows_has_most_lookups_and_ids(kind: str) -> None:
    hardware, name = on("h100_80gb", 16), ("t0", kind, "fused")
    even = make_tables([1600], 128, [50])
    hot = [replace(even[0], frequencies=RowFrequencies([0, 100, 200, 1600], [0.0, 0.75, 1.0, 1.0]))]
    flat, skewed = (estimates(requested(tables, hardware))[name] for tables in (even, hot))
    shards = 16 if kind == "row_wise" else 8
    rows = 1600 // shards
    lookups = np.array([0.75, 0.25] if rows == 100 else [1.0, 0.0])
    assert (flat[:shards] == flat[0]).all()
    outputs = skewed[shards - 1, FORWARD]  # of a shard without lookups: its outputs are sent all the same
    np.testing.assert_allclose(
        skewed[:2, FORWARD] - outputs, lookups * shards * (flat[0, FORWARD] - outputs), rtol=1e-6
    )
    lengths = skewed[shards - 1, IDS]
    np.testing.assert_allclose(skewed[:2, IDS] - lengths, lookups * shards * (flat[0, IDS] - lengths), rtol=1e-6)
    assert (skewed[:, FORWARD_COMMS] == flat[:, FORWARD_COMMS]).all()


def test_hashed_ids_are_hot_but_scattered() -> None:
    scattered = replace(SKEWED, by_row=False)
    first, rows = np.arange(0, 1000, 250), np.full(4, 250)
    assert shard_shares(SKEWED, first, rows, 1000).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert shard_shares(scattered, first, rows, 1000).tolist() == [0.25] * 4
    assert hit_rates(scattered, first, rows, 0.01).tolist() == [0.9] * 4
    assert shard_shares(None, np.array([0, 600]), np.array([600, 400]), 1000).tolist() == [0.6, 0.4]


def test_a_cache_serves_what_the_frequency_curve_says() -> None:
    whole = np.array([0]), np.array([1000])
    assert hit_rates(SKEWED, *whole, 0.01).tolist() == [0.9]
    assert hit_rates(SKEWED, *whole, 0.1).tolist() == [1.0]
    assert hit_rates(None, *whole, 0.1).tolist() == [0.1]
    # Of the shard of rows 10 to 110 the hottest tenth; all lookups of a shard without lookups are served.
    assert hit_rates(SKEWED, np.array([10, 500]), np.array([100, 500]), 0.1) == pytest.approx([1 / 9, 1.0])


@pytest.mark.parametrize("known", [True, False])
def test_rows_that_the_cache_misses_cross_pcie_and_no_others(known: bool) -> None:
    tables = [replace(make_tables([1000], 128, [50])[0], frequencies=SKEWED if known else None)]
    cost = estimates(requested(tables, on("h100_80gb", 16)))
    in_hbm = cost[ONE]
    missed = 0.0 if known else 0.8  # 200 rows of 1000 are cached
    all_rows = 16 * 1024 * 50 * 512 / (64e6 / 10)
    cached, uvm = cost["t0", "table_wise", "fused_uvm_caching"], cost["t0", "table_wise", "fused_uvm"]
    assert cached[0, FORWARD] == pytest.approx(in_hbm[0, FORWARD] + missed * all_rows)
    assert cached[0, BACKWARD] == pytest.approx(in_hbm[0, BACKWARD] + missed * all_rows)
    assert uvm[0, FORWARD] == pytest.approx(in_hbm[0, FORWARD] + all_rows)
    assert uvm[0, BACKWARD] == pytest.approx(in_hbm[0, BACKWARD] + 2 * all_rows)
    assert (cached[0, [IDS, FORWARD_COMMS, BACKWARD_COMMS]] == in_hbm[0, [IDS, FORWARD_COMMS, BACKWARD_COMMS]]).all()


def test_a_table_on_ssd_reads_blocks() -> None:
    hardware = with_ssd(on("h100_80gb", 8), 5.0)
    cost = estimates(requested(make_tables([100_000], 128), hardware))
    blocks = 8 * 1024 * 0.8 * 4096 / 5e6  # a fifth of the rows is cached
    on_ssd, in_hbm = cost["t0", "table_wise", "key_value"], cost[ONE]
    assert on_ssd[0, FORWARD] == pytest.approx(in_hbm[0, FORWARD] + blocks)


def test_a_collective_costs_a_launch_and_its_hops_once_a_sharding_type() -> None:
    links = Links(16, 8, 100.0, 10.0, launch_ms=100.0, intra_hop_ms=1.0, inter_hop_ms=10.0)
    latency = {kind: phases.tolist() for kind, phases in links.latencies_ms().items()}
    assert latency["table_wise"] == latency["column_wise"] == [330, 0, 110, 0, 110]  # lengths, ids, and how many
    assert latency["row_wise"] == [330, 0, 124, 0, 124]  # 14 steps within hosts, 1 between
    assert latency["table_row_wise"] == [330, 0, 217, 0, 217]  # 7 steps, then another collective
    assert latency["data_parallel"] == [0, 0, 0, 0, 148]
    assert set(latency) == set(SHARDING_TYPES)
    assert replace(links, world_size=8).latencies_ms()["table_wise"].tolist() == [303, 0, 101, 0, 101]
    assert replace(links, world_size=1, local_world_size=1).latencies_ms() == {}


@pytest.mark.parametrize("kind", ["search", "torchrec"])
def test_a_plan_pays_for_each_sharding_type_in_use_once(kind: str) -> None:
    """Two kinds of three tables each: the record's ranks wait for two kinds of collectives, not for six."""
    slow = {"collective_launch_us": 5000.0, "intra_host_latency_us": 0.0}
    tables = [
        replace(table, sharding=ConstraintConfig([["table_wise"], ["row_wise"]][index % 2]))
        for index, table in enumerate(make_tables([5000] * 6, 64))
    ]
    config = PlannerConfig(kind=kind, plan_file="unused.json")
    waiting, free = (
        make_plan(config, request(tables, on("h100_80gb", 4, **{**slow, "collective_launch_us": launch})))
        for launch in (5000.0, 0.0)
    )
    assert waiting.objective.critical_path_ms - free.objective.critical_path_ms == pytest.approx(2 * 5 * 5.0, abs=0.1)
    assert waiting.objective.max_rank_ms - free.objective.max_rank_ms == pytest.approx(2 * 5 * 5.0, abs=0.1)
    assert {load.input_dist_ms > 30 for load in waiting.ranks} == {True}


def test_dear_collectives_make_one_sharding_type_do_for_all_tables() -> None:
    tables = make_tables([5_000_000] * 9 + [100] * 3, 64, [20] * 9 + [1] * 3)
    config = PlannerConfig(kind="search", plan_file="unused.json")
    kinds = [
        len({choice.sharding_type for choice in make_plan(config, request(tables, hardware)).tables})
        for hardware in (on("h100_80gb", 8, collective_launch_us=us, intra_host_latency_us=0.0) for us in (0.0, 1e4))
    ]
    assert kinds[0] > 1 and kinds[1] == 1


def test_a_plan_is_for_one_precision_of_the_collectives() -> None:
    """And planned with it: half of the bytes cost half of the comms."""
    hardware = on("h100_80gb", 16)
    tables = make_tables([4_000_000] * 16, 128, [2] * 16, sharding=ConstraintConfig(["table_wise"]))
    config = PlannerConfig(kind="torchrec", plan_file="unused.json")
    plain, half = (make_plan(config, requested(tables, hardware, precision)) for precision in ("fp32", "fp16"))
    comms = [record.ranks[0].forward_comms_ms - 0.014 for record in (plain, half)]  # less a launch and a hop
    assert comms[1] == pytest.approx(comms[0] / 2)
    lines = explain_misfit(plain, config, requested(tables, hardware, "fp16"))
    assert 'comms.all_to_all.forward: "as pooled" in the plan, "float16" in this job' in lines
    assert explain_misfit(plain, config, requested(tables, hardware)) == []


def test_frequencies_do_not_make_a_plan_stale() -> None:
    hardware, config = on("h100_80gb", 8), PlannerConfig(kind="torchrec", plan_file="unused.json")
    tables = make_tables([1000], 128)
    record = make_plan(config, requested(tables, hardware))
    assert explain_misfit(record, config, requested([replace(tables[0], frequencies=SKEWED)], hardware)) == []


def test_the_memory_of_a_host_is_capped_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SearchProblem] = []
    monkeypatch.setattr(searcher, "search", lambda problem, config: seen.append(problem) or search(problem, config))
    asked = request(make_tables([1000] * 3, 64), on("h100_80gb", 16))
    record = make_plan(PlannerConfig(kind="search", plan_file="unused.json"), asked)
    (problem,) = seen
    assert problem.host_memory is not None
    assert problem.host_memory.tolist() == [8 * record.usable_ddr_bytes] * 2
    assert {option.kind for options in problem.tables for option in options} <= set(problem.latency_ms)


def test_a_sequence_returns_a_row_for_each_position_and_looks_up_its_ids() -> None:
    """A bag of 20 ids beside a sequence of 50 positions with 20 ids a sample."""
    (bag,) = make_tables([1000], 128, [20])
    sequence = by_position(replace(bag, positions=[Positions(bag.feature_names[0], 50)]))
    assert sum(sequence.pooling_factors) == pytest.approx(20.0) and len(sequence.feature_names) == 50
    works = {}
    for table in (bag, sequence):
        asked = requested([table], on("h100_80gb", 16))
        (option,) = [o for o in enumerator(asked, True).enumerate(asked.model, asked.sharders) if key(o) == ONE]
        works[len(table.feature_names)] = CostModel(asked.hardware, asked.tables, wire_of(asked.sharders))._work(option)
    assert works[1].lookups[0] == pytest.approx(works[50].lookups[0])
    assert (works[1].outputs, works[50].outputs) == pytest.approx((16 * 1024, 50 * 16 * 1024))
