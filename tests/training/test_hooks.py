"""Hooks: a user's own by registration, saving by the clock, a rollback's numbers; and a task that inherits from nothing of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.config.training import CheckpointConfig, TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.extras.debug.hooks.anomaly import AnomalyError
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import MetricsWriter
from pipeline.runtime.process import preemption
from pipeline.training.hooks import throughput as progress_hook
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState, build_hooks, hook_names
from pipeline.training.hooks.saving import SaveCheckpoints
from pipeline.training.hooks.throughput import ProgressBar
from pipeline.training.readers import BatchOrder
from pipeline.training.trainer import FitResult, Trainer
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest
from tests.training.tiny_training import CONFIG, KINDS, SCHEDULE, DrawnReader, fit_drawn

Clock = Callable[[], float]
ROLLBACK = replace(CONFIG, non_finite_loss="rollback", max_non_finite_steps=2)  # 12 steps


class Reader(DrawnReader):
    """On rank 1 something happens before one batch."""

    def __init__(self, rank: int, at: int, event: Callable[[], None], **options: Any) -> None:
        super().__init__(rank, 2, **options)
        self._at, self._event = at, event

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for number, batch in enumerate(super().batches(epoch, start_step), epoch * self.steps_per_epoch + start_step):
            if number == self._at and self._rank == 1:
                self._event()
            yield batch

    def empty_batch(self) -> Batch:
        batch = next(super().batches(0))
        return replace(batch, sample_weights=torch.zeros_like(batch.sample_weights))


def run_training(
    rank: int,
    folder: str,
    config: TrainerConfig,
    checkpoint: CheckpointConfig,
    reader: DrawnReader,
    as_task: Callable[[nn.Module], nn.Module] | None = None,
    clock: Clock | None = None,
) -> tuple[str, FitResult]:
    """The model's digest and the result. `clock` is that of the saving hook."""
    task, model, optimizer, context = build_sharded(KINDS, as_task=as_task)
    job = TrainJob(name="test", run_dir=folder, trainer=config, schedule=SCHEDULE, checkpoint=checkpoint)
    checkpointer = Checkpointer(f"{folder}/checkpoints", model, optimizer, context, keep_last_n=9)
    writer = MetricsWriter(folder) if rank == 0 else None
    parts = TrainingParts(model, task, optimizer, reader, checkpointer, context, writer=writer)
    hooks = build_hooks(job, parts)
    if clock is not None:
        hooks = [SaveCheckpoints(job, parts, clock) if hook.name == "saving" else hook for hook in hooks]
    result = Trainer(job, parts, hooks).fit(checkpointer.restore_latest())
    if writer:
        writer.close()
    return digest(model), result


def by_steps(every: int) -> CheckpointConfig:
    return CheckpointConfig(save_every_steps=every, save_every_minutes=None)


def train_lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


class PlainTask(nn.Module):
    """A user's: a model and a loss in a forward, and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(batch.dense_features, batch.sparse_features).reshape(-1).float()
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.sample_weights)
        return loss, logits.detach()


def _plain(rank: int, folder: str, nan_steps: tuple[int, ...]) -> tuple[str, int]:
    reader = DrawnReader(rank, 2, nan_steps=nan_steps)
    found, result = run_training(rank, folder, ROLLBACK, by_steps(4), reader, PlainTask)
    return found, result.step


@pytest.mark.long
@pytest.mark.parametrize("nan_steps", [(6, 7, 8), pytest.param((), marks=pytest.mark.campaign)])
def test_a_task_without_our_base_class_trains_and_rolls_back_to_the_same_bits(
    ranks: RankPool, tmp_path: Path, nan_steps: tuple[int, ...]
) -> None:
    ours = ranks.run(2, fit_drawn, 2, str(tmp_path / "ours"), ROLLBACK, 4, None, nan_steps)[0]
    assert ranks.run(2, _plain, str(tmp_path / "plain"), nan_steps)[0] == (ours[0], ours[1].step)
    if nan_steps:
        assert read_manifest(step_path(str(tmp_path / "plain/checkpoints"), 7))["skipped_steps"] == [[4, 5]]


def _stopped(rank: int, folder: str) -> tuple[int, bool]:
    reader = Reader(rank, 5, preemption.request)
    try:
        _, result = run_training(rank, folder, CONFIG, by_steps(0), reader, PlainTask)
    finally:
        preemption.withdraw()
    return result.step, result.preempted


def test_a_task_without_our_base_class_stops_at_the_same_step_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """One rank is asked to stop while it reads a few batches ahead."""
    (step, preempted), other = ranks.run(2, _stopped, str(tmp_path))
    assert (step, preempted) == other and preempted and step < 12
    assert list_steps(str(tmp_path / "checkpoints")) == [step]


def _fail() -> None:
    raise OSError(5, "cannot read", "train/00001.parquet")


def _failed(rank: int, folder: str) -> str:
    with pytest.raises(OSError, match="cannot read") as error:
        run_training(rank, folder, CONFIG, by_steps(0), Reader(rank, 7, _fail), PlainTask)
    return str(error.value)


def test_a_task_without_our_base_class_ends_all_ranks_with_one_readers_error(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _failed, str(tmp_path))
    assert first == second and "train/00001.parquet" in first
    (step,) = list_steps(str(tmp_path / "checkpoints"))
    assert 0 < step <= 7, "the last whole step is saved; the pipeline reads a few batches ahead of it"


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = FakeClock()


@register("hook", "test_minute_a_step")
class MinuteAStep(Hook):
    """Moves the clock: a minute a step on rank 0, and years on rank 1, whose clock must not matter."""

    def on_step_start(self, state: TrainingState) -> None:
        CLOCK.now = 60.0 * state.step if self.parts.context.is_main else 1e9 * state.step


def _saves_by_the_clock(rank: int, folder: str) -> int:
    CLOCK.now = 0.0
    checkpoint = CheckpointConfig(save_every_minutes=2.5)
    config = replace(CONFIG, hooks=["test_minute_a_step"])
    return run_training(rank, folder, config, checkpoint, DrawnReader(rank, 2), clock=CLOCK)[1].step


@pytest.mark.long
def test_minutes_that_pass_on_rank_0_save_the_same_steps_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Step 4 begins in minute 3; what it saves starts the minutes anew."""
    assert ranks.run(2, _saves_by_the_clock, str(tmp_path)) == [12, 12]
    assert list_steps(str(tmp_path / "checkpoints")) == [4, 7, 10, 12]


@register("hook", "test_counting")
class Counting(Hook):
    """Counts steps, logs the count, saves it, and goes on with it."""

    count = 0

    def on_step_end(self, state: TrainingState) -> None:
        self.count += 1

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {"counted": self.count}

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {"counted": self.count}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        self.count = manifest["counted"]


def _counted(rank: int, folder: str, max_steps: int) -> int:
    config = replace(CONFIG, max_steps=max_steps, hooks=["test_counting"])
    return run_training(rank, folder, config, by_steps(0), DrawnReader(rank, 2))[1].step


@pytest.mark.long
def test_a_registered_hook_runs_logs_saves_and_is_restored(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _counted, str(tmp_path), 5)
    ranks.run(2, _counted, str(tmp_path), 12)
    assert read_manifest(step_path(str(tmp_path / "checkpoints"), 12))["counted"] == 12
    # The line of a step is written before a hook of one's own hears of its end.
    assert [line["counted"] for line in train_lines(tmp_path)] == [7, 11]


@register("hook", "test_watching")
class Watching(Hook):
    """Keeps what the last log line said of all ranks."""

    seen: ClassVar[list[dict[str, float]]] = []

    def on_step_end(self, state: TrainingState) -> None:
        type(self).seen = state.of_ranks


def _watched(rank: int, folder: str, port: int | None) -> list[dict[str, float]]:
    config = replace(CONFIG, max_steps=4, log_every_steps=2, hooks=["test_watching"], metrics_port=port)
    run_training(rank, folder, config, by_steps(0), DrawnReader(rank, 2))
    return Watching.seen


@pytest.mark.long
def test_every_rank_is_measured_where_prometheus_asks(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _watched, str(tmp_path / "watched"), 0)
    assert first == second and len(first) == 2  # rank 0 serves the numbers of both
    named = {"step_seconds", "input_stall_seconds", "comms_seconds", "peak_memory_bytes", "straggler_score"}
    assert all(set(each) == named and each["peak_memory_bytes"] > 1 << 20 for each in first)
    busy = [each["step_seconds"] - each["comms_seconds"] for each in first]
    middle = sum(busy) / 2
    assert [each["straggler_score"] for each in first] == pytest.approx([each / middle for each in busy])
    assert ranks.run(2, _watched, str(tmp_path / "alone"), None) == [[], []]


def test_hooks_of_a_users_come_after_ours_and_before_saving_and_a_misspelt_one_is_an_error() -> None:
    def names(*hooks: str) -> list[str]:
        return hook_names(TrainJob(name="test", trainer=TrainerConfig(hooks=list(hooks))))

    order = names("test_counting", "test_minute_a_step")
    assert order[order.index("early_stop") :] == [
        "early_stop", "plateau", "progressive", "test_counting", "test_minute_a_step", "saving", "publishing", "rollback", "heartbeat",
        "monitor", "table_stats", "tracker",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="test_counting"):
        names("test_countin")
    with pytest.raises(ValueError, match="saving"):
        names("saving")


def _rolls_back(rank: int, folder: str) -> int:
    reader = DrawnReader(rank, 2, nan_steps=(6, 7, 8))
    config = replace(ROLLBACK, log_every_steps=2)
    return run_training(rank, folder, config, by_steps(4), reader)[1].step


@pytest.mark.long
def test_samples_per_second_stay_above_zero_after_a_rollback(ranks: RankPool, tmp_path: Path) -> None:
    """Line 6 comes after steps 7 and 8 went back to step 4: -2 steps, it said, and so -2 batches in the time."""
    assert ranks.run(2, _rolls_back, str(tmp_path)) == [7, 7]
    lines = train_lines(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 6, 7]
    assert all(line["samples_per_s"] > 0 for line in lines)


def test_the_progress_bar_goes_back_with_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []

    @contextmanager
    def recording(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield SimpleNamespace(advance=shown.append)

    monkeypatch.setattr(progress_hook, "progress", recording)
    state: Any = SimpleNamespace(step=0, total_steps=10)
    bar = ProgressBar(None, SimpleNamespace(context=SimpleNamespace(is_main=True)))
    bar.on_train_start(state)
    for state.step in (1, 2, 3, 4, 5):
        bar.on_step_end(state)
    state.step = 2
    bar.on_rollback(state)
    for state.step in range(3, 11):
        bar.on_step_end(state)
    bar.close()
    assert sum(shown) == 10


def test_overfitting_reads_the_first_batches_again_and_again() -> None:
    reader: Any = DrawnReader(0, 1)
    once = [batch.labels for batch in reader.batches(0)][:4]
    config = TrainerConfig(
        global_batch_size=64, gradient_accumulation_steps=2, epochs=3, max_steps=5, overfit_batches=2
    )
    seen = [batch.labels for batch in BatchOrder(config, reader).batches(0)]
    assert [int(label.equal(other)) for label, other in zip(seen, [*once, *once, *once], strict=False)] == [1] * 10
    assert len(seen) == 10
    resumed = [batch.labels for batch in BatchOrder(config, reader).batches(3)]
    assert all(label.equal(other) for label, other in zip(resumed, seen[6:], strict=True))


class InfiniteReader(DrawnReader):
    """Row 3 of rank 1's sixth batch has a dense feature that is infinite."""

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for number, batch in enumerate(super().batches(epoch, start_step), epoch * self.steps_per_epoch + start_step):
            if number == 5 and self._rank == 1:
                batch.dense_features[3, 0] = float("inf")
            yield batch


def _anomaly(rank: int, folder: str) -> str:
    config = replace(CONFIG, hooks=["anomaly"], pipeline="base")
    with pytest.raises(AnomalyError) as error:
        run_training(rank, folder, config, by_steps(0), InfiniteReader(rank, 2), PlainTask)
    return str(error.value)


def test_the_first_layer_that_is_not_finite_is_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    other, own = ranks.run(2, _anomaly, str(tmp_path))
    assert "step 6: found on another rank" in other
    assert re.match(
        r"step 6: the output of model\.\w+.* infinite of .* in row 3; its input is not finite either; then", own
    )
