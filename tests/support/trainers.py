"""A Trainer with this release's hooks over parts that a test has made."""

from __future__ import annotations

from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import CheckpointConfig, ScheduleConfig, TrainerConfig
from pipeline.training.hooks.base import TrainingParts, build_hooks
from pipeline.training.trainer import Trainer


def make_trainer(
    config: TrainerConfig,
    schedule: ScheduleConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    profile: str | None = None,
    run_dir: str = "unused",
    **parts: Any,
) -> Trainer:
    """Without `checkpoint` the last step alone is saved. `parts` are TrainingParts' own."""
    job = TrainJob(
        name="test",
        run_dir=run_dir,
        trainer=config,
        schedule=schedule or ScheduleConfig(),
        checkpoint=checkpoint or CheckpointConfig(save_every_minutes=None),
        profile=profile,
    )
    made = TrainingParts(**parts)
    return Trainer(job, made, build_hooks(job, made))
