"""A calibration from end to end, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from pipeline.config.planner import HardwareConfig
from pipeline.extras.calibration.hardware_file import hardware_yaml
from pipeline.extras.calibration.job import CalibrateJob
from pipeline.extras.calibration.jobs import SmallJob, TimedTrainings
from pipeline.extras.calibration.run import calibrate, default_setups
from pipeline.extras.step_time.calibration import TimedJob
from pipeline.extras.step_time.work import AMOUNTS, EXCHANGE_AMOUNTS
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext
from tests.extras.step_time.step_jobs import SPEEDS, calibrated
from tests.support.messages import names
from tests.support.ranks import RankPool


def test_the_hardware_that_is_written_is_a_hardware_config() -> None:
    config = HardwareConfig(**yaml.safe_load(hardware_yaml(calibrated("1x1"), "mine.json")))
    assert (config.name, config.calibration) == ("made_up", "mine.json")
    assert (config.tflops_fp32, config.ddr_gb_per_s) == (SPEEDS.tflops_fp32, SPEEDS.copy_gb_per_s)
    assert (config.intra_host_gb_per_s, config.collective_launch_us) == (1.05, 30.0)


def test_setups_are_one_rank_and_a_rank_a_core() -> None:
    assert default_setups(1) == ["1x1"]
    assert default_setups(2) == ["1x1", "1x2", "2x1"]
    assert default_setups(64) == ["1x1", "1x64", "8x8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"seconds": 1000.0}, "seconds 1000 300"),
        ({"output": "mine.json"}, "mine.json .yaml"),
        ({"name": "my machine"}, "my machine"),
        ({"setups": ["two"]}, "two 2x1"),
        ({"clock": "cpu", "setups": ["2x1"]}, "clock=cpu setups=['2x1']"),
    ],
    ids=["seconds", "output", "name", "setups", "clock"],
)
def test_a_mistake_in_the_job_is_reported_before_anything_is_measured(words: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        CalibrateJob(**words)


def _time_a_job(rank: int) -> TimedJob:
    context = DistributedContext(rank, 1, rank, 1, torch.device("cpu"), "gloo")
    trainings = TimedTrainings(context, 1, by_cpu=False)
    model = {"dense_arch_layer_sizes": [8], "over_arch_layer_sizes": [8, 1]}
    trainings.time(0, SmallJob([20, 30], [1, 2], dim=8, batch=16, model=model))
    return trainings.timed_jobs("1x1")[0]


def test_a_small_job_steps_by_the_trainer_itself_and_has_its_amounts(ranks: RankPool) -> None:
    (found,) = ranks.run(1, _time_a_job)
    assert found.us > 0 and found.setup == "1x1" and found.amounts.keys() == set(AMOUNTS)
    assert (found.amounts["steps"], found.amounts["features"], found.amounts["ids"]) == (1, 2, 16 * 3)
    assert not any(found.amounts[name] for name in EXCHANGE_AMOUNTS)


@pytest.mark.campaign
def test_a_calibration_measures_one_rank_and_two(tmp_path: Path) -> None:
    table = calibrate(CalibrateJob(name="small", seconds=40.0, setups=["1x1", "2x1"], force=True))
    (tmp_path / "small.yaml").write_text(hardware_yaml(table, str(tmp_path / "small.json")))
    assert table.setups == ["1x1", "2x1"] and all(job.us > 0 for job in table.jobs)
    assert table.speeds.exchange_us is not None and table.error("1x1") < 1.0
    assert any(job.amounts["row_shardings"] for job in table.jobs)
