"""Keep Python's garbage collector from scanning objects that stay alive."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_while_importing() -> Iterator[None]:
    """Exclude the objects that imports make from garbage collection, because hundreds of thousands
    of them stay alive.

    If everything was imported before, nothing is excluded, because garbage that existed then could
    never be freed.
    """
    was_on, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if len(sys.modules) > num_modules:
                gc.freeze()
                atexit.register(_free_at_exit)
            gc.enable()


def _free_at_exit() -> None:
    """Let the last collection see all objects, because nanobind, which DuckDB uses, prints every
    object that it cannot reach.
    """
    if "duckdb" in sys.modules:
        gc.unfreeze()
