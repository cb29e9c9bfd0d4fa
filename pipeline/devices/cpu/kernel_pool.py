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

LEAST_SHARE = 256  # samples: fewer are not worth a thread
SHARES = 2  # of a thread
ALL_TRUE, NONE_RAISED = 1, 2  # bits of a region's outcome: no call of the kernel returned False, and none raised
_is_forked = False


def can_read(tensor: torch.Tensor) -> bool:
    """Return whether a kernel can read this tensor.

    Not while torch.export, torch.compile or torch.fx traces, and not a fake tensor: numpy sees no numbers there.
    """
    return not torch.compiler.is_compiling() and type(tensor) is torch.Tensor and tensor.device.type == "cpu"


@cache
def kernels(module: str) -> ModuleType | None:
    """The module of this name; None without Numba, with which torch's own operations do the work."""
    try:
        return import_module(module)
    except ImportError:
        return None


def on_all_threads(
    kernel: Callable[..., object],
    arguments: Sequence[Any],
    count: int,
    least_share: int = LEAST_SHARE,
    most_shares: int | None = None,
) -> bool:
    """kernel(*arguments, begin, end) on shares of 0..count, by as many threads as torch has, in any order. The kernel is one of Numba's.

    Each of the `count` (samples, mostly) is to be computed by itself; the number of threads then changes no result. Shares have `least_share`
    or more, and are `most_shares` at most: two a thread unless it is given, for another thread may come late. Returns False where a call
    of the kernel did.

    Raises what a kernel raises; RuntimeError in its place where it has run on several threads.
    """
    threads = 1 if _is_forked else torch.get_num_threads()
    region = _region_of(kernel) if threads > 1 else None
    if region is None:
        return kernel(*arguments, np.uint64(0), np.uint64(count)) is not False
    shares = max(min(SHARES * threads if most_shares is None else most_shares, count // least_share), 1)
    # One thread or all of torch's: OpenMP lets those end that a region of fewer leaves out, and starts them again for the next.
    outcome = region(tuple(arguments), np.uint64(count), np.uint64(shares), np.uint32(threads if shares > 1 else 1))
    if not outcome & NONE_RAISED:
        raise RuntimeError(f"{kernel.__name__} has failed on one of {threads} threads")
    return bool(outcome & ALL_TRUE)


@cache
def _region_of(
    kernel: Callable[..., object],
) -> Callable[[tuple[Any, ...], np.uint64, np.uint64, np.uint32], int] | None:
    from pipeline.devices.cpu import openmp_regions

    return openmp_regions.region_of(kernel) if openmp_regions.is_there() else None


def _forget_threads() -> None:
    """OpenMP's threads are not there in a forked process, where a region would wait for them forever."""
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_forget_threads)
