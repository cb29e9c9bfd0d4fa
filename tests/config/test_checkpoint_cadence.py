"""What a job's checkpoint options promise."""

from __future__ import annotations

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import CheckpointConfig
from pipeline.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "minutes", "steps"),
    [
        ([], 10.0, 0),
        (["checkpoint=default"], 10.0, 0),
        (["checkpoint=at_end"], None, 0),
        (["checkpoint=every_1000_steps"], None, 1000),
        (["checkpoint.save_every_minutes=2.5", "checkpoint.save_every_steps=7"], 2.5, 7),
        (["checkpoint.save_every_minutes=null"], None, 0),
    ],
)
def test_a_job_saves_every_ten_minutes_unless_it_chooses_another_cadence(
    overrides: list[str], minutes: float | None, steps: int
) -> None:
    checkpoint = load_config(TrainJob, ["experiment=quickstart", *overrides]).checkpoint
    assert (checkpoint.save_every_minutes, checkpoint.save_every_steps) == (minutes, steps)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_a_cadence_of_no_time_is_refused(minutes: float) -> None:
    with pytest.raises(ConfigError, match="save_every_minutes"):
        CheckpointConfig(save_every_minutes=minutes)
