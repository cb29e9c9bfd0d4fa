"""The hour of a time, 0 to 23."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import TIME, TransformConfig
from pipeline.data.raw.derive._times import check_time, local_times

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "hour")
@dataclass(frozen=True)
class Hour(TransformConfig):
    """As text, of whole numbers of `unit` since 1970 or of ISO 8601 times, in `timezone`; missing where it is no time."""

    column: str
    unit: str = "s"
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        check_time(self.unit, self.timezone)

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: TIME}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        times = local_times(columns[0], self.unit, self.timezone)
        return pc.hour(times).cast(pa.string())
