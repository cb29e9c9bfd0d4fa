from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from pipeline.config.planner import PlannerConfig
from pipeline.config.tables import ConstraintConfig, TableConfig
from pipeline.config.training import CommsConfig
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.tables import resolve_tables
from pipeline.models.build import build_model
from pipeline.models.dlrm import DLRMConfig
from pipeline.models.tasks.task import make_task
from pipeline.planner import planner
from pipeline.planner.explain import explain
from pipeline.planner.plan_codec import encode_record, write_plan
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest
from pipeline.planner.search.incumbent import SearchConfig
from pipeline.runtime.errors import PlanError
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import build_optimizer
from tests.planner.plans import assert_capacity_kept
from tests.planner.problems import DLRMV2_ROWS, DLRMV2_SIZES, KAGGLE_ROWS, make_tables, on, request
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names
from tests.support.optimizers import ROWWISE
from tests.support.ranks import RankPool
from tests.support.sharded_models import CARDINALITIES, draw_batches, train_steps

SEARCH = PlannerConfig(
    kind="search", gap_tolerance=0.0, timeout_s=600.0, plan_file="unused.json"
)  # on a busy machine too
TORCHREC = PlannerConfig(kind="torchrec", plan_file="unused.json")


def kaggle_request(optimizer: str = "rowwise_adagrad") -> PlanRequest:
    return request(make_tables(KAGGLE_ROWS, 16), on("cpu", 2, ddr_cap_gb=8.0), optimizer)


def dlrmv2_request() -> PlanRequest:
    return request(make_tables(DLRMV2_ROWS, 128, DLRMV2_SIZES), on("h100_80gb", 16), batch_size=4096)


@cache
def searched(make: Callable[[], PlanRequest], objective: str) -> PlanRecord:
    """Once for all tests."""
    return make_plan(replace(SEARCH, objective=objective), make())


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends by its work, which is the same on every machine, and not by a time."""
    little = partial(SearchConfig, local_steps=(500,), start_steps=100, exact_work=100_000)
    monkeypatch.setattr(planner, "SearchConfig", little)


@pytest.mark.parametrize("make", [kaggle_request, pytest.param(dlrmv2_request, marks=pytest.mark.campaign)])
def test_a_searched_plan_is_never_worse_than_torchrecs(make) -> None:
    asked = make()
    by_torchrec = make_plan(TORCHREC, asked).objective
    for objective in ("critical_path", "max_rank"):
        record = searched(make, objective)
        objective_found = record.objective
        assert_capacity_kept(record, asked)
        assert objective_found.minimised == objective
        assert getattr(objective_found, f"{objective}_ms") <= getattr(by_torchrec, f"{objective}_ms") * (1 + 1e-9)
        assert objective_found.lower_bound_ms is not None and objective_found.gap is not None
        assert objective_found.gap <= 2e-4  # proven the best
        assert "at most 0.0 % above the best possible" in explain(record)
        assert objective_found.lower_bound_ms <= getattr(objective_found, f"{objective}_ms")
        # The walk over TorchRec's proposals ends where TorchRec itself does.
        assert record.torchrec_objective is not None
        assert record.torchrec_objective.max_rank_ms == pytest.approx(by_torchrec.max_rank_ms, rel=1e-9)
        assert record.torchrec_objective.critical_path_ms == pytest.approx(by_torchrec.critical_path_ms, rel=1e-9)


@pytest.mark.campaign
def test_dlrmv2_on_sixteen_h100_is_planned_at_its_proven_optimum() -> None:
    """TorchRec's planner ends at 2.191 by the same costs."""
    record = searched(dlrmv2_request, "max_rank")
    assert record.objective.max_rank_ms == pytest.approx(1.854, abs=0.001)
    assert "at most 0.0 % above the best possible" in explain(record)


def test_a_searched_plan_is_the_same_again_and_replays_from_its_file(tmp_path: Path) -> None:
    asked = kaggle_request("adagrad")
    record = make_plan(SEARCH, asked)
    assert encode_record(make_plan(SEARCH, asked)) == encode_record(record)
    path = str(tmp_path / "plan.json")
    write_plan(path, record)
    replayed = make_plan(PlannerConfig(kind="file", plan_file=path), asked)
    assert replayed == record and replayed.objective.gap == record.objective.gap is not None


def test_a_job_of_sixteen_ranks_that_goes_on_takes_its_plan_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks wait for as long as reading and comparing take: nothing is enumerated or tried."""
    asked = request(make_tables([200_000] * 8, 64), on("h100_80gb", 16), "rowwise_adagrad", batch_size=1024)
    record = make_plan(TORCHREC, asked)
    write_plan(path := str(tmp_path / "plan.json"), record)
    monkeypatch.setattr("pipeline.planner.planner.search_plan", lambda *arguments: pytest.fail("it searched"))
    assert make_plan(TORCHREC, asked, path) == record
    with pytest.raises(pytest.fail.Exception, match="it searched"):
        make_plan(TORCHREC, replace(asked, batch_size=2048), path)


@pytest.mark.usefixtures("little_work")
def test_columns_are_cut_in_several_widths_where_the_optimizer_allows_it() -> None:
    """128 columns are one shard to TorchRec; halves and quarters spread few large tables better."""
    tables = make_tables([4_000_000] * 3, 128, [2] * 3)

    def cut(optimizer: str) -> tuple[PlanRecord, set[int]]:
        asked = request(tables, on("h100_80gb", 8), optimizer, batch_size=4096)
        record = make_plan(SEARCH, asked)
        assert_capacity_kept(record, asked)
        columns = [choice for choice in record.tables if "column" in choice.sharding_type]
        return record, {len(choice.ranks) for choice in columns}

    exact, counts = cut("adagrad")
    assert counts and counts <= {2, 4}
    rowwise, none = cut("rowwise_adagrad")
    assert not none
    assert exact.objective.critical_path_ms < 0.95 * rowwise.objective.critical_path_ms


def test_a_tables_own_limits_are_kept_by_the_search() -> None:
    tables = [
        *make_tables([5000] * 2, 64, sharding=ConstraintConfig(["row_wise"])),
        *(
            replace(table, name=f"c{table.name}", feature_names=[f"c{table.name}"])
            for table in make_tables([5000] * 2, 64, sharding=ConstraintConfig(["column_wise"], min_partition=16))
        ),
    ]
    record = make_plan(SEARCH, request(tables, on("h100_80gb", 4), "sgd"))
    assert [(choice.sharding_type, len(choice.ranks)) for choice in record.tables] == [
        ("row_wise", 4),
        ("row_wise", 4),
        ("column_wise", 4),
        ("column_wise", 4),
    ]


def test_tables_that_fit_nowhere_are_told_as_by_torchrecs_planner() -> None:
    asked = request(make_tables([40_000_000] * 2, 128), on("a100_40gb", 1, ddr_cap_gb=20.0), "adagrad")
    texts = []
    for config in (SEARCH, TORCHREC):
        with pytest.raises(PlanError, match=names("2")) as caught:
            make_plan(config, asked)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_tables_that_fit_only_when_packed_well_are_packed() -> None:
    """Six tables of 3/8 and two of 7/8 of a rank: two and two fill three ranks, and greedy placing need not see it."""
    rows = [3_000_000] * 6 + [7_000_000] * 2
    tables = make_tables(rows, 64, sharding=ConstraintConfig(["table_wise"], ["fused"]))
    need_gb = 8_200_000 * 64 * 4 / 2**30 / 0.85
    asked = request(tables, on("h100_80gb", 5, hbm_cap_gb=need_gb, ranks_per_host=5), "sgd", batch_size=1)
    assert_capacity_kept(make_plan(SEARCH, asked), asked)


def _losses(rank: int, config: PlannerConfig, kinds: list[str]) -> tuple[list[float], list[tuple[str, str, list[int]]]]:
    """Of 6 steps on a plan that `config` finds with these sharding types, and what the plan is."""
    context = init_distributed()
    limited = {"default": TableConfig(embedding_dim=8, sharding=ConstraintConfig(kinds))}
    tables = resolve_tables(limited, described_dataset(CARDINALITIES))
    model = DLRMConfig(dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])
    task = make_task(model, build_model(model, tables, 2, seed=0), tables)
    apply_sparse_optimizer(task, ROWWISE.sparse)
    asked = request(tables, on("cpu", 2, ddr_cap_gb=1.0), ROWWISE.sparse.name, model=task, batch_size=16)
    record = make_plan(config, replace(asked, sharders=make_sharders(CommsConfig(), 0)))
    sharded = shard_model(task, record.plan, CommsConfig(), context, seed=0)
    optimizer = build_optimizer(sharded, ROWWISE)
    losses = train_steps(sharded, optimizer, draw_batches(rank, 2, 6))
    return losses, [(choice.name, choice.sharding_type, choice.ranks) for choice in record.tables]


@pytest.mark.long
def test_training_on_a_searched_plan_gives_the_losses_of_torchrecs(ranks: RankPool) -> None:
    """Left alone both find the same plan for tables so small, so TorchRec's is kept to another sharding type."""
    searched = ranks.run(2, _losses, SEARCH, [])
    by_torchrec = ranks.run(2, _losses, TORCHREC, ["row_wise"])
    assert searched[0][1] == searched[1][1] != by_torchrec[0][1]  # one plan on both ranks
    for rank in range(2):
        assert searched[rank][0] == pytest.approx(by_torchrec[rank][0], abs=2e-6)
        assert searched[rank][0][0] != searched[rank][0][-1]


def tight_request(known: bool) -> PlanRequest:
    """Two tables of 9.5 GiB with state on one rank that has 12 GiB for them, and 26 times as much host memory."""
    frequencies = RowFrequencies([0, 400_000, 20_000_000], [0.0, 0.95, 1.0]) if known else None
    tables = [replace(table, frequencies=frequencies) for table in make_tables([20_000_000] * 2, 128, [20, 20])]
    return request(tables, on("h100_80gb", 1, hbm_cap_gb=14.1), batch_size=4096)


@pytest.mark.usefixtures("little_work")
def test_the_size_of_a_cache_follows_the_datas_frequencies() -> None:
    """Where 2 % of the rows have 95 % of the lookups, a small cache each is better than one table in host memory."""
    known = make_plan(SEARCH, tight_request(known=True))
    assert_capacity_kept(known, tight_request(known=True))
    cached = [choice for choice in known.tables if choice.compute_kernel == "fused_uvm_caching"]
    assert cached and {choice.cache_load_factor for choice in cached} <= {0.02, 0.05, 0.1, 0.2, 0.4}
    assert all(mentions(choice.reason, f"{100 * (choice.cache_load_factor or 0):g}") for choice in cached)
    module = next(iter(known.plan.plan.values()))
    for choice in cached:  # what FBGEMM is given; its own default is 0.2
        params = module[choice.name].cache_params
        assert (params.load_factor if params else 0.2) == choice.cache_load_factor
    even = make_plan(SEARCH, tight_request(known=False))
    assert known.objective.critical_path_ms < 0.5 * even.objective.critical_path_ms
    assert "assumed even, because there are no frequencies" in "".join(choice.reason for choice in even.tables)
