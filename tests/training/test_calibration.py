"""A calibration from end to end, and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from pipeline.config.jobs.machine import CalibrateJob
from pipeline.config.planner import HardwareConfig
from pipeline.planner.step_time.hardware_file import hardware_yaml
from pipeline.planner.step_time.measurements import Conditions, Machine, Measurement, Measurements
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training import assembly, predicted_step
from pipeline.training.calibration.clock import Bench, fastest
from pipeline.training.calibration.job_steps import JobSteps
from pipeline.training.calibration.jobs import SmallJob
from pipeline.training.calibration.run import calibrate, default_setups
from pipeline.training.predicted_step import record_layers
from tests.planner.test_step_time import made_up_machine
from tests.support.messages import names
from tests.support.ranks import RankPool


def test_the_hardware_that_is_written_is_a_hardware_config() -> None:
    rows = [
        Measurement("gemm", "1x1", {"dtype": "fp32", "layout": "nt", "m": 1000, "n": 1000, "k": 1000}, 20_000.0),
        Measurement("copy", "1x1", {"dtype": "fp32", "bytes": 32 << 20}, 1000.0),
        Measurement("shared_all_to_all", "2x1", {"bytes": 512, "ranks": 2}, 30.0),
        Measurement("shared_all_to_all", "2x1", {"bytes": 2 << 20, "ranks": 2}, 1000.0),
    ]
    conditions = Conditions("2026-11-23T09:00:00+00:00", 200.0, 0.05, 0.02, 1000.0)
    table = Measurements("mine", Machine("a CPU", 2, 23.5, 32.0), {}, conditions, rows)
    config = HardwareConfig(**yaml.safe_load(hardware_yaml(table, "mine.json")))
    assert (config.name, config.calibration, config.tflops_fp32) == ("mine", "mine.json", 0.1)
    assert config.ddr_gb_per_s == pytest.approx(33.6, abs=0.1) and config.collective_launch_us == 30.0
    assert config.intra_host_gb_per_s == pytest.approx(1.05, abs=0.01)


def test_of_several_passes_the_fastest_counts_and_of_collectives_the_mean() -> None:
    def row(kind: str, size: int, us: float) -> Measurement:
        return Measurement(kind, "2x1", {"bytes": size}, us)

    rows = [row("add", 8, 3.0), row("add", 8, 2.0), row("add", 16, 9.0), row("gloo_all_reduce", 8, 2.0)]
    found = fastest([*rows, row("gloo_all_reduce", 8, 4.0), row("reader", 1, 5.0)])
    # An add of 16 bytes was met in one pass alone.
    assert [(each.kind, each.us) for each in found] == [("add", 2.0), ("gloo_all_reduce", 3.0), ("reader", 5.0)]


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
    ],
    ids=["seconds", "output", "name", "setups"],
)
def test_a_mistake_in_the_job_is_told_before_anything_is_measured(words: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        CalibrateJob(**words)  # type: ignore[arg-type]


def _amounts_of_a_job(rank: int) -> list[dict[str, Any]]:
    bench = Bench("1x1")
    jobs = JobSteps(bench, 0, DistributedContext(rank, 1, rank, 1, torch.device("cpu"), "gloo"))
    job = SmallJob(
        [20, 30], [1, 2], dim=8, batch=16, model={"dense_arch_layer_sizes": [8], "over_arch_layer_sizes": [8, 1]}
    )
    jobs.time(job)
    return [{"us": row.us, **row.shape} for row in jobs.amounts([*bench.rows, *made_up_machine("1x1").rows])]


def test_a_small_job_steps_by_the_trainer_itself_and_says_what_its_kernels_should_take(ranks: RankPool) -> None:
    (found,) = ranks.run(1, _amounts_of_a_job)
    job = found[0]
    assert job["us"] > 0 and json.loads(job["spec"])["batch"] == 16
    assert job["constant"] == 1.0 and job["features"] == 2 and job["multiplied"] == 0
    assert all(job[name] > 0 for name in ("operations", "products", "moves", "lookup", "update"))


@pytest.mark.campaign
def test_a_calibration_measures_every_kind_on_one_rank_and_on_two(tmp_path: Path) -> None:
    table = calibrate(CalibrateJob(name="small", seconds=20.0, setups=["1x1", "2x1"], force=True))
    (tmp_path / "small.yaml").write_text(hardware_yaml(table, str(tmp_path / "small.json")))
    kinds = {setup: {row.kind for row in table.rows if row.setup == setup} for setup in table.setups}
    assert kinds["2x1"] - kinds["1x1"] == {
        *(f"gloo_{name}" for name in ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")),
        "shared_all_to_all",
        "shared_all_reduce",
    }
    assert kinds["1x1"] >= {
        "gemm",
        "bmm",
        "take",
        "lookup",
        "update",
        "optimizer",
        "copy",
        "host",
        "disk",
        "reader",
        "job",
    }
    assert all(row.us > 0 for row in table.rows)


def _recorded_names(rank: int) -> list[str]:
    context = DistributedContext(rank, 2, rank, 2, torch.device("cpu"), "gloo")
    job = SmallJob([20, 30], [1, 2], dim=8, batch=16, kind="deepfm", model={"hidden_layer_sizes": [8]})
    return [each.name for each in record_layers(job.resolve(context.world_size), 16, 2, "cpu").operations]


def test_a_norm_over_all_ranks_is_recorded_on_ranks_that_train_as_where_a_plan_is_made(ranks: RankPool) -> None:
    """Else a calibration would learn from other operations than a prediction counts."""
    job = SmallJob([20, 30], [1, 2], dim=8, batch=16, kind="deepfm", model={"hidden_layer_sizes": [8]})
    alone = [each.name for each in record_layers(job.resolve(2), 16, 2, "cpu").operations]
    assert "native_batch_norm" in alone
    assert ranks.run(2, _recorded_names) == [alone, alone]


def test_training_says_that_a_plan_goes_by_another_machines_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_another = made_up_machine("2x1")
    path = tmp_path / "measured.json"
    path.write_text(replace(of_another, machine=replace(of_another.machine, cores=999)).to_json())
    monkeypatch.setattr(predicted_step, "step_cost", lambda *_: "cost")
    job = SimpleNamespace(job=SimpleNamespace(hardware=SimpleNamespace(calibration=str(path))))
    with caplog.at_level("WARNING", logger="pipeline"):
        assert assembly._step_cost(cast(Any, job), cast(Any, None)) == "cost"
    assert "planning by the predicted step, but" in caplog.text and "measured on 999 x" in caplog.text
