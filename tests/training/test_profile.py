"""profile=steps:2-3 records those steps, and a table says where their time went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from pipeline.config.training import profiled_steps
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.hooks.profile import StepProfiler, kind_of

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


@pytest.mark.parametrize("text", ["50-60", "steps:60-50", "steps:0-3", "steps:a-b", "steps:5", "epochs:1-2"])
def test_a_range_that_says_nothing_is_refused(text: str) -> None:
    assert profiled_steps("steps:50-60") == (50, 60)
    with pytest.raises(ConfigError, match="profile=steps:50-60"):
        profiled_steps(text)
