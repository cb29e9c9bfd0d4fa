"""Faults 5, 6, 7: SIGTERM in every phase, a save that outlasts the grace, and the requeue afterwards."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.steps import list_steps
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.process.exit_codes import DONE, REQUEUE
from pipeline.training.train import train
from tests.faults.conftest import FaultRecorder
from tests.faults.runs import TIMEOUT_S, Run, left_over
from tests.support.examples import SEED
from tests.support.messages import mentions
from tests.support.ranks import RankPool

REQUEUED = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
STEPS = 60


def _steps(run: Run) -> list[int]:
    return list_steps(str(run.run_dir / "checkpoints"))


PHASES: dict[str, tuple[dict[str, Any], int | None]] = {  # where SIGTERM comes, and the step that must be saved
    "start-up": ({"at": "load"}, None),
    "training": ({"at": "step", "step": 23}, 23),
    "evaluation": ({"at": "evaluation"}, 20),
}


# Amid training the default suite shows it by tests/training/test_run.py.
@pytest.mark.campaign
def test_sigterm_is_obeyed_in_every_phase(prepared_clicks: str, tmp_path: Path, fault: FaultRecorder) -> None:
    runs = {phase: Run(prepared_clicks, tmp_path / phase) for phase in PHASES}
    started = {phase: runs[phase].start({**PHASES[phase][0], "do": "term"}) for phase in PHASES}
    for phase, (_, saved_after) in PHASES.items():
        output, _ = started[phase].communicate(timeout=TIMEOUT_S)
        assert (started[phase].returncode, "Traceback" in output) == (REQUEUE, False), output
        steps = _steps(runs[phase])
        if saved_after is None:
            assert steps == [] and "nothing had to be saved" in output
        else:
            assert saved_after <= steps[-1] <= saved_after + 2, output
            assert mentions(output, f"SIGTERM {steps[-1]}")
        fault(5, f"{phase}: code 75, {f'saved at step {steps[-1]}' if steps else 'nothing to save'}", count=1)
    run = runs["training"]
    code, output = run.finish(env=REQUEUED)  # the same command, as the scheduler starts it again
    assert code == DONE and mentions(output, f"trained {STEPS}"), output
    assert len(set(run.lineage(1))) == STEPS * 256
    fault(7, "the same command found its run folder and went on from the saved step to the end, each row once", count=1)


@pytest.mark.campaign
def test_sigterm_ends_an_evaluation_that_runs_by_itself(
    small_run: Path, prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    run = Run(prepared_clicks, tmp_path)
    shutil.copytree(small_run, run.run_dir)
    before = sorted(run.run_dir.rglob("*"))
    code, output = run.finish({"at": "evaluation", "do": "term"}, verb="evaluate")
    assert (code, "Traceback" in output) == (REQUEUE, False), output
    assert sorted(run.run_dir.rglob("*")) == before
    fault(5, "pipeline.evaluate: code 75, nothing written", count=1)


@pytest.mark.campaign
def test_sigterm_to_the_agent_reaches_the_scheduler_as_a_requeue_and_a_second_one_is_harmless(
    prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    run = Run(prepared_clicks, tmp_path)
    code, output = run.finish({"rank": 1, "at": "step", "step": 13, "do": "term_agent"}, ranks=2, max_restarts=3)
    assert (code, output) == (REQUEUE, "")
    (*_, newest) = _steps(run)
    assert newest >= 13
    assert left_over(run) == []
    fault(5, "two SIGTERMs to the agent of two ranks: saved, code 75 from the agent, no rank left", count=1)


def _go_on(rank: int, run: Run) -> int:
    return train(load_config(TrainJob, run.words)).step


@pytest.mark.campaign
def test_a_save_slower_than_the_grace_leaves_the_earlier_step_and_a_run_to_go_on(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    run = Run(prepared_clicks, tmp_path, ("trainer.grace_s=10",))
    slow = {"at": "save", "step": 20, "do": "slow"}
    process = run.start(slow)
    while not list((run.run_dir / "checkpoints").glob(".attempt-00000020*")) and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == REQUEUE, output
    assert mentions(output, "trainer.grace_s=10")
    assert _steps(run) == [10]
    assert ranks.run(1, _go_on, run) == [STEPS]
    fault(6, "ended within a grace of 10 s, code 75; step 10 intact, the rerun went on from it", count=1)


@pytest.mark.campaign
def test_twenty_sigterms_in_random_phases(prepared_clicks: str, tmp_path: Path, fault: FaultRecorder) -> None:
    chance = random.Random(5 + SEED)
    run, saved = Run(prepared_clicks, tmp_path), 0
    for _ in range(20):
        done = (_steps(run) or [0])[-1]
        at = chance.choice(["step", "step", "evaluation", "load", "save"])
        step = min(done + chance.randint(1, 3), STEPS - 1)
        planted = {"at": at, "do": "term"} | ({"step": step} if at == "step" else {})
        code, output = run.finish(planted)
        assert code in (REQUEUE, DONE), output
        newest = (_steps(run) or [0])[-1]
        assert newest >= done
        saved += code == DONE or at == "load" or newest >= (step if at == "step" else done)
    code, output = run.finish()
    assert code == DONE, output
    assert len(set(run.lineage(1))) == STEPS * 256
    fault(5, f"{saved} of 20 saved what was trained; every row once in the end", count=20, seed=5 + SEED)
