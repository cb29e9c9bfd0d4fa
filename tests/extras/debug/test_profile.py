"""profile=steps:2-3 records those steps, and a table says where their time went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from pipeline import devices
from pipeline.config.training import profiled_steps
from pipeline.extras.debug.hooks.profile import StepProfiler, kind_of, summarize
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext

CONTEXT = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")


def _work(profiler: StepProfiler, num_steps: int) -> None:
    for number in range(1, num_steps + 1):
        profiler.begin(number)
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        profiler.end(number)


def test_the_named_steps_are_recorded_and_no_others(tmp_path: Path) -> None:
    _work(StepProfiler(2, 3, str(tmp_path), CONTEXT), 5)
    trace = json.loads(gzip.decompress((tmp_path / "rank0.steps_2-3.pt.trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2
    table = (tmp_path / "rank0.steps_2-3.txt").read_text()
    assert "matrix products" in table
    assert "aten::mm" in table


def test_a_run_that_ends_or_starts_within_the_range_records_its_part(tmp_path: Path) -> None:
    profiler = StepProfiler(2, 30, str(tmp_path), CONTEXT)
    _work(profiler, 4)
    profiler.close(4)
    assert (tmp_path / "rank0.steps_2-4.txt").exists()
    never = StepProfiler(20, 30, str(tmp_path / "never"), CONTEXT)
    _work(never, 4)
    never.close(4)
    assert not (tmp_path / "never").exists()


def test_operations_are_sorted_into_what_a_reader_knows() -> None:
    assert kind_of("_PooledBackward") == "tables backward"
    assert kind_of("_Pooled") == "tables forward"
    assert kind_of("c10d::alltoall_base_") == "collectives"
    assert kind_of("All2All_Pooled_Wait") == kind_of("All2All_Pooled_ReqBackward") == "collectives"
    assert kind_of("Optimizer.step#Adam.step") == "optimizer"
    assert kind_of("## forward 3 ##") == "other"


def _event(key: str, device: DeviceType, device_us: float, is_range: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        key=key,
        device_type=device,
        self_device_time_total=device_us,
        self_cpu_time_total=900.0,
        is_user_annotation=is_range,
    )


def test_a_gpus_time_is_that_of_its_kernels_counted_once() -> None:
    """The profiler gives a kernel's time to the operation that launched it too, and to the range of the step."""
    events = [
        _event("aten::mm", DeviceType.CPU, 600.0),
        _event("ampere_sgemm_128x64_tn", DeviceType.CUDA, 600.0),
        _event("nccl:all_to_all", DeviceType.CPU, 200.0),
        _event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", DeviceType.CUDA, 200.0),
        _event("ProfilerStep#3", DeviceType.CUDA, 1000.0, is_range=True),
        _event("## forward ##", DeviceType.CPU, 0.0, is_range=True),
    ]
    recorded: Any = SimpleNamespace(key_averages=lambda: events)
    shares = summarize(recorded, 2, devices.named("cuda"))
    assert [(share.kind, share.ms_a_step) for share in shares] == [("matrix products", 0.3), ("collectives", 0.1)]


@pytest.mark.parametrize("text", ["50-60", "steps:60-50", "steps:0-3", "steps:a-b", "steps:5", "epochs:1-2"])
def test_a_range_that_says_nothing_is_refused(text: str) -> None:
    assert profiled_steps("steps:50-60") == (50, 60)
    with pytest.raises(ConfigError, match="profile=steps:50-60"):
        profiled_steps(text)
