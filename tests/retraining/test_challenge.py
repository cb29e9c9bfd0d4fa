"""Which of two neighbouring windows a failed check is held against: the one that is trained on, or the one that judges it."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.retraining import GateConfig
from pipeline.data.raw.source import SourceChangedError
from pipeline.retraining.challenge import Challenge
from pipeline.retraining.feature_changes import FeatureChanges
from pipeline.retraining.gate import Scores
from pipeline.retraining.ledger import PROMOTED, REJECTED, Ledger, Record, windows_missed
from pipeline.retraining.registry import Version
from pipeline.retraining.statistics import WindowStatistics
from pipeline.retraining.window_runner import WindowFiles, WindowRunner
from pipeline.retraining.windows import Window
from pipeline.runtime.errors import DataError, LimitError, RetrainingError, UserError
from pipeline.training.step_sync import NonFiniteLossError
from tests.retraining.streams import job
from tests.support.messages import names

CHAMPION = Version("v000001", "", {})
USABLE = "the challenger was trained"


class Rows(WindowRunner):
    """Windows whose statistics are given; a feature's distance is that of `places`. Training says that it was reached."""

    def __init__(self, places: dict[str, float], rows: dict[str, int], copies: dict[str, str]) -> None:
        self.places, self.rows, self.copies = places, rows, copies

    def place(self, window: Window) -> WindowFiles:
        return WindowFiles(window, window.name, window.name, window.name, [])

    def by_champion(self, place: WindowFiles, champion: Version) -> str:
        return place.source

    def check_added_columns(self, *_: Any) -> None:
        """The windows have all columns."""

    def changes(self, champion: Version) -> FeatureChanges:
        return FeatureChanges({}, {}, {}, ["label"], [], [])

    def gate_for(self, champion: Version) -> GateConfig:
        return GateConfig()

    def statistics(
        self,
        place: WindowFiles,
        data: str,
        history: list[tuple[str, WindowStatistics]],
        rejected: dict[str, str],
        champion: Version | None,
    ) -> WindowStatistics:
        name = place.window.name
        found = WindowStatistics(self.rows.get(name, 1000), 0.5, sketch=name)
        if history:
            found = replace(found, distance={"color": abs(self.places[name] - self.places[history[0][1].sketch])})
        copied = self.copies.get(name, "")
        return replace(found, repeated_share=1.0 if copied in [*rejected, *(name for name, _ in history)] else 0.0)

    def score_version(self, version: Version, data: str, gate: GateConfig) -> Scores:
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
            2, [0, 0, 0.9, 0], {}, {}, 2, "the next window, dt=2026-11-04", id="the first is odd, unnoticed yet"
        ),
        pytest.param(2, [0, 0, 0, 0.9], {}, {}, 3, "distance from the window before 0.900", id="the next is odd"),
        pytest.param(3, [0, 0, 0, 0.9, 0], {}, {}, 3, "distance from the window before 0.900", id="the first is odd"),
        pytest.param(3, [0, 0, 0, 0, 0.9], {}, {}, 4, "distance from the window before 0.900", id="much history"),
        pytest.param(1, [0, 0, 0], {1: 200}, {}, 1, "the next window, dt=2026-11-03", id="few rows, unnoticed yet"),
        pytest.param(1, [0, 0, 0], {2: 100}, {}, 2, "rows 100 differs by -90.0%", id="the next has few rows"),
        pytest.param(
            1,
            [0, 0, 0],
            {1: 100},
            {},
            1,
            "98 training rows are fewer than trainer.global_batch_size=128",
            id="no batch",
        ),
        pytest.param(1, [0, 0, 0], {}, {2: 1}, 2, "100.0% of the rows are also in window", id="the next is a copy"),
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


class Unreadable(Rows):
    """Windows that cannot be prepared."""

    error: UserError = DataError("no files")
    wrong_job = ""

    def place(self, window: Window) -> WindowFiles:
        if window.name in self.places:
            return super().place(window)
        raise self.error

    def challenger_data(self, place: WindowFiles, champion: Version | None) -> str:
        return place.source

    def check_data_of(self, champion: Version) -> None:
        if self.wrong_job:
            raise RetrainingError(self.wrong_job)


def _of_two(tmp_path: Path, runner: WindowRunner, champion: Version | None, first: int = 0) -> Challenge:
    window, judge = windows(first + 2)[first:]
    wanted = job(tmp_path, "checks.label_rate_change=null")
    return Challenge(wanted, runner, Ledger(str(tmp_path)), window, judge, champion, None)


def test_a_window_is_not_rejected_for_what_the_job_or_the_machine_lacks(tmp_path: Path) -> None:
    """Else a wrong word in a job, or too little memory, costs each window that comes until somebody looks."""
    runner = Unreadable({}, {}, {})
    assert _of_two(tmp_path, runner, CHAMPION).run().record.reasons == ["no files"]
    with pytest.raises(RetrainingError, match=names("dt=2026-11-01 windows.first=2026-11-02T00:00")):
        _of_two(tmp_path, runner, None).run()
    runner.wrong_job = "data.columns"
    with pytest.raises(RetrainingError, match=names("data.columns")):
        _of_two(tmp_path, runner, CHAMPION).run()
    runner.wrong_job = ""
    for error in (LimitError("memory_limit_gb"), SourceChangedError("rows.csv has changed")):
        runner.error = error
        with pytest.raises(type(error)):
            _of_two(tmp_path, runner, CHAMPION).run()


def test_before_there_is_a_champion_a_judge_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    """The window before it could be read: the job is right. No tick got past such a second window."""
    outcome = _of_two(tmp_path, Unreadable({"dt=2026-11-01": 0.0}, {}, {}), None).run()
    assert (outcome.record.window, outcome.record.reasons) == ("dt=2026-11-02", ["no files"])


def test_a_window_that_is_judged_again_is_not_compared_with_itself(tmp_path: Path) -> None:
    """A challenger that the gate had stopped could not be tried again: all of its window's rows had come before."""
    name = "dt=2026-11-01"
    found = WindowStatistics(1000, 0.5, sketch=name)
    Ledger(str(tmp_path)).append(Record(REJECTED, name, data={"accepted": True, "statistics": asdict(found)}))
    outcome = _of_two(tmp_path, Rows({name: 0.0, "dt=2026-11-02": 0.0}, {}, {name: name}), CHAMPION).run()
    assert any(USABLE in reason for reason in outcome.record.reasons), outcome.record.reasons


def test_rows_of_a_rejected_window_do_not_pass_as_the_next_window(tmp_path: Path) -> None:
    """A rejected day was delivered again, under the next day's name, and was accepted."""
    first, second, third = (window.name for window in windows(3))
    rejected = WindowStatistics(1000, 0.5, sketch=first)
    Ledger(str(tmp_path)).append(Record(REJECTED, first, data={"accepted": False, "statistics": asdict(rejected)}))
    runner = Rows({second: 0.0, third: 0.0}, {}, {third: first})
    outcome = _of_two(tmp_path, runner, CHAMPION, 1).run()
    assert outcome.record.window == third and "100.0% of the rows" in outcome.record.reasons[0]
    asked = _of_two(tmp_path, runner, CHAMPION, 1)
    outcome = replace(asked, job=replace(asked.job, retry=[first])).run()
    assert any(USABLE in reason for reason in outcome.record.reasons), outcome.record.reasons


def test_what_drifts_may_have_drifted_further_where_windows_are_missing(tmp_path: Path) -> None:
    """A window behind rejected ones was rejected for its distance too, and so were all after it: the distance only grew."""
    all_windows = windows(13)
    places = {window.name: 0.1 * number for number, window in enumerate(all_windows)}
    ledger = Ledger(str(tmp_path))
    begins = [window.begin.isoformat() for window in all_windows]
    for number in range(4):  # of which the first made the champion
        found = WindowStatistics(1000, 0.5, distance={"color": 0.1}, sketch=all_windows[number].name)
        data = {"accepted": True, "statistics": asdict(found)}
        state = REJECTED if number else PROMOTED
        version = "" if number else CHAMPION.name
        ledger.append(Record(state, all_windows[number].name, version, data=data, begin=begins[number]))
    for number in range(5, 12):
        ledger.append(Record(REJECTED, all_windows[number].name, data={"accepted": False}, begin=begins[number]))
    wanted = job(tmp_path, "checks.label_rate_change=null")
    window = replace(all_windows[4], why="no _SUCCESS; used as it is")
    challenge = Challenge(wanted, Rows(places, {}, {}), ledger, window, all_windows[12], CHAMPION, None)
    outcome = challenge.run()
    assert outcome.record.reasons[1:] == [window.why]
    assert any(USABLE in reason for reason in outcome.record.reasons), outcome.record.reasons
    assert outcome.record.data["statistics"]["age"] == 3
    assert len(windows_missed(ledger, CHAMPION.name, all_windows[12].begin)) == 10
    places[all_windows[12].name] += 0.3
    assert challenge.run().record.window == all_windows[12].name
