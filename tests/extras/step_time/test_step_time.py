"""Predicted steps: layers recorded by shape, amounts of work, fitted rates, three clocks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published_steps import compare, read_runs
from pipeline.extras.step_time.calibration import (
    Calibration,
    Machine,
    differences,
    disturbances,
    median_and_spread,
    read_calibration,
    step_us,
)
from pipeline.extras.step_time.clocks import COMMS, COMPUTE, HOST, Clocks
from pipeline.extras.step_time.plan_forecast import record_layers, step_request
from pipeline.extras.step_time.prediction import StepPrediction, predict_step
from pipeline.extras.step_time.rates import DEFAULT_RATES, fit_rates
from pipeline.extras.step_time.recorded_layers import DensePart
from pipeline.extras.step_time.work import AMOUNTS, placements_of
from pipeline.runtime.errors import ConfigError
from tests.extras.step_time.step_jobs import CPU, MACHINE, NUM_DENSE, SmallStep, calibrated, planned
from tests.support.messages import mentions, names

JOB = SmallStep()


def layers_of(job: SmallStep) -> DensePart:
    return record_layers(*job.request(1))


def products_of(part: DensePart) -> int:
    """Multiplications of all matrix products."""
    found = [each for each in part.operations if each.name in ("mm", "addmm", "bmm")]
    return sum(math.prod(each.product_sizes) for each in found)


def step_on(world_size: int, job: SmallStep = JOB, calibration: Calibration | None = None) -> StepPrediction:
    resolved, request = job.request(world_size)
    made = step_request(resolved, request, planned(resolved, request), 1)
    return predict_step(made, calibration or calibrated(f"{world_size}x1"))


def test_the_products_of_a_recorded_dlrm_are_those_of_its_layers() -> None:
    part, features = layers_of(JOB), len(JOB.rows) + 1
    layers = [(NUM_DENSE, 32), (32, 16), (16 + features * (features - 1) // 2, 24), (24, 1)]
    forward = sum(JOB.batch * into * out for into, out in layers)
    # A layer's backward is a product for its weights and one for its inputs, which the first layer's are not asked for.
    backward = 2 * forward - JOB.batch * math.prod(layers[0])
    dots = JOB.batch * features * features * JOB.dim
    assert products_of(part) == forward + backward + 2 * dots
    assert part.weight_bytes == 4 * sum(into * out + out for into, out in layers)
    assert {operation.phase for operation in part.operations} == {"forward", "backward", "optimizer"}


def test_bf16_layers_are_recorded_in_bf16() -> None:
    part = layers_of(replace(JOB, precision="bf16"))
    assert {each.dtype for each in part.operations if each.name in ("addmm", "bmm")} == {"bf16"}
    assert sum(each.name == "optimizer:adam" for each in part.operations) == 1


def test_rates_fitted_to_some_jobs_predict_others_on_a_machine_three_times_as_slow() -> None:
    draw = np.random.default_rng(0)
    jobs = [{name: float(draw.uniform(0, 1) / DEFAULT_RATES[name]) for name in AMOUNTS} for _ in range(60)]
    wanted = {name: 3 * rate for name, rate in DEFAULT_RATES.items()} | {"calls": 12.0, "ids": 0.02}
    times = [step_us(job, wanted) for job in jobs]
    found = fit_rates(jobs[:30], times[:30], DEFAULT_RATES)
    assert [step_us(job, found) for job in jobs[30:]] == pytest.approx(times[30:], rel=0.05)
    assert found["calls"] > 3 * DEFAULT_RATES["calls"]
    assert fit_rates(jobs[:1], times[:1], wanted) == pytest.approx(wanted, rel=0.01)  # a job says little


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = calibrated("1x1")
    (tmp_path / "made_up.json").write_text(written.to_json())
    assert read_calibration(str(tmp_path / "made_up.json")) == written
    with pytest.raises(ConfigError, match=names("absent.json python -m pipeline calibrate")):
        read_calibration(str(tmp_path / "absent.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=names("other.json format")):
        read_calibration(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=names("2x1 1x1 setups=[2x1]")):
        written.rates("2x1")
    assert written.speeds.row_us(30) == pytest.approx(3.0)


def test_another_machine_another_version_and_a_busy_machine_are_reported_with_numbers() -> None:
    table = calibrated("1x1")
    assert differences(table, MACHINE, {"torch": "2.13.0"}) == [] == disturbances(table)
    lines = differences(table, Machine("another CPU", 64, 256.0, 256.0), {"torch": "2.14.0"})
    assert mentions(lines, "2 64 23.5 256 2.13.0 2.14.0") and len(lines) == 4
    assert mentions(disturbances(calibrated("1x1", busy_cores=0.8)), "0.80 2 cores 0.20")
    assert mentions(disturbances(calibrated("1x1", noise=0.4)), "1000 us 40 % 15 %")


def test_a_step_on_a_gpu_takes_as_long_as_its_host_issues_if_that_is_longer() -> None:
    for host_ms, step_ms in ((3.0, 6.0), (9.0, 9.0)):
        gpu = Clocks(host_computes=False)
        gpu.issue("host", host_ms)
        first = gpu.compute("layers", ms=1.0)
        sent = gpu.communicate("rows", 5.0, after=first)
        gpu.compute("more", ms=1.0)
        gpu.wait(sent)
        assert (first, sent, gpu.end_ms) == (1.0, 6.0, step_ms)
        assert {span.clock for span in gpu.spans} == {HOST, COMPUTE, COMMS}
    cpu = Clocks(host_computes=True)
    cpu.compute("layers", ms=1.0)
    cpu.communicate("rows", 5.0)
    assert cpu.end_ms == 6.0


def test_median_and_half_the_distance_of_the_quartiles() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(1 / 3))


def test_a_measured_step_is_the_sum_of_its_amounts_at_their_rates() -> None:
    step = step_on(1)
    assert step.step_ms == pytest.approx(sum(step.parts.values())) and step.step_ms > 0
    assert step.samples_per_s == pytest.approx(JOB.batch / step.step_ms * 1e3)
    assert step.exposed_comms_ms == 0 and "made_up" in step.source
    assert all(ms > 0 for name, ms in step.parts.items() if "exchange" not in name)


def test_twice_the_batch_takes_longer_and_less_for_each_sample() -> None:
    small, large = step_on(1), step_on(1, replace(JOB, batch=2 * JOB.batch))
    assert small.step_ms < large.step_ms and small.samples_per_s < large.samples_per_s


def test_each_kind_of_sharding_has_amounts_of_its_own() -> None:
    found = {}
    for kind in ("table_wise", "row_wise", "data_parallel"):
        resolved, request = replace(JOB, sharding=kind).request(2)
        plan = planned(resolved, request)
        made = step_request(resolved, request, plan, 1)
        found[kind] = made.amounts(placements_of(plan.plan))
    whole, rows, replicated = found.values()
    assert [each["whole_shardings"] for each in found.values()] == [1, 0, 0]
    assert [each["row_shardings"] for each in found.values()] == [0, 1, 0]
    assert [each["replicated_shardings"] for each in found.values()] == [0, 0, 1]
    assert whole["whole_exchange_bytes"] > 0 == rows["whole_exchange_bytes"] and rows["row_exchange_bytes"] > 0
    extra = 4 * JOB.dim * sum(JOB.rows) / 1e6  # of tables that every rank has
    assert replicated["averaged_bytes"] == pytest.approx(whole["averaged_bytes"] + extra)


def test_a_batch_norm_over_several_ranks_counts_its_exchanges() -> None:
    model = {"hidden_layer_sizes": [32, 16], "batch_norm": True}
    part = layers_of(replace(JOB, kind="deepfm", model=model))
    resolved, request = replace(JOB, kind="deepfm", model=model).request(2)
    plan = planned(resolved, request)
    amounts = step_request(resolved, request, plan, 1).amounts(placements_of(plan.plan))
    norms = sum("batch_norm" in each.name for each in part.operations)
    assert amounts["norms"] == norms == 4 and amounts["norm_bytes"] > 0


def test_a_data_sheet_is_called_one_and_must_state_its_peak() -> None:
    resolved, request = JOB.request(1, replace(CPU, tflops_fp32=0.1, tflops_bf16=0.2))
    step = step_request(resolved, request, planned(resolved, request), 1)
    assert mentions(predict_step(step).source, "data sheet 75 % 79 %")
    with pytest.raises(ConfigError, match=names("tflops_fp32 hardware.tflops_fp32 python -m pipeline calibrate")):
        predict_step(replace(step, hardware=replace(step.hardware, tflops_fp32=None)))


@pytest.mark.parametrize(
    "name",
    [
        "torchrec_dlrm, DLRM, SGD, batch 256",
        pytest.param("torchrec_dlrm, DLRM, batch 2,048", marks=pytest.mark.campaign),
        pytest.param("torchrec_dlrm of 2022, DLRM, SGD, batch 8,192", marks=pytest.mark.campaign),
    ],
)
def test_eager_dlrm_by_torchrec_is_predicted_within_a_factor_of_two_of_what_was_published(name: str) -> None:
    run = next(run for run in read_runs() if run.name == name)
    found = compare(run, seconds=1.0)
    assert 0.5 < found.ratio < 2.0
    assert found.forecast.limit == "host"  # without the host's time these were 3 to 14 times too fast
    without = compare(replace(run, words=[*run.words, "hardware.issue_us=0"]), seconds=1.0)
    assert without.ratio > 2.0
