"""Limit a number to a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import NUMBER, TransformConfig
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "clip")
@dataclass(frozen=True)
class Clip(TransformConfig):
    """The number, but at least `low` and at most `high`."""

    output = NUMBER

    column: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ConfigError("clip needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"clip has low={self.low:g} above high={self.high:g}")

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: NUMBER}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        return pa.array(np.clip(columns[0].to_numpy(zero_copy_only=False), low, high), from_pandas=True)
