"""Ticks that are killed at random changes of files end with the records and weights of undisturbed ticks."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from pipeline.retraining.ledger import PROMOTED, REJECTED, Ledger
from pipeline.retraining.registry import Registry
from tests.retraining.streams import JOB_WORDS, plant, window_name, write_window
from tests.support.examples import SCALE, SEED
from tests.support.forks import WarmCommand
from tests.support.stored_tensors import stored_tensors

SIGKILLED = -9
NUM_WINDOWS, ROWS, KILLS_A_WINDOW, STALE = 9, 4000, 4 * SCALE, 5
LOOSE = [
    "gate.calibration_min=0.2", "gate.calibration_max=5", "gate.ne_tolerance=1", "gate.max_ne=5",
    "gate.min_rows=100", "checks.min_history=14", "checks.champion_ne_rise=null", "max_catchup=1",
    "registry.keep=20",
]  # fmt: skip


def _tick(folder: Path, source: Path, number: int = 0) -> tuple[int, int]:
    """The exit code of a tick, and how many changes of files it made."""
    words = [f"source={source}", f"run_dir={folder / 'work'}", f"registry.path={folder / 'registry'}"]
    counted = folder / "counted"
    folder.mkdir(exist_ok=True)
    command = WarmCommand("tests.retraining.kill_worker", [number, counted, *words, *JOB_WORDS, *LOOSE], output=(1, 2))
    code = command.wait(600)
    return code, int(counted.read_text()) if code == 0 else 0


def _outcomes(folder: Path) -> dict[str, Any]:
    """Window -> state, version, parent, reasons, NE, and a digest of the version's weights. Each window has one record."""
    registry, found = Registry(str(folder / "registry")), dict[str, Any]()
    for record in Ledger(registry.path).newest():
        assert record.window not in found, record
        weights = hashlib.sha256()
        if record.version:
            for _, content in sorted(stored_tensors(registry.version(record.version).checkpoint).items()):
                weights.update(content)
        ne = record.metrics.get("challenger_ne")
        found[record.window] = (
            record.state, record.version, record.parent, record.reasons, ne, weights.hexdigest()
        )  # fmt: skip
    return found


@pytest.mark.campaign
def test_ticks_that_are_killed_at_random_end_as_undisturbed_ticks_do(tmp_path: Path) -> None:
    source, chance, kills = tmp_path / "source", random.Random(12 + SEED), 0
    for number in range(1, NUM_WINDOWS + 1):
        write_window(source, number, ROWS)
    plant("stale", source / window_name(STALE), source / window_name(STALE - 2))
    counts = []
    for _ in range(NUM_WINDOWS - 1):
        code, count = _tick(tmp_path / "whole", source)
        assert code == 0
        counts.append(count)
    wanted = _outcomes(tmp_path / "whole")
    for count in counts:
        for _ in range(KILLS_A_WINDOW):
            code, _ = _tick(tmp_path / "killed", source, chance.randrange(1, count))
            assert code in (0, SIGKILLED)
            registry = Registry(str(tmp_path / "killed/registry"))
            if champion := registry.champion():
                assert registry.verify(champion) == ("", champion.size_bytes)
            for window, outcome in _outcomes(tmp_path / "killed").items():
                assert outcome == wanted[window], window
            if code == 0:
                break
            kills += 1
        else:
            assert _tick(tmp_path / "killed", source)[0] == 0
    found = _outcomes(tmp_path / "killed")
    states = [outcome[0] for outcome in found.values()]
    print(
        f"{kills} kills, {states.count(PROMOTED)} windows promoted, {states.count(REJECTED)} rejected; changes {counts}"
    )
    assert found == wanted and kills >= NUM_WINDOWS * SCALE
    assert states.count(REJECTED) >= 1 and states.count(PROMOTED) >= NUM_WINDOWS - 3
