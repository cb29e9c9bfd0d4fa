"""Import modules of compiled kernels where Numba is there to compile them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def kernels(module: str) -> ModuleType | None:
    """The module of this name; None without Numba, with which torch's own operations do the work."""
    try:
        return import_module(module)
    except ImportError:
        return None
