"""Measure the time of a search in CPU seconds of its thread, so that a busy machine finds the same
plan as an idle one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_WAITING = 4.0  # wall seconds per CPU second of the limit, because a search must end anyway


class WorkClock:
    """A limit of `limit_s` CPU seconds and of MAX_WAITING times as many wall seconds."""

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
        """Return wall seconds per CPU second so far, at least 1."""
        cpu_s = self._cpu() - self._cpu_begin
        return max(1.0, self.wall_s / cpu_s) if cpu_s > 0.01 else 1.0

    def has_used(self, share: float = 1.0) -> bool:
        cpu_s = self._cpu() - self._cpu_begin
        return cpu_s > share * self.limit_s or self.wall_s > share * self.limit_s * MAX_WAITING

    @property
    def remaining_s(self) -> float:
        """Return the remaining wall seconds, for a solver that counts these, if the machine stays
        as busy as it was.
        """
        left = (self.limit_s - (self._cpu() - self._cpu_begin)) * min(self.busy, MAX_WAITING)
        return min(left, self.limit_s * MAX_WAITING - self.wall_s)
