"""Schedules are closed forms of the step, and reach the fused tables."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import LRSchedule, ScheduleConfig
from pipeline.training.optimizer import apply_schedule, lr_factor
from tests.support.ranks import RankPool
from tests.training.tiny import TABLES, TinyTable, batches, build, full_weights


def test_warm_up_is_linear_wastes_no_step_and_ends_at_the_full_rate() -> None:
    schedule = LRSchedule(warmup_steps=4)
    assert [lr_factor(schedule, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_poly_follows_mlperfs_closed_form() -> None:
    schedule = LRSchedule("poly", warmup_steps=2750, decay_start_step=49315, decay_steps=27772, power=2.0)
    assert lr_factor(schedule, 0) == 1 / 2750
    assert lr_factor(schedule, 2749) == lr_factor(schedule, 20000) == lr_factor(schedule, 49315) == 1.0
    for step in (49316, 60000, 64013):
        assert lr_factor(schedule, step) == pytest.approx((1 - (step - 49315) / 27772) ** 2)
    assert lr_factor(schedule, 49315 + 27772) == lr_factor(schedule, 10**6) == 0.0


def test_cosine_is_half_a_wave_down_to_its_end() -> None:
    schedule = LRSchedule("cosine", decay_start_step=10, decay_steps=8, end_factor=0.1)
    assert lr_factor(schedule, 10) == 1.0
    assert lr_factor(schedule, 14) == pytest.approx(0.5)
    assert lr_factor(schedule, 12) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert lr_factor(schedule, 18) == lr_factor(schedule, 99) == 0.1


def test_step_decays_once_every_decay_steps() -> None:
    schedule = LRSchedule("step", decay_start_step=2, decay_steps=3, gamma=0.5)
    assert [lr_factor(schedule, step) for step in range(9)] == [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]


@given(
    kind=st.sampled_from(["constant", "poly", "cosine", "step"]),
    warmup=st.integers(0, 50),
    constant=st.integers(0, 50),
    decay=st.integers(1, 50),
    end=st.floats(0, 1),
    step=st.integers(0, 200),
)
def test_factor_rises_to_one_then_never_rises_and_stays_above_its_end(
    kind: str, warmup: int, constant: int, decay: int, end: float, step: int
) -> None:
    schedule = LRSchedule(kind, warmup, warmup + constant, decay, end_factor=end)
    now, later = lr_factor(schedule, step), lr_factor(schedule, step + 1)
    assert 0 < lr_factor(schedule, 0) <= 1 and 0 <= now <= 1
    if step + 1 <= warmup:
        assert later >= now
    elif step >= warmup:
        assert later <= now and now >= end


def table_steps(rank: int) -> list[dict[str, float]]:
    """Under SGD a table moves by its rate times the gradient: how far each moved at every step, over the first's."""
    tables = [TinyTable("a", "table_wise"), TinyTable("b", "row_wise"), TinyTable("c", "data_parallel")]
    config = OptimizerConfig(SparseOptimizerConfig("sgd", lr=1e-4), DenseOptimizerConfig("sgd", lr=1e-9))
    model, optimizer = build(rank, tables, config)
    schedule = ScheduleConfig(LRSchedule("step", warmup_steps=2, decay_start_step=2, decay_steps=2, gamma=0.1))
    features, labels = next(batches(tables, 1, rank, dist.get_world_size()))
    moved: list[dict[str, float]] = []
    for step in range(5):
        before = full_weights(model)
        apply_schedule(optimizer, schedule, step)
        optimizer.zero_grad()
        model(features, labels)[0].backward()
        optimizer.step()
        after = full_weights(model)
        moved.append({name: float((after[name] - before[name]).norm()) for name in after if name.startswith(TABLES)})
    return [{name: step[name] / moved[1][name] for name in step} for step in moved]


def test_tables_really_move_at_the_scheduled_rate_fused_and_replicated_alike(ranks: RankPool) -> None:
    for step, expected in zip(ranks.run(2, table_steps)[0], [0.5, 1.0, 1.0, 1.0, 0.1], strict=True):
        assert step == {name: pytest.approx(expected, rel=0.02) for name in step}


def rates(rank: int) -> dict[str, set[float]]:
    tables = [TinyTable("a"), TinyTable("b", "data_parallel")]
    model, optimizer = build(rank, tables, OptimizerConfig(SparseOptimizerConfig("sgd", lr=0.5)))
    schedule = ScheduleConfig(LRSchedule(warmup_steps=4), LRSchedule(warmup_steps=10))
    apply_schedule(optimizer, schedule, 1)
    found: dict[str, set[float]] = {}
    for group in optimizer.param_groups:
        found.setdefault(group["name"], set()).add(group["lr"])
    inside = [
        m
        for t in model.module.embedding_bag_collection._lookups
        for m in t.modules()
        if hasattr(m, "get_learning_rate")
    ]
    assert inside and all(module.get_learning_rate() == torch.tensor(0.25) for module in inside)
    return found


def test_tables_and_dense_layers_follow_schedules_of_their_own(ranks: RankPool) -> None:
    assert ranks.run(1, rates)[0] == {"sparse": {0.25}, "dense": {0.001 * 0.2}}
