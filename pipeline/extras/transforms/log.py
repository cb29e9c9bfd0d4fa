"""The logarithm of a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import NUMBER, TransformConfig

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "log")
@dataclass(frozen=True)
class Log(TransformConfig):
    """log(1 + x), with 0 for negative x. `signed`: sign(x) log(1 + |x|)."""

    output = NUMBER

    column: str
    signed: bool = False

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: NUMBER}

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        values = columns[0].to_numpy(zero_copy_only=False)
        logs = np.copysign(np.log1p(np.abs(values)), values) if self.signed else np.log1p(np.maximum(values, 0.0))
        return pa.array(logs, from_pandas=True)
