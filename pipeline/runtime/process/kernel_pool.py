"""Keep one pool of threads for as long as the process lives, for kernels that release Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

LEAST_SHARE = 256  # samples: fewer are not worth a thread
SHARES = 2  # of a thread
Recorder = Callable[[str, Sequence[torch.Tensor]], None]
_recorder: Recorder | None = None
_recorded: Collection[str] = ()


@cache
def thread_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernels")


def on_all_threads(
    kernel: Callable[..., Any], arguments: Sequence[Any], num_samples: int, least_share: int = LEAST_SHARE
) -> list[Any]:
    """What kernel(*arguments, begin, end) returns on shares of the samples, on as many threads as torch has, in any order.

    Each sample is to be computed by itself; their number then changes no result. Threads take one share after the other: another thread
    takes a while to wake, in which this one goes on, and one that has not begun is not waited for.
    """
    threads = torch.get_num_threads()
    shares = min(threads * SHARES if threads > 1 else 1, max(num_samples // least_share, 1))
    bounds = [np.uint64(num_samples * share // shares) for share in range(shares + 1)]
    remaining = iter(list(pairwise(bounds)))  # next() is one step of the interpreter

    def work() -> list[Any]:
        return [kernel(*arguments, *bound) for bound in remaining]

    others = [thread_pool(threads).submit(work) for _ in range(min(threads, shares) - 1)]
    found = work()
    for other in others:
        if not other.cancel():
            found += other.result()
    return found


@contextmanager
def recording(recorder: Recorder, kernels: Collection[str]) -> Iterator[None]:
    """Inside, these kernels are given to the recorder with their tensors where they are called on fake tensors."""
    global _recorder, _recorded
    before = _recorder, _recorded
    _recorder, _recorded = recorder, kernels
    try:
        yield
    finally:
        _recorder, _recorded = before


def is_recording() -> bool:
    return _recorder is not None


def is_recorded(kernel: str) -> bool:
    return _recorder is not None and kernel in _recorded


def record(name: str, *tensors: torch.Tensor) -> None:
    """In place of a kernel's call, where it is_recorded()."""
    assert _recorder is not None
    _recorder(name, tensors)
