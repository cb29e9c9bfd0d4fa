"""Fault 10 on chains: no flipped bit of a base or of a link is loaded; what is whole before it is."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.checkpoints import Loader, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.examples import SCALE, SEED
from tests.support.ranks import RankPool

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json", "random_00000.json")


def _load_flipped(rank: int, folder: str, cases: list[tuple[int, str, int]]) -> list[tuple[int, str]]:
    """What is loaded after each flip (step, file, bit) in an intact folder; the bit is flipped back after it."""
    loader, found = Loader(), []
    for step, name, bit in cases:
        path = Path(folder) / f"step_{step:08d}" / name
        if rank == 0:
            _flip(path, bit)
        dist.barrier()
        found.append(loader.load(folder))
        dist.barrier()
        if rank == 0:
            _flip(path, bit)
    return found


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.campaign
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "compressed"])
def test_no_flipped_bit_of_a_chain_is_loaded(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, is_packed: bool
) -> None:
    """Steps 2 and 3 are links on step 1."""
    folder = str(tmp_path / "checkpoints")
    digests = ranks.run(2, save_steps, folder, [1, 2, 3], {"is_packed": is_packed}, 9)[0]
    generator = random.Random(18 + SEED)
    cases = [
        (step, name, generator.randrange(8 * os.path.getsize(f"{folder}/step_{step:08d}/{name}")))
        for number in range(300 * SCALE)
        for step, name in [(1 + number % 3, FILES[number // 3 % len(FILES)])]
    ]
    expected = {1: (-1, ""), 2: (1, digests[1]), 3: (2, digests[2])}
    found = ranks.run(2, _load_flipped, folder, cases)[0]
    wrong = []
    for (step, name, bit), one in zip(cases, found, strict=True):
        # Of the steps that it builds on, a step does not read the random generators.
        right = (3, digests[3]) if name.startswith("random") and step < 3 else expected[step]
        if (one if one[0] > 0 else (-1, "")) != right:
            wrong.append((step, name, bit, one))
    assert wrong == []
    whole = shutil.copytree(folder, tmp_path / "whole")
    assert ranks.run(2, _load_flipped, str(whole), [])[0] == []
    fault(
        10,
        f"0 of {len(cases)} flips in a chain{' of compressed links' if is_packed else ''} silent: the steps before the damaged one load exactly",
        count=len(cases),
        seed=18 + SEED,
    )
