"""Turn a number of threads into a pool that lives as long as the process, for kernels that let go of Python's lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache


@cache
def thread_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernels")
