"""The shadow GPU itself: memory, generators, threads and the list of what it changes."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from pipeline.extras import shadow
from tests.gpu.conftest import Gpus

GPU = torch.device("cuda", 0)
MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("needs_shadow")


def _memory(rank: int) -> tuple[int, int, int, str]:
    from pipeline.extras.shadow import memory

    begin = torch.cuda.memory_allocated()
    with memory.phase("build"):
        held = torch.zeros(MIB, device=GPU)
        view = held[5:].view(-1)  # no memory of its own
        during = torch.cuda.memory_allocated() - begin
    del held, view
    after = torch.cuda.memory_allocated() - begin
    shadow.activate(8, total_memory_bytes=begin + MIB)
    try:
        torch.zeros(MIB, device=GPU)
        error = ""
    except torch.OutOfMemoryError as full:
        error = str(full)
    finally:
        shadow.activate(8)
    return during, after, torch.cuda.max_memory_allocated() - begin, error


def test_live_memory_its_peak_and_its_end_are_those_of_tensors(gpus: Gpus) -> None:
    [(during, after, peak, error)], [report] = gpus.run(1, _memory)
    assert (during, after) == (4 * MIB, 0)
    assert peak == 4 * MIB <= report.peak_bytes["build"]
    assert error.startswith("CUDA out of memory. Tried to allocate 0.00 GiB")


def _table_larger_than_this_machine(rank: int) -> tuple[int, float]:
    shadow.activate(8, total_memory_bytes=1 << 42, untouched_above_bytes=MIB)
    try:
        gc.collect()  # what earlier tests in this process have left
        before = torch.cuda.memory_allocated()
        table = torch.zeros(1 << 33, 32, device=GPU)  # 1 TiB
        allocated = torch.cuda.memory_allocated() - before
        table[7] = 1.0
        return allocated, float(table[5:9].sum())
    finally:
        shadow.activate(8)


def test_memory_of_a_large_table_is_reserved_and_not_touched(gpus: Gpus) -> None:
    [(allocated, total)], _ = gpus.run(1, _table_larger_than_this_machine)
    assert allocated >= 1 << 40
    assert total == 32.0


def _generators(rank: int) -> list[bool]:
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device=GPU).cpu()
    on_host = torch.rand(4)
    second = torch.rand(4, device=GPU).cpu()
    torch.cuda.set_rng_state(state)
    again = torch.rand(4, device=GPU).cpu()
    torch.manual_seed(3)
    return [torch.equal(first, again), not torch.equal(first, second), torch.equal(on_host, torch.rand(4))]


def test_a_gpu_draws_from_a_generator_of_its_own(gpus: Gpus) -> None:
    [found], _ = gpus.run(1, _generators)
    assert found == [True, True, True]


def _resized(rank: int) -> tuple[int, list[float]]:
    given = torch.ones(3, device=GPU)
    given.resize_(5)
    given[3:] = 2.0
    return len(given), given.tolist()


def test_a_tensor_may_grow_in_place(gpus: Gpus) -> None:
    [found], _ = gpus.run(1, _resized)
    assert found == (5, [1.0, 1.0, 1.0, 2.0, 2.0])


def _in_a_thread(rank: int) -> tuple[str, int]:
    made = []

    def work() -> None:
        made.append((str(torch.ones(2, device="cuda").device), torch.cuda.current_device()))

    torch.cuda.set_device(3)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return made[0]


def test_a_thread_begins_on_the_first_gpu(gpus: Gpus) -> None:
    [found], _ = gpus.run(1, _in_a_thread)
    assert found == ("cuda:0", 0)


def _patches(rank: int) -> list[str]:
    return [str(each) for each in shadow.patch_list()]


def test_every_change_to_torch_has_a_reason(gpus: Gpus) -> None:
    [listed], _ = gpus.run(1, _patches)
    assert len(listed) > 50
    assert all(": " in line and line.rpartition(": ")[2] for line in listed)
