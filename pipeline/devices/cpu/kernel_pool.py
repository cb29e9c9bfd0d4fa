"""Import compiled kernels, and divide their work among torch's threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from pipeline.devices.cpu.kernels import ALL_TRUE, NONE_RAISED

MIN_SHARE = 256  # samples; a smaller share does not pay for a thread
SHARES = 2  # per thread
_is_forked = False


def can_read(tensor: torch.Tensor) -> bool:
    """Return whether a kernel can read this tensor: it must not be a traced or fake tensor."""
    return not torch.compiler.is_compiling() and type(tensor) is torch.Tensor and tensor.device.type == "cpu"


@cache
def kernels(module: str) -> ModuleType | None:
    """Return the kernels' module, or None without Numba; callers then use torch's operations."""
    try:
        return import_module(module)
    except ImportError:
        return None


def on_all_threads(
    kernel: Callable[..., object],
    arguments: Sequence[Any],
    count: int,
    least_share: int = MIN_SHARE,
    most_shares: int | None = None,
) -> bool:
    """Run kernel(*arguments, begin, end) on shares of 0..count on torch's threads, in any order.

    kernel: a function that Numba compiled. Items are independent, so threads change no result. A
    share has at least `least_share` items. most_shares: two per thread by default, because a thread
    may start late. Returns False if any call returned False. Raises the kernel's exception, or
    RuntimeError if the kernel ran on several threads.
    """
    threads = 1 if _is_forked else torch.get_num_threads()
    region = _region_of(kernel) if threads > 1 else None
    if region is None:
        return kernel(*arguments, np.uint64(0), np.uint64(count)) is not False
    shares = max(min(SHARES * threads if most_shares is None else most_shares, count // least_share), 1)
    # Use one thread or all of torch's threads. For a region with fewer threads, OpenMP ends the
    # unused threads and starts them again for the next region.
    outcome = region(tuple(arguments), np.uint64(count), np.uint64(shares), np.uint32(threads if shares > 1 else 1))
    if not outcome & NONE_RAISED:
        raise RuntimeError(f"{kernel.__name__} failed on one of {threads} threads")
    return bool(outcome & ALL_TRUE)


@cache
def _region_of(
    kernel: Callable[..., object],
) -> Callable[[tuple[Any, ...], np.uint64, np.uint64, np.uint32], int] | None:
    from pipeline.devices.cpu import openmp_regions

    return openmp_regions.region_of(kernel) if openmp_regions.is_there() else None


def _forget_threads() -> None:
    """Forget OpenMP's threads. A forked process does not have them, so its regions would wait for them forever."""
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_forget_threads)
