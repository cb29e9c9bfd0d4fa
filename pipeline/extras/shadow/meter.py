"""Measure the CPU time of a program on shadow GPUs without the time of the shadow's kernels."""

from __future__ import annotations

import time
from typing import Any

import torch

from pipeline.extras.shadow import tensors


class Meter:
    """Counts this process's operations on tensors, and measures this thread's CPU time outside
    these operations.

    The time of entering the shadow is measured on `detach` and subtracted. Backward uses other
    threads unless torch.autograd.set_multithreading_enabled(False).
    """

    def __init__(self) -> None:
        self._run, self._is_inside = tensors.run, False
        self.calls, self._inside_s = 0, 0.0
        tensors.run = self._metered
        self._entering_s = min(self._time_of_entering() for _ in range(20))

    def outside_s(self) -> float:
        """Return the CPU seconds outside operations since the thread began. Subtract two values."""
        return time.thread_time() - self._inside_s - self.calls * self._entering_s

    def _metered(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._is_inside:  # a part of another operation
            return self._run(func, args, kwargs)
        self._is_inside, started = True, time.thread_time()
        try:
            return self._run(func, args, kwargs)
        finally:
            self.calls += 1
            self._inside_s += time.thread_time() - started
            self._is_inside = False

    def _time_of_entering(self, times: int = 500) -> float:
        tensor = torch.zeros(4, device="cuda")
        started, inside = time.thread_time(), self._inside_s
        for _ in range(times):
            tensor.detach()
        return (time.thread_time() - started - (self._inside_s - inside)) / times
