"""Learning rates fall where the model no longer improves, evaluations by epoch, and both over a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import read_manifest, step_path
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import CheckpointConfig, EarlyStopConfig, PlateauConfig, ScheduleConfig, TrainerConfig
from pipeline.runtime.errors import TrainingError
from pipeline.training.hooks.base import HookList, TrainingState, hook_names
from pipeline.training.optimizer import reduced
from pipeline.training.readers import BatchOrder
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest
from tests.support.trainers import make_trainer
from tests.training.tiny_training import CONFIG, KINDS, DrawnReader

NEVER_BETTER = PlateauConfig(patience=1, factor=0.5, min_lr=0.004, min_delta=10.0)


def test_a_reduced_rate_stops_at_its_least_and_never_exceeds_the_schedules() -> None:
    assert [reduced(1.0, plateau, 0.2) for plateau in (1.0, 0.5, 0.25, 0.125)] == [1.0, 0.5, 0.25, 0.2]
    assert reduced(0.1, 0.5, 0.2) == 0.1  # a warm-up below the least
    assert reduced(0.0, 1.0, 0.2) == 0.0


@pytest.mark.parametrize(("accumulation", "ends"), [(1, [5, 10, 15]), (2, [3, 5]), (3, [2, 4, 5])])
def test_an_epoch_ends_with_the_step_that_reads_its_last_batch(accumulation: int, ends: list[int]) -> None:
    config = TrainerConfig(
        32 * accumulation, epochs=3, gradient_accumulation_steps=accumulation, evaluate_every_epochs=1
    )
    reader = DrawnReader(0, 1)
    reader.steps_per_epoch = 5  # micro-batches
    state = TrainingState(BatchOrder(config, reader), None, HookList([]))

    def due(config: TrainerConfig) -> list[int]:
        steps = range(1, state.total_steps + 1)
        return [step for step in steps if replace(state, step=step).is_evaluation_due(config)]

    assert due(config) == ends
    assert due(replace(config, evaluate_every_epochs=2)) == ends[1:2]


def test_what_counts_evaluations_needs_some_before_the_end() -> None:
    with pytest.raises(TrainingError, match=names("schedule.plateau.patience=2 trainer.evaluate_every_epochs")):
        hook_names(TrainJob(name="x", run_dir="x", schedule=ScheduleConfig(plateau=PlateauConfig(patience=2))))
    stops = TrainerConfig(early_stop=EarlyStopConfig(3))
    with pytest.raises(TrainingError, match=names("trainer.early_stop.patience=3 trainer.evaluate_every_epochs")):
        hook_names(TrainJob(name="x", run_dir="x", trainer=stops))
    hook_names(TrainJob(name="x", run_dir="x", trainer=replace(stops, evaluate_every_epochs=1)))


def fit(rank: int, folder: str, config: TrainerConfig, plateau: PlateauConfig) -> tuple[str, list[dict[str, Any]]]:
    """The model's digest, and name and rate of each group of the optimizer at the end; goes on from `folder`."""
    task, model, optimizer, context = build_sharded(KINDS)
    checkpointer = Checkpointer(f"{folder}/checkpoints", model, optimizer, context, keep_last_n=9)
    trainer = make_trainer(
        config,
        ScheduleConfig(plateau=plateau),
        CheckpointConfig(save_every_minutes=None, save_best=True),
        None,
        folder,
        model=model,
        task=task,
        optimizer=optimizer,
        reader=DrawnReader(rank, 1),
        validation_reader=DrawnReader(rank, 1),
        checkpointer=checkpointer,
        context=context,
    )
    trainer.fit(checkpointer.restore_latest())
    return digest(model), [{"name": group["name"], "lr": group["lr"]} for group in optimizer.param_groups]


@pytest.mark.long
def test_a_resumed_run_goes_on_with_its_count_and_rates_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    """Evaluations at steps 2, 4, ... 12: each after the first is no better, so rates fall at 4, 6, 8 and 10."""
    config = replace(CONFIG, evaluate_every_steps=2)
    whole, groups = ranks.run(1, fit, str(tmp_path / "whole"), config, NEVER_BETTER)[0]
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates == {"sparse": 0.1 / 2**4, "dense": 0.004}  # 0.01 / 2**4 is below min_lr
    cut = str(tmp_path / "cut")
    ranks.run(1, fit, cut, replace(config, max_steps=6), NEVER_BETTER)
    manifest = read_manifest(step_path(f"{cut}/checkpoints", 6))
    assert manifest["plateau"]["factor"] == 0.25
    assert manifest["best"]["step"] > 0
    assert ranks.run(1, fit, cut, config, NEVER_BETTER)[0] == (whole, groups)
