"""Predict a run's overheads, spread over the steps: the time that steps wait for the input reader and for saves."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.extras.step_time.calibration import Speeds

READER, SAVES = "input reader", "saves"


@dataclass(frozen=True)
class Saves:
    """Hold bytes of a save. rank_bytes: of the fullest rank; disk_bytes: of all ranks that write to one disk."""

    every_steps: int
    every_minutes: float | None
    asynchronous: bool
    rank_bytes: float
    disk_bytes: float


@dataclass(frozen=True)
class Overheads:
    """Hold by name the milliseconds that each step waits, and one line about each for the user."""

    waits_ms: dict[str, float]
    lines: list[str]

    @property
    def ms(self) -> float:
        return sum(self.waits_ms.values())


def overheads_of(
    step_ms: float, reading_ms: float, speeds: Speeds, saves: Saves, *, reader_has_core: bool
) -> Overheads:
    """Return the overheads. reading_ms: time to read a batch. reader_has_core: the host has a core
    for the reader of each rank.
    """
    waits = {READER: max(0.0, reading_ms - step_ms) if reader_has_core else reading_ms}
    where = "on a core of its own" if reader_has_core else "on the cores that compute"
    lines = [f"input       {reading_ms:.3g} ms for a batch {where}: a step waits {waits[READER]:.3g} ms"]
    step_ms += waits[READER]
    intervals = [saves.every_steps * step_ms / 1e3] if saves.every_steps else []
    intervals += [60 * saves.every_minutes] if saves.every_minutes else []
    if intervals:
        interval = min(intervals)
        writing_s = saves.disk_bytes / (speeds.write_gb_per_s * 1e9)
        if saves.asynchronous:  # a copy is made; the next save waits for the previous one
            copying_s = saves.rank_bytes / (speeds.copy_gb_per_s * 1e9 / 2)
            seconds = copying_s + max(0.0, writing_s - interval)
        else:
            seconds = writing_s
        waits[SAVES] = seconds / interval * step_ms
        how = "copied, then written meanwhile" if saves.asynchronous else "written"
        lines.append(
            f"saves       every {interval:.4g} s: {saves.rank_bytes / 2**30:.3g} GiB of a rank {how}, "
            f"{seconds:.3g} s of waiting each, {100 * seconds / (interval + seconds):.2g} % of the time"
        )
    return Overheads(waits, lines)
