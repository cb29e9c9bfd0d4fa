"""Fault 2, of chains: a process that dies before any one change of files of a chain's saves leaves a step that loads, exactly."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.checkpointer import Checkpointer
from tests.faults.checkpoints import MIXED, differential, load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.kills import before_each_change_of_files, killed_at
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, train_steps

PARTS = 4
FIRST, LAST, LINKS = 5, 7, 2  # 1 is a base with links 2 and 3; 4 another with 5 and 6; with 7 the first chain goes


def _go_on(rank: int, folder: str) -> dict[int, str]:
    """From the newest step to the last, a save each; the digests."""
    _, model, optimizer, context = build_sharded(MIXED)
    changes = differential(model, optimizer, LINKS)
    checkpointer = Checkpointer(folder, model, optimizer, context, keep_last_n=2, differential=changes)
    manifest = checkpointer.restore_latest()
    assert manifest is not None
    step = int(manifest["step"])
    checkpointer.clear_after(step)
    digests = {step: digest(model)}
    while step < LAST:
        train_steps(model, optimizer, draw_batches(rank, 1, 1, start=step))
        step += 1
        checkpointer.save(step)
        digests[step] = digest(model)
    return digests


def _alone(folder: Path) -> None:
    """In a process that was forked and is to be killed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{folder.parent}/store", rank=0, world_size=1)
    _go_on(0, str(folder))


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_before_any_change_of_files_of_a_chain_leaves_an_exact_step(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, part: int
) -> None:
    """Each part kills before every fourth change, all of them together before each."""
    clean = tmp_path / "clean" / "checkpoints"
    ranks.run(1, save_steps, str(clean), list(range(1, FIRST + 1)), {"keep_last_n": 2}, LINKS)
    whole = tmp_path / "whole" / "checkpoints"
    shutil.copytree(clean, whole)
    digests = ranks.run(1, _go_on, str(whole))[0]
    found = dict.fromkeys(digests, 0)
    for number in itertools.count(part + 1, PARTS):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(clean, folder)
        if not killed_at(number, before_each_change_of_files, lambda folder=folder: _alone(folder)):  # type: ignore[misc]
            break
        step, loaded = ranks.run(1, load_once, str(folder))[0]
        assert loaded == digests.get(step), (number, step, loaded)
        found[step] += 1
        if number % 5 == 0:  # of each fifth: and it goes on to the same bits
            again = ranks.run(1, _go_on, str(folder))[0]
            assert again == {step: digests[step] for step in again} and LAST in again, number
        shutil.rmtree(folder.parent)
    assert number > 100 and all(found[step] for step in range(FIRST, LAST)), found
    fault(2, f"before changes of files of a chain: 0 torn loads, steps {found}, all exactly", count=sum(found.values()))
