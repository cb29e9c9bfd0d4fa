"""What retraining is for, and what its gate must stop: drift followed, equals let through, planted faults rejected.

Each test has a small size and a full one, both as campaigns. The figures of the full one stand in docs/do/retraining.md.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

from pipeline.data.quality import binary_entropy
from pipeline.data.raw.formats.criteo_tsv import NUM_DENSE, NUM_SPARSE
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.ledger import PROMOTED, REJECTED, Ledger, Record
from pipeline.retraining.registry import Registry
from pipeline.retraining.tick import retrain
from pipeline.retraining.window_runner import WindowRunner
from pipeline.retraining.windows import find_windows
from pipeline.retraining.worker_group import WorkerGroup
from pipeline.serving.scoring.predictor import Predictor
from tests.retraining.streams import FILE, job, plant, window_name, write_window
from tests.support.examples import SEED
from tests.support.messages import mentions

FAULTS = ["flipped", "zeroed 0", "zeroed 7", "zeroed 15", "zeroed 38", "stale", "stale shuffled", "half"]
NO_CHECKS = [
    f"checks.{name}=null"
    for name in (
        "row_count_change",
        "label_rate_change",
        "unknown_share_rise",
        "distance_rise",
        "repeated_share",
        "champion_ne_rise",
    )
]
FIGURES = os.environ.get("RETRAINING_FIGURES")  # a file that collects what the campaigns found


def note(**figures: Any) -> None:
    if FIGURES:
        with open(FIGURES, "a") as file:
            file.write(json.dumps(figures) + "\n")


def records(folder: Path) -> dict[str, Record]:
    """Window -> its newest record."""
    return {record.window: record for record in reversed(list(Ledger(str(folder / "registry")).newest()))}


def champion_ne_of(folder: Path, version: str) -> dict[str, float]:
    """Window -> NE of this version, whatever became of it."""
    work = job(folder)
    shop, found = WindowRunner(work, WorkerGroup(1, "auto", 300.0)), Registry(work.registry.path).version(version)
    windows = find_windows(work.windows, work.source, work.data, datetime.now(UTC), None, ())
    return {
        window.name: shop.score_version(found, shop.by_champion(shop.place(window), found), work.gate).ne
        for window in windows
    }


@dataclass(frozen=True)
class Stream:
    """`windows` windows, of which all but the last are retrained on; the drift is enough to tell a stale champion by."""

    windows: int
    rows: int
    drift: float = 0.0
    churn: float = 0.0


SMALL, EQUAL, DRIFTING = Stream(3, 12_000, 0.03, 0.05), Stream(5, 30_000), Stream(11, 30_000, 0.03, 0.05)
campaign = pytest.mark.campaign
_made: dict[Stream, Path] = {}


@pytest.fixture
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Stream]:
    """The folder of a stream that was retrained on, once a session. Copy it before changing it."""
    stream: Stream = request.param
    if stream not in _made:
        folder = tmp_path_factory.mktemp("history")
        for number in range(1, stream.windows + 1):
            write_window(folder / "source", number, stream.rows, drift=stream.drift, churn=stream.churn)
        retrain(job(folder, "max_catchup=20", "registry.keep=20", *loose(stream.rows)))
        _made[stream] = folder
    return _made[stream], stream


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(SMALL, id="2 challenges", marks=campaign),
        pytest.param(DRIFTING, id="10 challenges", marks=campaign),
    ],
    indirect=True,
)
def test_retraining_from_window_to_window_beats_the_stale_champion(history: tuple[Path, Stream]) -> None:
    folder, stream = history
    all_records = sorted(records(folder).values(), key=lambda record: record.window)
    promoted = [record for record in all_records if record.state == PROMOTED]
    stale = champion_ne_of(folder, promoted[0].version)
    fresh = {record.metrics["judged_on"]: record.metrics["challenger_ne"] for record in promoted[1:]}
    note(test="drift", states={one.window: [one.state, *one.reasons] for one in all_records}, stale=stale, fresh=fresh)
    assert len(all_records) == stream.windows - 1
    assert len(promoted) >= 0.8 * len(all_records)
    assert all(ne < stale[window] for window, ne in fresh.items())
    gains = [stale[window] - ne for window, ne in fresh.items()]
    assert stream is SMALL or gains[-1] > gains[0]  # the stale champion falls back further and further


@pytest.mark.campaign
@pytest.mark.parametrize("history", [pytest.param(SMALL, id="small")], indirect=True)
def test_the_champions_artifact_scores_raw_rows_as_its_model_does(history: tuple[Path, Stream]) -> None:
    folder, _ = history
    registry = Registry(str(folder / "registry"))
    champion = registry.champion()
    assert champion is not None and champion.artifact is not None
    assert registry.verify(champion) == ("", champion.size_bytes)
    found = find_artifact(registry.path)  # as serve artifact=REGISTRY does
    assert (found.path, champion.lineage["metrics"]["artifact"]) == (
        champion.artifact,
        Predictor.load(found.path).version,
    )
    window = folder / "source" / champion.lineage["metrics"]["judged_on"]
    names = ["label", *(f"int_{i}" for i in range(NUM_DENSE)), *(f"cat_{i}" for i in range(NUM_SPARSE))]
    text = {name: pa.string() for name in names[1 + NUM_DENSE :]}
    rows = csv.read_csv(
        window / FILE,
        read_options=csv.ReadOptions(column_names=names),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=text),
    )
    scored = Predictor.load(found.path).score(rows.drop_columns("label"))
    p, labels = scored.scores.astype(float), rows["label"].to_numpy()
    logloss = -np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    ne = logloss / binary_entropy(float(labels.mean()))
    assert not scored.bad_rows and ne == pytest.approx(champion.lineage["metrics"]["challenger_ne"], abs=1e-3)


@pytest.mark.parametrize("history", [pytest.param(SMALL, id="small")], indirect=True)
@pytest.mark.campaign
def test_an_artifact_that_is_too_far_from_its_model_rejects_the_window(
    history: tuple[Path, Stream], tmp_path: Path
) -> None:
    limits = ["gate.export.precision=int2", "gate.export.parity.max_score_difference=0.0001"]
    reasons: list[str] = []
    assert _next_window(history, tmp_path, "", 1, limits, reasons) == REJECTED
    (reason,) = reasons
    assert mentions(reason, "gate.export")
    assert mentions(reason, "0.") and mentions(reason, "parity.max_score_difference 0.0001")


def loose(rows: int) -> list[str]:
    """What so few rows tell of a calibration is not within 3 %."""
    return [] if rows >= 30_000 else ["gate.calibration_min=0.85", "gate.calibration_max=1.15"]


@pytest.mark.parametrize(
    ("history", "num_seeds"),
    [pytest.param(SMALL, 1, id="1 seed", marks=campaign), pytest.param(EQUAL, 20, id="20 seeds", marks=campaign)],
    indirect=["history"],
)
def test_a_challenger_of_the_same_data_is_promoted(
    history: tuple[Path, Stream], tmp_path: Path, num_seeds: int
) -> None:
    states = [_next_window(history, tmp_path, "", seed, []) for seed in range(SEED + 1, SEED + num_seeds + 1)]
    assert states.count(PROMOTED) >= 0.95 * num_seeds, states


@pytest.mark.parametrize(
    ("history", "num_seeds", "faults"),
    [
        pytest.param(SMALL, 1, ["flipped", "half"], id="1 seed", marks=campaign),
        pytest.param(EQUAL, 5, FAULTS, id="5 seeds", marks=campaign),
    ],
    indirect=["history"],
)
def test_planted_faults_are_rejected_every_time(
    history: tuple[Path, Stream], tmp_path: Path, num_seeds: int, faults: list[str]
) -> None:
    for seed in range(SEED + 1, SEED + num_seeds + 1):
        for fault in faults:
            # Windows before there was a champion say nothing of unknown values; the gate may have rejected the first.
            options = [f"checks.min_history={min(2, history[1].windows - 2)}"]
            assert _next_window(history, tmp_path, fault, seed, options) == REJECTED, (seed, fault)
        for fault in faults if num_seeds > 1 and seed <= SEED + 2 else ():
            _next_window(history, tmp_path, fault, seed, NO_CHECKS)


def _next_window(
    history: tuple[Path, Stream],
    tmp_path: Path,
    fault: str,
    seed: int,
    options: list[str],
    reasons: list[str] | None = None,
) -> str:
    """What becomes of the history's next window, with a fault or none; the one that judges its challenger is clean.

    reasons: takes those of the record.
    """
    made, stream = history
    folder, last = tmp_path / "stream", stream.windows
    shutil.copytree(made, folder)
    for number in (last, last + 1):
        write_window(folder / "source", number, stream.rows, drift=stream.drift, churn=stream.churn, draw=seed)
    if fault:
        earlier = folder / "source" / window_name(last - 2)
        plant(fault, folder / "source" / window_name(last), earlier, seed)
    retrain(job(folder, "max_catchup=1", f"trainer.seed={seed}", *options, *loose(stream.rows)))
    record = records(folder)[window_name(last)]
    champion = Registry(str(folder / "registry")).champion()
    by = "the gate alone" if options == NO_CHECKS else "checks and gate"
    note(test=fault or "a/a", seed=seed, by=by, state=record.state, reasons=record.reasons, **record.metrics)
    shutil.rmtree(folder)
    if reasons is not None:
        reasons += record.reasons
    assert champion is not None and (champion.lineage["window"] == window_name(last)) == (record.state == PROMOTED)
    return record.state
