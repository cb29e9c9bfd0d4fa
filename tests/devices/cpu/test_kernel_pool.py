"""Kernels go over all samples once, on torch's own threads, and say what failed there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from pipeline.devices.cpu import kernel_pool
from pipeline.devices.cpu.kernel_pool import on_all_threads
from pipeline.devices.cpu.openmp_regions import is_there

TASKS = "/proc/self/task"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@njit(nogil=True)
def count(counts, begins, number, begin, end):
    for sample in range(begin, end):
        counts[sample] += number
        begins[sample] = begin


@njit(nogil=True)
def are_positive(numbers, begin, end):
    for sample in range(begin, end):
        if numbers[sample] < 0:
            return False
        if numbers[sample] == 0:
            raise ValueError("a number is 0")
    return True


def _counted(num_samples: int, *limits: int) -> tuple[Any, Any]:
    counts, begins = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.uint64)
    assert on_all_threads(count, (counts, begins, 1), num_samples, *limits)
    return counts, begins


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [0, 1, 255, 256, 1000, 5000])
def test_each_sample_is_computed_once(num_threads: int, num_samples: int) -> None:
    torch.set_num_threads(num_threads)
    counts, begins = _counted(num_samples)
    assert counts.tolist() == [1] * num_samples
    if is_there():
        assert len(set(begins)) == min(num_samples // 256 or 1, 2 * num_threads if num_threads > 1 else 1, num_samples)


def test_shares_are_as_many_as_the_caller_says() -> None:
    torch.set_num_threads(2)
    counts, begins = _counted(26, 1, 26)
    assert counts.tolist() == [1] * 26
    assert begins.tolist() == (list(range(26)) if is_there() else [0] * 26)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_one_false_is_the_answer_and_an_exception_is_raised(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    numbers = np.ones(5000)
    assert on_all_threads(are_positive, (numbers,), 5000)
    numbers[4321] = -1
    assert not on_all_threads(are_positive, (numbers,), 5000)
    numbers[1234] = 0
    with pytest.raises((RuntimeError, ValueError), match=r"are_positive failed|a number is 0"):
        on_all_threads(are_positive, (numbers,), 5000)


@pytest.mark.skipif(not (is_there() and os.path.isdir(TASKS)), reason="threads cannot be counted here")
def test_the_threads_are_torchs_own() -> None:
    torch.set_num_threads(3)
    numbers = torch.ones(1 << 20)
    numbers.add_(1)  # starts torch's threads, unless an earlier test has
    before = set(os.listdir(TASKS))
    counts, _ = _counted(1 << 20)
    numbers.add_(1)
    assert set(os.listdir(TASKS)) == before
    assert counts.sum() == 1 << 20


def test_several_threads_may_call_kernels_at_once() -> None:
    torch.set_num_threads(2)
    found: list[int] = []
    callers = [threading.Thread(target=lambda: found.append(int(_counted(50_000)[0].sum()))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [50_000] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_waits_for_no_thread_that_it_lacks() -> None:
    """It would wait forever for its parent's threads: libgomp does."""
    torch.set_num_threads(2)
    _counted(5000)
    assert not kernel_pool._is_forked
    child = os.fork()
    if not child:
        alone = set(_counted(5000)[1])
        os._exit(7 if alone == {0} and kernel_pool._is_forked else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
