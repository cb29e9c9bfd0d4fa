"""The smallest mix of precisions within a budget, on planted losses."""

from __future__ import annotations

import itertools
import random

from pipeline.extras.precision_search.search import smallest_mix, steps_down

NAMES = ["fp32", "int8", "int4"]
BITS = {"fp32": 32, "int8": 8, "int4": 4}


def _problem(seed: int, num_tables: int = 5) -> tuple[list[dict[str, int]], list[dict[str, float]]]:
    draw = random.Random(seed)
    sizes, losses = [], []
    for _ in range(num_tables):
        rows = draw.choice([10, 100, 1000, 5000])
        sizes.append({name: rows * BITS[name] for name in NAMES})
        low = draw.random() ** 4
        losses.append({"fp32": 0.0, "int8": low * draw.random() * 0.2, "int4": low})
    return sizes, losses


def _total(mix: list[str], values: list[dict[str, float]] | list[dict[str, int]]) -> float:
    return sum(one[name] for one, name in zip(values, mix, strict=True))


def test_the_mix_is_within_the_budget_and_near_the_smallest_there_is() -> None:
    ratios = []
    for seed in range(40):
        sizes, losses = _problem(seed)
        mix = smallest_mix(sizes, losses, lambda mix, losses=losses: _total(mix, losses), budget=0.3)
        assert _total(mix, losses) <= 0.3
        best = min(
            _total(list(one), sizes) for one in itertools.product(NAMES, repeat=5) if _total(list(one), losses) <= 0.3
        )
        ratios.append(_total(mix, sizes) / best)
    assert sorted(ratios)[20] <= 1.02 and max(ratios) < 3


def test_without_a_budget_nothing_that_costs_is_taken_and_with_a_large_one_all_is() -> None:
    sizes, losses = _problem(1)
    measure = lambda mix: _total(mix, losses)  # noqa: E731
    assert smallest_mix(sizes, losses, measure, budget=0.0) == ["fp32"] * 5
    assert smallest_mix(sizes, losses, measure, budget=100.0) == ["int4"] * 5


def test_what_is_measured_counts_where_single_losses_do_not_add_up() -> None:
    sizes, losses = _problem(2)
    mix = smallest_mix(sizes, losses, lambda mix: 1.0 if mix.count("fp32") < 3 else 0.0, budget=0.5)
    assert mix.count("fp32") == 3


def test_a_precision_that_loses_more_a_byte_than_a_smaller_one_is_passed_over() -> None:
    (step,) = steps_down([{"fp32": 320, "int8": 80, "int4": 40}], [{"fp32": 0.0, "int8": 0.5, "int4": 0.1}])
    assert (step.precision, step.bytes_saved) == ("int4", 280)


def test_a_table_of_one_precision_keeps_it() -> None:
    assert smallest_mix([{"int8": 80}, {"fp32": 320, "int4": 40}], [{}, {"int4": 0.0}], lambda mix: 0.0, 0.1) == [
        "int8",
        "int4",
    ]
