"""Slots by sharding.tiers=auto: few rows a step from the SSD, within the memory that there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pipeline.config.jobs.train import TrainJob
from pipeline.config.optimizers import SparseOptimizerConfig
from pipeline.config.tables import ConstraintConfig, InitConfig, TableConfig, TiersConfig
from pipeline.config.training import TrainerConfig
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.tiers.slots import (
    PROCESS_BYTES,
    _cost_of,
    _points,
    choose_slots,
    describe,
    is_open,
    room_for_tiers,
    tiers_of,
    with_slots,
)
from pipeline.runtime.errors import PlanError
from tests.extras.tiers.test_forecast import ROWS, zipf

BATCH = 64
OPEN = TiersConfig(min_rows=1000)
ROW_BYTES = 2 * 4 * 16  # weights and Adagrad's state


def job() -> TrainJob:
    job = TrainJob(name="t", run_dir="runs/t", trainer=TrainerConfig(global_batch_size=BATCH))
    return replace(job, optimizer=replace(job.optimizer, sparse=SparseOptimizerConfig(name="adagrad")))


def table(name: str, frequencies: RowFrequencies | None = None, num_rows: int = ROWS, **more: object) -> Table:
    return Table(
        name, num_rows, 16, [name], "sum", "fp32", InitConfig(), ConstraintConfig(), [1.0], frequencies,
        tiers=OPEN, **more,
    )  # fmt: skip


def even() -> RowFrequencies:
    return RowFrequencies([0, ROWS], [0.0, 1.0])


TABLES = [table("hot", zipf()[0]), table("cold", even()), table("small", even(), 500)]
WHOLE = ROW_BYTES * (2 * ROWS + 500)


def test_nothing_is_in_tiers_where_memory_holds_all() -> None:
    choice = choose_slots(job(), TABLES, WHOLE, 1)
    assert (choice.slots, choice.memory_bytes, choice.rows_a_step) == ({}, WHOLE, 0.0)


def test_memory_goes_where_it_saves_most_rows_a_step_and_is_not_exceeded() -> None:
    rows = []
    for share in (0.9, 0.6, 0.4):
        choice = choose_slots(job(), TABLES, share * WHOLE, 1)
        assert 0.9 * share * WHOLE < choice.memory_bytes <= share * WHOLE
        assert set(choice.slots) <= {"hot", "cold"}  # small ones are in memory whole
        rows.append(choice.rows_a_step)
    assert rows == sorted(rows) and rows[0] > 0
    assert len(choice.slots) == 2 and choice.slots["hot"] != choice.slots["cold"]
    assert "2 tables have tiers" in describe(choice)


def test_no_pair_of_shares_does_much_better() -> None:
    cost, room = _cost_of(job(), 1), 0.5 * WHOLE
    hot, cold, small = TABLES
    pairs = itertools.product(list(_points(hot, BATCH, cost)), list(_points(cold, BATCH, cost)))
    fitting = [a.rows_a_step + b.rows_a_step for a, b in pairs if a.memory + b.memory + 500 * ROW_BYTES <= room]
    choice = choose_slots(job(), [hot, cold, small], room, 1)
    assert min(fitting) <= choice.rows_a_step <= 1.05 * min(fitting)


def test_memory_below_what_batches_need_is_refused_with_numbers() -> None:
    with pytest.raises(PlanError, match=r"tables take 0.00 GiB .* 4 batches need in 2 others.*hardware.ddr_cap_gb"):
        choose_slots(job(), TABLES, 500 * ROW_BYTES + 1000, 1)


def test_tables_that_tiers_do_not_train_or_that_say_their_slots_are_left_alone() -> None:
    assert is_open(table("a"))
    assert not is_open(replace(table("a"), tiers=TiersConfig(slots=0.1, min_rows=1000)))
    assert not is_open(replace(table("a"), data_type="fp16"))
    assert not is_open(replace(table("a"), sharding=ConstraintConfig(sharding_types=["data_parallel"])))
    assert not is_open(replace(table("a"), tiers=None))  # 100,000 rows at least, where nothing is said
    said = replace(table("said", even()), tiers=TiersConfig(slots=0.1, min_rows=1000))
    assert set(choose_slots(job(), [said, *TABLES], 0.6 * WHOLE, 1).slots) <= {"hot", "cold"}


def test_a_run_keeps_the_choice_in_its_tables() -> None:
    choice = choose_slots(job(), TABLES, 0.4 * WHOLE, 1)
    configs = with_slots({"default": TableConfig(tiers=OPEN), "hot": TableConfig(embedding_dim=16)}, TABLES, choice)
    assert configs["hot"] == TableConfig(embedding_dim=16, tiers=tiers_of(TABLES[0], choice))
    assert configs["cold"].tiers == TiersConfig(slots=choice.slots["cold"], min_rows=1000)
    assert "small" not in configs


def test_room_leaves_the_process_and_the_layers_out() -> None:
    assert room_for_tiers(PROCESS_BYTES + 1000, 0.0, 100, 1) == 900
    assert room_for_tiers(100 * PROCESS_BYTES, 0.1, 0, 1) == 90 * PROCESS_BYTES
    assert room_for_tiers(100 * PROCESS_BYTES, 0.1, 0, 4) == pytest.approx(0.9 * 4 * 90 * PROCESS_BYTES)
