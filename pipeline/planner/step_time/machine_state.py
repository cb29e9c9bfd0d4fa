"""Set what a machine's cores and memory did while a job was measured beside what they did while kernels were.

A rented machine's rate changes within minutes, for others share its processor. Four small operations are timed before and after each job
(training.calibration.probes): what they took then, beside what they took at the median of the calibration's jobs, is how much slower the machine
was. A prediction that is given no rate is for what the calibration's jobs met.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from pipeline.planner.step_time.measurements import Measurements

PRODUCT, MEMORY, HOST, WAKE = "product", "memory", "host", "wake"
PROBES = (PRODUCT, MEMORY, HOST, WAKE)
MOST = 3.0  # times slower, or faster: beyond, a probe was disturbed by itself
# By which probe an amount of work goes (step_time.predict.step_amounts), by the end of its name; all others by HOST
PROBE_OF = {
    "products": PRODUCT,
    "moves": MEMORY,
    "lookup": MEMORY,
    "update": MEMORY,
    "handed": WAKE,
}


def calibrated_probes(measurements: Measurements, setup: str) -> dict[str, float]:
    """Microseconds, by probe, at the median of the setup's jobs; empty for calibrations of before there were any."""
    beside = [row.beside for row in measurements.of("job", setup)]
    names = dict.fromkeys(name for probes in beside for name in probes)
    return {name: median(probes[name] for probes in beside if name in probes) for name in names}


def slowdown(beside: Mapping[str, float], calibrated: Mapping[str, float]) -> dict[str, float]:
    """By probe how many times as long it took `beside` as when it was calibrated; 1 where either is not known."""
    ratios = {
        name: beside[name] / calibrated[name] if name in beside and name in calibrated else 1.0 for name in PROBES
    }
    return {name: max(1 / MOST, min(MOST, ratio)) for name, ratio in ratios.items()}


def at_rate(amounts: Mapping[str, float], slower: Mapping[str, float]) -> dict[str, float]:
    """Amounts of a step, counts and microseconds alike, as they weigh on a machine that is so many times slower."""
    return {name: value * slower[_probe_of(name)] for name, value in amounts.items()}


def _probe_of(name: str) -> str:
    return PROBE_OF.get(name.rpartition("_")[2], HOST) if not name.startswith("comms") else HOST
