"""Keep Python's garbage collector from walking what will not become garbage."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_while_importing() -> Iterator[None]:
    """Imports make hundreds of thousands of objects that stay: neither these nor later collections look at them.

    Where all was imported before, nothing is set aside: what is garbage then could never be freed.
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
    """nanobind, which DuckDB is bound by, prints every object of its own that the last collection cannot reach."""
    if "duckdb" in sys.modules:
        gc.unfreeze()
