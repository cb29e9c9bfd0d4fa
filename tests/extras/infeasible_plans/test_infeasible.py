"""Where no plan holds the tables: what is missing where, and suggestions that hold when they are taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pipeline.config.planner import PlannerConfig
from pipeline.config.tables import ConstraintConfig
from pipeline.extras.infeasible_plans.shortfall import least_shortfall
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest
from pipeline.planner.search.problem import Option, Rule, SearchProblem
from tests.planner.plans import assert_capacity_kept
from tests.planner.problems import DLRMV2_ROWS, DLRMV2_SIZES, make_tables, on, request

SEARCH = PlannerConfig(kind="search", plan_file="unused.json", timeout_s=600.0)  # on a busy machine too
GIB = 1 << 30


def explain(asked: PlanRequest, config: PlannerConfig = SEARCH) -> str:
    with pytest.raises(ValueError) as caught:
        make_plan(config, asked)
    return str(caught.value)


def suggested(text: str) -> list[str]:
    return re.findall(r"^  (.*): fits, [\d.,]+ [KMG]iB free on the fullest rank$", text, re.MULTILINE)


def whole(rows: list[int], kernels: list[str] | None = None, dim: int = 64) -> list:
    return make_tables(rows, dim, sharding=ConstraintConfig(["table_wise"], kernels or []))


def too_large_for_one_rank() -> PlanRequest:
    """2.4 GiB may only lie whole, and a rank has 1.7."""
    return request(whole([10_000_000, 1000], ["fused"]), on("h100_80gb", 4, hbm_cap_gb=2.0), "sgd")


def without_room_beside_state() -> PlanRequest:
    largest = sorted(zip(DLRMV2_ROWS, DLRMV2_SIZES, strict=True), reverse=True)[:8]
    tables = make_tables([rows for rows, _ in largest], 128, [size for _, size in largest])
    return request(tables, on("a100_40gb", 4, hbm_cap_gb=30.0, ddr_cap_gb=1.0), "adagrad")


def too_many_rows_for_the_host() -> PlanRequest:
    return request(make_tables([20_000_000] * 2, 64), on("cpu", 2, ddr_cap_gb=5.5), "rowwise_adagrad")


def kept_free_too_much() -> PlanRequest:
    return request(make_tables([16_000_000], 64), on("cpu", 1, ddr_cap_gb=4.4), "sgd")


def too_few_hosts() -> PlanRequest:
    return request(
        make_tables([30_000_000] * 8, 64), on("h100_80gb", 8, hbm_cap_gb=8.0, ddr_cap_gb=0.5, ranks_per_host=8), "sgd"
    )


def changed_as(line: str, asked: PlanRequest, config: PlannerConfig) -> tuple[PlanRequest, PlannerConfig]:
    """What a user gets who adds the way's overrides to the command."""
    from tests.planner.problems import TinyModel

    tables, hardware, optimizer = asked.tables, asked.hardware, asked.optimizer
    for override in line.replace("'", "").split():
        key, value = override.split("=")
        if key == "world_size":
            hardware = replace(hardware, world_size=int(value))
        elif key == "optimizer.sparse.name":
            optimizer = replace(optimizer, name=value)
        elif key == "tables.default.data_type":
            tables = [replace(table, data_type=value) for table in tables]
        elif key == "planner.reserved_memory_fraction":
            config = replace(config, reserved_memory_fraction=float(value))
        else:
            _, name, _, field = key.split(".")
            values = value.strip("[]").split(",")
            tables = [
                replace(table, sharding=replace(table.sharding, **{field: values})) if table.name == name else table
                for table in tables
            ]
    model = TinyModel(tables)
    return replace(asked, tables=tables, hardware=hardware, optimizer=optimizer, model=model), config


CASES: list[tuple[Callable[[], PlanRequest], list[str], list[str]]] = [
    (
        too_large_for_one_rank,
        ["best attempt: rank ", "for t0 (table_wise)"],
        [
            "'tables.t0.sharding.sharding_types=[table_wise,row_wise]'",
            "'tables.t0.sharding.compute_kernels=[fused_uvm_caching]'",
            "tables.default.data_type=fp16",
        ],
    ),
    (
        without_room_beside_state,
        ["with their adagrad state they take 194.61 GiB", "best attempt:", "of HBM"],
        [
            "optimizer.sparse.name=rowwise_adagrad",
            "optimizer.sparse.name=rowwise_adagrad tables.default.data_type=fp16",
        ],
    ),
    (
        too_many_rows_for_the_host,
        ["best attempt:", "of host memory for"],
        ["tables.default.data_type=fp16", "world_size=4", "planner.reserved_memory_fraction=0.05"],
    ),
    (kept_free_too_much, ["best attempt: rank 0 lacks"], ["planner.reserved_memory_fraction=0.05"]),
    (too_few_hosts, ["best attempt:"], ["world_size=16"]),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "missing", "offered"),
    [
        pytest.param(
            *case, id=case[0].__name__, marks=[pytest.mark.campaign] if case[0] is without_room_beside_state else []
        )
        for case in CASES
    ],
)
def test_suggestions_are_those_that_hold(
    make: Callable[[], PlanRequest], missing: list[str], offered: list[str]
) -> None:
    asked = make()
    text = explain(asked)
    for words in missing:
        assert words in text
    found = suggested(text)
    assert [line for line in offered if line not in found] == [], text
    for line in found:
        changed, config = changed_as(line, asked, SEARCH)
        record = make_plan(replace(config, gap_tolerance=1.0), changed)  # any plan will do
        if config is SEARCH:
            assert_capacity_kept(record, changed)


def test_only_what_works_is_offered_as_working() -> None:
    """Row-wise state saves a half here, and a quarter of the room would be needed."""
    asked = request(make_tables([40_000_000] * 4, 128), on("a100_40gb", 2, hbm_cap_gb=12.0, ddr_cap_gb=1.0), "adagrad")
    text = explain(asked)
    assert "optimizer.sparse.name=rowwise_adagrad" not in suggested(text)
    assert any(line.startswith("world_size=") for line in suggested(text))


def test_the_best_attempt_leaves_no_more_missing_than_must_be() -> None:
    """Three tables of 1 GiB, two ranks of 1 GiB: one rank lacks 1 GiB, whichever."""
    option = Option(Rule.ANY_RANK, np.ones((1, 4)), np.array([[float(GIB), 0.0]]))
    shortfall = least_shortfall(SearchProblem([[option]] * 3, np.full((2, 2), float(GIB)), 2))
    assert shortfall.over.sum() == GIB and not shortfall.host_over.any()
    full = int(shortfall.over.sum(axis=1).argmax())
    assert len(shortfall.tables_on(full)) == 2
    split = Option(Rule.EVERY_RANK, np.ones((2, 4)), np.array([[GIB / 2, 0.0]] * 2))
    shortfall = least_shortfall(SearchProblem([[option], [split, option]], np.full((2, 2), float(GIB)), 2))
    assert not shortfall.over.any()
