"""Fault 31: saving and loading take the largest shard beside the state at most; saving beside training, a copy of the state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import FaultRecorder


def _measure(*words: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.memory_worker", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.campaign
def test_saving_and_loading_take_no_more_than_the_largest_shard_beside_the_state(
    tmp_path: Path, fault: FaultRecorder
) -> None:
    figures = []
    for action in ("save", "load"):
        found = _measure(action, str(tmp_path))
        limit = 1.1 * (found["local"] + found["largest"])
        assert found["peak"] <= limit, found
        figures.append(f"{action} {found['peak'] / 2**20:.0f} MiB of {limit / 2**20:.0f} allowed")
    beside = _measure("save", str(tmp_path / "beside"), "asynchronous")
    assert beside["peak"] <= 1.1 * (2 * beside["local"]), beside
    figures.append(
        f"asynchronous save {beside['peak'] / 2**20:.0f} MiB (state {beside['local'] / 2**20:.0f} MiB twice)"
    )
    fault(31, "; ".join(figures), count=3)
