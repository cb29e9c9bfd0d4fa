"""Make the train job of a challenger, and the collective functions that train and score."""

from __future__ import annotations

import copy
from dataclasses import fields

from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.retraining import GateConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.config.training import LRSchedule, WarmStartConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.streams import num_steps
from pipeline.retraining.feature_changes import dense_policy
from pipeline.retraining.gate import Scores
from pipeline.retraining.registry import Version
from pipeline.runtime.process import watchdog


def train_job(job: RetrainJob, data: str, run_dir: str, champion: Version | None) -> TrainJob:
    values = {field.name: copy.deepcopy(getattr(job, field.name)) for field in fields(TrainJob)}
    trained = TrainJob(**values | {"run_dir": run_dir})
    trained.data.path = data
    trained.checkpoint.resume = True
    if job.growth.anneal:
        anneal(trained)
    if champion is not None:
        trained.warm_start = warm_start_of(champion, job)
    return trained


def warm_start_of(champion: Version, job: RetrainJob) -> WarmStartConfig:
    """Start from the champion's checkpoint, with its optimizer state unless growth.reset_optimizer is set."""
    return WarmStartConfig(
        checkpoint=champion.checkpoint,
        data_path=champion.data,
        optimizer="reset" if job.growth.reset_optimizer else "keep",
        dense=dense_policy(job, load_saved_job(TrainJob, champion.config)),
    )


def anneal(job: TrainJob) -> None:
    """Let learning rates that are constant after their warm-up fall to 0 over the job's steps."""
    trainer = job.trainer
    rows = load_dataset(job.data.path).splits["train"].num_rows
    epoch = num_steps(rows, trainer.micro_batch_size, job.data.reader.num_streams, True)
    steps = min(trainer.epochs * epoch // trainer.gradient_accumulation_steps, trainer.max_steps or 2**62)
    for name in ("sparse", "dense"):
        schedule = getattr(job.schedule, name)
        if schedule.kind == "constant" and steps > schedule.warmup_steps:
            falling = LRSchedule(
                "poly", schedule.warmup_steps, schedule.warmup_steps, steps - schedule.warmup_steps, 1.0
            )
            setattr(job.schedule, name, falling)


def train_challenger(job: TrainJob) -> None:
    """Collective on every rank of the group: train."""
    from pipeline.training.preflight import validate_job

    validate_job(job, job.world_size)
    watchdog.use(job.trainer.limits())
    from pipeline.training.train import train  # loads torch

    train(job)


def score_window(
    config: str,
    checkpoint: str,
    data: str,
    gate: GateConfig,
    world_size: int,
    limits: watchdog.Limits,
    propensity: str | None,
) -> Scores:
    """Collective: score.

    Defined here, so that torch is imported only if there is something to score.
    """
    from pipeline.retraining.scoring import score

    return score(config, checkpoint, data, gate, world_size, limits, propensity)
