"""Row-wise optimizer state follows its columns, or is refused with the plan that would work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.tables import layout
from tests.checkpoint.resharding import largest_difference, refused, restore, save
from tests.support.messages import mentions
from tests.support.ranks import RankPool

STATE = "optimizer.state.embedding_bag_collection.embedding_bags.t0.weight.t0.momentum1"
WEIGHT = "model.embedding_bag_collection.embedding_bags.t0.weight"


@pytest.mark.long
@pytest.mark.parametrize(("then", "now"), [("table_wise", "column_wise"), ("column_wise", "row_wise")])
def test_row_wise_state_for_other_columns_is_refused_with_a_plan_that_works(
    ranks: RankPool, tmp_path: Path, then: str, now: str
) -> None:
    ranks.run(2, save, str(tmp_path), (then,), "rowwise_adagrad", 2)
    messages = ranks.run(2, refused, str(tmp_path), (now,), "rowwise_adagrad", 2)
    assert messages[0] == messages[1]
    blocks = {"table_wise": "16", "column_wise": "8, 8", "row_wise": "16"}
    assert mentions(messages[0], f"{blocks[then]} {blocks[now]}")
    works = "table_wise, row_wise" if then == "table_wise" else "column_wise with column blocks of 8, 8"
    assert mentions(messages[0], f"{works}")
    assert "checkpoint.row_state_across_columns=average" in messages[0]


@pytest.mark.long
def test_row_wise_state_spreads_over_columns_and_comes_back_as_their_average(ranks: RankPool, tmp_path: Path) -> None:
    """[rows] -> a copy a block -> [rows]; and two different blocks become their average."""
    first, second, third, fourth = (str(tmp_path / name) for name in "abcd")
    saved, _ = ranks.run(2, save, first, ("table_wise",), "rowwise_adagrad", 2)[0]
    spread, _ = ranks.run(2, restore, first, ("column_wise",), "rowwise_adagrad", 2, second, True)[0]
    assert torch.equal(spread[STATE], saved[STATE].repeat(2))
    assert torch.equal(spread[WEIGHT], saved[WEIGHT])
    back, _ = ranks.run(4, restore, second, ("row_wise",), "rowwise_adagrad", 4, "", True)[0]
    assert largest_difference(back, saved) == 0.0
    columns, _ = ranks.run(2, save, third, ("column_wise",), "rowwise_adagrad", 2)[0]
    assert not torch.equal(columns[STATE][:53], columns[STATE][53:])
    merged, _ = ranks.run(1, restore, third, ("table_wise",), "rowwise_adagrad", 1, fourth, True)[0]
    torch.testing.assert_close(merged[STATE], columns[STATE].view(2, 53).mean(0), rtol=1e-6, atol=0)
    assert torch.equal(merged[WEIGHT], columns[WEIGHT])


@pytest.mark.long
def test_equal_column_blocks_go_on_exactly_from_grid_to_columns(ranks: RankPool, tmp_path: Path) -> None:
    saved, loss = ranks.run(4, save, str(tmp_path), ("grid_shard",), "rowwise_adagrad", 2, local_world_size=2)[0]
    restored, after = ranks.run(2, restore, str(tmp_path), ("column_wise",), "rowwise_adagrad", 2)[0]
    assert largest_difference(saved, restored) == 0.0
    assert after == pytest.approx(loss, abs=1e-6)


def test_row_wise_state_lies_block_after_block() -> None:
    grid = [((0, 0), (27, 8)), ((0, 8), (27, 8)), ((27, 0), (26, 8)), ((27, 8), (26, 8)), ((53, 0), (0, 8))]
    found = [(piece.row, piece.column, piece.state_offset) for piece in layout(grid)]
    assert found == [(0, 0, 0), (27, 0, 27), (0, 8, 53), (27, 8, 80)]


def test_another_optimizer_is_refused_by_table_and_state(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path), ("row_wise", "data_parallel"), "adagrad", 2)
    message = ranks.run(2, refused, str(tmp_path), ("row_wise", "data_parallel"), "sgd", 2)[0]
    for name in ("t0", "t1"):
        assert mentions(message, f"{name} fp32 momentum1")
    assert "the optimizer of the job nothing" in message
