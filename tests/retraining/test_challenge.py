"""Which of two neighbouring windows a failed check is held against: the one that is trained on, or the one that judges it."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.retraining.challenge import Challenge
from pipeline.retraining.gate import Scores
from pipeline.retraining.ledger import REJECTED, Ledger, Record
from pipeline.retraining.registry import Version
from pipeline.retraining.statistics import WindowStatistics
from pipeline.retraining.window_runner import WindowFiles, WindowRunner
from pipeline.retraining.windows import Window
from pipeline.training.agreement import NonFiniteLossError
from tests.retraining.streams import job

CHAMPION = Version("v000001", "", {})
USABLE = "the challenger was trained"


class Rows(WindowRunner):
    """Windows whose statistics are given; a feature's distance is that of `places`. Training says that it was reached."""

    def __init__(self, places: dict[str, float], rows: dict[str, int], copies: dict[str, str]) -> None:
        self.places, self.rows, self.copies = places, rows, copies

    def place(self, window: Window) -> WindowFiles:
        return WindowFiles(window, window.name, window.name, window.name)

    def under(self, place: WindowFiles, name: str, vocabularies: str) -> str:
        return place.source

    def statistics(
        self, place: WindowFiles, data: str, history: list[tuple[str, WindowStatistics]]
    ) -> WindowStatistics:
        name = place.window.name
        found = WindowStatistics(self.rows.get(name, 1000), 0.5, sketch=name)
        if history:
            found = replace(found, distance={"color": abs(self.places[name] - self.places[history[0][1].sketch])})
        copied = self.copies.get(name, "")
        return replace(found, repeated_share=1.0 if copied in [name for name, _ in history] else 0.0)

    def score_version(self, version: Version, data: str) -> Scores:
        return Scores(np.zeros(2, np.float32), np.array([0, 1], np.float32))

    def challenger_data(self, *_: Any) -> str:
        raise NonFiniteLossError(USABLE, [], [], 1, 1)


def windows(count: int) -> list[Window]:
    begin = datetime(2026, 11, 1, tzinfo=UTC)
    days = [begin + timedelta(days=day) for day in range(count)]
    return [Window(f"{day:dt=%Y-%m-%d}", day, day + timedelta(days=1), "") for day in days]


@pytest.mark.parametrize(
    ("history", "places", "rows", "copies", "rejected", "why"),
    [
        pytest.param(2, [0, 0, 0, 0], {}, {}, 2, USABLE, id="all alike"),
        pytest.param(
            2, [0, 0, 0.9, 0], {}, {}, 2, "dt=2026-11-04, which judges it", id="the first is odd, unnoticed yet"
        ),
        pytest.param(2, [0, 0, 0, 0.9], {}, {}, 3, "distance from the window before 0.900", id="the next is odd"),
        pytest.param(3, [0, 0, 0, 0.9, 0], {}, {}, 3, "distance from the window before 0.900", id="the first is odd"),
        pytest.param(3, [0, 0, 0, 0, 0.9], {}, {}, 4, "distance from the window before 0.900", id="much history"),
        pytest.param(1, [0, 0, 0], {1: 100}, {}, 1, "dt=2026-11-03, which judges it", id="few rows, unnoticed yet"),
        pytest.param(1, [0, 0, 0], {2: 100}, {}, 2, "rows 100 is -90.0%", id="the next has few rows"),
        pytest.param(1, [0, 0, 0], {}, {2: 1}, 2, "100.0% of the rows are in window", id="the next is a copy"),
    ],
)
def test_the_window_that_is_unlike_both_its_neighbours_is_rejected(
    tmp_path: Path,
    history: int,
    places: list[float],
    rows: dict[int, int],
    copies: dict[int, int],
    rejected: int,
    why: str,
) -> None:
    """A window that was odd while there was too little history to see it stood, and each clean one after it was rejected."""
    all_windows = windows(history + 2)
    names = [window.name for window in all_windows]
    runner = Rows(
        dict(zip(names, places, strict=True)),
        {names[number]: count for number, count in rows.items()},
        {names[later]: names[earlier] for later, earlier in copies.items()},
    )
    ledger = Ledger(str(tmp_path))
    for number, name in enumerate(names[:history]):
        distance = {"color": 0.0} if number else {}
        found = WindowStatistics(1000, 0.5, distance=distance, sketch=name, champion_ne=1.0)
        ledger.append(Record(REJECTED, name, data={"accepted": True, "statistics": asdict(found)}))
    first, judge = all_windows[history:]
    wanted = job(tmp_path, "checks.label_rate_change=null")
    outcome = Challenge(wanted, runner, ledger, first, judge, CHAMPION, None).run()
    assert (outcome.window.name, outcome.record.window) == (names[rejected], names[rejected])
    assert outcome.record.data["accepted"] == (why == USABLE)
    assert any(why in reason for reason in outcome.record.reasons), outcome.record.reasons
