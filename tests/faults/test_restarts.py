"""Faults 1, 3, 4, 21: ranks that die or hang anywhere, and an agent that is killed."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.process.exit_codes import DONE
from pipeline.training.readers import BatchOrder
from pipeline.training.train import train
from tests.faults import planted
from tests.faults.conftest import FaultRecorder
from tests.faults.runs import Run, left_over, processes_of
from tests.support.examples import SCALE, SEED
from tests.support.ranks import RankPool

STEPS, RANKS, HANG_S = 60, 2, 10  # on a machine with other work a rank may stand still for seconds and be well
LIMITS = (f"trainer.hang_timeout_s={HANG_S}", "trainer.startup_timeout_s=120")
PATIENT = ("trainer.hang_timeout_s=120", "trainer.startup_timeout_s=120")
KILLED = re.compile(r"rank \d \(pid \d+\) was ended by SIGKILL")


def _train_and_record(rank: int, run: Run) -> None:
    with (
        patch.object(planted, "RANK", rank),
        patch.object(BatchOrder, "batches", planted.recorded(BatchOrder.batches, str(run.folder))),
    ):
        train(load_config(TrainJob, run.words))


@pytest.fixture(scope="module")
def uninterrupted(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(prepared_clicks, tmp_path_factory.mktemp("faults") / "uninterrupted", PATIENT)
    run.folder.mkdir()
    ranks.run(RANKS, _train_and_record, run)
    return run


def _kills_at_steps(count: int, first_attempt: int, chance: random.Random) -> list[dict[str, Any]]:
    """Each attempt gets two to ten steps further than the one before, and dies within a step."""
    faults, step = [], 0
    for attempt in range(first_attempt, first_attempt + count):
        step = min(step + chance.randint(2, max(2, 2 * STEPS // count)), STEPS - 2)
        after_ms, rank = chance.randint(0, 40), chance.randrange(RANKS)
        faults.append(
            {"attempt": attempt, "rank": rank, "at": "step", "step": step, "do": "kill", "after_ms": after_ms}
        )
    return faults


def _same_as(run: Run, uninterrupted: Run) -> None:
    assert run.checksums(STEPS) == uninterrupted.checksums(STEPS)
    assert run.metrics("validation") == uninterrupted.metrics("validation")
    # A window of training is a sum that rolls on: a resumed run starts it anew, which moves its last bit.
    for mine, theirs in zip(run.metrics("train"), uninterrupted.metrics("train"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)
    lineage, whole = run.lineage(RANKS), uninterrupted.lineage(RANKS)
    assert lineage == whole
    assert len(set(lineage)) == len(lineage) == STEPS * 256


@pytest.mark.long
@pytest.mark.parametrize(
    ("places", "num_kills"),
    [
        pytest.param((), 1, id="one kill"),
        pytest.param(("import", "load"), 1, id="some", marks=pytest.mark.campaign),
        pytest.param(("import", "rendezvous", "load"), 3, id="more", marks=pytest.mark.campaign),
    ],
)
def test_ranks_that_die_or_hang_anywhere_leave_no_trace_in_the_result(
    uninterrupted: Run,
    prepared_clicks: str,
    tmp_path: Path,
    fault: FaultRecorder,
    places: tuple[str, ...],
    num_kills: int,
) -> None:
    """One launch, so that every restart is also one after other faults. Without `places` no rank hangs."""
    chance = random.Random(1)
    starts = [
        {"attempt": attempt, "rank": chance.randrange(RANKS), "at": at, "do": "kill"}
        for attempt, at in enumerate(places)
    ]
    kills = _kills_at_steps(num_kills, len(starts), chance)
    hang = len(starts) + len(kills)
    stop = {"attempt": hang, "rank": 1, "at": "step", "step": 57, "do": "stop"}
    block = {"attempt": hang + 1, "rank": 1, "at": "input", "step": 58, "do": "block"}
    run = Run(prepared_clicks, tmp_path, LIMITS if places else PATIENT, warm=not places)
    hangs = [stop, block] if places else []
    code, output = run.finish(*starts, *kills, *hangs, ranks=RANKS, max_restarts=9)
    assert code == DONE, output
    assert f"{hang + len(hangs)} of 9 times" in output
    assert len(KILLED.findall(output)) >= hang
    _same_as(run, uninterrupted)
    assert left_over(run) == []
    fault(
        1,
        f"{num_kills} of {num_kills}: weights, optimizer and random state, validation metrics bitwise equal to the uninterrupted run, each row once",
        count=num_kills,
        seed=1,
    )
    if not places:
        return
    where = f"{len(places)} of {len(places)} ({', '.join(places)})"
    fault(3, f"{where}: the ranks came back by themselves and ended the same", count=len(places), seed=1)
    found_s = [
        _check_hang(run, hang, "sends no heartbeat; its process is stopped by a signal, killed", rank_that_tells=0)
    ]
    found_s.append(_check_hang(run, hang + 1, "waiting for input", rank_that_tells=1))
    assert "_read_from_a_disk_that_does_not_answer" in run.log(hang + 1, 1)
    fault(
        21,
        f"2 of 2 found, {HANG_S} s allowed: the later after {max(found_s):.0f} s; rank, step and stack named",
        count=2,
    )


def _check_hang(run: Run, attempt: int, text: str, rank_that_tells: int) -> float:
    """Seconds without progress when it was found."""
    log = run.log(attempt, rank_that_tells)
    assert text in log and "stacks of rank" in log, log
    assert re.search(r"rank 1 .*at step [45]\d", log), log  # its last pulse may be some steps old
    found = re.search(r"hang: .* for ([\d.]+) s", log)
    assert found is not None, log
    return float(found[1])


@pytest.mark.campaign
def test_twenty_kills_in_one_run(
    uninterrupted: Run, prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    kills = _kills_at_steps(20, 0, random.Random(20 + SEED))
    run = Run(prepared_clicks, tmp_path, PATIENT)
    code, output = run.finish(*kills, ranks=RANKS, max_restarts=25)
    assert code == DONE, output
    assert "20 of 25 times" in output
    _same_as(run, uninterrupted)
    fault(
        1,
        "20 of 20: weights, optimizer and random state, validation metrics bitwise equal, each row once in the committed lineage",
        count=20,
        seed=20 + SEED,
    )


@pytest.mark.campaign
def test_an_agent_that_is_killed_while_its_ranks_start_leaves_no_orphan(
    prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    """Ranks need about a second to import what lets the kernel end them with their agent."""
    generator, tries = random.Random(5 + SEED), 12 * SCALE
    for number in range(tries):
        run = Run(prepared_clicks, tmp_path / str(number))
        agent = run.start({"rank": 1, "at": "step", "step": 1, "do": "block"}, ranks=RANKS)
        while len(processes_of(run)) < 1 + RANKS and agent.poll() is None:
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, 1.0))
        agent.kill()
        agent.communicate(timeout=300)
        assert left_over(run) == [], number
    fault(4, "killed within the first second of its ranks: no orphan", count=tries, seed=5 + SEED)


@pytest.mark.campaign
def test_an_agent_that_is_killed_leaves_no_orphan_and_its_folder_free(
    uninterrupted: Run, prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    run = Run(prepared_clicks, tmp_path, PATIENT)
    agent = run.start({"rank": 1, "at": "step", "step": 25, "do": "block"}, ranks=RANKS)
    step_20 = run.run_dir / "checkpoints" / "step_00000020"
    while not step_20.exists() and agent.poll() is None:
        time.sleep(0.05)
    assert len(processes_of(run)) == 1 + RANKS
    agent.kill()
    agent.communicate(timeout=300)
    assert left_over(run) == []
    code, output = run.finish(ranks=RANKS)
    assert code == DONE, output
    _same_as(run, uninterrupted)
    fault(
        4, "no orphan; the same command took the folder over at once, went on from step 20 and ended the same", count=1
    )
