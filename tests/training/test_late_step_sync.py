"""Flags that are read one batch late leaves the run as it is: weights, metrics, saved steps and errors.

A GPU trains by it. Here it runs on the lookups, exchanges and optimizers that a GPU rank has, on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.runtime.errors import UserError
from pipeline.training import trainer
from pipeline.training.hooks.base import Hook, TrainingParts
from pipeline.training.step_sync import LateStepSync, StepSync
from tests.support.clicks import Clicks, labelled
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded
from tests.training.tiny_training import CONFIG, KINDS, DrawnReader, fit_drawn

SKIP = replace(CONFIG, non_finite_loss="skip", max_non_finite_steps=2, evaluate_every_steps=5)
ROLLBACK = replace(CONFIG, non_finite_loss="rollback", max_non_finite_steps=2)
COMPARED = ("ne", "num_skipped_steps", "num_bad_rows", "auc")


def _late(config: TrainerConfig, parts: TrainingParts, hooks: Sequence[Hook]) -> StepSync:
    allowed = config.max_non_finite_steps if config.non_finite_loss != "stop" else 0
    assert parts.optimizer.can_skip_on_device
    return LateStepSync(parts.model, parts.optimizer, torch.device("cpu"), allowed)


def _fit(rank: int, is_late: bool, folder: str, arguments: tuple[Any, ...]) -> Any:
    make = _late if is_late else trainer._make_sync
    with patch.object(trainer, "_make_sync", make):
        try:
            digest, result = fit_drawn(rank, 2, folder, *arguments, fast_cpu=False)
        except UserError as error:
            return type(error).__name__, str(error)
        return digest, result.step, result.metrics, result.preempted


def _both(ranks: RankPool, folder: Path, *arguments: Any, fit: Callable[..., Any] = _fit) -> tuple[Any, ...]:
    """(what the run gives, its lines of metrics, its checkpoints) by each sync."""
    runs = []
    for name in ("now", "late"):
        given = ranks.run(2, fit, name == "late", str(folder / name), arguments)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        kept = [(line["kind"], line["step"], *(line.get(key) for key in COMPARED)) for line in lines]
        runs.append((given, kept, sorted(path.name for path in (folder / name / "checkpoints").glob("step_*"))))
    return tuple(runs)


@pytest.mark.long
@pytest.mark.parametrize(("sparse", "dense"), [("rowwise_adagrad", "adam"), ("sgd", "sgd"), ("adagrad", "adagrad")])
def test_skipped_steps_change_no_bit(ranks: RankPool, tmp_path: Path, sparse: str, dense: str) -> None:
    """The first step is one of them: DDP has not seen the static graph of a step by then."""
    optimizers = OptimizerConfig(
        SparseOptimizerConfig(sparse, lr=0.5),
        DenseOptimizerConfig(dense, lr=0.01, momentum=0.9 if dense == "sgd" else 0.0),
    )
    now, late = _both(ranks, tmp_path, SKIP, 5, optimizers, (0, 3, 4, 9))
    assert now == late
    assert ("train", 12) in [line[:2] for line in late[1]] and late[1][-2][3] == 4


def test_a_run_stops_at_the_step_of_the_bad_loss_and_names_its_rows(ranks: RankPool, tmp_path: Path) -> None:
    now, late = _both(ranks, tmp_path, CONFIG, 4, None, (6,))
    assert now == late
    assert late[0][0][0] == "NonFiniteLossError" and "after step 6" in late[0][0][1] and late[2] == ["step_00000004"]


@pytest.mark.long
def test_a_rollback_goes_back_past_the_same_batches(ranks: RankPool, tmp_path: Path) -> None:
    now, late = _both(ranks, tmp_path, ROLLBACK, 4, None, (5, 6, 7))
    assert now == late and late[0][0][1] == 8  # of 12 steps 4 are left out


class BrokenReader(DrawnReader):
    """Rank 1 cannot read its eighth batch, which is read two steps ahead."""

    def batches(self, epoch: int, start_step: int = 0) -> Any:
        for number, batch in enumerate(super().batches(epoch, start_step), epoch * self.steps_per_epoch + start_step):
            if number == 7 and self._rank == 1:
                raise OSError("the disk is gone")
            yield batch

    def empty_batch(self) -> Batch:
        batch = next(super().batches(0))
        return replace(batch, sample_weights=torch.zeros_like(batch.sample_weights))


def _fit_broken(rank: int, is_late: bool, folder: str, arguments: tuple[Any, ...]) -> Any:
    with patch("tests.training.tiny_training.DrawnReader", BrokenReader), pytest.raises(OSError) as error:
        _fit(rank, is_late, folder, arguments)
    return str(error.value)


@pytest.mark.long
def test_a_failed_reader_updates_nothing_and_the_last_whole_step_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    now, late = _both(ranks, tmp_path, CONFIG, 4, fit=_fit_broken)
    assert now == late and late[0] == ["the disk is gone"] * 2 and late[2] == ["step_00000004", "step_00000005"]


def _heard(rank: int) -> list[Any]:
    """What a rank knows after each batch of the saves that rank 1 wants at batches 1 and 3."""
    _, model, optimizer, context = build_sharded(KINDS, fast_cpu=False)
    task, sync, heard = Clicks(), LateStepSync(model, optimizer, context.device), []
    with sync.guarding(task):
        for number in range(5):
            sync.save_wanted = rank == 1 and number in (1, 3)
            task(labelled(torch.ones(2)), torch.zeros(2, requires_grad=True))
            if number == 3:
                sync.settle()
            heard.append(sync.save_agreed)
    return heard


def test_wishes_are_heard_one_batch_late_or_when_settled(ranks: RankPool) -> None:
    assert ranks.run(2, _heard) == [[False, False, True, True, False]] * 2
