"""Compile parts of kernels, and define the copies and sums that several kernels use.

A compiled function calls a part for each row or number. Python never calls a part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numba import njit

import pipeline
from pipeline.devices.cpu.kernels.llvm_intrinsics import (
    LANES,
    add_row_1,
    move_1,
    move_16,
    sum_rows_1,
    sum_rows_2,
    sum_rows_4,
)

Kernel = TypeVar("Kernel", bound=Callable[..., object])
U = np.uint64
L = U(LANES)


# Nothing that Python calls. Wrappers for calls from Python take long to compile.
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def part(*, fastmath: bool = False) -> Callable[[Kernel], Kernel]:
    """Compile a function that allocates nothing. It is inlined, and references to its arrays are
    not counted.

    Numba would count a reference to each array by two atomic operations, which took three quarters
    of the time of a table update.
    """
    settings: dict[str, Any] = {"nogil": True, "cache": True, "forceinline": True, "_nrt": False, "fastmath": fastmath}
    settings["error_model"] = "numpy"  # x / 0 is inf or NaN, as for FBGEMM; Numba would raise ZeroDivisionError
    compiled: Callable[[Kernel], Kernel] = njit(**settings, **NO_WRAPPERS)
    return compiled


def remove_stale_kernels(package: Path) -> None:
    """Let kernels be compiled again that inline a part of a source that has changed since.

    Numba compares a compiled kernel with the file of the kernel alone.
    """
    changed = max(source.stat().st_mtime_ns for source in Path(__file__).parent.glob("*.py"))
    for index in package.rglob("__pycache__/*.nbi"):
        with contextlib.suppress(OSError):  # another process removed it, or nobody may
            if index.stat().st_mtime_ns < changed:
                index.unlink()


remove_stale_kernels(Path(pipeline.__path__[0]))


@part()
def move(source, at, into, position, count):  # type: ignore[no-untyped-def]
    """Set into[position : position + count] = source[at : at + count], rounded to `into`'s type."""
    if count < L:
        for k in range(count):
            move_1(source, at + k, into, position + k)
        return
    for k in range(U(0), count - L, L):
        move_16(source, at + k, into, position + k)
    move_16(source, at + count - L, into, position + count - L)  # overlaps the previous move


@part()
def sum_rows(table, begin, dim, order, factors, is_scaled, first, last, sums):  # type: ignore[no-untyped-def]
    """Set sums[:dim] to the sum over e in first..last of table[begin + order[e] * dim:][:dim].

    Each row is multiplied by factors[e] if is_scaled. The fp32 sums stay in registers for 64
    columns at a time, then 32, 16 and 1. The rows are added in order. uint16 is fp16.
    """
    k = U(0)
    while k + U(4) * L <= dim:
        sum_rows_4(table, begin, dim, order, factors, is_scaled, first, last, k, sums)
        k += U(4) * L
    if k + U(2) * L <= dim:
        sum_rows_2(table, begin, dim, order, factors, is_scaled, first, last, k, sums)
        k += U(2) * L
    if k + L <= dim:
        sum_rows_1(table, begin, dim, order, factors, is_scaled, first, last, k, sums)
        k += L
    for number in range(k, dim):
        sums[number] = np.float32(0)
        for entry in range(first, last):
            factor = factors[entry] if is_scaled else np.float32(1)
            add_row_1(sums, number, table, begin + U(order[entry]) * dim + number, factor)
