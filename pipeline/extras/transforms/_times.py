"""Read times for the transforms that use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from pipeline.config.transforms import TIME, TransformConfig
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

UNITS = ("s", "ms", "us", "ns")
PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
WHOLE = re.compile(r"-?[0-9]{1,19}", re.ASCII)
# seconds from the year 1 to 1970, and from 1970 to the end of 9999
YEARS = 62_135_596_800, 253_402_300_799


@dataclass(frozen=True)
class PartOfTime(TransformConfig):
    """Base of transforms that return a part of a time as text. A value that is not a time gives a
    missing value.

    Times are whole numbers of `unit` since 1970 or ISO 8601, converted to `timezone`.
    """

    column: str
    unit: str = "s"
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        check_time(self.unit, self.timezone)

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: TIME}

    def part(self, times: pa.Array) -> pa.Array:
        """Return whole numbers from timestamp[s] in local time."""
        raise NotImplementedError(f"{type(self).__name__} has no part()")

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import pyarrow as pa

        return self.part(local_times(columns[0], self.unit, self.timezone)).cast(pa.string())


def check_time(unit: str, timezone: str) -> None:
    """Raise ConfigError for an unknown unit or time zone."""
    if unit not in UNITS:
        raise ConfigError(f"unit={unit!r} is not one of {', '.join(UNITS)}")
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise ConfigError(f"timezone={timezone!r} is unknown: give a name such as UTC or Europe/Rome") from None


def local_times(column: pa.Array, unit: str, timezone: str) -> pa.Array:
    """Return timestamp[s] in `timezone` from whole numbers of `unit` since 1970 or ISO 8601 text.

    Values that are neither are missing. Times without a zone are in UTC.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    seconds = _of_timestamps(column) if pa.types.is_temporal(column.type) else _of_texts(column, unit)
    times = seconds.cast(pa.timestamp("s", "UTC"))
    return pc.local_timestamp(times.cast(pa.timestamp("s", timezone)))


def _of_timestamps(column: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    zone = getattr(column.type, "tz", None)
    return (
        pc.floor_temporal(column.cast(pa.timestamp("us", zone)), unit="second")
        .cast(pa.timestamp("s", zone))
        .cast(pa.int64())
    )


def _of_texts(column: pa.Array, unit: str) -> pa.Array:
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    seconds = pa.array([_seconds(text, unit) for text in column.dictionary.cast(pa.string()).to_pylist()], pa.int64())
    return seconds.take(column.indices)


def _seconds(text: str | None, unit: str) -> int | None:
    from datetime import UTC, datetime

    if text is None:
        return None
    if WHOLE.fullmatch(text):
        seconds = int(text) // PER_SECOND[unit]
    else:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            return None
        aware = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        seconds = int(aware.timestamp() // 1)
    return seconds if -YEARS[0] <= seconds <= YEARS[1] else None
