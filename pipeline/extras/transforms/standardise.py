"""Standardize a number: (x - mean) / std, both of the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.transforms import NUMBER, TransformConfig

if TYPE_CHECKING:
    import pyarrow as pa


@register("transform", "standardise")
@dataclass(frozen=True)
class Standardise(TransformConfig):
    """The standardized number. Missing values become the mean."""

    output = NUMBER

    column: str

    @property
    def inputs(self) -> dict[str, str]:
        return {self.column: NUMBER}

    @property
    def is_standardized(self) -> bool:
        return True

    def apply(self, columns: Sequence[pa.Array]) -> pa.Array:
        return columns[0]
