"""What ranks of GPU tests do: functions that a rank finds by name."""

from __future__ import annotations

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.training.evaluate import evaluate
from pipeline.training.summary import EvaluateSummary, TrainSummary
from pipeline.training.train import train


def train_on_rank(rank: int, overrides: list[str]) -> TrainSummary:
    return train(load_config(TrainJob, overrides))


def evaluate_on_rank(rank: int, overrides: list[str]) -> EvaluateSummary:
    return evaluate(load_config(EvaluateJob, overrides))
