"""Find times in more than one unit. Seconds in one file and milliseconds in another would be sorted
wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.data.raw.blocks import Source
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger

# Whole numbers that are times from 1990 to 2286 in exactly one unit; dates are read as
# microseconds.
UNITS = {
    "seconds": (6.3e8, 1e10),
    "milliseconds": (6.3e11, 1e13),
    "microseconds": (6.3e14, 1e16),
    "nanoseconds": (6.3e17, 2.0**63),
}
logger = get_logger(__name__)


class StagedTimes(Protocol):
    """Counts of times by unit. num_times: unit -> number of rows with a time in this unit."""

    @property
    def num_times(self) -> dict[str, int]: ...


def count_units(times: np.ndarray) -> dict[str, int]:
    """Count for each unit how many of the times, [rows] int64, look like times in this unit.

    Times that look like no unit are not counted.
    """
    if not len(times):
        return {}
    lowest, highest = times.min(), times.max()
    found = {}
    for unit, (begin, end) in UNITS.items():
        if begin <= lowest and highest < end:
            return {unit: len(times)}
        if lowest < end and begin <= highest and (count := int(((times >= begin) & (times < end)).sum())):
            found[unit] = count
    return found


def check_time_units(config: DataConfig, sources: Sequence[Source], files: Sequence[StagedTimes]) -> None:
    """Warn if a few times are in another unit than the other times.

    Raises:
        DataError: their share is above data.max_quarantined_fraction.
    """
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for source, file in zip(sources, files, strict=True):
        for unit, count in file.num_times.items():
            counts[unit] = counts.get(unit, 0) + count
            first.setdefault(unit, source.path)
    if len(counts) < 2:
        return
    most = max(counts, key=lambda unit: counts[unit])
    total = sum(counts.values())
    listed = ", ".join(
        f"{count:,} look like {unit} since 1970 (first in {first[unit]})" for unit, count in sorted(counts.items())
    )
    text = (
        f"data.columns.timestamp={config.columns.timestamp} holds times in {len(counts)} units: {listed}. Rows would be "
        "sorted and split as if they were one; write all of them in one unit (a date counts as microseconds)"
    )
    if total - counts[most] > config.max_quarantined_fraction * total:
        raise DataError(text)
    logger.warning("%s", text)
