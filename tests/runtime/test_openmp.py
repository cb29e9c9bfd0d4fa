from __future__ import annotations

import os
import time

import pytest
import torch

from pipeline.runtime.process import openmp
from pipeline.runtime.process.openmp import CALM_PERIODS, CoreWatch, Idlers, choose_spin_count

BUSY, READER, QUIET = 1.0, 0.5, 0.05  # cores that threads wait for: another program, an own reader, nothing


def test_threads_sleep_at_once_while_others_want_the_cores() -> None:
    watch, begun = CoreWatch(), list[int]()
    for cores in (QUIET, READER, READER, BUSY):
        watch.decide(cores, begun.append)
    assert watch.idlers is not None
    first = watch.idlers
    watch.decide(BUSY, begun.append)
    assert watch.idlers is first
    for _ in range(CALM_PERIODS - 1):
        watch.decide(QUIET, begun.append)
    watch.decide(READER, begun.append)  # not calm for long enough
    assert watch.idlers is first
    for _ in range(CALM_PERIODS):
        watch.decide(QUIET, begun.append)
    assert watch.idlers is None
    first.join(30)
    assert not first.is_alive()
    assert begun == [openmp._num_cores() + 1]


def test_one_moment_or_a_reader_of_our_own_changes_nothing() -> None:
    watch = CoreWatch()
    for cores in (QUIET, BUSY, QUIET, READER, READER, READER, QUIET):
        watch.decide(cores, lambda _: pytest.fail("a region was begun"))
    assert watch.idlers is None


def test_idle_threads_come_and_go() -> None:
    start = openmp._region_start()
    if start is None:
        pytest.skip("torch's OpenMP has no GOMP_parallel")
    assert torch.get_num_threads() > 0
    before = _num_threads()
    idlers = Idlers(start)
    idlers.start()
    _wait_for(before + 1 + openmp._num_cores())  # its own, and all but one of the region
    idlers.ended.set()
    _wait_for(before)


def test_many_cores_keep_the_short_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_num_cores", lambda: openmp.MOST_CORES + 1)
    monkeypatch.delenv(openmp.VARIABLE, raising=False)
    choose_spin_count()
    assert os.environ[openmp.VARIABLE] == openmp.SHORT


def test_waiting_is_counted() -> None:
    waited = openmp._waited_s()
    if waited is None:
        pytest.skip("this kernel has no /proc/self/task/*/schedstat")
    assert 0 <= waited < 3600 * len(os.listdir("/proc/self/task"))


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _wait_for(num_threads: int) -> None:
    until = time.monotonic() + 60
    while _num_threads() != num_threads:
        assert time.monotonic() < until, f"{_num_threads()} threads, {num_threads} expected"
        time.sleep(0.01)
