"""The `fault` fixture: what a test reached, kept for docs/measurements/faults.md when the campaign runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from tests.faults.catalogue import FAULTS

RECORDS = "FAULT_RECORDS"  # environment variable: the file that `make faults` collects in


@dataclass
class FaultRecorder:
    """Call it once a figure is known: fault(9, "60 of 60 rejected, step 2 of 3 loaded", count=60, seed=7)."""

    test: str
    found: list[dict[str, object]] = field(default_factory=list)

    def __call__(self, number: int, figure: str, *, count: int, seed: int | None = None) -> None:
        """`count` is how often the fault was planted."""
        assert number in FAULTS, f"fault {number} is not in tests/faults/catalogue.py"
        assert count > 0, "a fault that was never planted shows nothing"
        self.found.append({"number": number, "figure": figure, "count": count, "seed": seed})


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[FaultRecorder]:
    recorder, started = FaultRecorder(request.node.name), time.monotonic()
    yield recorder
    path = os.environ.get(RECORDS)
    if path and not request.node.stash.get(FAILED, False):
        with open(path, "a") as file:
            for record in recorder.found:
                about = {"test": recorder.test, "seconds": round(time.monotonic() - started, 1)}
                date = datetime.now(UTC).strftime("%Y-%m-%d")
                file.write(json.dumps({**record, **about, "date": date}) + "\n")


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
