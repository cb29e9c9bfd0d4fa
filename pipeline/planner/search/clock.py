"""Count the time of a search in CPU seconds of its thread, so that a busy machine ends with the plan of a quiet one."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_WAITING = 4.0  # seconds of the clock for each CPU second of the limit: a search must end all the same


class WorkClock:
    """`limit_s` of CPU, and MAX_WAITING times as much of the clock."""

    def __init__(
        self,
        limit_s: float,
        cpu: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = limit_s
        self._cpu, self._wall = cpu, wall
        self._cpu_begin, self._wall_begin = cpu(), wall()

    @property
    def wall_s(self) -> float:
        return self._wall() - self._wall_begin

    @property
    def busy(self) -> float:
        """Seconds of the clock for each of CPU so far, 1 at least."""
        cpu_s = self._cpu() - self._cpu_begin
        return max(1.0, self.wall_s / cpu_s) if cpu_s > 0.01 else 1.0

    def has_used(self, share: float = 1.0) -> bool:
        cpu_s = self._cpu() - self._cpu_begin
        return cpu_s > share * self.limit_s or self.wall_s > share * self.limit_s * MAX_WAITING

    @property
    def remaining_s(self) -> float:
        """Of the clock, for a solver that counts by that, as busy as the machine has been so far."""
        left = (self.limit_s - (self._cpu() - self._cpu_begin)) * min(self.busy, MAX_WAITING)
        return min(left, self.limit_s * MAX_WAITING - self.wall_s)
