"""A run that goes on says so: from which step, by how many ranks it was trained, and which attempt this is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_to_yaml
from pipeline.training.hooks.record import RunRecord


def test_a_resume_names_step_ranks_steps_to_go_and_attempt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    caplog.set_level("INFO", logger="pipeline.train")
    job = load_config(TrainJob, ["experiment=quickstart", "run_dir=runs/clicks"])
    record, state = RunRecord(job, parts()), SimpleNamespace(step=20, total_steps=90, is_over=False)
    record.on_restore(
        state, {"config": yaml.safe_load(job_to_yaml(job)), "world_size": 4, "libraries": {"torch": "2.13.0"}}
    )
    record.on_fit_start(state)
    (line,) = caplog.records
    assert line.getMessage() == (
        "runs/clicks resumed from step 20, trained on 4 rank(s) with torch 2.13.0; 70 steps to go; attempt 2.1"
    )
    assert line.fields == {"event": "resumed", "step": 20, "steps_to_go": 70, "saved_by_ranks": 4}


def test_a_run_that_begins_says_nothing_of_the_kind(caplog: pytest.LogCaptureFixture) -> None:
    record = RunRecord(TrainJob(name="clicks"), parts())
    record.on_fit_start(SimpleNamespace(step=0, total_steps=90, is_over=False))
    assert caplog.records == []


def parts() -> Any:
    return SimpleNamespace(writer=None, plan=None)
