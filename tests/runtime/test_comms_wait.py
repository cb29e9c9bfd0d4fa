"""The clock of `comms %` runs whenever a step waits for other ranks, and at no other time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.config.training import CommsConfig
from pipeline.data.read.batch import Batch
from pipeline.runtime.process.comms_wait import CommsWait, waiting, working
from pipeline.sharding.torchrec.sharder import TimedTrainPipeline
from tests.support.clicks import Clicks, labelled
from tests.support.optimizers import ROWWISE
from tests.support.ranks import RankPool
from tests.training.tiny import TinyTable, batches, build

KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
NUM_STEPS = 3
LATEST_S = 60.0  # a rank whose wait is never counted is given up on after so long


class _OnBatches(nn.Module):
    """forward(Batch) for a train pipeline, its loss through a module whose forward may be hooked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.Identity()

    def forward(self, batch: Batch) -> Any:
        return self.loss(self.model(batch.sparse_features, batch.labels))


def _steps(rank: int, pipelined: bool) -> list[tuple[str, bool]]:
    """What the training thread did in its steps, and whether the clock ran while it did: waits for work, layers' forwards."""
    tables = [TinyTable(f"t{index}", kind) for index, kind in enumerate(KINDS)]
    model, optimizer = build(rank, tables, ROWWISE, CommsConfig(shared_memory=False))
    task = _OnBatches(model.module)
    model._dmp_wrapped_module = task
    clock, seen = CommsWait(), []
    original = dist.Work.wait

    def wait(work: Any, *arguments: Any) -> Any:
        seen.append(("wait", clock._is_running))
        return original(work, *arguments)

    task.model.over.register_forward_hook(lambda *_: seen.append(("layers", clock._is_running)))
    drawn = batches(tables, NUM_STEPS, rank, 2)
    stream = (Batch(torch.zeros(16, 0), features, labels, torch.ones(16)) for features, labels in drawn)
    # Only the test replaces it: nothing of the package does.
    with patch.object(dist.Work, "wait", wait), clock.clocked(task.loss):
        if pipelined:
            pipeline = TimedTrainPipeline(model, optimizer, torch.device("cpu"), execute_all_batches=True)
            for _ in range(NUM_STEPS):
                pipeline.progress(stream)
        else:
            for batch in stream:
                optimizer.zero_grad()
                model(batch)[0].backward()
                optimizer.step()
    assert not clock._is_running and not task.loss._forward_hooks
    return seen


@pytest.mark.parametrize("pipelined", [True, False])
def test_every_wait_for_a_collective_is_counted_and_no_layer_is(ranks: RankPool, pipelined: bool) -> None:
    for seen in ranks.run(2, _steps, pipelined):
        waits = [counted for what, counted in seen if what == "wait"]
        # Splits, ids, pooled rows and their gradients, of three shardings.
        assert len(waits) >= 6 * NUM_STEPS and all(waits), f"{waits.count(False)} of {len(waits)} waits are not counted"
        assert [counted for what, counted in seen if what == "layers"] == [False] * NUM_STEPS


def _say_when_running(clock: CommsWait, path: Path) -> None:
    """Write `path` once the clock has been seen running."""
    end = time.monotonic() + LATEST_S
    while time.monotonic() < end and not clock._is_running:
        time.sleep(0.001)
    written = path.with_suffix(".new")
    written.write_text(str(clock._is_running))
    written.rename(path)  # the other rank reads the file as soon as it exists


def _hold(path: Path) -> str:
    """Come late: only when the other rank's clock has been seen running, or never will be."""
    end = time.monotonic() + LATEST_S + 30
    while time.monotonic() < end and not path.exists():
        time.sleep(0.001)
    return path.read_text() if path.exists() else "no answer"


def _under_ddp(clock: CommsWait, late: Callable[[], object] | None) -> None:
    loss, layer = Clicks().train(), nn.parallel.DistributedDataParallel(nn.Linear(4, 1), static_graph=True)
    batch = labelled(torch.ones(8))
    with clock.clocked(loss):
        value, _ = loss(batch, layer(torch.ones(8, 4)))
        if late:
            layer.module.weight.register_hook(lambda _: late() and None)
        value.backward()


def _through_memory(clock: CommsWait, late: Callable[[], object] | None) -> None:
    tables = [TinyTable("a"), TinyTable("b")]
    model, _ = build(dist.get_rank(), tables, ROWWISE)
    features, labels = next(batches(tables, 1, dist.get_rank(), 2))
    with clock.clocked(nn.Identity()):
        if late:
            late()
        model(features, labels)


def _observed(rank: int, step: Callable[..., None], folder: str) -> str:
    """Rank 0 waits in `step` for rank 1, which joins once it has been told that rank 0's clock runs."""
    clock, path = CommsWait(), Path(folder) / "running"
    if rank == 1:
        said: list[str] = []
        step(clock, lambda: said.append(_hold(path)))
        return said[0]
    observer = threading.Thread(target=_say_when_running, args=(clock, path))
    observer.start()
    step(clock, None)
    observer.join()
    assert not clock._is_running
    return path.read_text()


@pytest.mark.parametrize("step", [_under_ddp, _through_memory])
def test_a_rank_that_waits_where_python_does_not_is_counted(
    ranks: RankPool, step: Callable[..., None], tmp_path: Path
) -> None:
    assert ranks.run(2, _observed, step, str(tmp_path)) == ["True", "True"]


def test_work_inside_a_wait_is_taken_out_and_other_threads_count_nothing() -> None:
    clock = CommsWait()
    states = []

    def other_thread() -> None:
        with waiting():
            states.append(clock._is_running)

    with clock.clocked(nn.Identity()):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        with waiting():
            states.append(clock._is_running)
            with working():
                states.append(clock._is_running)
                with waiting():
                    states.append(clock._is_running)
            states.append(clock._is_running)
    assert states == [False, True, False, True, True]
    before = clock.seconds
    with waiting():
        pass
    assert not clock._is_running and clock.seconds == before > 0
