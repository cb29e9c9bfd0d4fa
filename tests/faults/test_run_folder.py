"""Fault 22: two runs that start for one folder at the same moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import FaultRecorder
from tests.support.messages import mentions

# A contestant without torch: for each line it is given it tries to take that folder, and says how it went.
CONTESTANT = """
import sys
from pipeline.runtime.storage.lease import RunFolderHeldError, take_lease
for line in sys.stdin:
    try:
        held = take_lease(line.strip(), 60)
        print("won", flush=True)
    except RunFolderHeldError as error:
        print(f"lost: {error}", flush=True)
"""
DEAD = "import os, sys; from pipeline.runtime.storage.lease import take_lease; take_lease(sys.argv[1], 60); os._exit(1)"


def _race(num_races: int, folder: Path) -> list[tuple[str, str]]:
    """What each of the two says, a race at a time; every tenth folder was left by a run that died."""
    contestants = [
        subprocess.Popen([sys.executable, "-c", CONTESTANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = []
    for number in range(num_races):
        run_dir = folder / str(number)
        if number % 10 == 9:
            subprocess.run([sys.executable, "-c", DEAD, str(run_dir)], check=False)
        for each in contestants:
            assert each.stdin is not None
            each.stdin.write(f"{run_dir}\n")
        for each in contestants:
            each.stdin.flush()
        first, second = (each.stdout.readline() for each in contestants)
        answers.append((first, second))
    for each in contestants:
        each.communicate()
    return answers


@pytest.mark.parametrize("num_races", [10, pytest.param(100, marks=pytest.mark.campaign)])
def test_of_two_runs_that_start_at_once_one_writes(num_races: int, tmp_path: Path, fault: FaultRecorder) -> None:
    answers = _race(num_races, tmp_path)
    for pair in answers:
        assert sorted(answer.split()[0] for answer in pair) == ["lost:", "won"], pair
        (refusal,) = (answer for answer in pair if answer.startswith("lost"))
        assert mentions(refusal, "run_dir") and "process " in refusal and "since " in refusal
    fault(22, f"one winner in each of {num_races} races; the other was told who holds the folder", count=num_races)
