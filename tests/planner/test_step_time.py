"""What a step takes: its layers recorded by shape, its tables by frequency, its kernels by measurements that are made up here."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.published_steps import compare, read_runs
from pipeline.config.training import DenseOptimizerConfig
from pipeline.devices.cpu.kernels.layer_intrinsics import multiplies_bf16
from pipeline.planner.constraints import TableOptimizer
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest
from pipeline.planner.step_time.clocks import COMMS, COMPUTE, HOST, Clocks
from pipeline.planner.step_time.frequency import bands_of, block_of, even, power_law, touched
from pipeline.planner.step_time.host import COUNTS, FACTORS, PLAIN, fit_host
from pipeline.planner.step_time.kernels import MeasuredTimes
from pipeline.planner.step_time.measurements import (
    Conditions,
    Machine,
    Measurement,
    Measurements,
    differences,
    disturbances,
    median_and_spread,
    read_measurements,
    unsteadiness,
)
from pipeline.planner.step_time.predict import NORM_PASSES, StepPrediction, predict_step
from pipeline.planner.step_time.products import Multiplied
from pipeline.planner.step_time.rates import Rates
from pipeline.planner.step_time.record import DensePart, Inputs, record_dense
from pipeline.planner.step_time.table_work import TableSample, TableShape, TableWork, table_place, work_of
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.sharding import make_sharders
from pipeline.training.assembly import build_task
from pipeline.training.calibration.jobs import NUM_DENSE, SmallJob
from pipeline.training.predicted_step import step_request
from tests.support.messages import mentions, names

MACHINE = Machine("a CPU", 2, 23.5, 32.0)
QUIET = Conditions("2026-11-23T09:00:00+00:00", 200.0, 0.05, 0.02, 1000.0)
JOB = SmallJob(
    rows=[100, 1000, 10000],
    pooling=[1, 1, 4],
    dim=16,
    batch=64,
    model={"dense_arch_layer_sizes": [32, 16], "over_arch_layer_sizes": [24, 1]},
)


def measured(rows: list[Measurement], **conditions: float) -> Measurements:
    values = {**vars(QUIET), **conditions}
    return Measurements("made_up", MACHINE, {"torch": "2.13.0"}, Conditions(**values), rows)  # type: ignore[arg-type]


def layers_of(job: SmallJob, in_place_rows: bool = True, on_cpu: bool = False) -> DensePart:
    task = build_task(job.resolve(1), "cpu")
    pooling = [float(count) for count in job.pooling]
    inputs = Inputs(job.batch, NUM_DENSE, job.names, pooling, in_place_rows=in_place_rows, on_cpu=on_cpu)
    return record_dense(task, inputs, DenseOptimizerConfig(name=job.dense))


def products_of(part: DensePart) -> int:
    """Multiplications of all matrix products."""
    total = 0
    for operation in part.operations:
        if operation.name in ("mm", "addmm", "bmm"):
            first, second = operation.shapes
            total += math.prod(first) * second[-1]
    return total


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


def test_our_kernels_are_recorded_in_the_place_of_what_torch_would_run() -> None:
    recorded = [operation.name for operation in layers_of(JOB).operations]
    assert recorded.count("take") == 2 and "index_put_" not in recorded
    assert recorded.count("optimizer:adam") == 1


def test_on_cpu_ranks_one_kernel_multiplies_rows_and_picks_their_pairs() -> None:
    part, features = layers_of(JOB, on_cpu=True), len(JOB.rows) + 1
    names = [operation.name for operation in part.operations]
    assert not {"bmm", "take"} & set(names) and names.count("dots") == names.count("dots_backward") == 1
    kernel = next(operation for operation in part.operations if operation.name == "dots")
    assert kernel.shapes == ((JOB.batch, features, JOB.dim), (JOB.batch, JOB.dim + features * (features - 1) // 2))
    wide = layers_of(
        replace(JOB, dim=32, precision="bf16", model=JOB.model | {"dense_arch_layer_sizes": [32]}), on_cpu=True
    )
    names = [operation.name for operation in wide.operations]
    if multiplies_bf16():
        assert "bmm" not in names and names.count("dots") == names.count("dots_backward") == 1
    else:
        assert names.count("bmm") == 2  # oneDNN's


def test_kernels_of_dots_have_rates_of_their_own_and_torch_s_where_none_were_measured() -> None:
    table = made_up_machine("1x1")
    plain = MeasuredTimes(table, "1x1")
    kernel = next(operation for operation in layers_of(JOB, on_cpu=True).operations if operation.name == "dots")
    features = len(JOB.rows) + 1
    as_products = plain.product_us(Multiplied("bmm", "nt", "fp32"), JOB.batch, features, features, JOB.dim)
    assert plain.operation_us(kernel) == pytest.approx(as_products)
    rows = [
        Measurement("dots", "1x1", {"dtype": "fp32", "b": batch, "m": 4, "k": 16}, 5 + 0.5 * batch)
        for batch in (16, 64, 256, 1024)
    ]
    own = MeasuredTimes(replace(table, rows=[*table.rows, *rows]), "1x1")
    assert own.operation_us(kernel) == pytest.approx(5 + 0.5 * JOB.batch, rel=0.02)


def test_each_tensor_of_an_optimizer_has_a_part_of_its_time() -> None:
    rows = [
        Measurement("optimizer", "1x1", {"name": "adam", "numbers": size, "tensors": tensors}, 10 + 3 * tensors)
        for size in (1000, 10**6)
        for tensors in (4, 16)
    ]
    times = MeasuredTimes(measured(rows), "1x1")
    assert times.operation_us(layers_of(JOB).operations[-1]) == pytest.approx(10 + 3 * 8)


def test_a_lookup_is_handed_to_threads_from_as_many_samples_as_are_worth_one() -> None:
    def work(samples: int, pooling: float = 1.0) -> TableWork:
        return work_of([TableShape(power_law(1000, 2.0), 16, pooling, samples)] * 3, "adam", 4, 2)

    few, many = work(500), work(512)
    assert few.lookup["other_threads"] == 0 and few.lookup["ids"] == 1500
    assert many.lookup["other_threads"] == 1 and many.lookup["ids"] == 768
    assert [work(samples, 8.0).lookup["other_threads"] for samples in (63, 64)] == [0, 1]
    assert many.update["other_threads"] == 1 and many.update["ids"] == pytest.approx(1024)
    assert "rows_by_adam" in many.update and many.lookup["waited_rows_1"] == 0


def test_rows_that_lie_where_products_want_them_are_not_copied() -> None:
    def copied(in_place: bool) -> int:
        part = layers_of(JOB, in_place)
        return sum(operation.out_bytes for operation in part.of("forward") if operation.name == "copy_")

    assert copied(in_place=False) > copied(in_place=True)


def test_bf16_layers_are_recorded_in_bf16() -> None:
    part = layers_of(replace(JOB, precision="bf16"))
    assert {each.dtype for each in part.operations if each.name in ("addmm", "bmm")} == {"bf16"}


def casts_of_weights(job: SmallJob) -> int:
    """Recorded for one CPU rank that trains the job, of its layers' matrices."""
    resolved = job.resolve(1)
    operations = step_request(resolved, None, resolve_hardware(resolved.job.hardware, 1), 1).dense.operations
    sizes = [NUM_DENSE, *job.model["dense_arch_layer_sizes"]]
    matrices = {(out, into) for into, out in itertools.pairwise(sizes)}
    return sum(each.name == "_to_copy" and each.shapes[0] in matrices for each in operations)


def test_weights_with_copies_in_bf16_are_recorded_without_casts() -> None:
    job = replace(
        JOB, precision="bf16", model=JOB.model | {"dense_arch_layer_sizes": [1024, 512, 16]}
    )  # no narrow stack
    assert casts_of_weights(job) == 0
    assert casts_of_weights(replace(job, dense="sgd")) == 2 * 3  # each there, and its gradient back


@pytest.mark.parametrize("skew", [1.0, 3.0])
def test_expected_distinct_rows_are_those_of_drawn_batches(skew: float) -> None:
    rows, ids, generator = 5000, 4000, np.random.default_rng(0)
    (found,) = touched([power_law(rows, skew)], [ids], [64], 0)
    drawn = [len(np.unique((generator.random(ids) ** skew * rows).astype(int))) for _ in range(5)]
    assert found.distinct == pytest.approx(np.mean(drawn), rel=0.03)
    assert found.missed_ids == pytest.approx(ids)


def test_a_cache_keeps_the_rows_that_are_looked_up_most_of_all_tables() -> None:
    hot, cold = power_law(1000, 4.0), even(1000)
    alone = [touched([bands], [1000], [64], 100 * 64)[0] for bands in (hot, cold)]
    assert alone[0].missed_ids < 500 < alone[1].missed_ids == pytest.approx(900)
    (first, second) = touched([hot, cold], [1000, 1000], [64, 64], 100 * 64)
    assert first.missed_ids == pytest.approx(alone[0].missed_ids, rel=0.05) and second.missed_ids == 1000
    roomy = touched([hot, cold], [1000, 1000], [64, 64], 2000 * 64)
    assert [each.missed_ids for each in roomy] == [0.0, 0.0]


def test_the_first_rows_as_a_table_of_their_own_have_the_hottest_ids_share() -> None:
    bands = power_law(1000, 4.0)
    first, share = block_of(bands, 0, 250)
    assert share == pytest.approx(0.25**0.25, rel=0.02) and first.rows.sum() == pytest.approx(250)
    assert block_of(bands, 0, 250, by_row=False)[1] == pytest.approx(0.25)
    assert bands_of(None, 10).rows.tolist() == [10.0]


def test_rates_are_found_again_in_times_that_were_made_of_them() -> None:
    draw, rows = random.Random(0), []
    for _ in range(40):
        shape = TableShape(
            power_law(draw.randrange(100, 10**6), 2.0), draw.choice((8, 16, 64)), 1.0, draw.randrange(50, 4000)
        )
        work = work_of([shape], "rowwise_adagrad", 4, 1).lookup
        rows.append((work, 5 + 0.01 * work["ids"] + 0.001 * work["missed_bytes_4"]))
    rates = Rates.fit(*zip(*rows, strict=True), table_place)
    assert rates.error < 0.001 and rates.rates["missed_bytes_4"] == pytest.approx(0.001, rel=0.01)
    assert rates.us(work) == pytest.approx(rows[-1][1], rel=0.01)


def test_a_size_between_two_measured_ones_takes_what_lies_between() -> None:
    rows = [
        Measurement("add", "1x1", {"dtype": "fp32", "bytes": size}, us) for size, us in ((1000, 1.0), (100_000, 10.0))
    ]
    times = MeasuredTimes(measured(rows), "1x1")
    operation = next(each for each in layers_of(JOB).operations if each.name == "add")
    between = times.operation_us(operation)
    moved = operation.in_bytes + operation.out_bytes
    assert between == pytest.approx(math.exp(math.log(10) * math.log(moved / 1000) / math.log(100)), rel=0.01)
    with pytest.raises(ConfigError, match=names("2x1 1x1 setups=[2x1]")):
        MeasuredTimes(measured(rows), "2x1")


def test_what_no_kernel_has_is_learnt_from_whole_steps() -> None:
    draw, rows = random.Random(1), []
    for _ in range(12):
        amounts = {name: draw.uniform(50, 3000) for name in (*COUNTS, *FACTORS)} | {"constant": 1.0}
        us = 200 + 2 * amounts["operations"] + 20 * amounts["multiplied"] + sum(amounts[name] for name in FACTORS)
        rows.append(Measurement("job", "1x1", {**amounts}, us))
    model = fit_host(rows)
    assert model.error < 0.03 and model.rates["operations"] == pytest.approx(2, rel=0.15)
    assert fit_host([]) == PLAIN


def test_a_table_of_measurements_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = measured([Measurement("add", "1x1", {"dtype": "fp32", "bytes": 1000}, 1.5, 0.01)])
    (tmp_path / "made_up.json").write_text(written.to_json())
    assert read_measurements(str(tmp_path / "made_up.json")) == written
    with pytest.raises(ConfigError, match=names("absent.json python -m pipeline calibrate")):
        read_measurements(str(tmp_path / "absent.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=names("other.json format")):
        read_measurements(str(tmp_path / "other.json"))


def test_another_machine_another_version_and_a_busy_machine_are_told_with_numbers() -> None:
    table = measured([])
    assert differences(table, MACHINE, {"torch": "2.13.0"}) == [] == disturbances(table)
    lines = differences(table, Machine("another CPU", 64, 256.0, 256.0), {"torch": "2.14.0"})
    assert mentions(lines, "2 64 23.5 256 2.13.0 2.14.0") and len(lines) == 4
    assert mentions(disturbances(measured([], busy_cores=0.8)), "0.80 2 cores 0.20")
    assert mentions(disturbances(measured([], noise=0.4)), "1000 us 40 % 15 %")
    assert disturbances(measured([], noise=0.12)) == [] and mentions(
        unsteadiness(measured([], noise=0.12)), "12 % 10 %"
    )
    assert [unsteadiness(measured([], noise=noise)) for noise in (0.09, 0.4)] == ["", ""]  # steady, and told already
    for slowed, percent in ((1.6, "23 %"), (1.1, "")):  # of every other job's pass over memory
        jobs = [
            Measurement("job", "1x1", {}, 1.0, 0.0, {"memory": 110.0 * (slowed if i % 2 else 1.0)}) for i in range(8)
        ]
        assert percent in unsteadiness(measured(jobs)) and bool(unsteadiness(measured(jobs))) == bool(percent)


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
    cpu.communicate("rows", 5.0, after=0.0, blocks=True)
    assert cpu.end_ms == 6.0


def test_median_and_half_the_distance_of_the_quartiles() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(1 / 3))


def made_up_machine(setup: str) -> Measurements:
    """Of which everything takes a time in proportion to what it moves, or multiplies."""
    rows = [
        Measurement("gemm", setup, {"dtype": "fp32", "layout": layout, "m": m, "n": n, "k": k}, 1 + m * n * k / 1e5)
        for layout in ("nt", "nn", "tn")
        for m, n, k in ((16, 16, 16), (64, 64, 64), (64, 512, 512), (512, 64, 16), (13, 64, 64), (64, 24, 30))
    ]
    rows += [
        Measurement(
            "bmm", setup, {"dtype": "fp32", "layout": layout, "b": 64, "m": n, "n": n, "k": 16}, 1 + 64 * n * n / 1e3
        )
        for layout in ("nt", "nn")
        for n in (4, 8, 16)
    ]
    rows += [Measurement("add", setup, {"dtype": "fp32", "bytes": 1000 * size}, 1.0 * size) for size in (1, 1000)]
    rows += [
        Measurement("optimizer", setup, {"name": "adam", "numbers": size, "tensors": 8}, size / 1e3)
        for size in (1000, 10**6)
    ]
    for kind in ("lookup", "update"):
        for samples in (16, 64, 512, 4096):
            sample = json.dumps(asdict(TableSample([1000], 16, [1], samples, 1.0)))
            shape = {"optimizer": "rowwise_adagrad", "number_bytes": 4, "sample": sample}
            rows.append(Measurement(kind, setup, {**shape}, samples / 10))
    for kind in ("shared_all_to_all", "shared_all_reduce", "gloo_all_to_all", "gloo_reduce_scatter", "gloo_all_gather"):
        slow = 10 if kind.startswith("gloo") else 1
        rows += [
            Measurement(kind, setup, {"bytes": size, "ranks": 2}, slow * (20 + size / 1e3)) for size in (512, 10**6)
        ]
    return measured(rows)


def step_on(world_size: int, sharding: str | None = None, **changes: Any) -> StepPrediction:
    job = replace(JOB, sharding=sharding, **changes)
    resolved = job.resolve(world_size)
    hardware = resolve_hardware(resolved.job.hardware, world_size)
    request = PlanRequest(
        resolved.plain_tables, build_task(resolved, "cpu"), make_sharders(resolved.job.comms), hardware,
        TableOptimizer(job.sparse, 0.0), job.batch,
    )  # fmt: skip
    record = make_plan(replace(resolved.job.planner, kind="torchrec"), request)
    return predict_step(step_request(resolved, record, hardware, 1), made_up_machine(f"{world_size}x1"))


def test_a_step_is_the_sum_of_its_parts_where_one_clock_has_all_the_work() -> None:
    step = step_on(1)
    assert step.step_ms == pytest.approx(sum(step.parts.values())) and step.step_ms > 0
    assert step.samples_per_s == pytest.approx(JOB.batch / step.step_ms * 1e3)
    assert step.exposed_comms_ms == 0 and "made_up" in step.source


def test_twice_the_batch_takes_longer_and_less_for_each_sample() -> None:
    small, large = step_on(1), step_on(1, batch=2 * JOB.batch)
    assert small.step_ms < large.step_ms and small.samples_per_s < large.samples_per_s


def test_tables_by_rows_go_through_gloo_and_whole_ones_through_shared_memory() -> None:
    whole, rows = step_on(2, "table_wise"), step_on(2, "row_wise")
    assert 0 < whole.parts["rows exchange"] < rows.parts["rows exchange"]
    assert rows.step_ms > whole.step_ms


def test_batch_norms_exchange_their_statistics_where_there_are_several_ranks() -> None:
    def step(ranks: int, batch_norm: bool) -> StepPrediction:
        model = {"hidden_layer_sizes": [32, 16], "batch_norm": batch_norm}
        return step_on(ranks, "table_wise", kind="deepfm", model=model)

    plain, norms = step(2, False), step(2, True)
    assert plain.parts["norms exchange"] == step(1, True).parts["norms exchange"] == 0.0
    # Two messages of 20 us and more for each of two layers, through shared memory.
    assert 0.08 < norms.parts["norms exchange"] < norms.step_ms - plain.step_ms
    assert norms.amounts["operations"] > step(1, True).amounts["operations"] + 2 * 2 * NORM_PASSES


def test_a_data_sheet_is_said_to_be_one_and_must_say_its_peak() -> None:
    resolved = JOB.resolve(1)
    hardware = resolve_hardware(replace(resolved.job.hardware, tflops_fp32=0.1, tflops_bf16=0.2), 1)
    request = PlanRequest(
        resolved.plain_tables, build_task(resolved, "cpu"), make_sharders(resolved.job.comms), hardware,
        TableOptimizer(JOB.sparse, 0.0), JOB.batch,
    )  # fmt: skip
    record = make_plan(replace(resolved.job.planner, kind="torchrec"), request)
    step = step_request(resolved, record, hardware, 1)
    assert mentions(predict_step(step).source, "data sheet 75 % 79 %")
    with pytest.raises(ConfigError, match=names("tflops_fp32 hardware.tflops_fp32 python -m pipeline calibrate")):
        predict_step(replace(step, hardware=replace(hardware, tflops_fp32=None)))


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
    assert found.outlook.limit == "host"  # without the host's time these were 3 to 14 times too fast
    without = compare(replace(run, words=[*run.words, "hardware.issue_us=0"]), seconds=1.0)
    assert without.ratio > 2.0
