from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner.search import exact
from pipeline.planner.search.incumbent import Infeasible, SearchConfig
from pipeline.planner.search.portfolio import SearchResult, search
from pipeline.planner.search.problem import (
    OBJECTIVES,
    Assignment,
    Option,
    Rule,
    SearchProblem,
    keeps_rule,
    loads,
    narrow,
    score,
    violations,
    worth_trying,
)
from pipeline.planner.search.proposals import try_proposals
from pipeline.planner.search.relaxation import LinearProgram
from tests.support.examples import examples

QUICK = SearchConfig(local_steps=(60, 60), anneal_moves=0)
GIB = float(1 << 30)


def draw_problem(
    seed: int,
    num_tables: int,
    world_size: int,
    ranks_per_host: int,
    tightness: float = 1.5,
    num_options: int = 3,
    num_phases: int = 4,
    latency: float = 0.0,
) -> SearchProblem:
    """Options of every rule with unequal shards; memory is `tightness` times what the thriftiest options take evenly.

    A kind, here a rule's name, takes up to `latency` ms longer in each phase.
    """
    generator = np.random.default_rng(seed)
    num_shards = {
        Rule.EVERY_RANK: world_size,
        Rule.ONE_HOST: ranks_per_host,
        Rule.WHOLE_HOSTS: ranks_per_host,
        Rule.ANY_RANK: 1,
        Rule.WITHIN_HOST: 2,
    }
    tables = []
    for _ in range(num_tables):
        options = []
        for _ in range(num_options):
            rule = list(Rule)[generator.integers(len(Rule))]
            shards = 2 if rule is Rule.ANY_RANK and generator.integers(3) == 0 else num_shards[rule]
            cost = generator.integers(1, 40, (shards, num_phases)) / 7
            memory = generator.integers(0, 9, (shards, 2)) * GIB / 8
            options.append(Option(rule, cost, memory, rule.name))
        tables.append(options)
    least = sum(min(option.memory.sum(axis=0).tolist() for option in options)[0] for options in tables)
    room = max(GIB, tightness * least / world_size)
    late = {rule.name: latency * generator.random(num_phases) for rule in Rule if latency}
    return SearchProblem(tables, np.full((world_size, 2), room), ranks_per_host, latency_ms=late)


def best_by_brute_force(problem: SearchProblem, objective: str) -> float:
    """Over every option of every table and every place of every shard; infinite where nothing fits."""
    ways = []
    for options in problem.tables:
        placed = []
        for option in options:
            for ranks in itertools.product(range(problem.world_size), repeat=option.num_shards):
                if keeps_rule(problem, option, np.array(ranks)):
                    cost = np.zeros((problem.world_size, option.cost_ms.shape[1]))
                    memory = np.zeros((problem.world_size, 2))
                    np.add.at(cost, list(ranks), option.cost_ms)
                    np.add.at(memory, list(ranks), option.memory)
                    placed.append((cost, memory, option.kind))
        ways.append(placed)
    best = np.inf
    for combination in itertools.product(*ways):
        if (sum(memory for _, memory, _ in combination) <= problem.capacity).all():
            cost = sum(cost for cost, _, _ in combination)
            value = cost.sum(axis=1).max() if objective == "max_rank" else cost.max(axis=0).sum()
            value += sum(
                problem.latency_ms[kind].sum() for kind in {kind for *_, kind in combination} if problem.latency_ms
            )
            best = min(best, float(value))
    return best


def seeds(few: int, count: int) -> list[object]:
    """`few` by default, the others as a campaign."""
    return [pytest.param(seed, marks=[] if seed < few else [pytest.mark.campaign]) for seed in range(count)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", seeds(4, 12))  # each tightness once, on hosts of one rank and of two
@pytest.mark.parametrize(
    ("num_phases", "latency"), [pytest.param(4, 0.0, marks=pytest.mark.campaign), (5, 0.0), (5, 3.0)]
)
def test_four_tables_on_two_ranks_are_placed_as_well_as_brute_force_does(
    num_phases: int, latency: float, seed: int, objective: str
) -> None:
    local, tightness = 2 - seed % 2, 1.0 + seed % 4 / 4
    problem = draw_problem(seed, 4, 2, local, tightness, num_phases=num_phases, latency=latency)
    optimum = best_by_brute_force(problem, objective)
    if optimum == np.inf:
        with pytest.raises(Infeasible) as caught:
            search(problem, replace(QUICK, objective=objective))
        assert caught.value.proven
        return
    result = search(problem, replace(QUICK, objective=objective))
    assert result.score.of(objective) == pytest.approx(optimum, rel=1e-9)
    assert result.lower_bound_ms <= optimum * (1 + 1e-9) and result.gap <= 2e-4


def test_brute_force_meets_both_feasible_and_infeasible_problems() -> None:
    """Else the test above would show one half only."""
    best = [
        best_by_brute_force(draw_problem(seed, 4, 2, 2 - seed % 2, 1.0 + seed % 4 / 4, num_phases=5), "max_rank")
        for seed in range(4)
    ]
    assert 0 < sum(value == np.inf for value in best) < 4


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("latency", [0.0, 2.0])
def test_every_method_bounds_or_attains_the_optimum(latency: float, seed: int, objective: str) -> None:
    """Each on its own: the relaxation is below, proposals are above, the integer program is there."""
    problem = draw_problem(seed, 3, 3, ranks_per_host=3, tightness=3.0, num_phases=5, latency=latency)
    optimum = best_by_brute_force(problem, objective)
    bound = LinearProgram(problem, objective).solve().bound_ms
    assert bound is not None and bound <= optimum * (1 + 1e-9)
    tried = try_proposals(problem, objective, 10_000, lambda: False)
    assert tried.complete and (tried.best is None or score(problem, tried.best).of(objective) >= optimum * (1 - 1e-9))
    found = exact.solve(problem, objective, bound=bound, cutoff=None, max_nodes=10_000, seconds=60)
    assert found.finished and found.assignment is not None and not violations(problem, found.assignment)
    assert score(problem, found.assignment).of(objective) == pytest.approx(optimum, rel=2e-4)
    assert found.bound_ms == pytest.approx(optimum, rel=2e-4) and found.bound_ms <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", seeds(3, 8))
def test_equal_tables_are_counted_and_dealt_out_to_the_same_optimum(seed: int, objective: str) -> None:
    """Four tables of two kinds: the integer program has a variable for each kind, and the plan one option a table."""
    drawn = draw_problem(seed, 2, 2, ranks_per_host=2 - seed % 2, tightness=6.0, num_phases=3, latency=seed % 2)
    problem = replace(drawn, tables=[drawn.tables[0], drawn.tables[1], drawn.tables[0], drawn.tables[1]])
    assert exact.equal_tables(problem) == [[0, 2], [1, 3]]
    assert exact.count_variables(problem) == exact.count_variables(drawn)
    optimum = best_by_brute_force(problem, objective)
    found = exact.solve(problem, objective, bound=0.0, cutoff=None, max_nodes=10_000, seconds=60)
    if optimum == np.inf:
        assert found.finished and found.assignment is None
        return
    assert found.assignment is not None and not violations(problem, found.assignment)
    assert score(problem, found.assignment).of(objective) == pytest.approx(optimum, rel=2e-4)


def test_options_left_out_never_hold_the_optimum() -> None:
    for seed in range(6):
        problem = draw_problem(seed, 3, 2, 2, tightness=2.0, num_options=5, latency=seed % 3)
        kept = worth_trying(problem)
        for objective in OBJECTIVES:
            whole = best_by_brute_force(problem, objective)
            assert best_by_brute_force(narrow(problem, kept), objective) == pytest.approx(whole)


@pytest.mark.long
@examples(40)
@given(
    seed=st.integers(0, 10**6),
    num_tables=st.integers(1, 12),
    hosts=st.integers(1, 3),
    local=st.integers(1, 4),
    tightness=st.sampled_from([1.0, 1.02, 1.1, 1.5, 4.0]),
    objective=st.sampled_from(OBJECTIVES),
    num_phases=st.integers(1, 6),
    latency=st.sampled_from([0.0, 0.1, 5.0]),
)
def test_capacities_and_rules_are_always_kept(
    seed: int,
    num_tables: int,
    hosts: int,
    local: int,
    tightness: float,
    objective: str,
    num_phases: int,
    latency: float,
) -> None:
    problem = draw_problem(seed, num_tables, hosts * local, local, tightness, num_phases=num_phases, latency=latency)
    try:
        result = search(problem, replace(QUICK, objective=objective, exact_work=20_000))
    except Infeasible:
        return
    cost, memory = loads(problem, result.assignment)
    assert (memory <= problem.capacity).all() and not violations(problem, result.assignment)
    used = {options[choice].kind for options, choice in zip(problem.tables, result.assignment.choices, strict=True)}
    late = sum(problem.latency_ms[kind].sum() for kind in used if latency)
    assert result.score.max_rank_ms == pytest.approx(cost.sum(axis=1).max() + late)
    assert result.score.critical_path_ms == pytest.approx(cost.max(axis=0).sum() + late)
    assert result.lower_bound_ms <= result.score.of(objective)
    if result.torchrec is not None and objective == "max_rank":
        assert result.score.max_rank_ms <= result.torchrec.max_rank_ms


def test_a_hosts_memory_is_kept_beside_each_ranks() -> None:
    table_wise = Option(Rule.ANY_RANK, np.ones((1, 4)), np.array([[0.0, GIB]]))
    spread = Option(Rule.EVERY_RANK, np.ones((4, 4)), np.array([[GIB / 4, 0.0]] * 4))
    problem = SearchProblem([[table_wise, spread]] * 4, np.full((4, 2), 3 * GIB), 2, np.array([GIB, GIB]))
    result = search(problem, QUICK)
    hosts = loads(problem, result.assignment)[1][:, 1].reshape(2, 2).sum(axis=1)
    assert (hosts <= GIB).all() and result.assignment.choices.count(0) == 2
    with pytest.raises(Infeasible) as caught:
        search(SearchProblem([[table_wise]] * 3, problem.capacity, 2, problem.host_memory), QUICK)
    assert caught.value.proven


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_kinds_give_way_to_one_where_starting_another_collective_costs_more_than_it_saves(objective: str) -> None:
    """Ten tables that each save 1 ms by a kind of their own, too large for the integer program: one by one none moves."""

    def problem(latency: float) -> SearchProblem:
        generator = np.random.default_rng(0)
        tables = []
        for _ in range(10):
            spread = Option(Rule.EVERY_RANK, np.full((4, 5), 1.0 + generator.random()), np.zeros((4, 2)), "row_wise")
            cheaper = replace(spread, cost_ms=spread.cost_ms - 0.2, kind="table_row_wise")
            tables.append([spread, cheaper])
        late = {"row_wise": np.full(5, 0.1), "table_row_wise": np.full(5, latency)}
        return SearchProblem(tables, np.ones((4, 2)), 4, latency_ms=late)

    for latency, kinds in [(1.0, {"table_row_wise"}), (3.0, {"row_wise"})]:
        with_latency = problem(latency)
        result = search(with_latency, replace(QUICK, objective=objective, exact_variables=0))
        chosen = {
            options[choice].kind for options, choice in zip(with_latency.tables, result.assignment.choices, strict=True)
        }
        assert chosen == kinds and result.gap < 1e-5


def test_shards_that_may_not_share_a_rank_do_not() -> None:
    apart = Option(Rule.ANY_RANK, np.ones((3, 4)), np.zeros((3, 2)), distinct_ranks=True)
    busy = Option(Rule.EVERY_RANK, np.array([[9.0] * 4, [9.0] * 4, [0.0] * 4]), np.zeros((3, 2)))
    problem = SearchProblem([[busy], [apart]], np.ones((3, 2)), 3)
    for objective in OBJECTIVES:
        result = search(problem, replace(QUICK, objective=objective))
        assert sorted(result.assignment.ranks[1].tolist()) == [0, 1, 2]
    with pytest.raises(Infeasible):
        search(
            SearchProblem([[replace(apart, cost_ms=np.ones((4, 4)), memory=np.zeros((4, 2)))]], np.ones((3, 2)), 3),
            QUICK,
        )


def same(a: Assignment, b: Assignment) -> bool:
    return a.choices == b.choices and all((x == y).all() for x, y in zip(a.ranks, b.ranks, strict=True))


@pytest.mark.long
def test_a_seed_gives_one_result() -> None:
    problem = draw_problem(5, 30, 8, 4, tightness=2.0, num_options=5)

    def run(seed: int) -> SearchResult:
        return search(problem, replace(QUICK, seed=seed, exact_variables=0))

    first, again = run(0), run(0)
    assert same(first.assignment, again.assignment)
    assert first.lower_bound_ms == again.lower_bound_ms and not first.cut_short
    assert any(not same(first.assignment, run(seed).assignment) for seed in range(1, 6))


def test_a_warm_start_is_never_lost() -> None:
    problem = draw_problem(11, 12, 4, 2, tightness=2.0)
    best = search(problem, replace(QUICK, exact_variables=0))
    lazy = SearchConfig(local_steps=(), exact_variables=0, anneal_moves=0, proposal_placements=1)
    assert search(problem, lazy).score.critical_path_ms > best.score.critical_path_ms
    result = search(problem, lazy, warm_starts=[best.assignment])
    assert result.score.critical_path_ms <= best.score.critical_path_ms


def test_out_of_time_still_gives_a_valid_assignment_and_says_so() -> None:
    problem = draw_problem(3, 40, 8, 4, tightness=2.0)
    warm = search(problem, replace(QUICK, exact_variables=0)).assignment
    result = search(problem, SearchConfig(seconds=1e-9), warm_starts=[warm])
    assert result.cut_short and not violations(problem, result.assignment)
    assert result.lower_bound_ms <= result.score.critical_path_ms


def test_the_search_ends_once_its_plan_is_proven_near_enough() -> None:
    problem = draw_problem(3, 40, 8, 4, tightness=2.0)
    best = search(problem, replace(QUICK, exact_variables=0))
    near = search(problem, replace(QUICK, exact_variables=0, gap_tolerance=0.5))
    assert best.gap < near.gap <= 0.5
    assert near.torchrec_complete and near.torchrec is not None  # never before TorchRec's proposals were tried
    assert near.score.critical_path_ms <= near.torchrec.critical_path_ms
    assert not set(near.values) - {"torchrec", "relaxation"}
