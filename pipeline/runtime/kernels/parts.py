"""Compile the parts of kernels: functions that a compiled function calls for each row or number, and that Python never calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def part(*, fastmath: bool = False) -> Callable[[Kernel], Kernel]:
    """njit for a function that allocates nothing. It is inlined, and counts no references to its arrays.

    Numba counts a reference to each array for the time of a call, by two atomic operations: they took three quarters of the time
    of an update of tables, whose parts take up to eight arrays.
    """
    settings: dict[str, Any] = {"nogil": True, "cache": True, "forceinline": True, "_nrt": False, "fastmath": fastmath}
    compiled: Callable[[Kernel], Kernel] = njit(**settings)
    return compiled
