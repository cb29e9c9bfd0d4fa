"""Map a function over many items in threads.

Results keep the order of the items, and only a few results are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ordered(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, in_flight: int | None = None
) -> Iterator[Result]:
    """Map like map(). At most `in_flight` items (default: threads + 1) are started and not yet
    yielded.

    Threads help if `function` releases the GIL, as numpy, pyarrow, hashlib and file reads do.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= (in_flight or threads + 1):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
