"""The day of the week of a time, 0 on Monday to 6 on Sunday."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.transforms._times import PartOfTime

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "weekday")
@dataclass(frozen=True)
class Weekday(PartOfTime):
    def part(self, times: pa.Array) -> pa.Array:
        import pyarrow.compute as pc

        return pc.day_of_week(times)
