"""Kernels of layers in a predicted step: narrow stacks, whose library multiplies, blocks that are spread or summed, the machine's rate."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pipeline.devices.cpu.kernels.stack import ROWS
from pipeline.devices.cpu.memory import ROOMY_BYTES, kept_bytes
from pipeline.devices.cpu.products import onednn_multiplies_faster
from pipeline.models.layers import stack
from pipeline.planner.step_time import layer_kernels
from pipeline.planner.step_time.by_bytes import bytes_kind
from pipeline.planner.step_time.frequency import even
from pipeline.planner.step_time.host import COUNTS, FACTORS, host_model
from pipeline.planner.step_time.kernels import MeasuredTimes
from pipeline.planner.step_time.layer_kernels import dots_amounts, recorded_amounts, stack_amounts, stack_sizes
from pipeline.planner.step_time.machine_state import HOST, MEMORY, PROBES, PRODUCT, WAKE, at_rate, slowdown
from pipeline.planner.step_time.measurements import Measurement
from pipeline.planner.step_time.predict import _is_handed
from pipeline.planner.step_time.products import Multiplied
from pipeline.planner.step_time.record import Operation
from pipeline.planner.step_time.table_work import TableShape, work_of
from pipeline.training.calibration.probes import Probes
from tests.planner.test_step_time import JOB, NUM_DENSE, layers_of, made_up_machine, measured, step_on

needs_stacks = pytest.mark.skipif(not stack.runs_here(in_bf16=False), reason="this CPU lacks the kernels' instructions")
OVER_ARCH = [16 + 4 * 3 // 2, 24, 1]


@needs_stacks
def test_a_narrow_stack_is_recorded_as_one_kernel_forward_and_one_backward() -> None:
    part = layers_of(JOB, on_cpu=True)
    names = [operation.name for operation in part.operations]
    assert names.count("layer_stack") == names.count("layer_stack_backward") == 2 and not {"mm", "addmm"} & set(names)
    forward = [stack_sizes(each) for each in part.operations if each.name == "layer_stack"]
    assert forward == [([NUM_DENSE, 32, 16], JOB.batch), (OVER_ARCH, JOB.batch)]
    over, dense = (recorded_amounts(each, 1) for each in part.operations if each.name == "layer_stack_backward")
    assert over == stack_amounts(OVER_ARCH, JOB.batch, 1)
    # Nobody asks for the gradient of the dense features.
    assert dense == stack_amounts([NUM_DENSE, 32, 16], JOB.batch, 1, for_inputs=False)


def test_the_work_of_a_stack_is_counted_as_its_kernels_share_it() -> None:
    assert (
        int(ROWS),
        stack.LEAST_GROUP,
        stack.MOST_GROUPS,
    ) == (layer_kernels.BLOCK, layer_kernels.LEAST_GROUP, layer_kernels.MOST_GROUPS)
    one, two = (stack_amounts([13, 64, 1], 2048, threads) for threads in (1, 2))
    assert two["products"] == one["products"] / 2 == 1024 * (13 * 64 + 64 * 16)
    assert one["packed"] == 16 * 64 + 64 * 16 and two["other_threads"] == 1
    assert stack_amounts([13, 64, 1], 128, 2)["other_threads"] == 0  # one block


@needs_stacks
def test_stacks_have_rates_of_their_own_and_those_of_products_where_none_were_measured() -> None:
    table = made_up_machine("1x1")
    kernel = next(each for each in layers_of(JOB, on_cpu=True).operations if each.name == "layer_stack_backward")
    plain, way = MeasuredTimes(table, "1x1"), Multiplied("gemm", "nn", "fp32")
    products = [
        plain.product_us(way._replace(layout=layout), 1, *sizes)
        for into, out in pairwise(OVER_ARCH)
        for layout, sizes in (("tn", (out, into, JOB.batch)), ("nn", (JOB.batch, into, out)))
    ]
    assert plain.operation_us(kernel) == pytest.approx(sum(products))
    rows = [
        Measurement("layer_stack_backward", "1x1", {"dtype": "fp32", "b": batch, "sizes": "22 24 1"}, 5 + 0.5 * batch)
        for batch in (16, 64, 256, 1024)
    ]
    own = MeasuredTimes(replace(table, rows=[*table.rows, *rows]), "1x1")
    assert own.operation_us(kernel) == pytest.approx(5 + 0.5 * JOB.batch, rel=0.05)


@pytest.mark.skipif(not onednn_multiplies_faster(), reason="torch's own products are as fast on this CPU")
def test_products_are_recorded_by_the_library_that_multiplies() -> None:
    wide = replace(JOB, batch=2048, kind="dcnv2", model={"hidden_layer_sizes": [512, 16]})
    operations = layers_of(wide, on_cpu=True).operations
    multiplied = {name: [each for each in operations if each.name == name] for name in ("onednn_mm", "mm", "addmm")}
    assert len(multiplied["onednn_mm"]) >= 3 and {each.layout for each in multiplied["onednn_mm"]} == {"nt", "nn", "tn"}
    for operation in multiplied["onednn_mm"]:
        (rows, inner), (_, columns) = operation.shapes
        assert rows * inner * columns >= 1 << 20
    assert multiplied["addmm"]  # of one output


def test_a_product_takes_what_its_own_library_does() -> None:
    table = made_up_machine("1x1")
    rows = [
        replace(row, us=row.us / 2, shape={**row.shape, "library": "onednn"})
        for row in table.rows
        if row.kind == "gemm"
    ]
    times, way = MeasuredTimes(replace(table, rows=[*table.rows, *rows]), "1x1"), Multiplied("gemm", "nt", "fp32")
    sizes = 1, 64, 512, 512
    by_onednn = times.product_us(way._replace(library="onednn"), *sizes)
    assert by_onednn == pytest.approx(times.product_us(way, *sizes) / 2, rel=0.1)
    alone = MeasuredTimes(table, "1x1")
    assert alone.product_us(way._replace(library="onednn"), *sizes) == alone.product_us(way, *sizes)


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("sum", ((512, 33, 15), (512, 15)), "sum_middle"),
        ("sum", ((512, 64), (1, 64)), "sum_rows"),
        ("sum", ((512, 13, 15), (1, 13, 15)), "sum_rows"),
        ("mul", ((512, 33, 15), (512, 1, 1), (512, 33, 15)), "spread"),
        ("mul", ((512, 33, 15), (512, 33, 15), (512, 33, 15)), "add"),
        ("relu_", ((512, 1, 15), (512, 1, 15)), "inplace"),
    ],
    ids=["middle", "rows", "rows of blocks", "spread", "alike", "in place"],
)
def test_blocks_that_are_spread_or_summed_are_kinds_of_their_own(
    name: str, shapes: tuple[tuple[int, ...], ...], kind: str
) -> None:
    assert bytes_kind(Operation(name, "forward", shapes, 8, 8, "fp32")) == kind


@pytest.mark.parametrize("memory_bytes", [ROOMY_BYTES - 1, ROOMY_BYTES], ids=["little", "much"])
def test_pooled_rows_that_the_c_library_does_not_keep_are_new_pages_each_time(memory_bytes: int) -> None:
    def new_pages(samples: int) -> float:
        return work_of([TableShape(even(100), 128, 1.0, samples)], "sgd", 4, 1, memory_bytes).lookup["new_page_bytes"]

    largest, _ = kept_bytes(memory_bytes)
    assert new_pages(largest // (4 * 128)) == 0.0 and new_pages(largest // (4 * 128) + 1) == largest + 4 * 128


def test_work_weighs_as_much_more_as_its_probe_was_slower() -> None:
    slower = slowdown({PRODUCT: 30.0, MEMORY: 8.0, HOST: 1.0}, {PRODUCT: 20.0, MEMORY: 2.0, HOST: 1.0, WAKE: 5.0})
    assert slower == {PRODUCT: 1.5, MEMORY: 3.0, HOST: 1.0, WAKE: 1.0}  # at most three times
    amounts = {"forward_products": 10.0, "products": 10.0, "lookup": 2.0, "operations": 7.0, "comms_rows": 4.0}
    assert at_rate(amounts, slower) == {**amounts, "forward_products": 15.0, "products": 15.0, "lookup": 6.0}


def _job(setup: str, number: int, probe_us: float = 10.0) -> Measurement:
    amounts = dict.fromkeys((*COUNTS, *FACTORS), 0.0) | {
        "constant": 1.0,
        "operations": 30.0 + 17 * (number % 4),
        "products": 100.0 * 2**number,
    }
    us = 300 + 8 * amounts["operations"] + 1.2 * amounts["products"]
    return Measurement("job", setup, {**amounts}, us, beside=dict.fromkeys(PROBES, probe_us))


def test_jobs_of_other_setups_say_what_few_jobs_of_one_cannot() -> None:
    rows = [_job("1x1", number) for number in range(8)]
    model = host_model(measured([*rows, *(_job("1x2", number) for number in (3, 4, 5))]), "1x2")
    assert model.rates["products"] == pytest.approx(1.2, rel=0.05)
    assert model.rates["operations"] == pytest.approx(8, rel=0.3)


def test_a_probe_that_was_disturbed_beside_a_job_changes_nothing_of_what_is_learnt_from_it() -> None:
    """A job's row is the fastest of its passes; what a probe met before and after it is not what the step met."""
    steady = host_model(measured([_job("1x1", number) for number in range(8)]), "1x1")
    disturbed = [_job("1x1", number, 10.0 + 10.0 * (number % 2)) for number in range(8)]
    assert host_model(measured(disturbed), "1x1") == steady


def test_each_kind_of_sharding_of_a_plan_is_counted_for_it_has_exchanges_of_its_own() -> None:
    assert step_on(2, "table_wise").amounts["shardings"] == 1 and step_on(1).amounts["shardings"] == 0


def test_torch_hands_operations_on_many_numbers_to_other_threads() -> None:
    few, many = (Operation("add", "forward", ((size,),), 4 * size, 4 * size, "fp32") for size in (32_767, 32_768))
    assert [_is_handed(each) for each in (few, many, replace(many, is_view=True))] == [False, True, False]


def test_probes_are_timed_on_one_thread_and_the_threads_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    found = Probes().measure()
    assert torch.get_num_threads() == before and found.keys() <= set(PROBES)
    assert {PRODUCT, MEMORY, HOST} <= found.keys() and all(us > 0 and math.isfinite(us) for us in found.values())


def test_wide_rows_in_bf16_have_products_in_pairs_of_their_own() -> None:
    narrow, wide = (dots_amounts(512, 27, dim, 1, "bf16") for dim in (16, 32))
    assert narrow["products"] == 512 * 28 * 32 * 16 and "pair_products" not in narrow and not narrow["pair_numbers"]
    assert wide["pair_products"] == 512 * 32 * 32 * 32 and "products" not in wide
    assert dots_amounts(512, 27, 32, 1)["products"] == 512 * 28 * 32 * 32
