"""The benchmark's suites have the totals that their sources state, and its planners find and judge plans."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.planner import Ready, by_kind, judge, main
from benchmarks.planner_report import Outcome, append_row, read_rows, report, show, summarize
from benchmarks.planner_suites import (
    HUGECTR,
    RMC,
    SUITES,
    build_request,
    build_suite,
    make_tables,
    reserve,
    synthetic_tables,
)
from pipeline.config.planner import PlannerConfig
from pipeline.planner.planner import make_plan
from tests.support.messages import names


@pytest.mark.parametrize(
    ("name", "num_rows", "lookups"),
    [("criteo_kaggle", 33_762_577, 26), ("criteo_1tb", 882_774_559, 26), ("mlperf_dlrmv2", 204_184_588, 214)],
)
def test_criteos_suites_have_the_published_rows_and_lookups(name: str, num_rows: int, lookups: int) -> None:
    suite = build_suite(name)
    assert len(suite.tables) == 26
    assert sum(table.num_embeddings for table in suite.tables) == num_rows
    assert suite.lookups_per_sample == lookups
    if name == "mlperf_dlrmv2":
        assert 4 * suite.num_parameters / 2**30 == pytest.approx(97.4, abs=0.05)
        assert suite.training_bytes - 4 * suite.num_parameters == 4 * num_rows


@pytest.mark.parametrize(
    ("name", "tables", "billions", "hotness"),
    [
        ("hugectr_180", 180, 70, 80),
        ("hugectr_200", 200, 100, 20),
        ("hugectr_510", 510, 110, 5),
        ("hugectr_7", 7, 470, 20),
    ],
)
def test_hugectrs_suites_are_what_their_names_round(name: str, tables: int, billions: float, hotness: float) -> None:
    suite = build_suite(name)
    assert len(suite.tables) == pytest.approx(tables, rel=0.02)
    assert suite.num_parameters / 1e9 == pytest.approx(billions, rel=0.06)
    assert suite.lookups_per_sample / len(suite.tables) == pytest.approx(hotness, rel=0.17)
    if name == "hugectr_7":
        assert max(table.num_embeddings for table in suite.tables) == 5_000_000_000


def test_hugectrs_totals_are_exact() -> None:
    totals = {name: (build_suite(name).num_parameters, build_suite(name).lookups_per_sample) for name in HUGECTR}
    assert totals == {
        "hugectr_180": (66_332_812_800, 14_450),
        "hugectr_200": (103_861_888_000, 4_550),
        "hugectr_510": (114_572_800_000, 2_670),
        "hugectr_7": (446_080_000_000, 163),
    }


@pytest.mark.parametrize("num_tables", [100, 400, 856])
def test_synthetic_suites_have_the_lookups_of_the_production_batch(num_tables: int) -> None:
    suite = build_suite(f"synthetic_{num_tables}")
    assert len(suite.tables) == num_tables
    # 887,017,990 lookups in a batch of 65,536 on 856 tables
    assert suite.lookups_per_sample * 65_536 * 856 / num_tables == pytest.approx(887_017_990, rel=1e-9)
    assert synthetic_tables(num_tables) == suite.tables != synthetic_tables(num_tables, seed=1)


@pytest.mark.parametrize("name", list(RMC))
def test_rmc_suites_have_their_bytes_and_lookups(name: str) -> None:
    num_tables, lookups, num_bytes = RMC[name]
    suite = build_suite(name)
    assert 4 * suite.num_parameters == pytest.approx(num_bytes, rel=1e-3)
    assert suite.lookups_per_sample == num_tables * lookups
    assert min(table.num_embeddings for table in suite.tables) > 0


@pytest.mark.parametrize("name", list(SUITES))
def test_every_suite_becomes_a_request_without_memory(name: str) -> None:
    request = build_request(build_suite(name), 128)
    assert request.batch_size == 512 and request.hardware.num_hosts == 16
    assert all(weight.is_meta for weight in request.model.parameters())
    assert request.hardware.hbm_cap_bytes == 79 * 2**30


def test_tightness_leaves_so_much_more_than_the_least() -> None:
    suite = build_suite("mlperf_dlrmv2")
    request = build_request(suite, 8, tightness=1.2)
    ready = Ready(request, reserve(1.2))
    whole = ready.options("table_wise")
    needed = sum(shard.storage.hbm for option in whole.values() for shard in option.shards if shard.storage)
    assert needed == pytest.approx(suite.least_hbm_bytes, rel=1e-6)  # as TorchRec counts it
    assert 8 * ready.usable == pytest.approx(1.2 * needed, rel=1e-6)
    record = make_plan(
        PlannerConfig(kind="torchrec", reserved_memory_fraction=reserve(1.2)), build_request(suite, 8, tightness=1.2)
    )
    assert max(load.hbm_bytes for load in record.ranks) <= ready.usable
    assert all(load.ddr_bytes == 0 for load in record.ranks)


def test_options_are_judged_as_the_planner_judges_its_own_plan() -> None:
    suite = build_suite("rmc3")
    record = make_plan(PlannerConfig(kind="torchrec"), build_request(suite, 8))
    chosen = {choice.name: choice for choice in record.tables}
    options = Ready(build_request(suite, 8), reserve(None)).options("table_wise", "row_wise")
    placed = [options[name, choice.sharding_type] for name, choice in chosen.items()]
    for option in placed:
        for shard, rank in zip(option.shards, chosen[option.name].ranks, strict=True):
            shard.rank = rank
    judged = judge(placed, build_request(suite, 8).hardware, 0.0)
    assert judged.max_rank_ms == pytest.approx(record.objective.max_rank_ms)
    assert judged.critical_path_ms == pytest.approx(record.objective.critical_path_ms)
    assert judged.plan_hash == by_kind("torchrec", build_request(suite, 8), reserve(None), 60.0).plan_hash


@pytest.mark.long
def test_a_small_run_prints_and_appends_a_row_a_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.jsonl"
    words = ["--suites", "rmc1", "--planners", "torchrec", "torchrec_end", "size", "random", "--output", str(path)]
    main([*words, "--tightness", "none"])
    first = path.read_text()
    outcomes = main([*words, "--tightness", "none", "1.02"])
    printed = capsys.readouterr().out
    assert path.read_text().startswith(first) and len(read_rows(path)) == len(outcomes) == 8  # none measured twice
    roomy = outcomes[:4]
    assert all(outcome.feasible and outcome.plan_hash for outcome in roomy)
    assert all(outcome.repeatable for outcome in roomy if outcome.planner != "torchrec_end")
    best = min(outcome.max_rank_ms or math.inf for outcome in roomy)
    assert best > 0 and "*" in next(line for line in printed.splitlines() if line.startswith("rmc1"))
    assert all(outcome.error for outcome in outcomes if not outcome.feasible)


def test_a_file_that_holds_other_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    append_row(path, Outcome("s", 8, None, "a"))
    with path.open("a") as rows:
        rows.write(json.dumps({"step": 1}) + "\n")
    with pytest.raises(ValueError, match=names("2")):
        read_rows(path)


def test_the_report_shows_losses_and_large_gaps() -> None:
    def outcome(suite: str, planner: str, cost: float | None, gap: float | None = None) -> Outcome:
        bound = None if gap is None or cost is None else cost / (1 + gap)
        return Outcome(suite, 8, None, planner, 1.0, 1.0, cost is not None, cost, cost, bound, gap)

    won = [outcome("won", "search", 1.0, 0.01), outcome("won", "torchrec", 1.5), outcome("won", "size", None)]
    lost = [outcome("lost", "search", 2.0, 0.25), outcome("lost", "torchrec", 1.75)]
    text = report([*won, *lost])
    assert "| won | 8 | none | 1 | 0.9901 | 1.0 % | 1 | 1.5 | no plan |" in text
    assert "**1.75**" in text and "**1.5**" not in text
    assert "- loss: lost on 8, none: better by torchrec" in text and "- over 5 %: lost on 8, none: 25.0 %" in text
    assert "| `torchrec` | 2/2 | 1.250 | 1.250 |" in text
    assert "No planner beats `search`" in report(won) and "No planner beats" not in text


def test_the_summary_counts_only_what_somebody_solves() -> None:
    def outcome(planner: str, tightness: float | None, cost: float | None) -> Outcome:
        return Outcome(
            "s", 8, tightness, planner, 1.0, 1.0, cost is not None, cost, cost, plan_hash="a", repeatable=False
        )

    rows = [
        outcome("a", None, 1.0),
        outcome("b", None, 2.0),
        outcome("a", 1.2, 4.0),
        outcome("b", 1.2, None),
        outcome("a", 1.02, None),
        outcome("b", 1.02, None),
    ]
    told = {line.split()[0]: line.split()[1:] for line in summarize(rows).splitlines()[1:]}
    assert told == {"a": ["2/2", "1.000", "1.000"], "b": ["1/2", "2.000", "2.000"]}
    assert "a!" in show(rows[:2]) and "no plan" in show(rows[3:4])
    assert make_tables([1], [4], [1.0])[0].sharding.compute_kernels == []
