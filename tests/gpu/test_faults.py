"""Faults that a GPU would not report, or elsewhere: each is planted, and the shadow GPU names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.streamable import Pipelineable

from tests.gpu.conftest import BASE, Gpus
from tests.gpu.jobs import train_on_rank

GPU = torch.device("cuda", 0)

pytestmark = pytest.mark.usefixtures("needs_shadow")


def _weights() -> torch.Tensor:
    return torch.ones(4, 4, device=GPU)


# ---- tensors on the wrong device ----


def _operand_of_the_cpu() -> None:
    _weights() * torch.arange(4)


def _rows_by_ids_of_the_cpu() -> None:
    nn.functional.embedding(torch.tensor([1, 2]), _weights())


def _part_of_the_cpu() -> None:
    torch.cat([_weights(), torch.ones(1, 4)])


def _product_with_another_gpu() -> None:
    _weights() @ torch.ones(4, 4, device="cuda:1")


def _index_of_the_gpu_into_a_cpu_tensor() -> None:
    torch.ones(4)[torch.tensor([1], device=GPU)]


def _counter_of_the_cpu() -> None:
    weight = _weights().requires_grad_()
    optimizer = torch.optim.Adam([weight], fused=True)
    optimizer.state[weight] = {"step": torch.tensor(0.0), "exp_avg": _weights(), "exp_avg_sq": _weights()}
    weight.grad = _weights()
    optimizer.step()


def _lookup_of_cpu_ids() -> None:
    from tests.gpu.test_lookups import CPU, _batches, _fused

    ids, offsets, _ = _batches()[0]
    _fused(GPU)(ids.to(CPU), offsets.to(GPU))


def _numpy_of_the_gpu() -> None:
    _weights().numpy()


def _more_gpus_than_there_are() -> None:
    torch.ones(1, device="cuda:8")


def _do(rank: int, plant: Callable[[], None]) -> str:
    try:
        plant()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


WRONG: dict[Callable[[], None], str] = {
    _operand_of_the_cpu: r"two devices, cuda:0 and cpu.* aten::mul",
    _rows_by_ids_of_the_cpu: r"two devices, cuda:0 and cpu.* indices of aten::embedding",
    _part_of_the_cpu: r"two devices, cuda:0 and cpu.* aten::cat",
    _product_with_another_gpu: r"two devices, cuda:1 and cuda:0.* aten::mm",
    _index_of_the_gpu_into_a_cpu_tensor: r"indices should be either on cpu or on the same device",
    _counter_of_the_cpu: r"_fused_adam_: state_steps is on cpu",
    _lookup_of_cpu_ids: r"two devices, cuda:0 and cpu.* indices of fbgemm::",
    _numpy_of_the_gpu: r"can't convert cuda:0 device type tensor to numpy",
    _more_gpus_than_there_are: r"invalid device ordinal: cuda:8, but there are 8",
}


@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_tensor_on_the_wrong_device_is_refused(gpus: Gpus, plant: Callable[[], None]) -> None:
    [error], [report] = gpus.run(1, _do, plant)
    assert re.search(WRONG[plant], error), error
    if "two devices" in error or "state_steps" in error:
        [found] = report.kinds("device")
        assert "test_faults.py" in found.place or "fbgemm_gpu" in found.place or "test_lookups.py" in found.place


def _allowed(rank: int) -> float:
    """What CUDA's kernels do take from the CPU: numbers, and indices."""
    weights = _weights()
    weights[torch.tensor([0, 1])] *= torch.tensor(2.0)
    weights.fill_(torch.tensor(3.0))
    weights[weights > 2] = torch.tensor(1.0)
    weights = torch.where(weights > 0, torch.tensor(1.0), weights)
    torch._foreach_mul_([weights], torch.tensor(2.0))
    return float(weights.sum())


def test_numbers_and_indices_of_the_cpu_are_taken(gpus: Gpus) -> None:
    [total], [report] = gpus.run(1, _allowed)
    assert total == 32.0
    assert report.problems == []


# ---- streams ----


def _in_another_stream(rank: int, waits: bool, records: bool) -> None:
    """A copy in a stream of its own, read in the default stream and freed; then the next copy."""
    copies = torch.cuda.Stream()
    for _ in range(2):
        with torch.cuda.stream(copies):
            batch = torch.ones(8).pin_memory().to(GPU, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(copies)
        if records:
            batch.record_stream(torch.cuda.current_stream())
        batch.sum()
        del batch


def test_a_missing_wait_is_a_race(gpus: Gpus) -> None:
    _, [report] = gpus.run(1, _in_another_stream, False, True)
    [race] = report.problems
    assert race.kind == "race" and race.count == 2
    assert re.search(r"aten::sum .*default stream.* reads .*\[8\].* stream \d+ wrote by aten::_to_copy", race.text)
    assert "test_faults.py" in race.place


def test_a_missing_record_stream_is_a_reuse(gpus: Gpus) -> None:
    _, [report] = gpus.run(1, _in_another_stream, True, False)
    [reuse] = report.problems
    assert reuse.kind == "reuse" and "record_stream is missing" in reuse.text and "aten::sum" in reuse.text


def test_a_wait_and_a_record_are_enough(gpus: Gpus) -> None:
    _, [report] = gpus.run(1, _in_another_stream, True, True)
    assert report.problems == []


def _read_too_early(rank: int, waits: bool) -> None:
    into = torch.zeros(4).pin_memory()
    into.copy_(torch.ones(4, device=GPU), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    into + 1


def test_a_host_that_reads_before_the_copy_is_done_is_found(gpus: Gpus) -> None:
    _, [report] = gpus.run(1, _read_too_early, False)
    [found] = report.problems
    assert found.kind == "host_read" and "test_faults.py" in found.text
    _, [report] = gpus.run(1, _read_too_early, True)
    assert report.problems == []


def _work_that_nobody_waits_for(rank: int, waits: bool) -> None:
    sums = torch.ones(2, device=f"cuda:{rank}")
    work = dist.all_reduce(sums, async_op=True)
    if waits:
        work.wait()
    sums + 1
    work.wait()


def test_a_collective_that_is_not_waited_for_is_a_race(gpus: Gpus) -> None:
    _, reports = gpus.run(2, _work_that_nobody_waits_for, False)
    for report in reports:
        [race] = report.problems
        assert race.kind == "race" and "NCCL's stream" in race.text and "allreduce_" in race.text
    _, reports = gpus.run(2, _work_that_nobody_waits_for, True)
    assert [report.problems for report in reports] == [[], []]


# ---- collectives ----


def _in_another_order(rank: int) -> None:
    ones = torch.ones(2, device=f"cuda:{rank}")
    if rank == 1:
        dist.broadcast(ones, 0)
        dist.all_reduce(ones)
    else:
        dist.all_reduce(ones)
        dist.broadcast(ones, 0)


def _of_other_sizes(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank, device=f"cuda:{rank}"))


def _of_other_types(rank: int) -> None:
    dtype = torch.float32 if rank else torch.float16
    dist.all_reduce(torch.ones(2, dtype=dtype, device=f"cuda:{rank}"))


def _with_other_splits(rank: int) -> None:
    out, into = torch.ones(2, device=f"cuda:{rank}"), torch.ones(3, device=f"cuda:{rank}")
    dist.all_to_all_single(into, out, [1, 2], [1, 1])


@pytest.mark.parametrize(
    ("program", "ops"),
    [
        (_in_another_order, ("allreduce_", "broadcast_")),
        (_of_other_sizes, (r"float32\[2\]", r"float32\[3\]")),
        (_of_other_types, ("float16", "float32")),
        (_with_other_splits, ("alltoall_base_", "alltoall_base_")),
    ],
)
def test_ranks_that_differ_in_a_collective_are_named(gpus: Gpus, program: Any, ops: tuple[str, str]) -> None:
    with pytest.raises(RuntimeError, match=f"ranks differ in a collective.* rank 0: .*{ops[0]}.* rank 1: .*{ops[1]}"):
        gpus.run(2, program)


def _cpu_tensor(rank: int) -> None:
    dist.all_reduce(torch.ones(2))


def test_nccl_takes_no_cpu_tensor(gpus: Gpus) -> None:
    with pytest.raises(RuntimeError, match=r"nccl got a tensor of shape \[2\] on cpu"):
        gpus.run(2, _cpu_tensor)


def _one_rank_stays_away(rank: int) -> None:
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(1, device=f"cuda:{rank}"))
    if rank == 0:
        dist.all_reduce(torch.ones(5, device="cuda:0"), group=group)
    else:
        dist.all_reduce(torch.ones(7, device="cuda:1"))


def test_a_rank_that_never_comes_is_named_with_where_it_is(gpus: Gpus) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"did not arrive at allreduce_\(float32\[5\]\).* rank 1 was last in "
        r"allreduce_\(float32\[7\]\)",
    ):
        gpus.run(2, _one_rank_stays_away)


# ---- the same in the program ----


def _planted(rank: int, words: list[str], plant: str) -> None:
    from pipeline.extras.shadow import streams

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        if plant == "wait":
            context.setattr(streams.Stream, "wait_stream", lambda self, other: None)
        if plant == "item":
            forward = nn.Linear.forward
            context.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 0 * float(x.sum()))
        if plant == "device":
            forward = nn.Linear.forward
            context.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + torch.zeros(len(x), 1))
        train_on_rank(rank, words)


def _words(data: str, folder: Path) -> list[str]:
    sharding = "tables.default.sharding.sharding_types=[table_wise,row_wise]"
    return [*BASE, "experiment=quickstart", "hardware=h100_80gb", sharding, f"data.path={data}", f"run_dir={folder}"]


def test_a_program_without_its_waits_is_full_of_races(gpus: Gpus, prepared_clicks: str, tmp_path: Path) -> None:
    _, [report] = gpus.run(1, _planted, _words(prepared_clicks, tmp_path / "run"), "wait")
    races = report.kinds("race")
    assert races and any("wrote by aten::_to_copy" in race.text for race in races)


class _Rows(Pipelineable):
    """A batch for TorchRec's pipelines."""

    def __init__(self, rows: torch.Tensor, records: bool) -> None:
        self.rows, self.records = rows, records

    def to(self, device: torch.device, non_blocking: bool = False) -> _Rows:
        return _Rows(self.rows.pin_memory().to(device, non_blocking=non_blocking), self.records)

    def record_stream(self, stream: Any) -> None:
        if self.records:
            self.rows.record_stream(stream)


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(batch.rows)
        return out.square().sum(), out.detach()


def _by_torchrecs_pipeline(rank: int, records: bool) -> None:
    from torchrec.distributed.train_pipeline import TrainPipelineBase

    model = _Loss().to(GPU)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), GPU)
    batches = iter([_Rows(torch.ones(3, 4), records) for _ in range(4)])
    for _ in range(4):
        pipeline.progress(batches)


def test_a_batch_that_records_no_stream_is_found_in_torchrecs_pipeline(gpus: Gpus) -> None:
    _, [report] = gpus.run(1, _by_torchrecs_pipeline, False)
    assert report.kinds("reuse") and not report.kinds("race")
    _, [report] = gpus.run(1, _by_torchrecs_pipeline, True)
    assert report.problems == []


def test_an_item_in_the_step_is_counted_at_its_place(gpus: Gpus, prepared_clicks: str, tmp_path: Path) -> None:
    _, [report] = gpus.run(1, _planted, _words(prepared_clicks, tmp_path / "run"), "item")
    places = {place: count for place, count in report.syncs.items() if "test_faults.py" in place}
    assert places and all("_local_scalar_dense" in place for place in places)
    assert sum(places.values()) >= 3 * 6  # in each step, for each layer


def test_a_tensor_without_a_device_in_a_layer_is_named(gpus: Gpus, prepared_clicks: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"two devices, cuda:0 and cpu! \(argument other of aten::add"):
        gpus.run(1, _planted, _words(prepared_clicks, tmp_path / "run"), "device")
