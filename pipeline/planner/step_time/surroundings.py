"""Predict what a run takes beside its steps' own work: waiting for the input reader, and saves spread over the steps between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.planner.step_time.hardware_file import copy_gb_per_s
from pipeline.planner.step_time.measurements import Measurements

READER, SAVES = "input reader", "saves"


@dataclass(frozen=True)
class Speeds:
    """Microseconds of a row decoded on one core, bytes/s written to disk with what ensures that they are there, and bytes/s
    copied in memory. None: not measured."""

    row_us: float | None
    written_per_s: float | None
    copied_per_s: float | None


@dataclass(frozen=True)
class Saves:
    """How often and what is saved. rank_bytes: of the fullest rank; disk_bytes: of all ranks that write to one disk."""

    every_steps: int
    every_minutes: float | None
    asynchronous: bool
    rank_bytes: float
    disk_bytes: float


@dataclass(frozen=True)
class Surroundings:
    """Milliseconds that each step waits, by name, and a line on each for the user."""

    waits_ms: dict[str, float]
    lines: list[str]

    @property
    def ms(self) -> float:
        return sum(self.waits_ms.values())


def speeds_of(measured: Measurements, num_columns: int) -> Speeds:
    """num_columns: of a row, sparse and dense."""
    written = [row for row in measured.rows if row.kind == "disk" and row.shape["what"] == "write"]
    rate = float(written[0].shape["bytes"]) / written[0].us * 1e6 if written else None
    return Speeds(_row_us(measured, num_columns), rate, copy_gb_per_s(measured) * 1e9 / 2 or None)


def _row_us(measured: Measurements, num_columns: int) -> float | None:
    """A line through what rows of some numbers of columns took."""
    rows = [row for row in measured.rows if row.kind == "reader"]
    columns = [float(row.shape["sparse"]) + float(row.shape["dense"]) for row in rows]
    times = [row.us for row in rows]
    if len(set(columns)) < 2:
        return times[0] * num_columns / columns[0] if rows else None
    slope, constant = np.polyfit(columns, times, 1)
    return max(float(slope * num_columns + constant), 0.0)


def around_step(
    step_ms: float, batch_size: int, speeds: Speeds, saves: Saves, *, reader_has_core: bool
) -> Surroundings:
    """reader_has_core: the host has a core for each rank's reader beside those that compute."""
    waits: dict[str, float] = {}
    lines = []
    if speeds.row_us is not None:
        reading = batch_size * speeds.row_us / 1e3
        waits[READER] = max(0.0, reading - step_ms) if reader_has_core else reading
        how = "on a core of its own" if reader_has_core else "on the cores that compute"
        lines.append(
            f"input       {1e6 / speeds.row_us:,.0f} rows/s a rank {how}: {reading:.3g} ms for a batch, of which a step waits {waits[READER]:.3g}"
        )
    if stall := _stall_s(step_ms + waits.get(READER, 0.0), speeds, saves):
        seconds, interval = stall
        waits[SAVES] = seconds / interval * (step_ms + waits.get(READER, 0.0))
        what = "copied, then written meanwhile" if saves.asynchronous else "written"
        lines.append(
            f"saves       every {interval:.4g} s: {saves.rank_bytes / 2**30:.3g} GiB of a rank {what}, {seconds:.3g} s of waiting each, "
            f"{100 * seconds / (interval + seconds):.2g} % of the time"
        )
    return Surroundings(waits, lines)


def _stall_s(step_ms: float, speeds: Speeds, saves: Saves) -> tuple[float, float] | None:
    """Seconds that training waits for a save, and seconds of training between two; None where there are none, or no speed."""
    intervals = [saves.every_steps * step_ms / 1e3] if saves.every_steps else []
    intervals += [60 * saves.every_minutes] if saves.every_minutes else []
    writing = None if speeds.written_per_s is None else saves.disk_bytes / speeds.written_per_s
    if not intervals:
        return None
    interval = min(intervals)
    if not saves.asynchronous:
        return None if writing is None else (writing, interval)
    if speeds.copied_per_s is None:
        return None
    copying = saves.rank_bytes / speeds.copied_per_s
    # The next save waits for the one before it.
    return copying + max(0.0, (writing or 0.0) - interval), interval
