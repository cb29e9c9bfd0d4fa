"""The bucket of a number, as a categorical feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import NUMBER, TransformConfig
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "bucketise")
@dataclass(frozen=True)
class Bucketise(TransformConfig):
    """Buckets that start at `edges`, or `quantiles` buckets with equally many training rows, as far
    as ties allow."""

    output = NUMBER

    column: str
    edges: list[float] | None = None
    quantiles: int | None = None

    def __post_init__(self) -> None:
        if (self.edges is None) == (self.quantiles is None):
            raise ConfigError("bucketise needs edges=[...] or quantiles=<number of buckets>, one of them")
        if self.quantiles is not None and self.quantiles < 2:
            raise ConfigError(f"bucketise has quantiles={self.quantiles}: at least 2")
        if self.edges is not None and (not self.edges or any(b <= a for a, b in pairwise(self.edges))):
            raise ConfigError(f"bucketise has edges={self.edges}: give at least one, in ascending order")

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: NUMBER}

    @property
    def num_buckets(self) -> int | None:
        return self.quantiles

    @property
    def boundaries(self) -> list[float] | None:
        return None if self.edges is None else [float(edge) for edge in self.edges]

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        return columns[0]
