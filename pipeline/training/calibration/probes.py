"""Time small operations beside a job, to know how fast the machine was then (planner.step_time.machine_state)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pipeline.planner.step_time.machine_state import HOST, MEMORY, PRODUCT, WAKE
from pipeline.planner.step_time.measurements import median_and_spread

PRODUCT_SIZE = 256  # three such matrices fit a core's own cache
MEMORY_NUMBERS = 2 << 20  # 8 MiB: beyond a core's own cache
HOST_OPERATIONS = 100
REPEATS = 5
ASLEEP_S = 5e-3  # a thread that has waited for so long sleeps (pipeline.devices.cpu.process)
SHARED_NUMBERS = 1 << 16  # of which torch gives a second thread half


class Probes:
    """Of one rank; on one thread each, but for the time that a second one takes to wake up."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16)
        self._numbers = torch.zeros(MEMORY_NUMBERS)
        self._shared = torch.zeros(SHARED_NUMBERS)
        self._few = torch.zeros(16)

    def measure(self) -> dict[str, float]:
        """Microseconds, by probe."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            times = {
                PRODUCT: self._time(lambda: self._square @ self._square),
                MEMORY: self._time(lambda: self._numbers.add_(1)),
                HOST: self._time(self._run_operations),
            }
        finally:
            torch.set_num_threads(threads)
        if threads > 1:
            times[WAKE] = self._time(lambda: self._shared.add_(1), ASLEEP_S)
        return {name: 1e6 * seconds for name, seconds in times.items() if seconds}

    def _run_operations(self) -> None:
        for _ in range(HOST_OPERATIONS):
            self._few.add_(1)

    def _time(self, call: Callable[[], object], idle_s: float = 0.0) -> float:
        times = []
        for _ in range(REPEATS + 1):
            time.sleep(idle_s)
            started = self._clock()
            call()
            times.append(self._clock() - started)
        return median_and_spread(times[1:])[0]
