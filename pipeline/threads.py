"""Turn a number of threads into a pool that lives as long as the process, for kernels that let go of Python's lock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache


@cache
def thread_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernels")


def wait_briefly() -> None:
    """Let OpenMP's threads (libgomp's) sleep soon after a parallel region. Before torch is imported; a user's own wins.

    By default they spin for milliseconds, on the cores that our kernels' threads want next.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
