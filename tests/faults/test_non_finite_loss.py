"""Fault 25: a NaN loss once, for a while and for ever. Weights stay finite, and what is skipped is exact on every rank."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.config.training import TrainerConfig
from pipeline.training.optimizer import apply_schedule
from pipeline.training.readers import BatchOrder
from pipeline.training.step_sync import NonFiniteLossError
from tests.faults.conftest import FaultRecorder
from tests.support.messages import mentions
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, full_state
from tests.training.tiny_training import CONFIG, KINDS, SCHEDULE, fit_drawn

ROLLBACK = replace(CONFIG, non_finite_loss="rollback", max_non_finite_steps=2)  # 12 steps


def _plain(rank: int, numbers: Sequence[int | None]) -> str:
    """The model's digest after plain steps over these batches; None is a step that updates nothing."""
    _, model, optimizer, _ = build_sharded(KINDS)
    model.train()
    for step, number in enumerate(numbers):
        apply_schedule(optimizer, SCHEDULE, step)
        optimizer.zero_grad()
        if number is not None:
            model(next(draw_batches(rank, 2, 1, number)))[0].backward()
        optimizer.step()
    assert all(value.isfinite().all() for value in full_state(model).values())
    return digest(model)


def _ends_with(rank: int, folder: str, config: TrainerConfig, nan_steps: tuple[int, ...]) -> str:
    try:
        return fit_drawn(rank, 2, folder, config, 4, None, nan_steps)[0]
    except NonFiniteLossError as error:
        return str(error)


@pytest.mark.long
def test_a_single_bad_batch_updates_nothing_under_skip_and_rollback(
    ranks_each_way: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    expected = ranks_each_way.run(2, _plain, [0, 1, 2, 3, 4, None, *range(6, 12)])[0]
    for policy in ("skip", "rollback"):
        config = replace(ROLLBACK, non_finite_loss=policy)
        assert ranks_each_way.run(2, _ends_with, str(tmp_path / policy), config, (5,))[0] == expected
    fault(25, "NaN label on one of 2 ranks: no update of that batch, end bitwise equal to leaving it out", count=2)


@pytest.mark.long
def test_a_lasting_nan_goes_back_once_and_past_exactly_the_batches_since(
    ranks_each_way: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    """Steps 4, 5 and 6, 7, 8: the checkpoint of step 4 is the newest before the streak that begins with batch 6."""
    expected = ranks_each_way.run(2, _plain, [0, 1, 2, 3, 9, 10, 11])[0]
    assert ranks_each_way.run(2, _ends_with, str(tmp_path), ROLLBACK, (6, 7, 8))[0] == expected
    manifest = read_manifest(step_path(str(tmp_path / "checkpoints"), 7))
    assert manifest["skipped_steps"] == [[4, 5]]
    assert manifest["reader"] == {"epoch": 2, "step": 0}
    assert list_steps(str(tmp_path / "checkpoints")) == [4, 7]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    fault(
        25,
        "3 NaN batches in a row, 2 allowed: back to step 4, batches 4 to 8 skipped on both ranks, end bitwise "
        "equal to a run without them",
        count=1,
    )


@pytest.mark.long
def test_a_checkpoint_saved_amid_the_bad_steps_is_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    """Batches 7, 8 and 9 are bad: step 8 is committed between them, and holds the weights that met them."""
    expected = ranks.run(2, _plain, [0, 1, 2, 3, 10, 11])[0]
    assert ranks.run(2, _ends_with, str(tmp_path), ROLLBACK, (7, 8, 9))[0] == expected
    assert list_steps(str(tmp_path / "checkpoints")) == [4, 6]


@pytest.mark.long
def test_a_resumed_run_skips_the_same_batches(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, _plain, [0, 1, 2, 3, 9, 10, 11])[0]
    ranks.run(2, _ends_after_rollback, str(tmp_path))
    assert list_steps(str(tmp_path / "checkpoints")) == [4, 6]
    assert ranks.run(2, _ends_with, str(tmp_path), ROLLBACK, (6, 7, 8))[0] == expected


def _ends_after_rollback(rank: int, folder: str) -> None:
    """One step short of the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchOrder, "total_steps", property(lambda self: 6 if self.skipped else 12))
        fit_drawn(rank, 2, folder, ROLLBACK, 4, None, (6, 7, 8))


@pytest.mark.long
def test_a_nan_that_comes_again_stops_the_run_with_the_rows(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    messages = ranks.run(2, _ends_with, str(tmp_path), ROLLBACK, tuple(range(6, 99)))
    for message in messages:
        assert "after step 6: the loss is" in message and "3 time(s) in a row with 2 allowed" in message
        assert "already gone back to step 4 and past the batches of 5 steps" in message
        assert mentions(message, "32: epoch 1 step 5 rank 0 row (nan)")  # batch 11
    assert ranks.run(2, _weights_are_finite, str(tmp_path))[0]
    fault(
        25,
        "NaN for ever from batch 6 on: one step back, then the end on both ranks, naming the row of rank 0; "
        "weights finite",
        count=1,
    )


def _weights_are_finite(rank: int, folder: str) -> bool:
    _, model, optimizer, context = build_sharded(KINDS)
    Checkpointer(f"{folder}/checkpoints", model, optimizer, context).restore_latest()
    return all(bool(value.isfinite().all()) for value in full_state(model).values())


def test_without_a_checkpoint_to_go_back_to_the_run_stops_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run(2, _ends_with, str(tmp_path), ROLLBACK, (0, 1, 2))
    assert all(mentions(m, "checkpoint.save_every_steps") for m in messages)


class _Recorded(Checkpointer):
    """Keeps a checksum of weights and optimizer state as saved and as restored."""

    digests: ClassVar[dict[tuple[str, int], str]] = {}

    def save(self, step: int, *args: Any, **kwargs: Any) -> Any:
        self.digests["saved", step] = self._digest()
        return super().save(step, *args, **kwargs)

    def restore(self, step: int, *args: Any, **kwargs: Any) -> Any:
        manifest = super().restore(step, *args, **kwargs)
        self.digests["restored", step] = self._digest()
        return manifest

    def _digest(self) -> str:
        optimizer = self._trained.optimizer
        assert optimizer is not None
        local = io.BytesIO()
        torch.save([_local(self._trained.model.state_dict()), _local(optimizer.state_dict())], local)
        return hashlib.sha256(local.getvalue()).hexdigest()


def _local(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        return [shard.tensor.clone() for shard in value.local_shards()]
    if isinstance(value, dict):
        return {str(key): _local(inner) for key, inner in value.items()}
    return [_local(inner) for inner in value] if isinstance(value, list) else value


def _states_around_a_rollback(rank: int, folder: str) -> dict[tuple[str, int], str]:
    from tests.training import tiny_training

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_training, "Checkpointer", _Recorded)
        _Recorded.digests = {}
        fit_drawn(rank, 2, folder, ROLLBACK, 4, None, (6, 7, 8))
    return _Recorded.digests


@pytest.mark.long
def test_the_state_after_going_back_equals_the_committed_one_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    for digests in ranks.run(2, _states_around_a_rollback, str(tmp_path)):
        assert digests["restored", 4] == digests["saved", 4] != digests["saved", 7]
