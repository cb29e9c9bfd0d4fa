"""What retraining is for, and what its gate must stop: drift followed, equals let through, planted faults rejected.

Each test has a small size for every run and the full one as a campaign, whose figures stand in docs/retraining.md.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.retrain import retrain
from pipeline.retraining.crew import Crew
from pipeline.retraining.ledger import PROMOTED, REJECTED, Ledger, Record
from pipeline.retraining.registry import Registry
from pipeline.retraining.windows import find_windows
from pipeline.retraining.work import Workshop
from tests.retraining.streams import job, plant, window_name, write_window

FAULTS = ["flipped", "zeroed 0", "zeroed 7", "zeroed 15", "zeroed 38", "stale", "stale shuffled", "half"]
NO_CHECKS = [f"checks.{name}=null" for name in ("row_count_change", "label_rate_change", "unknown_share_rise",
             "distance_rise", "repeated_share", "champion_ne_rise")]  # fmt: skip
FIGURES = os.environ.get("RETRAINING_FIGURES")  # a file that collects what the campaigns found


def note(**figures: Any) -> None:
    if FIGURES:
        with open(FIGURES, "a") as file:
            file.write(json.dumps(figures) + "\n")


def stream(folder: Path, num_windows: int, rows: int, **how: Any) -> None:
    for number in range(1, num_windows + 1):
        write_window(folder / "source", number, rows, **how)


def records(folder: Path) -> dict[str, Record]:
    """Window -> its newest record."""
    return {record.window: record for record in reversed(list(Ledger(str(folder / "registry")).newest()))}


def champion_ne_of(folder: Path, version: str) -> dict[str, float]:
    """Window -> NE of this version, whatever became of it."""
    work = job(folder)
    shop, found = Workshop(work, Crew(1, "auto", 300.0)), Registry(work.registry.path).version(version)
    windows = find_windows(work.windows, work.source, work.data, datetime.now(UTC), None, ())
    return {
        window.name: shop.score_version(found, shop.under(shop.place(window), version, found.data)).ne
        for window in windows
    }


@pytest.mark.parametrize(
    ("num_windows", "rows"),
    [
        pytest.param(3, 12_000, id="2 challenges"),
        pytest.param(11, 30_000, id="10 challenges", marks=pytest.mark.campaign),
    ],
)
def test_retraining_from_window_to_window_beats_the_stale_champion(tmp_path: Path, num_windows: int, rows: int) -> None:
    stream(tmp_path, num_windows, rows, drift=0.04, churn=0.05)
    summary = retrain(job(tmp_path, f"max_catchup={num_windows}", "registry.keep=20"))
    promoted = [record for record in summary.records if record.state == PROMOTED]
    stale = champion_ne_of(tmp_path, promoted[0].version)
    fresh = {record.metrics["judged_on"]: record.metrics["challenger_ne"] for record in promoted[1:]}
    note(test="drift", rows=rows, states=[record.state for record in summary.records], stale=stale, fresh=fresh)
    assert len(summary.records) == num_windows - 1
    assert len(promoted) >= 0.8 * len(summary.records)
    assert all(ne < stale[window] for window, ne in fresh.items())
    gains = [stale[window] - ne for window, ne in fresh.items()]
    assert num_windows < 5 or gains[-1] > gains[0]  # the stale champion falls back further and further


@pytest.mark.parametrize(
    ("num_seeds", "rows"),
    [pytest.param(1, 12_000, id="1 seed"), pytest.param(20, 30_000, id="20 seeds", marks=pytest.mark.campaign)],
)
def test_a_challenger_of_the_same_data_is_promoted(tmp_path: Path, num_seeds: int, rows: int) -> None:
    states = []
    for seed in range(num_seeds):
        folder = tmp_path / str(seed)
        stream(folder, 4 if num_seeds > 1 else 3, rows, seed=seed)
        found = retrain(job(folder, "max_catchup=9", f"trainer.seed={seed}")).records
        states.append(found[-1].state)
        for record in found[1:]:
            note(
                test="a/a",
                seed=seed,
                state=record.state,
                window=record.window,
                reasons=record.reasons,
                **record.metrics,
            )
        shutil.rmtree(folder)
    assert states.count(PROMOTED) >= 0.95 * num_seeds, states


@pytest.mark.parametrize(
    ("num_seeds", "rows", "faults"),
    [
        pytest.param(1, 12_000, ["flipped", "zeroed 15", "stale shuffled", "half"], id="1 seed"),
        pytest.param(5, 30_000, FAULTS, id="5 seeds", marks=pytest.mark.campaign),
    ],
)
def test_planted_faults_are_rejected_every_time(tmp_path: Path, num_seeds: int, rows: int, faults: list[str]) -> None:
    for seed in range(num_seeds):
        clean = tmp_path / f"clean{seed}"
        last = 4 if num_seeds > 1 else 3
        stream(clean, last, rows, drift=0.02, churn=0.03, seed=seed)
        options = ["max_catchup=9", f"trainer.seed={seed}", f"checks.min_history={last - 2}"]
        before = retrain(job(clean, *options)).records
        assert [record.state for record in before] == [PROMOTED] * (last - 1)
        write_window(clean / "source", last + 1, rows, drift=0.02, churn=0.03, seed=seed)
        for fault in faults:
            assert caught(clean, fault, last, seed, options), (seed, fault)
            if num_seeds > 1:
                caught(clean, fault, last, seed, [*options, *NO_CHECKS])
        shutil.rmtree(clean)


def caught(clean: Path, fault: str, number: int, seed: int, options: list[str]) -> bool:
    """Whether the window with this fault, in place of window `number` of the clean stream, is rejected."""
    folder = clean.parent / "planted"
    shutil.copytree(clean, folder)
    plant(fault, folder / "source" / window_name(number), folder / "source" / window_name(number - 2), seed)
    retrain(job(folder, *options))
    record = records(folder)[window_name(number)]
    champion = Registry(str(folder / "registry")).champion()
    by = "the gate alone" if NO_CHECKS[0] in options else "checks and gate"
    note(test="fault", fault=fault, seed=seed, by=by, state=record.state, reasons=record.reasons)
    shutil.rmtree(folder)
    assert champion is not None
    return record.state == REJECTED and champion.lineage["window"] != window_name(number)
