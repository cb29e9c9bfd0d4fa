"""Fault 32: saves that are slower than their interval wait for each other, lose nothing, and hide no failure."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.checkpoint import step_writer
from pipeline.checkpoint.checkpointer import Checkpointer, InFlight
from pipeline.checkpoint.steps import list_steps
from pipeline.runtime.errors import CheckpointError
from tests.faults.checkpoints import MIXED, load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, train_steps
from tests.support.stored_tensors import stored_tensors


def _slow_saves(rank: int, folder: str, num_steps: int) -> tuple[dict[int, str], list[bool], list[str]]:
    """Save after every step though each write goes on until it is waited for.

    Digests at the saves, whether each write was over when it was waited for, and the log.
    """
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("pipeline.checkpoint"), Collect()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    write, wait = step_writer.write_shards, InFlight.wait
    waited_for, were_over = threading.Semaphore(0), []

    def slowly(*args: object) -> object:
        assert waited_for.acquire(timeout=600), "save() has waited for its own write"
        return write(*args)

    def release_and_wait(in_flight: InFlight) -> None:
        were_over.append(in_flight.done)
        waited_for.release()
        wait(in_flight)

    step_writer.write_shards = slowly
    try:
        with patch.object(InFlight, "wait", release_and_wait):
            _, model, optimizer, context = build_sharded(MIXED)
            checkpointer = Checkpointer(folder, model, optimizer, context, keep_last_n=99, asynchronous=True)
            digests = {}
            for step in range(1, num_steps + 1):
                train_steps(model, optimizer, draw_batches(rank, 2, 1, start=step))
                checkpointer.save(step)
                digests[step] = digest(model)  # and the next step trains on while this one is written
            checkpointer.wait()
    finally:
        step_writer.write_shards = write
        logger.removeHandler(handler)
    return digests, were_over, lines


@pytest.mark.long
def test_saves_slower_than_their_interval_wait_for_each_other_and_all_are_exact(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    folder, count = str(tmp_path / "checkpoints"), 3
    digests, were_over, lines = ranks.run(2, _slow_saves, folder, count)[0]
    assert list_steps(folder) == list(range(1, count + 1))
    assert were_over == [False] * count  # the last by wait()
    assert all(any(f"step {step}," in line for line in lines) for step in range(1, count + 1))
    for step in range(count, 0, -1):
        assert ranks.run(2, load_once, folder)[0] == (step, digests[step])
        for path in (Path(folder) / f"step_{step:08d}").iterdir():
            path.unlink()
        (Path(folder) / f"step_{step:08d}").rmdir()
    fault(
        32,
        f"{count} of {count} committed in order, each exact though training went on; waits are in the log",
        count=count,
    )


@pytest.mark.long
def test_an_asynchronous_step_is_bitwise_the_synchronous_one(ranks: RankPool, tmp_path: Path) -> None:
    for name, asynchronous in (("beside", True), ("before", False)):
        ranks.run(2, save_steps, str(tmp_path / name), [1, 2, 3], {"asynchronous": asynchronous})
    for step in (1, 2, 3):
        beside, before = (stored_tensors(tmp_path / name / f"step_{step:08d}") for name in ("beside", "before"))
        assert len(before) == 2 and beside == before


def _failing_write(rank: int, folder: str) -> tuple[str, list[int]]:
    """Rank 1 cannot write step 2; the failure of step 2 shows when step 3 is to be saved."""
    _, model, optimizer, context = build_sharded(MIXED)
    checkpointer = Checkpointer(folder, model, optimizer, context, asynchronous=True)
    checkpointer.save(1)
    checkpointer.wait()
    write = step_writer.write_shards

    def fail(*args: object) -> object:
        raise OSError(5, "Input/output error", "shard")

    if rank == 1:
        step_writer.write_shards = fail
    try:
        checkpointer.save(2)
        with pytest.raises(CheckpointError) as error:
            checkpointer.save(3)
    finally:
        step_writer.write_shards = write
    checkpointer.save(3)
    checkpointer.wait()
    return str(error.value), list_steps(folder)


def test_a_failure_beside_training_shows_on_every_rank_at_the_next_save(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    for message, steps in ranks.run(2, _failing_write, str(tmp_path / "checkpoints")):
        assert "step 2 was not saved" in message and "rank 1" in message and "Input/output error" in message
        assert steps == [1, 3]
    fault(32, "a write that fails beside training is raised on both ranks at the next save", count=1)
