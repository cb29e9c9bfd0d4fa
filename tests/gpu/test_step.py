"""What a steady training step asks of a GPU, and what a skipped step leaves as it was."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_leaves

from pipeline import devices
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.extras.frequency_split.variable_batches import leave_out_empty_bags
from pipeline.training.readers import pinned
from tests.gpu.conftest import Gpus
from tests.support import sharded_models
from tests.training.tiny_training import CONFIG, fit_drawn

# TorchRec reads how many ids each rank sends.
TORCHRECS_OWN = ("sparse/jagged_tensor.py:", "train_pipeline/runtime_forwards.py:", "distributed/dist_data.py:")
SKIP = replace(CONFIG, non_finite_loss="skip", max_non_finite_steps=2)


@pytest.mark.usefixtures("needs_shadow")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_host_waits_for_the_gpu_in_no_steady_step(
    gpus: Gpus, prepared_clicks: str, tmp_path: Path, world_size: int
) -> None:
    words = [
        "experiment=quickstart",
        f"data.path={prepared_clicks}",
        "trainer.log_every_steps=100",
        "tables.default.sharding.sharding_types=[table_wise,row_wise]",
    ]
    syncs = []
    for steps in (4, 8):
        job = gpus.train(world_size, [*words, f"trainer.max_steps={steps}"], tmp_path / str(steps))
        assert job.reports[0].problems == []
        syncs.append(job.reports[0].syncs)
    in_steps: Counter[str] = syncs[1] - syncs[0]
    assert [each for each in in_steps if not each.split()[-1].startswith(TORCHRECS_OWN)] == []


def _metrics(rank: int, device: str, folder: str) -> dict[str, Any]:
    here = partial(init_distributed, compute_device=device)
    with patch.object(sharded_models, "init_distributed", here):
        _, result = fit_drawn(rank, 2, folder, SKIP, nan_steps=(0, 3, 4, 9), fast_cpu=False)
    return result.metrics


def test_skipped_steps_change_nothing(gpus: Gpus, tmp_path: Path) -> None:
    on_gpu, reports = gpus.run(2, _metrics, "auto", str(tmp_path / "gpu"))
    on_cpu = gpus.run_on_cpu(2, _metrics, "cpu", str(tmp_path / "cpu"))
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=1e-5)
    for report in filter(None, reports):
        assert report.problems == []


def _copied_beside_a_step(rank: int) -> None:
    """Copy two batches on another stream than the current one, which uses the first when the second is allocated."""
    lengths = torch.tensor([1, 2, 0, 0, 1, 1])
    ids = keyed_jagged_tensor(["a", "b"], torch.arange(5), lengths, 3, [3, 2])
    batch = Batch(torch.ones(3, 4), leave_out_empty_bags(ids, ["a", "b"]), torch.zeros(3), torch.ones(3)).pin_memory()
    beside, device = torch.cuda.Stream(), torch.device("cuda", torch.cuda.current_device())
    for _ in range(2):
        with torch.cuda.stream(beside):
            moved = batch.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(beside)
        moved.record_stream(torch.cuda.current_stream())
        parts = [part for part in tree_leaves([vars(moved), moved.sparse_features]) if torch.is_tensor(part)]
        for part in parts:
            if part.device == device:
                part.sum()
        del moved, part, parts


@pytest.mark.usefixtures("needs_shadow")
def test_a_batchs_memory_is_not_given_away_while_it_is_read(gpus: Gpus) -> None:
    _, [report] = gpus.run(1, _copied_beside_a_step)
    assert report.problems == [] and report.record_streams >= 12


def _pinned_on_a_thread(rank: int) -> int:
    batch = Batch(
        torch.ones(3, 4),
        keyed_jagged_tensor(["a"], torch.arange(3), torch.ones(3), 3, [3]),
        torch.zeros(3),
        torch.ones(3),
    )
    with devices.using(devices.named("cuda", rank)), ThreadPoolExecutor(1) as thread:
        assert thread.submit(pinned, batch).result().labels.is_pinned()
        return thread.submit(torch.cuda.current_device).result()


def test_threads_that_pin_batches_use_their_ranks_gpu(gpus: Gpus) -> None:
    used, _ = gpus.run(2, _pinned_on_a_thread)
    assert used == [0, 1]
