from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.planner.search.incumbent import SearchConfig
from pipeline.planner.search.neighbourhoods import improve_by_programs
from pipeline.planner.search.portfolio import search
from pipeline.planner.search.problem import Assignment, Option, Rule, SearchProblem, score, violations
from pipeline.planner.search.ranks import RankState

GIB = float(1 << 30)


def single(cost: list[float], memory: float, kind: str = "table_wise") -> Option:
    return Option(Rule.ANY_RANK, np.array([cost]), np.array([[memory * GIB, 0.0]]), kind)


def spread(cost: list[float], memory: float, shards: int, rule: Rule, kind: str) -> Option:
    return Option(rule, np.tile(cost, (shards, 1)), np.tile([memory * GIB, 0.0], (shards, 1)), kind)


def problem_of(tables: list[list[Option]], ranks: int, room: float, local: int = 2, **more: object) -> SearchProblem:
    return SearchProblem(tables, np.tile([room * GIB, 1.0], (ranks, 1)), local, **more)  # type: ignore[arg-type]


def run(problem: SearchProblem, start: Assignment, rounds: int = 12, seed: int = 0) -> Assignment | None:
    scale = score(problem, start).critical_path_ms
    return improve_by_programs(
        RankState(problem, "critical_path", scale),
        start,
        rounds=rounds,
        seed=seed,
        enough=0.0,
        remaining_s=lambda: 60.0,
    )


def on_ranks(*ranks: int) -> Assignment:
    return Assignment([0] * len(ranks), [np.array([rank]) for rank in ranks])


def test_full_ranks_change_three_tables_at_once() -> None:
    """A table of 4 GiB for two of 2: any exchange of two tables of other sizes overfills a rank."""
    tables = [[single([cost], size)] for cost, size in [(6, 4), (6, 4), (2, 2), (2, 2), (1, 2), (1, 2)]]
    problem = problem_of(tables, ranks=2, room=8.0)
    start = on_ranks(0, 0, 1, 1, 1, 1)
    assert score(problem, start).max_rank_ms == 12.0
    found = run(problem, start)
    assert found is not None and not violations(problem, found)
    assert score(problem, found).max_rank_ms == pytest.approx(9.0)


@pytest.mark.parametrize("rule", [Rule.EVERY_RANK, Rule.ONE_HOST], ids=["every_rank", "one_host"])
def test_a_table_is_sharded_otherwise_where_that_pays_for_its_collective(rule: Rule) -> None:
    shards = 4 if rule is Rule.EVERY_RANK else 2

    def best(latency: float) -> float:
        options = [single([4.0], 1), spread([4.0 / shards], 1 / shards, shards, rule, "rows")]
        problem = problem_of([options, options], 4, 10.0, latency_ms={"rows": np.array([latency])})
        found = run(problem, on_ranks(0, 1))
        assert found is not None
        return score(problem, found).critical_path_ms

    assert best(0.5) == pytest.approx(2.5)
    assert best(3.0) == pytest.approx(4.0)


def test_ranks_whose_tables_are_all_cut_by_columns_are_left_as_they_are() -> None:
    tables = [[spread([cost], 1, 2, Rule.ANY_RANK, "column_wise")] for cost in (3.0, 2.0, 1.0)]
    problem = problem_of(tables, 2, 10.0)
    start = Assignment([0, 0, 0], [np.array([0, 1])] * 3)
    found = run(problem, start, rounds=3)
    assert found is not None and score(problem, found) == score(problem, start)


def test_hosts_keep_their_memory() -> None:
    tables = [[single([float(cost)], 3)] for cost in (4, 3, 2, 1)]
    problem = problem_of(tables, 4, 10.0, host_memory=np.array([[6 * GIB, np.inf], [6 * GIB, np.inf]]))
    found = run(problem, on_ranks(0, 0, 2, 2))
    assert found is not None and not violations(problem, found)
    assert score(problem, found).max_rank_ms == pytest.approx(4.0)


def test_programs_lose_no_plan_and_a_seed_gives_one_result() -> None:
    generator = np.random.default_rng(3)
    tables = [[single(generator.random(2).tolist(), float(generator.random()))] for _ in range(8)]
    problem = problem_of(tables, 4, 3.0)
    start = on_ranks(*[table % 4 for table in range(8)])
    first, again = run(problem, start, rounds=2), run(problem, start, rounds=2)
    assert first is not None and again is not None
    assert score(problem, first).critical_path_ms <= score(problem, start).critical_path_ms
    assert all((one == other).all() for one, other in zip(first.ranks, again.ranks, strict=True))


def test_the_search_takes_what_programs_find() -> None:
    generator = np.random.default_rng(2)
    tables = [[single(generator.random(3).tolist(), float(generator.random()))] for _ in range(10)]
    total = sum(float(options[0].memory[0, 0]) for options in tables) / GIB
    problem = problem_of(tables, ranks=4, room=1.05 * total / 4)
    without = SearchConfig(local_steps=(), start_steps=0, exact_variables=0, program_rounds=0, anneal_moves=0)
    found = search(problem, replace(without, program_rounds=4))
    assert found.winner == "programs" and not violations(problem, found.assignment)
    assert found.score.critical_path_ms < search(problem, without).score.critical_path_ms
