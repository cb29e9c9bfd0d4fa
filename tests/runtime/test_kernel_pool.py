"""Kernels go over all samples once, by whatever threads there are, and wait for none that has not begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pipeline.runtime.process.kernel_pool import on_all_threads, thread_pool


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [0, 1, 255, 256, 1000, 5000])
def test_each_sample_is_computed_once(num_threads: int, num_samples: int) -> None:
    torch.set_num_threads(num_threads)
    counts = [0] * num_samples

    def kernel(number: int, begin: int, end: int) -> int:
        for sample in range(int(begin), int(end)):
            counts[sample] += number
        return int(end) - int(begin)

    assert sum(on_all_threads(kernel, (1,), num_samples)) == num_samples
    assert counts == [1] * num_samples


def test_a_thread_that_has_not_begun_is_not_waited_for() -> None:
    torch.set_num_threads(2)
    end = threading.Event()
    busy = [thread_pool(2).submit(end.wait) for _ in range(2)]  # all threads of the pool
    try:
        assert sum(on_all_threads(lambda begin, end: int(end - begin), (), 5000)) == 5000
    finally:
        end.set()
    assert all(each.result() for each in busy)


def test_what_a_kernel_raises_on_another_thread_is_raised() -> None:
    torch.set_num_threads(2)
    main, begun = threading.current_thread(), threading.Event()

    def kernel(begin: int, end: int) -> None:
        if threading.current_thread() is main:
            assert begun.wait(60)
        else:
            begun.set()
            raise ValueError("of the other thread")

    with pytest.raises(ValueError, match="of the other thread"):
        on_all_threads(kernel, (), 5000)
