"""Prefetcher: order, errors, and threads that end when nobody reads any more."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from pipeline.data.read.prefetch import Prefetcher

THREAD = "test-prefetch"


def prefetcher(source: Generator[int, None, None], depth: int = 3) -> Prefetcher[int]:
    return Prefetcher(source, depth, THREAD, lambda seconds: None)


def count_to(last: int, made: list[int] | None = None, pause: float = 0.0) -> Generator[int, None, None]:
    for number in range(last):
        time.sleep(pause)
        if made is not None:
            made.append(number)
        yield number


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def comes_true(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def wait_until_threads_end() -> bool:
    return comes_true(lambda: not threads())


def test_items_arrive_in_order_and_then_the_iterator_ends() -> None:
    iterator = prefetcher(count_to(100))
    assert list(iterator) == list(range(100))
    assert list(iterator) == []
    assert wait_until_threads_end()


def test_no_more_is_read_ahead_than_the_depth() -> None:
    made: list[int] = []
    iterator = prefetcher(count_to(100, made), depth=3)
    assert next(iterator) == 0
    assert comes_true(lambda: len(made) >= 5)
    time.sleep(0.1)
    assert made == [0, 1, 2, 3, 4]  # one handed out, three in the queue, one waiting for room
    iterator.close()


def test_an_error_arrives_after_the_items_before_it_and_stays() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise OSError("disk on fire")

    iterator = prefetcher(failing())
    assert next(iterator) == 1
    for _ in range(2):
        with pytest.raises(OSError):
            next(iterator)
    assert wait_until_threads_end()


def test_close_ends_the_thread_and_the_source_and_drops_what_was_read_ahead() -> None:
    ended = threading.Event()

    def source() -> Generator[int, None, None]:
        try:
            yield from count_to(100)
        finally:
            ended.set()

    iterator = prefetcher(source())
    assert next(iterator) == 0
    iterator.close()
    assert ended.is_set()
    assert not threads()
    assert list(iterator) == []
    iterator.close()


def test_a_dropped_iterator_ends_its_thread() -> None:
    iterator = prefetcher(count_to(100))
    next(iterator)
    del iterator
    gc.collect()
    assert wait_until_threads_end()


def test_only_waiting_is_counted_as_waiting() -> None:
    waits: list[float] = []
    iterator = Prefetcher(count_to(8, pause=0.05), 2, THREAD, waits.append)
    assert len(list(iterator)) == 8
    assert 0.2 < sum(waits) < 4.0
    waits.clear()
    iterator = Prefetcher(count_to(3), 5, THREAD, waits.append)
    assert wait_until_threads_end()  # all is read
    assert list(iterator) == [0, 1, 2]
    assert sum(waits) < 0.2


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "1 / 0"])
def test_a_process_with_an_open_iterator_exits_at_once(tmp_path: Path, ending: str) -> None:
    script = f"""
import itertools
from pipeline.data.read.prefetch import Prefetcher
iterator = Prefetcher((n for n in itertools.count()), 4, "{THREAD}", lambda seconds: None)
next(iterator)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == {"pass": 0, "1 / 0": 1}.get(ending, 3)
    assert "ZeroDivisionError" in done.stderr if ending == "1 / 0" else done.stderr == ""
