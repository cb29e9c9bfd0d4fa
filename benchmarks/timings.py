"""Summarize what benchmarks of several rounds have timed: the median with its spread, the rate, and ratios to other ways."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Timing:
    """Seconds by the clock over the rounds. `ratios`: of this way's time to that of others, by their names."""

    name: str
    median_s: float
    least_s: float
    most_s: float
    bytes_per_s: float
    cpu_s: float = 0.0
    kernel_s: float = 0.0  # of cpu_s
    ratios: dict[str, float] = field(default_factory=dict)


def timing(name: str, seconds: list[float], num_bytes: float) -> Timing:
    """`num_bytes` are written or read in each round."""
    median = statistics.median(seconds)
    return Timing(name, median, min(seconds), max(seconds), num_bytes / median)
