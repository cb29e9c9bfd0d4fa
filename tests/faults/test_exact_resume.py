"""Fault 14: what is restored is all there is. The step after it is the step that the uninterrupted run made, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import LRSchedule, ScheduleConfig
from pipeline.training.optimizer import apply_schedule
from tests.faults.conftest import FaultRecorder
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, train_steps

SHARDED = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "column_wise"}
CASES = [
    ("sgd", "sgd", SHARDED),
    ("sgd", "momentum", SHARDED),
    ("adagrad", "adagrad", SHARDED),
    ("rowwise_adagrad", "adam", {**SHARDED, "d": "row_wise"}),
    ("partial_rowwise_adam", "adamw", {**SHARDED, "d": "row_wise"}),
    ("adam", "adam", SHARDED),
]
SCHEDULE = ScheduleConfig(
    LRSchedule("cosine", warmup_steps=2, decay_start_step=2, decay_steps=9), LRSchedule("step", decay_steps=2)
)


def _optimizers(sparse: str, dense: str) -> OptimizerConfig:
    momentum = 0.9 if dense == "momentum" else 0.0
    name = "sgd" if dense == "momentum" else dense
    return OptimizerConfig(
        SparseOptimizerConfig(sparse, lr=0.1), DenseOptimizerConfig(name, lr=0.01, momentum=momentum)
    )


def _draws() -> list[float]:
    """One of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def _train(rank: int, model: object, optimizer: object, first: int, last: int) -> None:
    for step in range(first, last):
        apply_schedule(optimizer, SCHEDULE, step)
        train_steps(model, optimizer, draw_batches(rank, 2, 1, start=step))


def _save_and_go_on(
    rank: int, folder: str, sparse: str, dense: str, kinds: dict[str, str], step: int
) -> tuple[object, ...]:
    _, model, optimizer, context = build_sharded(kinds, _optimizers(sparse, dense))
    checkpointer = Checkpointer(folder, model, optimizer, context)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    _train(rank, model, optimizer, 0, step)
    checkpointer.save(step)
    drawn = _draws()
    _train(rank, model, optimizer, step, step + 1)
    after_one = digest(model)
    _train(rank, model, optimizer, step + 1, step + 4)
    return drawn, after_one, digest(model)


def _restore_and_go_on(
    rank: int, folder: str, sparse: str, dense: str, kinds: dict[str, str], step: int
) -> tuple[object, ...]:
    _, model, optimizer, context = build_sharded(kinds, _optimizers(sparse, dense), seed=77)
    assert Checkpointer(folder, model, optimizer, context).restore_latest() is not None
    drawn = _draws()
    _train(rank, model, optimizer, step, step + 1)
    after_one = digest(model)
    _train(rank, model, optimizer, step + 1, step + 4)
    return drawn, after_one, digest(model)


# 0: before any optimizer has stepped
@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "cases"),
    [
        pytest.param(0, CASES, marks=pytest.mark.campaign),
        pytest.param(3, CASES, marks=pytest.mark.campaign),
        (3, CASES[1::2]),
    ],
    ids=["0", "3", "3-some"],
)
def test_the_step_after_a_restore_is_bitwise_that_of_the_run_that_went_on(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, step: int, cases: list[tuple[str, str, dict[str, str]]]
) -> None:
    for number, (sparse, dense, kinds) in enumerate(cases):
        folder = str(tmp_path / str(number))
        went_on = ranks.run(2, _save_and_go_on, folder, sparse, dense, kinds, step)
        restored = ranks.run(2, _restore_and_go_on, folder, sparse, dense, kinds, step)
        assert restored == went_on, (sparse, dense)
    what = "before the first step" if step == 0 else f"at step {step}"
    fault(
        14,
        f"{len(cases)} pairs of optimizers saved {what}: the next 1 and 4 steps and all generators bitwise equal",
        count=len(cases),
    )
