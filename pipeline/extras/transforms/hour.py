"""The hour of a time, 0 to 23."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.transforms._times import PartOfTime

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "hour")
@dataclass(frozen=True)
class Hour(PartOfTime):
    def part(self, times: pa.Array) -> pa.Array:
        import pyarrow.compute as pc

        return pc.hour(times)
