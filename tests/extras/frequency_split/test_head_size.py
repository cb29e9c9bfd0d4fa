from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.extras.frequency_split.head_size import (
    BagShape,
    HeadTable,
    StepBytes,
    Wire,
    bag_shapes,
    choose_head_rows,
    step_bytes,
)

NUM_ROWS = 10_000
RANKS = [1, 3, 10, 30, 100, 300, 1000, 3000]


def shares(skew: float) -> np.ndarray:
    """Of lookups, by row: Zipf's law."""
    weights = np.arange(1, NUM_ROWS + 1) ** -skew
    return weights / weights.sum()


def curve(skew: float) -> FrequencyCurve:
    upto = np.cumsum(shares(skew))
    return FrequencyCurve([*RANKS, NUM_ROWS], [*(float(upto[rank - 1]) for rank in RANKS), 1.0])


def table(skew: float = 1.2, num_ids: float = 1.0, name: str = "t") -> HeadTable:
    return HeadTable(name, NUM_ROWS, 16, [BagShape(curve(skew), num_ids)])


@pytest.mark.parametrize(("num_ids", "num_even"), [(1, 0), (3, 0), (1, 4)])
@pytest.mark.parametrize("head_rows", [10, 1000])
def test_expected_cold_ids_and_bags_are_those_of_bags_that_are_drawn(
    num_ids: int, num_even: int, head_rows: int
) -> None:
    generator = np.random.default_rng(3)
    by_curve = generator.choice(NUM_ROWS, size=(100_000, num_ids), p=shares(1.2))
    ids = np.concatenate([by_curve, generator.integers(0, NUM_ROWS, (100_000, num_even))], axis=1)
    shape = BagShape(curve(1.2), num_ids, num_even)
    assert shape.cold_ids(head_rows) == pytest.approx((ids >= head_rows).sum(axis=1).mean(), rel=0.02)
    assert shape.cold_bags(head_rows) == pytest.approx((ids >= head_rows).any(axis=1).mean(), rel=0.02)


def test_bags_of_two_and_a_half_ids_have_two_or_three() -> None:
    assert BagShape(curve(1.0), 2.5).cold_bags(10) == pytest.approx(
        (BagShape(curve(1.0), 2).cold_bags(10) + BagShape(curve(1.0), 3).cold_bags(10)) / 2
    )


def test_features_made_multi_hot_on_the_fly_have_one_id_of_the_data() -> None:
    feature = SparseFeature("a", NUM_ROWS, False, 1.0, curve(1.0))
    lists = SparseFeature("b", NUM_ROWS, True, 2.5, curve(1.0))
    assert bag_shapes([feature, lists], {"a": 5}) == [BagShape(curve(1.0), 1.0, 4), BagShape(curve(1.0), 2.5)]


def test_without_a_head_every_bag_is_sent_and_with_nothing_else_none() -> None:
    wire = Wire(world_size=4, batch_size=1000)
    assert step_bytes(table(), 0, wire) == StepBytes(
        0.75 * 1000 * (8 + 4), 0.75 * 1000 * 16 * 4, 0.75 * 1000 * 16 * 4, 0.0
    )
    assert step_bytes(table(), NUM_ROWS, wire) == StepBytes(head=2 * 0.75 * NUM_ROWS * 16 * 4)


def test_one_rank_sends_nothing() -> None:
    assert step_bytes(table(), 100, Wire(1, 1000)).total == 0


def test_rows_cut_over_ranks_send_a_part_of_every_bag_from_each() -> None:
    whole, by_rows = (step_bytes(table(), 100, Wire(4, 1000, by_rows=rows)) for rows in (False, True))
    assert by_rows.forward == 4 * whole.forward and by_rows.backward == 4 * whole.backward
    assert by_rows.head == whole.head


def test_the_head_grows_with_the_batch_and_is_nothing_where_lookups_are_even() -> None:
    def chosen(batch_size: int) -> int:
        return choose_head_rows([table()], lambda _: Wire(4, batch_size), 1e12)["t"]

    assert chosen(256) < chosen(4096) < chosen(65_536)
    even = HeadTable("t", NUM_ROWS, 16, [BagShape(FrequencyCurve([10, NUM_ROWS], [10 / NUM_ROWS, 1.0]), 1.0)])
    assert choose_head_rows([even], lambda _: Wire(4, 1000), 1e12) == {"t": 0}
    assert choose_head_rows([even], lambda _: Wire(4, 10**7), 1e12) == {"t": NUM_ROWS}


def test_the_chosen_head_sends_the_fewest_bytes_of_all_candidates() -> None:
    wire = Wire(2, 4096)
    best = choose_head_rows([table()], lambda _: wire, 1e12)["t"]
    assert 0 < best < NUM_ROWS
    totals = {rows: step_bytes(table(), rows, wire).total for rows in table().candidates()}
    assert totals[best] == min(totals.values()) < 0.5 * totals[0]


def test_heads_share_the_memory_there_is_for_them() -> None:
    tables = [table(1.3, name="steep"), table(0.9, name="flat")]
    wire = Wire(4, 65_536)

    def memory(heads: dict[str, int]) -> float:
        return sum(each.head_bytes(heads[each.name]) + each.tail_bytes(heads[each.name], 4) for each in tables)

    def sent(heads: dict[str, int]) -> float:
        return sum(step_bytes(each, heads[each.name], wire).total for each in tables)

    free = choose_head_rows(tables, lambda _: wire, 1e12)
    none = dict.fromkeys(free, 0)
    room = memory(none) + 0.2 * (memory(free) - memory(none))
    tight = choose_head_rows(tables, lambda _: wire, room)
    assert memory(tight) <= room
    assert sent(free) < sent(tight) < sent(none)
    # No other heads in that memory send less by more than one step of a curve is worth.
    everything = [{"steep": steep, "flat": flat} for steep in tables[0].candidates() for flat in tables[1].candidates()]
    best = min(sent(heads) for heads in everything if memory(heads) <= room)
    assert sent(tight) <= 1.1 * best
    assert choose_head_rows(tables, lambda _: wire, 0.0) == none
