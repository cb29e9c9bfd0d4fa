"""A small run of a two-tower on generated clicks."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.training.summary import TrainSummary
from pipeline.training.train import train


def job_words(data: str, run_dir: Path, *more: str) -> list[str]:
    return [
        "experiment=user_item_two_tower",
        "hardware=cpu",
        "trainer.global_batch_size=512",
        "trainer.max_steps=24",
        f"data.path={data}",
        f"run_dir={run_dir}",
        "checkpoint.save_every_steps=8",
        "checkpoint.keep_best_n=1",
        "trainer.evaluate_every_steps=8",
        "trainer.log_every_steps=8",
        "trainer.early_stop.patience=5",
        "model.recall_at=[5,20]",
        *more,
    ]


def train_on_rank(rank: int, overrides: list[str]) -> TrainSummary:
    return train(load_config(TrainJob, overrides))
