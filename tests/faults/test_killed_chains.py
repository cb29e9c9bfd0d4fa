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
from tests.faults.checkpoints import MIXED, Loader, differential, load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.kills import before_each_change_of_files, copied_before_each, killed_at
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, train_steps

PARTS, STRIDE = 4, 199
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


def _load_each(rank: int, folders: list[str]) -> list[tuple[int, str]]:
    loader = Loader()
    return [loader.load(folder) for folder in folders]


def _go_on_each(rank: int, folders: list[str]) -> list[dict[int, str]]:
    return [_go_on(rank, folder) for folder in folders]


def _chain(ranks: RankPool, folder: Path) -> tuple[Path, dict[int, str]]:
    """A folder of FIRST steps, and what each step holds up to which a run goes on from there."""
    clean, whole = folder / "clean" / "checkpoints", folder / "whole" / "checkpoints"
    ranks.run(1, save_steps, str(clean), list(range(1, FIRST + 1)), {"keep_last_n": 2}, LINKS)
    shutil.copytree(clean, whole)
    return clean, ranks.run(1, _go_on, str(whole))[0]


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
def test_what_a_kill_before_any_change_of_files_of_a_chain_would_leave_is_an_exact_step(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, part: int
) -> None:
    """One process goes on from step FIRST; its folder is copied before each change, in all parts together. Each copy loads, and a
    run goes on to the same bits from one of each list of files."""
    clean, digests = _chain(ranks, tmp_path)
    folder, copies = tmp_path / "one" / "checkpoints", tmp_path / "copies"
    shutil.copytree(clean, folder)
    copied_before_each(before_each_change_of_files, lambda: _alone(folder), folder, copies, part, PARTS)
    folders = sorted(copies.iterdir(), key=lambda path: int(path.name))
    found = dict.fromkeys(digests, 0)
    loads = ranks.run(1, _load_each, [str(each) for each in folders])[0]
    for place, (step, loaded) in zip(folders, loads, strict=True):
        assert loaded == digests.get(step), (place, step, loaded)
        found[step] += 1
    others = {_names(each): str(each) for each in folders}
    for again in ranks.run(1, _go_on_each, list(others.values()))[0]:
        assert again == {step: digests[step] for step in again} and LAST in again
    shutil.rmtree(copies)
    assert len(folders) > 100 and all(found[step] for step in range(FIRST, LAST)), found
    fault(2, f"before changes of files of a chain: 0 torn loads, steps {found}, all exactly", count=len(folders))


@pytest.mark.campaign
def test_a_kill_before_changes_of_files_of_a_chain_leaves_an_exact_step(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    """By SIGKILL, before every STRIDE-th change."""
    clean, digests = _chain(ranks, tmp_path)
    found = dict.fromkeys(digests, 0)
    for number in itertools.count(1, STRIDE):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(clean, folder)
        if not killed_at(number, before_each_change_of_files, lambda folder=folder: _alone(folder)):
            break
        step, loaded = ranks.run(1, load_once, str(folder))[0]
        assert loaded == digests.get(step), (number, step, loaded)
        found[step] += 1
        shutil.rmtree(folder.parent)
    assert number > STRIDE and found[FIRST], found
    fault(
        2,
        f"SIGKILL before changes of files of a chain: 0 torn loads, steps {found}, all exactly",
        count=sum(found.values()),
    )
