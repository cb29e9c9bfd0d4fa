"""Fault 2: a rank that dies in any phase of a save leaves the step before it, or the new one, and nothing between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.checkpoints import load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.faults.kill_worker import PHASES, PHASES_OF_RANK_0
from tests.support.forks import WarmCommand
from tests.support.ranks import RankPool

SIGKILLED = -9
ALL = [(phase, rank) for phase in PHASES for rank in (0, 1)] + [(phase, 0) for phase in PHASES_OF_RANK_0]
LINK = [(phase, rank) for phase, rank in ALL if phase != "while a step is removed"]  # a chain of three goes as one
FAST = [("in the first file", 1), ("after the commit", 0)]


def _die(folder: Path, phase: str, victim: int, asynchronous: bool, links: int) -> None:
    folder.parent.mkdir()
    words = (folder, folder.parent / "store", victim, phase, int(asynchronous), links)
    processes = [WarmCommand("tests.faults.kill_worker", (rank, *words), output=(1, 2)) for rank in (0, 1)]
    try:
        assert processes[victim].wait(120) == SIGKILLED, (phase, victim)  # the phase was reached
        processes[1 - victim].wait(120)  # else it hangs after the death of the other
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("cases", "asynchronous", "links"),
    [
        pytest.param(FAST, False, 0, id="some"),
        pytest.param(ALL, False, 0, id="all", marks=pytest.mark.campaign),
        pytest.param(ALL, True, 0, id="all asynchronous", marks=pytest.mark.campaign),
        pytest.param(LINK, False, 9, id="of a chain", marks=pytest.mark.campaign),
        pytest.param(LINK, True, 9, id="of a chain asynchronous", marks=pytest.mark.campaign),
    ],
)
def test_a_kill_in_any_phase_of_a_save_on_any_rank_leaves_the_old_step_or_the_new_one(
    ranks: RankPool,
    tmp_path: Path,
    fault: FaultRecorder,
    cases: list[tuple[str, int]],
    asynchronous: bool,
    links: int,
) -> None:
    digests, loaded = ranks.run(2, save_steps, str(tmp_path / "whole"), [1, 2, 3])[0], {2: 0, 3: 0}
    for number, (phase, victim) in enumerate(cases):
        folder = tmp_path / str(number) / "checkpoints"
        _die(folder, phase, victim, asynchronous, links)
        step, digest = ranks.run(2, load_once, str(folder))[0]
        assert step in loaded and digest == digests[step], (phase, victim, step, digest)
        loaded[step] += 1
    assert all(loaded.values()), loaded
    how = ("asynchronous " if asynchronous else "") + ("saves of links" if links else "saves")
    fault(
        2,
        f"{how}: 0 torn loads; {loaded[2]} loaded the step before, {loaded[3]} the new one, all exactly",
        count=len(cases),
    )
