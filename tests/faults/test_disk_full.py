"""Fault 8: a save that finds no room says where and how many bytes, and leaves the last good step as it was."""

from __future__ import annotations

import gc
import resource
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.checkpoint import checkpointer as checkpointer_module
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.training import CheckpointConfig
from pipeline.runtime.errors import CheckpointError
from pipeline.training.hooks.saving import Saving
from tests.faults.checkpoints import MIXED, load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.messages import mentions
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded


def _save_without_room(rank: int, folder: str, limit_bytes: int, asynchronous: bool) -> str:
    """No file of this process may grow beyond `limit_bytes`: what a full disk does in the middle of a write."""
    _, model, optimizer, context = build_sharded(MIXED)
    checkpointer = Checkpointer(folder, model, optimizer, context, asynchronous=asynchronous)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The destructor of an earlier test's process group writes to its store's file, and ends the process if it cannot.
    gc.collect()
    gc.disable()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            checkpointer.save(2)
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        gc.enable()
    return str(error.value)


@pytest.mark.long
def test_a_save_that_runs_out_of_room_says_where_and_the_last_step_loads(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    folder = str(tmp_path / "checkpoints")
    digests = ranks.run(2, save_steps, folder, [1])[0]
    limits, count = (0, 1000, 6000), 0
    for limit in limits:
        for asynchronous in (False, True):
            for message in ranks.run(2, _save_without_room, folder, limit, asynchronous):
                assert folder in message and "bytes" in message and "File too large" in message, message
            assert sorted(path.name for path in Path(folder).iterdir()) == ["step_00000001"]
            count += 1
    assert ranks.run(2, load_once, folder)[0] == (1, digests[1])
    fault(8, f"{count} of {count} named file and bytes, no rest, step N-1 loads exactly", count=count)


def _fails_beforehand(rank: int, folder: str, free: int) -> list[str]:
    _, model, optimizer, context = build_sharded(MIXED)
    checkpointer = Checkpointer(folder, model, optimizer, context)
    messages = []
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage("/")._replace(free=free)
    try:
        for action in (checkpointer.check_free_space, lambda: checkpointer.save(1)):
            with pytest.raises(CheckpointError) as error:
                action()
            messages.append(str(error.value))
    finally:
        shutil.disk_usage = usage
    return messages


def test_too_little_room_is_said_before_training_and_before_a_save(ranks: RankPool, tmp_path: Path) -> None:
    for before_training, before_save in ranks.run(2, _fails_beforehand, str(tmp_path / "checkpoints"), 1234):
        assert "1,234 bytes" in before_training and "room for 3 checkpoints" in before_training
        assert "1,234 bytes" in before_save and str(tmp_path) in before_save
    assert list(tmp_path.iterdir()) == []


def _has_no_memory_for_a_copy(rank: int, folder: str) -> str:
    _, model, optimizer, context = build_sharded(MIXED)
    checkpointer = Checkpointer(folder, model, optimizer, context, asynchronous=True)
    checkpointer.check_free_space()  # there is enough
    with patch.object(checkpointer_module, "free_host_bytes", lambda used: 5 << 10):
        with pytest.raises(CheckpointError) as error:
            checkpointer.check_free_space()
        Checkpointer(folder, model, optimizer, context).check_free_space()  # needs no copy
    return str(error.value)


def test_too_little_host_memory_for_an_asynchronous_save_is_said_before_training(
    ranks: RankPool, tmp_path: Path
) -> None:
    for message in ranks.run(2, _has_no_memory_for_a_copy, str(tmp_path / "checkpoints")):
        assert mentions(message, "2 ranks 5.00 KiB checkpoint.asynchronous=false"), message


class _Failing:
    """A checkpointer whose saves fail as told."""

    asynchronous = False

    def __init__(self, fails: list[bool]) -> None:
        self._fails = fails

    def save(self, step: int, values: object, files: object) -> str:
        if self._fails.pop(0):
            raise CheckpointError(f"step {step} was not saved")
        return "path"

    def wait(self) -> None: ...


@pytest.mark.parametrize(
    ("policy", "fails", "raised_at"),
    [
        ("stop", [False, True], 2),
        ("continue", [True, True, False, True, True, True], 6),
        ("continue", [True, False], None),
        ("continue", [False, True], 3),  # at the end: the last step was not saved
    ],
)
def test_the_policy_says_when_a_failed_save_ends_the_run(policy: str, fails: list[bool], raised_at: int | None) -> None:
    saving = Saving(CheckpointConfig(on_failure=policy, max_failures_in_a_row=3), _Failing(list(fails)))
    count = 0
    try:
        for step in range(1, len(fails) + 1):
            count = step
            saving.save(step, {})
        count += 1
        saving.finish()
    except CheckpointError:
        assert count == raised_at
    else:
        assert raised_at is None
